//! Programs of administrators: every version of `nft` lists our tables, and can load again what it lists.

use std::{net::IpAddr, process::Command};

use regex::Regex;
use serde_json::Value;
use tests::{
    Output, Service, TIMEOUT, TestCluster, Transport, eventually,
    nft_versions::{Nft, nft_versions_or_skip},
    run,
};

use super::*;

const TABLE: &str = "kube-proxy-ebpf";

/// A Service of every kind that has rules of its own.
fn services(affinity: bool) -> Vec<Service> {
    let ranges = ["192.168.50.0/24", "10.0.0.0/8", "fd00::/16"];
    let sticky = |it: Service, seconds| if affinity { it.affinity(seconds) } else { it };
    let sctp = Service::new("sctp", &cluster_ips(5)).port("sctp", "SCTP", 80, TARGET).endpoint("p1", &P1);
    vec![
        on_both_nodes(external("plain", 1)),
        sticky(on_both_nodes(external("sticky", 2)).source_ranges(&ranges), 10_800),
        sticky(on_both_nodes(external("local", 3)).external_local().source_ranges(&ranges), 60),
        internal("empty", 4),
        sticky(sctp, 600),
        dns().endpoint("p2", &P2),
    ]
}

fn dns() -> Service {
    Service::new("dns", &cluster_ips(6)).port("dns", "UDP", 80, TARGET).endpoint_on("n2", "p3", &P3)
}

fn on_n1(it: &TestCluster, command: &mut Command) -> Output {
    it.n1.run(|| run(command))
}

/// What a version of `nft` writes on n1.
#[track_caller]
fn nft(it: &TestCluster, nft: &Nft, arguments: &[&str]) -> String {
    let output = on_n1(it, nft.command().args(arguments));
    assert_eq!(output.code, Some(0), "{:?}: {arguments:?}: {}", nft.version, output.stderr);
    output.stdout
}

/// A listing without what differs from one to the next: times, and flags of the table: one that is not owned by any process has
/// a flag that older versions cannot name.
fn comparable(listing: &str) -> String {
    let times = Regex::new(" expires [0-9a-z]+").unwrap();
    let lines = listing.lines().filter(|it| !it.is_empty() && !it.starts_with("\tflags "));
    let lines: Vec<_> = lines.collect();
    times.replace_all(&lines.join("\n"), "").into_owned()
}

#[test]
fn every_nft_lists_the_tables_and_loads_them_again() {
    let versions = nft_versions_or_skip();
    let flags = Regex::new("(?m)^\tflags (owner|persist|,)*$").unwrap();
    let times = Regex::new(" timeout [0-9a-z]+ :").unwrap();
    let arguments = ["--cluster-cidr=10.244.0.0/16,fd00:244::/32", "--nft-notrack"];
    for (version, affinity) in versions.iter().flat_map(|it| [(it, true), (it, false)]) {
        // Beside the socket path there are rules for removed UDP endpoints, too.
        let services = services(affinity);
        let Some(mut it) = RunningCluster::or_skip("ebpf", &services, &arguments) else { return };
        apply_service_cidr(&it);
        // Some of them to the endpoint that is removed.
        let _sockets = [(); 20].map(|()| connect(&it, at(cluster_ips(6)[0], 80)));
        it.apply(&[&services[..services.len() - 1], &[dns()]].concat());
        let is_refused =
            || nft(&it, version, &["list", "table", "ip", TABLE]).contains("removed-udp-prerouting");
        assert!(eventually(TIMEOUT, is_refused));
        let sticky = at(load_balancer_ips(2)[0], 80);
        let has_affinity = || replies(&it.client, Transport::Tcp, sticky).len() == 1;
        assert_eq!(has_affinity(), affinity);

        // While the tables have an owner.
        for what in [&["list", "tables"][..], &["list", "ruleset"], &["list", "table", "ip6", TABLE]] {
            assert!(nft(&it, version, what).contains(TABLE), "{what:?}");
        }
        let json: Value = serde_json::from_str(&nft(&it, version, &["-j", "list", "ruleset"])).unwrap();
        assert!(json["nftables"].as_array().is_some_and(|it| it.len() > 100));

        let it = it.killed();
        for (family, table) in ["ip", "ip6"].into_iter().enumerate() {
            let listed = nft(&it, version, &["list", "table", table, TABLE]);
            for it in [
                "removed-udp-prerouting",
                "10.96.0.1 . tcp . 80 : 1:1",
                "masquerade fully-random",
                "ct state new drop",
                "counter external/default/plain/tcp/TCP {",
                "counter name ip daddr . ",
            ] {
                assert!(family == 1 || listed.contains(it), "{it}: {listed}");
            }
            // They know no rules that add keys of more than 16 bytes to a map.
            if affinity && table == "ip6" && version.version < (1, 0, 9) {
                continue;
            }
            let file = it.manifests().with_extension("nft");
            std::fs::write(&file, flags.replace(&listed, "").as_ref()).unwrap();
            nft(&it, version, &["delete", "table", table, TABLE]);
            nft(&it, version, &["-f", file.to_str().unwrap()]);
            let mut again = comparable(&nft(&it, version, &["list", "table", table, TABLE]));
            let mut before = comparable(&listed);
            if version.version < (1, 0, 6) {
                // It forgets the times of rules, and the maps have times of their own.
                for it in [&mut before, &mut again] {
                    *it = times.replace_all(it, " :").into_owned();
                }
            }
            assert_eq!(again, before, "{:?}", version.version);
        }
        // The rules do what they did.
        assert_eq!(replies(&it.client, Transport::Tcp, at(load_balancer_ips(1)[0], 80)).len(), 2);
        assert_eq!(replies(&it.client, Transport::Udp, at(N1[0], NODE_PORT + 1)).len(), 2);
        let servers = replies(&it.client, Transport::Tcp, sticky);
        assert_eq!(servers.len() == 1, affinity, "{servers:?}");
        let local: IpAddr = load_balancer_ips(3)[0];
        assert_eq!(replies(&it.client, Transport::Tcp, at(local, 80)).len(), 1);
        // n1 redirects the client to n2, which counts against the ICMP messages that it sends there.
        check_refused(&it.pods[0], at(cluster_ips(4)[0], 80));
        if version.version >= (1, 0, 9) || !affinity {
            assert_eq!(replies(&it.client, Transport::Tcp, at(load_balancer_ips(1)[1], 80)).len(), 2);
        }
        // A proxy that starts finds its own tables.
        let _agent = start_ready(&it, &it.command("ebpf").args(arguments));
        assert!(eventually(TIMEOUT, || replies(&it.client, Transport::Tcp, at(local, 80)).len() == 1));
    }
}

#[test]
fn where_nothing_is_counted_other_commands_are_named() {
    let Some(it) = RunningCluster::or_skip("nft", &[on_both_nodes(external("web", 1))], &[]) else { return };
    let stderr = on_n1(&it, it.cli("top").arg("--once")).exits_with(1);
    assert!(stderr.contains("nftables alone serves here (--backend nft)"), "{stderr}");
    assert!(stderr.contains("`status` lists the Services"), "{stderr}");
}
