//! `explain` and the kernel agree about traffic from outside, from pods and from the node.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    thread,
};

use tests::{Explained, NetNs, TIMEOUT, TestCluster, Transport, eventually, manifest};

use super::*;

#[track_caller]
fn explain(it: &RunningCluster, client: &[&str], frontend: SocketAddr) -> Explained {
    let to = frontend.to_string();
    it.n1.run(|| Explained::ask(&mut it.cli("explain"), &[client, &[&*to]].concat()))
}

/// Checks that each connection reaches a pod that the explanation names, or none if it says so; all wait at the same time.
fn check_verdicts(it: &RunningCluster, connections: &[(&NetNs, Vec<&str>, SocketAddr)]) {
    thread::scope(|scope| {
        for (from, client, destination) in connections {
            let explained = explain(it, client, *destination);
            scope.spawn(move || {
                let is_redirected = explained.verdict == "redirected";
                let request =
                    if is_redirected { TestCluster::request } else { TestCluster::request_unanswered };
                let answer = request(from, Transport::Tcp, *destination);
                assert_eq!(
                    answer.is_ok(),
                    is_redirected,
                    "{client:?} to {destination}: {answer:?}, {explained:?}"
                );
                let Ok(Reply { name, .. }) = answer else { return };
                let addresses = if name == "p1" { P1 } else { P3 };
                let is_named = addresses.iter().any(|ip| explained.used.contains(&at(*ip, TARGET)));
                assert!(is_named, "{client:?} to {destination} reaches {name}, {explained:?}");
            });
        }
    });
}

/// Every kind of destination, with every setting that decides about it.
#[test]
fn explanations_and_the_kernel_agree_at_every_destination() {
    let services = [
        on_both_nodes(external("web", 1)),
        on_both_nodes(external("local", 2)).external_local(),
        external("empty", 3),
        on_both_nodes(external("restricted", 4)).source_ranges(&["10.244.1.0/24", "fd00:244:1::/64"]),
    ];
    let own = "--nodeport-addresses=192.168.50.0/24,fd00:50::/64";
    for (arguments, has_other_node) in [
        (&[][..], true),
        (&["--nodeport-addresses=primary"], true),
        (&[own], true),
        // As a node that does not watch the others.
        (&[], false),
    ] {
        let arguments = [&["--cluster-cidr=10.244.0.0/16,fd00:244::/32"], arguments].concat();
        RunningCluster::each(&services, &arguments, |it| {
            if !has_other_node {
                let file = it.manifests().join("all.yaml");
                let text = fs::read_to_string(&file).unwrap();
                let (known, _) = text.rsplit_once("---\n").unwrap();
                manifest::write_atomically(&file, known).unwrap();
                let other = at(N2[0], NODE_PORT + 1);
                let knows_it = || explain(&it, &["node"], other).json.to_string().contains("node n2");
                assert!(eventually(TIMEOUT, || !knows_it()));
            }
            let clients = [0, 1].map(|it| (CLIENT[it].to_string(), P2[it].to_string()));
            let (mut of_outside, mut of_inside) = (Vec::new(), Vec::new());
            for (n, family) in [(1, 0), (2, 1)] {
                let node_port = NODE_PORT + u16::from(n);
                let loopback: IpAddr =
                    if family == 0 { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() };
                let from_outside = [
                    at(load_balancer_ips(n)[family], 80),
                    at(load_balancer_ips(n)[family], 81),
                    at(external_ips(n)[family], 80),
                    at(N1[family], node_port),
                    at(N1[family], 31_000),
                    at(N2[family], node_port),
                ];
                let inside = [
                    at(cluster_ips(n)[family], 80),
                    at(cluster_ips(n)[family], 81),
                    at(loopback, node_port),
                    at(loopback, 31_000),
                ];
                let (outside, pod) = &clients[family];
                of_outside.extend(from_outside.map(|to| (&it.client, vec!["outside", outside.as_str()], to)));
                for to in inside.into_iter().chain(from_outside) {
                    of_inside.push((&it.n1, vec!["node"], to));
                    of_inside.push((&it.pods[1], vec!["pod", pod.as_str()], to));
                }
            }
            // The Services `empty` and `restricted`, of which pods of n1 may use the latter.
            for (family, (outside, pod)) in clients.iter().enumerate() {
                of_inside.push((&it.n1, vec!["node"], at(cluster_ips(3)[family], 80)));
                for n in [3, 4] {
                    let to = at(load_balancer_ips(n)[family], 80);
                    of_outside.push((&it.client, vec!["outside", outside.as_str()], to));
                    of_inside.push((&it.pods[1], vec!["pod", pod.as_str()], to));
                }
            }
            check_verdicts(&it, &of_outside);
            // Programs of the node and of its pods are under the hooks.
            let _guard = it.sandbox().enter().unwrap();
            check_verdicts(&it, &of_inside);
        });
    }
}
