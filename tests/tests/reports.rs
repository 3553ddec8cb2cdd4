//! What the proxy tells of itself is what is the case, and telling it costs the data plane nothing.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    time::Duration,
};

use tests::{
    Agent, Build, ConnectLoad, EchoServer, TestNode, Transport, eventually,
    http::{Response, get, metric},
    load::LoadReport,
    manifest::{self, Service},
    request, scaled,
    test_node::{NODE, expected_dump},
};

const LIMIT: Duration = Duration::from_secs(20);
const WEB: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 10);

fn web() -> Service {
    Service::new("web", &[WEB.into()]).port("", "TCP", 80, 8080).endpoint("web-1", &[[10, 244, 1, 1].into()])
}

fn server() -> EchoServer {
    EchoServer::start("web-1", ([10, 244, 1, 1], 8080).into()).unwrap()
}

fn start(world: &TestNode) -> Agent {
    world.command(Build::Product).start(world.sandbox()).unwrap()
}

fn health(path: &str) -> std::io::Result<Response> {
    get((Ipv4Addr::LOCALHOST, 10256).into(), path)
}

fn metrics(path: &str) -> std::io::Result<Response> {
    get((Ipv4Addr::LOCALHOST, 10249).into(), path)
}

fn is_ready() -> bool {
    health("/readyz").is_ok_and(|it| it.status == 200)
}

fn write_node(world: &TestNode, more: &str) {
    let node = format!("apiVersion: v1\nkind: Node\nmetadata: {{name: {NODE}}}\nspec: {{{more}}}\n");
    manifest::write_atomically(&world.manifests().join("node.yaml"), &node).unwrap();
}

#[test]
fn a_node_tells_how_it_is() {
    let Some(world) = TestNode::or_skip("a_node_tells_how_it_is") else { return };
    let _server = server();
    world.write(&[web()]);
    write_node(&world, "");
    let mut agent = start(&world);
    agent.wait_until(LIMIT, is_ready).unwrap();
    assert_eq!(request(Transport::Tcp, (WEB, 80).into()).unwrap(), "web-1", "ready means that it is served");

    let healthz = health("/healthz").unwrap();
    assert_eq!(healthz.status, 200, "{healthz:?}");
    assert!(healthz.body.contains("\"nodeEligible\":true"), "{healthz:?}");
    assert_eq!(health("/livez").unwrap().status, 200);
    assert_eq!(metrics("/proxyMode").unwrap().body, "ebpf");
    let state = metrics("/state").unwrap();
    assert!(state.body.contains("10.96.0.10") && state.body.contains("10.244.1.1"), "{state:?}");

    for (name, expect) in [
        ("kube_proxy_ebpf_generation", 1.0),
        ("kube_proxy_ebpf_services", 1.0),
        ("kube_proxy_ebpf_endpoints", 1.0),
        ("kube_proxy_ebpf_map_entries{table=\"frontends4\"}", 1.0),
        ("kube_proxy_ebpf_map_entries{table=\"backends4\"}", 1.0),
        ("kube_proxy_ebpf_program_in_effect{hook=\"connect4\"}", 1.0),
        ("kube_proxy_ebpf_source_synced{source=\"file\"}", 1.0),
        ("kubeproxy_sync_full_proxy_rules_duration_seconds_count", 1.0),
        ("kubeproxy_sync_proxy_rules_service_changes_total", 1.0),
        ("kubeproxy_proxy_healthz_total{code=\"200\"}", 1.0),
    ] {
        assert_eq!(metric(name), Some(expect), "{name}");
    }

    // A change, and an item that is refused.
    world.write(&[web().endpoint("web-2", &[[10, 244, 1, 2].into()])]);
    let bad = "apiVersion: v1\nkind: Service\nmetadata: {name: bad, namespace: default}\n\
               spec: {clusterIP: 10.96.0.300, ports: [{port: 80}]}\n";
    manifest::write_atomically(&world.manifests().join("bad.yaml"), bad).unwrap();
    let told = || {
        metric("kube_proxy_ebpf_map_entries{table=\"backends4\"}") == Some(2.0)
            && metric("kube_proxy_ebpf_rejected_items{by=\"source\"}").is_some_and(|it| it >= 1.0)
    };
    agent.wait_until(LIMIT, told).unwrap();
    assert!(metric("kubeproxy_sync_partial_proxy_rules_duration_seconds_count") >= Some(1.0));
    assert!(metrics("/status").unwrap().body.contains("10.96.0.300"));

    // The node is about to go: load balancers should know, and nobody should restart the proxy for it.
    write_node(&world, "taints: [{key: ToBeDeletedByClusterAutoscaler, effect: NoSchedule}]");
    agent.wait_until(LIMIT, || health("/healthz").is_ok_and(|it| it.status == 503)).unwrap();
    assert!(health("/healthz").unwrap().body.contains("\"nodeEligible\":false"));
    assert_eq!(health("/livez").unwrap().status, 200);
    assert!(is_ready());
}

#[test]
fn a_port_in_use_is_named_and_the_data_plane_goes_on() {
    let Some(world) = TestNode::or_skip("a_port_in_use_is_named_and_the_data_plane_goes_on") else { return };
    let _server = server();
    world.write(&[web()]);
    let occupants: Vec<_> = [10249, 10256]
        .map(|port| TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).unwrap())
        .into();
    let mut agent = start(&world);
    agent.wait_until(LIMIT, || request(Transport::Tcp, (WEB, 80).into()).is_ok()).unwrap();
    let log = agent.log_path().to_owned();
    let says =
        ["0.0.0.0:10256", "127.0.0.1:10249", "--healthz-bind-address", "--metrics-bind-address", "ss -ltnp"];
    let says_all = || {
        let log = fs::read_to_string(&log).unwrap_or_default();
        says.iter().all(|it| log.contains(it))
    };
    agent.wait_until(LIMIT, says_all).unwrap();
    drop(occupants);
    agent.wait_until(LIMIT, || is_ready() && metrics("/metrics").is_ok()).unwrap();
}

#[test]
fn nothing_is_told_where_nothing_should_be() {
    let Some(world) = TestNode::or_skip("nothing_is_told_where_nothing_should_be") else { return };
    let _server = server();
    world.write(&[web()]);
    let setting = world.command(Build::Product);
    let setting = setting.arg("--healthz-bind-address=").arg("--metrics-bind-address=0");
    let mut agent = setting.start(world.sandbox()).unwrap();
    agent.wait_until(LIMIT, || request(Transport::Tcp, (WEB, 80).into()).is_ok()).unwrap();
    // Both would be there since before the first state.
    assert!(health("/livez").is_err() && metrics("/metrics").is_err());
    assert!(!agent.log().contains("cannot be served"), "{}", agent.log());
}

#[test]
fn programs_that_are_taken_off_are_put_back_and_told_of() {
    let Some(world) = TestNode::or_skip("programs_that_are_taken_off_are_put_back_and_told_of") else {
        return;
    };
    let _server = server();
    world.write(&[web()]);
    let mut agent = start(&world);
    agent.wait_until(LIMIT, is_ready).unwrap();
    let links = world.sandbox().pins().join("links");
    for hook in ["connect4", "recvmsg6"] {
        // Its last reference: the kernel takes the program off.
        fs::remove_file(links.join(hook)).unwrap();
    }
    let service = (WEB, 80).into();
    assert!(eventually(LIMIT, || request(Transport::Tcp, service).is_err()), "it is off now");
    let is_back = || metric("kube_proxy_ebpf_program_losses_total") == Some(1.0) && is_ready();
    agent.wait_until(LIMIT, is_back).unwrap();
    assert_eq!(request(Transport::Tcp, service).unwrap(), "web-1");
    assert!(links.join("connect4").exists() && links.join("recvmsg6").exists());
    let log = agent.log();
    assert!(log.contains("connect4") && log.contains("recvmsg6"), "{log}");
}

/// What `status` prints.
fn status(world: &TestNode) -> String {
    let mut command = std::process::Command::new(Build::Product.binary());
    command.arg("status").arg("--cgroup").arg(world.sandbox().cgroup()).arg("--pin-dir");
    let output = command.arg(world.sandbox().pins()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn pins_that_cannot_be_made_leave_the_old_generation_serving_and_are_told_of() {
    const NAME: &str = "pins_that_cannot_be_made_leave_the_old_generation_serving_and_are_told_of";
    let Some(world) = TestNode::or_skip(NAME) else { return };
    let _server = server();
    world.write(&[web()]);
    let mut agent = start(&world);
    agent.wait_until(LIMIT, is_ready).unwrap();
    let load = ConnectLoad::start(Transport::Tcp, (WEB, 80).into(), 1, scaled(Duration::from_millis(1)));

    // A map of another size cannot take the place of one: where its pin would be, there is a folder.
    let sides = [0, 1].map(|side| world.program("").join(format!("../side{side}")));
    let maps = sides.iter().flat_map(|it| fs::read_dir(it).unwrap().flatten());
    let folders: Vec<_> = maps.map(|it| format!("{}_new", it.path().display())).collect();
    assert!(folders.len() > 8, "{folders:?}");
    folders.iter().for_each(|it| fs::create_dir(it).unwrap());
    let grown = || {
        let addresses = (1..=200).map(|n| (format!("e{n}"), [[10, 244, 2, n].into()]));
        let other = Service::new("other", &[Ipv4Addr::new(10, 96, 0, 11).into()]).port("", "TCP", 80, 8080);
        addresses.fold(other, |it, (name, address)| it.endpoint(&name, &address))
    };
    let before = world.dump(Build::Product).unwrap();
    world.write(&[web(), grown()]);
    let failures = || metric("kube_proxy_ebpf_failures_total{step=\"apply\"}");
    agent.wait_until(LIMIT, || failures() >= Some(3.0)).unwrap();
    let says = status(&world);
    for it in
        ["revision 1 active", "pending    a change, for ", "apply: unlink of ", "_new failed", "irectory"]
    {
        assert!(says.contains(it), "{it} is not in\n{says}");
    }
    assert_eq!(
        metric("kube_proxy_ebpf_failures_total{step=\"finish\"}"),
        Some(0.0),
        "each failure counts once"
    );
    assert_eq!(world.dump(Build::Product).unwrap(), before);
    assert_eq!(request(Transport::Tcp, (WEB, 80).into()).unwrap(), "web-1");

    folders.iter().for_each(|it| fs::remove_dir(it).unwrap());
    let expected = expected_dump(&[web(), grown()]);
    agent.wait_until(LIMIT, || world.dump(Build::Product).is_ok_and(|it| it == expected)).unwrap();
    agent.wait_until(LIMIT, || !status(&world).contains("pending")).unwrap();
    let report = LoadReport::of(&load.stop());
    assert_eq!(report.failed, 0, "{:?}", report.errors);
    assert!(report.connects > 10);
}

#[test]
fn a_brain_tells_what_it_decided_where_it_is_asked_to() {
    let Some(world) = TestNode::or_skip("a_brain_tells_what_it_decided_where_it_is_asked_to") else { return };
    world.write(&[web()]);
    let source = format!("file:{}", world.manifests().display());
    let listen = format!("unix://{}", world.sandbox().files().join("proxy.sock").display());
    let arguments = ["brain", "--source", &source, "--node-name", NODE, "--listen", &listen];
    let arguments = arguments.map(std::ffi::OsStr::new);
    let setting = tests::agent::AgentCommand::new(&Build::Product.binary(), &arguments)
        .arg("--healthz-bind-address=127.0.0.1")
        .arg("--metrics-bind-address=127.0.0.1");
    let mut brain = setting.start(world.sandbox()).unwrap();
    brain.wait_until(LIMIT, is_ready).unwrap();
    assert_eq!(metric("kube_proxy_ebpf_services"), Some(1.0));
    assert_eq!(metric("kube_proxy_ebpf_generation"), None, "it has no kernel");
    assert_eq!(metric("kube_proxy_ebpf_watchers"), Some(0.0));
    let mut follower = std::process::Command::new(Build::Product.binary())
        .args(["print", "--target", &listen, "--node-name", NODE])
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let counted = eventually(LIMIT, || metric("kube_proxy_ebpf_watchers") == Some(1.0));
    let _ = follower.kill();
    follower.wait().unwrap();
    assert!(counted, "who follows is counted");
    assert!(eventually(LIMIT, || metric("kube_proxy_ebpf_watchers") == Some(0.0)), "and forgotten");
    assert!(metrics("/state").unwrap().body.contains("10.244.1.1"));
}
