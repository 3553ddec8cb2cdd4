//! Session affinity on the packet path: which client keeps which endpoint, and for how long.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    thread,
    time::{Duration, Instant},
};

use tests::{
    NetNs, TIMEOUT, TestCluster, Transport, eventually,
    manifest::Service,
    repetitions,
    requirements::nft_or_skip,
    test_cluster::{CLIENT, P1, P2, P3, TARGET},
};

use crate::{
    BACKENDS, RunningCluster, at, cluster_ips, external, external_frontends, internal_frontends,
    load_balancer_ips, nft, on_both_nodes, replies, server, start_load,
};

/// The pods, with their nodes.
const PODS: [(&str, &str, [IpAddr; 2]); 3] = [("n1", "p1", P1), ("n1", "p2", P2), ("n2", "p3", P3)];

/// A Service with session affinity.
fn web() -> Service {
    external("web", 1).affinity(600)
}

/// The same with these pods as its endpoints.
fn web_at<'a>(pods: impl IntoIterator<Item = &'a (&'a str, &'a str, [IpAddr; 2])>) -> Service {
    pods.into_iter().fold(web(), |it, (node, name, addresses)| it.endpoint_on(node, name, addresses))
}

/// Every pod that replies.
#[track_caller]
fn servers(from: &NetNs, transport: Transport, address: SocketAddr) -> BTreeSet<String> {
    replies(from, transport, address).into_iter().map(|it| it.name).collect()
}

#[test]
fn a_client_with_session_affinity_keeps_its_endpoint_until_it_is_removed() {
    RunningCluster::each(&[web_at(&PODS)], &[], |mut it| {
        for frontend in external_frontends(1) {
            let servers = servers(&it.client, Transport::Tcp, frontend);
            assert_eq!(servers.len(), 1, "{frontend}: {servers:?}");
            // Over UDP too, with an endpoint of its own.
            assert_eq!(replies(&it.client, Transport::Udp, frontend).len(), 1, "{frontend}");
        }
        let frontend = at(load_balancer_ips(1)[0], 80);
        let before = server(&it.client, frontend);
        it.apply(&[web_at(PODS.iter().filter(|pod| pod.1 != before))]);
        let now = servers(&it.client, Transport::Tcp, frontend);
        assert_eq!(now.len(), 1, "{now:?}");
        assert!(!now.contains(&before), "{before} was removed and still replies");
    });
}

#[test]
fn a_client_keeps_one_endpoint_at_all_addresses_of_a_service_port() {
    RunningCluster::each(&[web_at(&PODS)], &[], |it| {
        for internal in internal_frontends(1) {
            let mut external = external_frontends(1);
            external.retain(|it| it.is_ipv4() == internal.is_ipv4());
            let all = [&external[..], &[internal]].concat();
            for transport in [Transport::Tcp, Transport::Udp] {
                for (from, frontends) in [(&it.client, &external), (&it.pods[1], &all)] {
                    let servers: BTreeSet<_> =
                        frontends.iter().flat_map(|it| servers(from, transport, *it)).collect();
                    assert_eq!(servers.len(), 1, "{frontends:?} over {transport:?}: {servers:?}");
                }
            }
        }
    });
}

#[test]
fn affinity_holds_only_at_addresses_that_have_the_endpoint() {
    let web = || web().external_local();
    // With --masquerade-all, p3 replies to the client through n1.
    let remote = web().endpoint_on("n2", "p3", &P3);
    RunningCluster::each(&[remote], &["--masquerade-all"], |mut it| {
        for internal in internal_frontends(1) {
            assert_eq!(server(&it.client, internal), "p3");
        }
        it.apply(&[on_both_nodes(web())]);
        for (internal, external) in internal_frontends(1).into_iter().zip(load_balancer_ips(1)) {
            assert_eq!(server(&it.client, internal), "p3", "kept");
            assert_eq!(server(&it.client, at(external, 80)), "p1", "the policy is Local, and p3 is remote");
            // The endpoint used last is kept.
            for _ in 0..10 {
                assert_eq!(server(&it.client, internal), "p1");
            }
        }
    });
}

#[test]
fn affinity_to_a_removed_endpoint_is_ignored() {
    if !nft_or_skip() {
        return;
    }
    RunningCluster::each(&[on_both_nodes(web())], &[], |it| {
        // The tables of a running proxy cannot be changed from Linux 6.9 on.
        let it = {
            let RunningCluster { agent, cluster } = it;
            agent.kill9().unwrap();
            cluster
        };
        for (family, table) in ["ip", "ip6"].into_iter().enumerate() {
            let (client, service, removed) = (CLIENT[family], cluster_ips(1)[family], P2[family]);
            let element =
                format!("{{ {client} . {service} . tcp . 80 timeout 600s : {removed} . {TARGET} }}");
            // As if it had been added just before its endpoint was removed.
            nft(&it, &["add", "element", table, "kube-proxy-ebpf", "affinity", &element]);
            let frontend = at(load_balancer_ips(1)[family], 80);
            let servers = servers(&it.client, Transport::Tcp, frontend);
            assert_eq!(servers.len(), 1, "{servers:?}");
            assert!(!servers.contains("p2"), "p2 was removed and replies");
            let list = nft(&it, &["list", "map", table, "kube-proxy-ebpf", "affinity"]);
            assert!(!list.contains(&format!("{removed} . ")), "{list}");
        }
    });
}

#[test]
fn under_churn_no_client_reaches_a_removed_endpoint() {
    let only = |n: usize| [web_at(&PODS[n % 3..=n % 3])];
    for backend in BACKENDS {
        let Some(mut it) = RunningCluster::or_skip(backend, &only(0), &[]) else { return };
        let start = |frontend| start_load(&it, Transport::Tcp, frontend, 1, 1);
        let loads: Vec<_> = external_frontends(1).into_iter().map(start).collect();
        let mut spans = Vec::new();
        for n in 1..repetitions(60).max(7) {
            it.apply(&only(n));
            let begin = Instant::now();
            assert!(loads[0].wait_for_new_connects(TIMEOUT));
            spans.push((begin, Instant::now(), PODS[n % 3].1));
        }
        for load in loads {
            let samples = load.stop();
            for (begin, end, name) in &spans {
                for sample in samples.iter().filter(|it| *begin <= it.started && it.ended() <= *end) {
                    let reply = sample.result.as_ref().unwrap();
                    assert!(reply.starts_with(name), "{reply}, but the only endpoint is {name}");
                }
            }
        }
    }
}

#[test]
fn session_affinity_expires_after_the_last_connection() {
    let web = on_both_nodes(external("web", 1)).affinity(1);
    let Some(it) = RunningCluster::or_skip("nft", &[web], &[]) else { return };
    let frontend = at(load_balancer_ips(1)[0], 80);
    let first = server(&it.client, frontend);
    let has_expired = eventually(TIMEOUT * 2, || {
        thread::sleep(Duration::from_millis(1_200));
        TestCluster::request(&it.client, Transport::Tcp, frontend).unwrap().name != first
    });
    assert!(has_expired, "the client always keeps {first}");
}
