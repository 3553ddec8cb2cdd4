//! A thread with an async runtime of its own.
//!
//! Invariant: what runs here waits for nothing that runs elsewhere in the process.

use std::{io, thread};

use tokio::{
    runtime::{Builder, Handle},
    sync::oneshot,
};

/// A thread with an async runtime; its tasks end when this is dropped.
#[derive(Debug)]
pub struct RuntimeThread {
    handle: Handle,
    /// Dropping it ends the thread.
    _stop: oneshot::Sender<()>,
}

impl RuntimeThread {
    /// Starts the thread, and at most so many others for blocking calls.
    pub fn start(name: &str, max_blocking_threads: usize) -> io::Result<Self> {
        let runtime =
            Builder::new_current_thread().enable_all().max_blocking_threads(max_blocking_threads).build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        thread::Builder::new().name(name.to_owned()).spawn(move || {
            // Ends with an error when `stop` is dropped.
            let _ = runtime.block_on(stopped);
            // No blocking call is waited for.
            runtime.shutdown_background();
        })?;
        Ok(Self { handle, _stop: stop })
    }

    /// What starts tasks in the thread.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }
}
