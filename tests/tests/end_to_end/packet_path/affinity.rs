//! Session affinity on the packet path: which client keeps which endpoint, and for how long.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use socket2::{Domain, Socket, Type};
use tests::{
    NetNs, Service, TIMEOUT, TestCluster, Transport, eventually, http, program_or_skip, repetitions, run,
};

use super::*;

/// The pods, with their nodes.
const PODS: [(&str, &str, [IpAddr; 2]); 3] = [("n1", "p1", P1), ("n1", "p2", P2), ("n2", "p3", P3)];

/// A Service with session affinity.
fn web() -> Service {
    external("web", 1).affinity(600)
}

fn web_at<'a>(pods: impl IntoIterator<Item = &'a (&'a str, &'a str, [IpAddr; 2])>) -> Service {
    pods.into_iter().fold(web(), |it, (node, name, addresses)| it.endpoint_on(node, name, addresses))
}

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
    let Some(_nft) = program_or_skip("nft") else { return };
    RunningCluster::each(&[on_both_nodes(web())], &[], |it| {
        // The tables of a running proxy cannot be changed from Linux 6.9 on.
        let it = it.killed();
        for (family, table) in ["ip", "ip6"].into_iter().enumerate() {
            let client = CLIENT[family];
            let [upper, lower] = service_port(&it, table, cluster_ips(1)[family]);
            // As if it had been added just before its endpoint was removed.
            let removed = format!("{upper:x}:{:x}", lower | 9 << 1);
            let element = format!("{{ {client} . {upper:x}:{lower:x} timeout 600s : {removed} }}");
            nft(&it, &["add", "element", table, "kube-proxy-ebpf", "affinity", &element]);
            let frontend = at(load_balancer_ips(1)[family], 80);
            let servers = servers(&it.client, Transport::Tcp, frontend);
            assert_eq!(servers.len(), 1, "{servers:?}");
            assert!(!servers.contains("p2"), "p2 was removed and replies");
            let list = nft(&it, &["list", "map", table, "kube-proxy-ebpf", "affinity"]);
            assert!(!list.contains(&removed), "{list}");
        }
    });
}

#[test]
fn under_churn_no_client_reaches_a_removed_endpoint() {
    let only = |n: usize| [web_at(&PODS[n % 3..=n % 3])];
    RunningCluster::each(&only(0), &[], |mut it| {
        // Conntrack knows a connection for 10 s after its reset. If the server's last packet came after the reset, a new
        // connection from the same port is translated like the old one. With these ports and this interval the client takes
        // longer to use a port again.
        it.client.set_sysctl("ipv4/ip_local_port_range", "1024 65535").unwrap();
        let start = |frontend| start_load(&it, Transport::Tcp, frontend, 1, 4);
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
                    let after = sample.started - *begin;
                    assert!(
                        reply.starts_with(name),
                        "{reply} {after:?} after {name} became the only endpoint"
                    );
                }
            }
        }
    });
}

/// Begins a connection from each of these addresses, which are not the client's: no answer finds its way back.
fn connect_from_foreign_addresses(it: &TestCluster, transport: Type, to: SocketAddr, number: u16) {
    it.client.run(|| {
        for n in 0..number {
            let socket = Socket::new(Domain::IPV4, transport, None).unwrap();
            socket.set_nonblocking(true).unwrap();
            socket.set_ip_transparent_v4(true).unwrap();
            let [high, low] = n.to_be_bytes();
            socket.bind(&SocketAddr::from(([198, 18, high, low], 0)).into()).unwrap();
            // It is in progress.
            let _ = socket.connect(&to.into());
            let _ = socket.send(b"who?");
        }
    });
}

/// The number of the TCP service port with a cluster IP: its upper half, and its lower half, whose last bits are free.
fn service_port(it: &TestCluster, table: &str, cluster_ip: IpAddr) -> [u32; 2] {
    let list = nft(it, &["list", "map", table, "kube-proxy-ebpf", "service-ports"]);
    let (_, rest) = list.split_once(&format!("{cluster_ip} . tcp . 80 : ")).unwrap();
    let number = rest.split([',', ' ', '\n']).next().unwrap();
    let (upper, lower) = number.split_once(':').unwrap();
    [upper, lower].map(|it| u32::from_str_radix(it, 16).unwrap())
}

/// The elements of a map of the IPv4 table.
fn elements(it: &TestCluster, map: &str) -> Vec<String> {
    let list = nft(it, &["list", "map", "ip", "kube-proxy-ebpf", map]);
    let (_, elements) = list.split_once("elements = {").unwrap_or_default();
    let elements = elements.split_once('}').map_or("", |(it, _)| it).split(',');
    elements.map(str::trim).filter(|it| !it.is_empty()).map(ToOwned::to_owned).collect()
}

#[test]
fn clients_that_are_never_answered_keep_an_endpoint_for_a_moment_and_take_no_room() {
    let Some(_nft) = program_or_skip("nft") else { return };
    RunningCluster::each(&[web_at(&PODS).affinity(10_800)], &[], |it| {
        let frontend = at(load_balancer_ips(1)[0], 80);
        connect_from_foreign_addresses(&it, Type::STREAM, frontend, 10_000);
        assert_eq!(elements(&it, "affinity"), [""; 0], "no client was answered");
        let unanswered = elements(&it, "affinity-unanswered");
        assert!((1..=4096).contains(&unanswered.len()), "{} of 10,000 clients", unanswered.len());
        let expire_soon = |it: &String| it.contains("expires 2") || it.contains("expires 3");
        assert!(unanswered.iter().all(expire_soon), "{unanswered:?}");
        // Whoever gets an answer keeps the endpoint, over TCP and UDP.
        for transport in [Transport::Tcp, Transport::Udp] {
            let servers = servers(&it.client, transport, frontend);
            assert_eq!(servers.len(), 1, "{servers:?}");
        }
        let answered = elements(&it, "affinity");
        assert_eq!(answered.len(), 2, "{answered:?}");
        let is_new = |it: &String| it.contains("expires 2h59m") || it.contains("expires 3h");
        let is_client = |it: &String| it.starts_with(&CLIENT[0].to_string());
        assert!(answered.iter().all(|it| is_new(it) && is_client(it)), "{answered:?}");
        let entries = |state| {
            let series = format!("kube_proxy_ebpf_packet_affinity_entries{{state=\"{state}\"}}");
            it.n1.run(|| http::metric(&series))
        };
        assert!(eventually(TIMEOUT, || entries("answered") == Some(2.0)));
        assert!(entries("unanswered").is_some_and(|it| it > 0.0));
    });
}

#[test]
fn a_service_port_with_as_many_clients_as_one_may_have_gets_no_more() {
    let Some(_nft) = program_or_skip("nft") else { return };
    RunningCluster::each(
        &[on_both_nodes(web()), on_both_nodes(external("other", 2)).affinity(600)],
        &[],
        |it| {
            // The tables of a running proxy cannot be changed from Linux 6.9 on.
            let it = it.killed();
            let [full, other] = [1, 2].map(|n| {
                let [upper, lower] = service_port(&it, "ip", cluster_ips(n)[0]);
                format!("{upper:x}:{lower:x}")
            });
            let full = format!("{{ {full} timeout 600s }}");
            nft(&it, &["add", "element", "ip", "kube-proxy-ebpf", "affinity-full", &full]);
            for n in [1, 2] {
                for frontend in [at(load_balancer_ips(n)[0], 80), at(N1[0], NODE_PORT + u16::from(n))] {
                    server(&it.client, frontend);
                }
            }
            let answered = elements(&it, "affinity");
            assert_eq!(answered.len(), 1, "{answered:?}");
            assert!(answered[0].contains(&format!(" . {other} ")), "{answered:?}");
        },
    );
}

#[test]
fn connections_are_watched_only_while_a_service_has_session_affinity() {
    let hooks = |it: &TestCluster| {
        let chains = it.n1.run(|| run(Command::new("nft").args(["list", "chains"]))).stdout;
        chains.matches("chain answered-").count()
    };
    let Some(_nft) = program_or_skip("nft") else { return };
    let plain = || on_both_nodes(external("web", 1));
    let Some(mut it) = RunningCluster::or_skip("nft", &[plain()], &[]) else { return };
    assert_eq!(hooks(&it), 0);
    it.apply(&[plain().affinity(600), on_both_nodes(external("other", 2)).affinity(60)]);
    // Of each family: two hooks, one chain for all timeouts, and one for each.
    assert!(eventually(TIMEOUT, || hooks(&it) == 2 * (3 + 2)), "{}", hooks(&it));
    it.apply(&[plain().affinity(600)]);
    assert!(eventually(TIMEOUT, || hooks(&it) == 2 * (3 + 1)), "{}", hooks(&it));
    it.apply(&[plain()]);
    assert!(eventually(TIMEOUT, || hooks(&it) == 0), "{}", hooks(&it));
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
