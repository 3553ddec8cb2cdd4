//! A thread with an async runtime of its own.
//!
//! Invariant: no task here waits for a task that runs elsewhere in the process.

use std::{io, sync::mpsc, thread};

use tokio::{
    runtime::{Builder, Handle},
    sync::oneshot,
};

/// A thread with an async runtime; its tasks end when this is dropped.
#[derive(Debug)]
pub struct RuntimeThread {
    pub handle: Handle,
    /// Dropping it ends the thread.
    _stop: oneshot::Sender<()>,
}

impl RuntimeThread {
    /// Starts the thread, with at most `max_blocking_threads` others for blocking calls.
    ///
    /// # Errors
    ///
    /// If there are too many threads or file descriptors.
    pub fn start(name: &str, max_blocking_threads: usize) -> io::Result<Self> {
        let (started, starting) = mpsc::channel();
        let (stop, stopped) = oneshot::channel::<()>();
        // The runtime is built in the thread: one that is dropped by an async task panics.
        thread::Builder::new().name(name.to_owned()).spawn(move || {
            let runtime =
                Builder::new_current_thread().enable_all().max_blocking_threads(max_blocking_threads).build();
            let runtime = match runtime {
                Ok(it) => it,
                // The receiver waits.
                Err(error) => return drop(started.send(Err(error))),
            };
            let _ = started.send(Ok(runtime.handle().clone()));
            // Ends with an error when `stop` is dropped.
            let _ = runtime.block_on(stopped);
            // No blocking call is waited for.
            runtime.shutdown_background();
        })?;
        let handle = starting.recv().map_err(io::Error::other)??;
        Ok(Self { handle, _stop: stop })
    }
}
