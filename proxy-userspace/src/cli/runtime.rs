//! The async runtime of the commands that keep running, and what every such command needs.

use std::time::Duration;

use anyhow::{Context as _, Result};
use tokio::{
    runtime, select,
    signal::unix::{Signal, SignalKind, signal},
    task::spawn_blocking,
    time::interval,
};

use super::logging;

/// How long a finished command waits for its blocking threads.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);
/// How often freed heap memory is returned to the kernel, as after a start or a burst of watchers.
const MEMORY_TRIM_INTERVAL: Duration = Duration::from_secs(15);

pub(super) fn block_on<T>(command: impl Future<Output = Result<T>>) -> Result<T> {
    // Each client is an open file, and the soft limit is often that of programs that use select(2).
    if let Err(error) = listeners::raise_max_open_files() {
        tracing::debug!(%error, "setrlimit(RLIMIT_NOFILE) failed");
    }
    // One thread is enough for the rest: slow system calls run in blocking threads; pages, and the source of a brain for
    // many nodes, have threads of their own.
    let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
    let result = runtime.block_on(command);
    // Blocking threads may be interrupted at any point.
    runtime.shutdown_timeout(SHUTDOWN_TIMEOUT);
    result
}

/// SIGTERM and SIGINT; SIGUSR1 changes the level of the log.
pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Replaces the default action of the signals, which ends the process.
    pub(super) fn new() -> Result<Self> {
        let mut verbosity = signal(SignalKind::user_defined1()).context("cannot handle SIGUSR1")?;
        tokio::spawn(async move {
            while verbosity.recv().await.is_some() {
                logging::next_level();
            }
        });
        Ok(Self {
            terminate: signal(SignalKind::terminate()).context("cannot handle SIGTERM")?,
            interrupt: signal(SignalKind::interrupt()).context("cannot handle SIGINT")?,
        })
    }

    /// Waits for either of them.
    pub(super) async fn terminated(&mut self) {
        select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// Waits for SIGTERM or SIGINT.
pub(super) fn wait() -> Result<()> {
    block_on(async {
        Signals::new()?.terminated().await;
        Ok(())
    })
}

/// Returns freed heap memory to the kernel, again and again.
pub(super) async fn trim_memory() {
    let mut trim = interval(MEMORY_TRIM_INTERVAL);
    loop {
        trim.tick().await;
        spawn_blocking(process::give_back_memory);
    }
}
