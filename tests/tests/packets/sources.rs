//! Whom an endpoint sees: what is masqueraded, and for whom; and where node ports are served.

use std::net::{IpAddr, Ipv4Addr};

use tests::{
    TestCluster, Transport, eventually,
    test_cluster::{CLIENT, N1, P1, P2, P3},
};

use crate::{
    BACKENDS, LIMIT, NODE_PORT, Served, agent_is_ready, at, check, check_refused, dump, ips, nft,
    nft_is_here, on_both_nodes, outer, outer_external, outside, service,
};

#[test]
fn sources_outside_the_cluster_cidr_are_masqueraded_on_their_way_to_a_cluster_ip() {
    let cidr = "--cluster-cidr=10.244.0.0/16,fd00:244::/32";
    for backend in BACKENDS {
        let web = on_both_nodes(service("web", 1));
        let Some(it) = Served::or_skip("cluster_cidr", backend, &[web], &[cidr]) else { return };
        for (index, ip) in ips(1).into_iter().enumerate() {
            let seen_here = if index == 0 { Ipv4Addr::new(169, 254, 1, 1).into() } else { N1[1] };
            check(&it.cluster.client, at(ip, 80), &[("p1", seen_here), ("p3", N1[index])]);
            check(&it.cluster.pods[1], at(ip, 80), &[("p1", P2[index]), ("p3", P2[index])]);
        }
    }
}

#[test]
fn every_way_to_know_a_pod_tells_whose_source_is_kept() {
    let ways = [
        &["--detect-local-mode=NodeCIDR"][..],
        &["--detect-local-mode=BridgeInterface", "--pod-bridge-interface=p2"],
        &["--detect-local-mode=InterfaceNamePrefix", "--pod-interface-name-prefix=p"],
    ];
    for (n, way) in ways.into_iter().enumerate() {
        let web = service("web", 1).endpoint("p1", &P1);
        let Some(it) = Served::or_skip(&format!("detect_{n}"), "nft", &[web], way) else { return };
        let seen_here = Ipv4Addr::new(169, 254, 1, 1).into();
        check(&it.cluster.client, at(ips(1)[0], 80), &[("p1", seen_here)]);
        check(&it.cluster.pods[1], at(ips(1)[0], 80), &[("p1", P2[0])]);
    }
}

#[test]
fn masquerade_all_changes_every_source() {
    for backend in BACKENDS {
        let web = service("web", 1).endpoint_on("n2", "p3", &P3);
        let Some(it) = Served::or_skip("masquerade_all", backend, &[web], &["--masquerade-all"]) else {
            return;
        };
        for (index, ip) in ips(1).into_iter().enumerate() {
            check(&it.cluster.pods[0], at(ip, 80), &[("p3", N1[index])]);
        }
    }
}

#[test]
fn the_mark_that_says_masquerade_can_be_another() {
    if !nft_is_here("the_mark") {
        return;
    }
    let web = on_both_nodes(outside("web", 1)).external_local();
    let Some(it) = Served::or_skip("mark", "nft", &[web], &["--nft-masquerade-bit=20"]) else { return };
    // Somebody else marks everything with the usual one.
    let cluster = &it.cluster;
    nft(cluster, &["add", "table", "ip", "theirs"]);
    let hook = "{ type filter hook prerouting priority -150; }";
    nft(cluster, &["add", "chain", "ip", "theirs", "first", hook]);
    nft(cluster, &["add", "rule", "ip", "theirs", "first", "meta", "mark", "set", "0x4000"]);
    check(&cluster.client, at(outer(1)[0], 80), &[("p1", CLIENT[0])]);
    it.agent.terminate().unwrap();
    // What is marked with the bit that was chosen is masqueraded.
    let mut agent = cluster.start(&cluster.command("nft").arg("--nft-masquerade-bit=14"));
    agent.wait_until(LIMIT, || agent_is_ready(cluster)).unwrap();
    // At another address: a flow that is there stays as it is, and a port of the client's may come up again.
    let other = outer_external(1)[0];
    check(&cluster.client, at(other, 80), &[("p1", Ipv4Addr::new(169, 254, 1, 1).into())]);
}

#[test]
fn node_ports_follow_the_addresses_that_are_chosen() {
    let web = outside("web", 1).endpoint("p1", &P1);
    let Some(it) =
        Served::or_skip("node_port_addresses", "nft", &[web], &["--nodeport-addresses=192.168.50.0/24"])
    else {
        return;
    };
    let port = NODE_PORT + 1;
    assert_eq!(TestCluster::request(&it.cluster.client, Transport::Tcp, at(N1[0], port)).unwrap().name, "p1");
    check_refused(&it.cluster.client, at(N1[1], port));
    check_refused(&it.cluster.n1, at(Ipv4Addr::LOCALHOST.into(), port));
    let new: IpAddr = Ipv4Addr::new(192, 168, 50, 7).into();
    it.cluster.n1.ip(&["address", "add", "192.168.50.7/24", "dev", "eth0"]).unwrap();
    let served = |is: bool| {
        eventually(LIMIT, || {
            TestCluster::request(&it.cluster.client, Transport::Tcp, at(new, port)).is_ok() == is
        })
    };
    assert!(served(true), "a new address is not served");
    it.cluster.n1.ip(&["address", "del", "192.168.50.7/24", "dev", "eth0"]).unwrap();
    let gone = eventually(LIMIT, || !dump(&it.cluster).iter().any(|it| it.ends_with("192.168.50.7")));
    assert!(gone, "an address that is gone is still served");
}
