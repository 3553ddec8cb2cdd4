//! Makes the newest published state active, again and again.
//!
//! Invariant: nothing queues, and sockets never wait for packets. States that are published while one is being applied
//! replace each other, in each half of the datapath for itself.

use std::{collections::BTreeSet, net::IpAddr, panic, sync::Arc, time::Duration};

use datapath::{ApplyReport, AttachStatus, ProbeResult};
use datapath_ebpf::{CgroupEvents, give_back_memory, probe::Prober};
use model::{Rejected, error_chain};
use netlink::host_addresses::HostAddresses;
use publish::{Published, Subscription};
use tokio::{
    sync::mpsc,
    task::spawn_blocking,
    time::{Instant, sleep_until},
};

use crate::{
    datapath::{Datapath, Error, Sockets},
    log_dedup::LogDedup,
    observer::{Observer, Step},
    packet_path::{Failed, PacketEvent, PacketPath, PacketReport, Packets},
    progress::{Applied, Progress},
    retry::Retry,
    socket_termination::{self, SocketTermination},
    state_log::StateLog,
    trace::{TraceEvent, TraceRequest, Traces},
};

/// How often the kernel is queried for the attached programs.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// How often ejected endpoints are tried.
const TRIAL_INTERVAL: Duration = Duration::from_secs(1);
/// A change of more entries frees enough memory that it is worth returning to the system.
const LARGE_CHANGE: usize = 10_000;

/// Keeps a datapath at the newest published state.
pub struct Reconciler<'a> {
    /// `None` only while a blocking thread has it.
    sockets: Option<Sockets>,
    /// Until it is started.
    packets: Option<Packets>,
    packet_path: Option<PacketPath>,
    /// Which of its tables are as they were written.
    tables: Vec<(&'static str, bool)>,
    /// Whether it translates what sockets leave to it, as the socket path was told; `None` if it was not told yet.
    packets_serve: Option<bool>,
    states: Subscription,
    observer: &'a dyn Observer,
    /// The state published last; it is applied again when the host's addresses change.
    latest: Option<Arc<Published>>,
    /// The newest state, until it is in the maps.
    pending: Option<Arc<Published>>,
    /// When the latest state was dequeued.
    begin: Instant,
    /// Counts the states that were to be applied, the same one again if the host's addresses changed.
    turn: u64,
    progress: Progress,
    interfaces: BTreeSet<IpAddr>,
    /// The state in the maps, until the programs that use them are attached.
    applied: Option<Applied>,
    /// Whether [`Sockets::finish_generation`] is due.
    is_unfinished: bool,
    /// What is not served, as logged last.
    rejected: BTreeSet<Rejected>,
    retry: Retry,
    next_check: Instant,
    next_trial: Instant,
    addresses: HostAddresses,
    termination: Option<SocketTermination>,
    prober: Option<Prober>,
    cgroups: Option<CgroupEvents>,
    traces: Traces,
    log: LogDedup,
    state_log: StateLog,
}

/// What wakes the reconciler.
enum Event {
    /// A new state was published.
    Published(Arc<Published>),
    /// No further state will be published.
    Closed,
    /// The host's addresses are these now.
    AddressesChanged(BTreeSet<IpAddr>),
    /// The hooks were probed.
    Probed(Vec<ProbeResult>),
    /// A cgroup was created, perhaps one that is excluded.
    CgroupCreated,
    /// Sockets of removed endpoints were terminated.
    Terminated(socket_termination::Report),
    /// The packet path was applied or repaired.
    Packets(PacketEvent),
    /// A trace is to begin, or has ended.
    Trace(TraceEvent),
    /// A retry or a check is due.
    TimerElapsed,
}

/// The results of the steps of one reconciliation.
struct ReconcileOutcome {
    /// `None` if there was no pending state.
    applied: Option<Result<ApplyReport, Error>>,
    attached: Result<(), Error>,
}

impl<'a> Reconciler<'a> {
    /// Prepares to keep `datapath` at the newest of `states`. What happens is reported to `observer`.
    pub fn new(datapath: Datapath, states: Subscription, observer: &'a dyn Observer) -> Self {
        let Datapath { sockets, packets } = datapath;
        Self {
            progress: Progress::new(sockets.is_on(), packets.is_some()),
            sockets: Some(sockets),
            packets,
            packet_path: None,
            tables: Vec::new(),
            packets_serve: None,
            begin: Instant::now(),
            turn: 0,
            interfaces: BTreeSet::new(),
            states,
            observer,
            latest: None,
            pending: None,
            applied: None,
            is_unfinished: false,
            rejected: BTreeSet::new(),
            retry: Retry::new(),
            next_check: Instant::now(),
            next_trial: Instant::now(),
            addresses: HostAddresses::default(),
            termination: None,
            prober: None,
            cgroups: None,
            traces: Traces::default(),
            log: LogDedup::default(),
            state_log: StateLog::default(),
        }
    }

    /// Serves these requests for traces.
    #[must_use]
    pub fn with_traces(mut self, requests: mpsc::Receiver<TraceRequest>) -> Self {
        self.traces.requests = Some(requests);
        self
    }

    /// Runs until the publisher is gone. A step that fails leaves the last state active, is reported, and is retried with
    /// exponential backoff, or at once with the next state. Must be called within a tokio runtime.
    pub async fn run(mut self) {
        let packets = self.packets.take();
        self.observer.on_packet_path(packets.as_ref().and_then(Packets::unavailable_reason));
        self.packet_path = packets.map(PacketPath::start);
        self.cgroups = self.sockets_mut().cgroup_events();
        if self.packet_path.is_none() {
            self.set_packets_serve(false).await;
        }
        if let Some(addresses) = self.addresses.poll() {
            self.set_interfaces(addresses);
        }
        if let Some(published) = self.states.next().await {
            self.on_published(published);
        }
        self.start_termination();
        loop {
            if self.retry.is_due() {
                self.reconcile().await;
            }
            // States may come without a pause; checks are due all the same.
            if self.next_check <= Instant::now() && self.check().await {
                continue;
            }
            if self.next_trial <= Instant::now() {
                self.try_ejected().await;
            }
            match self.next_event().await {
                Event::Published(published) => self.on_published(published),
                Event::Closed => return,
                Event::AddressesChanged(addresses) => self.on_addresses_changed(addresses),
                Event::Probed(results) => self.on_probed(&results),
                Event::CgroupCreated => self.refresh_exclusions().await,
                Event::Terminated((transport, report)) => {
                    self.log.terminated(transport, &report);
                    self.observer.on_terminated(transport, &report);
                }
                Event::Packets(PacketEvent::Attempted(report)) => self.on_packets(report).await,
                Event::Packets(PacketEvent::UpkeepDone(upkeep)) => {
                    self.observer.on_packet_affinity(upkeep.affinity);
                    self.observer.on_kube_proxy_rules(upkeep.has_kube_proxy_rules);
                }
                Event::Trace(TraceEvent::Requested(request)) => self.begin_trace(*request).await,
                Event::Trace(TraceEvent::Ended) => self.on_blocking_thread(Sockets::end_trace).await,
                Event::TimerElapsed => {}
            }
        }
    }

    async fn next_event(&mut self) -> Event {
        let due = self.next_check.min(self.next_trial);
        let wake = self.retry.at.map_or(due, |it| it.min(due));
        tokio::select! {
            next = self.states.next() => next.map_or(Event::Closed, Event::Published),
            addresses = self.addresses.changed() => Event::AddressesChanged(addresses),
            results = next_of(&mut self.prober, Prober::next) => Event::Probed(results),
            () = next_of(&mut self.cgroups, CgroupEvents::next) => Event::CgroupCreated,
            report = next_of(&mut self.termination, SocketTermination::report) => Event::Terminated(report),
            report = next_of(&mut self.packet_path, PacketPath::report) => Event::Packets(report),
            event = self.traces.next() => Event::Trace(event),
            () = sleep_until(wake) => Event::TimerElapsed,
        }
    }

    fn on_published(&mut self, published: Arc<Published>) {
        self.latest = Some(published);
        self.apply_latest();
    }

    fn on_addresses_changed(&mut self, addresses: BTreeSet<IpAddr>) {
        self.set_interfaces(addresses);
        self.apply_latest();
    }

    fn set_interfaces(&mut self, addresses: BTreeSet<IpAddr>) {
        self.interfaces.clone_from(&addresses);
        self.sockets_mut().set_interfaces(addresses);
    }

    fn on_probed(&mut self, results: &[ProbeResult]) {
        self.log.probed(results);
        self.observer.on_probed(results);
    }

    /// Makes the latest state pending in both halves, at once.
    fn apply_latest(&mut self) {
        self.pending.clone_from(&self.latest);
        self.retry.at_once();
        if let Some(published) = &self.latest {
            self.turn += 1;
            self.begin = Instant::now();
            if let Some(packets) = &self.packet_path {
                packets.apply(published, &self.interfaces, self.turn, self.begin);
            }
        }
    }

    /// The packet path was applied or repaired, or that failed.
    async fn on_packets(&mut self, report: Box<PacketReport>) {
        let PacketReport { applied, failed, error, tables } = *report;
        self.set_packets_serve(!tables.is_empty() && tables.iter().all(|(_, is_there)| *is_there)).await;
        self.tables = tables;
        self.observer.on_packet_path(error.as_ref());
        if let Some(applied) = applied.and_then(|it| self.progress.packets_have(it)) {
            self.report_active(applied).await;
        }
        // Reported after what is active: this is what is missing of it.
        let Some(Failed { step, error: cause, rev, retry }) = failed else { return };
        // It is taken again for the retry.
        if let (Some(latest), Step::Apply) = (&self.latest, step) {
            self.observer.on_dequeued(latest);
        }
        // Beside the socket path it is named in full.
        let cause = error.map_or(cause, |it| it.to_string());
        self.observer.on_failed(step, &cause);
        self.state_log.failed();
        let is_beside_sockets = self.sockets_mut().is_on();
        match step {
            Step::Finish => tracing::warn!("finishing the generation failed: {cause}; retrying in {retry:?}"),
            _ if is_beside_sockets => {
                tracing::error!("only the socket path is up to date: {cause}; retrying in {retry:?}");
            }
            Step::Apply => tracing::error!(
                "apply failed (rev {rev}): {cause}; the previous state stays active; retrying in {retry:?}"
            ),
            Step::Attach => tracing::error!("repairing the tables failed: {cause}; retrying in {retry:?}"),
        }
    }

    /// Says whether the packet path translates what sockets leave to it.
    async fn set_packets_serve(&mut self, serve: bool) {
        if self.packets_serve == Some(serve) {
            return;
        }
        match self.on_blocking_thread(move |it| it.set_packets_serve(serve)).await {
            Ok(()) => self.packets_serve = Some(serve),
            Err(error) => {
                tracing::warn!(
                    "sockets cannot be told whether packets are translated: {}",
                    error_chain(&error)
                );
            }
        }
    }

    /// Applies the pending state, attaches the programs, and finishes the generation, as far as each is due.
    async fn reconcile(&mut self) {
        if let Some(published) = &self.pending {
            self.observer.on_dequeued(published);
            if let Some(termination) = &self.termination {
                termination.before_apply(&published.state);
            }
        }
        let ReconcileOutcome { applied, attached } = self.apply_and_attach().await;
        let mut has_failed = !self.record_applied(applied);
        match attached {
            Ok(()) => has_failed |= !self.on_attached(has_failed).await,
            Err(error) => {
                has_failed = true;
                let error = error_chain(&error);
                self.observer.on_failed(Step::Attach, &error);
                tracing::error!(
                    "attaching the programs failed, so that Services may be unreachable from this node: {error}; \
                     retrying in {:?}",
                    self.retry.delay
                );
            }
        }
        if has_failed {
            self.state_log.failed();
            self.retry.after_backoff();
        } else {
            self.retry = Retry::new();
        }
    }

    /// Applies the pending state if there is one, and attaches the programs: in one call, because each hand-over to another
    /// thread takes as long as a small change.
    async fn apply_and_attach(&mut self) -> ReconcileOutcome {
        let pending = self.pending.clone();
        self.on_blocking_thread(move |sockets| {
            let applied = pending.and_then(|it| sockets.apply(&it.state));
            ReconcileOutcome { applied, attached: sockets.attach() }
        })
        .await
    }

    /// Records what became of the pending state; returns whether nothing failed.
    fn record_applied(&mut self, result: Option<Result<ApplyReport, Error>>) -> bool {
        let Some(published) = &self.pending else { return true };
        match result {
            // The socket path is off.
            None => {
                self.pending = None;
                true
            }
            Some(Ok(report)) => {
                let (turn, begin) = (self.turn, self.begin);
                self.applied = Some(Applied { turn, published: Arc::clone(published), report, begin });
                self.pending = None;
                true
            }
            Some(Err(error)) => {
                let error = error_chain(&error);
                self.observer.on_failed(Step::Apply, &error);
                tracing::error!(
                    "apply failed (rev {}): {error}; the previous state stays active; retrying in {:?}",
                    published.rev,
                    self.retry.delay
                );
                false
            }
        }
    }

    /// The programs use the maps: what is in them is active. Returns whether nothing failed.
    async fn on_attached(&mut self, has_failed: bool) -> bool {
        let applied = self.applied.take();
        let active = applied.as_ref().map(|it| Arc::clone(&it.published));
        if let Some(applied) = applied {
            self.is_unfinished = true;
            if let Some(active) = self.progress.sockets_have(applied) {
                self.report_active(active).await;
            }
        }
        // A failed apply has tried to finish the generation, too.
        let is_finished =
            if self.is_unfinished && !has_failed { self.finish_generation().await } else { true };
        if let (Some(termination), Some(active)) = (&mut self.termination, &active) {
            termination.on_active(active);
        }
        is_finished
    }

    async fn finish_generation(&mut self) -> bool {
        let result = self.on_blocking_thread(Sockets::finish_generation).await;
        self.is_unfinished = result.is_err();
        if let Err(error) = &result {
            let error = error_chain(error);
            self.observer.on_failed(Step::Finish, &error);
            tracing::warn!("finishing the generation failed: {error}; retrying in {:?}", self.retry.delay);
        }
        result.is_ok()
    }

    /// Reports what is active in both halves now, and each new rejection once.
    async fn report_active(&mut self, mut applied: Applied) {
        // What another start left of a half that is off now is removed once its replacement is in effect.
        if self.sockets_mut().has_stale() {
            applied.report.rejected.extend(self.on_blocking_thread(Sockets::remove_stale).await);
        }
        let Applied { published, report, begin, .. } = &applied;
        let took = begin.elapsed();
        self.observer.on_applied(published, report, took);
        if report.flipped {
            self.state_log.active(published.rev, report, took);
        }
        let rejected: BTreeSet<_> = report.rejected.iter().cloned().collect();
        for it in rejected.difference(&self.rejected) {
            tracing::warn!("{}", it.log_line());
        }
        if report.is_full || report.entries > LARGE_CHANGE {
            // The change took far more memory than keeping its result does.
            spawn_blocking(give_back_memory);
        }
        self.rejected = rejected;
    }

    /// Attaches the programs of a trace; the trace before, if there was one, ends.
    async fn begin_trace(&mut self, TraceRequest { programs, begun, ended }: TraceRequest) {
        let result = self.on_blocking_thread(move |it| it.begin_trace(programs)).await;
        self.traces.ended = Some(ended);
        // If the requester is gone, the trace ends at once.
        let _ = begun.send(result.map_err(|it| error_chain(&it)));
    }

    /// Queries the kernel for what is attached. Returns whether to reconcile at once.
    async fn check(&mut self) -> bool {
        self.next_check = Instant::now() + CHECK_INTERVAL;
        self.state_log.summarize();
        let tables = self.tables.clone();
        let status = self.on_blocking_thread(move |it| it.attach_status(tables)).await;
        self.start_prober(&status);
        let is_complete = self.report_attach_status(status);
        self.refresh_exclusions().await;
        if let Some(stats) = self.on_blocking_thread(Sockets::table_stats).await.transpose()
            && let Some(stats) = self.log.table_stats(stats)
        {
            if let Some(packets) = &self.packet_path {
                packets.avoid(stats.avoided());
            }
            self.observer.on_table_stats(stats);
        }
        // What is missing is attached again at once, unless a retry is scheduled.
        self.retry.at.is_none() && !is_complete
    }

    async fn try_ejected(&mut self) {
        self.next_trial = Instant::now() + TRIAL_INTERVAL;
        if let Err(error) = self.on_blocking_thread(Sockets::try_ejected).await {
            // `table_stats` reads the same records, and warns.
            tracing::debug!("ejected endpoints cannot be tried: {}", error_chain(&error));
        }
    }

    async fn refresh_exclusions(&mut self) {
        if let Err(error) = self.on_blocking_thread(Sockets::refresh_exclusions).await {
            tracing::warn!("excluded cgroups cannot be looked up: {}", error_chain(&error));
        }
    }

    /// Starts to probe the hooks once all are attached.
    fn start_prober(&mut self, status: &Result<Option<AttachStatus>, Error>) {
        if self.prober.is_none()
            && let Ok(Some(status)) = status
            && status.is_complete()
        {
            self.prober = self.sockets_mut().cgroup().map(ToOwned::to_owned).map(Prober::start);
        }
    }

    /// Reports what the kernel says; returns whether every program is attached, as far as is known.
    fn report_attach_status(&mut self, status: Result<Option<AttachStatus>, Error>) -> bool {
        match status {
            Ok(None) => true,
            Ok(Some(status)) => {
                self.observer.on_attach_checked(Ok(&status));
                self.log.attach_checked(&status);
                let missing: Vec<_> = status.missing().map(|it| it.name).collect();
                if !missing.is_empty() {
                    tracing::error!(
                        "{} of our programs were detached from {} and will be attached again: {}",
                        missing.len(),
                        status.cgroup.display(),
                        missing.join(", ")
                    );
                }
                missing.is_empty()
            }
            Err(error) => {
                let error = error_chain(&error);
                self.observer.on_attach_checked(Err(&error));
                tracing::warn!("the attached programs cannot be queried: {error}");
                true
            }
        }
    }

    fn start_termination(&mut self) {
        let terminator = self.sockets_mut().socket_terminator().unwrap_or_else(|error| {
            tracing::error!("sockets stay connected to removed endpoints: {}", error_chain(&error));
            None
        });
        self.termination = terminator.map(SocketTermination::start);
    }

    fn sockets_mut(&mut self) -> &mut Sockets {
        self.sockets.as_mut().expect(SOCKETS_ARE_BACK)
    }

    /// Lends the socket path to a thread that may block in the kernel.
    async fn on_blocking_thread<T: Send + 'static>(
        &mut self,
        work: impl FnOnce(&mut Sockets) -> T + Send + 'static,
    ) -> T {
        let mut sockets = self.sockets.take().expect(SOCKETS_ARE_BACK);
        let task = spawn_blocking(move || {
            let result = work(&mut sockets);
            (sockets, result)
        });
        // Blocking tasks are never cancelled, so the error is a panic.
        let (sockets, result) = task.await.unwrap_or_else(|error| panic::resume_unwind(error.into_panic()));
        self.sockets = Some(sockets);
        result
    }
}

const SOCKETS_ARE_BACK: &str = "the socket path is back after every call";

/// Waits for the next result of what may not be started yet.
async fn next_of<T, R>(source: &mut Option<T>, next: impl AsyncFnOnce(&mut T) -> R) -> R {
    match source {
        Some(source) => next(source).await,
        None => std::future::pending().await,
    }
}
