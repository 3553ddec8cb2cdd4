//! Pages, metrics, logs and `status` report the actual state, without affecting the data plane.

use std::{
    fs,
    net::{Ipv4Addr, TcpListener},
    os::unix::{fs::PermissionsExt as _, net::UnixListener},
    process::{Command, Stdio},
    time::Duration,
};

use build_tools::command::KilledOnDrop;
use serde_json::Value;
use tests::{
    AgentCommand, Build, ConnectLoad, FRONTEND, NODE, Service, TIMEOUT, TestNode, Transport, assert_contains,
    brain_socket, eventually,
    http::{self, HEALTH_PORT, METRICS_PORT, PROBE_PORT, health, health_status, is_ready, metrics, probe},
    manifest, metric, request, run, scaled, status_socket, web4,
};

/// A node with `web`; no proxy runs yet.
fn node_or_skip() -> Option<TestNode> {
    TestNode::prepared_or_skip([1, 2], &[web4([1])])
}

fn write_node(node: &TestNode, spec: &str) {
    let text = format!("apiVersion: v1\nkind: Node\nmetadata: {{name: {NODE}}}\nspec: {{{spec}}}\n");
    node.write_file("node.yaml", &text);
}

#[test]
fn health_metrics_and_status_pages_report_the_node() {
    let Some(mut node) = node_or_skip() else { return };
    write_node(&node, "");
    node.start_inactive(&node.command(Build::Product));
    node.wait_until_ready();
    assert_eq!(request(Transport::Tcp, FRONTEND).unwrap(), "web-1", "a ready node serves");

    let healthz = health("/healthz").unwrap();
    assert_eq!(healthz.status, 200, "{healthz:?}");
    assert!(healthz.body.contains("\"nodeEligible\":true"), "{healthz:?}");
    assert_eq!(health_status("/livez"), 200);
    assert_eq!(metrics("/proxyMode").unwrap().body, "ebpf");
    assert!(metrics("/configz").unwrap().body.contains("\"hostnameOverride\":\"n1\""));
    assert!(metrics("/flagz").unwrap().body.contains("\nnode-name=n1\n"));
    assert!(metrics("/metrics/slis").unwrap().body.contains("{name=\"programs\",type=\"readyz\"} 1"));
    let state = node.status_page("/state").unwrap();
    assert!(state.body.contains("10.96.0.10") && state.body.contains("10.244.1.1"), "{state:?}");

    for series in [
        "kube_proxy_ebpf_active_revision",
        "kube_proxy_ebpf_services",
        "kube_proxy_ebpf_endpoints",
        "kube_proxy_ebpf_map_entries{table=\"frontends4\"}",
        "kube_proxy_ebpf_map_entries{table=\"backends4\"}",
        "kube_proxy_ebpf_program_attached{hook=\"connect4\"}",
        "kube_proxy_ebpf_source_synced{source=\"file\"}",
        "kubeproxy_sync_full_proxy_rules_duration_seconds_count{ip_family=\"IPv4\"}",
        "kubeproxy_sync_full_proxy_rules_duration_seconds_count{ip_family=\"IPv6\"}",
        "kubeproxy_sync_proxy_rules_service_changes_total",
        "kubeproxy_proxy_healthz_total{code=\"200\"}",
    ] {
        assert_eq!(metric(series), Some(1.0), "{series}");
    }

    node.write(&[web4([1, 2])]);
    node.write_file("bad.yaml", &manifest::invalid_service("default", "bad"));
    node.wait_until(|_| {
        metric("kube_proxy_ebpf_map_entries{table=\"backends4\"}") == Some(2.0)
            && metric("kube_proxy_ebpf_rejected_items{by=\"source\"}") >= Some(1.0)
    });
    let partial = "kubeproxy_sync_partial_proxy_rules_duration_seconds_count{ip_family=\"IPv4\"}";
    assert!(metric(partial) >= Some(1.0));
    assert!(node.status_page("/status").unwrap().body.contains("10.96.0.300"));

    // Load balancers leave a node that will be deleted, but the proxy must not be restarted.
    write_node(&node, "taints: [{key: ToBeDeletedByClusterAutoscaler, effect: NoSchedule}]");
    node.wait_until(|_| health_status("/healthz") == 503);
    assert!(health("/healthz").unwrap().body.contains("\"nodeEligible\":false"));
    assert_eq!(health_status("/livez"), 200);
    assert!(is_ready());
}

#[test]
fn an_address_in_use_is_reported_once_and_taken_when_it_is_free() {
    let Some(mut node) = node_or_skip() else { return };
    let ports = [METRICS_PORT, HEALTH_PORT, PROBE_PORT];
    let listeners = ports.map(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap());
    let socket = UnixListener::bind(status_socket(node.sandbox())).unwrap();
    node.start(&[]);
    assert_eq!(request(Transport::Tcp, FRONTEND).unwrap(), "web-1");
    node.wait_until_logged(&["0.0.0.0:10256", "--healthz-bind-address", "ss -ltnp"]);
    node.wait_until_logged(&["127.0.0.1:10249", "--metrics-bind-address"]);
    node.wait_until_logged(&["127.0.0.1:10245", "--probe-bind-address"]);
    node.wait_until_logged(&["status.sock: another process listens there"]);
    node.wait_until_logged(&["a second instance on this node needs another --status-socket"]);
    drop((listeners, socket));
    node.wait_until(|_| is_ready() && metrics("/metrics").is_ok() && probe("/livez").is_ok());
    node.wait_until(|node| node.status_page("/status").is_ok());
    let log = node.log();
    assert_eq!((log.matches("cannot serve the").count(), log.matches("ERROR").count()), (4, 0), "{log}");
}

#[test]
fn disabled_pages_are_not_served() {
    let Some(mut node) = node_or_skip() else { return };
    let off = ["--probe-bind-address=0", "--healthz-bind-address=", "--metrics-bind-address=0"];
    node.start_inactive(&node.command(Build::Product).args(off).arg("--status-socket="));
    node.agent_mut().wait_until_applied(TIMEOUT).unwrap();
    assert_eq!(request(Transport::Tcp, FRONTEND).unwrap(), "web-1");
    // Pages are served before the first state is applied.
    assert!(health("/livez").is_err() && metrics("/metrics").is_err());
    assert!(probe("/livez").is_err() && node.status_page("/status").is_err());
    assert!(!node.log().contains("cannot serve"), "{}", node.log());
}

#[test]
fn detached_programs_are_reattached_and_reported() {
    let Some(mut node) = node_or_skip() else { return };
    node.start(&[]);
    node.wait_until_ready();
    let links = node.sandbox().pins().join("links");
    for hook in ["connect4", "recvmsg6"] {
        // The last reference of the link: the kernel detaches the program.
        fs::remove_file(links.join(hook)).unwrap();
    }
    assert!(eventually(TIMEOUT, || request(Transport::Tcp, FRONTEND).is_err()), "it is detached");
    node.wait_until(|_| metric("kube_proxy_ebpf_program_detachments_total") == Some(1.0) && is_ready());
    assert_eq!(request(Transport::Tcp, FRONTEND).unwrap(), "web-1");
    assert!(links.join("connect4").exists() && links.join("recvmsg6").exists());
    assert_contains(&node.log(), &["connect4", "recvmsg6"]);
}

/// The failed steps in a log of format JSON: what `jq 'select(.step)'` prints, as the documentation has it.
fn failed_steps(log: &str) -> Vec<Value> {
    // The last line may be incomplete.
    let lines = log.rsplit_once('\n').map_or("", |(lines, _)| lines).lines();
    let event = |line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    lines.map(event).filter(|it: &Value| !it["step"].is_null()).collect()
}

#[test]
fn failing_pins_leave_the_previous_generation_active_and_are_reported() {
    let Some(mut node) = node_or_skip() else { return };
    node.start(&["--log-format=json"]);
    node.wait_until_ready();
    let load = ConnectLoad::start(Transport::Tcp, FRONTEND, 1, scaled(Duration::from_millis(1)));

    // A resized map cannot be pinned, because there is a folder at the path of its pin.
    let sides = [0, 1].map(|side| node.program("").join(format!("../side{side}")));
    let maps = sides.iter().flat_map(|it| fs::read_dir(it).unwrap().flatten());
    let folders: Vec<_> = maps.map(|it| format!("{}_new", it.path().display())).collect();
    assert!(folders.len() > 8, "{folders:?}");
    folders.iter().for_each(|it| fs::create_dir(it).unwrap());
    let large = (1..=200)
        .fold(Service::new("large", &[[10, 96, 0, 11].into()]).port("", "TCP", 80, 8080), |it, n| {
            it.endpoint(&format!("e{n}"), &[[10, 244, 2, n].into()])
        });
    let services = [web4([1]), large];
    let before = node.dump(Build::Product).unwrap();
    node.write(&services);
    node.wait_until(|_| metric("kube_proxy_ebpf_failures_total{step=\"apply\"}") >= Some(3.0));
    let status = |node: &TestNode| run(&mut node.cli("status")).success();
    let text = status(&node);
    let parts =
        ["revision 1 active", "pending    a change, for ", "apply: unlink of ", "_new failed", "irectory"];
    assert_contains(&text, &parts);
    let finish_failures = metric("kube_proxy_ebpf_failures_total{step=\"finish\"}");
    assert_eq!(finish_failures, Some(0.0), "each failure counts once");
    assert!(eventually(TIMEOUT, || failed_steps(&node.log()).len() >= 3), "{}", node.log());
    for event in failed_steps(&node.log()) {
        let of = |field: &str| event[field].as_str().unwrap_or_else(|| panic!("no {field}: {event}"));
        assert_eq!(["level", "step", "datapath"].map(of), ["ERROR", "apply", "sockets"], "{event}");
        assert!(of("error").contains("_new failed") && of("retry_in").ends_with("s"), "{event}");
        assert!(event["revision"].as_u64() > Some(1), "{event}");
    }
    assert_eq!(node.dump(Build::Product).unwrap(), before);
    assert_eq!(request(Transport::Tcp, FRONTEND).unwrap(), "web-1");

    folders.iter().for_each(|it| fs::remove_dir(it).unwrap());
    node.wait_until_active(&services);
    node.wait_until(|node| !status(node).contains("pending"));
    load.stop_without_failure(10);
}

#[test]
fn a_brain_serves_pages_if_addresses_are_given() {
    let Some(mut node) = node_or_skip() else { return };
    let command = AgentCommand::brain(&Build::Product.binary(), node.sandbox(), &node.manifests(), NODE)
        .args(["--healthz-bind-address=127.0.0.1", "--metrics-bind-address=127.0.0.1"])
        .arg("--status-socket")
        .arg(status_socket(node.sandbox()));
    node.start_inactive(&command);
    node.wait_until_ready();
    assert_eq!(metric("kube_proxy_ebpf_services"), Some(1.0));
    assert_eq!(metric("kube_proxy_ebpf_active_revision"), None, "a brain has no data plane");
    let watchers = |count| eventually(TIMEOUT, || metric("kube_proxy_ebpf_watchers") == Some(count));
    assert_eq!(metric("kube_proxy_ebpf_watchers"), Some(0.0));
    let mut print = Command::new(Build::Product.binary());
    print.args(["print", "--target", &brain_socket(node.sandbox()), "--node-name", NODE]);
    let watcher = KilledOnDrop(print.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    assert!(watchers(1.0), "a watcher is counted");
    drop(watcher);
    assert!(watchers(0.0), "until it ends");
    assert!(node.status_page("/state").unwrap().body.contains("10.244.1.1"));
}

#[test]
fn the_page_is_served_at_addresses_of_this_host_only_and_a_socket_is_roots() {
    let Some(mut node) = TestNode::or_skip() else { return };
    for address in ["0.0.0.0:10247", "[::]:10247", "192.0.2.1:80", "localhost:1"] {
        let refused = run(node.cli("run").args(["--source", &node.source(), "--ui", address]));
        assert_contains(&refused.exits_with(64), &[address, "127.0.0.1:10247"]);
    }
    let socket = node.sandbox().files().join("ui.sock");
    node.serve([1]);
    node.write(&[web4([1])]);
    node.start(&[&format!("--ui=unix://{}", socket.display())]);
    node.wait_until(|_| socket.exists());
    assert_eq!(fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
    let page = http::get_from_socket(&socket, "/").unwrap();
    assert!(page.status == 200 && page.body.contains("<title>kube-proxy-ebpf</title>"));
    let live = http::get_from_socket(&socket, "/live").unwrap();
    assert!(live.body.contains("\"default/web\""), "{}", live.body);
}
