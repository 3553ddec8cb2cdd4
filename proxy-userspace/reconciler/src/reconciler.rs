//! Makes the newest published state active, again and again.
//!
//! Invariant: nothing queues. States that are published while one is being applied replace each other.

use std::{collections::BTreeSet, io, net::IpAddr, panic, sync::Arc, time::Duration};

use datapath::{ApplyReport, AttachStatus, ProbeResult, TerminationReport};
use datapath_ebpf::{give_back_memory, probe::Prober};
use model::{Rejected, error_chain};
use netlink::host_addresses::HostAddresses;
use publish::{Published, Subscription};
use tokio::{
    task::spawn_blocking,
    time::{Instant, sleep, sleep_until},
};

use crate::{
    datapath::{Datapath, Error},
    log_dedup::LogDedup,
    observer::{Observer, Step},
    udp_termination::UdpTermination,
};

/// The delay before a failed step is retried: at first, and at most.
const BACKOFF_MIN: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(30);
/// How often the kernel is queried for the attached programs.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// A change of more entries frees enough memory that it is worth returning to the system.
const LARGE_CHANGE: usize = 10_000;

/// Keeps a datapath at the newest published state.
pub struct Reconciler<'a> {
    /// `None` only while a blocking thread has it.
    datapath: Option<Datapath>,
    states: Subscription,
    observer: &'a dyn Observer,
    /// The state published last; it is applied again when the host's addresses change.
    latest: Option<Arc<Published>>,
    /// The newest state, until it is in the maps.
    pending: Option<Arc<Published>>,
    /// The state in the maps, until the programs that use them are attached.
    applied: Option<Applied>,
    /// Whether [`Datapath::finish_generation`] is due.
    is_unfinished: bool,
    /// What is not served, as logged last.
    rejected: BTreeSet<Rejected>,
    retry: Retry,
    next_check: Instant,
    addresses: HostAddresses,
    termination: Option<UdpTermination>,
    prober: Option<Prober>,
    log: LogDedup,
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
    /// Sockets of removed endpoints were terminated.
    Terminated(io::Result<TerminationReport>),
    /// Somebody else has changed our tables.
    ChangedExternally,
    /// A retry or a check is due.
    TimerElapsed,
}

/// A state that is in the maps.
struct Applied {
    published: Arc<Published>,
    report: ApplyReport,
    begin: Instant,
}

/// The results of the steps of one reconciliation.
struct ReconcileOutcome {
    /// `None` if there was no pending state.
    applied: Option<Result<ApplyReport, Error>>,
    attached: Result<(), Error>,
    /// What an earlier start left and could not be removed.
    stale: Vec<Rejected>,
}

impl<'a> Reconciler<'a> {
    /// Prepares to keep `datapath` at the newest of `states`. What happens is reported to `observer`.
    pub fn new(datapath: Datapath, states: Subscription, observer: &'a dyn Observer) -> Self {
        Self {
            datapath: Some(datapath),
            states,
            observer,
            latest: None,
            pending: None,
            applied: None,
            is_unfinished: false,
            rejected: BTreeSet::new(),
            retry: Retry::new(),
            next_check: Instant::now(),
            addresses: HostAddresses::default(),
            termination: None,
            prober: None,
            log: LogDedup::default(),
        }
    }

    /// Runs until the publisher is gone. A step that fails leaves the last state active, is reported, and is retried with
    /// exponential backoff, or at once with the next state. Must be called within a tokio runtime.
    pub async fn run(mut self) {
        self.report_packet_path();
        self.pending = self.states.next().await;
        self.latest.clone_from(&self.pending);
        if let Some(addresses) = self.addresses.poll() {
            self.datapath_mut().set_interfaces(addresses);
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
            match self.next_event().await {
                Event::Published(published) => self.on_published(published),
                Event::Closed => return,
                Event::AddressesChanged(addresses) => self.on_addresses_changed(addresses),
                Event::Probed(results) => self.on_probed(&results),
                Event::Terminated(report) => self.on_terminated(&report),
                Event::ChangedExternally => self.on_changed_externally().await,
                Event::TimerElapsed => {}
            }
        }
    }

    async fn next_event(&mut self) -> Event {
        let wake = self.retry.at.map_or(self.next_check, |it| it.min(self.next_check));
        let datapath = self.datapath.as_ref().expect(DATAPATH_IS_BACK);
        tokio::select! {
            next = self.states.next() => next.map_or(Event::Closed, Event::Published),
            addresses = self.addresses.changed() => Event::AddressesChanged(addresses),
            results = next_of(&mut self.prober, Prober::next) => Event::Probed(results),
            report = next_of(&mut self.termination, UdpTermination::report) => Event::Terminated(report),
            () = datapath.changed_externally() => Event::ChangedExternally,
            () = sleep_until(wake) => Event::TimerElapsed,
        }
    }

    fn on_published(&mut self, published: Arc<Published>) {
        self.latest = Some(Arc::clone(&published));
        self.pending = Some(published);
        self.retry.at_once();
    }

    fn on_addresses_changed(&mut self, addresses: BTreeSet<IpAddr>) {
        self.datapath_mut().set_interfaces(addresses);
        self.reapply();
    }

    fn on_probed(&mut self, results: &[ProbeResult]) {
        self.log.probed(results);
        self.observer.on_probed(results);
    }

    fn on_terminated(&mut self, report: &io::Result<TerminationReport>) {
        self.log.terminated(report);
        self.observer.on_terminated(report);
    }

    async fn on_changed_externally(&mut self) {
        // The other side may not be finished; and two that undo each other's changes must not keep a CPU busy.
        sleep(BACKOFF_MIN).await;
        self.retry.at_once();
    }

    /// Applies the latest state again, at once.
    fn reapply(&mut self) {
        self.pending.clone_from(&self.latest);
        self.retry.at_once();
    }

    /// Applies the pending state, attaches the programs, and finishes the generation, as far as each is due.
    async fn reconcile(&mut self) {
        let begin = Instant::now();
        if let Some(published) = &self.pending {
            self.observer.on_dequeued(published);
            if let Some(termination) = &self.termination {
                termination.before_apply(&published.state);
            }
        }
        let ReconcileOutcome { applied, attached, stale } = self.apply_and_attach().await;
        let mut has_failed = !self.record_applied(applied, begin);
        // A packet path that is behind the socket path is retried with the same state.
        let pending_error = self.datapath_mut().pending_error().map(ToString::to_string);
        if pending_error.is_some() {
            self.pending.clone_from(&self.latest);
        }
        self.report_packet_path();
        match attached {
            Ok(()) => has_failed |= !self.on_attached(stale, has_failed).await,
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
        // Reported after what is active: this is what is missing of it.
        if let Some(error) = pending_error {
            has_failed = true;
            self.observer.on_failed(Step::Apply, &error);
            tracing::error!(
                "only the socket path is up to date: {error}; retrying in {:?}",
                self.retry.delay
            );
        }
        if has_failed { self.retry.after_backoff() } else { self.retry = Retry::new() }
    }

    /// Applies the pending state if there is one, and attaches the programs: in one call, because each hand-over to another
    /// thread takes as long as a small change.
    async fn apply_and_attach(&mut self) -> ReconcileOutcome {
        let (pending, is_in_maps) = (self.pending.clone(), self.applied.is_some());
        self.on_blocking_thread(move |datapath| {
            let applied = pending.map(|it| datapath.apply(&it.state));
            let attached = datapath.attach();
            let is_in_maps = is_in_maps || matches!(applied, Some(Ok(_)));
            let stale = if attached.is_ok() && is_in_maps { datapath.remove_stale() } else { Vec::new() };
            ReconcileOutcome { applied, attached, stale }
        })
        .await
    }

    /// Records what became of the pending state; returns whether nothing failed.
    fn record_applied(&mut self, result: Option<Result<ApplyReport, Error>>, begin: Instant) -> bool {
        let (Some(published), Some(result)) = (&self.pending, result) else { return true };
        match result {
            Ok(report) => {
                self.applied = Some(Applied { published: Arc::clone(published), report, begin });
                self.pending = None;
                true
            }
            Err(error) => {
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
    async fn on_attached(&mut self, stale: Vec<Rejected>, has_failed: bool) -> bool {
        let applied = self.applied.take().map(|mut it| {
            it.report.rejected.extend(stale);
            self.is_unfinished = true;
            self.report_active(it)
        });
        // A failed apply has tried to finish the generation, too.
        let is_finished =
            if self.is_unfinished && !has_failed { self.finish_generation().await } else { true };
        if applied.as_ref().is_some_and(|it| it.report.is_full || it.report.entries > LARGE_CHANGE) {
            // The change took far more memory than keeping its result does.
            spawn_blocking(give_back_memory);
        }
        if let (Some(termination), Some(applied)) = (&mut self.termination, &applied) {
            termination.on_active(&applied.published);
        }
        is_finished
    }

    async fn finish_generation(&mut self) -> bool {
        let result = self.on_blocking_thread(Datapath::finish_generation).await;
        self.is_unfinished = result.is_err();
        if let Err(error) = &result {
            let error = error_chain(error);
            self.observer.on_failed(Step::Finish, &error);
            tracing::warn!("finishing the generation failed: {error}; retrying in {:?}", self.retry.delay);
        }
        result.is_ok()
    }

    /// Reports what is active now, and each new rejection once.
    fn report_active(&mut self, applied: Applied) -> Applied {
        let Applied { published, report, begin } = &applied;
        let took = begin.elapsed();
        self.observer.on_applied(published, report, took);
        if report.flipped {
            tracing::info!(
                rev = published.rev,
                services = report.services,
                changed = report.changed_services,
                entries = report.entries,
                ?took,
                "state active"
            );
        }
        let rejected: BTreeSet<_> = report.rejected.iter().cloned().collect();
        for it in rejected.difference(&self.rejected) {
            tracing::warn!("not served: {it}");
        }
        self.rejected = rejected;
        applied
    }

    /// Queries the kernel for what is attached, and retries what was unavailable. Returns whether to reconcile at once.
    async fn check(&mut self) -> bool {
        self.next_check = Instant::now() + CHECK_INTERVAL;
        let status = self.on_blocking_thread(Datapath::attach_status).await;
        self.start_prober(&status);
        let is_complete = self.report_attach_status(status);
        let has_recovered = match self.latest.clone() {
            Some(latest) => self.on_blocking_thread(move |it| it.recover(&latest.state)).await,
            None => false,
        };
        if has_recovered {
            tracing::info!("the packet path is available now: traffic without a local socket is served");
            self.reapply();
        }
        if let Err(error) = self.on_blocking_thread(Datapath::refresh_exclusions).await {
            tracing::warn!("excluded cgroups cannot be looked up: {}", error_chain(&error));
        }
        if let Some(stats) = self.on_blocking_thread(Datapath::table_stats).await.transpose()
            && let Some(stats) = self.log.table_stats(stats)
        {
            self.observer.on_table_stats(stats);
        }
        // What is missing is attached again at once, unless a retry is scheduled.
        self.retry.at.is_none() && (has_recovered || !is_complete)
    }

    /// Starts to probe the hooks once all are attached.
    fn start_prober(&mut self, status: &Result<Option<AttachStatus>, Error>) {
        if self.prober.is_none()
            && let Ok(Some(status)) = status
            && status.is_complete()
        {
            self.prober = self.datapath_mut().cgroup().map(ToOwned::to_owned).map(Prober::start);
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

    fn report_packet_path(&self) {
        let datapath = self.datapath.as_ref().expect(DATAPATH_IS_BACK);
        self.observer.on_packet_path(datapath.packet_path_error());
    }

    fn start_termination(&mut self) {
        let terminator = self.datapath_mut().udp_terminator().unwrap_or_else(|error| {
            tracing::error!("UDP sockets stay connected to removed endpoints: {}", error_chain(&error));
            None
        });
        self.termination = terminator.map(UdpTermination::start);
    }

    fn datapath_mut(&mut self) -> &mut Datapath {
        self.datapath.as_mut().expect(DATAPATH_IS_BACK)
    }

    /// Lends the datapath to a thread that may block in the kernel.
    async fn on_blocking_thread<T: Send + 'static>(
        &mut self,
        work: impl FnOnce(&mut Datapath) -> T + Send + 'static,
    ) -> T {
        let mut datapath = self.datapath.take().expect(DATAPATH_IS_BACK);
        let task = spawn_blocking(move || {
            let result = work(&mut datapath);
            (datapath, result)
        });
        // Blocking tasks are never cancelled, so the error is a panic.
        let (datapath, result) = task.await.unwrap_or_else(|error| panic::resume_unwind(error.into_panic()));
        self.datapath = Some(datapath);
        result
    }
}

const DATAPATH_IS_BACK: &str = "the datapath is back after every call";

/// Waits for the next result of what may not be started yet.
async fn next_of<T, R>(source: &mut Option<T>, next: impl AsyncFnOnce(&mut T) -> R) -> R {
    match source {
        Some(source) => next(source).await,
        None => std::future::pending().await,
    }
}

/// When a failed step is retried.
struct Retry {
    /// The delay before the next retry.
    delay: Duration,
    /// `None` if nothing has failed, or something new makes a retry worthwhile at once.
    at: Option<Instant>,
}

impl Retry {
    fn new() -> Self {
        Self { delay: BACKOFF_MIN, at: None }
    }

    fn is_due(&self) -> bool {
        self.at.is_none_or(|it| it <= Instant::now())
    }

    fn at_once(&mut self) {
        self.at = None;
    }

    fn after_backoff(&mut self) {
        self.at = Some(Instant::now() + self.delay);
        self.delay = (self.delay * 2).min(BACKOFF_MAX);
    }
}
