//! A node as a whole: sockets and packets together, what it takes, what is missing, and what is said of it.

use std::{
    fs,
    io::{self, Write as _},
    net::{Ipv4Addr, SocketAddr},
    process::{Child, Command, Output, Stdio},
};

use aya::maps::Array;
use rustix::thread::CapabilitySet;
use tests::{
    Build, TestCluster, Transport,
    agent::AgentCommand,
    eventually,
    requirements::kernel_at_least,
    sandbox::skip,
    test_cluster::{N1, P1, P2, P3, Reply},
};

use crate::{
    BACKENDS, LIMIT, NODE_PORT, Served, agent_is_ready, at, check_dropped, doors, dump, ips, nft,
    nft_is_here, on_both_nodes, outer, outer_external, outside,
};

#[test]
fn translating_packets_takes_one_capability() {
    let web = on_both_nodes(outside("web", 1));
    let only = |it: AgentCommand| it.capabilities(CapabilitySet::NET_ADMIN);
    let Some(it) = Served::with("one_capability", "nft", &[web], only) else { return };
    for door in doors(1) {
        TestCluster::request(&it.cluster.client, Transport::Tcp, door).unwrap();
    }
    assert!(eventually(LIMIT, || agent_is_ready(&it.cluster)));
}

/// Asks from n1 as a program whose sockets are led.
fn ask_led(cluster: &TestCluster, transport: Transport, address: SocketAddr) -> io::Result<Reply> {
    let _led = cluster.sandbox().enter().unwrap();
    TestCluster::request(&cluster.n1, transport, address)
}

#[test]
fn a_socket_is_led_and_left_to_packets_where_its_source_must_be_judged() {
    let open = outside("open", 1).endpoint("p1", &P1);
    let guarded = |n, range| outside(&format!("guarded-{n}"), n).endpoint("p2", &P2).source_ranges(&[range]);
    let services = [open, guarded(2, "192.168.50.1/32"), guarded(3, "192.168.50.2/32")];
    let Some(it) = Served::or_skip("led_sockets", "ebpf", &services, &[]) else { return };
    let cluster = &it.cluster;
    for address in doors(1).into_iter().chain(ips(1).map(|ip| at(ip, 80))) {
        for transport in [Transport::Tcp, Transport::Udp, Transport::UdpUnconnected] {
            assert_eq!(ask_led(cluster, transport, address).unwrap().name, "p1", "{address}");
        }
    }
    assert_eq!(ask_led(cluster, Transport::Tcp, at(outer(2)[0], 80)).unwrap().name, "p2");
    {
        let _led = cluster.sandbox().enter().unwrap();
        check_dropped(&cluster.n1, at(outer(3)[0], 80));
    }
    let other_ways = [at(ips(3)[0], 80), at(outer_external(3)[0], 80), at(N1[0], NODE_PORT + 3)];
    for open in other_ways {
        assert_eq!(ask_led(cluster, Transport::Tcp, open).unwrap().name, "p2", "{open}");
    }
}

#[test]
fn sockets_are_served_where_packets_cannot_be_and_what_is_missing_is_said() {
    let Some(cluster) = TestCluster::or_skip("no_netfilter") else { return };
    cluster.write(&[outside("web", 1).endpoint("p1", &P1)]);
    let setting = cluster.command("ebpf").without_netfilter();
    let mut agent = cluster.start(&setting);
    agent.wait_until(LIMIT, || agent_is_ready(&cluster)).unwrap();
    assert_eq!(ask_led(&cluster, Transport::Tcp, at(ips(1)[0], 80)).unwrap().name, "p1");
    let says = "not served: traffic without a local socket: cannot talk to nftables";
    assert!(agent.log().contains(says), "{}", agent.log());
    let metrics = {
        let _there = cluster.n1.enter().unwrap();
        tests::http::get(at(Ipv4Addr::LOCALHOST.into(), 10249), "/metrics").unwrap().body
    };
    assert!(metrics.contains("kube_proxy_ebpf_rejected_items{by=\"backend\"} 1.0\n"), "{metrics}");
    // It lives, and load balancers go elsewhere.
    for (path, status) in [("/livez", 200), ("/readyz", 200), ("/healthz", 503)] {
        let _there = cluster.n1.enter().unwrap();
        let answer = tests::http::get(at(Ipv4Addr::LOCALHOST.into(), 10256), path).unwrap();
        assert_eq!(answer.status, status, "{path}: {}", answer.body);
    }
    agent.terminate().unwrap();
    // Where there is nothing else, it is all that matters.
    let mut agent = cluster.start(&cluster.command("nft").without_netfilter());
    assert_eq!(agent.wait(LIMIT).unwrap().code(), Some(1));
    assert!(agent.log().contains("load the module nf_tables"), "{}", agent.log());
}

/// A process that goes with its test.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // It may be gone already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn sockets_are_brought_into_force_while_packets_cannot_be() {
    if !nft_is_here("packets_behind") {
        return;
    }
    if !kernel_at_least(5, 12) {
        return skip("packets_behind", "tables have no owners here (Linux 5.12)");
    }
    let Some(cluster) = TestCluster::or_skip("packets_behind") else { return };
    let web = outside("web", 1);
    cluster.write(&[web.clone().endpoint("p1", &P1)]);
    let mut owner = Killed(owned_table(&cluster, ""));
    let is_owned = || nft(&cluster, &["list", "tables"]).contains("kube-proxy-ebpf");
    assert!(eventually(LIMIT, is_owned));
    let mut agent = cluster.start(&cluster.command("ebpf"));
    let log = agent.log_path().to_owned();
    let has = |says: &str| fs::read_to_string(&log).is_ok_and(|it| it.contains(says));
    agent.wait_until(LIMIT, || has("only the socket path is up to date")).unwrap();
    assert!(has("not served: traffic without a local socket"), "{}", agent.log());
    agent.wait_until(LIMIT, || agent_is_ready(&cluster)).unwrap();
    let led = || ask_led(&cluster, Transport::Tcp, at(ips(1)[0], 80)).map(|it| it.name);
    assert_eq!(led().unwrap(), "p1");
    cluster.write(&[web.endpoint("p2", &P2)]);
    assert!(eventually(LIMIT, || led().is_ok_and(|it| it == "p2")));
    // ConnectLoad balancers go elsewhere, and nobody ends it.
    let answers = |path| {
        let _there = cluster.n1.enter().unwrap();
        tests::http::get(at(Ipv4Addr::LOCALHOST.into(), 10256), path).unwrap().status
    };
    assert_eq!(["/livez", "/readyz", "/healthz"].map(answers), [200, 200, 503]);
    // It is tried again by itself.
    owner.0.kill().unwrap();
    let is_served = || TestCluster::request(&cluster.client, Transport::Tcp, at(N1[0], NODE_PORT + 1));
    assert!(eventually(LIMIT, || is_served().is_ok_and(|it| it.name == "p2")), "{}", agent.log());
    assert!(eventually(LIMIT, || answers("/healthz") == 200), "{}", agent.log());
    // And so it is when somebody takes the table later.
    let mut thief = Killed(owned_table(&cluster, "delete table ip kube-proxy-ebpf; "));
    assert!(eventually(LIMIT, || answers("/healthz") == 503), "{}", agent.log());
    assert_eq!(["/livez", "/readyz"].map(answers), [200, 200]);
    thief.0.kill().unwrap();
    assert!(eventually(LIMIT, || answers("/healthz") == 200), "{}", agent.log());
}

/// Makes our table after this was done, as one that has an owner: it is nobody else's for as long as that process lives.
fn owned_table(cluster: &TestCluster, first: &str) -> Child {
    let _there = cluster.n1.enter().unwrap();
    let mut owner = Command::new("nft").arg("-i").stdin(Stdio::piped()).spawn().unwrap();
    let table = format!("{first}add table ip kube-proxy-ebpf {{ flags owner; }}\n");
    owner.stdin.as_mut().unwrap().write_all(table.as_bytes()).unwrap();
    owner
}

#[test]
fn a_half_that_is_left_out_goes_once_the_other_serves() {
    let Some(cluster) = TestCluster::or_skip("former_half") else { return };
    cluster.write(&[outside("web", 1).endpoint("p1", &P1)]);
    let programs = cluster.sandbox().pins().join("links");
    let ready = |setting: &AgentCommand| {
        let mut agent = cluster.start(setting);
        agent.wait_until(LIMIT, || agent_is_ready(&cluster)).unwrap();
        agent
    };
    ready(&cluster.command("ebpf")).terminate().unwrap();
    assert!(programs.exists() && !dump(&cluster).is_empty());
    let agent = ready(&cluster.command("nft"));
    assert!(eventually(LIMIT, || !programs.exists()), "{}", agent.log());
    assert!(agent.log().contains("the socket path is off"), "{}", agent.log());
    let door = at(ips(1)[0], 80);
    assert_eq!(ask_led(&cluster, Transport::Tcp, door).unwrap().name, "p1", "as any packet");
    agent.terminate().unwrap();
    let alone = AgentCommand::run(&Build::Product.binary(), cluster.sandbox(), &cluster.manifests(), "n1");
    let agent = ready(&alone.arg("--packets=off"));
    assert!(eventually(LIMIT, || agent.log().contains("removed our nftables tables")), "{}", agent.log());
    assert_eq!(ask_led(&cluster, Transport::Tcp, door).unwrap().name, "p1");
}

#[test]
fn check_says_whether_packets_can_be_and_are_translated() {
    let Some(cluster) = TestCluster::or_skip("check_packets") else { return };
    cluster.write(&[outside("web", 1).endpoint("p1", &P1)]);
    let check = |more: &[&str]| {
        let _there = cluster.n1.enter().unwrap();
        let output = Command::new(Build::Product.binary())
            .args(["check", "--output=json", "--pin-dir"])
            .arg(cluster.sandbox().pins())
            .args(more)
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let all: serde_json::Value = serde_json::from_str(&text).unwrap();
        let findings = all["findings"].as_array().unwrap();
        let level = |subject: &str| {
            let found = findings.iter().find(|it| it["subject"] == subject);
            found.map(|it| it["level"].as_str().unwrap().to_owned())
        };
        [level("nftables"), level("packets"), level("programs")]
    };
    let some = |it: &str| Some(it.to_owned());
    let only = ["--backend=nft"];
    // Where it has not run, nothing is missing.
    assert_eq!(check(&only), [some("ok"), some("ok"), None]);
    assert_eq!(check(&[]), [some("ok"), some("ok"), None]);
    assert_eq!(check(&["--packets=off"])[..2], [None, None]);
    // To look is to change nothing.
    assert!(dump(&cluster).is_empty());
    let mut agent = cluster.start(&cluster.command("nft"));
    agent.wait_until(LIMIT, || agent_is_ready(&cluster)).unwrap();
    assert_eq!(check(&only), [some("ok"), some("ok"), None]);
    assert!(!agent.log().contains("somebody has changed"), "{}", agent.log());
    // Where nobody leads sockets, `status` shows what packets are led by.
    let there = cluster.n1.enter().unwrap();
    let mode = tests::http::get(at(Ipv4Addr::LOCALHOST.into(), 10249), "/proxyMode").unwrap();
    assert_eq!(mode.body, "nftables");
    let look = |command: &str| {
        let mut it = Command::new(Build::Product.binary());
        it.arg(command).arg("--pin-dir").arg(cluster.sandbox().pins());
        let Output { status, stdout, stderr } = it.output().unwrap();
        (status.code(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
    };
    let check_row = |status: &str| {
        let row = status.lines().find(|it| it.contains(" 10.96.0.1:80/TCP "));
        let row = row.unwrap_or_else(|| panic!("{status}"));
        assert!(row.starts_with("default/web") && row.contains("10.244.1.10:8080"), "{row}");
    };
    let (code, status, _) = look("status");
    assert_eq!(code, Some(0), "{status}");
    check_row(&status);
    assert!(status.contains("programs   none: nftables only\n"), "{status}");
    assert_eq!(look("dump").0, Some(0));
    // What leads sockets, if anything does, cannot be read: packets are shown all the same, and it is said.
    let layout = cluster.sandbox().pins().join("v4");
    fs::create_dir_all(&layout).unwrap();
    Array::<_, [u8; 32]>::create(2, 0).unwrap().pin(layout.join("active")).unwrap();
    let (code, status, _) = look("status");
    assert_eq!(code, Some(1), "{status}");
    check_row(&status);
    assert!(status.contains("maps       cannot be read: ") && !status.contains("nftables only"), "{status}");
    let (code, lines, error) = look("dump");
    assert_eq!(code, Some(1), "{error}");
    assert!(lines.contains("packets frontend 10.96.0.1:80/TCP "), "{lines}");
    assert!(error.contains("v4/active"), "{error}");
    drop(there);
    fs::remove_dir_all(cluster.sandbox().pins().join("v4")).unwrap();
    // Where it runs without them, they are.
    agent.terminate().unwrap();
    let without = AgentCommand::run(&Build::Product.binary(), cluster.sandbox(), &cluster.manifests(), "n1");
    let mut agent = cluster.start(&without);
    agent.wait_until(LIMIT, || agent_is_ready(&cluster)).unwrap();
    assert!(eventually(LIMIT, || check(&[])[1] == some("degraded")), "{}", agent.log());
}

#[test]
fn a_load_balancer_is_told_whether_this_node_has_endpoints() {
    const PORT: u16 = 30_999;
    for backend in BACKENDS {
        let web = outside("web", 1).external_local().health_check_node_port(PORT);
        let here = [web.clone().endpoint("p1", &P1).endpoint("p2", &P2)];
        let Some(mut it) = Served::or_skip("health_check", backend, &here, &[]) else { return };
        let told = |it: &Served, ip| {
            let _there = it.cluster.client.enter().unwrap();
            tests::http::get(at(ip, PORT), "/").map(|it| (it.status, it.body))
        };
        for ip in N1 {
            let is_told = || {
                told(&it, ip)
                    .is_ok_and(|(status, body)| status == 200 && body.contains("\"localEndpoints\":2"))
            };
            assert!(eventually(LIMIT, is_told), "{:?}", told(&it, ip));
        }
        // They serve on, since nobody else does, and no more should come to them.
        it.write(&[here[0].clone().leaving()]);
        let is_told = || {
            told(&it, N1[0])
                .is_ok_and(|(status, body)| status == 503 && body.contains("\"localEndpoints\":0"))
        };
        assert!(eventually(LIMIT, is_told), "{:?}", told(&it, N1[0]));
        let answer = TestCluster::request(&it.cluster.client, Transport::Tcp, at(outer(1)[0], 80)).unwrap();
        assert!(["p1", "p2"].contains(&answer.name.as_str()), "{answer:?}");
        it.write(&here);
        assert!(eventually(LIMIT, || told(&it, N1[0]).is_ok_and(|(status, _)| status == 200)));
        it.write(&[web.endpoint_on("n2", "p3", &P3)]);
        let is_told = || {
            told(&it, N1[0])
                .is_ok_and(|(status, body)| status == 503 && body.contains("\"localEndpoints\":0"))
        };
        assert!(eventually(LIMIT, is_told), "{:?}", told(&it, N1[0]));
    }
}

#[test]
fn flags_that_cannot_go_together_are_refused() {
    let refused: [(&[&str], &str); 5] = [
        (&["--nodeport-addresses=primary,10.0.0.0/8"], "`primary` cannot be combined with CIDRs"),
        (&["--backend=nft", "--packets=off"], "would serve nothing"),
        (&["--detect-local-mode=BridgeInterface"], "needs --pod-bridge-interface"),
        (&["--detect-local-mode=InterfaceNamePrefix"], "needs --pod-interface-name-prefix"),
        (&["--pod-bridge-interface=a-name-that-is-too-long"], "interface names have at most 15 bytes"),
    ];
    let folder = tempfile::tempdir().unwrap();
    let check = |flags: &[&str], says: &str| {
        let output = Command::new(Build::Product.binary())
            .args(["run", "--node-name=n1", "--healthz-bind-address=0", "--metrics-bind-address=0"])
            .arg(format!("--source=file:{}", folder.path().display()))
            .args(flags)
            .output()
            .unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(64), "{flags:?}: {error}");
        assert!(error.contains(says), "{flags:?}: {error}");
    };
    for (flags, says) in refused {
        check(flags, says);
    }
    // Who has written a file is told of the field.
    let file = folder.path().join("config.conf");
    let text = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n\
                detectLocalMode: BridgeInterface\n";
    fs::write(&file, text).unwrap();
    let says = format!("--detect-local-mode is set by the file: {}: detectLocalMode", file.display());
    check(&[&format!("--config={}", file.display())], &says);
}
