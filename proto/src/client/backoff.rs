//! When to reconnect, and what the log says about it.
//!
//! The delays are jittered: after an outage of the brain, its clients do not reconnect all at once.

use std::time::Duration;

use backon::{BackoffBuilder as _, ExponentialBackoff, ExponentialBuilder};
use tokio::{sync::watch, time::Instant};

use super::connect::Round;
use crate::Targets;

/// With jitter: 50 to 100 ms after the first failure, growing to 5 to 10 s.
const BACKOFF: ExponentialBuilder = ExponentialBuilder::new()
    .with_min_delay(Duration::from_millis(50))
    .with_max_delay(Duration::from_secs(5))
    .with_jitter()
    .without_max_times();

/// After a refusal, with jitter: 30 to 60 s.
const REFUSED_BACKOFF: ExponentialBuilder = ExponentialBuilder::new()
    .with_min_delay(Duration::from_secs(30))
    .with_max_delay(Duration::from_secs(30))
    .with_jitter();

/// The interval at which an outage is logged.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// The failures of the connection to the brains since the last complete state.
#[derive(Debug)]
pub(super) struct ReconnectBackoff {
    targets: Targets,
    delays: ExponentialBackoff,
    failing_since: Option<Instant>,
    /// When the last complete state was received.
    last_state: Option<Instant>,
    last_logged: Option<Instant>,
    outage: watch::Sender<Option<String>>,
}

impl ReconnectBackoff {
    /// `outage` gets the reason of each failure, and `None` with each complete state.
    pub(super) fn new(targets: &Targets, outage: &watch::Sender<Option<String>>) -> Self {
        Self {
            targets: targets.clone(),
            outage: outage.clone(),
            delays: BACKOFF.build(),
            failing_since: None,
            last_state: None,
            last_logged: None,
        }
    }

    /// Returns when to connect again: at once if a brain has not been tried. Otherwise logs the failure, at most once a minute
    /// during an outage.
    pub(super) fn failed(&mut self, round: &Round, reason: &str) -> Instant {
        let now = Instant::now();
        let brain = round.shown(&self.targets);
        if round.has_untried() {
            tracing::debug!(brain, error = reason, "trying another brain");
            return now;
        }
        self.failing_since.get_or_insert(now);
        self.outage.send_replace(Some(reason.to_owned()));
        let delay = next_delay(&mut self.delays);
        if self.last_logged.is_some_and(|it| now - it < LOG_INTERVAL) {
            return now + delay;
        }
        self.last_logged = Some(now);
        match self.last_state.map(|it| (now - it).as_secs()) {
            Some(state_age_seconds) => tracing::warn!(
                brain,
                error = reason,
                state_age_seconds,
                retry_in = format_args!("{delay:.1?}"),
                "connection failed; the last state stays active"
            ),
            None => {
                tracing::warn!(
                    brain,
                    error = reason,
                    retry_in = format_args!("{delay:.1?}"),
                    "connection failed; no state received yet"
                );
            }
        }
        now + delay
    }

    /// When to reconnect after a refusal.
    pub(super) fn refused() -> Instant {
        Instant::now() + next_delay(&mut REFUSED_BACKOFF.build())
    }

    /// A state is complete: the next failure is a first one again.
    pub(super) fn synced(&mut self, round: &mut Round) {
        round.end();
        self.last_state = Some(Instant::now());
        self.last_logged = None;
        self.outage.send_replace(None);
        self.delays = BACKOFF.build();
        if let Some(since) = self.failing_since.take() {
            tracing::info!(
                brain = round.shown(&self.targets),
                took = format_args!("{:.1?}", since.elapsed()),
                "in sync again"
            );
        }
    }
}

fn next_delay(delays: &mut ExponentialBackoff) -> Duration {
    delays.next().expect("the number of attempts is not limited")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn delays_grow_to_a_limit_and_differ() {
        let (outage, mut round) = (watch::Sender::new(None), Round::default());
        let mut backoff = ReconnectBackoff::new(&"unix:///x".parse().unwrap(), &outage);
        let first = Duration::from_millis(50)..=Duration::from_millis(100);
        let limit = Duration::from_secs(5)..=Duration::from_secs(10);
        let delays: Vec<_> = (0..12).map(|_| backoff.failed(&round, "gone") - Instant::now()).collect();
        assert!(first.contains(&delays[0]));
        assert!(limit.contains(&delays[11]) && delays.iter().all(|it| it <= limit.end()));
        let last: BTreeSet<_> = delays[8..].iter().collect();
        assert!(last.len() > 1, "{last:?}");
        assert_eq!(outage.borrow().as_deref(), Some("gone"));
        backoff.synced(&mut round);
        assert_eq!(*outage.borrow(), None);
        assert!(first.contains(&(backoff.failed(&round, "gone again") - Instant::now())));
        let refused = ReconnectBackoff::refused() - Instant::now();
        assert!((Duration::from_secs(30)..=Duration::from_secs(60)).contains(&refused));
    }
}
