//! How the programs of packets from outside are attached to interfaces, beside those of others.

use std::{fs, process::Command};

use aya::programs::{
    Xdp, XdpMode,
    links::{FdLink, PinnedLink},
    loaded_programs,
};
use aya_obj::programs::XdpAttachType;
use tests::{
    AgentCommand, Build, IngressCluster, NetNs, OUTSIDE_CLIENTS, TIMEOUT, assert_contains, kernel_at_least,
    run, skip,
};

use crate::{
    outside::{FRONTENDS, NETWORKS, connect},
    outside_peers::{cluster_or_skip, servers, wait_for},
    outside_reports::explain,
};

/// As on a kernel without links to interfaces.
fn with_filters(command: AgentCommand) -> AgentCommand {
    command.env("KUBE_PROXY_EBPF_FAULT", "no-links-to-interfaces")
}

fn tc(netns: &NetNs, arguments: &str) -> String {
    netns.run(|| run(Command::new("tc").args(arguments.split(' ')))).success()
}

#[test]
fn filters_forward_packets_and_leave_those_of_others() {
    let Some(mut cluster) = cluster_or_skip() else { return };
    // The second node has the qdisc already, with a filter.
    for it in
        ["qdisc add dev eth0 clsact", "filter add dev eth0 ingress prio 7 protocol all u32 match u32 0 0"]
    {
        tc(&cluster.nodes[1].netns, it);
    }
    for node in 0..3 {
        cluster.start_with(&Build::Failpoints.binary(), node, with_filters);
    }
    cluster.set_next_hops(NETWORKS, &[0, 1]);
    wait_for(&cluster, &["n1", "n2", "n3"], true);
    let mut connections = connect(&cluster, 20);
    let filters = |it: &IngressCluster, node: usize, side: &str| {
        tc(&it.nodes[node].netns, &format!("filter show dev eth0 {side}"))
    };
    assert_contains(&filters(&cluster, 0, "ingress"), &["ingress direct-action"]);
    let explained = explain(&cluster, 0, &OUTSIDE_CLIENTS[0][0].to_string(), FRONTENDS[0]);
    assert_eq!(explained["kernel"]["forwarding"]["uplinks"], serde_json::json!(["eth0"]), "{explained}");
    // Filters outlive the proxy, and another one takes them over.
    cluster.set_next_hops(NETWORKS, &[2]);
    (0..3).for_each(|it| cluster.kill(it));
    connections.iter_mut().for_each(|it| it.ping().unwrap());
    for node in 0..3 {
        cluster.start_with(&Build::Failpoints.binary(), node, with_filters);
        cluster.agent(node).wait_until_applied(TIMEOUT).unwrap();
    }
    cluster.set_next_hops(NETWORKS, &[0, 1, 2]);
    connections.iter_mut().for_each(|it| it.ping().unwrap());
    wait_for(&cluster, &["n1", "n2", "n3"], true);
    for (node, side) in [(0, "ingress"), (0, "egress"), (1, "egress")] {
        assert_eq!(
            filters(&cluster, node, side).matches("direct-action").count(),
            1,
            "of node {node}, {side}"
        );
    }
    for node in 0..3 {
        cluster.kill(node);
        cluster.cleanup(node);
    }
    assert!(!tc(&cluster.nodes[0].netns, "qdisc show dev eth0").contains("clsact"), "it was ours");
    assert!(tc(&cluster.nodes[1].netns, "qdisc show dev eth0").contains("clsact"), "it was not ours");
    let left = filters(&cluster, 1, "ingress");
    assert!(left.contains("u32") && !left.contains("direct-action"), "{left}");
    assert_eq!(filters(&cluster, 1, "egress"), "");
}

/// Detaches the program that is not in the driver.
fn detach_ingress(cluster: &IngressCluster, node: usize) {
    let mut pins = cluster.nodes[node].links("ingress_");
    pins.retain(|it| !it.to_str().unwrap().contains("/ingress_xdp_"));
    assert_eq!(pins.len(), 1, "{pins:?}");
    fs::remove_file(&pins[0]).unwrap();
}

/// Attaches the program in the driver at the other end of the first node's cable, where it passes everything: the driver veth
/// sends frames back only to an interface with a program.
fn at_the_other_end(cluster: &IngressCluster) -> Xdp {
    let pin = &cluster.nodes[0].links("ingress_xdp_")[0];
    let id = FdLink::from(PinnedLink::from_pin(pin).unwrap()).info().unwrap().program_id();
    let info = loaded_programs().flatten().find(|it| it.id() == id).unwrap();
    let mut program = Xdp::from_program_info(info, "ingress_xdp".into(), XdpAttachType::Interface).unwrap();
    cluster.lan.run(|| program.attach("n1", XdpMode::Driver)).unwrap();
    program
}

#[test]
fn the_driver_forwards_packets() {
    if !kernel_at_least(6, 6) {
        return skip("the test takes links to interfaces away, which need Linux 6.6");
    }
    let Some(mut cluster) = cluster_or_skip() else { return };
    // No sender leaves checksums to this driver.
    let ethtool = |netns: &NetNs, words: &str| {
        netns.run(|| run(Command::new("ethtool").args(words.split(' ')))).success();
    };
    ethtool(&cluster.clients[0], "-K eth0 tx off");
    cluster.start(0, &["--external-forwarding-xdp=true"]);
    cluster.start(1, &[]);
    cluster.start(2, &[]);
    let log = "packets from outside are forwarded in the driver";
    cluster.agent(0).wait_until_logged(TIMEOUT, log).unwrap();
    let _peer = at_the_other_end(&cluster);
    wait_for(&cluster, &["n1", "n2", "n3"], true);
    cluster.wait_until_settled();
    // Without the other program, only the one in the driver can forward.
    cluster.kill(0);
    detach_ingress(&cluster, 0);
    let of_others = |it: &IngressCluster| {
        let forwarded = servers(it).into_iter().filter(|(name, is_own)| name != "n1" && *is_own);
        forwarded.map(|(name, _)| name).collect::<Vec<_>>()
    };
    assert_eq!(of_others(&cluster), ["n2", "n3"]);
    cluster.cleanup(0);
    assert_eq!(of_others(&cluster), [""; 0]);
}
