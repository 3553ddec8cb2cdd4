//! `kube-proxy-ipvs` in a kernel with IPVS, as that of `cargo xtask vmtest 6.1 kube_proxy_ipvs`: the conformance cases, connections
//! and repairs.

use std::{
    net::{IpAddr, SocketAddr},
    process::Command,
};

use build_tools::build::backend_binary;
use tests::{
    EchoConnection, NetNs, Service, TIMEOUT, TestCluster, Transport, eventually, program_or_skip, run, skip,
    test_cluster::{N1, P1, P2, Reply, TARGET},
};

use super::BackendCluster;
use crate::{
    backend_conformance::{ask, assert_passed},
    packet_path::{NODE_PORT, at, cluster_ips, policies::N1_AT_POD},
};

const PACKAGE: &str = "kube-proxy-ipvs";

/// Whether this machine can run a test; says why if not.
fn can_run() -> bool {
    let Some(ipvsadm) = program_or_skip("ipvsadm") else { return false };
    let can_run = run(Command::new(ipvsadm).arg("--list")).code == Some(0);
    if !can_run {
        skip("this kernel has no IPVS, or the user is not root");
    }
    can_run
}

#[test]
fn kube_proxy_ipvs_passes_every_conformance_case() {
    if !can_run() {
        return;
    }
    let binary = backend_binary(PACKAGE);
    let backend = [binary.to_str().unwrap(), "--healthz-bind-address=", "--metrics-bind-address="];
    assert_passed(ask(&[&["--packets", "--"], &backend[..]].concat()));
}

/// Waits until a pod answers, and sees this source.
#[track_caller]
fn wait_for(from: &NetNs, to: SocketAddr, name: &str, source: IpAddr) {
    let expected = Reply { name: name.to_owned(), source };
    let mut last = None;
    let is_right = || {
        let reply = TestCluster::request_unanswered(from, Transport::Tcp, to);
        let is_right = reply.as_ref().is_ok_and(|it| *it == expected);
        last = Some(reply);
        is_right
    };
    assert!(eventually(TIMEOUT, is_right), "{to}: {last:?}, not {expected:?}");
}

#[test]
fn kube_proxy_ipvs_keeps_connections_and_repairs_the_kernel() {
    if !can_run() {
        return;
    }
    let services = |pod: &str, ips: &[IpAddr]| {
        let web = Service::new("web", &cluster_ips(1)[..1]).port("", "TCP", 80, TARGET);
        [web.node_port(NODE_PORT).endpoint(pod, ips)]
    };
    let Some(it) = BackendCluster::or_skip(&services("p1", &P1)) else { return };
    let (cluster_ip, node_port) = (at(cluster_ips(1)[0], 80), at(N1[0], NODE_PORT));
    let masqueraded = N1_AT_POD[0];
    let start = || it.spawn(it.backend(PACKAGE, &[]));
    let backend = start();
    wait_for(&it.pods[1], cluster_ip, "p1", P2[0]);
    let mut held = it.pods[1].run(|| EchoConnection::connect(cluster_ip)).unwrap();
    // From an endpoint to its own Service, and from outside.
    wait_for(&it.pods[0], cluster_ip, "p1", masqueraded);
    wait_for(&it.client, node_port, "p1", masqueraded);
    it.run_line("ipvsadm -A -f 5 -s rr");

    it.write(&services("p2", &P2));
    wait_for(&it.client, node_port, "p2", masqueraded);
    held.ping().expect("the endpoint has only left the Service");
    drop(backend);
    wait_for(&it.client, cluster_ip, "p2", masqueraded);
    let backend = start();
    for damage in ["ip rule delete pref 10256", "nft flush table inet kube-proxy-ipvs"] {
        it.run_line(damage);
        wait_for(&it.client, node_port, "p2", masqueraded);
        wait_for(&it.pods[1], cluster_ip, "p2", masqueraded);
    }
    held.ping().expect("another process continues it");
    it.run_line("ipvsadm -C");
    it.run_line("ipvsadm -A -f 5 -s rr");
    wait_for(&it.client, node_port, "p2", masqueraded);
    drop(backend);
    for _ in 0..2 {
        let cleanup = it.backend(PACKAGE, &["--cleanup"]);
        assert!(it.succeeds(cleanup), "{}", it.log());
    }
    assert_eq!(it.run_line("ipvsadm -Sn"), "-A -f 5 -s rr\n");
    assert_eq!(it.run_line("nft list tables"), "");
    for family in ["-4", "-6"] {
        assert!(!it.run_line(&format!("ip {family} rule")).contains("10256"));
    }
}
