//! The source address that an endpoint sees: what is masqueraded; and the addresses at which node ports are served.

use std::net::{IpAddr, Ipv4Addr};

use tests::{TIMEOUT, TestCluster, Transport, eventually, program_or_skip};

use super::*;

/// The address of n1 on the veth pair to its pod, by family.
pub(crate) const N1_AT_POD: [IpAddr; 2] = [IpAddr::V4(Ipv4Addr::new(169, 254, 1, 1)), N1[1]];

#[test]
fn sources_outside_the_cluster_cidr_are_masqueraded_to_a_cluster_ip() {
    let web = on_both_nodes(internal("web", 1));
    RunningCluster::each(&[web], &["--cluster-cidr=10.244.0.0/16,fd00:244::/32"], |it| {
        for (index, frontend) in internal_frontends(1).into_iter().enumerate() {
            check(&it.client, frontend, &[("p1", N1_AT_POD[index]), ("p3", N1[index])]);
            check(&it.pods[1], frontend, &[("p1", P2[index]), ("p3", P2[index])]);
        }
    });
}

#[test]
fn every_detect_local_mode_keeps_the_sources_of_pods() {
    for mode in [
        &["--detect-local-mode=NodeCIDR"][..],
        &["--detect-local-mode=BridgeInterface", "--pod-bridge-interface=p2"],
        &["--detect-local-mode=InterfaceNamePrefix", "--pod-interface-name-prefix=p"],
    ] {
        let web = internal("web", 1).endpoint("p1", &P1);
        let Some(it) = RunningCluster::or_skip("nft", &[web], mode) else { return };
        let frontend = at(cluster_ips(1)[0], 80);
        check(&it.client, frontend, &[("p1", N1_AT_POD[0])]);
        check(&it.pods[1], frontend, &[("p1", P2[0])]);
    }
}

#[test]
fn masquerade_all_changes_every_source() {
    let web = internal("web", 1).endpoint_on("n2", "p3", &P3);
    RunningCluster::each(&[web], &["--masquerade-all"], |it| {
        for (index, frontend) in internal_frontends(1).into_iter().enumerate() {
            check(&it.pods[0], frontend, &[("p3", N1[index])]);
        }
        let reported = it.agent.log().contains("--masquerade-all has no effect on sockets");
        assert_eq!(reported, it.backend == "ebpf");
    });
}

#[test]
fn the_masquerade_mark_is_configurable() {
    let Some(_nft) = program_or_skip("nft") else { return };
    let web = on_both_nodes(external("web", 1)).external_local();
    let Some(it) = RunningCluster::or_skip("nft", &[web], &["--nft-masquerade-bit=20"]) else { return };
    // Another table sets the default mark on all packets.
    nft(&it, &["add", "table", "ip", "theirs"]);
    let hook = "{ type filter hook prerouting priority -150; }";
    nft(&it, &["add", "chain", "ip", "theirs", "first", hook]);
    nft(&it, &["add", "rule", "ip", "theirs", "first", "meta", "mark", "set", "0x4000"]);
    check(&it.client, at(load_balancer_ips(1)[0], 80), &[("p1", CLIENT[0])]);
    let RunningCluster { agent, cluster, .. } = it;
    agent.terminate().unwrap();
    // With the mark's own bit configured, all packets are masqueraded.
    let _agent = start_ready(&cluster, &cluster.command("nft").arg("--nft-masquerade-bit=14"));
    // At another address: existing flows keep their translation, and the client may reuse a port.
    check(&cluster.client, at(external_ips(1)[0], 80), &[("p1", N1_AT_POD[0])]);
}

#[test]
fn node_ports_follow_the_selected_addresses() {
    let web = external("web", 1).endpoint("p1", &P1);
    let arguments = ["--nodeport-addresses=192.168.50.0/24,2001:db8::/32"];
    let Some(it) = RunningCluster::or_skip("nft", &[web], &arguments) else { return };
    let port = NODE_PORT + 1;
    assert_eq!(server(&it.client, at(N1[0], port)), "p1");
    check_refused(&it.client, at(N1[1], port));
    check_refused(&it.n1, at(Ipv4Addr::LOCALHOST, port));
    let added = at(Ipv4Addr::new(192, 168, 50, 7), port);
    it.n1.ip(&["address", "add", "192.168.50.7/24", "dev", "eth0"]).unwrap();
    let is_served = || TestCluster::request(&it.client, Transport::Tcp, added).is_ok();
    assert!(eventually(TIMEOUT, is_served), "an added address is not served");
    it.n1.ip(&["address", "del", "192.168.50.7/24", "dev", "eth0"]).unwrap();
    let is_removed = || !dump(&it).iter().any(|it| it.ends_with("192.168.50.7"));
    assert!(eventually(TIMEOUT, is_removed), "a removed address is still served");
}
