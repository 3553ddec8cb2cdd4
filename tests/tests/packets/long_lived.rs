//! What lasts: connections and flows through changes and restarts, and our tables beside those of others.

use std::{
    io,
    net::{SocketAddr, UdpSocket},
    process::Command,
    slice, thread,
    time::Duration,
};

use tests::{
    Build, ConnectLoad, NetNs, TestCluster, Transport, eventually,
    load::LoadReport,
    repetitions, scaled,
    test_cluster::{P1, P2, P3},
};

use crate::{
    BACKENDS, LIMIT, Served, agent_is_ready, at, doors, dump, in_force, nft, nft_is_here, on_both_nodes,
    outer, outside,
};

/// Asks again and again on one socket, which is one flow.
fn one_flow(from: &NetNs, address: SocketAddr) -> UdpSocket {
    let _there = from.enter().unwrap();
    let socket = UdpSocket::bind(if address.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }).unwrap();
    socket.connect(address).unwrap();
    socket.set_read_timeout(Some(scaled(Duration::from_millis(200)))).unwrap();
    socket
}

fn asked(socket: &UdpSocket) -> io::Result<String> {
    socket.send(b"who?")?;
    let mut answer = [0; 64];
    let length = socket.recv(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer[..length]).split(' ').next().unwrap().to_owned())
}

#[test]
fn a_flow_leaves_an_endpoint_that_is_gone_and_one_that_was_too_early_finds_one() {
    for (backend, ip) in BACKENDS.into_iter().flat_map(|it| outer(1).map(|ip| (it, ip))) {
        let web = outside("web", 1);
        let Some(mut it) = Served::or_skip("flows", backend, slice::from_ref(&web), &[]) else { return };
        let flow = one_flow(&it.cluster.client, at(ip, 80));
        // Without an endpoint there is a refusal.
        asked(&flow).unwrap_err();
        it.write(&[web.clone().endpoint("p1", &P1)]);
        assert!(
            eventually(LIMIT, || asked(&flow).is_ok_and(|it| it == "p1")),
            "too early, and lost for ever"
        );
        it.write(&[web.clone().endpoint("p2", &P2)]);
        assert!(eventually(LIMIT, || asked(&flow).is_ok_and(|it| it == "p2")), "stays with one that is gone");
        // Who serves on is not left because another one comes.
        it.write(&[web.clone().endpoint("p1", &P1).endpoint("p2", &P2)]);
        flow.set_read_timeout(Some(scaled(Duration::from_secs(2)))).unwrap();
        for _ in 0..20 {
            assert_eq!(asked(&flow).unwrap(), "p2");
        }
    }
}

#[test]
fn what_somebody_else_changes_is_put_back_and_reported_and_what_is_not_ours_is_left_alone() {
    if !nft_is_here("what_somebody_else_changes") {
        return;
    }
    let web = on_both_nodes(outside("web", 1));
    let Some(it) = Served::or_skip("repair", "nft", &[web], &[]) else { return };
    let cluster = &it.cluster;
    nft(cluster, &["add", "table", "ip", "theirs"]);
    let right = dump(cluster);
    let door = at(outer(1)[0], 80);
    let changes: [&[&str]; 7] = [
        &["delete", "table", "ip", "kube-proxy-ebpf"],
        &["flush", "chain", "ip", "kube-proxy-ebpf", "services"],
        &["flush", "map", "ip6", "kube-proxy-ebpf", "frontends"],
        &["add", "element", "ip", "kube-proxy-ebpf", "cluster-ips", "{ 192.0.2.9 }"],
        &["insert", "rule", "ip", "kube-proxy-ebpf", "services", "drop"],
        &["chain", "ip", "kube-proxy-ebpf", "prerouting", "{ policy drop; }"],
        &["add", "table", "ip", "kube-proxy-ebpf", "{ flags dormant; }"],
    ];
    for (n, change) in changes.into_iter().enumerate() {
        nft(cluster, change);
        let put_back = || it.agent.log().matches("somebody has changed the nftables tables").count() > n;
        assert!(eventually(LIMIT, put_back), "nft {change:?} was not noticed");
        assert_eq!(dump(cluster), right, "after nft {change:?}");
        TestCluster::request(&cluster.client, Transport::Tcp, door).unwrap();
    }
    // What others do is no news.
    nft(cluster, &["add", "chain", "ip", "theirs", "mine"]);
    assert_eq!(it.agent.log().matches("somebody has changed the nftables tables").count(), changes.len());

    let status = it.agent.terminate().unwrap();
    assert!(status.success());
    let _there = cluster.n1.enter().unwrap();
    let cleanup = Command::new(Build::Product.binary())
        .args(["cleanup", "--pin-dir"])
        .arg(cluster.sandbox().pins())
        .status()
        .unwrap();
    assert!(cleanup.success());
    drop(_there);
    assert_eq!(nft(cluster, &["list", "tables"]), "table ip theirs\n");
}

#[test]
fn a_table_of_another_version_gives_way() {
    if !nft_is_here("a_table_of_another_version") {
        return;
    }
    let Some(cluster) = TestCluster::or_skip("other_version") else { return };
    for family in ["ip", "ip6"] {
        nft(&cluster, &["add", "table", family, "kube-proxy-ebpf"]);
        nft(&cluster, &["add", "chain", family, "kube-proxy-ebpf", "services"]);
        let set = "{ type ipv4_addr; }";
        nft(&cluster, &["add", "set", family, "kube-proxy-ebpf", "frontends", set]);
    }
    let web = [outside("web", 1).endpoint("p1", &P1)];
    cluster.write(&web);
    let mut agent = cluster.start(&cluster.command("nft"));
    agent.wait_until(LIMIT, || in_force(&cluster, &web)).unwrap();
    for door in doors(1) {
        assert_eq!(TestCluster::request(&cluster.client, Transport::Tcp, door).unwrap().name, "p1", "{door}");
    }
}

#[test]
fn a_restart_leaves_what_is_right_untouched_and_no_connection_fails() {
    for backend in BACKENDS {
        let web = on_both_nodes(outside("web", 1));
        let Some(Served { cluster, agent }) = Served::or_skip("restart", backend, slice::from_ref(&web), &[])
        else {
            return;
        };
        let load = {
            let _there = cluster.client.enter().unwrap();
            ConnectLoad::start(Transport::Tcp, at(outer(1)[0], 80), 2, scaled(Duration::from_millis(1)))
        };
        assert!(load.settle(LIMIT));
        agent.kill9().unwrap();
        assert!(load.settle(LIMIT));
        let mut agent = cluster.start(&cluster.command(backend));
        agent.wait_until(LIMIT, || agent_is_ready(&cluster)).unwrap();
        assert!(load.settle(LIMIT));
        agent.kill9().unwrap();
        // It comes back to another state than it left.
        cluster.write(&[web.endpoint("p2", &P2)]);
        let mut agent = cluster.start(&cluster.command(backend));
        let to_p2 =
            |cluster: &TestCluster| dump(cluster).iter().any(|it| it.ends_with("-> 10.244.1.11:8080"));
        agent.wait_until(LIMIT, || to_p2(&cluster)).unwrap();
        assert!(load.settle(LIMIT));
        let report = LoadReport::of(&load.stop());
        assert_eq!(report.failed, 0, "{report:?}");
    }
}

#[test]
fn a_thousand_changes_under_load_from_outside_lose_nothing() {
    BACKENDS.into_iter().for_each(change_under_load);
}

fn change_under_load(backend: &str) {
    // Over UDP an answer is lost if its endpoint is taken away before it comes: these stay.
    let steady = on_both_nodes(outside("steady", 9));
    let services = [on_both_nodes(outside("web", 1)), steady.clone()];
    let Some(mut it) = Served::or_skip("changes", backend, &services, &[]) else { return };
    let start = |(transport, address, threads)| {
        let _there = it.cluster.client.enter().unwrap();
        ConnectLoad::start(transport, address, threads, scaled(Duration::from_millis(3)))
    };
    // Many at a time, so that some packets are on their way through the rules while a change is committed.
    let tcp = doors(1).into_iter().map(|it| (Transport::Tcp, it, 4));
    let udp = doors(9).into_iter().map(|it| (Transport::Udp, it, 1));
    let loads: Vec<_> = tcp.chain(udp).map(start).collect();
    // Numbers that look like chance, and are the same at every run.
    let mut seed: u32 = 1;
    let mut random = |below: u32| {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (seed >> 16) % below
    };
    let mut last = Vec::new();
    for _ in 0..repetitions(1_000) {
        // The pods serve the Service under load in ever changing numbers; others come and go beside it.
        let pods = [("n1", "p1", P1), ("n1", "p2", P2), ("n2", "p3", P3)];
        let mut web = outside("web", 1);
        let first = random(3) as usize;
        for n in 0..=random(3) as usize {
            let (node, name, addresses) = pods[(first + n) % 3];
            web = web.endpoint_on(node, name, &addresses);
        }
        last = vec![web, steady.clone()];
        for n in 2..2 + u8::try_from(random(5)).unwrap() {
            let other = outside(&format!("other-{n}"), n);
            last.push(if random(2) == 0 {
                other.endpoint("p1", &P1).affinity(60)
            } else {
                other.external_local()
            });
        }
        it.cluster.write(&last);
        thread::sleep(Duration::from_millis(5));
    }
    it.write(&last);
    for load in loads {
        let report = LoadReport::of(&load.stop());
        assert!(report.connects > 0);
        assert_eq!(report.failed, 0, "{report:?}");
    }
}
