//! A thread with an async runtime of its own.
//!
//! Invariant: what runs here waits for nothing that runs elsewhere in the process.

use std::{io, thread};

use tokio::{
    runtime::{Builder, Handle},
    sync::oneshot,
};

/// How many slow pages are rendered at a time, and one spare.
const MAX_BLOCKING_THREADS: usize = 3;

/// A thread with an async runtime; its tasks end when this is dropped.
#[derive(Debug)]
pub(crate) struct ServerThread {
    handle: Handle,
    /// Dropping it ends the thread.
    _stop: oneshot::Sender<()>,
}

impl ServerThread {
    pub(crate) fn start(name: &str) -> io::Result<Self> {
        let runtime =
            Builder::new_current_thread().enable_all().max_blocking_threads(MAX_BLOCKING_THREADS).build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        thread::Builder::new().name(name.to_owned()).spawn(move || {
            // Ends with an error when `stop` is dropped.
            let _ = runtime.block_on(stopped);
            // A page that is being rendered is not waited for.
            runtime.shutdown_background();
        })?;
        Ok(Self { handle, _stop: stop })
    }

    pub(crate) fn handle(&self) -> &Handle {
        &self.handle
    }
}
