//! The proxy follows an API server, and keeps serving without it.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener, TcpStream},
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use api_server::{ApiServer, Resource, Settings};
use build_tools::command::KilledOnDrop;
use tests::{
    APPLIED, AgentCommand, Build, ConnectLoad, EchoConnection, FRONTEND, NODE, Output, Service, TestNode,
    Transport, WEB4, assert_contains, expected_dump, http, manifest, metric, run, scaled,
};

use super::passive_health::FOR_EVER;

/// A Service of one port with these endpoints.
pub(super) fn service(name: &str, address: impl Into<IpAddr>, endpoints: &[u8]) -> Service {
    Service::new(name, &[address.into()]).port("tcp", "TCP", 80, 8080).endpoints(endpoints.iter().copied())
}

fn web(endpoints: &[u8]) -> Service {
    service("web", WEB4, endpoints)
}

/// Adds Services and their slices to the server, or replaces them.
pub(super) fn set(server: &ApiServer, services: &[Service]) {
    services.iter().flat_map(Service::objects).for_each(|it| server.set(it));
}

/// A server that requires TLS and a token.
fn secure_server() -> ApiServer {
    let settings = Settings { is_tls: true, token: Some("secret".into()), ..Settings::default() };
    ApiServer::start(settings).unwrap()
}

pub(super) fn server_with_node(settings: Settings) -> ApiServer {
    let server = ApiServer::start(settings).unwrap();
    set_node(&server, &manifest::node(NODE));
    server
}

fn set_node(server: &ApiServer, manifest: &str) {
    server.set(serde_saphyr::from_str(manifest).unwrap());
}

fn command(node: &TestNode, server: &ApiServer) -> AgentCommand {
    AgentCommand::new(&Build::Product.binary())
        .args(["run", "--source", "kube", "--node-name", NODE, "--kubeconfig"])
        .arg(server.kubeconfig(node.sandbox().files()).unwrap())
        .kernel(node.sandbox())
}

#[test]
fn the_kernel_state_follows_the_api_server_and_survives_its_outage() {
    let Some(mut node) = TestNode::serving_or_skip(1..=3) else { return };
    let mut server = secure_server();
    set_node(&server, &manifest::node(NODE));
    let other = || service("other", [10, 96, 0, 11], &[3]);
    set(&server, &[other(), web(&[1])]);
    node.start_with(&command(&node, &server));
    node.wait_until_active(&[other(), web(&[1])]);
    let mut connection = EchoConnection::connect(FRONTEND).unwrap();
    let load = ConnectLoad::start(Transport::Tcp, FRONTEND, 1, scaled(Duration::from_millis(1)));

    set(&server, &[web(&[1, 2])]);
    node.wait_until_active(&[other(), web(&[1, 2])]);

    // An outage, during which much changes and the history is compacted.
    server.stop();
    node.wait_until_logged(&["the last state stays active"]);
    assert_eq!(node.dump(Build::Product).unwrap(), expected_dump(&[other(), web(&[1, 2])]));
    connection.ping().unwrap();
    assert_eq!(node.agent().count_logged("cannot follow the API server"), 1, "once for all resources");
    let new = || service("new", [10, 96, 0, 12], &[2]);
    set(&server, &[web(&[3]), new()]);
    server.delete(Resource::Services, "default/other");
    server.compact();
    server.resume().unwrap();
    let after = [new(), web(&[3])];
    node.wait_until_active(&after);
    node.wait_until_logged(&["following the API server again"]);
    connection.ping().unwrap();

    // A start during an outage leaves the kernel state as it is.
    node.kill();
    server.stop();
    node.start_inactive(&command(&node, &server));
    node.wait_until_logged(&["there is no state yet"]);
    assert_eq!(node.dump(Build::Product).unwrap(), expected_dump(&after));
    connection.ping().unwrap();
    server.resume().unwrap();
    node.wait_until_logged(&[APPLIED]);
    node.wait_until_active(&after);

    load.stop_without_failure(100);
    node.terminate();
}

#[test]
fn a_missing_node_object_is_answered_as_by_kube_proxy() {
    let Some(mut node) = TestNode::or_skip() else { return };
    let server = ApiServer::start(Settings::default()).unwrap();
    set(&server, &[web(&[1])]);
    node.start_with(&command(&node, &server));
    let healthz = |status| move |_: &TestNode| http::health_status("/healthz") == status;
    // It never existed.
    node.wait_until(|_| http::is_ready());
    node.wait_until(healthz(503));
    set_node(&server, &manifest::node(NODE));
    node.wait_until(healthz(200));
    // It is deleted, which the proxy knows when it serves the Service that came after that.
    server.delete(Resource::Nodes, NODE);
    set(&server, &[service("other", [10, 96, 0, 11], &[1])]);
    node.wait_until_logged(&["no Node object has this name"]);
    node.wait_until_active(&[service("other", [10, 96, 0, 11], &[1]), web(&[1])]);
    assert_eq!(http::health_status("/healthz"), 200);
    node.terminate();
}

#[test]
fn a_node_watches_its_own_node_object_and_a_brain_of_many_nodes_watches_all() {
    let cases: [(&[&str], bool); 3] =
        [(&[], true), (&["--watch-all-nodes"], false), (&["--serve-any-node"], false)];
    for (arguments, is_selected) in cases {
        let server = ApiServer::start(Settings::default()).unwrap();
        for name in [NODE, "n2"] {
            set_node(&server, &manifest::node(name));
        }
        let folder = tempfile::tempdir().unwrap();
        let socket = format!("unix://{}", folder.path().join("brain.sock").display());
        let mut brain = Command::new(Build::Product.binary());
        brain.args(["brain", "--source", "kube", "--node-name", NODE, "--listen", &socket]).args(arguments);
        brain.args(["--kube-api-server", &server.url()]).env_remove("KUBECONFIG").stderr(Stdio::null());
        let _brain = KilledOnDrop(brain.spawn().unwrap());
        // A peer that does not know all Nodes has no cluster state: its state of the one node is followed instead.
        let mut print = Command::new(Build::Product.binary());
        print.args(["print", "--once", "--node-name", NODE, "--source", &format!("api:{socket}")]);
        let stderr = run(&mut print).exits_with(0);
        assert_eq!(stderr.contains("the cluster state is not available"), is_selected, "{stderr}");
        let requests = server.requests();
        let nodes: Vec<_> = requests.iter().filter(|it| it.starts_with("/api/v1/nodes?")).collect();
        let has_selector = |it: &&String| it.contains("fieldSelector=metadata.name%3Dn1");
        assert!(!nodes.is_empty() && nodes.iter().all(|it| has_selector(it) == is_selected), "{nodes:?}");
    }
}

#[test]
fn without_an_api_server_every_page_says_what_the_kernel_still_serves() {
    let Some(mut node) = TestNode::serving_or_skip([1]) else { return };
    let mut server = server_with_node(Settings::default());
    set(&server, &[web(&[1]), service("other", [10, 96, 0, 11], &[1]).port("tls", "TCP", 443, 8080)]);
    let command = command(&node, &server);
    node.start_with(&command);
    node.terminate();
    server.stop();
    node.start_inactive(&command);
    let readyz = || http::health("/readyz").map(|it| it.body).unwrap_or_default();
    node.wait_until(|_| readyz().contains("the kernel serves 2 Services of the last state"));
    let body = readyz();
    assert_contains(&body, &["[-]source-services failed: not synced yet", "[+]programs ok"]);
    assert_contains(&body, &["[-]state failed: no state received yet"]);
    let output = |node: &TestNode, command: &str| {
        let output = run(&mut node.cli(command));
        output.stdout.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let address = format!("({}", server.url());
    for (command, texts) in [
        ("status", ["has received no state since its start", "the kernel serves 2 Services", &address]),
        (
            "check",
            ["has received no state for node n1 since its start", "the kernel serves 2 Services", &address],
        ),
    ] {
        let text = output(&node, command);
        assert_contains(&text, &texts);
        assert!(!text.contains("0 Services") && !text.contains("healthy"), "{text}");
    }
    // An outage after that: the address, and when the server was heard last.
    server.resume().unwrap();
    node.wait_until_logged(&[APPLIED]);
    server.stop();
    node.wait_until(|node| output(node, "status").contains("no connection to the API server"));
    for command in ["status", "check"] {
        assert_contains(&output(&node, command), &[&format!("{address}, last contact")]);
    }
    assert!(output(&node, "status").contains("n1: healthy"));
    node.terminate();
}

#[test]
fn a_health_check_port_in_use_is_an_event_of_its_service() {
    let Some(mut node) = TestNode::or_skip() else { return };
    let occupied = TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)).unwrap();
    let port = occupied.local_addr().unwrap().port();
    let server = server_with_node(Settings::default());
    let web = web(&[1]).load_balancer_ips(&[[203, 0, 113, 1].into()]);
    set(&server, &[web.external_local().health_check_node_port(port)]);
    node.start_with(&command(&node, &server));
    node.wait_until(|_| !server.events().is_empty());
    let event = &server.events()[0];
    let field = |key: &str| event[key].as_str().unwrap_or_default().to_owned();
    assert_eq!([field("type"), field("reason")], ["Warning", "FailedToStartServiceHealthcheck"]);
    assert_eq!(event["regarding"]["kind"], "Service");
    assert_eq!(event["regarding"]["name"], "web");
    let begin = format!("node {NODE} failed to start healthcheck \"default/web\" on port {port}: ");
    assert!(field("note").starts_with(&begin), "{event}");
    // The bind is retried, and reported once.
    drop(occupied);
    node.wait_until(|_| http::get((Ipv4Addr::LOCALHOST, port).into(), "/").is_ok());
    assert_eq!(server.events().len(), 1, "{:?}", server.events());
}

#[test]
fn ejections_and_ignored_annotations_are_events_of_their_service() {
    let Some(mut node) = TestNode::or_skip() else { return };
    // Endpoint 2 refuses.
    node.serve([1]);
    let settings = Settings { accepts_events: false, ..Settings::default() };
    let server = server_with_node(settings);
    let web = |endpoints: &[u8]| web(endpoints).annotation("kube-proxy-ebpf.io/drian", "30s");
    // That of another node is posted there.
    let elsewhere = Service::new("elsewhere", &[[10, 96, 0, 12].into()]).port("tcp", "TCP", 80, 8080);
    let elsewhere = elsewhere.endpoint_on("n2", "web-3", &[[10, 244, 2, 3].into()]);
    set(&server, &[web(&[1, 2]), elsewhere.annotation("kube-proxy-ebpf.io/drian", "30s")]);
    node.start_with(&command(&node, &server).args(FOR_EVER));
    // Without the right, Services are served all the same.
    node.wait_until_logged(&["cannot post the event", "InvalidAnnotation", "grant create of events"]);
    let status = run(&mut node.cli("status")).success();
    assert_contains(&status, &["did you mean kube-proxy-ebpf.io/drain?"]);

    server.configure(|it| it.accepts_events = true);
    let late = service("late", [10, 96, 0, 11], &[1]);
    set(&server, &[late.annotation("kube-proxy-ebpf.io/passive_health", "on")]);
    let events = |reason: &str| {
        let mut all = server.events();
        all.retain(|it| it["reason"] == reason);
        all
    };
    let (mut refused, mut connects) = (0, 0);
    while refused < 3 && connects < 1_000 {
        refused += usize::from(TcpStream::connect(FRONTEND).is_err());
        connects += 1;
    }
    node.wait_until(|_| !events("EndpointEjected").is_empty());
    set(&server, &[web(&[1])]);
    node.wait_until(|_| !events("EndpointReturned").is_empty());
    for (reason, kind, note) in [
        ("EndpointEjected", "Warning", "avoid for a time 1 endpoint: 10.244.1.2:8080 (port tcp)"),
        ("EndpointReturned", "Normal", "no longer avoid 1 endpoint: 10.244.1.2:8080 (port tcp)"),
    ] {
        let events = events(reason);
        assert_eq!(events.len(), 1, "{events:?}");
        let event = &events[0];
        assert_eq!([&event["type"], &event["regarding"]["name"]], [kind, "web"]);
        assert!(event["note"].as_str().unwrap().contains(note), "{event}");
    }
    node.wait_until(|_| !events("InvalidAnnotation").is_empty());
    let ignored = events("InvalidAnnotation");
    assert_eq!(ignored.len(), 1, "one was refused, and one is another node's: {ignored:?}");
    assert_eq!(ignored[0]["regarding"]["name"], "late");
    let note = ignored[0]["note"].to_string();
    assert_contains(&note, &["did you mean kube-proxy-ebpf.io/passive-health?"]);
    assert_eq!(node.agent().count_logged("cannot post the event"), 1);
    node.terminate();
}

#[test]
fn a_service_that_does_not_fit_into_its_namespace_is_reported_and_not_served() {
    let Some(mut node) = TestNode::serving_or_skip([1]) else { return };
    let server = server_with_node(Settings::default());
    const ADDRESS: [u8; 4] = [10, 96, 0, 12];
    // By age, and then by name, it comes after the other one.
    let zoo = |endpoints: &[u8]| service("zoo", ADDRESS, endpoints);
    set(&server, &[web(&[1]), zoo(&[1, 2, 3])]);
    node.start_with(&command(&node, &server).args(["--max-namespace-entries=5"]));
    TcpStream::connect(FRONTEND).unwrap();
    node.wait_until_logged(&["not served item=Service default/zoo reason=its 4 entries", "may have 5"]);
    node.wait_until(|_| metric("kube_proxy_ebpf_namespace_entries") == Some(6.0));
    let explained = run(node.cli("explain").args(["node", "10.96.0.12:80"])).stdout;
    assert_contains(&explained, &["zoo does not fit into its namespace"]);
    node.wait_until(|_| !server.events().is_empty());
    let event = &server.events()[0];
    assert_eq!([&event["reason"], &event["regarding"]["name"]], ["NamespaceOverLimit", "zoo"]);
    set(&server, &[zoo(&[1, 2])]);
    node.wait_until(|_| TcpStream::connect((Ipv4Addr::from(ADDRESS), 80)).is_ok());
    node.terminate();
}

const PRINT: [&str; 6] = ["print", "--once", "--source", "kube", "--node-name", NODE];

/// Runs `print --once` at an API server.
fn print(arguments: &[&str]) -> Output {
    let mut command = Command::new(Build::Product.binary());
    run(command.args(PRINT).args(arguments).env_remove("KUBECONFIG").env_remove("KUBERNETES_SERVICE_HOST"))
}

#[track_caller]
fn assert_fails_with_one_line(Output { code, stderr, .. }: &Output, text: &str) {
    assert_ne!(*code, Some(0));
    assert!(stderr.contains(text), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
}

#[test]
fn an_unusable_kubeconfig_ends_the_command_with_one_line() {
    let missing = print(&["--kubeconfig", "/no/such/file"]);
    assert_fails_with_one_line(&missing, "kubeconfig /no/such/file: No such file");
    let none = print(&[]);
    assert_ne!(none.code, Some(0));
    assert!(none.stderr.contains("--kubeconfig or --kube-api-server"), "{}", none.stderr);
}

/// Executes a command with the files of `$1` at the paths that a pod has.
const AS_A_POD: &str = "mount -t tmpfs tmpfs /run && mkdir -p /run/secrets/kubernetes.io/serviceaccount \
    && cp \"$1\"/* /run/secrets/kubernetes.io/serviceaccount && shift && exec \"$@\"";

/// Runs `print --once` in a pod with these files, whose environment names this API server.
fn print_in_a_pod(files: &Path, server: &ApiServer, arguments: &[&str]) -> Output {
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", AS_A_POD, "pod"]).arg(files).arg(Build::Product.binary());
    let url = server.url();
    let (host, port) = url.trim_start_matches("https://").split_once(':').unwrap();
    command.args(PRINT).args(arguments).env_remove("KUBECONFIG");
    run(command.env("KUBERNETES_SERVICE_HOST", host).env("KUBERNETES_SERVICE_PORT", port))
}

#[test]
fn a_pod_uses_the_api_server_of_its_cluster() {
    let Some(node) = TestNode::or_skip() else { return };
    let server = secure_server();
    set(&server, &[web(&[1])]);
    let folder = node.sandbox().files().join("service-account");
    fs::create_dir(&folder).unwrap();
    server.kubeconfig(&folder).unwrap();
    fs::remove_file(folder.join("kubeconfig")).unwrap();
    fs::write(folder.join("namespace"), "kube-system").unwrap();
    assert_contains(&print_in_a_pod(&folder, &server, &[]).success(), &["10.96.0.10", "10.244.1.1"]);

    // The address in the environment is the Service's, which may not be translated yet; a flag names the server itself.
    let other = ApiServer::start(Settings { is_tls: true, ..Settings::default() }).unwrap();
    let text = print_in_a_pod(&folder, &other, &["--master", &server.url()]).success();
    assert_contains(&text, &["10.244.1.1"]);

    fs::remove_file(folder.join("token")).unwrap();
    let output = print_in_a_pod(&folder, &server, &[]);
    assert_fails_with_one_line(&output, "serviceaccount/token: No such file");
}
