//! The log of an outage: the time in which the API server cannot be followed.
//!
//! Invariant: one line when it begins, one for each further cause, one a minute, and one when it ends, however many
//! resources are concerned and however often they are tried.

use std::time::Duration;

use tokio::time::Instant;

use super::watch_error::WatchError;

/// How often an outage is logged.
pub(super) const LOG_INTERVAL: Duration = Duration::from_secs(60);
/// How many causes are logged at once; further ones wait for the next minute.
const MAX_CAUSES: usize = 5;

#[derive(Debug)]
pub(super) struct Outage {
    pub(super) since: Instant,
    last_logged: Instant,
    /// The causes that were logged, without the names of resources.
    causes: Vec<String>,
    error: String,
}

impl Outage {
    /// A first request has failed.
    pub(super) fn new() -> Self {
        let now = Instant::now();
        Self { since: now, last_logged: now, causes: Vec::new(), error: String::new() }
    }

    /// A request has failed. Returns whether that is to be logged.
    pub(super) fn failed(&mut self, error: &WatchError) -> bool {
        self.error = error.text.clone();
        let cause = match error.text.split_once(": ") {
            // However that shows: connections are reset, and then refused.
            _ if error.kind.is_unreachable() => "unreachable",
            Some((_, cause)) => cause,
            None => &error.text,
        };
        if self.causes.iter().any(|it| it == cause) || self.causes.len() >= MAX_CAUSES {
            return self.is_due();
        }
        self.causes.push(cause.to_owned());
        true
    }

    /// Whether a minute has passed without a line.
    pub(super) fn is_due(&self) -> bool {
        self.last_logged.elapsed() >= LOG_INTERVAL
    }

    pub(super) fn next_line(&self) -> Instant {
        self.last_logged + LOG_INTERVAL
    }

    /// Logs the last error. `age` is that of the last state, `None` if there is none; `next` is when a request is retried.
    pub(super) fn log(&mut self, server: &str, age: Option<Duration>, next: Instant) {
        let now = Instant::now();
        self.last_logged = now;
        let error = &self.error;
        let retry_in = format!("{:.1?}", next.saturating_duration_since(now));
        match age.map(|it| it.as_secs()) {
            Some(age_seconds) => tracing::warn!(
                server,
                error,
                age_seconds,
                retry_in,
                "cannot follow the API server; the last state stays active"
            ),
            None => {
                tracing::warn!(
                    server,
                    error,
                    retry_in,
                    "cannot follow the API server; there is no state yet"
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kube::watch_error::ErrorKind;

    #[tokio::test(start_paused = true)]
    async fn an_outage_is_logged_once_and_then_every_minute() {
        let error = |kind, text: &str| WatchError::new(kind, text);
        let mut outage = Outage::new();
        assert!(outage.failed(&error(ErrorKind::NoResponse, "services: closed")));
        for resource in ["services", "endpointslices", "nodes"] {
            assert!(!outage.failed(&error(ErrorKind::NoConnection, &format!("{resource}: refused"))));
        }
        // Another cause is logged, once for all resources.
        assert!(outage.failed(&error(ErrorKind::Other, "services: 500")));
        assert!(!outage.failed(&error(ErrorKind::Other, "nodes: 500")));
        tokio::time::advance(LOG_INTERVAL).await;
        assert!(outage.failed(&error(ErrorKind::NoConnection, "services: refused")));
        outage.log("https://192.0.2.1", None, Instant::now());
        assert!(!outage.failed(&error(ErrorKind::NoConnection, "services: refused")));
        // Nor do changing texts fill the log.
        let lines = (0..100).filter(|n| outage.failed(&error(ErrorKind::Other, &format!("nodes: {n}"))));
        assert!(lines.count() <= MAX_CAUSES);
    }
}
