//! `cleanup`: removes everything from the node.

use std::path::Path;

use anyhow::Result;
use clap::Args;
use datapath_ebpf as ebpf;
use datapath_nft as nft;

use super::flags::PinFlags;

/// Remove the programs, maps and nftables tables of the proxy from this node
///
/// New connections to Services are no longer translated. Connections that eBPF has redirected stay open; connections that
/// nftables translates may break.
#[derive(Debug, Args)]
pub(super) struct Flags {
    #[command(flatten)]
    pins: PinFlags,
}

pub(super) fn main(flags: &Flags) -> Result<()> {
    match sockets(&flags.pins.pin_dir) {
        // The running process would create the tables again.
        Err(error @ ebpf::Error::Locked(_)) => Err(error.into()),
        Ok(()) => Ok(packets()?),
        // The other datapath is cleaned up all the same.
        Err(error) => {
            if let Err(error) = packets() {
                tracing::error!("cannot remove the nftables tables: {:#}", anyhow::Error::from(error));
            }
            Err(error.into())
        }
    }
}

fn sockets(dir: &Path) -> Result<(), ebpf::Error> {
    match ebpf::cleanup(dir)? {
        true => tracing::info!("removed all pinned programs and maps below {}", dir.display()),
        false => tracing::info!("nothing to remove: {} does not exist", dir.display()),
    }
    Ok(())
}

fn packets() -> Result<(), nft::Error> {
    match nft::cleanup() {
        Ok(true) => tracing::info!("removed the nftables tables"),
        Ok(false) => tracing::info!("nothing to remove from nftables"),
        // A kernel without nftables has no tables.
        Err(error @ nft::Error::Open(_)) => tracing::info!("nothing to remove from nftables: {error}"),
        Err(error) => return Err(error),
    }
    Ok(())
}
