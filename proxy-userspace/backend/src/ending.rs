//! Has the flows ended that have no place to go any more, beside everything else: no update waits for it.
//!
//! The one rule: a socket is judged by the state that was in force when it was seen, never by an older one: it may have
//! been led to where only the newer one leads.

use std::{io, sync::Arc, time::Duration};

use model::state::NodeState;
use publish::Published;
use tokio::{
    sync::{Notify, mpsc, watch},
    task::spawn_blocking,
    time::sleep,
};

use crate::ebpf::{Ended, Ender, flows_differ, flows_lost};

/// How long until sockets are looked at once more: one that chose its endpoint just before the flip is connected by then.
const AGAIN: Duration = Duration::from_secs(1);
/// How long to wait before what failed is tried again, at first and at most.
const PAUSE: (Duration, Duration) = (AGAIN, Duration::from_secs(60));

/// Ends flows in the background.
pub(crate) struct Ending {
    /// What is in force; `None` while that is changing.
    stand: watch::Sender<Option<Arc<Published>>>,
    /// What was in force last.
    last: Option<Arc<Published>>,
    /// Whether somebody may have lost his endpoint.
    owed: Arc<Notify>,
    done: mpsc::UnboundedReceiver<io::Result<Ended>>,
}

impl Ending {
    /// Begins. Must be called within a tokio runtime.
    pub(crate) fn start(ender: Ender) -> Self {
        let (stand, states) = watch::channel(None);
        let (done, results) = mpsc::unbounded_channel();
        let owed = Arc::new(Notify::new());
        tokio::spawn(work(Arc::new(ender), states, Arc::clone(&owed), done));
        Self { stand, last: None, owed, done: results }
    }

    /// A state is about to come into force.
    pub(crate) fn begin(&self, next: &NodeState) {
        if self.last.as_ref().is_none_or(|last| flows_differ(&last.state, next)) {
            self.stand.send_replace(None);
        }
    }

    /// A state is in force, and nobody goes by the one before any more.
    pub(crate) fn in_force(&mut self, now: &Arc<Published>) {
        // Nobody knows what has happened while there was no process.
        let is_owed = self.last.as_ref().is_none_or(|last| flows_lost(&last.state, &now.state));
        self.last = Some(Arc::clone(now));
        self.stand.send_if_modified(|stand| {
            let was_changing = stand.is_none();
            *stand = Some(Arc::clone(now));
            was_changing
        });
        if is_owed {
            self.owed.notify_one();
        }
    }

    /// What became of it, when there is something to tell.
    pub(crate) async fn done(&mut self) -> io::Result<Ended> {
        match self.done.recv().await {
            Some(result) => result,
            // The worker goes only with this value.
            None => std::future::pending().await,
        }
    }
}

/// Ends after a while; never, if there is none.
async fn after(while_: Option<Duration>) {
    match while_ {
        Some(it) => sleep(it).await,
        None => std::future::pending().await,
    }
}

async fn work(
    ender: Arc<Ender>,
    mut states: watch::Receiver<Option<Arc<Published>>>,
    owed: Arc<Notify>,
    done: mpsc::UnboundedSender<io::Result<Ended>>,
) {
    // When to look without being told to: for who was on his way, or because it failed.
    let mut next = None;
    let mut pause = PAUSE.0;
    loop {
        let is_told = tokio::select! {
            () = owed.notified() => true,
            () = after(next) => false,
            () = done.closed() => return,
        };
        let result = loop {
            let state = match states.wait_for(Option::is_some).await {
                Ok(state) => state.clone(),
                Err(_) => return,
            };
            let Some(state) = state else { continue };
            states.mark_unchanged();
            let (ender, seen) = (Arc::clone(&ender), states.clone());
            let is_current = move || !seen.has_changed().unwrap_or(true);
            match spawn_blocking(move || ender.end(&state.state, &is_current)).await {
                // Another state came meanwhile: it is for that one to say.
                Ok(Ok(None)) => {}
                Ok(Ok(Some(ended))) => break Ok(ended),
                Ok(Err(error)) => break Err(error),
                Err(error) => break Err(io::Error::other(error)),
            }
        };
        next = match &result {
            Ok(_) => is_told.then_some(AGAIN),
            // Nothing will help before the next start.
            Err(error) if error.kind() == io::ErrorKind::Unsupported => None,
            Err(_) => Some(pause),
        };
        pause = if result.is_ok() { PAUSE.0 } else { (pause * 2).min(PAUSE.1) };
        // Whoever asked may be gone.
        let _ = done.send(result);
    }
}
