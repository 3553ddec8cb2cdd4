//! Other programs that translate sockets on this node.

use datapath::{Finding, ForeignProgram};

use super::installation::unknown;
use crate::{hook_status, hooks::HOOKS, options::Options};

pub(super) fn check(options: &Options) -> Vec<Finding> {
    vec![programs(options)]
}

/// Foreign programs at our hooks.
fn programs(options: &Options) -> Finding {
    const SUBJECT: &str = "other programs";
    let status = match hook_status::query_at(options.cgroup.as_deref(), &options.pin_dir) {
        Ok(status) => status,
        Err(error) => return unknown(SUBJECT, &error),
    };
    let foreign = status.foreign_programs();
    if foreign.is_empty() {
        return Finding::ok(SUBJECT, "no other programs are attached at our hooks");
    }
    let list: Vec<_> = foreign.iter().map(|(it, hooks)| format!("{it} at {}", hooks.join(", "))).collect();
    let remedy = remedy(foreign.keys().copied());
    let says = format!("the first program to match translates a connection: {}", list.join("; "));
    Finding::degraded(SUBJECT, says, remedy)
}

/// What to do about programs, by their names.
fn remedy<'a>(foreign: impl Iterator<Item = &'a ForeignProgram>) -> String {
    let names: Vec<_> = foreign.map(|it| &*it.name).collect();
    let any = |prefix: &str| names.iter().any(|it| it.starts_with(prefix));
    if any("cil_") {
        "they belong to Cilium: switch off its socket load balancer (kubeProxyReplacement: false, or socketLB.enabled: \
         false)"
    } else if any("cali_") {
        "they belong to Calico: switch off its connect-time load balancer (bpfConnectTimeLoadBalancing: Disabled)"
    } else if names.iter().any(|name| HOOKS.iter().any(|(hook, _)| hook == name)) {
        "they may belong to another instance of this program: `cleanup --pin-dir` with its folder removes them"
    } else {
        "if they translate Services, remove them; if they only observe, leave them"
    }
    .into()
}
