//! What `explain`, `status` and `check` say of traffic from outside that is forwarded whole, on the nodes of a cluster.

use std::{
    collections::BTreeMap,
    fs,
    net::{IpAddr, SocketAddr, UdpSocket},
    process::{Command, Stdio},
};

use aya::programs::{SchedClassifier, TcAttachType};
use serde_json::Value;
use tests::{
    AgentCommand, Build, EchoConnection, Explained, IngressCluster, OUTSIDE_CLIENTS, Output, Sandbox,
    Service, TIMEOUT, Trace, assert_contains, eventually, exchange, kernel_at_least, run, skip,
    test_cluster::TARGET, trace::assert_fields, udp_socket_at,
};

use crate::outside::{
    FIRST_THREE, FRONTENDS, NETWORKS, frontends, running_cluster_or_skip, seen, translated_web,
    wait_until_forwarded, web,
};

const FORWARDED: &str = "packets from outside are forwarded";

/// A cluster of three nodes, of which the last has no endpoint, with a proxy on each.
fn cluster_or_skip(service: fn(&IngressCluster) -> Service) -> Option<IngressCluster> {
    let cluster = running_cluster_or_skip(3, service)?;
    cluster.set_next_hops(NETWORKS, &[0, 1, 2]);
    Some(cluster)
}

/// The same once it forwards.
fn forwarding_or_skip(service: fn(&IngressCluster) -> Service) -> Option<IngressCluster> {
    let mut cluster = cluster_or_skip(service)?;
    for node in 0..cluster.nodes.len() {
        cluster.agent(node).wait_until_logged(TIMEOUT, FORWARDED).unwrap();
    }
    wait_until_forwarded(&cluster, &FIRST_THREE[..2]);
    Some(cluster)
}

/// Runs a subcommand on a node.
fn cli(cluster: &IngressCluster, node: usize, arguments: &[&str]) -> Output {
    let node = &cluster.nodes[node];
    node.netns.run(|| run(node.cli(arguments[0]).args(&arguments[1..])))
}

/// What `explain outside` says on a node, as JSON.
#[track_caller]
pub(crate) fn explain(cluster: &IngressCluster, node: usize, client: &str, to: &str) -> Value {
    let node = &cluster.nodes[node];
    node.netns.run(|| Explained::ask(&mut node.cli("explain"), &["outside", client, to]).json)
}

/// The server that an explanation names, by the node of the only endpoint that it leaves, which is the owner of the row.
#[track_caller]
fn server(explanation: &Value) -> &str {
    let endpoints = explanation["endpoints"].as_array().unwrap();
    let used: Vec<_> = endpoints.iter().filter(|it| it["used"] == true).collect();
    let [only] = used[..] else { panic!("{explanation}") };
    assert_eq!(only["node"], explanation["kernel"]["forwarding"]["row"]["owner"]["node"], "{explanation}");
    only["node"].as_str().unwrap()
}

/// Checks what a node does with the packets of a client, as it explains it, and what the owner of the row does.
#[track_caller]
fn assert_served_by(cluster: &IngressCluster, client: &str, to: &str, expect: &str) {
    for (index, node) in cluster.nodes.iter().enumerate() {
        let explanation = explain(cluster, index, client, to);
        assert_eq!(server(&explanation), expect, "on {}: {explanation}", node.name());
        let action = if node.name() == expect { "served" } else { "wrapped" };
        assert_eq!(explanation["kernel"]["forwarding"]["row"]["owner"]["action"], action, "{explanation}");
    }
}

#[test]
fn explain_names_the_node_that_serves_a_connection_from_outside() {
    let Some(cluster) = forwarding_or_skip(|it| web(it, &[0, 1])) else { return };
    for (frontend, to) in frontends().into_iter().zip(FRONTENDS) {
        let mut servers = BTreeMap::new();
        for _ in 0..8 {
            let connection = cluster.clients[0].run(|| EchoConnection::connect(frontend)).unwrap();
            let (name, _) = seen(connection.name());
            let client = connection.stream().local_addr().unwrap().to_string();
            assert_served_by(&cluster, &client, &format!("{to}/tcp"), name);
            servers.insert(name.to_owned(), client);
        }
        let udp = udp_client(&cluster, frontend);
        let (reply, _) = exchange(&udp, frontend).unwrap();
        let client = udp.local_addr().unwrap().to_string();
        assert_served_by(&cluster, &client, &format!("{to}/udp"), seen(&reply).0);
        // In words, on the node without an endpoint.
        for (name, client) in servers {
            let node = cluster.nodes.iter().find(|it| it.name() == name).unwrap();
            let address = node.addresses()[usize::from(frontend.is_ipv6())];
            let text = cli(&cluster, 2, &["explain", "outside", &client, &format!("{to}/tcp")]).success();
            assert_contains(
                &text,
                &[
                    &format!("the only endpoint on node {name}\n"),
                    &format!("from       {client}, outside the cluster, over node n3\n"),
                    "forwarding whole, to 2 nodes with endpoints, by the annotation kube-proxy-ebpf.io/external-forwarding\n",
                    "forwarded  row ",
                    &format!(" of 1024, by addresses and ports: wrapped for node {name} at {address}\n"),
                ],
            );
        }
    }
}

fn own_address(frontend: SocketAddr) -> IpAddr {
    OUTSIDE_CLIENTS[0][usize::from(frontend.is_ipv6())]
}

fn udp_client(cluster: &IngressCluster, frontend: SocketAddr) -> UdpSocket {
    cluster.clients[0].run(|| udp_socket_at((own_address(frontend), 0).into())).unwrap()
}

#[test]
fn explain_says_what_the_row_of_a_client_depends_on() {
    let Some(cluster) = forwarding_or_skip(|it| web(it, &[0, 1])) else { return };
    let client = OUTSIDE_CLIENTS[0][0].to_string();
    let without_port = explain(&cluster, 0, &client, FRONTENDS[0]);
    let forwarding = &without_port["kernel"]["forwarding"];
    assert_eq!((&forwarding["row"], &forwarding["byClient"]), (&Value::Null, &false.into()));
    assert_eq!(forwarding["uplinks"], serde_json::json!(["eth0"]));
    let shares: BTreeMap<_, _> = forwarding["shares"]
        .as_array()
        .unwrap()
        .iter()
        .map(|it| {
            (it["node"].as_str().unwrap(), (it["action"].as_str().unwrap(), it["rows"].as_u64().unwrap()))
        })
        .collect();
    assert_eq!(shares, [("n1", ("served", 512)), ("n2", ("wrapped", 512))].into());
    let text = cli(&cluster, 0, &["explain", "outside", FRONTENDS[0]]).success();
    let expect = [
        "forwarded  each address and port of a client has one of 1024 rows, of which\n",
        "            50.0 % are served here (node n1 at 192.168.50.1)\n",
        "            50.0 % are wrapped for node n2 at 192.168.50.2\n",
    ];
    assert_contains(&text, &expect);
    // A client that cannot be.
    for (client, expect) in [
        ("192.0.2.1:70000", "\"192.0.2.1:70000\": not the address of a client, with or without its port"),
        ("192.0.2.1:0", "\"192.0.2.1:0\": no client has port 0"),
    ] {
        let output = cli(&cluster, 0, &["explain", "outside", client, FRONTENDS[0]]);
        assert!(output.code != Some(0) && output.stderr.contains(expect), "{output:?}");
    }
    // Without a process the kernel still knows the row, but no names.
    let address = format!("{client}:40000");
    let named = explain(&cluster, 0, &address, FRONTENDS[0]);
    let mut cluster = cluster;
    cluster.kill(0);
    let output = cli(&cluster, 0, &["explain", "--output=json", "outside", &address, FRONTENDS[0]]);
    assert_eq!(output.code, Some(1), "the reasons are unknown");
    let unnamed: Value = serde_json::from_str(&output.stdout).unwrap();
    let row = |it: &Value| it["kernel"]["forwarding"]["row"].clone();
    assert_eq!(row(&unnamed)["number"], row(&named)["number"]);
    assert_eq!(row(&unnamed)["owner"]["address"], row(&named)["owner"]["address"]);
    assert_eq!(row(&unnamed)["owner"]["node"], Value::Null);
}

#[test]
fn with_session_affinity_explain_needs_no_port_of_the_client() {
    let Some(cluster) = forwarding_or_skip(|it| web(it, &[0, 1]).affinity(3600)) else { return };
    for (frontend, to) in frontends().into_iter().zip(FRONTENDS) {
        let connection = cluster.clients[0].run(|| EchoConnection::connect(frontend)).unwrap();
        let (name, _) = seen(connection.name());
        assert_served_by(&cluster, &own_address(frontend).to_string(), &format!("{to}/tcp"), name);
    }
}

#[test]
fn explain_names_the_second_of_a_row_that_has_changed() {
    let Some(cluster) = forwarding_or_skip(|it| web(it, &[0, 1])) else { return };
    let row = |port: u16| {
        let client = format!("{}:{port}", OUTSIDE_CLIENTS[0][0]);
        let mut explanation = explain(&cluster, 2, &client, FRONTENDS[0]);
        explanation["kernel"]["forwarding"]["row"].take()
    };
    let before: Vec<_> = (40_000..40_020).map(row).collect();
    assert!(before.iter().all(|it| it["second"] == Value::Null), "{before:?}");
    // The third node takes rows of the others.
    let third = &cluster.nodes[2];
    let more = web(&cluster, &[0, 1]).endpoint_on(&third.name(), "pod-n3", &third.pod_addresses());
    cluster.write(&[more]);
    let client = OUTSIDE_CLIENTS[0][0].to_string();
    let has_rows = || {
        // Until the change is in the kernel, it tells a difference.
        let explained = cli(&cluster, 2, &["explain", "--output=json", "outside", &client, FRONTENDS[0]]);
        let explanation: Value = serde_json::from_str(&explained.stdout).unwrap_or_default();
        explanation["kernel"]["forwarding"]["shares"].as_array().is_some_and(|it| it.len() == 3)
    };
    assert!(eventually(TIMEOUT, has_rows));
    let mut moved = 0;
    for (port, before) in (40_000..).zip(before) {
        let now = row(port);
        if now["owner"]["node"] == before["owner"]["node"] {
            assert_eq!(now["second"], Value::Null, "{now}");
            continue;
        }
        moved += 1;
        assert_eq!(now["owner"]["action"], "served", "{now}");
        assert_eq!(now["second"]["node"], before["owner"]["node"], "{now}");
    }
    assert!(moved > 0, "of 20 flows a third moves");
}

#[test]
fn explain_says_why_a_service_is_translated_that_is_to_be_forwarded() {
    // No Node object has this name.
    let service =
        |it: &IngressCluster| web(it, &[0, 1]).endpoint_on("n9", "pod-n9", &[[10, 244, 9, 10].into()]);
    let Some(cluster) = cluster_or_skip(service) else { return };
    let to = format!("{}/tcp", FRONTENDS[0]);
    let text = cli(&cluster, 0, &["explain", "outside", "198.18.0.100:40000", &to]).success();
    let expect = ["forwarding whole, to 3 nodes with endpoints", "\nforwarded  ", "translate", "address"];
    assert_contains(&text, &expect);
}

#[test]
fn status_and_check_say_nothing_of_forwarding_unless_it_is_used() {
    let Some(cluster) = cluster_or_skip(|it| translated_web(it, &[0, 1])) else { return };
    let text = cli(&cluster, 0, &["status"]).success();
    assert!(!text.contains("forwarding"), "{text}");
    let explained = explain(&cluster, 0, "192.0.2.1:4000", &format!("{}/tcp", FRONTENDS[0]));
    assert_eq!(explained["kernel"]["forwarding"], Value::Null);
    assert_eq!(findings(&cluster, &[]), []);
    let enabled = findings(&cluster, &["--external-forwarding=dsr", "--packets=nft"]);
    let [host, installation] = &enabled[..] else { panic!("{enabled:?}") };
    assert_eq!((&*host.level, &*installation.level), ("ok", "ok"), "{enabled:?}");
    assert!(installation.says.contains("enabled, and no Service has packets to forward"), "{installation:?}");
    let without_packets = findings(&cluster, &["--external-forwarding=dsr", "--packets=off"]);
    assert_found(
        &without_packets,
        "broken",
        "the packet path is off: packets from outside are not served here",
    );
}

#[derive(Debug, PartialEq)]
struct Finding {
    subject: String,
    level: String,
    says: String,
}

/// What `check` finds about forwarding on the first node.
#[track_caller]
fn findings(cluster: &IngressCluster, arguments: &[&str]) -> Vec<Finding> {
    let cgroup = cluster.nodes[0].sandbox.cgroup().display().to_string();
    let arguments = [&["check", "--output=json", "--cgroup", &cgroup], arguments].concat();
    let output = cli(cluster, 0, &arguments);
    let report: Value = serde_json::from_str(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
    let text = |it: &Value| it.as_str().unwrap().to_owned();
    let all = report["findings"].as_array().unwrap().iter().map(|it| Finding {
        subject: text(&it["subject"]),
        level: text(&it["level"]),
        says: text(&it["message"]),
    });
    all.filter(|it| it.subject == "external forwarding" || it.subject.contains("uplink")).collect()
}

#[track_caller]
fn assert_found(findings: &[Finding], level: &str, expect: &str) {
    let is_found = findings.iter().any(|it| it.level == level && it.says.contains(expect));
    assert!(is_found, "{expect:?} is not {level} in {findings:#?}");
}

#[test]
fn status_and_check_say_what_is_forwarded_and_where() {
    if !kernel_at_least(6, 6) {
        return skip("the programs of another proxy come first by links to interfaces, which need Linux 6.6");
    }
    let Some(cluster) = forwarding_or_skip(|it| web(it, &[0, 1])) else { return };
    let status = |arguments: &[&str]| cli(&cluster, 0, &[&["status"], arguments].concat()).success();
    let text = status(&[]);
    assert!(text.contains("\nforwarding 4 frontends, to 2 nodes, by eth0\n"), "{text}");
    let json: Value = serde_json::from_str(&status(&["--output=json"])).unwrap();
    let expect =
        serde_json::json!({"frontends": 4, "nodes": 2, "translated": 0, "ended": 0, "uplinks": ["eth0"]});
    assert_eq!(json["forwarding"], expect);

    let found = findings(&cluster, &[]);
    for expect in [
        "can forward packets from outside whole",
        "packets to 4 frontends are forwarded, whole, to 2 nodes",
        "eth0 has the programs in both directions",
        "eth0 has 1500 bytes: with the wrapping, packets of up to 1456 bytes (IPv4) and 1424 (IPv6) fit",
        "no others are attached",
        "4 of 4 addresses of other nodes answer: they unwrap packets",
    ] {
        assert_found(&found, "ok", expect);
    }
    let node = &cluster.nodes[0];
    node.netns.ip(&["link", "set", "eth0", "mtu", "1300"]).unwrap();
    assert_found(&findings(&cluster, &[]), "degraded", "eth0 has 1300 bytes");

    // A classifier sees what they let pass.
    let tc = |line: &str| {
        let mut command = Command::new("tc");
        node.netns.run(|| command.args(line.split(' ')).status().is_ok_and(|it| it.success()))
    };
    if tc("qdisc add dev eth0 clsact") && tc("filter add dev eth0 ingress protocol all u32 match u32 0 0") {
        assert_found(&findings(&cluster, &[]), "ok", "others run after ours: eth0: tc ingress: u32");
    } else {
        eprintln!("without tc, or without its kernel modules, no classifier is attached");
    }
    // Another instance of the programs runs before those that are there.
    let other = Sandbox::new("outside-reports-other").unwrap();
    let command = AgentCommand::run(&Build::Product.binary(), &other, &cluster.manifests(), &node.name());
    let command = command.args(["--backend=ebpf", "--packets=off", "--metrics-bind-address=0"]);
    let command = command.args(["--healthz-bind-address=0", "--probe-bind-address=0"]);
    let mut other_agent = node.netns.run(|| command.start(&other).unwrap());
    other_agent.wait_until_logged(TIMEOUT, FORWARDED).unwrap();
    let found = findings(&cluster, &[]);
    assert_found(&found, "degraded", "others see packets before ours do: eth0: tcx ingress: ingress (id ");
    assert_found(&found, "degraded", "eth0: tcx egress: egress (id ");
    drop(other_agent);
}

#[test]
fn an_uplink_without_programs_is_reported() {
    if !kernel_at_least(6, 6) {
        return skip("the test takes links to interfaces away, which need Linux 6.6");
    }
    let Some(mut cluster) = forwarding_or_skip(|it| web(it, &[0, 1])) else { return };
    cluster.kill(0);
    let node = &cluster.nodes[0];
    let remove = |prefix: &str| node.links(prefix).iter().for_each(|it| fs::remove_file(it).unwrap());
    remove("ingress_");
    assert!(eventually(TIMEOUT, || findings(&cluster, &[])
        .iter()
        .any(|it| it.says.contains("has only egress"))));
    assert_found(&findings(&cluster, &[]), "broken", "eth0 has only egress: packets are translated there");
    remove("egress_");
    assert_found(&findings(&cluster, &[]), "broken", "eth0 has none of the programs");
    let text = cli(&cluster, 0, &["status"]).stdout;
    assert!(text.contains("forwarding NOT at work, no interface has the programs: 4 frontends"), "{text}");
}

#[test]
fn the_node_that_serves_a_forwarded_connection_traces_it() {
    let Some(cluster) = forwarding_or_skip(|it| web(it, &[0, 1])) else { return };
    // By the node without an endpoint: all is wrapped.
    cluster.set_next_hops(NETWORKS, &[2]);
    let traces = [0, 1].map(|node| {
        let node = &cluster.nodes[node];
        node.netns.run(|| Trace::start(node.cli("trace").args(["--service", "default/web"])))
    });
    for (family, frontend) in frontends().into_iter().enumerate().cycle().take(8) {
        let connection = cluster.clients[0].run(|| EchoConnection::connect(frontend)).unwrap();
        let (server, _) = seen(connection.name());
        let node = (0..2).find(|it| cluster.nodes[*it].name() == server).unwrap();
        let endpoint = SocketAddr::new(cluster.nodes[node].pod_addresses()[family], TARGET);
        let client =
            SocketAddr::new(OUTSIDE_CLIENTS[0][family], connection.stream().local_addr().unwrap().port());
        let mut line = traces[node].next();
        // On a kernel without links to interfaces.
        if line["event"] == "noSentPackets" {
            line = traces[node].next();
        }
        assert_fields(
            &line,
            &[
                ("event", "packet"),
                ("source", &client.to_string()),
                ("destination", &frontend.to_string()),
                ("verdict", "redirected"),
                ("endpoint", &endpoint.to_string()),
                ("service", "default/web"),
            ],
        );
        assert!(line["masqueraded"].is_null(), "{line}");
    }
}

#[test]
fn the_node_that_a_forwarded_connection_enters_by_traces_where_it_goes() {
    if !kernel_at_least(6, 6) {
        return skip("the program of a trace needs links to interfaces: Linux 6.6");
    }
    let Some(cluster) = forwarding_or_skip(|it| web(it, &[0, 1])) else { return };
    cluster.set_next_hops(NETWORKS, &[2]);
    let entry = &cluster.nodes[2];
    let trace = entry.netns.run(|| Trace::start(entry.cli("trace").args(["--service", "default/web"])));
    for frontend in frontends().into_iter().cycle().take(8) {
        let connection = cluster.clients[0].run(|| EchoConnection::connect(frontend)).unwrap();
        let client = connection.stream().local_addr().unwrap();
        check_forwarded(&trace, "TCP", (client, frontend), seen(connection.name()).0);
    }
    for frontend in frontends() {
        let client = udp_client(&cluster, frontend);
        // The next line is that of another flow.
        let [.., reply] = [(); 3].map(|()| exchange(&client, frontend).unwrap().0);
        check_forwarded(&trace, "UDP", (client.local_addr().unwrap(), frontend), seen(&reply).0);
    }
    let before = findings(&cluster, &[]);
    assert!(!before.iter().any(|it| it.says.contains("before ours do")), "the program of the trace is ours");
    let is_traced = || {
        let programs =
            entry.netns.run(|| SchedClassifier::query_tcx("eth0", TcAttachType::Ingress)).unwrap().1;
        programs.iter().any(|it| it.name_as_str() == Some("trace_ingress"))
    };
    assert!(is_traced());
    drop(trace);
    assert!(eventually(TIMEOUT, || !is_traced()), "it ends with its reader");
}

#[test]
fn top_shows_how_many_packets_are_forwarded() {
    let Some(cluster) = forwarding_or_skip(|it| web(it, &[0, 1])) else { return };
    cluster.set_next_hops(NETWORKS, &[2]);
    let node = &cluster.nodes[2];
    let mut top = node.cli("top");
    top.args(["--once", "--output=json", "--filter=default/web"]);
    let mut top = node.netns.run(|| top.stdout(Stdio::piped()).spawn()).unwrap();
    while top.try_wait().unwrap().is_none() {
        for frontend in frontends() {
            drop(cluster.clients[0].run(|| EchoConnection::connect(frontend)).unwrap());
        }
    }
    let top: Value = serde_json::from_reader(top.stdout.take().unwrap()).unwrap();
    let rates = top["servicePorts"].as_array().unwrap().iter().map(|it| &it["forwardedPacketsPerSecond"]);
    assert!(rates.into_iter().any(|it| it.as_f64().unwrap() > 0.0), "{top}");
}

/// Checks the next line: that of a packet that goes on to a node.
#[track_caller]
fn check_forwarded(
    trace: &Trace,
    protocol: &str,
    (client, frontend): (SocketAddr, SocketAddr),
    server: &str,
) {
    let line = trace.expect(&[
        ("event", "packet"),
        ("protocol", protocol),
        ("source", &client.to_string()),
        ("destination", &frontend.to_string()),
        ("verdict", "forwarded"),
        ("service", "default/web"),
        ("interface", "eth0"),
    ]);
    let to = &line["forwardedTo"];
    assert_eq!(to["node"], server, "{line}");
    assert!(to["row"].as_u64().unwrap() < to["rows"].as_u64().unwrap(), "{line}");
}
