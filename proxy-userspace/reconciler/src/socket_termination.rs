//! Terminates sockets connected to removed endpoints in the background, so that no update waits for it: UDP at once, TCP once its
//! Service has drained.
//!
//! Invariant: a socket is judged by the state that was active when it was listed, never by an older one: a newer state may
//! have redirected it to an endpoint that the older one does not have.

use std::{collections::BTreeSet, io, net::SocketAddr, sync::Arc, time::Duration};

use parking_lot::{Mutex, MutexGuard};

use datapath::TerminationReport;
use datapath_ebpf::{AllowedBackends, BackendPair, SocketTerminator, as_node_port, udp_differs, udp_lost};
use model::state::NodeState;
use netlink::sock_diag::Transport;
use publish::Published;
use tokio::{
    sync::{Notify, mpsc, watch},
    task::spawn_blocking,
    time::Instant,
};

use crate::{draining::Draining, worker::until};

/// When UDP sockets are listed once more after a change: those that chose an endpoint just before the flip are connected by
/// then.
const SECOND_PASS_DELAY: Duration = Duration::from_secs(1);
const BACKOFF_MIN: Duration = SECOND_PASS_DELAY;
const BACKOFF_MAX: Duration = Duration::from_secs(60);

pub(crate) struct SocketTermination {
    /// The active state; `None` while it is changing.
    active: watch::Sender<Option<Arc<Published>>>,
    /// The state that was active last.
    last: Option<Arc<Published>>,
    udp: Arc<Scheduled<UdpPasses>>,
    tcp: Arc<Scheduled<Draining>>,
}

/// What became of one pass over the sockets of a transport.
pub(crate) type Report = (Transport, io::Result<TerminationReport>);

impl SocketTermination {
    /// Starts; what it does is reported until the receiver is dropped. Must be called within a tokio runtime.
    pub(crate) fn start(terminator: SocketTerminator) -> (Self, mpsc::UnboundedReceiver<Report>) {
        let terminator = Arc::new(terminator);
        let (active, states) = watch::channel(None);
        let (sender, reports) = mpsc::unbounded_channel();
        let udp = Scheduled::start(&terminator, &states, &sender);
        let tcp = Scheduled::start(&terminator, &states, &sender);
        (Self { active, last: None, udp, tcp }, reports)
    }

    pub(crate) fn before_apply(&self, next: &NodeState) {
        if self.last.as_ref().is_none_or(|last| udp_differs(&last.state, next))
            || self.tcp.lock().is_shortened_by(next)
        {
            self.active.send_replace(None);
        }
    }

    /// A state is active, and no program uses the one before any more.
    pub(crate) fn on_active(&mut self, published: &Arc<Published>) {
        let now = Instant::now();
        // While no process ran, any socket may have lost its endpoint.
        let is_lost = self.last.as_ref().is_none_or(|last| udp_lost(&last.state, &published.state));
        self.last = Some(Arc::clone(published));
        self.tcp.lock().update(&published.state, now);
        self.active.send_if_modified(|active| {
            let was_changing = active.is_none();
            *active = Some(Arc::clone(published));
            was_changing
        });
        if is_lost {
            self.udp.lock().0.extend([now, now + SECOND_PASS_DELAY]);
            self.udp.changed.notify_one();
        }
        self.tcp.changed.notify_one();
    }
}

/// When sockets of a transport are listed, and which are terminated.
trait Schedule: Default + Send + 'static {
    const TRANSPORT: Transport;
    /// What judges the sockets of a pass.
    type Pass: Send + Sync + 'static;

    /// When the next pass is due.
    fn next(&self) -> Option<Instant>;

    /// Begins a pass while a state is active.
    fn begin(&self, active: &NodeState, at: Instant) -> Self::Pass;

    /// Whether connections to a destination that were redirected to a backend are terminated.
    fn is_lost(pass: &Self::Pass, destination: SocketAddr, backend: SocketAddr) -> bool;

    fn end(&mut self, pass: &Self::Pass, at: Instant);
}

/// When UDP sockets are listed.
#[derive(Default)]
struct UdpPasses(BTreeSet<Instant>);

impl Schedule for UdpPasses {
    const TRANSPORT: Transport = Transport::Udp;
    type Pass = AllowedBackends;

    fn next(&self) -> Option<Instant> {
        self.0.first().copied()
    }

    fn begin(&self, active: &NodeState, _: Instant) -> AllowedBackends {
        AllowedBackends::of(active)
    }

    fn is_lost(pass: &AllowedBackends, destination: SocketAddr, backend: SocketAddr) -> bool {
        !pass.contains(destination, backend)
    }

    fn end(&mut self, _: &AllowedBackends, at: Instant) {
        self.0.retain(|it| *it > at);
    }
}

struct DrainPass {
    /// Whose connections are ended.
    due: BTreeSet<BackendPair>,
    /// All that are connected, if that is to be found out.
    found: Option<Mutex<BTreeSet<BackendPair>>>,
}

impl Schedule for Draining {
    const TRANSPORT: Transport = Transport::Tcp;
    type Pass = DrainPass;

    fn next(&self) -> Option<Instant> {
        self.next()
    }

    fn begin(&self, _: &NodeState, at: Instant) -> DrainPass {
        DrainPass { due: self.due(at), found: self.is_search_due(at).then(Mutex::default) }
    }

    fn is_lost(pass: &DrainPass, destination: SocketAddr, backend: SocketAddr) -> bool {
        if let Some(found) = &pass.found {
            found.lock().insert((destination, backend));
        }
        [destination, as_node_port(destination)].iter().any(|it| pass.due.contains(&(*it, backend)))
    }

    fn end(&mut self, pass: &DrainPass, at: Instant) {
        self.on_ended(&pass.due, at);
        if let Some(found) = &pass.found {
            self.on_found(&found.lock());
        }
    }
}

/// A schedule, which a worker follows.
struct Scheduled<S> {
    schedule: Mutex<S>,
    /// Notified when it has changed.
    changed: Notify,
}

impl<S: Schedule> Scheduled<S> {
    fn start(
        terminator: &Arc<SocketTerminator>,
        states: &watch::Receiver<Option<Arc<Published>>>,
        reports: &mpsc::UnboundedSender<Report>,
    ) -> Arc<Self> {
        let it = Arc::new(Self { schedule: Mutex::default(), changed: Notify::new() });
        tokio::spawn(Arc::clone(&it).work(Arc::clone(terminator), states.clone(), reports.clone()));
        it
    }

    fn lock(&self) -> MutexGuard<'_, S> {
        self.schedule.lock()
    }

    async fn work(
        self: Arc<Self>,
        terminator: Arc<SocketTerminator>,
        mut states: watch::Receiver<Option<Arc<Published>>>,
        reports: mpsc::UnboundedSender<Report>,
    ) {
        let mut backoff = BACKOFF_MIN;
        let mut not_before = Instant::now();
        loop {
            let next = self.lock().next().map(|it| it.max(not_before));
            tokio::select! {
                () = until(next) => {}
                () = self.changed.notified() => continue,
                () = reports.closed() => return,
            }
            let Some(result) = self.pass(&terminator, &mut states).await else { return };
            if result.is_ok() {
                backoff = BACKOFF_MIN;
            } else {
                not_before = Instant::now() + backoff;
                backoff = (backoff * 2).min(BACKOFF_MAX);
            }
            // The receiver may be gone.
            let _ = reports.send((S::TRANSPORT, result));
        }
    }

    /// One pass with a state that stays active meanwhile; `None` once the sender of states is gone.
    async fn pass(
        &self,
        terminator: &Arc<SocketTerminator>,
        states: &mut watch::Receiver<Option<Arc<Published>>>,
    ) -> Option<io::Result<TerminationReport>> {
        loop {
            let Some(active) = states.wait_for(Option::is_some).await.ok()?.clone() else { continue };
            let at = Instant::now();
            let pass = Arc::new(self.lock().begin(&active.state, at));
            let (terminator, seen, judge) = (Arc::clone(terminator), states.clone(), Arc::clone(&pass));
            let is_current = move || !seen.has_changed().unwrap_or(true);
            let is_lost = move |destination, backend| S::is_lost(&judge, destination, backend);
            let task = spawn_blocking(move || terminator.terminate(S::TRANSPORT, &is_lost, &is_current));
            let result = match task.await {
                // Another state came meanwhile; the next pass uses that one.
                Ok(Ok(None)) => continue,
                Ok(Ok(Some(report))) => Ok(report),
                Ok(Err(error)) => Err(error),
                Err(error) => Err(io::Error::other(error)),
            };
            // This kernel or configuration may be unable to do it.
            if result.as_ref().map_or_else(|it| it.kind() == io::ErrorKind::Unsupported, |_| true) {
                self.lock().end(&pass, at);
            }
            return Some(result);
        }
    }
}
