//! Warnings that clients cause: one a minute.

use std::time::Duration;

use parking_lot::Mutex;

use tokio::time::Instant;

const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// When the last warning was logged.
#[derive(Debug, Default)]
pub(crate) struct LogLimit(Mutex<Option<Instant>>);

impl LogLimit {
    pub(crate) fn warn(&self, text: impl FnOnce() -> String) {
        let mut last = self.0.lock();
        if last.is_none_or(|it| it.elapsed() >= LOG_INTERVAL) {
            *last = Some(Instant::now());
            tracing::warn!("{}", text());
        }
    }
}
