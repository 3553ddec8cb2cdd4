//! Terminates UDP sockets connected to removed endpoints in the background: no update waits for it.
//!
//! Invariant: a socket is judged by the state that was active when it was listed, never by an older one: a newer state may
//! have redirected it to an endpoint that the older one does not have.

use std::{io, sync::Arc, time::Duration};

use datapath::TerminationReport;
use datapath_ebpf::{UdpTerminator, udp_backends_differ, udp_backends_lost};
use model::state::NodeState;
use publish::Published;
use tokio::{
    sync::{Notify, mpsc, watch},
    task::spawn_blocking,
    time::sleep,
};

/// When sockets are listed once more after a change: those that chose an endpoint just before the flip are connected by
/// then.
const SECOND_PASS_DELAY: Duration = Duration::from_secs(1);
const BACKOFF_MIN: Duration = SECOND_PASS_DELAY;
const BACKOFF_MAX: Duration = Duration::from_secs(60);

/// Terminates sockets in the background.
pub(crate) struct UdpTermination {
    /// The active state; `None` while it is changing.
    active: watch::Sender<Option<Arc<Published>>>,
    /// The state that was active last.
    last: Option<Arc<Published>>,
    /// Notified when sockets may have lost their endpoint.
    needed: Arc<Notify>,
    reports: mpsc::UnboundedReceiver<io::Result<TerminationReport>>,
}

impl UdpTermination {
    /// Starts. Must be called within a tokio runtime.
    pub(crate) fn start(terminator: UdpTerminator) -> Self {
        let (active, states) = watch::channel(None);
        let (sender, reports) = mpsc::unbounded_channel();
        let needed = Arc::new(Notify::new());
        tokio::spawn(work(Arc::new(terminator), states, Arc::clone(&needed), sender));
        Self { active, last: None, needed, reports }
    }

    /// A state is about to be applied.
    pub(crate) fn before_apply(&self, next: &NodeState) {
        if self.last.as_ref().is_none_or(|last| udp_backends_differ(&last.state, next)) {
            self.active.send_replace(None);
        }
    }

    /// A state is active, and no program uses the one before any more.
    pub(crate) fn on_active(&mut self, published: &Arc<Published>) {
        // While no process ran, any socket may have lost its endpoint.
        let is_needed =
            self.last.as_ref().is_none_or(|last| udp_backends_lost(&last.state, &published.state));
        self.last = Some(Arc::clone(published));
        self.active.send_if_modified(|active| {
            let was_changing = active.is_none();
            *active = Some(Arc::clone(published));
            was_changing
        });
        if is_needed {
            self.needed.notify_one();
        }
    }

    /// Waits for the next report.
    pub(crate) async fn report(&mut self) -> io::Result<TerminationReport> {
        match self.reports.recv().await {
            Some(report) => report,
            // The worker ends only after this value is dropped.
            None => std::future::pending().await,
        }
    }
}

async fn work(
    terminator: Arc<UdpTerminator>,
    mut states: watch::Receiver<Option<Arc<Published>>>,
    needed: Arc<Notify>,
    reports: mpsc::UnboundedSender<io::Result<TerminationReport>>,
) {
    // When to list the sockets without being notified: a second pass, or a retry.
    let mut next: Option<Duration> = None;
    let mut backoff = BACKOFF_MIN;
    loop {
        let wait = async {
            match next {
                Some(delay) => sleep(delay).await,
                None => std::future::pending().await,
            }
        };
        let is_notified = tokio::select! {
            () = needed.notified() => true,
            () = wait => false,
            () = reports.closed() => return,
        };
        let Some(result) = terminate(&terminator, &mut states).await else { return };
        next = match &result {
            Ok(_) => is_notified.then_some(SECOND_PASS_DELAY),
            // This kernel or configuration cannot do it.
            Err(error) if error.kind() == io::ErrorKind::Unsupported => None,
            Err(_) => Some(backoff),
        };
        backoff = if result.is_ok() { BACKOFF_MIN } else { (backoff * 2).min(BACKOFF_MAX) };
        // The receiver may be gone.
        let _ = reports.send(result);
    }
}

/// One pass with a state that stays active meanwhile; `None` once the sender of states is gone.
async fn terminate(
    terminator: &Arc<UdpTerminator>,
    states: &mut watch::Receiver<Option<Arc<Published>>>,
) -> Option<io::Result<TerminationReport>> {
    loop {
        let Some(active) = states.wait_for(Option::is_some).await.ok()?.clone() else { continue };
        states.mark_unchanged();
        let (terminator, seen) = (Arc::clone(terminator), states.clone());
        let is_current = move || !seen.has_changed().unwrap_or(true);
        match spawn_blocking(move || terminator.terminate(&active.state, &is_current)).await {
            // Another state came meanwhile; the next pass uses that one.
            Ok(Ok(None)) => {}
            Ok(Ok(Some(report))) => return Some(Ok(report)),
            Ok(Err(error)) => return Some(Err(error)),
            Err(error) => return Some(Err(io::Error::other(error))),
        }
    }
}
