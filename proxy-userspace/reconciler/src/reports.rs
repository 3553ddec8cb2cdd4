//! What the reconciler tells its observer and the log, and counts.
//!
//! Invariant: a condition that lasts is logged once, and again when it changes.

use std::{collections::BTreeSet, io, time::Duration};

use datapath::{ApplyReport, AttachStatus, AvoidedEndpoints, ProbeResult, TableStats, TerminationReport};
use model::Rejected;
use netlink::sock_diag::Transport;
use process::give_back_memory;
use tokio::{task::spawn_blocking, time::Instant};

use crate::{
    log_dedup::LogDedup,
    metrics::Metrics,
    observer::{Observer, Step},
    worker::{Applied, Failure},
};

/// How many rejected parts of a state are logged one by one.
const MAX_LOGGED: usize = 10;
/// How long states are counted for one summary.
const SUMMARY_INTERVAL: Duration = Duration::from_secs(60);

pub(crate) struct Reports<'a> {
    pub(crate) observer: &'a dyn Observer,
    metrics: Metrics,
    /// The rejections as of the last report.
    rejected: BTreeSet<Rejected>,
    /// Whether the packet path was unavailable or behind at the last report.
    has_packet_problem: bool,
    log: LogDedup,
    state_log: StateLog,
}

impl<'a> Reports<'a> {
    pub(crate) fn new(observer: &'a dyn Observer, metrics: Metrics) -> Self {
        Self {
            observer,
            metrics,
            rejected: BTreeSet::new(),
            has_packet_problem: false,
            log: LogDedup::default(),
            state_log: StateLog::default(),
        }
    }

    /// A state is active; each new rejection is logged once, or counted.
    pub(crate) fn active(&mut self, Applied { desired, report }: &Applied) {
        let took = desired.begin.elapsed();
        self.observer.on_applied(&desired.published, report, took);
        if report.flipped {
            self.state_log.active(desired.published.rev, report, took);
        }
        let rejected: BTreeSet<_> = report.rejected.iter().cloned().collect();
        let mut new = rejected.difference(&self.rejected);
        for Rejected { item, reason, .. } in new.by_ref().take(MAX_LOGGED) {
            tracing::warn!(%item, %reason, "not served");
        }
        let more = new.count();
        if more > 0 {
            tracing::warn!(more, "more parts are not served; `status` has all of them");
        }
        self.rejected = rejected;
        if report.is_full {
            // It took far more memory than keeping its result does.
            spawn_blocking(give_back_memory);
        }
    }

    pub(crate) fn sockets_failed(&mut self, failure: &Failure) {
        let Failure { step, error, retry_in, .. } = failure;
        self.failed(*step, error);
        match step {
            Step::Apply => apply_failed(failure),
            Step::Attach => tracing::error!(
                error,
                ?retry_in,
                "attaching the programs failed; Services may be unreachable from this node"
            ),
            Step::Finish => finish_failed(failure),
        }
    }

    /// A step of the packet path has failed. `problem` is what it means beside the socket path.
    pub(crate) fn packets_failed(
        &mut self,
        failure: &Failure,
        problem: Option<&Rejected>,
        is_beside_sockets: bool,
    ) {
        let Failure { step, error, retry_in, .. } = failure;
        let error = problem.map_or_else(|| error.clone(), ToString::to_string);
        self.failed(*step, &error);
        match step {
            Step::Finish => finish_failed(failure),
            _ if is_beside_sockets => {
                tracing::error!(error, ?retry_in, "only the socket path is up to date");
            }
            Step::Apply => apply_failed(failure),
            Step::Attach => tracing::error!(error, ?retry_in, "repairing the tables failed"),
        }
    }

    fn failed(&mut self, step: Step, error: &str) {
        self.metrics.on_failed(step);
        self.observer.on_failed(step, error);
        // The state that follows it is logged.
        self.state_log.is_steady = false;
    }

    /// The problem of the packet path, if there is one.
    pub(crate) fn packet_path(&mut self, problem: Option<&Rejected>) {
        if self.has_packet_problem && problem.is_none() {
            tracing::info!("the packet path serves now: traffic without a local socket is up to date");
        }
        self.has_packet_problem = problem.is_some();
        self.observer.on_packet_path(problem);
    }

    /// The kernel was queried for the attached programs. `tables` are those of the packet path, and whether each is intact.
    pub(crate) fn attach_checked(
        &mut self,
        status: Result<Option<AttachStatus>, String>,
        tables: &[(&'static str, bool)],
    ) {
        match status {
            Ok(None) => {}
            Ok(Some(status)) => {
                let status = AttachStatus { tables: tables.to_vec(), ..status };
                self.observer.on_attach_checked(Ok(&status));
                self.log.attach_checked(&status);
                let missing: Vec<_> = status.missing().map(|it| it.name).collect();
                if !missing.is_empty() {
                    self.metrics.program_detachments.inc();
                    let (cgroup, missing) = (status.cgroup.display(), missing.join(", "));
                    tracing::error!(%cgroup, missing, "programs were detached; attaching them again");
                }
            }
            Err(error) => {
                self.observer.on_attach_checked(Err(&error));
                tracing::warn!(error, "the attached programs cannot be queried");
            }
        }
    }

    /// The tables are the whole datapath, and whether each is intact.
    pub(crate) fn tables_checked(&self, tables: Vec<(&'static str, bool)>) {
        let status = AttachStatus { cgroup: "no cgroup".into(), tables, ..AttachStatus::default() };
        self.observer.on_attach_checked(Ok(&status));
    }

    /// The usage of the tables that clients fill was read; returns the endpoints that packets should avoid.
    pub(crate) fn table_stats(&mut self, stats: Result<TableStats, String>) -> Option<AvoidedEndpoints> {
        match stats {
            Ok(stats) => {
                self.log.table_stats(&stats);
                let avoided = stats.avoided();
                self.observer.on_table_stats(stats);
                Some(avoided)
            }
            Err(error) => {
                tracing::warn!(error, "table usage cannot be read");
                None
            }
        }
    }

    pub(crate) fn probed(&mut self, results: &[ProbeResult]) {
        self.log.probed(results);
        self.observer.on_probed(results);
    }

    /// Sockets connected to removed endpoints were terminated.
    pub(crate) fn terminated(&mut self, transport: Transport, report: &io::Result<TerminationReport>) {
        self.log.terminated(transport, report);
        self.metrics.on_terminated(transport, report);
    }

    /// Logs a summary of the states of the last minute, if it is due.
    pub(crate) fn summarize(&mut self) {
        if let Some(Counted { last_rev: rev, states, changed_services: changed, slowest, .. }) =
            self.state_log.due_summary()
        {
            tracing::info!(revision = rev, states, changed, ?slowest, "states active since the last summary");
        }
    }
}

fn apply_failed(Failure { error, desired, retry_in, .. }: &Failure) {
    let revision = desired.as_ref().map(|it| it.published.rev);
    tracing::error!(revision, error, ?retry_in, "apply failed; the previous state stays active");
}

fn finish_failed(Failure { error, retry_in, .. }: &Failure) {
    tracing::warn!(error, ?retry_in, "finishing the generation failed");
}

/// What was not logged at level info yet.
///
/// Under churn the log grows by a line per minute. At level info is what an operator waits for, the first state and the first one
/// after a failure, and once a minute a summary of the others; at level debug is each state.
#[derive(Debug, Default)]
struct StateLog {
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
    fn active(&mut self, rev: u64, report: &ApplyReport, took: Duration) {
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
        log.is_steady = false;
        log.active(2, &ApplyReport::default(), Duration::ZERO);
        advance(SUMMARY_INTERVAL).await;
        assert!(log.due_summary().is_none());
    }
}
