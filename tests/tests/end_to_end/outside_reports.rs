//! What `explain`, `status`, `check`, `trace` and `top` say of traffic from outside that is forwarded whole, on the nodes of a
//! cluster.

use std::{
    fs,
    net::{SocketAddr, UdpSocket},
    process::{Command, Stdio},
};

use aya::programs::{SchedClassifier, TcAttachType};
use serde::Deserialize;
use serde_json::Value;
use tests::{
    AgentCommand, Build, EchoConnection, Explained, IngressCluster, OUTSIDE_CLIENTS, Output, Sandbox,
    TIMEOUT, Trace, assert_contains, eventually, exchange, kernel_at_least, run, skip, test_cluster::TARGET,
    trace::assert_fields, udp_socket_at,
};

use crate::outside::{
    FIRST_THREE, FRONTENDS, NETWORKS, frontends, running_cluster_or_skip, seen, wait_until_forwarded, web,
};

const FORWARDED: &str = "packets from outside are forwarded";

/// A cluster of three nodes, of which the last has no endpoint, with a proxy on each, once it forwards.
fn forwarding_or_skip() -> Option<IngressCluster> {
    let mut cluster = running_cluster_or_skip(3, |it| web(it, &[0, 1]))?;
    cluster.set_next_hops(NETWORKS, &[0, 1, 2]);
    for node in 0..cluster.nodes.len() {
        cluster.agent(node).wait_until_logged(TIMEOUT, FORWARDED).unwrap();
    }
    wait_until_forwarded(&cluster, &FIRST_THREE[..2]);
    Some(cluster)
}

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
    let Some(cluster) = forwarding_or_skip() else { return };
    for (frontend, to) in frontends().into_iter().zip(FRONTENDS) {
        for _ in 0..8 {
            let connection = cluster.clients[0].run(|| EchoConnection::connect(frontend)).unwrap();
            let client = connection.stream().local_addr().unwrap().to_string();
            let (name, has_own_address) = seen(connection.name());
            assert!(has_own_address, "{connection:?}");
            assert_served_by(&cluster, &client, &format!("{to}/tcp"), name);
        }
        let (udp, to) = (udp_client(&cluster, frontend), format!("{to}/udp"));
        let (reply, _) = exchange(&udp, frontend).unwrap();
        let client = udp.local_addr().unwrap().to_string();
        let (name, has_own_address) = seen(&reply);
        assert!(has_own_address, "{reply}");
        assert_served_by(&cluster, &client, &to, name);
        // In words, on the node without an endpoint.
        let node = cluster.nodes.iter().find(|it| it.name() == name).unwrap();
        let address = node.addresses()[usize::from(frontend.is_ipv6())];
        let text = cli(&cluster, 2, &["explain", "outside", &client, &to]).success();
        assert_contains(
            &text,
            &[
                &format!("from       {client}, outside the cluster, over node n3\n"),
                &format!("the only endpoint on node {name}\n"),
                "forwarding whole, to 2 nodes with endpoints, by the annotation kube-proxy-ebpf.io/external-forwarding\n",
                "forwarded  row ",
                &format!(" of 1024, by addresses and ports: wrapped for node {name} at {address}\n"),
            ],
        );
    }
}

fn udp_client(cluster: &IngressCluster, frontend: SocketAddr) -> UdpSocket {
    let source = OUTSIDE_CLIENTS[0][usize::from(frontend.is_ipv6())];
    cluster.clients[0].run(|| udp_socket_at((source, 0).into())).unwrap()
}

#[derive(Debug, Deserialize)]
struct Finding {
    subject: String,
    level: String,
    #[serde(rename = "message")]
    says: String,
}

/// What `check` finds about forwarding on the first node.
#[track_caller]
fn findings(cluster: &IngressCluster) -> Vec<Finding> {
    let cgroup = cluster.nodes[0].sandbox.cgroup().display().to_string();
    let output = cli(cluster, 0, &["check", "--output=json", "--cgroup", &cgroup]);
    let mut report: Value = serde_json::from_str(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
    let mut all: Vec<Finding> = serde_json::from_value(report["findings"].take()).unwrap();
    all.retain(|it| it.subject == "external forwarding" || it.subject.contains("uplink"));
    all
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
    let Some(mut cluster) = forwarding_or_skip() else { return };
    let status = |arguments: &[&str]| cli(&cluster, 0, &[&["status"], arguments].concat()).success();
    assert_contains(&status(&[]), &["\nforwarding 4 frontends, to 2 nodes, by eth0\n"]);
    let json: Value = serde_json::from_str(&status(&["--output=json"])).unwrap();
    let expect =
        serde_json::json!({"frontends": 4, "nodes": 2, "translated": 0, "ended": 0, "uplinks": ["eth0"]});
    assert_eq!(json["forwarding"], expect);

    let found = findings(&cluster);
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
    assert_found(&findings(&cluster), "degraded", "eth0 has 1300 bytes");

    // A classifier sees what they let pass.
    let tc = |line: &str| {
        let mut command = Command::new("tc");
        node.netns.run(|| command.args(line.split(' ')).status().is_ok_and(|it| it.success()))
    };
    if tc("qdisc add dev eth0 clsact") && tc("filter add dev eth0 ingress protocol all u32 match u32 0 0") {
        assert_found(&findings(&cluster), "ok", "others run after ours: eth0: tc ingress: u32");
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
    let found = findings(&cluster);
    assert_found(&found, "degraded", "others see packets before ours do: eth0: tcx ingress: ingress (id ");
    assert_found(&found, "degraded", "eth0: tcx egress: egress (id ");
    drop(other_agent);

    // Without a proxy that attaches them again, its own programs go one after the other.
    cluster.kill(0);
    let node = &cluster.nodes[0];
    let remove = |prefix: &str| node.links(prefix).iter().for_each(|it| fs::remove_file(it).unwrap());
    remove("ingress_");
    let expect = "eth0 has only egress: packets are translated there";
    assert!(eventually(TIMEOUT, || findings(&cluster).iter().any(|it| it.says.contains(expect))));
    assert_found(&findings(&cluster), "broken", expect);
    remove("egress_");
    assert_found(&findings(&cluster), "broken", "eth0 has none of the programs");
    let text = cli(&cluster, 0, &["status"]).stdout;
    assert_contains(&text, &["forwarding NOT at work, no interface has the programs: "]);
}

#[test]
fn a_forwarded_connection_is_reported_where_it_enters_and_where_it_is_served() {
    let Some(cluster) = forwarding_or_skip() else { return };
    // By the node without an endpoint: all is wrapped.
    cluster.set_next_hops(NETWORKS, &[2]);
    let entry = &cluster.nodes[2];
    let trace = |node: usize| {
        let node = &cluster.nodes[node];
        node.netns.run(|| Trace::start(node.cli("trace").args(["--service", "default/web"])))
    };
    let serving = [0, 1].map(trace);
    // Its program needs links to interfaces.
    let entering = kernel_at_least(6, 6).then(|| trace(2));
    for (family, frontend) in frontends().into_iter().enumerate().cycle().take(8) {
        let connection = cluster.clients[0].run(|| EchoConnection::connect(frontend)).unwrap();
        let client = connection.stream().local_addr().unwrap();
        let (server, _) = seen(connection.name());
        let node = (0..2).find(|it| cluster.nodes[*it].name() == server).unwrap();
        let endpoint = SocketAddr::new(cluster.nodes[node].pod_addresses()[family], TARGET);
        let mut line = serving[node].next();
        // On a kernel without links to interfaces.
        if line["event"] == "noSentPackets" {
            line = serving[node].next();
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
        if let Some(trace) = &entering {
            check_forwarded(trace, "TCP", (client, frontend), server);
        }
    }
    if let Some(trace) = entering {
        for frontend in frontends() {
            let client = udp_client(&cluster, frontend);
            // The next line is that of another flow.
            let [.., reply] = [(); 3].map(|()| exchange(&client, frontend).unwrap().0);
            check_forwarded(&trace, "UDP", (client.local_addr().unwrap(), frontend), seen(&reply).0);
        }
        let found = findings(&cluster);
        assert!(!found.iter().any(|it| it.says.contains("before ours do")), "the program of a trace is ours");
        let is_traced = || {
            let programs =
                entry.netns.run(|| SchedClassifier::query_tcx("eth0", TcAttachType::Ingress)).unwrap().1;
            programs.iter().any(|it| it.name_as_str() == Some("trace_ingress"))
        };
        assert!(is_traced());
        drop(trace);
        assert!(eventually(TIMEOUT, || !is_traced()), "it ends with its reader");
    }
    // How many packets are forwarded.
    let mut top = entry.cli("top");
    top.args(["--once", "--output=json", "--filter=default/web"]);
    let mut top = entry.netns.run(|| top.stdout(Stdio::piped()).spawn()).unwrap();
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
