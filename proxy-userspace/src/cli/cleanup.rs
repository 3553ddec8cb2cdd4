//! `cleanup`: removes everything from the node.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream},
    path::Path,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use datapath_ebpf as ebpf;
use datapath_nft as nft;

use reconciler::kube_proxy;

use super::flags::PinFlags;

/// Remove the programs, maps and nftables tables of the proxy from this node
///
/// New connections to Services are no longer translated. Connections that eBPF has redirected stay open; connections that
/// nftables translates may break.
#[derive(Debug, Args)]
pub(super) struct Flags {
    #[command(flatten)]
    pins: PinFlags,
    /// Remove the rules that a removed kube-proxy has left, of all of its modes, and nothing of this proxy
    ///
    /// Refused while kube-proxy runs. Rules of others stay, the kubelet's included; what cannot be removed is named with the
    /// command that does it.
    #[arg(long)]
    kube_proxy: bool,
    /// With --kube-proxy: also while kube-proxy seems to run
    #[arg(long, requires = "kube_proxy")]
    force: bool,
}

pub(super) fn main(flags: &Flags) -> Result<()> {
    if flags.kube_proxy {
        return rules_of_kube_proxy(flags.force);
    }
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

fn rules_of_kube_proxy(is_forced: bool) -> Result<()> {
    // In a container its processes may be invisible, but the host's ports are not.
    const TIMEOUT: Duration = Duration::from_secs(2);
    const HEALTH: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 10256);
    let is_others =
        || TcpStream::connect_timeout(&HEALTH, TIMEOUT).is_ok() && admin::query_readiness(HEALTH).is_none();
    let running = if kube_proxy::is_process_visible() {
        Some("a process is named kube-proxy".to_owned())
    } else {
        is_others().then(|| format!("another program than this one answers at {HEALTH}"))
    };
    if let Some(running) = running.filter(|_| !is_forced) {
        bail!(
            "kube-proxy seems to run here, and would write its rules again: {running}; stop it first, or give --force"
        );
    }
    let removal =
        kube_proxy::remove().context("cannot remove kube-proxy's rules: run as root, on the host")?;
    for it in &removal.removed {
        tracing::info!("removed {it}");
    }
    for it in &removal.remaining {
        tracing::warn!("not removed: {it}");
    }
    if removal == kube_proxy::Removal::default() {
        tracing::info!("nothing to remove: kube-proxy has no rules here");
    }
    Ok(())
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
