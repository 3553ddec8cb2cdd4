//! What an earlier start with other options left: attached programs or nftables tables that no process updates any more.
//!
//! Invariant: it is removed only once its replacement is in effect.

use std::path::{Path, PathBuf};

use model::{Rejected, error_chain};
use nix::errno::Errno;

/// What may be left and has not been removed yet.
#[derive(Debug, Default)]
pub(crate) struct StaleDatapath {
    /// Where programs and maps may be pinned.
    pin_dir: Option<PathBuf>,
    /// Whether there may be nftables tables.
    tables: bool,
}

impl StaleDatapath {
    /// Programs pinned at `pin_dir`, and nftables tables if `tables`.
    pub(crate) fn new(pin_dir: Option<PathBuf>, tables: bool) -> Self {
        Self { pin_dir, tables }
    }

    /// Whether nothing is left to remove.
    pub(crate) fn is_removed(&self) -> bool {
        self.pin_dir.is_none() && !self.tables
    }

    /// Removes it; returns what could not be removed, which the next call retries.
    pub(crate) fn remove(&mut self) -> Vec<Rejected> {
        let mut rejected = Vec::new();
        if let Some(dir) = &self.pin_dir {
            match remove_programs(dir) {
                Ok(()) => self.pin_dir = None,
                Err(error) => rejected.push(Rejected::served(
                    format!("the socket path: programs pinned at {} still use an old state", dir.display()),
                    format!("{}; run `cleanup` as root, once", error_chain(&error)),
                )),
            }
        }
        if self.tables {
            match remove_tables() {
                Ok(()) => self.tables = false,
                Err(error) => rejected.push(Rejected::served(
                    "the packet path: our nftables tables still hold an old state",
                    format!("{}; run `cleanup` as root, once", error_chain(&error)),
                )),
            }
        }
        rejected
    }
}

fn remove_programs(dir: &Path) -> Result<(), datapath_ebpf::Error> {
    if datapath_ebpf::cleanup(dir)? {
        tracing::info!(path = %dir.display(), "the socket path is off: its programs and maps were removed");
    }
    Ok(())
}

fn remove_tables() -> Result<(), datapath_nft::Error> {
    match datapath_nft::cleanup() {
        Ok(true) => tracing::info!("the packet path is off: its nftables tables were removed"),
        // Without nftables there is no table of ours.
        Ok(false)
        | Err(datapath_nft::Error::Open(_) | datapath_nft::Error::Read { errno: Errno::EOPNOTSUPP, .. }) => {}
        Err(error) => return Err(error),
    }
    Ok(())
}
