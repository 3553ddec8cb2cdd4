//! When a failed step is retried.
//!
//! Invariant: the delay doubles with each failure and never exceeds a limit.

use std::{future::pending, time::Duration};

use tokio::time::{Instant, sleep_until};

/// The delay before a failed step is retried: at first, and at most.
pub(crate) const BACKOFF_MIN: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(30);

/// When a failed step is retried.
#[derive(Debug)]
pub(crate) struct Retry {
    /// The delay before the next retry.
    pub(crate) delay: Duration,
    /// `None` if nothing has failed.
    at: Option<Instant>,
}

impl Retry {
    pub(crate) fn new() -> Self {
        Self { delay: BACKOFF_MIN, at: None }
    }

    pub(crate) fn is_scheduled(&self) -> bool {
        self.at.is_some()
    }

    /// Waits until a retry is due; forever if none is scheduled.
    pub(crate) async fn due(&self) {
        match self.at {
            Some(at) => sleep_until(at).await,
            None => pending().await,
        }
    }

    pub(crate) fn after_backoff(&mut self) {
        self.at = Some(Instant::now() + self.delay);
        self.delay = (self.delay * 2).min(BACKOFF_MAX);
    }
}
