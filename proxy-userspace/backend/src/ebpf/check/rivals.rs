//! Who else leads Services on this node: programs at our hooks, and kube-proxy's rules.

use std::{fs, path::Path, process::Command};

use super::{Finding, netfilter, own::unknown};
use crate::ebpf::{
    Options,
    hooks::HOOKS,
    look::{self, Other},
};

pub(super) fn check(options: &Options) -> Vec<Finding> {
    vec![programs(options), rules()]
}

/// Programs of others at our hooks.
fn programs(options: &Options) -> Finding {
    const SUBJECT: &str = "other programs";
    let found = match look::look_at(options.cgroup.as_deref(), &options.pin_dir) {
        Ok(found) => found,
        Err(error) => return unknown(SUBJECT, &error),
    };
    let others = found.others();
    if others.is_empty() {
        return Finding::ok(SUBJECT, "nobody else has programs at our hooks");
    }
    let list: Vec<_> = others.iter().map(|(it, hooks)| format!("{it} at {}", hooks.join(", "))).collect();
    let remedy = remedy(others.keys().copied());
    Finding::degraded(SUBJECT, format!("whoever comes first leads a socket: {}", list.join("; ")), remedy)
}

/// What to do about programs, by what they are called.
fn remedy<'a>(others: impl Iterator<Item = &'a Other>) -> String {
    let names: Vec<_> = others.map(|it| &*it.name).collect();
    let any = |prefix: &str| names.iter().any(|it| it.starts_with(prefix));
    if any("cil_") {
        "they are Cilium's: switch its socket load balancer off (kubeProxyReplacement: false, or socketLB.enabled: false)".into()
    } else if any("cali_") {
        "they are Calico's: switch its connect-time load balancer off (bpfConnectTimeLoadBalancing: Disabled)"
            .into()
    } else if names.iter().any(|name| HOOKS.iter().any(|(hook, _)| hook == name)) {
        "they may be another instance of this program: `cleanup --pin-dir` with its folder takes them away"
            .into()
    } else {
        "if they lead Services, take them away; if they only watch, leave them".into()
    }
}

/// Rules of kube-proxy, running or left behind.
pub(super) fn rules() -> Finding {
    const SUBJECT: &str = "kube-proxy's rules";
    let mut found = Vec::new();
    let mut unknown = Vec::new();
    match netfilter::chains() {
        Ok(chains) => {
            if chains.iter().any(|it| it.table == "kube-proxy") {
                found.push("nftables: table kube-proxy");
            }
            if chains.iter().any(|it| it.chain == "KUBE-SERVICES") {
                found.push("iptables (nft): chain KUBE-SERVICES");
            }
        }
        Err(error) => unknown.push(format!("nftables: {error}")),
    }
    match legacy_iptables() {
        Some(true) => found.push("iptables (legacy): chain KUBE-SERVICES"),
        Some(false) => {}
        None => unknown.push(
            "iptables (legacy) has a table nat, and there is no iptables-legacy-save to read it".into(),
        ),
    }
    // The interface that its ipvs mode puts the Services' addresses on.
    if Path::new("/sys/class/net/kube-ipvs0").exists() {
        found.push("ipvs: interface kube-ipvs0");
    }
    if !found.is_empty() {
        return Finding::degraded(
            SUBJECT,
            format!("{}; sockets that are led do not get that far, but packets do", found.join("; ")),
            "if kube-proxy runs, stop it; if it is gone, `kube-proxy --cleanup` (its own binary) removes them",
        );
    }
    if unknown.is_empty() {
        Finding::ok(SUBJECT, "there are none, in nftables, iptables or ipvs")
    } else {
        Finding::degraded(
            SUBJECT,
            format!("cannot be looked for: {}", unknown.join("; ")),
            "run `check` as root, on the host",
        )
    }
}

/// Whether kube-proxy has rules in the older iptables; `None` if that cannot be said.
fn legacy_iptables() -> Option<bool> {
    let tables = fs::read_to_string("/proc/net/ip_tables_names").unwrap_or_default();
    if !tables.lines().any(|it| it == "nat") {
        return Some(false);
    }
    let saved = Command::new("iptables-legacy-save").args(["-t", "nat"]).output().ok()?;
    saved.status.success().then(|| String::from_utf8_lossy(&saved.stdout).contains(":KUBE-SERVICES"))
}
