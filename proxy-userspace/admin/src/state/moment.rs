//! Moments, and what names a published state.

use std::time::{Duration, SystemTime};

use model::Timestamp;
use publish::Published;
use tokio::time::Instant;

/// One moment on the monotonic clock and on the wall clock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment {
    pub(crate) instant: Instant,
    pub(crate) wall: SystemTime,
}

impl Moment {
    pub(crate) fn now() -> Self {
        Self { instant: Instant::now(), wall: SystemTime::now() }
    }
}

impl Default for Moment {
    fn default() -> Self {
        Self::now()
    }
}

/// Its instance and revision.
pub(crate) fn key(published: &Published) -> (u64, u64) {
    (published.instance_id, published.rev)
}

pub(crate) fn wall_time(timestamp: Timestamp) -> Option<SystemTime> {
    let micros = u64::try_from(timestamp.as_micros()).ok()?;
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_micros(micros))
}
