//! `explain` names the pods that traffic from outside, from pods and from the node reaches.

use std::{collections::BTreeSet, net::SocketAddr};

use tests::{
    Explained, NetNs, TestCluster, Transport,
    manifest::Service,
    test_cluster::{CLIENT, N1, P1, P2, P3, TARGET},
};

use super::{
    RunningCluster, at, check_dropped, external, external_frontends, internal_frontends, load_balancer_ips,
    on_both_nodes,
};

/// Checks that a client reaches the pods that an explanation names.
#[track_caller]
fn check(it: &RunningCluster, (from, client): (&NetNs, &[&str]), frontend: SocketAddr) {
    let explained = explain(it, client, frontend);
    let pods = [("p1", P1), ("p3", P3)];
    let is_used = |ips: &[_; 2]| ips.iter().any(|ip| explained.used.contains(&at(*ip, TARGET)));
    let named: BTreeSet<_> =
        pods.iter().filter(|(_, ips)| is_used(ips)).map(|(name, _)| (*name).to_owned()).collect();
    let request = |_| Some(TestCluster::request(from, Transport::Tcp, frontend).ok()?.name);
    let reached: BTreeSet<_> = (0..30).filter_map(request).collect();
    assert_eq!(named, reached, "{explained:?}");
    assert_eq!(explained.verdict, if named.is_empty() { "refused" } else { "redirected" }, "{explained:?}");
}

#[track_caller]
fn explain(it: &RunningCluster, client: &[&str], frontend: SocketAddr) -> Explained {
    let to = frontend.to_string();
    it.n1.run(|| Explained::ask(&mut it.cli("explain"), &[client, &[&*to]].concat()))
}

#[test]
fn explanations_name_the_pods_that_traffic_reaches() {
    let services: [Service; 4] = [
        on_both_nodes(external("web", 1)),
        on_both_nodes(external("local", 2)).external_local().internal_local(),
        external("empty", 3),
        on_both_nodes(external("restricted", 4)).source_ranges(&["10.244.1.0/24", "fd00:244:1::/64"]),
    ];
    // By its address, nftables knows that a pod is one.
    let pods = ["--cluster-cidr=10.244.0.0/16,fd00:244::/32"];
    RunningCluster::each(&services, &pods, |it| {
        let (outside, pod) = (CLIENT.map(|it| it.to_string()), P2.map(|it| it.to_string()));
        for n in 1..=3 {
            for frontend in internal_frontends(n).into_iter().chain(external_frontends(n)) {
                let family = usize::from(frontend.is_ipv6());
                check(&it, (&it.pods[1], &["pod", &pod[family]]), frontend);
                check(&it, (&it.n1, &["node"]), frontend);
                // From the client, the replies of p3 to a cluster IP would take another route.
                if !internal_frontends(n).contains(&frontend) {
                    check(&it, (&it.client, &["outside", &outside[family]]), frontend);
                }
            }
        }
        for (family, ip) in load_balancer_ips(4).into_iter().enumerate() {
            check(&it, (&it.pods[1], &["pod", &pod[family]]), at(ip, 80));
            assert_eq!(explain(&it, &["outside", &outside[family]], at(ip, 80)).verdict, "dropped");
            check_dropped(&it.client, at(ip, 80));
        }
        let elsewhere = explain(&it, &["outside"], at(N1[0], 31_000));
        assert_eq!((elsewhere.verdict.as_str(), elsewhere.used.len()), ("untranslated", 0));
    });
}
