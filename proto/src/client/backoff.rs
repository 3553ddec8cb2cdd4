//! Failures, and when to try again.
//!
//! The one rule: everybody waits for another time, so that a brain that comes back is not asked by all at once.

use std::{
    hash::{BuildHasher as _, Hasher as _, RandomState},
    time::Duration,
};

use tokio::time::Instant;

use crate::Target;

/// The longest pause after the first failure, and after many.
const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));

/// How long to wait before asking for what was refused.
const REFUSED: Duration = Duration::from_secs(60);

/// What is known of the connection to a brain.
#[derive(Debug)]
pub(super) struct Backoff {
    target: Target,
    /// The longest that the next pause may be.
    pause: Duration,
    /// Since when there has been no connection.
    since: Option<Instant>,
    /// Whether there has been a state.
    has_state: bool,
}

impl Backoff {
    pub(super) fn new(target: &Target) -> Self {
        Self { target: target.clone(), pause: PAUSE.0, since: None, has_state: false }
    }

    /// Something failed: says so, and when to try again.
    pub(super) fn failed(&mut self, reason: &str) -> Instant {
        let now = Instant::now();
        let since = *self.since.get_or_insert(now);
        let pause = jittered(self.pause);
        self.pause = (self.pause * 2).min(PAUSE.1);
        let target = &self.target;
        if self.has_state {
            let age = now - since;
            tracing::warn!(
                "{target}: {reason}; the last state stays, {age:.1?} old; trying again in {pause:.1?}"
            );
        } else {
            tracing::warn!("{target}: {reason}; there is no state yet; trying again in {pause:.1?}");
        }
        now + pause
    }

    /// It was refused: when to ask again.
    pub(super) fn refused(&self) -> Instant {
        Instant::now() + jittered(REFUSED)
    }

    /// A state is complete.
    pub(super) fn synced(&mut self) {
        self.has_state = true;
        self.pause = PAUSE.0;
        if let Some(since) = self.since.take() {
            tracing::info!("{}: followed again, after {:.1?}", self.target, since.elapsed());
        }
    }
}

/// Between half and all of it.
fn jittered(longest: Duration) -> Duration {
    // Every RandomState has keys of its own, which come from the system's randomness.
    let random = RandomState::new().build_hasher().finish() >> 32;
    let part = u32::try_from(random).unwrap_or(u32::MAX);
    longest / 2 + longest.mul_f64(f64::from(part) / f64::from(u32::MAX)) / 2
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn pauses_grow_to_a_limit_and_differ() {
        let mut backoff = Backoff::new(&"unix:///x".parse().unwrap());
        let pauses: Vec<_> = (0..12).map(|_| backoff.failed("gone") - Instant::now()).collect();
        assert!(pauses[0] >= PAUSE.0 / 2 && pauses[0] <= PAUSE.0);
        assert!(pauses[11] >= PAUSE.1 / 2 && pauses.iter().all(|it| *it <= PAUSE.1));
        let last: BTreeSet<_> = pauses[8..].iter().collect();
        assert!(last.len() > 1, "{last:?}");
        backoff.synced();
        assert!(backoff.failed("gone again") - Instant::now() <= PAUSE.0);
    }
}
