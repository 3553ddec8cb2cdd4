//! The packet path (nftables), kept at the newest state by a task of its own.
//!
//! Invariant: no other part waits for it. States that come while a transaction is under way replace each other, and what became of
//! each attempt is reported.

use std::{collections::BTreeSet, net::IpAddr, panic, sync::Arc, time::Duration};

use datapath::{ApplyReport, AvoidedEndpoints, PacketAffinity};
use datapath_ebpf::ConnectedBackends;
use datapath_nft as nft;
use model::{Rejected, error_chain};
use publish::Published;
use tokio::{
    sync::{mpsc, watch},
    task::spawn_blocking,
    time::{Instant, sleep, sleep_until},
};

use crate::{
    observer::Step,
    progress::Applied,
    retry::{BACKOFF_MIN, Retry},
};

/// The subject of reports about the packet path.
const PACKET_PATH: &str = "traffic without a local socket";
/// When conntrack is listed once more after a change: packets that were on their way have left the host by then.
const SECOND_PASS_DELAY: Duration = Duration::from_secs(1);
/// How often what happens without a change is looked after: clients with session affinity are counted, and what is only for a
/// moment after a change ends.
const UPKEEP_INTERVAL: Duration = Duration::from_secs(10);
/// It takes at most this part of the time: the kernel lists a set from its beginning for each page.
const UPKEEP_SHARE: u32 = 20;
/// How often an unavailable packet path is retried.
const RECOVER_INTERVAL: Duration = Duration::from_secs(5);

/// The packet path, or why it is unavailable.
#[derive(Debug)]
pub(crate) struct Packets {
    options: nft::Options,
    /// `None` if it is unavailable, which it may be only beside the socket path.
    datapath: Option<nft::Datapath>,
    unavailable_reason: Option<Rejected>,
    /// What sockets are connected to, beside the socket path.
    connected: Option<ConnectedBackends>,
}

/// What the packet path should be.
#[derive(Clone, Debug, Default)]
struct Desired {
    /// The addresses of the host's interfaces.
    interfaces: BTreeSet<IpAddr>,
    /// The newest state, its turn, and when it was dequeued.
    state: Option<(Arc<Published>, u64, Instant)>,
    /// The endpoints that packets avoid.
    avoided: Arc<AvoidedEndpoints>,
}

/// What happened on the packet path.
#[derive(Debug)]
pub(crate) enum PacketEvent {
    /// A state was applied, the tables were repaired, or that failed.
    Attempted(Box<PacketReport>),
    /// What happens without a change was looked after.
    UpkeepDone(Upkeep),
}

/// What was found without a change.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Upkeep {
    /// The clients with session affinity; `None` if no Service has session affinity.
    pub(crate) affinity: Option<PacketAffinity>,
    /// Whether kube-proxy has rules beside ours.
    pub(crate) has_kube_proxy_rules: bool,
    /// Whether the rules may not be as they should, because a transaction failed.
    must_repair: bool,
}

/// What became of an attempt.
#[derive(Debug)]
pub(crate) struct PacketReport {
    /// The state, if it was to be applied and there is nothing to wait for: it is active, or the socket path serves alone.
    pub(crate) applied: Option<Applied>,
    /// A step that failed and will be retried.
    pub(crate) failed: Option<Failed>,
    /// Why the packet path does not serve as it should, beside the socket path.
    pub(crate) error: Option<Rejected>,
    /// Which of our tables are as they were written.
    pub(crate) tables: Vec<(&'static str, bool)>,
}

/// A step that failed.
#[derive(Debug)]
pub(crate) struct Failed {
    /// The step.
    pub(crate) step: Step,
    /// The error, with its causes.
    pub(crate) error: String,
    /// The revision that was to be applied.
    pub(crate) rev: u64,
    /// The delay before it is retried.
    pub(crate) retry: Duration,
}

/// Keeps the packet path at the newest state.
#[derive(Debug)]
pub(crate) struct PacketPath {
    desired: watch::Sender<Desired>,
    reports: mpsc::UnboundedReceiver<PacketEvent>,
}

impl PacketPath {
    /// Starts. Must be called within a tokio runtime.
    pub(crate) fn start(packets: Packets) -> Self {
        let (desired, states) = watch::channel(Desired::default());
        let (sender, reports) = mpsc::unbounded_channel();
        tokio::spawn(work(packets, states, sender));
        Self { desired, reports }
    }

    /// Replaces the state that should be active.
    pub(crate) fn apply(
        &self,
        published: &Arc<Published>,
        interfaces: &BTreeSet<IpAddr>,
        turn: u64,
        begin: Instant,
    ) {
        self.desired.send_modify(|it| {
            it.interfaces.clone_from(interfaces);
            it.state = Some((Arc::clone(published), turn, begin));
        });
    }

    /// Replaces the endpoints that packets should avoid.
    pub(crate) fn avoid(&self, avoided: AvoidedEndpoints) {
        self.desired.send_if_modified(|it| {
            let is_new = *it.avoided != avoided;
            if is_new {
                it.avoided = Arc::new(avoided);
                // The same state is applied anew.
                if let Some((_, _, begin)) = &mut it.state {
                    *begin = Instant::now();
                }
            }
            is_new
        });
    }

    /// Waits for the next report.
    pub(crate) async fn report(&mut self) -> PacketEvent {
        match self.reports.recv().await {
            Some(report) => report,
            // The worker ends only after this value is dropped.
            None => std::future::pending().await,
        }
    }
}

impl Packets {
    /// Opens nftables; nothing changes before the first state is applied.
    ///
    /// # Errors
    ///
    /// If that fails, and the socket path does not serve without it.
    pub(crate) fn start(
        options: &nft::Options,
        connected: Option<ConnectedBackends>,
    ) -> Result<Self, nft::Error> {
        let (datapath, unavailable_reason) = match nft::Datapath::start(options) {
            Ok(datapath) => (Some(datapath), None),
            Err(error) if options.is_beside_sockets => (None, Some(unavailable(&error))),
            Err(error) => return Err(error),
        };
        Ok(Self { options: options.clone(), datapath, unavailable_reason, connected })
    }

    /// Why it is on but does not exist.
    pub(crate) fn unavailable_reason(&self) -> Option<&Rejected> {
        self.unavailable_reason.as_ref()
    }

    /// Applies a state if it `is_due`, repairs the tables, and deletes stale flows.
    fn reconcile(&mut self, desired: &Desired, is_due: bool) -> Attempt {
        let Some((published, ..)) = desired.state.as_ref() else { return Attempt::default() };
        let Some(datapath) = &mut self.datapath else {
            let rejected = self.unavailable_reason.iter().cloned().collect();
            let applied = is_due.then(|| Ok(ApplyReport { rejected, ..ApplyReport::default() }));
            return Attempt { applied, ..Attempt::default() };
        };
        datapath.set_interfaces(desired.interfaces.clone());
        datapath.set_avoided(&desired.avoided);
        let known = datapath.removed_udp();
        let applied = is_due.then(|| datapath.apply(&published.state));
        if let Some(Err(error @ nft::Error::Incapable(_))) = &applied
            && self.options.is_beside_sockets
        {
            self.unavailable_reason = Some(unavailable(error));
            self.datapath = None;
            return self.reconcile(desired, is_due);
        }
        // The sockets are looked through only for what this state has removed: it takes tens of milliseconds on a large node.
        let refuse = |datapath: &mut nft::Datapath| match datapath.removed_udp().is_subset(&known) {
            true => Ok(()),
            false => refuse_removed_udp(datapath, self.connected.as_ref()),
        };
        let repaired = datapath.repair().and_then(|()| refuse(datapath));
        // Flows are deleted only once their next packet finds the new state.
        let is_current = !matches!(applied, Some(Err(_))) && repaired.is_ok();
        let finished = if is_current { datapath.finish_generation() } else { Ok(false) };
        Attempt { applied, repaired, finished }
    }

    /// Retries a packet path that is unavailable; returns whether it is available now.
    fn recover(&mut self) -> bool {
        match nft::Datapath::start(&self.options) {
            Ok(datapath) => {
                self.unavailable_reason = None;
                self.datapath = Some(datapath);
                true
            }
            Err(error) => {
                self.unavailable_reason = Some(unavailable(&error));
                false
            }
        }
    }

    /// Restores at once what existing connections need; what fails is reported by the repair that follows.
    fn restore_base_chains(&mut self) {
        if let Some(Err(error)) = self.datapath.as_mut().map(nft::Datapath::restore_base_chains) {
            tracing::debug!("restoring the base chains failed: {}", error_chain(&error));
        }
    }

    /// Looks at flows once more; what fails is left to their timeouts.
    fn finish_generation_again(&mut self) {
        let Some(datapath) = &mut self.datapath else { return };
        if let Err(error) = datapath.finish_generation_again() {
            tracing::warn!("a second pass over conntrack failed: {}", error_chain(&error));
        }
        if let Err(error) = refuse_removed_udp(datapath, self.connected.as_ref()) {
            tracing::warn!("removed UDP endpoints are not refused: {}", error_chain(&error));
        }
    }

    /// Ends what is only for a moment after a change, counts the clients with session affinity, and looks for kube-proxy's
    /// rules; what fails is tried again the next time.
    fn upkeep(&mut self) -> Upkeep {
        let Some(datapath) = &mut self.datapath else { return Upkeep::default() };
        let refused = refuse_removed_udp(datapath, self.connected.as_ref());
        if let Err(error) = &refused {
            tracing::debug!("the rules for removed UDP endpoints stay: {}", error_chain(error));
        }
        let affinity = datapath.count_affinity().unwrap_or_else(|error| {
            tracing::debug!("counting the clients with session affinity failed: {}", error_chain(&error));
            None
        });
        let has_kube_proxy_rules = datapath.has_kube_proxy_rules().unwrap_or_else(|error| {
            tracing::debug!("looking for kube-proxy's rules failed: {}", error_chain(&error));
            false
        });
        Upkeep { affinity, has_kube_proxy_rules, must_repair: refused.is_err() }
    }

    async fn changed_externally(&self) {
        match &self.datapath {
            Some(datapath) => datapath.changed_externally().await,
            None => std::future::pending().await,
        }
    }
}

/// Refuses flows to removed UDP endpoints as long as sockets are connected to them: the sockets of pods whose network namespace
/// cannot be entered are not terminated.
fn refuse_removed_udp(
    datapath: &mut nft::Datapath,
    connected: Option<&ConnectedBackends>,
) -> Result<(), nft::Error> {
    let removed = datapath.removed_udp();
    let in_use = match connected {
        Some(connected) if !removed.is_empty() => connected.among(&removed).unwrap_or_else(|error| {
            tracing::warn!("removed UDP endpoints are not refused: {}", error_chain(&error));
            BTreeSet::new()
        }),
        _ => BTreeSet::new(),
    };
    datapath.refuse_removed_udp(&in_use)
}

/// The results of the steps of an attempt.
#[derive(Debug)]
struct Attempt {
    /// `None` if there was nothing to apply.
    applied: Option<Result<ApplyReport, nft::Error>>,
    repaired: Result<(), nft::Error>,
    /// Whether flows are to be looked at once more in a moment.
    finished: Result<bool, nft::Error>,
}

impl Default for Attempt {
    fn default() -> Self {
        Self { applied: None, repaired: Ok(()), finished: Ok(false) }
    }
}

async fn work(
    mut packets: Packets,
    mut states: watch::Receiver<Desired>,
    reports: mpsc::UnboundedSender<PacketEvent>,
) {
    let mut retry = Retry::new();
    // Whether the newest state is not applied yet.
    let mut is_due = false;
    let mut recover_at = Instant::now() + RECOVER_INTERVAL;
    let mut second_pass_at = None;
    let mut upkeep_at = Instant::now() + UPKEEP_INTERVAL;
    loop {
        let wait = async {
            match (retry.at, packets.datapath.is_some()) {
                (Some(at), true) => sleep_until(at).await,
                (None, true) => std::future::pending().await,
                (_, false) => sleep_until(recover_at).await,
            }
        };
        let second_pass = async {
            match second_pass_at {
                Some(at) => sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            changed = states.changed() => {
                if changed.is_err() {
                    return;
                }
                is_due = true;
            }
            () = wait => {}
            () = second_pass => {
                second_pass_at = None;
                packets = on_blocking_thread(move || {
                    packets.finish_generation_again();
                    packets
                })
                .await;
                continue;
            }
            () = sleep_until(upkeep_at) => {
                let begin = Instant::now();
                let (returned, upkeep) = on_blocking_thread(move || {
                    let upkeep = packets.upkeep();
                    (packets, upkeep)
                })
                .await;
                packets = returned;
                // The receiver may be gone.
                let _ = reports.send(PacketEvent::UpkeepDone(upkeep));
                upkeep_at = Instant::now() + UPKEEP_INTERVAL.max(begin.elapsed() * UPKEEP_SHARE);
                if upkeep.must_repair && retry.at.is_none() {
                    retry.after_backoff();
                }
                continue;
            }
            () = packets.changed_externally() => {
                packets = on_blocking_thread(move || {
                    packets.restore_base_chains();
                    packets
                })
                .await;
                // The other side may not be finished; and two that undo each other's changes must not keep a CPU busy.
                sleep(BACKOFF_MIN).await;
            }
        }
        let desired = states.borrow_and_update().clone();
        let is_recovery = packets.datapath.is_none() && recover_at <= Instant::now();
        let (returned, attempt, has_recovered) = {
            let desired = desired.clone();
            on_blocking_thread(move || {
                let has_recovered = is_recovery && packets.recover();
                let attempt = packets.reconcile(&desired, is_due || has_recovered);
                let has_recovered = has_recovered && packets.datapath.is_some();
                (packets, attempt, has_recovered)
            })
            .await
        };
        packets = returned;
        if is_recovery {
            recover_at = Instant::now() + RECOVER_INTERVAL;
        }
        if has_recovered {
            tracing::info!("the packet path is available now: traffic without a local socket is served");
        }
        is_due = matches!(attempt.applied, Some(Err(_)));
        if matches!(attempt.finished, Ok(true)) {
            second_pass_at = Some(Instant::now() + SECOND_PASS_DELAY);
        }
        let report = packets.report(attempt, &desired, &retry);
        if report.failed.is_some() {
            retry.after_backoff();
        } else {
            retry = Retry::new();
        }
        // The receiver may be gone.
        let _ = reports.send(PacketEvent::Attempted(Box::new(report)));
    }
}

impl Packets {
    /// What to report of an attempt.
    fn report(&self, attempt: Attempt, desired: &Desired, retry: &Retry) -> PacketReport {
        let Attempt { applied, repaired, finished } = attempt;
        let rev = desired.state.as_ref().map_or(0, |(published, ..)| published.rev);
        let failed =
            |step, error: &nft::Error| Failed { step, error: error_chain(error), rev, retry: retry.delay };
        let mut error = self.unavailable_reason.clone();
        let mut failure = finished.err().map(|it| failed(Step::Finish, &it));
        if let Err(it) = &repaired {
            failure = Some(failed(Step::Attach, it));
        }
        let applied = match applied {
            Some(Err(it)) => {
                failure = Some(failed(Step::Apply, &it));
                self.options.is_beside_sockets.then(ApplyReport::default)
            }
            Some(Ok(report)) => Some(report),
            None => None,
        };
        // Beside the socket path, it is behind.
        if self.options.is_beside_sockets
            && let Some(it) = failure.as_ref().filter(|it| it.step != Step::Finish)
        {
            let reason = format!("{}; its previous state stays active; retried", it.error);
            error = Some(Rejected::not_served(PACKET_PATH, reason));
        }
        let applied = applied.zip(desired.state.clone()).map(|(mut report, (published, turn, begin))| {
            report.rejected.extend(error.clone().filter(|it| !report.rejected.contains(it)));
            Applied { turn, published, report, begin }
        });
        let tables = self.datapath.as_ref().map(nft::Datapath::tables).unwrap_or_default();
        PacketReport { applied, failed: failure, error, tables }
    }
}

async fn on_blocking_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    // Blocking tasks are never cancelled, so the error is a panic.
    spawn_blocking(work).await.unwrap_or_else(|error| panic::resume_unwind(error.into_panic()))
}

fn unavailable(error: &nft::Error) -> Rejected {
    Rejected::not_served(
        PACKET_PATH,
        format!(
            "{}; the socket path serves without it; retried until the cause is fixed",
            error_chain(error)
        ),
    )
}

#[cfg(test)]
mod tests {
    use std::thread;

    use model::state::NodeState;
    use nix::sched::{CloneFlags, unshare};

    use super::*;

    #[test]
    fn an_unavailable_packet_path_recovers() {
        // In a network namespace that ends with its thread.
        let test = thread::spawn(|| {
            if let Err(error) = unshare(CloneFlags::CLONE_NEWNET) {
                eprintln!("skipped: no network namespace can be created: {error}");
                return;
            }
            let reason = Rejected::not_served("packets", "it failed before");
            let mut packets = Packets {
                options: nft::Options { is_beside_sockets: true, ..nft::Options::default() },
                datapath: None,
                unavailable_reason: Some(reason.clone()),
                connected: None,
            };
            let published = Published::new(1, 1, "n1", NodeState::default());
            let state = Some((Arc::new(published), 1, Instant::now()));
            let desired = Desired { state, ..Desired::default() };
            let mut attempt = || {
                let attempt = packets.reconcile(&desired, true);
                (packets.report(attempt, &desired, &Retry::new()), packets.recover())
            };
            // The socket path serves without it.
            let (report, has_recovered) = attempt();
            assert_eq!(report.applied.unwrap().report.rejected, std::slice::from_ref(&reason));
            assert_eq!((report.error, report.tables), (Some(reason), Vec::new()));
            assert!(has_recovered);
            let (report, _) = attempt();
            assert_eq!(report.applied.unwrap().report.rejected, []);
            assert_eq!(report.error, None);
            assert!(report.tables.len() == 2 && report.tables.iter().all(|(_, is_there)| *is_there));
        });
        test.join().unwrap();
    }
}
