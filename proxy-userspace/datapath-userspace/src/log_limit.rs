//! Warnings that clients cause: one a minute.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// When the last warning was logged.
#[derive(Debug, Default)]
pub(crate) struct LogLimit(Mutex<Option<Instant>>);

impl LogLimit {
    pub(crate) fn warn(&self, text: impl FnOnce() -> String) {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_none_or(|it| it.elapsed() >= LOG_INTERVAL) {
            *last = Some(Instant::now());
            tracing::warn!("{}", text());
        }
    }
}
