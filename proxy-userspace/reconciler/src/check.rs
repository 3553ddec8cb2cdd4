//! Checks a node for both datapaths together.
//!
//! Invariant: read-only.

use std::{fs, path::Path, process::Command};

use datapath::{Checkup, Finding, Level};
use datapath_ebpf::check as ebpf;
use datapath_nft::{NodeSettings, check as nft};

use crate::datapath::Options;

/// Checks this node.
pub fn check(options: &Options) -> Checkup {
    let mut checkup = options.sockets.as_ref().map(ebpf::check).unwrap_or_default();
    let has_run = options.sockets.as_ref().is_some_and(ebpf::has_run);
    let (finding, is_left_to_kube_proxy) = kube_proxy_rules(has_run);
    checkup.conflicts.push(finding);
    checkup.is_left_to_kube_proxy = is_left_to_kube_proxy;
    if let Some(reason) = options.without_effect() {
        checkup.installation.push(Finding { level: Level::Degraded, ..Finding::ok("configuration", reason) });
    }
    if let Some(packets) = &options.packets {
        // The socket path serves without it.
        let if_unavailable = if options.sockets.is_some() { Level::Degraded } else { Level::Broken };
        checkup.host.push(nft::host(&packets.config, if_unavailable));
        // Where sockets of pods are redirected, no packet of theirs has a Service's address.
        let packets_of_pods = options.sockets.as_ref().is_none_or(|it| it.host_only);
        checkup.host.extend(NodeSettings::new(packets_of_pods).check());
        checkup.host.push(packets.conntrack.finding(has_run || has_tables()));
        // Without the socket path only the tables show whether it has run.
        checkup.installation.push(nft::installation(has_run));
        if options.sockets.is_some() && !ebpf::reaches_sockets_of_pods() {
            checkup.host.push(nft::pods("/sys/class/net".as_ref()));
        }
    }
    checkup
}

/// Whether our tables exist, as far as they can be listed.
fn has_tables() -> bool {
    netlink::chains().is_ok_and(|it| it.iter().any(|it| it.table == datapath_nft::TABLE))
}

/// Rules of kube-proxy, running or left behind, and whether they alone serve this node; `has_run` if the socket path was
/// ever on.
fn kube_proxy_rules(has_run: bool) -> (Finding, bool) {
    const SUBJECT: &str = "kube-proxy's rules";
    let mut found = Vec::new();
    let mut unknown = Vec::new();
    let mut is_ours = has_run;
    match netlink::chains() {
        Ok(chains) => {
            is_ours |= chains.iter().any(|it| it.table == datapath_nft::TABLE);
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
    let found = found.join("; ");
    let finding = if !found.is_empty() && !is_ours {
        return (
            Finding::ok(SUBJECT, format!("{found}; it serves this node, and nothing of this program does")),
            true,
        );
    } else if !found.is_empty() {
        Finding::degraded(
            SUBJECT,
            format!("{found}; they do not affect translated sockets, but packets"),
            "if kube-proxy runs, stop it; if it is gone, `kube-proxy --cleanup` (its own binary) removes them; where it is to \
             serve again, `cleanup` removes what this program has there",
        )
    } else if unknown.is_empty() {
        Finding::ok(SUBJECT, "there are none in nftables, iptables or ipvs")
    } else {
        Finding::degraded(
            SUBJECT,
            format!("cannot be read: {}", unknown.join("; ")),
            "run `check` as root, on the host",
        )
    };
    (finding, false)
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
