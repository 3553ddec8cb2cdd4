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
    packets::Packets,
    sockets::Sockets,
    worker::{Applied, Datapath as _, Failure},
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
        self.failed(failure.step, &failure.error);
        log_sockets_failed(failure);
    }

    /// A step of the packet path has failed. `problem` is what it means beside the socket path.
    pub(crate) fn packets_failed(
        &mut self,
        failure: &Failure,
        problem: Option<&Rejected>,
        is_beside_sockets: bool,
    ) {
        let error = problem.map_or_else(|| failure.error.clone(), ToString::to_string);
        self.failed(failure.step, &error);
        log_packets_failed(failure, &error, is_beside_sockets);
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

const APPLY_FAILED: &str = "apply failed; the previous state stays active";
const FINISH_FAILED: &str = "finishing the generation failed";

fn log_sockets_failed(failure: &Failure) {
    let message = match failure.step {
        Step::Apply => APPLY_FAILED,
        Step::Attach => "attaching the programs failed; Services may be unreachable from this node",
        Step::Finish => FINISH_FAILED,
    };
    log_failed(Sockets::NAME, failure.step.name(), failure, &failure.error, message);
}

fn log_packets_failed(failure: &Failure, error: &str, is_beside_sockets: bool) {
    // The packet path has no programs: this step repairs its tables.
    let step = if failure.step == Step::Attach { "repair" } else { failure.step.name() };
    let message = match failure.step {
        Step::Finish => FINISH_FAILED,
        _ if is_beside_sockets => "only the socket path is up to date",
        Step::Apply => APPLY_FAILED,
        Step::Attach => "repairing the tables failed",
    };
    log_failed(Packets::NAME, step, failure, error, message);
}

/// Logs a failed step. All failed steps have the same fields, so that one query finds them.
fn log_failed(datapath: &str, step: &str, failure: &Failure, error: &str, message: &str) {
    let Failure { desired, retry_in, .. } = failure;
    let revision = desired.as_ref().map(|it| it.published.rev);
    if failure.step == Step::Finish {
        tracing::warn!(step, datapath, revision, error, ?retry_in, "{message}");
    } else {
        tracing::error!(step, datapath, revision, error, ?retry_in, "{message}");
    }
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
    use std::{io::Read as _, sync::Arc};

    use tokio::time::advance;

    use super::*;
    use crate::worker::Desired;

    fn failure(step: Step, desired: Option<Desired>) -> Failure {
        Failure { step, error: "no room".into(), desired, retry_in: Duration::from_millis(50) }
    }

    /// The lines that are logged meanwhile.
    fn logged(act: impl FnOnce()) -> Vec<String> {
        // A few lines fit into a pipe.
        let (mut written, writer) = io::pipe().unwrap();
        let subscriber = tracing_subscriber::fmt().without_time().with_target(false).with_ansi(false);
        let subscriber = subscriber.with_writer(Arc::new(writer)).finish();
        tracing::subscriber::with_default(subscriber, act);
        let mut text = String::new();
        written.read_to_string(&mut text).unwrap();
        text.lines().map(|it| it.trim_start().to_owned()).collect()
    }

    #[test]
    fn failed_steps_are_logged_with_the_same_fields_and_a_revision_from_the_first_state_on() {
        let of = |step| failure(step, Some(Desired::of_turn(7)));
        let lines = logged(|| {
            Step::ALL.map(of).iter().for_each(log_sockets_failed);
            Step::ALL.map(of).iter().for_each(|it| log_packets_failed(it, "no room", false));
            Step::ALL.map(of).iter().for_each(|it| log_packets_failed(it, "no room", true));
        });
        let attaching = "attaching the programs failed; Services may be unreachable from this node";
        let expect = [
            ("ERROR", APPLY_FAILED, "apply", "sockets"),
            ("ERROR", attaching, "attach", "sockets"),
            ("WARN", FINISH_FAILED, "finish", "sockets"),
            ("ERROR", APPLY_FAILED, "apply", "packets"),
            ("ERROR", "repairing the tables failed", "repair", "packets"),
            ("WARN", FINISH_FAILED, "finish", "packets"),
            ("ERROR", "only the socket path is up to date", "apply", "packets"),
            ("ERROR", "only the socket path is up to date", "repair", "packets"),
            ("WARN", FINISH_FAILED, "finish", "packets"),
        ];
        let more = "revision=7 error=\"no room\" retry_in=50ms";
        let expect = expect.map(|(level, message, step, datapath)| {
            format!("{level} {message} step=\"{step}\" datapath=\"{datapath}\" {more}")
        });
        assert_eq!(lines, expect);
        let lines = logged(|| log_packets_failed(&failure(Step::Attach, None), "no room", false));
        assert!(lines[0].contains("datapath=\"packets\" error=\"no room\""), "{lines:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_summary_of_a_minute_leaves_out_the_first_state_and_the_first_after_a_failure() {
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
        log.is_steady = false;
        log.active(5, &report, Duration::ZERO);
        advance(SUMMARY_INTERVAL).await;
        assert!(log.due_summary().is_none());
    }
}
