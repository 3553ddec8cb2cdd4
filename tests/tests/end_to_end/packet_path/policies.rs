//! What a proxy's options and the rules of Services make of traffic: which endpoints it reaches, and from which source.

use std::{
    net::{IpAddr, Ipv4Addr},
    time::{Duration, Instant},
};

use tests::{EchoServer, TIMEOUT, TestCluster, Transport, eventually, program_or_skip, repetitions};

use super::*;

/// Makes sources outside recognizable.
const CLUSTER_CIDR: &str = "--cluster-cidr=10.244.0.0/16,fd00:244::/32";
/// The address of n1 on the veth pair to its pod, by family.
pub(crate) const N1_AT_POD: [IpAddr; 2] = [IpAddr::V4(Ipv4Addr::new(169, 254, 1, 1)), N1[1]];

#[test]
fn services_are_reached_from_everywhere_and_masquerade_what_comes_from_outside() {
    let services = [
        on_both_nodes(external("web", 1)),
        external("own", 2).endpoint("p1", &P1),
        on_both_nodes(external("local", 3)).external_local(),
    ];
    RunningCluster::each(&services, &[], |it| {
        // First: for a second after a redirect, the kernel does not tell its receiver that a destination is unreachable.
        for from in [&it.client, &it.pods[0], &it.n1] {
            cluster_ips(1).into_iter().for_each(|ip| check_refused(from, at(ip, 81)));
        }
        // A node port of n2, where there is no proxy.
        for from in [&it.pods[0], &it.n1] {
            check_refused(from, at(N2[0], NODE_PORT + 3));
        }
        for (index, frontend) in internal_frontends(1).into_iter().enumerate() {
            // From the client, the replies of p3 would take another route.
            check(&it.pods[1], frontend, &[("p1", P2[index]), ("p3", P2[index])]);
            check(&it.n1, frontend, &[("p1", N1[index]), ("p3", N1[index])]);
        }
        for frontend in external_frontends(1) {
            let index = usize::from(frontend.is_ipv6());
            check(&it.client, frontend, &[("p1", N1_AT_POD[index]), ("p3", N1[index])]);
        }
        for frontend in internal_frontends(2) {
            assert_eq!(server(&it.pods[0], frontend), "p1", "a pod reaches itself");
        }
    });
}

#[test]
fn external_policy_local_uses_endpoints_of_this_node_and_keeps_the_source() {
    let local = on_both_nodes(external("local", 1)).external_local();
    let remote = external("remote", 2).endpoint_on("n2", "p3", &P3).external_local();
    let web = on_both_nodes(internal("web", 3));
    RunningCluster::each(&[local, remote, web], &[CLUSTER_CIDR], |it| {
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
        // To a cluster IP, sources outside are masqueraded.
        for (index, frontend) in internal_frontends(3).into_iter().enumerate() {
            check(&it.client, frontend, &[("p1", N1_AT_POD[index]), ("p3", N1[index])]);
            check(&it.pods[1], frontend, &[("p1", P2[index]), ("p3", P2[index])]);
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
