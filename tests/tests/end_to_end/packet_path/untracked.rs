//! Connections of the host's programs to pods that are not tracked, on request.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use tests::{TestCluster, Transport};

use super::{node::request_by_socket, *};

const PODS: &str = "--cluster-cidr=10.244.0.0/16,fd00:244::/32";
/// An address that no host has, and to which pods have a route.
const MASQUERADED: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 168, 50, 77));

fn others(cluster: &TestCluster, rules: &str) {
    nft(cluster, &["add table inet others; delete table inet others"]);
    nft(cluster, &[&format!("table inet others {{ {rules} }}")]);
}

/// Drops the packets between the host's programs and pods whose state in conntrack is this one.
fn drop_if(cluster: &TestCluster, state: &str) {
    let chain = |hook: &str, port: &str| {
        format!(
            "chain {hook} {{ type filter hook {hook} priority 0; tcp {port} 8080 ct state {state} drop; }}\n"
        )
    };
    others(cluster, &(chain("output", "dport") + &chain("input", "sport")));
}

/// Lets a program of the host connect to the Service by the socket path, often enough to reach both nodes.
#[track_caller]
fn connect_by_socket(it: &RunningCluster, frontend: SocketAddr) -> Vec<IpAddr> {
    let reply = || request_by_socket(it, Transport::Tcp, frontend);
    (0..16).map(|_| reply().unwrap_or_else(|error| panic!("{frontend}: {error}")).source).collect()
}

fn masquerade(cluster: &TestCluster) {
    let chain = "type nat hook postrouting priority 101; meta l4proto tcp ip daddr 10.244.1.0/24";
    others(cluster, &format!("chain postrouting {{ {chain} snat to {MASQUERADED}; }}\n"));
}

#[test]
fn connections_of_the_host_to_pods_are_not_tracked_on_request() {
    let web = on_both_nodes(external("web", 1));
    let Some(it) = RunningCluster::or_skip("ebpf", &[web], &[PODS, "--nft-notrack"]) else { return };
    drop_if(&it, "!= untracked");
    for frontend in internal_frontends(1) {
        connect_by_socket(&it, frontend);
    }
    // Rules of others that translate do not apply to them.
    masquerade(&it);
    assert!(!connect_by_socket(&it, internal_frontends(1)[0]).contains(&MASQUERADED));
    nft(&it, &["delete table inet others"]);
    // What is translated here is tracked: packets from outside, and sockets that no program redirects.
    for frontend in external_frontends(1).into_iter().chain(internal_frontends(1)) {
        for _ in 0..8 {
            server(&it.client, frontend);
            server(&it.n1, frontend);
        }
    }
}

#[test]
fn connections_of_the_host_to_pods_are_tracked_by_default() {
    let web = on_both_nodes(external("web", 1));
    let Some(it) = RunningCluster::or_skip("ebpf", &[web], &[PODS]) else { return };
    drop_if(&it, "untracked");
    for frontend in internal_frontends(1) {
        connect_by_socket(&it, frontend);
    }
    masquerade(&it);
    assert!(connect_by_socket(&it, internal_frontends(1)[0]).contains(&MASQUERADED));
}
