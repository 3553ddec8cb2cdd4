//! Checks a node for both datapaths together.
//!
//! Invariant: read-only.

use std::{fs, path::Path, process::Command};

use datapath::{Checkup, Finding, Level};
use datapath_ebpf::check as ebpf;
use datapath_nft::check as nft;

use crate::datapath::Options;

/// Checks this node.
pub fn check(options: &Options) -> Checkup {
    let mut checkup = options.sockets.as_ref().map(ebpf::check).unwrap_or_default();
    checkup.conflicts.push(kube_proxy_rules());
    if let Some(packets) = &options.packets {
        // The socket path serves without it.
        let if_unavailable = if options.sockets.is_some() { Level::Degraded } else { Level::Broken };
        checkup.host.push(nft::host(&packets.config, if_unavailable));
        // Without the socket path only the tables show whether it has run.
        let has_run = options.sockets.as_ref().is_some_and(ebpf::has_run);
        checkup.installation.push(nft::installation(has_run));
    }
    checkup
}

/// Rules of kube-proxy, running or left behind.
fn kube_proxy_rules() -> Finding {
    const SUBJECT: &str = "kube-proxy's rules";
    let mut found = Vec::new();
    let mut unknown = Vec::new();
    match netlink::nf_tables_chains() {
        Ok(chains) => {
            if chains.iter().any(|it| it.table == "kube-proxy") {
                found.push("nftables: table kube-proxy");
            }
            if chains.iter().any(|it| it.name == "KUBE-SERVICES") {
                found.push("iptables (nft): chain KUBE-SERVICES");
            }
        }
        Err(error) => unknown.push(format!("nftables: {error}")),
    }
    match has_legacy_iptables_rules() {
        Some(true) => found.push("iptables (legacy): chain KUBE-SERVICES"),
        Some(false) => {}
        None => unknown.push(
            "iptables (legacy) has a nat table, and there is no iptables-legacy-save to read it".into(),
        ),
    }
    // Its IPVS mode assigns the Services' addresses to this interface.
    if Path::new("/sys/class/net/kube-ipvs0").exists() {
        found.push("ipvs: interface kube-ipvs0");
    }
    if !found.is_empty() {
        return Finding::degraded(
            SUBJECT,
            format!("{}; they do not affect translated sockets, but packets", found.join("; ")),
            "if kube-proxy runs, stop it; if it is gone, `kube-proxy --cleanup` (its own binary) removes them",
        );
    }
    if unknown.is_empty() {
        Finding::ok(SUBJECT, "there are none in nftables, iptables or ipvs")
    } else {
        Finding::degraded(
            SUBJECT,
            format!("cannot be read: {}", unknown.join("; ")),
            "run `check` as root, on the host",
        )
    }
}

/// Whether kube-proxy has rules in legacy iptables; `None` if that cannot be determined.
fn has_legacy_iptables_rules() -> Option<bool> {
    let tables = fs::read_to_string("/proc/net/ip_tables_names").unwrap_or_default();
    if !tables.lines().any(|it| it == "nat") {
        return Some(false);
    }
    let saved = Command::new("iptables-legacy-save").args(["-t", "nat"]).output().ok()?;
    saved.status.success().then(|| String::from_utf8_lossy(&saved.stdout).contains(":KUBE-SERVICES"))
}
