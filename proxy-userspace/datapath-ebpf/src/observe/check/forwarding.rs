//! Whether packets from outside can be forwarded whole, and whether they are.

use std::{collections::BTreeSet, net::IpAddr};

use datapath::{Checkup, Finding, Level};
use model::Family;
use netlink::{host_addresses::interfaces_with, links::Link};
use proxy_common::forward::{Wrapping4, Wrapping6};

use crate::{
    error::Error,
    host::capabilities::{kernel_release, kernel_version},
    maps::pins::Pins,
    observe::forwards::{ForwardSummary, forward_summary},
    options::Options,
    programs::{
        peer_probes,
        uplink_links::{self, Uplink},
        uplinks::least_mtu,
    },
    tables::peers::{PeerState, PeerStates},
};

const SUBJECT: &str = "external forwarding";
const UPLINK: &str = "uplink";
/// The first kernel with all that the programs call (`bpf_check_mtu`).
const CAN_FORWARD: (u32, u32) = (5, 12);

/// Checks whether packets from outside are forwarded; finds nothing if that is neither enabled nor in use.
pub(super) fn check(options: &Options, is_enabled: bool, checkup: &mut Checkup) {
    let summary = match forward_summary(&options.pin_dir) {
        Ok(summary) => summary,
        Err(Error::NotInitialized(_)) => ForwardSummary::default(),
        Err(error) => return checkup.installation.push(Finding::failed(SUBJECT, Level::Broken, &error)),
    };
    if !summary.is_used() && !is_enabled {
        return;
    }
    let kernel = kernel(&kernel_release());
    checkup.installation.push(forwarded(&summary));
    if kernel.level == Level::Ok && summary.is_used() {
        match uplinks(&Pins::new(&options.pin_dir), &summary.own_addresses) {
            Ok(uplinks) if uplinks.is_empty() => checkup.installation.push(nowhere(&summary.own_addresses)),
            Ok(uplinks) => {
                checkup.installation.extend(uplinks.iter().flat_map(|it| [attached(it), mtu(&it.link)]));
                checkup.conflicts.push(others(&uplinks));
            }
            Err(error) => checkup.installation.push(Finding::failed(UPLINK, Level::Degraded, &error)),
        }
        let (own, others) = (&summary.own_addresses, &summary.other_addresses);
        let states = peer_probes::ask_all(options.forwarding_port, own, others);
        checkup.installation.extend(answers(&states));
    }
    checkup.host.push(kernel);
}

fn kernel(release: &str) -> Finding {
    match kernel_version(release) {
        Some(version) if version >= CAN_FORWARD => {
            Finding::ok(SUBJECT, format!("Linux {release} can forward packets from outside whole"))
        }
        _ => Finding::broken(
            SUBJECT,
            format!(
                "Linux {release} cannot forward packets from outside whole: they are translated here and, if this node has \
                 endpoints, by all nodes"
            ),
            "use Linux 5.12 or later, or translate (--external-forwarding nat, and no annotation that says dsr)",
        ),
    }
}

/// What is forwarded, and what is not though it is to be.
fn forwarded(summary: &ForwardSummary) -> Finding {
    let ForwardSummary { frontends, translated, ended, nodes, .. } = *summary;
    if !summary.is_used() {
        return Finding::ok(SUBJECT, "it is enabled, and no Service has packets to forward");
    }
    let mut says = format!(
        "packets to {} are forwarded, whole, to {}",
        model::counted(frontends, "frontend"),
        model::counted(nodes, "node")
    );
    if ended > 0 {
        says += &format!(
            "; for {ended} more, connections that exist alone: it was turned off, or an uplink is too narrow"
        );
    }
    if translated == 0 {
        return Finding::ok(SUBJECT, says);
    }
    Finding::degraded(
        SUBJECT,
        format!(
            "{says}; those to {translated} more are translated: a node with endpoints cannot receive them, or an uplink \
             of this one is too narrow"
        ),
        "uplinks need the MTU that is said below; every node needs this version with the eBPF backend and an address in \
         its Node object, and UDP at --external-forwarding-port must pass between nodes; `explain outside` names the \
         nodes",
    )
}

/// Which other nodes unwrap packets; nothing if there are none.
fn answers(states: &PeerStates) -> Option<Finding> {
    const MAX_NAMED: usize = 10;
    let silent: Vec<_> = states.iter().filter(|(_, it)| **it != PeerState::Answers).collect();
    let (all, answering) = (states.len(), states.len() - silent.len());
    let mut says = format!("{answering} of {all} addresses of other nodes answer: they unwrap packets");
    if !silent.is_empty() {
        let named: Vec<_> = silent.iter().take(MAX_NAMED).map(|(address, _)| address.to_string()).collect();
        let more = silent.len().checked_sub(MAX_NAMED).filter(|it| *it > 0);
        let more = more.map_or_else(String::new, |it| format!(", and {it} more"));
        says +=
            &format!("; Services with endpoints at the others are translated: {}{more}", named.join(", "));
    }
    (!states.is_empty()).then(|| Finding::ok(SUBJECT, says))
}

/// The interfaces with an address of this node.
fn uplinks(pins: &Pins, addresses: &BTreeSet<IpAddr>) -> Result<Vec<Uplink>, Error> {
    let interfaces: BTreeSet<u32> = interfaces_with(|ip| addresses.contains(&ip))
        .map_err(Error::syscall("getifaddrs", "this network namespace"))?;
    interfaces.into_iter().filter_map(|it| uplink_links::query(pins, it).transpose()).collect()
}

fn nowhere(addresses: &BTreeSet<IpAddr>) -> Finding {
    let addresses: Vec<_> = addresses.iter().map(ToString::to_string).collect();
    let says = format!(
        "no interface has an address of this node ({}): packets are neither forwarded nor received",
        addresses.join(", ")
    );
    Finding::broken(UPLINK, says, "give an interface of Ethernet an address that the Node object names")
}

/// Whether our programs see the packets of an uplink.
fn attached(Uplink { link, attached, .. }: &Uplink) -> Finding {
    let name = &link.name;
    if !link.is_ethernet {
        let says = format!("{name} is not of Ethernet: its packets are neither forwarded nor received");
        return Finding::broken(UPLINK, says, "give the node's address to an interface of Ethernet");
    }
    if ["ingress", "egress"].iter().all(|it| attached.contains(it)) {
        return Finding::ok(UPLINK, format!("{name} has the programs in both directions"));
    }
    let has = match &attached[..] {
        [] => "none of the programs".into(),
        some => format!("only {}", some.join(", ")),
    };
    Finding::broken(
        UPLINK,
        format!("{name} has {has}: packets are translated there, and what other nodes wrap is lost"),
        "start `run` or `agent`, which attaches them; its log says why it does not",
    )
}

/// Whether wrapped packets fit through an uplink.
fn mtu(Link { name, mtu, .. }: &Link) -> Finding {
    const SUBJECT: &str = "uplink MTU";
    let [v4, v6] = [size_of::<Wrapping4>(), size_of::<Wrapping6>()].map(|it| it as u32);
    let says = format!(
        "{name} has {mtu} bytes: with the wrapping, packets of up to {} bytes (IPv4) and {} (IPv6) fit, which TCP asks \
         for; larger datagrams are answered with an ICMP message",
        mtu.saturating_sub(v4),
        mtu.saturating_sub(v6)
    );
    let narrow: Vec<_> = Family::ALL.into_iter().filter(|it| *mtu < least_mtu(*it)).collect();
    let Some(least) = narrow.iter().map(|it| least_mtu(*it)).max() else { return Finding::ok(SUBJECT, says) };
    let narrow = narrow.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and ");
    Finding::degraded(
        SUBJECT,
        format!("{says}; that is too little for {narrow}, which is translated"),
        format!(
            "raise it to {least} bytes, so that the smallest packets fit that senders need not divide; to 1576, so that those of \
             clients with 1500 bytes do"
        ),
    )
}

/// Other programs at the uplinks. They run, too.
fn others(uplinks: &[Uplink]) -> Finding {
    const SUBJECT: &str = "programs at uplinks";
    let list = |of: fn(&Uplink) -> &Vec<String>| {
        let all =
            uplinks.iter().flat_map(|it| of(it).iter().map(|program| format!("{}: {program}", it.link.name)));
        all.collect::<Vec<_>>().join("; ")
    };
    let (before, after) = (list(|it| &it.before), list(|it| &it.after));
    match (before.is_empty(), after.is_empty()) {
        (true, true) => Finding::ok(SUBJECT, "no others are attached"),
        (true, false) => Finding::ok(SUBJECT, format!("others run after ours: {after}")),
        (false, _) => {
            let rest = if after.is_empty() { String::new() } else { format!("; others after them: {after}") };
            Finding::degraded(
                SUBJECT,
                format!("others see packets before ours do: {before}{rest}"),
                "if they translate Services or drop packets between nodes, remove them; if they only observe, leave them",
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uplink(attached: &[&'static str], before: &[&str], after: &[&str]) -> Uplink {
        let texts = |it: &[&str]| it.iter().map(|it| (*it).to_owned()).collect();
        let link = Link { name: "eth0".into(), mtu: 1_500, is_ethernet: true, xdp: Vec::new() };
        Uplink { link, attached: attached.to_vec(), before: texts(before), after: texts(after) }
    }

    #[test]
    fn an_old_kernel_cannot_forward() {
        let level = |release| kernel(release).level;
        assert_eq!((level("5.12.0"), level("6.18.44-cloud")), (Level::Ok, Level::Ok));
        assert_eq!(
            (level("5.11.9"), level("5.10.0"), level("?")),
            (Level::Broken, Level::Broken, Level::Broken)
        );
    }

    #[test]
    fn what_is_translated_though_it_is_to_be_forwarded_is_degraded() {
        let finding = |frontends, translated| {
            forwarded(&ForwardSummary { frontends, translated, nodes: 2, ..ForwardSummary::default() })
        };
        let all = finding(3, 0);
        assert_eq!(
            (all.level, &*all.says),
            (Level::Ok, "packets to 3 frontends are forwarded, whole, to 2 nodes")
        );
        let some = finding(1, 2);
        assert_eq!(some.level, Level::Degraded);
        assert!(some.says.contains("those to 2 more are translated"), "{}", some.says);
        let none = finding(0, 0);
        assert_eq!(
            (none.level, &*none.says),
            (Level::Ok, "it is enabled, and no Service has packets to forward")
        );
        let ended = forwarded(&ForwardSummary { ended: 2, nodes: 2, ..ForwardSummary::default() });
        assert_eq!(ended.level, Level::Ok);
        assert!(ended.says.ends_with(
            "for 2 more, connections that exist alone: it was turned off, or an uplink is too narrow"
        ));
    }

    #[test]
    fn an_uplink_is_one_of_ethernet_with_programs_in_both_directions() {
        for (names, expect) in [
            (&["ingress", "egress"][..], (Level::Ok, "eth0 has the programs in both directions")),
            (&["egress"], (Level::Broken, "eth0 has only egress: ")),
            (&[], (Level::Broken, "eth0 has none of the programs: ")),
        ] {
            let found = attached(&uplink(names, &[], &[]));
            assert!(found.level == expect.0 && found.says.starts_with(expect.1), "{found:?}");
        }
        let mut of_a_tunnel = uplink(&["ingress", "egress"], &[], &[]);
        of_a_tunnel.link.is_ethernet = false;
        assert_eq!(attached(&of_a_tunnel).level, Level::Broken);
    }

    #[test]
    fn an_uplink_has_room_for_the_wrapping_of_the_smallest_packets() {
        let finding = |mtu| super::mtu(&Link { mtu, ..uplink(&[], &[], &[]).link });
        let usual = finding(1_500);
        assert_eq!(usual.level, Level::Ok);
        assert!(usual.says.contains("up to 1456 bytes (IPv4) and 1424 (IPv6)"), "{}", usual.says);
        assert_eq!((finding(1_356).level, finding(1_355).level), (Level::Ok, Level::Degraded));
        let [v6, both] = [1_355, 619].map(|it| finding(it).says);
        assert!(v6.ends_with("too little for IPv6, which is translated"), "{v6}");
        assert!(both.ends_with("too little for IPv4 and IPv6, which is translated"), "{both}");
        assert!(finding(40).says.contains("up to 0 bytes (IPv4)"));
    }

    #[test]
    fn nodes_that_do_not_answer_are_named() {
        use PeerState::{Answers, Mute};
        let says = |states: &[(u8, PeerState)]| {
            answers(&states.iter().map(|(n, it)| ([192, 0, 2, *n].into(), *it)).collect()).map(|it| it.says)
        };
        assert_eq!(says(&[]), None);
        let all = says(&[(1, Answers), (2, Answers)]).unwrap();
        assert_eq!(all, "2 of 2 addresses of other nodes answer: they unwrap packets");
        let some = says(&[(1, Answers), (2, Mute)]).unwrap();
        assert!(
            some.starts_with("1 of 2 addresses") && some.ends_with("are translated: 192.0.2.2"),
            "{some}"
        );
        let many: Vec<_> = (1..=12).map(|n| (n, Mute)).collect();
        assert!(says(&many).unwrap().ends_with("192.0.2.10, and 2 more"));
    }

    #[test]
    fn other_programs_matter_if_they_see_packets_first() {
        let finding = |before: &[&str], after: &[&str]| others(&[uplink(&[], before, after)]);
        assert_eq!(finding(&[], &[]).level, Level::Ok);
        assert_eq!(finding(&[], &["tc ingress: u32"]).level, Level::Ok);
        let first = finding(&["XDP: filter (id 7)"], &["tc ingress: u32"]);
        assert_eq!(first.level, Level::Degraded);
        assert!(first.says.ends_with("eth0: XDP: filter (id 7); others after them: eth0: tc ingress: u32"));
    }
}
