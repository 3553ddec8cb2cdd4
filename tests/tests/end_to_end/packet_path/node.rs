//! The node as a whole: both paths together, what they require, and what is reported about them.

use std::{
    fs,
    io::{self, Write as _},
    net::SocketAddr,
    process::{Command, Stdio},
};

use aya::maps::Array;
use build_tools::command::KilledOnDrop;
use rustix::thread::CapabilitySet;
use tests::{
    APPLIED, AgentCommand, Build, Output, TIMEOUT, TestCluster, Transport, assert_contains, eventually, http,
    kernel_at_least, program_or_skip, run, skip,
};

use super::*;

#[test]
fn the_packet_path_needs_one_capability() {
    let web = on_both_nodes(external("web", 1));
    let restricted = |it: AgentCommand| it.capabilities(CapabilitySet::NET_ADMIN);
    let Some(it) = RunningCluster::with("nft", &[web], restricted) else { return };
    for frontend in external_frontends(1) {
        server(&it.client, frontend);
    }
}

#[test]
fn connections_from_outside_are_counted() {
    let services = [on_both_nodes(external("web", 1)), external("empty", 2)];
    RunningCluster::each(&services, &[], |it| {
        let counted = || {
            let page = it.n1.run(|| http::metrics("/metrics").unwrap().body);
            let own = page.lines().filter(|it| it.starts_with("kube_proxy_ebpf_external_connections_total{"));
            own.map(ToOwned::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(counted(), [] as [&str; 0]);
        let frontends = external_frontends(1);
        for frontend in &frontends {
            server(&it.client, *frontend);
            TestCluster::request(&it.client, Transport::Udp, *frontend).unwrap();
        }
        let line = |protocol: &str| {
            let labels = format!(
                r#"namespace="default",service="web",port="{protocol}",protocol="{}""#,
                protocol.to_uppercase()
            );
            format!("kube_proxy_ebpf_external_connections_total{{{labels}}} {}", frontends.len())
        };
        assert_eq!(counted(), ["tcp", "udp"].map(line));
        // Neither are those to cluster IPs, nor those to a Service without endpoints, which are not translated.
        TestCluster::request(&it.client, Transport::Tcp, external_frontends(2)[0]).unwrap_err();
        for frontend in internal_frontends(1) {
            server(&it.pods[0], frontend);
        }
        assert_eq!(counted(), ["tcp", "udp"].map(line));
    });
}

/// Sends a request from n1 in the sandbox's cgroup, so that it takes the socket path.
pub(crate) fn request_by_socket(
    cluster: &TestCluster,
    transport: Transport,
    address: SocketAddr,
) -> io::Result<Reply> {
    let _inside = cluster.sandbox().enter().unwrap();
    TestCluster::request(&cluster.n1, transport, address)
}

#[track_caller]
fn server_by_socket(cluster: &TestCluster, address: SocketAddr) -> String {
    request_by_socket(cluster, Transport::Tcp, address)
        .unwrap_or_else(|error| panic!("{address}: {error}"))
        .name
}

/// The status codes of the health pages on n1.
fn health<const N: usize>(cluster: &TestCluster, paths: [&str; N]) -> [u16; N] {
    cluster.n1.run(|| paths.map(http::health_status))
}

#[test]
fn sockets_use_the_packet_path_where_source_ranges_apply() {
    let open = external("open", 1).endpoint("p1", &P1);
    let restricted =
        |n, range| external(&format!("restricted-{n}"), n).endpoint("p2", &P2).source_ranges(&[range]);
    let services = [open, restricted(2, "192.168.50.1/32"), restricted(3, "192.168.50.2/32")];
    let Some(it) = RunningCluster::or_skip("ebpf", &services, &[]) else { return };
    for frontend in external_frontends(1).into_iter().chain(internal_frontends(1)) {
        for transport in Transport::ALL {
            assert_eq!(request_by_socket(&it, transport, frontend).unwrap().name, "p1", "{frontend}");
        }
    }
    assert_eq!(server_by_socket(&it, at(load_balancer_ips(2)[0], 80)), "p2");
    {
        let _inside = it.sandbox().enter().unwrap();
        check_dropped(&it.n1, at(load_balancer_ips(3)[0], 80));
    }
    // Other addresses are open, and so is the family without ranges.
    let v6 = at(load_balancer_ips(3)[1], 80);
    for open in [internal_frontends(3)[0], at(external_ips(3)[0], 80), at(N1[0], NODE_PORT + 3), v6] {
        assert_eq!(server_by_socket(&it, open), "p2", "{open}");
    }
}

#[test]
fn the_socket_path_works_without_netfilter_and_reports_it() {
    let Some(cluster) = TestCluster::or_skip() else { return };
    cluster.write(&[external("web", 1).endpoint("p1", &P1)]);
    let agent = start_ready(&cluster, &cluster.command("ebpf").without_netfilter());
    assert_eq!(server_by_socket(&cluster, internal_frontends(1)[0]), "p1");
    let text =
        "not served item=traffic without a local socket reason=cannot open a netlink socket to nftables";
    assert!(agent.log().contains(text), "{}", agent.log());
    let rejected = cluster.n1.run(|| http::metric("kube_proxy_ebpf_rejected_items{by=\"backend\"}"));
    assert_eq!(rejected, Some(1.0));
    // It is alive and ready, but load balancers use another node.
    assert_eq!(health(&cluster, ["/livez", "/readyz", "/healthz"]), [200, 200, 503]);
    agent.terminate().unwrap();
    // Without the socket path, it is an error.
    let mut agent = cluster.start(&cluster.command("nft").without_netfilter());
    assert_eq!(agent.wait(TIMEOUT).unwrap().code(), Some(1));
    assert!(agent.log().contains("load the module nf_tables"), "{}", agent.log());
}

#[test]
fn the_socket_path_becomes_active_while_the_packet_path_fails() {
    let Some(_nft) = program_or_skip("nft") else { return };
    if !kernel_at_least(5, 12) {
        return skip("tables have no owners here (Linux 5.12)");
    }
    let Some(cluster) = TestCluster::or_skip() else { return };
    let web = external("web", 1);
    cluster.write(&[web.clone().endpoint("p1", &P1)]);
    let mut owner = own_table(&cluster, "");
    assert!(eventually(TIMEOUT, || nft(&cluster, &["list", "tables"]).contains("kube-proxy-ebpf")));
    let mut agent = cluster.start(&cluster.command("ebpf"));
    agent.wait_until_logged(TIMEOUT, "only the socket path is up to date").unwrap();
    agent.wait_until_logged(TIMEOUT, "not served item=traffic without a local socket").unwrap();
    agent.wait_until(TIMEOUT, || is_ready(&cluster)).unwrap();
    let by_socket =
        || request_by_socket(&cluster, Transport::Tcp, internal_frontends(1)[0]).map(|it| it.name);
    assert_eq!(by_socket().unwrap(), "p1");
    cluster.write(&[web.endpoint("p2", &P2)]);
    assert!(eventually(TIMEOUT, || by_socket().is_ok_and(|it| it == "p2")));
    // Load balancers use another node, and nothing restarts the proxy.
    assert_eq!(health(&cluster, ["/livez", "/readyz", "/healthz"]), [200, 200, 503]);
    // The packet path is retried.
    owner.0.kill().unwrap();
    let by_packet = || TestCluster::request(&cluster.client, Transport::Tcp, at(N1[0], NODE_PORT + 1));
    assert!(eventually(TIMEOUT, || by_packet().is_ok_and(|it| it.name == "p2")), "{}", agent.log());
    let becomes = |status| eventually(TIMEOUT, || health(&cluster, ["/healthz"]) == [status]);
    assert!(becomes(200), "{}", agent.log());
    if kernel_at_least(6, 9) {
        // It is owned now: no other process can take it.
        return;
    }
    // Another process takes the table later.
    let mut thief = own_table(&cluster, "delete table ip kube-proxy-ebpf; ");
    assert!(becomes(503), "{}", agent.log());
    assert_eq!(health(&cluster, ["/livez", "/readyz"]), [200, 200]);
    thief.0.kill().unwrap();
    assert!(becomes(200), "{}", agent.log());
}

#[test]
fn sockets_follow_every_state_while_nftables_is_busy() {
    let Some(_nft) = program_or_skip("nft") else { return };
    let web = |n: usize| external("web", 1).endpoint(["p1", "p2"][n % 2], &[P1, P2][n % 2]);
    let Some(it) = RunningCluster::or_skip("ebpf", &[web(0)], &[]) else { return };
    // One transaction of another program, of many ranges, during which no other is possible.
    let element = |n: u32| {
        let [_, a, b, c] = n.to_be_bytes();
        format!("10.{a}.{b}.{c}-11.{a}.{b}.{c} . {} . {}", n & 0xffff, n >> 3)
    };
    let elements = (0..30_000).map(element);
    let elements: Vec<_> = elements.collect();
    let script = it.sandbox().files().join("busy.nft");
    let set = format!(
        "type ipv4_addr . inet_service . mark\nflags interval\nelements = {{ {} }}",
        elements.join(", ")
    );
    fs::write(&script, format!("table ip theirs {{\nset busy {{\n{set}\n}}\n}}\n")).unwrap();
    let mut busy = KilledOnDrop(it.n1.run(|| Command::new("nft").arg("-f").arg(&script).spawn().unwrap()));
    let frontend = internal_frontends(1)[0];
    let (mut states, mut ahead) = (0, 0);
    while ahead < 3 {
        assert_eq!(busy.0.try_wait().unwrap(), None, "the other transaction ended before three states came");
        states += 1;
        let reported = it.agent.count_logged(APPLIED);
        it.write(&[web(states)]);
        let has_new = || server_by_socket(&it, frontend) == ["p1", "p2"][states % 2];
        assert!(eventually(TIMEOUT, has_new), "{}", it.agent.log());
        // Nothing is reported as active before packets have it, too.
        ahead = if it.agent.count_logged(APPLIED) == reported { ahead + 1 } else { 0 };
    }
    assert!(busy.0.wait().unwrap().success());
    let by_packet = || TestCluster::request(&it.client, Transport::Tcp, at(N1[0], NODE_PORT + 1));
    let newest = ["p1", "p2"][states % 2];
    assert!(eventually(TIMEOUT, || by_packet().is_ok_and(|it| it.name == newest)), "{}", it.agent.log());
    assert!(eventually(TIMEOUT, || is_ready(&it)));
}

/// Runs commands and then makes our table with an owner: no other process can change it while that process lives.
fn own_table(cluster: &TestCluster, first: &str) -> KilledOnDrop {
    let mut owner = cluster.n1.run(|| Command::new("nft").arg("-i").stdin(Stdio::piped()).spawn().unwrap());
    let table = format!("{first}add table ip kube-proxy-ebpf {{ flags owner; }}\n");
    owner.stdin.as_mut().unwrap().write_all(table.as_bytes()).unwrap();
    KilledOnDrop(owner)
}

#[test]
fn a_disabled_datapath_is_removed_once_the_other_is_active() {
    let Some(cluster) = TestCluster::or_skip() else { return };
    cluster.write(&[external("web", 1).endpoint("p1", &P1)]);
    let links = cluster.sandbox().pins().join("links");
    start_ready(&cluster, &cluster.command("ebpf")).terminate().unwrap();
    assert!(links.exists() && !dump(&cluster).is_empty());
    let agent = start_ready(&cluster, &cluster.command("nft"));
    assert!(eventually(TIMEOUT, || !links.exists()), "{}", agent.log());
    assert!(agent.log().contains("the socket path is off"), "{}", agent.log());
    let frontend = internal_frontends(1)[0];
    assert_eq!(server_by_socket(&cluster, frontend), "p1", "by the packet path");
    agent.terminate().unwrap();
    let agent = start_ready(&cluster, &cluster.default_command().arg("--packets=off"));
    let is_removed = || agent.log().contains("its nftables tables were removed");
    assert!(eventually(TIMEOUT, is_removed), "{}", agent.log());
    assert_eq!(server_by_socket(&cluster, frontend), "p1");
}

#[test]
fn check_reports_the_state_of_the_packet_path() {
    let Some(cluster) = TestCluster::or_skip() else { return };
    cluster.write(&[external("web", 1).endpoint("p1", &P1)]);
    // The levels of the findings about nftables, the packet path and the programs.
    let check = |arguments: &[&str]| {
        let output = cluster.n1.run(|| run(cluster.cli("check").arg("--output=json").args(arguments)));
        let report: serde_json::Value = serde_json::from_str(&output.stdout).unwrap();
        let findings = report["findings"].as_array().unwrap();
        ["nftables", "packets", "programs"].map(|subject| {
            let found = findings.iter().find(|it| it["subject"] == subject);
            found.map_or_else(|| "-".to_owned(), |it| it["level"].as_str().unwrap().to_owned())
        })
    };
    // Before the first start, nothing is missing.
    assert_eq!(check(&["--backend=nft"]), ["ok", "ok", "-"]);
    assert_eq!(check(&[]), ["ok", "ok", "-"]);
    assert_eq!(check(&["--packets=off"])[..2], ["-", "-"]);
    // `check` changes nothing.
    assert!(dump(&cluster).is_empty());
    let agent = start_ready(&cluster, &cluster.command("nft"));
    assert_eq!(check(&["--backend=nft"]), ["ok", "ok", "-"]);
    assert!(!agent.log().contains("were changed externally"), "{}", agent.log());
    // Without the socket path, `status` shows the tables of the packet path.
    assert_eq!(cluster.n1.run(|| http::metrics("/proxyMode").unwrap().body), "nftables");
    let look = |subcommand: &str| cluster.n1.run(|| run(&mut cluster.cli(subcommand)));
    let check_row = |status: &str| {
        let row = status.lines().find(|it| it.contains(" 10.96.0.1:80/TCP "));
        let row = row.unwrap_or_else(|| panic!("{status}"));
        assert!(row.starts_with("default/web") && row.contains("10.244.1.10:8080"), "{row}");
    };
    let status = look("status").success();
    check_row(&status);
    assert!(status.contains("programs   none: nftables only\n"), "{status}");
    look("dump").success();
    // If the maps of the socket path cannot be read, that is reported, and the packet path is shown nevertheless.
    let layout = cluster.sandbox().pins().join(Build::Product.layout());
    fs::create_dir_all(&layout).unwrap();
    Array::<_, [u8; 32]>::create(2, 0).unwrap().pin(layout.join("active")).unwrap();
    let Output { code, stdout: status, .. } = look("status");
    assert_eq!(code, Some(1), "{status}");
    check_row(&status);
    assert!(status.contains("maps       cannot be read: ") && !status.contains("nftables only"), "{status}");
    let Output { code, stdout: lines, stderr } = look("dump");
    assert_eq!(code, Some(1), "{stderr}");
    assert!(lines.contains("packets frontend 10.96.0.1:80/TCP "), "{lines}");
    assert!(stderr.contains(&layout.join("active").display().to_string()), "{stderr}");
    fs::remove_dir_all(layout).unwrap();
    // A proxy that runs without the packet path is degraded.
    agent.terminate().unwrap();
    let agent = start_ready(&cluster, &cluster.default_command());
    assert!(eventually(TIMEOUT, || check(&[])[1] == "degraded"), "{}", agent.log());
}

#[test]
fn settings_of_the_node_that_break_packets_are_reported() {
    let Some(cluster) = TestCluster::or_skip() else { return };
    let Some(_nft) = program_or_skip("nft") else { return };
    // The finding about a subject: its level, and what it says.
    let check = |subject: &str| {
        let output =
            cluster.n1.run(|| run(cluster.cli("check").args(["--output=json", "--backend=nft"]))).stdout;
        let report: serde_json::Value = serde_json::from_str(&output).unwrap();
        let found = report["findings"].as_array().unwrap().iter().find(|it| it["subject"] == subject);
        let found = found.unwrap_or_else(|| panic!("{subject} is not in {output}"));
        ["level", "message", "remedy"].map(|it| found[it].as_str().unwrap_or_default().to_owned())
    };
    for subject in ["forwarding", "FORWARD policy", "conntrack table"] {
        assert_eq!(check(subject)[0], "ok", "{:?}", check(subject));
    }
    let [level, says, _] = check("backend");
    assert!(level == "ok" && says.contains("node ports at loopback, counters"), "{says}");
    cluster.n1.set_sysctl("ipv4/ip_forward", "0").unwrap();
    let [level, says, remedy] = check("forwarding");
    assert_eq!(level, "degraded");
    assert_contains(&says, &["net.ipv4.ip_forward is 0"]);
    assert_contains(&remedy, &["sysctl -w net.ipv4.ip_forward=1"]);
    let forward = "{ type filter hook forward priority 0; policy drop; }";
    nft(&cluster, &["add table ip6 filter; add chain ip6 filter FORWARD", forward]);
    let [level, says, _] = check("FORWARD policy");
    assert_eq!(level, "degraded");
    assert_contains(&says, &["chain FORWARD of ip6tables (nft) drops what is forwarded"]);
}

#[test]
fn conntrack_settings_are_applied_where_packets_are_translated() {
    const NAMES: [&str; 4] = [
        "nf_conntrack_tcp_timeout_established",
        "nf_conntrack_tcp_timeout_close_wait",
        "nf_conntrack_tcp_be_liberal",
        "nf_conntrack_udp_timeout",
    ];
    let Some(cluster) = TestCluster::or_skip() else { return };
    cluster.write(&[]);
    let settings = || {
        cluster.n1.run(|| {
            NAMES.map(|it| {
                let text = fs::read_to_string(format!("/proc/sys/net/netfilter/{it}")).unwrap();
                text.trim().parse::<u32>().unwrap()
            })
        })
    };
    // The limit depends on the machine's memory, and only the host's namespace can raise it.
    let mine = ["--conntrack-max-per-core=0", "--conntrack-tcp-be-liberal", "--conntrack-udp-timeout=1m10s"];
    // The kernel has these settings once it has seen a rule that tracks connections.
    cluster.n1.run(|| run(cluster.cli("check").arg("--backend=nft"))).success();
    let before = settings();
    assert_ne!(before, [86_400, 3600, 1, 70]);
    // What another program translates needs none of them.
    let off = cluster.default_command().arg("--packets=off").args(mine);
    start_ready(&cluster, &off).terminate().unwrap();
    assert_eq!(settings(), before);
    // As an init container, and then without the right to write them.
    let init = || {
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set", "-all,+net_admin", "--inh-caps", "-all"]);
        command.arg(Build::Product.binary());
        command.args(["run", "--source=file:/nowhere", "--init-only"]).args(mine);
        cluster.n1.run(|| run(&mut command))
    };
    let expect = "sysctl=\"nf_conntrack_udp_timeout\" value=70 before=";
    assert_contains(&init().exits_with(0), &[expect]);
    assert_eq!(settings(), [86_400, 3600, 1, 70]);
    assert!(!init().stderr.contains("nf_conntrack"), "nothing is left to do");
    let agent = start_ready(&cluster, &cluster.command("nft").args(mine));
    assert!(!agent.log().contains("nf_conntrack"), "{}", agent.log());
    agent.terminate().unwrap();
    // A start applies them, too; what cannot be written is logged, reported and serves nevertheless.
    let agent = start_ready(&cluster, &cluster.command("nft"));
    assert_eq!(settings(), [86_400, 3600, 1, 70], "the host's own values are left");
    agent.terminate().unwrap();
    let nowhere = cluster.sandbox().files().join("nowhere").display().to_string();
    let nowhere = format!("--proc-sys-net={nowhere}");
    let read_only = [&mine[..], &[&nowhere]].concat();
    let agent = start_ready(&cluster, &cluster.command("nft").args(&read_only));
    assert_contains(&agent.log(), &["net.netfilter.nf_conntrack_udp_timeout cannot be set to 70: "]);
    let report = cluster.n1.run(|| run(cluster.cli("check").arg("--backend=nft").args(&read_only))).stdout;
    let report = report.split_whitespace().collect::<Vec<_>>().join(" ");
    let expect = ["degraded conntrack settings", "nf_conntrack_udp_timeout is missing instead of 70"];
    assert_contains(&report, &expect);
}

#[test]
fn the_health_check_node_port_reports_local_endpoints() {
    const PORT: u16 = 30_999;
    let web = || external("web", 1).external_local().health_check_node_port(PORT);
    let local = || web().endpoint("p1", &P1).endpoint("p2", &P2);
    RunningCluster::each(&[local()], &[], |mut it| {
        #[track_caller]
        fn wait_for(it: &RunningCluster, ip: IpAddr, status: u16, local_endpoints: usize) {
            let page = || it.client.run(|| http::get(at(ip, PORT), "/"));
            let count = format!("\"localEndpoints\":{local_endpoints}");
            let is_reported = || page().is_ok_and(|it| it.status == status && it.body.contains(&count));
            assert!(eventually(TIMEOUT, is_reported), "{:?}", page());
        }
        for ip in N1 {
            wait_for(&it, ip, 200, 2);
        }
        // Terminating endpoints serve if there are no others, but a load balancer should use another node.
        it.apply(&[local().terminating()]);
        wait_for(&it, N1[0], 503, 0);
        let name = server(&it.client, at(load_balancer_ips(1)[0], 80));
        assert!(["p1", "p2"].contains(&name.as_str()), "{name}");
        it.apply(&[local()]);
        wait_for(&it, N1[0], 200, 2);
        it.apply(&[web().endpoint_on("n2", "p3", &P3)]);
        wait_for(&it, N1[0], 503, 0);
    });
}

#[test]
fn incompatible_flags_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.conf");
    let text = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n\
                detectLocalMode: BridgeInterface\n";
    fs::write(&file, text).unwrap();
    // The error about a field of the file names the file and the field.
    let config = format!("--config={}", file.display());
    let in_file = format!("--detect-local-mode is set by the file: {}: detectLocalMode", file.display());
    let rejected: [(&[&str], &str); 6] = [
        (&["--nodeport-addresses=primary,10.0.0.0/8"], "`primary` cannot be combined with CIDRs"),
        (&["--backend=nft", "--packets=off"], "would serve nothing"),
        (&["--detect-local-mode=BridgeInterface"], "needs --pod-bridge-interface"),
        (&["--detect-local-mode=InterfaceNamePrefix"], "needs --pod-interface-name-prefix"),
        (&["--pod-bridge-interface=a-name-that-is-too-long"], "interface names have at most 15 bytes"),
        (&[&config], &in_file),
    ];
    for (flags, text) in rejected {
        let output = run(Command::new(Build::Product.binary())
            .args(["run", "--node-name=n1", "--healthz-bind-address=0", "--metrics-bind-address=0"])
            .arg(format!("--source=file:{}", folder.path().display()))
            .args(flags));
        let stderr = output.exits_with(64);
        assert!(stderr.contains(text), "{flags:?}: {stderr}");
    }
}
