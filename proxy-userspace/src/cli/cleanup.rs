//! `cleanup`: every trace off the node.

use anyhow::Result;
use backend::{
    ebpf::{Cleaned, cleanup},
    nft,
};
use clap::Args;

use super::flags;

/// Take every trace off the node: detach the programs, remove the maps and the nftables tables
///
/// New connections are not translated any more; those that are connected stay so.
#[derive(Debug, Args)]
pub(super) struct Flags {
    #[command(flatten)]
    pins: flags::Pins,
}

pub(super) fn main(flags: &Flags) -> Result<()> {
    let dir = &flags.pins.pin_dir;
    match cleanup(dir)? {
        Cleaned::Removed { left } => {
            for it in left {
                tracing::warn!("{} is not ours and was left alone", it.display());
            }
            tracing::info!("removed everything of ours below {}", dir.display());
        }
        Cleaned::Nothing => tracing::info!("nothing to remove: there is no {}", dir.display()),
    }
    match nft::cleanup() {
        Ok(true) => tracing::info!("removed our nftables tables"),
        Ok(false) => tracing::info!("nothing to remove from nftables"),
        // Where there is no nftables, there is no trace of ours.
        Err(error @ nft::Error::Open(_)) => tracing::info!("nothing to remove from nftables: {error}"),
        Err(error) => return Err(error.into()),
    }
    Ok(())
}
