//! Long-lived connections that talk all the time, so that whatever happens meets packets of theirs.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use parking_lot::Mutex;

use crate::{Background, EchoConnection, TIMEOUT, eventually};

/// A thread that pings each of its connections, one after the other, until it is dropped.
#[derive(Debug)]
pub struct Talk {
    shared: Arc<Shared>,
    _thread: Background,
}

#[derive(Debug, Default)]
struct Shared {
    /// How often every connection has been pinged.
    rounds: AtomicUsize,
    /// The servers and the errors of connections that broke.
    broken: Mutex<Vec<String>>,
}

impl Talk {
    /// Begins to talk; the pause between two rounds leaves the processor to others.
    #[must_use]
    pub fn start(connections: Vec<EchoConnection>, pause: Duration) -> Self {
        let (shared, mut thread) = (Arc::<Shared>::default(), Background::default());
        let talking = Arc::clone(&shared);
        thread.spawn(move |stop| talk(&talking, connections, pause, stop));
        Self { shared, _thread: thread }
    }

    /// Waits until every connection has echoed what was sent after this call; `after` says what may have broken one.
    #[track_caller]
    pub fn assert_alive(&self, after: &str) {
        let rounds = || self.shared.rounds.load(Ordering::Relaxed);
        let broken = || self.shared.broken.lock().clone();
        let before = rounds();
        // The round that ends first may have begun before.
        let has_talked = eventually(TIMEOUT, || rounds() > before + 1 || !broken().is_empty());
        assert!(broken().is_empty(), "{after}: connections broke: {:#?}", broken());
        assert!(has_talked, "{after}: connections take too long");
    }
}

fn talk(shared: &Shared, mut connections: Vec<EchoConnection>, pause: Duration, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        connections.retain_mut(|it| {
            if stop.load(Ordering::Relaxed) {
                return true;
            }
            let result = it.ping();
            if let Err(error) = &result {
                shared.broken.lock().push(format!("{:?} to {}: {error}", it.stream(), it.name()));
            }
            result.is_ok()
        });
        shared.rounds.fetch_add(1, Ordering::Relaxed);
        thread::sleep(pause);
    }
}
