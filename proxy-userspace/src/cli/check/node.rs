//! Checks a node for both datapaths together.
//!
//! Invariant: read-only.

use datapath::{Checkup, Finding, Level};
use datapath_ebpf::check as ebpf;
use datapath_nft::{NodeSettings, check as nft};
use model::state::ExternalForwarding;
use reconciler::Options;

use crate::cli::kube_proxy::rules as kube_proxy;

/// What packets cannot do.
const WITHOUT_SOCKETS: &str = "nftables serves everything; what takes sockets is off: node ports at loopback, counters per \
                               Service (the rates of `top`), passive health, least connections, slow start, draining";

/// What becomes of packets from outside without the socket path, whose programs forward them.
const UNFORWARDED: &str = "nftables alone serves: packets from outside are translated here, and what other nodes wrap for this one is lost";
/// What becomes of packets from outside without the packet path.
const UNPACKED: &str = "the packet path is off: packets from outside are not served here, and other nodes translate those of \
                        Services with endpoints here";
const UNPACKED_REMEDY: &str = "use --packets nft, or --external-forwarding nat";
const FORWARDING_REMEDY: &str = "use --backend ebpf on every node, or --external-forwarding nat";

/// Checks this node; whether packets from outside are forwarded also if none are, but Services are to be by default.
pub(super) fn check(options: &Options, forwarding: ExternalForwarding) -> Checkup {
    let is_forwarding = forwarding == ExternalForwarding::Dsr;
    let sockets = options.sockets.as_ref();
    let mut checkup = sockets.map(|it| ebpf::check(it, is_forwarding)).unwrap_or_default();
    if sockets.is_some() && options.packets.is_none() && is_forwarding {
        checkup.installation.push(Finding::broken("external forwarding", UNPACKED, UNPACKED_REMEDY));
    }
    let has_run = options.sockets.as_ref().is_some_and(ebpf::has_run);
    let (finding, is_left_to_kube_proxy) = kube_proxy::finding(has_run);
    checkup.conflicts.push(finding);
    checkup.is_left_to_kube_proxy = is_left_to_kube_proxy;
    for reason in options.remarks() {
        checkup.installation.push(Finding { level: Level::Degraded, ..Finding::ok("configuration", reason) });
    }
    if let Some(packets) = &options.packets {
        if options.sockets.is_none() {
            checkup.installation.push(Finding::ok("backend", WITHOUT_SOCKETS));
            if is_forwarding {
                checkup.installation.push(Finding::broken(
                    "external forwarding",
                    UNFORWARDED,
                    FORWARDING_REMEDY,
                ));
            }
        }
        // The socket path serves without it.
        let if_unavailable = if options.sockets.is_some() { Level::Degraded } else { Level::Broken };
        checkup.host.push(nft::host(&packets.config, if_unavailable));
        // Where sockets of pods are redirected, no packet of theirs has a Service's address.
        let packets_of_pods = options.sockets.as_ref().is_none_or(|it| it.host_only);
        checkup.host.extend(NodeSettings::new(packets_of_pods).check());
        checkup.host.push(packets.conntrack.finding(has_run || has_tables()));
        // Without the socket path only the tables show whether it has run.
        checkup.installation.push(nft::installation(has_run));
        // In a container they are those of the host, if its first process can be seen.
        checkup.conflicts.extend(nft::saved_rulesets(["/".as_ref(), "/proc/1/root".as_ref()]));
        if options.sockets.is_some() && !ebpf::reaches_sockets_of_pods() {
            checkup.host.push(nft::pods("/sys/class/net".as_ref()));
        }
    }
    checkup
}

/// Whether our tables exist, as far as they can be listed.
fn has_tables() -> bool {
    netlink::nf_tables::chains().is_ok_and(|it| it.iter().any(|it| it.table == datapath_nft::TABLE))
}
