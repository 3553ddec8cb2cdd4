//! The kernel follows an API server, and goes on without it.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    ffi::OsStr,
    fs,
    net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener},
    path::Path,
    process::Command,
    time::Duration,
};

use api_server::{ApiServer, Fault, Resource, Settings, Verb};
use tests::{
    Agent, Build, ConnectLoad, EchoConnection, EchoServer, TestNode, Transport,
    agent::AgentCommand,
    load::LoadReport,
    manifest::{self, Service},
    scaled,
    test_node::{NODE, expected_dump},
};

const LIMIT: Duration = Duration::from_secs(30);

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn web() -> SocketAddr {
    SocketAddr::new(ip("10.96.0.10"), 80)
}

fn endpoint(n: u8) -> IpAddr {
    ip(&format!("10.244.1.{n}"))
}

/// A Service of one port with these endpoints.
fn service(name: &str, address: IpAddr, endpoints: &[u8]) -> Service {
    let service = Service::new(name, &[address]).port("tcp", "TCP", 80, 8080);
    endpoints.iter().fold(service, |it, n| it.endpoint(&format!("e{n}"), &[endpoint(*n)]))
}

/// Tells the server of Services and their slices.
fn tell(server: &ApiServer, services: &[Service]) {
    for it in services {
        for document in [it.service(), it.slices()] {
            server.set(serde_saphyr::from_str(&document).unwrap());
        }
    }
}

fn start(world: &TestNode, kubeconfig: &Path) -> Agent {
    let sandbox = world.sandbox();
    let arguments: [&OsStr; 11] = [
        "run".as_ref(),
        "--source".as_ref(),
        "kube".as_ref(),
        "--kubeconfig".as_ref(),
        kubeconfig.as_ref(),
        "--node-name".as_ref(),
        NODE.as_ref(),
        "--cgroup".as_ref(),
        sandbox.cgroup().as_ref(),
        "--pin-dir".as_ref(),
        sandbox.pins().as_ref(),
    ];
    AgentCommand::new(&Build::Product.binary(), &arguments).start(sandbox).unwrap()
}

#[track_caller]
fn comes_to(world: &TestNode, agent: &mut Agent, services: &[Service]) {
    let expect = expected_dump(services);
    let log = agent.log_path().to_owned();
    // The programs are attached after the first state has been written.
    let is_attached = || fs::read_to_string(&log).is_ok_and(|it| it.contains("state active"));
    let is_so = || is_attached() && world.dump(Build::Product).is_ok_and(|it| it == expect);
    agent.wait_until(LIMIT, is_so).unwrap();
}

#[track_caller]
fn says(agent: &mut Agent, what: &str) {
    let log = agent.log_path().to_owned();
    agent.wait_until(LIMIT, || fs::read_to_string(&log).is_ok_and(|it| it.contains(what))).unwrap();
}

#[test]
fn the_kernel_follows_an_api_server_and_goes_on_without_it() {
    let Some(world) = TestNode::or_skip("the_kernel_follows_an_api_server_and_goes_on_without_it") else {
        return;
    };
    let _servers: Vec<_> = (1..=3)
        .map(|n| EchoServer::start(&n.to_string(), SocketAddr::new(endpoint(n), 8080)).unwrap())
        .collect();
    let settings = Settings { is_tls: true, token: Some("secret".into()), ..Settings::default() };
    let mut server = ApiServer::start(settings).unwrap();
    server.set(serde_saphyr::from_str(&manifest::node(NODE)).unwrap());
    let other = || service("other", ip("10.96.0.11"), &[3]);
    tell(&server, &[other(), service("web", web().ip(), &[1])]);
    let kubeconfig = server.kubeconfig(world.sandbox().files()).unwrap();
    let mut agent = start(&world, &kubeconfig);
    comes_to(&world, &mut agent, &[other(), service("web", web().ip(), &[1])]);
    let mut connection = EchoConnection::connect(web()).unwrap();
    let load = ConnectLoad::start(Transport::Tcp, web(), 1, scaled(Duration::from_millis(1)));

    tell(&server, &[service("web", web().ip(), &[1, 2])]);
    comes_to(&world, &mut agent, &[other(), service("web", web().ip(), &[1, 2])]);

    // It goes away; much happens, and is forgotten; it comes back.
    server.stop();
    says(&mut agent, "stays active; retrying in");
    assert_eq!(
        world.dump(Build::Product).unwrap(),
        expected_dump(&[other(), service("web", web().ip(), &[1, 2])])
    );
    connection.ping().unwrap();
    tell(&server, &[service("web", web().ip(), &[3]), service("new", ip("10.96.0.12"), &[2])]);
    server.delete(Resource::Services, "default/other");
    server.compact();
    server.resume().unwrap();
    let after = [service("new", ip("10.96.0.12"), &[2]), service("web", web().ip(), &[3])];
    comes_to(&world, &mut agent, &after);
    connection.ping().unwrap();

    // A start while it is away leaves the kernel as it is.
    agent.kill9().unwrap();
    server.stop();
    let mut agent = start(&world, &kubeconfig);
    says(&mut agent, "there is no cluster state yet");
    assert_eq!(world.dump(Build::Product).unwrap(), expected_dump(&after));
    connection.ping().unwrap();
    server.resume().unwrap();
    says(&mut agent, "state active");
    comes_to(&world, &mut agent, &after);

    let report = LoadReport::of(&load.stop());
    assert_eq!(report.failed, 0, "{:?}", report.errors);
    assert!(report.connects > 100);
    assert!(agent.terminate().unwrap().success());
}

#[test]
fn a_health_check_port_in_use_is_an_event_beside_its_service() {
    let Some(world) = TestNode::or_skip("a_health_check_port_in_use_is_an_event_beside_its_service") else {
        return;
    };
    let occupied = TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)).unwrap();
    let port = occupied.local_addr().unwrap().port();
    let server = ApiServer::start(Settings::default()).unwrap();
    server.set(serde_saphyr::from_str(&manifest::node(NODE)).unwrap());
    let balanced = service("web", web().ip(), &[1]).load_balancer_ips(&[ip("203.0.113.1")]);
    tell(&server, &[balanced.external_local().health_check_node_port(port)]);
    let kubeconfig = server.kubeconfig(world.sandbox().files()).unwrap();
    let mut agent = start(&world, &kubeconfig);
    agent.wait_until(LIMIT, || !server.events().is_empty()).unwrap();
    let event = &server.events()[0];
    let said = |key: &str| event[key].as_str().unwrap_or_default().to_owned();
    assert_eq!(
        (said("type").as_str(), said("reason").as_str()),
        ("Warning", "FailedToStartServiceHealthcheck")
    );
    assert_eq!(
        (&event["regarding"]["kind"], &event["regarding"]["name"]),
        (&"Service".into(), &"web".into())
    );
    let begin = format!("node {NODE} failed to start healthcheck \"default/web\" on port {port}: ");
    assert!(said("note").starts_with(&begin), "{event}");
    // It is tried again and again, and told of once.
    drop(occupied);
    let check = SocketAddr::new(ip("127.0.0.1"), port);
    agent.wait_until(LIMIT, || tests::http::get(check, "/").is_ok()).unwrap();
    assert_eq!(server.events().len(), 1, "{:?}", server.events());
}

/// `print --once` at a server, and what it printed and said.
fn print(arguments: &[&OsStr]) -> (bool, String, String) {
    let mut command = Command::new(Build::Product.binary());
    command.args(["print", "--once", "--source", "kube", "--node-name", NODE]).args(arguments);
    command.env_remove("KUBECONFIG").env_remove("KUBERNETES_SERVICE_HOST");
    said(command)
}

/// Whether it went well, what it printed, and what it said.
fn said(mut command: Command) -> (bool, String, String) {
    let output = command.output().unwrap();
    let [out, err] = [output.stdout, output.stderr].map(|it| String::from_utf8(it).unwrap());
    (output.status.success(), out, err)
}

#[test]
fn print_shows_what_an_api_server_says() {
    let server = ApiServer::start(Settings::default()).unwrap();
    tell(&server, &[service("web", web().ip(), &[1])]);
    server.inject_fault(
        Resource::Nodes,
        Verb::Watch,
        1,
        Fault::Status { code: 403, message: "not yet".into(), retry_after: None },
    );
    let (is_well, out, err) = print(&["--master".as_ref(), server.url().as_ref()]);
    assert!(is_well, "{err}");
    assert!(out.contains("10.96.0.10") && out.contains("10.244.1.1"), "{out}");
    assert!(err.contains("nodes: 403 Forbidden: not yet"), "{err}");
}

#[test]
fn a_kubeconfig_that_cannot_be_used_ends_the_command_with_one_line() {
    let (is_well, _, err) = print(&["--kubeconfig".as_ref(), "/no/such/file".as_ref()]);
    assert!(!is_well);
    assert!(err.contains("kubeconfig /no/such/file: No such file"), "{err}");
    assert_eq!(err.lines().count(), 1, "{err}");
    let (is_well, _, err) = print(&[]);
    assert!(!is_well);
    assert!(err.contains("--kubeconfig or --kube-api-server"), "{err}");
}

/// Runs a command where a pod's files are where a pod finds them.
const AS_A_POD: &str = "mount -t tmpfs tmpfs /run && mkdir -p /run/secrets/kubernetes.io/serviceaccount \
    && cp \"$1\"/* /run/secrets/kubernetes.io/serviceaccount && shift && exec \"$@\"";

/// `print --once` in a pod with these files, whose environment names this API server.
fn print_in_a_pod(files: &Path, server: &ApiServer, arguments: &[&str]) -> (bool, String, String) {
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", AS_A_POD, "pod"]).arg(files).arg(Build::Product.binary());
    command.args(["print", "--once", "--source", "kube", "--node-name", NODE]).args(arguments);
    let url = server.url();
    let (host, port) = url.trim_start_matches("https://").split_once(':').unwrap();
    command
        .env_remove("KUBECONFIG")
        .env("KUBERNETES_SERVICE_HOST", host)
        .env("KUBERNETES_SERVICE_PORT", port);
    said(command)
}

#[test]
fn a_pod_asks_the_api_server_of_its_cluster() {
    let Some(world) = TestNode::or_skip("a_pod_asks_the_api_server_of_its_cluster") else { return };
    let settings = Settings { is_tls: true, token: Some("secret".into()), ..Settings::default() };
    let server = ApiServer::start(settings).unwrap();
    tell(&server, &[service("web", web().ip(), &[1])]);
    let folder = world.sandbox().files().join("service-account");
    fs::create_dir(&folder).unwrap();
    server.kubeconfig(&folder).unwrap();
    fs::remove_file(folder.join("kubeconfig")).unwrap();
    fs::write(folder.join("namespace"), "kube-system").unwrap();
    let (is_well, out, err) = print_in_a_pod(&folder, &server, &[]);
    assert!(is_well, "{err}");
    assert!(out.contains("10.96.0.10") && out.contains("10.244.1.1"), "{out}");

    // Its environment names the Service's address, which may not be served yet; the server's own is another.
    let nobody = ApiServer::start(Settings { is_tls: true, ..Settings::default() }).unwrap();
    let (is_well, out, err) = print_in_a_pod(&folder, &nobody, &["--kube-api-server", &server.url()]);
    assert!(is_well && out.contains("10.244.1.1"), "{out}{err}");

    fs::remove_file(folder.join("token")).unwrap();
    let (is_well, _, err) = print_in_a_pod(&folder, &server, &[]);
    assert!(!is_well);
    assert!(err.contains("serviceaccount/token: No such file"), "{err}");
    assert_eq!(err.lines().count(), 1, "{err}");
}
