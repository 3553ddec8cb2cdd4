//! The loop of a datapath: make the newest state active, retry what failed, and do what is due without a change.
//!
//! Invariant: no state queues. Those that come while one is being applied replace each other.

use std::{collections::BTreeSet, future::pending, net::IpAddr, panic, sync::Arc, time::Duration};

use datapath::ApplyReport;
use model::error_chain;
use publish::Published;
use tokio::{
    runtime::Handle,
    sync::{mpsc, watch},
    task::{JoinHandle, spawn_blocking},
    time::{Instant, sleep, sleep_until},
};

use crate::observer::Step;

/// The delay before a failed step is retried: at first, and at most.
const BACKOFF_MIN: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(30);

/// A datapath that a [`Worker`] keeps at the newest state. Its methods may block in the kernel.
pub(crate) trait Datapath: Send + 'static {
    /// Its name in logs.
    const NAME: &str;
    /// A change of its settings, or of its programs.
    type Request: Send;
    /// The outcome of maintenance, for reports.
    type Finding: Send;
    /// Its condition after an attempt, for reports.
    type Condition: Send;
    type Error: std::error::Error + 'static;

    /// Makes a state active. After an error the previous one stays active, and the next call retries.
    fn apply(&mut self, desired: &Desired) -> Result<ApplyReport, Self::Error>;

    /// Attaches or restores what is missing of the active state; after an error the next call retries. A state is reported as
    /// active once this has succeeded.
    fn repair(&mut self) -> Result<(), Self::Error>;

    /// Does what can wait until a state is active. After an error the state stays active, and the next call retries.
    fn finish(&mut self) -> Result<(), Self::Error>;

    /// When [`Datapath::maintain`] is due.
    fn next_maintenance(&self) -> Instant;

    /// Does what is due by now.
    fn maintain(&mut self) -> (Option<Self::Finding>, Next);

    fn serve(&mut self, request: Self::Request) -> Next;

    /// Waits until the kernel notifies of a change that this process has not made. Cancel safe.
    fn changed_externally(&mut self) -> impl Future<Output = ()>;

    /// Does what such a change requires at once; returns whether [`Datapath::repair`] is due, too.
    fn on_changed_externally(&mut self) -> bool;

    fn condition(&self) -> Self::Condition;
}

/// The next action of the loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Wait for an event.
    Wait,
    /// Call [`Datapath::repair`], unless a retry is scheduled.
    Repair,
    /// Apply the newest state again.
    Apply,
}

/// A state that should be active.
#[derive(Clone, Debug)]
pub(crate) struct Desired {
    /// Number of the hand-over; increments on every new state or address change.
    pub(crate) turn: u64,
    pub(crate) published: Arc<Published>,
    /// The addresses of the host's interfaces.
    pub(crate) interfaces: Arc<BTreeSet<IpAddr>>,
    /// When it was handed over.
    pub(crate) begin: Instant,
}

#[cfg(test)]
impl Desired {
    /// The hand-over with this number, of an empty state.
    pub(crate) fn of_turn(turn: u64) -> Self {
        let published = Arc::new(Published::new(1, turn, "n1", model::state::NodeState::default()));
        Self { turn, published, interfaces: Arc::default(), begin: Instant::now() }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Applied {
    pub(crate) desired: Desired,
    /// What was done since the last report.
    pub(crate) report: ApplyReport,
}

impl Applied {
    /// Adds what was done for a state that was not reported.
    pub(crate) fn add(&mut self, before: &ApplyReport) {
        let report = &mut self.report;
        report.changed_services += before.changed_services;
        report.entries += before.entries;
        report.flipped |= before.flipped;
        report.is_full |= before.is_full;
    }
}

#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) step: Step,
    /// The error, with its causes.
    pub(crate) error: String,
    /// The state that was to be applied, or is active; `None` before the first one.
    pub(crate) desired: Option<Desired>,
    pub(crate) retry_in: Duration,
}

impl Failure {
    /// The state that was to be applied, if that failed, as if it were active.
    pub(crate) fn not_applied(&self) -> Option<Applied> {
        let desired = self.desired.clone().filter(|_| self.step == Step::Apply)?;
        Some(Applied { desired, report: ApplyReport::default() })
    }
}

#[derive(Debug)]
pub(crate) enum Event<D: Datapath> {
    /// A state is about to be applied.
    Begun { published: Arc<Published>, is_retry: bool },
    /// The state, if there was one to apply, is active, or a step has failed.
    Attempted { applied: Option<Applied>, failures: Vec<Failure>, condition: D::Condition },
    /// [`Datapath::finish`] has failed.
    Unfinished(Failure),
    /// Maintenance has a finding.
    Found(D::Finding),
}

/// Keeps a datapath at the newest state, on a thread of its own.
#[derive(Debug)]
pub(crate) struct Worker<D: Datapath> {
    desired: watch::Sender<Option<Desired>>,
    requests: mpsc::UnboundedSender<D::Request>,
    events: mpsc::UnboundedReceiver<Event<D>>,
    thread: JoinHandle<()>,
}

impl<D: Datapath> Worker<D> {
    /// Starts. The datapath is dropped once this value is. Must be called within a tokio runtime.
    pub(crate) fn start(datapath: D) -> Self {
        let (desired, states) = watch::channel(None);
        let (requests, queue) = mpsc::unbounded_channel();
        let (sender, events) = mpsc::unbounded_channel();
        let work = Loop::new(datapath, states, queue, sender);
        let thread = spawn_blocking(move || Handle::current().block_on(work.run()));
        Self { desired, requests, events, thread }
    }

    /// Replaces the state that should be active.
    pub(crate) fn apply(&self, desired: Desired) {
        self.desired.send_replace(Some(desired));
    }

    /// Has a request served before the next state is applied.
    pub(crate) fn request(&self, request: D::Request) {
        // The thread ends only after this value is dropped, or by a panic, which `next` resumes.
        let _ = self.requests.send(request);
    }

    pub(crate) async fn next(&mut self) -> Event<D> {
        match self.events.recv().await {
            Some(event) => event,
            None => match (&mut self.thread).await {
                Err(error) if error.is_panic() => panic::resume_unwind(error.into_panic()),
                _ => pending().await,
            },
        }
    }
}

struct Loop<D: Datapath> {
    datapath: D,
    states: watch::Receiver<Option<Desired>>,
    requests: mpsc::UnboundedReceiver<D::Request>,
    events: mpsc::UnboundedSender<Event<D>>,
    latest: Option<Desired>,
    /// Whether it is still to be applied.
    is_pending: bool,
    /// Whether an attempt to apply it has failed.
    is_retry: bool,
    /// The state that was applied, until the datapath is repaired.
    applied: Option<Applied>,
    /// Whether [`Datapath::finish`] is due.
    is_unfinished: bool,
    retry: Retry,
}

impl<D: Datapath> Loop<D> {
    fn new(
        datapath: D,
        states: watch::Receiver<Option<Desired>>,
        requests: mpsc::UnboundedReceiver<D::Request>,
        events: mpsc::UnboundedSender<Event<D>>,
    ) -> Self {
        Self {
            datapath,
            states,
            requests,
            events,
            latest: None,
            is_pending: false,
            is_retry: false,
            applied: None,
            is_unfinished: false,
            retry: Retry::new(),
        }
    }

    /// Runs until the [`Worker`] is dropped.
    async fn run(mut self) {
        // At the end the runtime may have no clock any more.
        while !self.events.is_closed() {
            let next = tokio::select! {
                request = self.requests.recv() => {
                    let Some(request) = request else { return };
                    self.datapath.serve(request)
                }
                changed = self.states.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    while let Ok(request) = self.requests.try_recv() {
                        self.datapath.serve(request);
                    }
                    self.latest.clone_from(&self.states.borrow_and_update());
                    self.is_retry = false;
                    Next::Apply
                }
                () = until(self.retry.at) => {
                    self.attempt();
                    Next::Wait
                }
                () = sleep_until(self.datapath.next_maintenance()) => {
                    let (finding, next) = self.datapath.maintain();
                    if let Some(finding) = finding {
                        self.send(Event::Found(finding));
                    }
                    next
                }
                () = self.datapath.changed_externally() => {
                    if self.datapath.on_changed_externally() {
                        // Two programs that undo each other's changes must not keep a CPU busy.
                        tokio::select! {
                            biased;
                            () = self.events.closed() => return,
                            () = sleep(BACKOFF_MIN) => {}
                        }
                        self.attempt();
                    }
                    Next::Wait
                }
            };
            match next {
                Next::Wait => {}
                Next::Repair if self.retry.at.is_some() => {}
                Next::Repair => self.attempt(),
                Next::Apply => {
                    self.is_pending = self.latest.is_some();
                    self.attempt();
                }
            }
        }
    }

    /// Applies the newest state if it is not applied yet, repairs the datapath, and finishes, as far as each is due.
    fn attempt(&mut self) {
        let mut failures = Vec::new();
        if let Some(desired) = self.latest.clone().filter(|_| self.is_pending) {
            self.send(Event::Begun { published: Arc::clone(&desired.published), is_retry: self.is_retry });
            let span = tracing::info_span!("apply", datapath = D::NAME, revision = desired.published.rev);
            match span.in_scope(|| self.datapath.apply(&desired)) {
                Ok(report) => {
                    let mut applied = Applied { desired, report };
                    if let Some(before) = &self.applied {
                        applied.add(&before.report);
                    }
                    self.applied = Some(applied);
                    self.is_pending = false;
                }
                Err(error) => failures.push(self.failure(Step::Apply, &error)),
            }
            self.is_retry = self.is_pending;
        }
        let mut applied = None;
        match self.datapath.repair() {
            Ok(()) => applied = self.applied.take(),
            Err(error) => failures.push(self.failure(Step::Attach, &error)),
        }
        self.is_unfinished |= applied.is_some();
        let mut has_failed = !failures.is_empty();
        self.send(Event::Attempted { applied, failures, condition: self.datapath.condition() });
        // A failed apply has tried to finish, too.
        if self.is_unfinished && !has_failed {
            match self.datapath.finish() {
                Ok(()) => self.is_unfinished = false,
                Err(error) => {
                    has_failed = true;
                    self.send(Event::Unfinished(self.failure(Step::Finish, &error)));
                }
            }
        }
        if has_failed {
            self.retry.after_backoff();
        } else {
            self.retry = Retry::new();
        }
    }

    fn failure(&self, step: Step, error: &D::Error) -> Failure {
        let desired = self.latest.clone();
        Failure { step, error: error_chain(error), desired, retry_in: self.retry.delay }
    }

    fn send(&self, event: Event<D>) {
        // The receiver may be gone.
        let _ = self.events.send(event);
    }
}

/// When a failed step is retried: the delay doubles with each failure, up to a limit.
#[derive(Debug)]
struct Retry {
    /// The delay before the next retry.
    delay: Duration,
    /// `None` if nothing has failed.
    at: Option<Instant>,
}

impl Retry {
    fn new() -> Self {
        Self { delay: BACKOFF_MIN, at: None }
    }

    fn after_backoff(&mut self) {
        self.at = Some(Instant::now() + self.delay);
        self.delay = (self.delay * 2).min(BACKOFF_MAX);
    }
}

/// Waits until a time; forever without one.
pub(crate) async fn until(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => pending().await,
    }
}

/// Waits for the next result of a source that may be off.
pub(crate) async fn next_of<T, R>(source: &mut Option<T>, next: impl AsyncFnOnce(&mut T) -> R) -> R {
    match source {
        Some(source) => next(source).await,
        None => pending().await,
    }
}

#[cfg(test)]
mod tests;
