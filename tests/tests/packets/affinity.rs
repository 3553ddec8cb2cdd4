//! Session affinity of packets: which client keeps which endpoint, and for how long.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    slice, thread,
    time::{Duration, Instant},
};

use tests::{
    ConnectLoad, NetNs, TestCluster, Transport, eventually,
    manifest::Service,
    repetitions, scaled,
    test_cluster::{CLIENT, P1, P2, P3, TARGET},
};

use crate::{
    BACKENDS, LIMIT, Served, answers, at, doors, ips, nft, nft_is_here, on_both_nodes, outer, outside,
};

/// The Service under test, with session affinity.
fn sticky() -> Service {
    outside("web", 1).affinity(600)
}

/// Who answers, again and again.
#[track_caller]
fn names(from: &NetNs, transport: Transport, address: SocketAddr) -> BTreeSet<String> {
    answers(from, transport, address).into_iter().map(|it| it.name).collect()
}

#[test]
fn a_client_with_session_affinity_keeps_its_endpoint_until_that_is_gone() {
    for backend in BACKENDS {
        let web = |endpoints: &[(&str, [IpAddr; 2])]| {
            let web = endpoints.iter().fold(sticky(), |it, (name, addresses)| it.endpoint(name, addresses));
            on_both_nodes(web)
        };
        let Some(mut it) = Served::or_skip("affinity", backend, &[web(&[("p2", P2)])], &[]) else { return };
        for door in doors(1) {
            let names: BTreeSet<_> =
                answers(&it.cluster.client, Transport::Tcp, door).into_iter().map(|it| it.name).collect();
            assert_eq!(names.len(), 1, "{door} leads to {names:?}");
            // Over UDP too, and with an endpoint of its own.
            assert_eq!(answers(&it.cluster.client, Transport::Udp, door).len(), 1, "{door}");
        }
        let door = at(outer(1)[0], 80);
        let kept = TestCluster::request(&it.cluster.client, Transport::Tcp, door).unwrap().name;
        let others: Vec<_> =
            [("p1", P1), ("p2", P2), ("p3", P3)].into_iter().filter(|it| it.0 != kept).collect();
        let service = |names: &[(&str, [IpAddr; 2])]| {
            names.iter().fold(sticky(), |it, (name, addresses)| {
                it.endpoint_on(if *name == "p3" { "n2" } else { "n1" }, name, addresses)
            })
        };
        it.write(&[service(&others)]);
        let now: BTreeSet<_> =
            answers(&it.cluster.client, Transport::Tcp, door).into_iter().map(|it| it.name).collect();
        assert_eq!(now.len(), 1, "{now:?}");
        assert!(!now.contains(&kept), "{kept} is gone and still answers");
    }
}

#[test]
fn a_client_keeps_one_endpoint_at_all_addresses_of_a_service_port() {
    for backend in BACKENDS {
        let web = on_both_nodes(sticky().endpoint("p2", &P2));
        let Some(it) = Served::or_skip("all_addresses", backend, &[web], &[]) else { return };
        let cluster = &it.cluster;
        for cluster_ip in ips(1) {
            let mut outer = doors(1);
            outer.retain(|it| it.is_ipv4() == cluster_ip.is_ipv4());
            let inner = [&outer[..], &[at(cluster_ip, 80)]].concat();
            for transport in [Transport::Tcp, Transport::Udp] {
                for (from, addresses) in [(&cluster.client, &outer[..]), (&cluster.pods[1], &inner[..])] {
                    let all: BTreeSet<_> =
                        addresses.iter().flat_map(|it| names(from, transport, *it)).collect();
                    assert_eq!(all.len(), 1, "{addresses:?} over {transport:?} lead to {all:?}");
                }
            }
        }
    }
}

#[test]
fn an_endpoint_is_kept_only_where_an_address_leads_to_it() {
    for backend in BACKENDS {
        let web = || sticky().external_local();
        // p3 answers the client by the way it came.
        let far = web().endpoint_on("n2", "p3", &P3);
        let Some(mut it) = Served::or_skip("only_where", backend, &[far], &["--masquerade-all"]) else {
            return;
        };
        let ask = |it: &Served, address| {
            TestCluster::request(&it.cluster.client, Transport::Tcp, at(address, 80)).unwrap().name
        };
        let (inside, outside) = (ips(1), outer(1));
        for address in inside {
            assert_eq!(ask(&it, address), "p3");
        }
        it.write(&[on_both_nodes(web())]);
        for (inside, outside) in inside.into_iter().zip(outside) {
            assert_eq!(ask(&it, inside), "p3", "it was kept");
            assert_eq!(ask(&it, outside), "p1", "the policy is local, and p3 is not");
            // What the client was given last is what it keeps.
            for _ in 0..10 {
                assert_eq!(ask(&it, inside), "p1");
            }
        }
    }
}

#[test]
fn what_a_client_keeps_counts_only_while_it_serves() {
    if !nft_is_here("what_a_client_keeps_counts") {
        return;
    }
    for backend in BACKENDS {
        let web = on_both_nodes(sticky());
        let Some(it) = Served::or_skip("kept_serves", backend, slice::from_ref(&web), &[]) else { return };
        for (family, table) in ["ip", "ip6"].into_iter().enumerate() {
            let (client, service, gone) = (CLIENT[family], ips(1)[family], P2[family]);
            let note = |endpoint: IpAddr| {
                format!("{{ {client} . {service} . tcp . 80 timeout 600s : {endpoint} . {TARGET} }}")
            };
            let door = at(outer(1)[family], 80);
            // As if it had been noted just before its endpoint went.
            nft(&it.cluster, &["add", "element", table, "kube-proxy-ebpf", "affinity", &note(gone)]);
            let kept = names(&it.cluster.client, Transport::Tcp, door);
            assert_eq!(kept.len(), 1, "{kept:?}");
            assert!(!kept.contains("p2"), "p2 does not serve and answers");
            let list = nft(&it.cluster, &["list", "map", table, "kube-proxy-ebpf", "affinity"]);
            assert!(!list.contains(&format!("{gone} . ")), "{list}");
        }
    }
}

#[test]
fn under_churn_no_client_is_led_to_an_endpoint_that_was_gone() {
    let pods = [("n1", "p1", P1), ("n1", "p2", P2), ("n2", "p3", P3)];
    let only = |n: usize| {
        let (node, name, addresses) = pods[n % 3];
        (name, sticky().endpoint_on(node, name, &addresses))
    };
    for backend in BACKENDS {
        let Some(mut it) = Served::or_skip("affinity_churn", backend, &[only(0).1], &[]) else { return };
        let start = |door| {
            let _there = it.cluster.client.enter().unwrap();
            ConnectLoad::start(Transport::Tcp, door, 1, scaled(Duration::from_millis(1)))
        };
        let loads: Vec<_> = doors(1).into_iter().map(start).collect();
        let mut spans = Vec::new();
        for n in 1..repetitions(60).max(7) {
            let (name, web) = only(n);
            it.write(&[web]);
            let begin = Instant::now();
            assert!(loads[0].settle(LIMIT));
            spans.push((begin, Instant::now(), name));
        }
        for load in loads {
            let samples = load.stop();
            for (begin, end, name) in &spans {
                for sample in samples.iter().filter(|it| *begin <= it.began && it.ended() <= *end) {
                    let answer = sample.outcome.as_ref().unwrap();
                    assert!(answer.starts_with(name), "{answer} answers, and only {name} serves");
                }
            }
        }
    }
}

#[test]
fn session_affinity_ends_some_time_after_the_last_connection() {
    let web = on_both_nodes(outside("web", 1)).affinity(1);
    let Some(it) = Served::or_skip("affinity_ends", "nft", &[web], &[]) else { return };
    let door = at(outer(1)[0], 80);
    let first = TestCluster::request(&it.cluster.client, Transport::Tcp, door).unwrap().name;
    let other = eventually(LIMIT * 3, || {
        thread::sleep(Duration::from_millis(1_200));
        TestCluster::request(&it.cluster.client, Transport::Tcp, door).unwrap().name != first
    });
    assert!(other, "the client has kept {first} all the time");
}
