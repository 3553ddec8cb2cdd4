//! Moments, and when a change happened in the cluster.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use model::state::ServiceState;
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

/// When the difference between two states of a Service happened in the cluster, where the cluster says so.
pub(crate) fn triggered(
    before: Option<&Arc<ServiceState>>,
    after: Option<&Arc<ServiceState>>,
) -> Option<SystemTime> {
    let [before, after] = [before, after].map(|it| it.and_then(|it| it.trigger_time));
    // An unchanged time means that something else of the Service changed.
    let micros = after.filter(|_| after != before)?.as_micros();
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_micros(u64::try_from(micros).ok()?))
}
