//! What an earlier start has left that had another half: hooks that lead by a state nobody keeps, or such tables.
//!
//! The one rule: it goes only once what takes its place is in effect.

use std::path::{Path, PathBuf};

use model::Rejected;
use nix::errno::Errno;

use crate::{
    agent::chain,
    ebpf::{self, Cleaned},
    nft,
    node::Options,
};

/// What may be left, and has not been looked for yet.
#[derive(Debug)]
pub(crate) struct Former {
    /// Where hooks and maps may be pinned.
    pins: Option<PathBuf>,
    /// Whether there may be tables.
    tables: bool,
}

impl Former {
    /// Whatever has no place in these.
    pub(crate) fn of(options: &Options) -> Self {
        let pins = options.sockets.is_none().then(|| options.former_pins.clone()).flatten();
        Self { pins, tables: options.packets.is_none() }
    }

    /// Takes it away; returns what could not be, which the next call tries again.
    pub(crate) fn remove(&mut self) -> Vec<Rejected> {
        let mut rejected = Vec::new();
        if let Some(dir) = &self.pins {
            match remove_hooks(dir) {
                Ok(()) => self.pins = None,
                Err(error) => rejected.push(Rejected {
                    item: format!("sockets, which the programs at {} lead as they did before", dir.display()),
                    reason: format!("{}; run `cleanup` as root, once", chain(&error)),
                }),
            }
        }
        if self.tables {
            match remove_tables() {
                Ok(()) => self.tables = false,
                Err(error) => rejected.push(Rejected {
                    item: "packets, which our nftables tables lead as they did before".into(),
                    reason: format!("{}; run `cleanup` as root, once", chain(&error)),
                }),
            }
        }
        rejected
    }
}

fn remove_hooks(dir: &Path) -> Result<(), ebpf::Error> {
    match ebpf::cleanup(dir)? {
        Cleaned::Nothing => {}
        Cleaned::Removed { left } => {
            tracing::info!(
                "sockets are not led any more: removed everything of ours below {}",
                dir.display()
            );
            for it in left {
                tracing::warn!("{} is not ours and was left alone", it.display());
            }
        }
    }
    Ok(())
}

fn remove_tables() -> Result<(), nft::Error> {
    match nft::cleanup() {
        Ok(true) => tracing::info!("packets are not translated any more: removed our nftables tables"),
        // Where there is no nftables, there is no table of ours.
        Ok(false) | Err(nft::Error::Open(_) | nft::Error::Read { errno: Errno::EOPNOTSUPP, .. }) => {}
        Err(error) => return Err(error),
    }
    Ok(())
}
