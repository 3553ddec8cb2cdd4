//! Errors of requests to the API server, and the back-off after them.
//!
//! A message is one line that names the resource, the response and the remedy.

use std::{fmt, time::Duration};

use http::{HeaderMap, StatusCode, header::RETRY_AFTER};
use kube::core::Status;
use tokio::time::Instant;

use crate::text::{error_chain, one_line, shortened};

/// How much of a response is quoted, in characters.
const MAX_QUOTE: usize = 300;

/// Why a list or a watch has ended early.
#[derive(Debug)]
pub(super) struct WatchError {
    pub(super) kind: ErrorKind,
    /// The message for users.
    pub(super) text: String,
    /// How long to wait at least, as the server requests.
    pub(super) retry_after: Option<Duration>,
}

/// What an error requires besides a retry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ErrorKind {
    /// The resource version has expired: list again.
    Expired,
    /// The server does not support watch-list: list in pages.
    NoWatchList,
    /// The server does not support the field selector.
    NoFieldSelector,
    /// The connection or the credentials failed: read the configuration again.
    Connection,
    /// Nothing.
    Other,
}

impl WatchError {
    pub(super) fn new(kind: ErrorKind, text: impl Into<String>) -> Self {
        Self { kind, text: text.into(), retry_after: None }
    }

    /// A response other than 200.
    pub(super) fn status(resource: &str, code: StatusCode, headers: &HeaderMap, body: &[u8]) -> Self {
        let status = serde_json::from_slice::<Status>(body).ok();
        let message = match &status {
            Some(status) if !status.message.is_empty() => one_line(&status.message),
            _ => one_line(&String::from_utf8_lossy(body)),
        };
        let message = shortened(message, MAX_QUOTE);
        let reason = code.canonical_reason().unwrap_or("");
        let (kind, remedy) = match code {
            StatusCode::GONE => (ErrorKind::Expired, ""),
            StatusCode::UNPROCESSABLE_ENTITY => (ErrorKind::NoWatchList, ""),
            StatusCode::BAD_REQUEST => (ErrorKind::NoFieldSelector, ""),
            StatusCode::UNAUTHORIZED => (
                ErrorKind::Connection,
                "; renew the token or certificate, it is read again before each retry",
            ),
            StatusCode::FORBIDDEN => (
                ErrorKind::Other,
                "; grant list and watch of services, endpointslices and nodes by a ClusterRole",
            ),
            _ => (ErrorKind::Other, ""),
        };
        let seconds = headers.get(RETRY_AFTER).and_then(|it| it.to_str().ok()?.trim().parse().ok());
        let details = status.and_then(|it| it.details).map(|it| u64::from(it.retry_after_seconds));
        Self {
            kind,
            text: format!("{resource}: {} {reason}: {message}{remedy}", code.as_u16()),
            retry_after: seconds.or(details.filter(|it| *it > 0)).map(Duration::from_secs),
        }
    }

    /// An event of type ERROR in a watch.
    pub(super) fn event(resource: &str, status: &Status) -> Self {
        let code = StatusCode::from_u16(status.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let body = serde_json::to_vec(status).unwrap_or_default();
        Self::status(resource, code, &HeaderMap::new(), &body)
    }

    /// No response.
    pub(super) fn connection(resource: &str, error: &kube::Error) -> Self {
        let cause = match error {
            kube::Error::Service(error) => error_chain(&**error),
            kube::Error::HyperError(error) => error_chain(error),
            other => error_chain(other),
        };
        // The CAs of clusters often have the same name: then the error is a bad signature.
        let is_unknown_ca = ["UnknownIssuer", "BadSignature"].iter().any(|it| cause.contains(it));
        let remedy = if is_unknown_ca {
            "; set certificate-authority in the kubeconfig to the CA that signed it"
        } else if cause.contains("certificate not valid for name") {
            "; use an address in the certificate for --kube-api-server, or set tls-server-name in the kubeconfig"
        } else if cause.contains("invalid peer certificate") {
            "; renew the API server's certificate, or correct this host's clock"
        } else {
            ""
        };
        Self::new(ErrorKind::Connection, format!("{resource}: {cause}{remedy}"))
    }
}

impl fmt::Display for WatchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Limit of the delay that a server requests.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(600);

/// Exponential back-off with jitter.
#[derive(Debug)]
pub(super) struct Backoff {
    limits: (Duration, Duration),
    next: Duration,
}

impl Backoff {
    /// Delays that grow from the first to the second limit.
    pub(super) fn new(limits: (Duration, Duration)) -> Self {
        Self { limits, next: limits.0 }
    }

    /// After a success.
    pub(super) fn reset(&mut self) {
        self.next = self.limits.0;
    }

    /// After a failure: the time of the next try, not before the server allows it.
    pub(super) fn failed(&mut self, retry_after: Option<Duration>) -> Instant {
        let delay = self.next.mul_f64(0.5 + fastrand::f64() / 2.0);
        self.next = (self.next * 2).min(self.limits.1);
        // Jitter is added to the server's delay too: all nodes may have received the same one.
        Instant::now() + retry_after.map_or(delay, |it| it.min(MAX_RETRY_AFTER) + delay)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn delays_grow_to_a_limit_differ_and_respect_the_server() {
        let limits = (Duration::from_millis(500), Duration::from_secs(30));
        let mut backoff = Backoff::new(limits);
        let now = Instant::now();
        let delays: Vec<_> = (0..12).map(|_| backoff.failed(None) - now).collect();
        assert!(delays[0] >= limits.0 / 2 && delays[0] <= limits.0);
        assert!(delays[11] >= limits.1 / 2 && delays.iter().all(|it| *it <= limits.1));
        assert!(delays[8..].iter().collect::<BTreeSet<_>>().len() > 1, "{delays:?}");
        backoff.reset();
        assert!(backoff.failed(None) - now <= limits.0);
        assert!(backoff.failed(Some(Duration::from_secs(7))) - now >= Duration::from_secs(7));
    }
}
