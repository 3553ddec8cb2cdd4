//! `cleanup`: every trace off the node.

use std::path::Path;

use anyhow::Result;
use clap::Args;
use datapath_ebpf::{self as ebpf, Cleaned};
use datapath_nft as nft;

use super::flags;

/// Take every trace off the node: detach the programs, remove the maps and the nftables tables
///
/// New connections are not translated any more. Those that were led at sockets stay connected; those whose packets are
/// translated by nftables may break.
#[derive(Debug, Args)]
pub(super) struct Flags {
    #[command(flatten)]
    pins: flags::PinFlags,
}

pub(super) fn main(flags: &Flags) -> Result<()> {
    match sockets(&flags.pins.pin_dir) {
        // Whoever runs there would put the tables back.
        Err(error @ ebpf::Error::Locked(_)) => Err(error.into()),
        Ok(()) => Ok(packets()?),
        // What stays of one half is no reason to leave the other.
        Err(error) => {
            if let Err(error) = packets() {
                tracing::error!("our nftables tables stay: {:#}", anyhow::Error::from(error));
            }
            Err(error.into())
        }
    }
}

fn sockets(dir: &Path) -> Result<(), ebpf::Error> {
    match ebpf::cleanup(dir)? {
        Cleaned::Removed { left } => {
            for it in left {
                tracing::warn!("{} is not ours and was left alone", it.display());
            }
            tracing::info!("removed everything of ours below {}", dir.display());
        }
        Cleaned::Nothing => tracing::info!("nothing to remove: there is no {}", dir.display()),
    }
    Ok(())
}

fn packets() -> Result<(), nft::Error> {
    match nft::cleanup() {
        Ok(true) => tracing::info!("removed our nftables tables"),
        Ok(false) => tracing::info!("nothing to remove from nftables"),
        // Where there is no nftables, there is no trace of ours.
        Err(error @ nft::Error::Open(_)) => tracing::info!("nothing to remove from nftables: {error}"),
        Err(error) => return Err(error),
    }
    Ok(())
}
