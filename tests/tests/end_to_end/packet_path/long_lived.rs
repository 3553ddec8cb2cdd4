//! Connections and flows across changes and restarts, and our tables beside other ones.

use std::{
    io::ErrorKind,
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    process::Command,
    slice,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use nix::sys::signal::Signal;
use tests::{
    Background, EchoConnection, NetNs, Service, TIMEOUT, Talk, TestCluster, Transport, connected_udp_socket,
    eventually, exchange_connected, kernel_at_least, program_or_skip, repetitions, run, scaled,
};

use super::*;

/// A connected UDP socket, which is one flow, and does not wait long for an answer.
fn flow(from: &NetNs, address: SocketAddr) -> UdpSocket {
    let socket = from.run(|| connected_udp_socket(address).unwrap());
    socket.set_read_timeout(Some(scaled(Duration::from_millis(200)))).unwrap();
    socket
}

fn is_answered_by(name: &str, socket: &UdpSocket) -> bool {
    exchange_connected(socket).is_ok_and(|it| it.split(' ').next() == Some(name))
}

fn is_refused(socket: &UdpSocket) -> bool {
    exchange_connected(socket).is_err_and(|it| it.kind() == ErrorKind::ConnectionRefused)
}

#[test]
fn a_udp_flow_leaves_a_removed_endpoint_and_recovers_from_a_refusal() {
    for (backend, ip) in BACKENDS.into_iter().flat_map(|it| load_balancer_ips(1).map(|ip| (it, ip))) {
        let web = || external("web", 1);
        let Some(mut it) = RunningCluster::or_skip(backend, &[web()], &[]) else { return };
        let flow = flow(&it.client, at(ip, 80));
        // Without an endpoint it is refused.
        exchange_connected(&flow).unwrap_err();
        it.apply(&[web().endpoint("p1", &P1)]);
        assert!(eventually(TIMEOUT, || is_answered_by("p1", &flow)), "it does not recover from a refusal");
        it.apply(&[web().endpoint("p2", &P2)]);
        assert!(eventually(TIMEOUT, || is_answered_by("p2", &flow)), "it stays at a removed endpoint");
        // It keeps an endpoint that still serves when another one is added.
        it.apply(&[web().endpoint("p1", &P1).endpoint("p2", &P2)]);
        flow.set_read_timeout(Some(scaled(Duration::from_secs(2)))).unwrap();
        for _ in 0..20 {
            let reply = exchange_connected(&flow).unwrap();
            assert!(reply.starts_with("p2 "), "{reply}");
        }
    }
}

/// A flow that sends all the time, whether it is answered or not.
struct SteadyFlow {
    /// The number of replies, and of refusals.
    seen: Arc<(AtomicUsize, AtomicUsize)>,
    _thread: Background,
}

impl SteadyFlow {
    fn start(from: &NetNs, address: SocketAddr) -> Self {
        let socket = flow(from, address);
        socket.set_nonblocking(true).unwrap();
        let (seen, mut thread) = (Arc::<(AtomicUsize, AtomicUsize)>::default(), Background::default());
        let count = Arc::clone(&seen);
        thread.spawn(move |stop| {
            while !stop.load(Ordering::Relaxed) {
                let results = [socket.send(b"who?").map(|_| false), socket.recv(&mut [0; 64]).map(|_| true)];
                for result in results {
                    match result {
                        Ok(true) => drop(count.0.fetch_add(1, Ordering::Relaxed)),
                        Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                            count.1.fetch_add(1, Ordering::Relaxed);
                        }
                        _ => {}
                    }
                }
                thread::sleep(Duration::from_millis(2));
            }
        });
        Self { seen, _thread: thread }
    }

    fn replies(&self) -> usize {
        self.seen.0.load(Ordering::Relaxed)
    }

    fn refusals(&self) -> usize {
        self.seen.1.load(Ordering::Relaxed)
    }
}

#[test]
fn a_udp_flow_that_began_before_its_address_was_served_is_answered_once_it_is() {
    let web = external("web", 1).endpoint("p1", &P1);
    let other = external("other", 2).endpoint("p2", &P2);
    RunningCluster::each(slice::from_ref(&other), &[], |mut it| {
        // A Service comes to addresses to which a flow sends already.
        let flows: Vec<_> =
            external_frontends(1).into_iter().map(|address| SteadyFlow::start(&it.client, address)).collect();
        thread::sleep(scaled(Duration::from_millis(100)));
        it.apply(&[web.clone(), other.clone()]);
        for flow in &flows {
            assert!(eventually(TIMEOUT, || flow.replies() > 0), "a flow stays dead: {}", it.agent.log());
        }
        // An address comes to this host, and a flow meets it before the proxy knows it.
        let added = at(Ipv4Addr::new(192, 168, 50, 7), NODE_PORT + 1);
        it.agent.signal(Signal::SIGSTOP).unwrap();
        it.n1.ip(&["address", "add", "192.168.50.7/24", "dev", "eth0"]).unwrap();
        let flow = SteadyFlow::start(&it.client, added);
        let is_refused = eventually(TIMEOUT, || flow.refusals() > 0);
        it.agent.signal(Signal::SIGCONT).unwrap();
        assert!(is_refused, "the address is served though the proxy does not know it");
        assert!(eventually(TIMEOUT, || flow.replies() > 0), "the flow stays dead: {}", it.agent.log());
    });
}

#[test]
fn foreign_changes_to_our_tables_are_repaired_and_other_tables_are_not_touched() {
    const REPAIRED: &str = "were changed externally";
    let Some(_nft) = program_or_skip("nft") else { return };
    let web = on_both_nodes(external("web", 1));
    let Some(it) = RunningCluster::or_skip("nft", &[web], &[]) else { return };
    nft(&it, &["add", "table", "ip", "theirs"]);
    let correct = dump(&it);
    let frontend = at(load_balancer_ips(1)[0], 80);
    let changes: [&[&str]; 7] = [
        &["delete", "table", "ip", "kube-proxy-ebpf"],
        &["flush", "chain", "ip", "kube-proxy-ebpf", "services"],
        &["flush", "map", "ip6", "kube-proxy-ebpf", "frontends"],
        &["add", "element", "ip", "kube-proxy-ebpf", "cluster-ips", "{ 192.0.2.9 }"],
        &["insert", "rule", "ip", "kube-proxy-ebpf", "services", "drop"],
        &["chain", "ip", "kube-proxy-ebpf", "prerouting", "{ policy drop; }"],
        &["add", "table", "ip", "kube-proxy-ebpf", "{ flags dormant; }"],
    ];
    let RunningCluster { mut agent, cluster, .. } = it;
    let it = &cluster;
    for (n, change) in changes.into_iter().enumerate() {
        if kernel_at_least(6, 9) {
            // They are owned: the kernel refuses. What changes while no proxy runs is repaired by the next one.
            let refused = it.n1.run(|| run(Command::new("nft").args(change)));
            assert_ne!(refused.code, Some(0), "nft {change:?} was accepted");
            assert_eq!(dump(it), correct, "after nft {change:?}");
            if change.contains(&"{ flags dormant; }") {
                // No process can change these flags of a persistent table.
                continue;
            }
            agent.kill9().unwrap();
            nft(it, change);
            agent = start_ready(it, &it.command("nft"));
            assert_eq!(dump(it), correct, "after nft {change:?} and a restart");
            server(&it.client, frontend);
            continue;
        }
        nft(it, change);
        let is_repaired = || agent.count_logged(REPAIRED) > n;
        assert!(eventually(TIMEOUT, is_repaired), "nft {change:?} was not detected");
        assert_eq!(dump(it), correct, "after nft {change:?}");
        server(&it.client, frontend);
    }
    // Changes to other tables are ignored.
    nft(it, &["add", "chain", "ip", "theirs", "mine"]);
    let repairs = if kernel_at_least(6, 9) { 0 } else { changes.len() };
    assert_eq!(agent.count_logged(REPAIRED), repairs);

    assert!(agent.terminate().unwrap().success());
    cluster.n1.run(|| run(&mut cluster.cli("cleanup")).success());
    assert_eq!(nft(&cluster, &["list", "tables"]), "table ip theirs\n");
}

#[test]
fn a_flush_of_all_rules_by_others_resets_no_connection_and_leaves_no_flow_dead() {
    let Some(_nft) = program_or_skip("nft") else { return };
    RunningCluster::each(&[on_both_nodes(external("web", 1))], &[], |it| {
        let frontends = external_frontends(1);
        let connect = |address: &SocketAddr| it.client.run(|| EchoConnection::connect(*address).unwrap());
        let mut connections: Vec<_> = frontends.iter().cycle().take(20).map(connect).collect();
        let new_flows = || frontends.iter().map(|address| flow(&it.client, *address)).collect::<Vec<_>>();
        let mut flows = new_flows();
        for flow in &flows {
            exchange_connected(flow).unwrap();
        }
        nft(&it, &["flush", "ruleset"]);
        // Flows that begin now, before everything may be restored, and those that go on.
        flows.extend(new_flows());
        if !kernel_at_least(6, 9) {
            let is_repaired = || it.agent.count_logged("were changed externally") > 0;
            assert!(eventually(TIMEOUT, is_repaired), "{}", it.agent.log());
        }
        for connection in &mut connections {
            it.client.run(|| connection.ping()).unwrap();
        }
        for flow in &flows {
            assert!(eventually(TIMEOUT, || exchange_connected(flow).is_ok()), "a flow stays dead");
        }
        server(&it.client, frontends[0]);
        if kernel_at_least(6, 9) {
            assert_eq!(it.agent.count_logged("were changed externally"), 0, "{}", it.agent.log());
        }
    });
}

#[test]
fn a_table_of_another_version_is_replaced() {
    let Some(_nft) = program_or_skip("nft") else { return };
    let Some(cluster) = TestCluster::or_skip() else { return };
    for family in ["ip", "ip6"] {
        nft(&cluster, &["add", "table", family, "kube-proxy-ebpf"]);
        nft(&cluster, &["add", "chain", family, "kube-proxy-ebpf", "services"]);
        let set = "{ type ipv4_addr; }";
        nft(&cluster, &["add", "set", family, "kube-proxy-ebpf", "frontends", set]);
    }
    let web = [external("web", 1).endpoint("p1", &P1)];
    cluster.write(&web);
    let mut agent = cluster.start(&cluster.command("nft"));
    agent.wait_until(TIMEOUT, || is_active(&cluster, &web)).unwrap();
    for frontend in external_frontends(1) {
        assert_eq!(server(&cluster.client, frontend), "p1", "{frontend}");
    }
}

#[test]
fn a_restart_keeps_correct_tables_and_no_connection_fails() {
    let web = || on_both_nodes(external("web", 1));
    RunningCluster::each(&[web()], &[], |it| {
        let RunningCluster { backend, cluster, agent, .. } = it;
        let load = start_load(&cluster, Transport::Tcp, at(load_balancer_ips(1)[0], 80), 2, 1);
        let load_continues = || assert!(load.wait_for_new_connects(TIMEOUT));
        load_continues();
        agent.kill9().unwrap();
        load_continues();
        let agent = start_ready(&cluster, &cluster.command(backend));
        load_continues();
        agent.kill9().unwrap();
        // The state changes before the next start.
        cluster.write(&[web().endpoint("p2", &P2)]);
        let mut agent = cluster.start(&cluster.command(backend));
        let has_p2 =
            |cluster: &TestCluster| dump(cluster).iter().any(|it| it.ends_with("-> 10.244.1.11:8080"));
        agent.wait_until(TIMEOUT, || has_p2(&cluster)).unwrap();
        load_continues();
        load.stop_without_failure(0);
    });
}

#[test]
fn a_thousand_changes_under_external_load_lose_nothing() {
    // A UDP reply is lost if its endpoint is removed before it arrives: the endpoints of this Service stay.
    let steady = on_both_nodes(external("steady", 9));
    let services = [on_both_nodes(external("web", 1)), steady.clone()];
    RunningCluster::each(&services, &[], |mut it| {
        // Four threads per frontend, so that packets traverse the rules while a change is committed.
        let tcp = external_frontends(1).into_iter().map(|frontend| (Transport::Tcp, frontend, 4));
        let udp = external_frontends(9).into_iter().map(|frontend| (Transport::Udp, frontend, 1));
        let loads: Vec<_> = tcp
            .chain(udp)
            .map(|(transport, frontend, threads)| start_load(&it, transport, frontend, threads, 3))
            .collect();
        // Pseudorandom numbers, the same in every run.
        let mut seed: u32 = 1;
        let mut random = |below: u32| {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 16) % below
        };
        let mut last = Vec::new();
        for _ in 0..repetitions(1_000) {
            // The number of endpoints of the Service under load changes, and other Services are added and removed.
            let pods = [("n1", "p1", P1), ("n1", "p2", P2), ("n2", "p3", P3)];
            let mut web = external("web", 1);
            let first = random(3) as usize;
            for n in 0..=random(3) as usize {
                let (node, name, addresses) = pods[(first + n) % 3];
                web = web.endpoint_on(node, name, &addresses);
            }
            last = vec![web, steady.clone()];
            for n in 2..2 + u8::try_from(random(5)).unwrap() {
                let other = external(&format!("other-{n}"), n);
                last.push(if random(2) == 0 {
                    other.endpoint("p1", &P1).affinity(60)
                } else {
                    other.external_local()
                });
            }
            it.write(&last);
            thread::sleep(Duration::from_millis(5));
        }
        it.apply(&last);
        for load in loads {
            load.stop_without_failure(0);
        }
    });
}

#[test]
fn established_connections_are_answered_while_all_other_services_come_and_go() {
    let web = on_both_nodes(external("web", 1));
    RunningCluster::each(slice::from_ref(&web), &[], |it| {
        let ips = |n: u16| -> [IpAddr; 2] {
            let [high, low] = n.to_be_bytes();
            [[10, 97, high, low].into(), [0xfd00, 0x97, 0, 0, 0, 0, 0, n].into()]
        };
        let other =
            |n: u16| on_both_nodes(Service::new(&format!("other-{n}"), &ips(n)).tcp_and_udp(80, TARGET));
        let count = u16::try_from(repetitions(1_500)).unwrap();
        let all: Vec<_> = (1..=count).map(other).chain([web.clone()]).collect();
        let connect = |ip: IpAddr| it.client.run(|| EchoConnection::connect(at(ip, 80))).unwrap();
        let talks = load_balancer_ips(1).map(|ip| Talk::start(vec![connect(ip)], Duration::from_millis(1)));
        let is_served = |ip| TestCluster::request_unanswered(&it.pods[1], Transport::Tcp, at(ip, 80)).is_ok();
        for _ in 0..2 {
            it.write(&all);
            assert!(eventually(TIMEOUT, || ips(count).into_iter().all(is_served)), "{}", it.agent.log());
            it.write(slice::from_ref(&web));
            assert!(eventually(TIMEOUT, || !ips(count).into_iter().any(is_served)), "{}", it.agent.log());
        }
        talks.iter().for_each(|it| it.assert_alive("all other Services have come and gone"));
    });
}

#[test]
fn direct_udp_to_an_endpoint_that_does_not_serve_is_not_refused() {
    let web = || external("web", 1);
    let remote = || web().endpoint_on("n2", "p3", &P3);
    let Some(mut it) = RunningCluster::or_skip("ebpf", &[remote()], &[]) else { return };
    for (frontend, p3) in internal_frontends(1).into_iter().zip(P3.map(|it| at(it, TARGET))) {
        let from_pod = connect(&it, p3);
        let from_outside = it.client.run(|| connected_udp_socket(p3).unwrap());
        let direct = [&from_pod, &from_outside];
        let pass = || direct.iter().all(|it| is_answered_by("p3", it));
        assert!(pass());
        // No socket is connected to it through the Service.
        it.apply(&[web().endpoint("p1", &P1)]);
        assert!(pass(), "{p3} is refused to those who do not use the Service");
        it.apply(&[remote()]);
        let flow = connect(&it, frontend);
        assert!(is_answered_by("p3", &flow));
        it.apply(&[remote().not_ready().endpoint("p1", &P1)]);
        assert!(pass(), "{p3} is refused while it is there and not ready");
        // Now it has gone, as far as anybody knows.
        it.apply(&[web().endpoint("p1", &P1)]);
        assert!(
            eventually(TIMEOUT, || is_refused(&flow)),
            "its program does not learn that {p3} was removed"
        );
        assert!(is_answered_by("p3", &from_outside), "{p3} is refused to who comes from outside");
        // With the last socket, the refusal ends.
        drop(flow);
        assert!(eventually(TIMEOUT, pass), "{p3} stays refused");
        it.apply(&[remote()]);
    }
}

#[test]
fn a_pods_connected_udp_socket_learns_that_its_endpoint_was_removed() {
    let web = || external("web", 1);
    let remote = || web().endpoint_on("n2", "p3", &P3);
    let Some(mut it) = RunningCluster::or_skip("ebpf", &[remote()], &[]) else { return };
    let by_family: Vec<_> = internal_frontends(1).into_iter().zip(P3.map(|it| at(it, TARGET))).collect();
    let flows: Vec<_> = by_family.iter().map(|(frontend, _)| connect(&it, *frontend)).collect();
    let direct: Vec<_> = by_family.iter().map(|(_, removed)| connect(&it, *removed)).collect();
    for flow in &flows {
        assert!(exchange_connected(flow).unwrap().starts_with("p3"));
    }
    it.apply(&[web().endpoint("p1", &P1)]);
    for ((frontend, removed), flow) in by_family.iter().zip(&flows) {
        assert!(eventually(TIMEOUT, || is_refused(flow)), "{frontend}");
        // The socket path may have chosen it just before, or because it serves again.
        let new = exchange_connected(&connect(&it, *removed));
        assert!(new.as_ref().is_ok_and(|it| it.starts_with("p3")), "a new flow: {new:?}");
        let is_p1 = || exchange_connected(&connect(&it, *frontend)).is_ok_and(|it| it.starts_with("p1"));
        assert!(eventually(TIMEOUT, is_p1), "the program connects again");
    }
    // It serves again at once, also for those who do not use the Service.
    it.apply(&[remote()]);
    let all_pass = || direct.iter().all(|it| is_answered_by("p3", it));
    assert!(all_pass());
    // Nor can users who may write endpoints refuse their flows again and again.
    it.apply(&[web().endpoint("p1", &P1)]);
    assert!(all_pass());
}
