//! The rules of Services: traffic policies, refusals, source ranges, and addresses that no Service has.

use std::time::{Duration, Instant};

use tests::{EchoServer, TIMEOUT, Transport, eventually, repetitions};

use super::{sources::N1_AT_POD, *};

#[test]
fn a_cluster_ip_reaches_every_endpoint_and_keeps_the_source() {
    RunningCluster::each(&[on_both_nodes(internal("web", 1))], &[], |it| {
        for (index, frontend) in internal_frontends(1).into_iter().enumerate() {
            // From the client, the replies of p3 would take another route.
            check(&it.pods[1], frontend, &[("p1", P2[index]), ("p3", P2[index])]);
            check(&it.n1, frontend, &[("p1", N1[index]), ("p3", N1[index])]);
        }
    });
}

#[test]
fn internal_policy_local_uses_endpoints_of_this_node_only() {
    let local = on_both_nodes(internal("local", 1)).internal_local();
    let remote = internal("remote", 2).endpoint_on("n2", "p3", &P3).internal_local();
    RunningCluster::each(&[local, remote], &[], |it| {
        for (index, frontend) in internal_frontends(1).into_iter().enumerate() {
            check(&it.pods[1], frontend, &[("p1", P2[index])]);
            check(&it.client, frontend, &[("p1", CLIENT[index])]);
        }
        check_dropped(&it.client, internal_frontends(2)[0]);
    });
}

#[test]
fn external_traffic_reaches_every_endpoint_and_is_masqueraded() {
    RunningCluster::each(&[on_both_nodes(external("web", 1))], &[], |it| {
        for frontend in external_frontends(1) {
            let index = usize::from(frontend.is_ipv6());
            check(&it.client, frontend, &[("p1", N1_AT_POD[index]), ("p3", N1[index])]);
        }
    });
}

#[test]
fn external_policy_local_uses_endpoints_of_this_node_and_keeps_the_source() {
    let local = on_both_nodes(external("local", 1)).external_local();
    let remote = external("remote", 2).endpoint_on("n2", "p3", &P3).external_local();
    let detect_local = ["--cluster-cidr=10.244.0.0/16,fd00:244::/32"];
    RunningCluster::each(&[local, remote], &detect_local, |it| {
        for frontend in external_frontends(1) {
            check(&it.client, frontend, &[("p1", CLIENT[usize::from(frontend.is_ipv6())])]);
        }
        // A node without endpoints does not reply, so that a load balancer uses another one.
        check_dropped(&it.client, at(N1[0], NODE_PORT + 2));
        check_dropped(&it.client, at(load_balancer_ips(2)[1], 80));
        // The policy does not apply to traffic from inside the cluster.
        for from in [&it.pods[0], &it.n1] {
            for frontend in external_frontends(2) {
                assert_eq!(server(from, frontend), "p3", "{frontend}");
            }
        }
    });
}

#[test]
fn without_a_detect_local_mode_the_local_policy_applies_to_packets_of_pods() {
    let remote = external("remote", 2).endpoint_on("n2", "p3", &P3).external_local();
    let Some(it) = RunningCluster::or_skip("nft", &[remote], &[]) else { return };
    check_dropped(&it.pods[0], at(load_balancer_ips(2)[0], 80));
    // The host recognizes itself.
    assert_eq!(server(&it.n1, at(load_balancer_ips(2)[0], 80)), "p3");
}

#[test]
fn a_node_port_of_another_node_is_not_translated() {
    let web = on_both_nodes(external("web", 1)).external_local();
    RunningCluster::each(&[web], &[], |it| {
        // There is no proxy on n2.
        for from in [&it.pods[0], &it.n1] {
            check_refused(from, at(N2[0], NODE_PORT + 1));
        }
    });
}

#[test]
fn a_service_without_endpoints_refuses() {
    RunningCluster::each(&[external("web", 1)], &[], |it| {
        for frontend in external_frontends(1).into_iter().chain(internal_frontends(1)) {
            for from in [&it.client, &it.pods[0], &it.n1] {
                check_refused(from, frontend);
            }
        }
    });
}

#[test]
fn an_undefined_port_of_a_service_refuses() {
    RunningCluster::each(&[on_both_nodes(internal("web", 1))], &[], |it| {
        for ip in cluster_ips(1) {
            for from in [&it.client, &it.pods[0], &it.n1] {
                check_refused(from, at(ip, 81));
            }
        }
    });
}

#[test]
fn source_ranges_apply_to_all_traffic_to_a_load_balancer_ip_only() {
    let web = external("web", 1).endpoint("p1", &P1);
    let web = web.source_ranges(&["192.168.50.100/32", "10.244.1.11/32"]);
    RunningCluster::each(&[web], &[], |it| {
        let balancer = at(load_balancer_ips(1)[0], 80);
        assert_eq!(server(&it.client, balancer), "p1");
        assert_eq!(server(&it.pods[1], balancer), "p1");
        check_dropped(&it.pods[0], balancer);
        check_dropped(&it.n1, balancer);
        // Other addresses are open, and so is the family without ranges.
        for open in [at(external_ips(1)[0], 80), at(N1[0], NODE_PORT + 1), at(load_balancer_ips(1)[1], 80)] {
            assert_eq!(server(&it.n1, open), "p1", "{open}");
        }
    });
}

/// It compares times.
mod alone {
    use super::*;

    #[test]
    fn a_guarded_connect_costs_the_same_with_any_number_of_source_ranges() {
        const MANY: usize = 20_000;
        // Every second address of 10.0.0.0/9, so that no two of them are one range.
        let others =
            |count: usize| (0..count).map(|n| format!("10.{}.{}.{}/32", n >> 15, n >> 7 & 255, n << 1 & 255));
        let guarded = |n: u8, count: usize| {
            let ranges: Vec<_> =
                ["192.168.50.100/32".to_owned()].into_iter().chain(others(count - 1)).collect();
            let ranges: Vec<_> = ranges.iter().map(String::as_str).collect();
            external(&format!("guarded-{n}"), n).endpoint("p1", &P1).source_ranges(&ranges)
        };
        let services = [guarded(1, 1), guarded(2, MANY)];
        let Some(mut it) = RunningCluster::or_skip("nft", &services, &[]) else { return };
        let connect = |it: &RunningCluster, n: u8| {
            let begin = Instant::now();
            assert_eq!(server(&it.client, at(load_balancer_ips(n)[0], 80)), "p1");
            begin.elapsed()
        };
        // In turn, so that whatever else the machine does slows both; the fastest of many is the cost itself.
        let mut fastest = [Duration::MAX; 2];
        for _ in 0..repetitions(300).max(50) {
            for n in [1, 2] {
                fastest[usize::from(n - 1)] = fastest[usize::from(n - 1)].min(connect(&it, n));
            }
        }
        eprintln!("the fastest connect with 1 and {MANY} ranges: {fastest:?}");
        assert!(fastest[1] < fastest[0] * 2, "{fastest:?}");
        // A source that is in no range, and one between two ranges.
        it.apply(&[external("guarded-1", 1)
            .endpoint("p1", &P1)
            .source_ranges(&["192.168.50.99/32", "192.168.50.101/32"])]);
        check_dropped(&it.client, at(load_balancer_ips(1)[0], 80));
        // Lists that are not used any more are gone.
        assert_eq!(dump(&it).iter().filter(|it| it.starts_with("packets sources-")).count(), 4);
    }
}

#[test]
fn a_pod_reaches_itself_through_its_own_service() {
    RunningCluster::each(&[external("web", 1).endpoint("p1", &P1)], &[], |it| {
        for frontend in internal_frontends(1) {
            assert_eq!(server(&it.pods[0], frontend), "p1");
        }
    });
}

#[test]
fn an_address_in_a_service_cidr_that_no_service_has_is_dropped() {
    let web = on_both_nodes(internal("web", 1));
    RunningCluster::each(std::slice::from_ref(&web), &[], |mut it| {
        let local = at(cluster_ips(200)[0], 80);
        it.n1.add_interface_address("10.96.0.200/32", "lo").unwrap();
        let _server = it.n1.run(|| EchoServer::start("n1", local)).unwrap();
        // Where the default route leads.
        let elsewhere = at(cluster_ips(201)[0], 80);
        it.client.add_interface_address("10.96.0.201/32", "lo").unwrap();
        let _other = it.client.run(|| EchoServer::start("elsewhere", elsewhere)).unwrap();
        let reply = it.pods[0].run(|| tests::request(Transport::Tcp, elsewhere));
        assert_eq!(reply.unwrap(), "elsewhere");

        apply_service_cidr(&it);
        let unassigned = internal_frontends(9);
        check_dropped(&it.pods[0], elsewhere);
        for address in unassigned {
            for from in [&it.pods[0], &it.client, &it.n1] {
                check_dropped(from, address);
            }
        }
        for from in [&it.pods[0], &it.client, &it.n1] {
            check_refused(from, at(cluster_ips(1)[0], 81));
            let reply = from.run(|| tests::request(Transport::Tcp, local));
            assert_eq!(reply.unwrap(), "n1", "an address of the host itself");
        }

        it.apply(&[web.clone(), on_both_nodes(internal("new", 9))]);
        for address in unassigned {
            assert!(["p1", "p3"].contains(&&*server(&it.pods[1], address)), "{address}");
            assert!(["p1", "p3"].contains(&&*server(&it.n1, address)), "{address}");
        }
        it.apply(std::slice::from_ref(&web));
        check_dropped(&it.pods[0], unassigned[0]);

        std::fs::remove_file(it.manifests().join("service-cidr.yaml")).unwrap();
        assert!(eventually(TIMEOUT, || !has_service_cidr(&it)));
    });
}
