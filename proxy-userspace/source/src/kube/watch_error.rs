//! EventType can go wrong between us and an API server, in words for people, and when to try again.
//!
//! The one rule: one line that names what was asked, what came back, and what would help.

use std::{error::Error, fmt, time::Duration};

use http::{StatusCode, header::RETRY_AFTER};
use kube::core::Status;
use tokio::time::Instant;

/// Why a list or a watch ended before its time.
#[derive(Debug)]
pub(super) struct WatchError {
    pub(super) kind: ErrorKind,
    /// EventType people are told.
    pub(super) text: String,
    /// How long the server wants to be left alone.
    pub(super) retry_after: Option<Duration>,
}

/// EventType follows from a failure, besides trying again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ErrorKind {
    /// The resource version is too old: everything must be listed again.
    Gone,
    /// The server cannot begin a watch with a list.
    NoStreaming,
    /// The server does not know what is to be left out.
    NoSelector,
    /// Who we are, or how to get there, should be read again.
    Credentials,
    /// Nothing.
    Other,
}

impl WatchError {
    pub(super) fn new(kind: ErrorKind, text: impl Into<String>) -> Self {
        Self { kind, text: text.into(), retry_after: None }
    }

    /// An answer other than 200; `what` is what was asked for, as in `services`.
    pub(super) fn status(what: &str, code: StatusCode, headers: &http::HeaderMap, body: &[u8]) -> Self {
        let status = serde_json::from_slice::<Status>(body).ok();
        let said = match &status {
            Some(status) if !status.message.is_empty() => short(&status.message),
            _ => short(&String::from_utf8_lossy(body)),
        };
        let reason = code.canonical_reason().unwrap_or("");
        let (kind, remedy) = match code {
            StatusCode::GONE => (ErrorKind::Gone, ""),
            StatusCode::UNPROCESSABLE_ENTITY => (ErrorKind::NoStreaming, ""),
            StatusCode::BAD_REQUEST => (ErrorKind::NoSelector, ""),
            StatusCode::UNAUTHORIZED => (
                ErrorKind::Credentials,
                "; the token or certificate is not, or no longer, accepted: renew it, it is read again at each try",
            ),
            StatusCode::FORBIDDEN => (
                ErrorKind::Other,
                "; allow it by a ClusterRole with the verbs list and watch for services, endpointslices and nodes",
            ),
            _ => (ErrorKind::Other, ""),
        };
        let seconds = headers.get(RETRY_AFTER).and_then(|it| it.to_str().ok()?.trim().parse().ok());
        let details = status.and_then(|it| it.details).map(|it| u64::from(it.retry_after_seconds));
        Self {
            kind,
            text: format!("{what}: {} {reason}: {said}{remedy}", code.as_u16()),
            retry_after: seconds.or(details.filter(|it| *it > 0)).map(Duration::from_secs),
        }
    }

    /// An event of type ERROR in a watch.
    pub(super) fn event(what: &str, status: &Status) -> Self {
        let code = StatusCode::from_u16(status.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let body = serde_json::to_vec(status).unwrap_or_default();
        Self::status(what, code, &http::HeaderMap::new(), &body)
    }

    /// No answer.
    pub(super) fn connection(what: &str, error: &kube::Error) -> Self {
        let said = match error {
            kube::Error::Service(error) => chain(&**error),
            kube::Error::HyperError(error) => chain(error),
            other => chain(other),
        };
        // Clusters' CAs often bear the same name: then it is the signature that does not fit.
        let is_unknown = ["UnknownIssuer", "BadSignature"].iter().any(|it| said.contains(it));
        let remedy = if is_unknown {
            "; give the CA that has signed it, as certificate-authority in the kubeconfig"
        } else if said.contains("certificate not valid for name") {
            "; give an address that is in it by --kube-api-server, or tls-server-name in the kubeconfig"
        } else if said.contains("invalid peer certificate") {
            "; renew the API server's certificate, or correct this machine's clock"
        } else {
            ""
        };
        Self::new(ErrorKind::Credentials, format!("{what}: {said}{remedy}"))
    }
}

impl fmt::Display for WatchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The longest that a server is left alone because it said so.
const LONGEST: Duration = Duration::from_secs(600);

/// When to try again: later each time, and everybody at another time.
#[derive(Debug)]
pub(super) struct Backoff {
    limits: (Duration, Duration),
    next: Duration,
}

impl Backoff {
    /// Pauses that grow from the first to the second limit.
    pub(super) fn new(limits: (Duration, Duration)) -> Self {
        Self { limits, next: limits.0 }
    }

    /// It worked.
    pub(super) fn reset(&mut self) {
        self.next = self.limits.0;
    }

    /// It did not: the moment of the next try; never before the server wants it.
    pub(super) fn failed(&mut self, retry_after: Option<Duration>) -> Instant {
        let pause = self.next.mul_f64(0.5 + fastrand::f64() / 2.0);
        self.next = (self.next * 2).min(self.limits.1);
        // All that were told the same time would come back at the same time.
        Instant::now() + retry_after.map_or(pause, |it| it.min(LONGEST) + pause)
    }
}

/// An error and what caused it, in one line, and nothing twice.
pub(super) fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = String::new();
    let mut next = Some(error);
    while let Some(error) = next {
        let part = error.to_string();
        if text.is_empty() {
            text = part;
        } else if !text.contains(&part) {
            text = format!("{text}: {part}");
        }
        next = error.source();
    }
    text
}

fn short(text: &str) -> String {
    const LONGEST: usize = 300;
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn pauses_grow_to_a_limit_differ_and_respect_the_server() {
        let limits = (Duration::from_millis(500), Duration::from_secs(30));
        let mut backoff = Backoff::new(limits);
        let now = Instant::now();
        let pauses: Vec<_> = (0..12).map(|_| backoff.failed(None) - now).collect();
        assert!(pauses[0] >= limits.0 / 2 && pauses[0] <= limits.0);
        assert!(pauses[11] >= limits.1 / 2 && pauses.iter().all(|it| *it <= limits.1));
        assert!(pauses[8..].iter().collect::<BTreeSet<_>>().len() > 1, "{pauses:?}");
        backoff.reset();
        assert!(backoff.failed(None) - now <= limits.0);
        assert!(backoff.failed(Some(Duration::from_secs(7))) - now >= Duration::from_secs(7));
    }
}
