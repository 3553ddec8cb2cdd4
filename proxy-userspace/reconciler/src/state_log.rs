//! Log lines about active states.
//!
//! Invariant: under churn the log grows by a line per minute. At level info is what an operator waits for, the first state and
//! the first one after a failure, and once a minute a summary of the others; at level debug is each state.

use std::time::Duration;

use datapath::ApplyReport;
use tokio::time::Instant;

/// How long states are counted for one summary.
const SUMMARY_INTERVAL: Duration = Duration::from_secs(60);

/// What was not logged at level info yet.
#[derive(Debug, Default)]
pub(crate) struct StateLog {
    /// Whether a state has become active, and nothing has failed since.
    is_steady: bool,
    counted: Option<Counted>,
}

/// The states since the last summary.
#[derive(Debug)]
struct Counted {
    since: Instant,
    last_rev: u64,
    states: u64,
    changed_services: usize,
    slowest: Duration,
}

impl StateLog {
    /// A state has become active.
    pub(crate) fn active(&mut self, rev: u64, report: &ApplyReport, took: Duration) {
        let ApplyReport { services, changed_services: changed, entries, .. } = *report;
        if !self.is_steady {
            tracing::info!(revision = rev, services, changed, entries, ?took, "state active");
            self.is_steady = true;
            return;
        }
        tracing::debug!(revision = rev, services, changed, entries, ?took, "state active");
        let counted = self.counted.get_or_insert_with(|| Counted {
            since: Instant::now(),
            last_rev: rev,
            states: 0,
            changed_services: 0,
            slowest: Duration::ZERO,
        });
        counted.last_rev = rev;
        counted.states += 1;
        counted.changed_services += changed;
        counted.slowest = counted.slowest.max(took);
    }

    /// Something has failed: the state that follows it is logged.
    pub(crate) fn failed(&mut self) {
        self.is_steady = false;
    }

    /// Logs the summary if it is due.
    pub(crate) fn summarize(&mut self) {
        if let Some(Counted { last_rev: rev, states, changed_services: changed, slowest, .. }) =
            self.due_summary()
        {
            tracing::info!(revision = rev, states, changed, ?slowest, "states active since the last summary");
        }
    }

    fn due_summary(&mut self) -> Option<Counted> {
        self.counted.take_if(|it| it.since.elapsed() >= SUMMARY_INTERVAL)
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn states_after_the_first_are_counted_for_a_minute() {
        let mut log = StateLog::default();
        let report = ApplyReport { changed_services: 2, ..ApplyReport::default() };
        for (rev, took) in [(1, 9), (2, 1), (3, 5), (4, 3)] {
            log.active(rev, &report, Duration::from_millis(took));
        }
        assert!(log.due_summary().is_none());
        advance(SUMMARY_INTERVAL).await;
        let summary = log.due_summary().unwrap();
        assert_eq!((summary.last_rev, summary.states, summary.changed_services), (4, 3, 6));
        assert_eq!(summary.slowest, Duration::from_millis(5));
        advance(SUMMARY_INTERVAL).await;
        assert!(log.due_summary().is_none(), "nothing has changed");
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_state_after_a_failure_is_no_part_of_a_summary() {
        let mut log = StateLog::default();
        log.active(1, &ApplyReport::default(), Duration::ZERO);
        log.failed();
        log.active(2, &ApplyReport::default(), Duration::ZERO);
        advance(SUMMARY_INTERVAL).await;
        assert!(log.due_summary().is_none());
    }
}
