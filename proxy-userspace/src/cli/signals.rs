//! SIGTERM and SIGINT, as something to wait for.

use anyhow::{Context as _, Result};
use tokio::signal::unix::{Signal, SignalKind, signal};

pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// From now on they do not end the process by themselves.
    pub(super) fn new() -> Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate()).context("SIGTERM cannot be waited for")?,
            interrupt: signal(SignalKind::interrupt()).context("SIGINT cannot be waited for")?,
        })
    }

    /// Waits for either of them.
    pub(super) async fn terminated(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
