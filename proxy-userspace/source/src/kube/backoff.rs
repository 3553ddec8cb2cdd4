//! When to retry after a failed request.

use std::time::Duration;

use backon::{BackoffBuilder as _, ExponentialBackoff, ExponentialBuilder};
use tokio::time::Instant;

/// Limit of the delay that a server requests.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(600);

/// Exponential back-off with jitter.
#[derive(Debug)]
pub(super) struct Backoff {
    builder: ExponentialBuilder,
    delays: ExponentialBackoff,
}

impl Backoff {
    /// The maximum delay grows from the first to the second duration; the minimum is half of it.
    pub(super) fn new((first, last): (Duration, Duration)) -> Self {
        // The jitter adds up to the delay itself.
        let builder = ExponentialBuilder::new()
            .with_min_delay(first / 2)
            .with_max_delay(last / 2)
            .with_jitter()
            .without_max_times();
        Self { builder, delays: builder.build() }
    }

    pub(super) fn reset(&mut self) {
        self.delays = self.builder.build();
    }

    /// After a failure: the time of the next try, not before the server allows it, and else after `max` at most.
    pub(super) fn failed(&mut self, retry_after: Option<Duration>, max: Duration) -> Instant {
        let delay = self.delays.next().expect("the number of attempts is not limited");
        let delay = delay.min(max.mul_f64(0.5 + fastrand::f64() / 2.0));
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
        let delays: Vec<_> = (0..12).map(|_| backoff.failed(None, Duration::MAX / 2) - now).collect();
        assert!(delays[0] >= limits.0 / 2 && delays[0] <= limits.0);
        assert!(delays[11] >= limits.1 / 2 && delays.iter().all(|it| *it <= limits.1));
        assert!(delays[8..].iter().collect::<BTreeSet<_>>().len() > 1, "{delays:?}");
        let short = Duration::from_secs(2);
        let delays: BTreeSet<_> = (0..5).map(|_| backoff.failed(None, short) - now).collect();
        assert!(delays.len() > 1 && delays.iter().all(|it| *it >= short / 2 && *it <= short), "{delays:?}");
        backoff.reset();
        assert!(backoff.failed(None, short) - now <= limits.0);
        assert!(backoff.failed(Some(Duration::from_secs(7)), short) - now >= Duration::from_secs(7));
    }
}
