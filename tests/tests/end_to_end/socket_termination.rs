//! Connected UDP sockets are terminated when their endpoint is removed, TCP connections once their Service has drained, and no
//! others.

use std::{
    io::{ErrorKind, Read as _},
    net::{IpAddr, SocketAddr, UdpSocket},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use build_tools::command::KilledOnDrop;
use rustix::thread::CapabilitySet;
use tests::{
    AgentCommand, Build, EchoConnection, Service, TARGET_PORT, TIMEOUT, TestNode, Transport, agent, deploy,
    endpoint, eventually, exchange_connected, metric, pod_with_servers, request, scaled, skip, udp_socket,
    web, web_frontends,
};

/// A node with two endpoints' servers, and a proxy with this command line.
fn node_or_skip(
    services: &[Service],
    command: impl FnOnce(AgentCommand) -> AgentCommand,
) -> Option<TestNode> {
    let mut node = TestNode::prepared_or_skip([1, 2], services)?;
    if !has_destroy() {
        skip("this kernel cannot terminate sockets: CONFIG_INET_DIAG_DESTROY");
        return None;
    }
    node.start_with(&command(node.command(Build::Product)));
    Some(node)
}

/// Whether this kernel was built with CONFIG_INET_DIAG_DESTROY, if its configuration can be read.
fn has_destroy() -> bool {
    let config =
        agent::run(Command::new("sh").args(["-c", "zcat /proc/config.gz || cat /boot/config-$(uname -r)"]));
    config.stdout.is_empty() || config.stdout.contains("CONFIG_INET_DIAG_DESTROY=y")
}

/// A connected socket, and the name of its endpoint.
struct Flow {
    socket: UdpSocket,
    peer: SocketAddr,
    server: String,
}

impl Flow {
    fn new(peer: SocketAddr) -> Self {
        let mut flow = Self { socket: udp_socket(peer).unwrap(), peer, server: String::new() };
        flow.connect();
        flow
    }

    fn connect(&mut self) {
        self.socket.connect(self.peer).unwrap();
        self.server = exchange_connected(&self.socket).unwrap();
    }

    #[track_caller]
    fn works(&self) {
        assert_eq!(exchange_connected(&self.socket).unwrap(), self.server, "{}", self.peer);
    }

    /// Waits for the termination, and checks the errors that the program gets.
    #[track_caller]
    fn wait_for_termination(&self) {
        let timeout = self.socket.read_timeout().unwrap();
        self.socket.set_read_timeout(Some(TIMEOUT)).unwrap();
        let error = self.socket.recv(&mut [0; 64]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionAborted, "{} {error}", self.peer);
        let error = self.socket.send(b"who?").unwrap_err();
        assert_eq!(error.raw_os_error(), Some(nix::libc::EDESTADDRREQ), "{} {error}", self.peer);
        self.socket.set_read_timeout(timeout).unwrap();
    }
}

/// Enough flows to use both endpoints.
fn flows() -> Vec<Flow> {
    let flows: Vec<_> = web_frontends().into_iter().flat_map(|it| [it; 12]).map(Flow::new).collect();
    for name in ["web-1", "web-2"] {
        assert!(flows.iter().any(|it| it.server == name));
    }
    flows
}

/// Flows to endpoint 1 through the Service are terminated and reconnect to endpoint 2; all others still work.
fn check(flows: &mut [Flow]) {
    for flow in flows.iter_mut() {
        if flow.peer.port() == 80 && flow.server == "web-1" {
            flow.wait_for_termination();
            flow.connect();
            assert_eq!(flow.server, "web-2");
            assert_eq!(flow.socket.peer_addr().unwrap(), flow.peer);
        }
    }
    flows.iter().for_each(Flow::works);
}

#[test]
fn connected_udp_is_terminated_with_its_endpoint() {
    // With enough socket slots, and with two.
    for arguments in [&[][..], &["--socket-slots", "2"]] {
        let Some(mut node) = node_or_skip(&[web([1, 2])], |it| it.args(arguments)) else { return };
        let mut flows = flows();
        // A flow to the pod itself is never terminated.
        flows.extend(endpoint(1).map(|ip| Flow::new(SocketAddr::new(ip, 8080))));
        node.apply(&[web([1, 2, 3])]);
        node.apply(&[web([2])]);
        check(&mut flows);
        // Adding an endpoint terminates nothing.
        node.apply(&[web([2, 1])]);
        flows.iter().for_each(Flow::works);
    }
}

#[test]
fn connected_udp_is_terminated_if_its_endpoint_was_removed_without_a_proxy() {
    let Some(mut node) = node_or_skip(&[web([1, 2])], |it| it) else { return };
    let mut flows = flows();
    node.kill();
    flows.iter().for_each(Flow::works);
    node.write(&[web([2])]);
    node.start(&[]);
    check(&mut flows);
}

#[test]
fn sockets_of_pods_are_terminated_with_cap_sys_admin() {
    // CAP_SYS_PTRACE is needed to open the namespace of another process.
    let capabilities = deploy::capabilities().unwrap() | CapabilitySet::SYS_ADMIN | CapabilitySet::SYS_PTRACE;
    let privileged = |it: AgentCommand| it.capabilities(capabilities);
    let Some(mut node) = node_or_skip(&[web([1, 2]).drain(1)], privileged) else { return };
    let (namespace, _servers) = pod_with_servers([1, 2]);
    let [frontend, ..] = web_frontends();
    let inside = namespace.enter().unwrap();
    let _pod = KilledOnDrop(Command::new("sleep").arg("600").spawn().unwrap());
    let mut flows: Vec<_> = [frontend; 24].map(Flow::new).into();
    flows.push(Flow::new(SocketAddr::new(endpoint(1)[0], 8080)));
    let connection = connect_to(frontend, "web-1");
    drop(inside);
    assert!(eventually(TIMEOUT, || request(Transport::Udp, frontend).is_ok()));
    node.apply(&[web([2]).drain(1)]);
    let _inside = namespace.enter().unwrap();
    check(&mut flows);
    wait_for_end(&connection);
}

const DRAINED: &str = "kube_proxy_ebpf_tcp_connections_drained_total";

/// The Service `s-N` at 10.96.0.N:80, with TCP only.
fn service(n: u8, endpoints: impl IntoIterator<Item = u8>) -> Service {
    Service::new(&format!("s-{n}"), &[IpAddr::from([10, 96, 0, n])])
        .port("", "TCP", 80, TARGET_PORT)
        .endpoints(endpoints)
}

/// A connection to endpoint 1 through the Service `s-N`.
#[track_caller]
fn connect(n: u8) -> EchoConnection {
    connect_to(SocketAddr::from(([10, 96, 0, n], 80)), "web-1")
}

/// A connection to an address that this server serves.
#[track_caller]
fn connect_to(frontend: SocketAddr, server: &str) -> EchoConnection {
    let mut connections = (0..100).map(|_| EchoConnection::connect(frontend).unwrap());
    connections.find(|it| it.name() == server).unwrap()
}

#[track_caller]
fn wait_for_end(connection: &EchoConnection) {
    let mut stream = connection.stream();
    stream.set_read_timeout(Some(scaled(TIMEOUT))).unwrap();
    let error = stream.read(&mut [0; 64]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionAborted, "{error}");
}

#[test]
fn connections_end_once_the_service_has_drained() {
    const DRAIN: u32 = 2;
    // With enough socket slots, and with two.
    for arguments in [&[][..], &["--socket-slots", "2"]] {
        let services = [web([1, 2]).drain(DRAIN)];
        let Some(mut node) = node_or_skip(&services, |it| it.args(arguments)) else { return };
        let lost = web_frontends().map(|it| connect_to(it, "web-1"));
        // A connection to the pod itself is never ended.
        let mut direct = connect_to(SocketAddr::new(endpoint(1)[0], TARGET_PORT), "web-1");
        let mut other = connect_to(web_frontends()[1], "web-2");
        let left = Instant::now();
        node.apply(&[web([2]).drain(DRAIN)]);
        for it in &lost {
            wait_for_end(it);
            assert!(left.elapsed() >= Duration::from_secs(DRAIN.into()), "{:?}", left.elapsed());
        }
        node.wait_until(|_| metric(DRAINED) == Some(3.0));
        direct.ping().unwrap();
        other.ping().unwrap();
        assert_eq!(EchoConnection::connect(web_frontends()[0]).unwrap().name(), "web-2");
    }
}

/// Starts with Services, holds a connection to endpoint 1 through each, and applies the changes one after the other. By the end
/// of the last connection, those through the Services `kept` continue.
#[track_caller]
fn check_drained(before: &[Service], changes: &[(&[Service], &[Service])], ended: &[u8], kept: &[u8]) {
    let Some(mut node) = node_or_skip(before, |it| it) else { return };
    let ended: Vec<_> = ended.iter().map(|n| connect(*n)).collect();
    let mut kept: Vec<_> = kept.iter().map(|n| (n, connect(*n))).collect();
    for (services, selected) in changes {
        node.write(services);
        node.wait_until_active(selected);
    }
    ended.iter().for_each(wait_for_end);
    // The sockets of one pass are terminated in any order.
    thread::sleep(Duration::from_millis(300));
    for (n, connection) in &mut kept {
        connection.ping().unwrap_or_else(|error| panic!("s-{n}: {error}"));
    }
    node.wait_until(|_| metric(DRAINED) == Some(ended.len() as f64));
}

#[test]
fn connections_continue_without_the_annotation_and_while_their_endpoint_serves_unselected() {
    let drained = |n| service(n, [1, 2]).drain(1);
    let local = service(13, [2]).drain(1).internal_local().endpoint_on("n2", "web-1", &endpoint(1));
    let terminating = service(14, [1]).terminating().endpoints([2]).drain(1);
    let left = service(11, [2]).drain(1);
    let unannotated = service(12, [2]);
    check_drained(
        &[drained(11), service(12, [1, 2]), drained(13), drained(14)],
        &[(
            &[left.clone(), unannotated.clone(), local, terminating],
            &[left, unannotated, service(13, [2]), service(14, [2])],
        )],
        &[11],
        &[12, 13, 14],
    );
}

#[test]
fn connections_continue_if_their_endpoint_returns_or_the_annotation_is_removed_in_time() {
    let all = [11, 12, 13].map(|n| service(n, [1, 2]).drain(3));
    let without = [11, 12, 13].map(|n| service(n, [2]).drain(3));
    let last = [service(11, [2]).drain(3), service(12, [2, 1]).drain(3), service(13, [2])];
    check_drained(&all, &[(&without, &without), (&last, &last)], &[11], &[12, 13]);
}

#[test]
fn connections_of_a_deleted_service_end_once_it_has_drained() {
    let kept = [service(12, [1])];
    check_drained(&[service(11, [1]).drain(1), service(12, [1])], &[(&kept, &kept)], &[11], &[12]);
}

#[test]
fn connections_to_an_endpoint_that_was_removed_without_a_proxy_end_once_its_service_has_drained() {
    const DRAIN: u32 = 2;
    let services = |n| [service(11, [n, 2]).drain(DRAIN), service(12, [1, 2]).drain(DRAIN)];
    let Some(mut node) = node_or_skip(&services(1), |it| it) else { return };
    let lost = connect(11);
    let mut kept = connect(12);
    node.kill();
    node.write(&services(3));
    let started = Instant::now();
    node.start(&[]);
    wait_for_end(&lost);
    assert!(started.elapsed() >= Duration::from_secs(DRAIN.into()), "{:?}", started.elapsed());
    kept.ping().unwrap();
}
