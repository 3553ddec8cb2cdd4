//! Connected UDP sockets are terminated when their endpoint is removed, and no others.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    io::ErrorKind,
    net::{SocketAddr, UdpSocket},
    process::{Child, Command},
};

use rustix::thread::CapabilitySet;
use tests::{
    Build, EchoServer, NetNs, TIMEOUT, TestNode, Transport, agent,
    client::{exchange_connected, udp_socket},
    deploy, eventually,
    fixtures::{endpoint, web, web_frontends},
    request, skip,
};

/// A node with two endpoints' servers.
fn node_or_skip() -> Option<TestNode> {
    let mut node = TestNode::or_skip()?;
    if !has_destroy() {
        skip("this kernel cannot terminate sockets: CONFIG_INET_DIAG_DESTROY");
        return None;
    }
    node.serve([1, 2]);
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
        let Some(mut node) = node_or_skip() else { return };
        node.write(&[web([1, 2])]);
        node.start(arguments);
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
    let Some(mut node) = node_or_skip() else { return };
    node.write(&[web([1, 2])]);
    node.start(&[]);
    let mut flows = flows();
    node.kill();
    flows.iter().for_each(Flow::works);
    node.write(&[web([2])]);
    node.start(&[]);
    check(&mut flows);
}

/// An idle process in a network namespace.
struct Pod(Child);

impl Drop for Pod {
    fn drop(&mut self) {
        // Both fail if it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn connected_udp_of_pods_is_terminated_with_cap_sys_admin() {
    let Some(mut node) = node_or_skip() else { return };
    node.write(&[web([1, 2])]);
    // CAP_SYS_PTRACE is needed to open the namespace of another process.
    let capabilities = deploy::capabilities().unwrap() | CapabilitySet::SYS_ADMIN | CapabilitySet::SYS_PTRACE;
    node.start_with(&node.command(Build::Product).capabilities(capabilities));
    let namespace = NetNs::with_local_endpoints().unwrap();
    let [frontend, ..] = web_frontends();
    let inside = namespace.enter().unwrap();
    let _pod = Pod(Command::new("sleep").arg("600").spawn().unwrap());
    let _servers = [1, 2]
        .map(|n| EchoServer::start(&format!("web-{n}"), SocketAddr::new(endpoint(n)[0], 8080)).unwrap());
    let mut flows: Vec<_> = [frontend; 24].map(Flow::new).into();
    flows.push(Flow::new(SocketAddr::new(endpoint(1)[0], 8080)));
    drop(inside);
    assert!(eventually(TIMEOUT, || request(Transport::Udp, frontend).is_ok()));
    node.apply(&[web([2])]);
    let _inside = namespace.enter().unwrap();
    check(&mut flows);
}
