//! `cleanup`: removes everything from the node.

use std::{path::Path, time::Duration};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use datapath_ebpf as ebpf;
use datapath_nft as nft;

use super::{
    flags::{GracePeriodFlags, PinFlags},
    kube_proxy::{self, rules},
    trace::parse_duration,
};

/// How long kube-proxy is awaited by default; it takes 19 s to write the rules of 10,000 Services in iptables.
const DEFAULT_WAIT: Duration = Duration::from_secs(300);

/// Remove the programs, maps and nftables tables of the proxy from this node
///
/// New connections to Services are no longer translated. Connections that eBPF has redirected stay open; connections that
/// nftables translates may break. A kube-proxy that has started here is awaited first, until it has written its rules.
#[derive(Debug, Args)]
pub(super) struct Flags {
    #[command(flatten)]
    pins: PinFlags,
    #[command(flatten)]
    grace_periods: GracePeriodFlags,
    /// Wait until kube-proxy serves this node, also if it has not started yet; if it does not in this time (5m), remove nothing
    ///
    /// It serves once http://127.0.0.1:10256/healthz answers and its rules are written for IPv4 and IPv6, in any of its modes.
    #[arg(
        long,
        value_name = "DURATION",
        require_equals = true,
        value_parser = parse_duration,
        conflicts_with_all = ["kube_proxy", "force"],
    )]
    wait_for_kube_proxy: Option<Option<Duration>>,
    /// Remove the rules of a removed kube-proxy, of all its modes, and nothing of this proxy
    ///
    /// Refused while kube-proxy runs. Rules of others stay, the kubelet's included; what cannot be removed is named with the
    /// command that does it.
    #[arg(long)]
    kube_proxy: bool,
    /// Do not wait for kube-proxy; with --kube-proxy: remove its rules also while it seems to run
    #[arg(long)]
    force: bool,
}

pub(super) fn main(flags: &Flags) -> Result<()> {
    if flags.kube_proxy {
        return rules_of_kube_proxy(flags.force);
    }
    if let Some(limit) = flags.wait_for_kube_proxy {
        kube_proxy::wait(limit.unwrap_or(DEFAULT_WAIT))?;
    } else if !flags.force && kube_proxy::is_health_port_taken() {
        // What answers there may be a kube-proxy that has no rules yet.
        kube_proxy::wait(DEFAULT_WAIT)?;
    }
    match sockets(&flags.pins.pin_dir, &flags.grace_periods.rcu_expedited) {
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
    if let Some(running) = kube_proxy::evidence().filter(|_| !is_forced) {
        bail!(
            "kube-proxy seems to run here, and would write its rules again: {running}; stop it first, or give --force"
        );
    }
    let removal = rules::remove().context("cannot remove kube-proxy's rules: run as root, on the host")?;
    for it in &removal.removed {
        tracing::info!("removed {it}");
    }
    for it in &removal.remaining {
        tracing::warn!("not removed: {it}");
    }
    if removal == rules::Removal::default() {
        tracing::info!("nothing to remove: kube-proxy has no rules here");
    }
    Ok(())
}

fn sockets(dir: &Path, rcu_expedited: &Path) -> Result<(), ebpf::Error> {
    match ebpf::cleanup(dir)? {
        true => tracing::info!("removed all pinned programs and maps below {}", dir.display()),
        false => tracing::info!("nothing to remove: {} does not exist", dir.display()),
    }
    ebpf::unset_expedited(rcu_expedited);
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
