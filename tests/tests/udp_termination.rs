//! Connected UDP sockets whose endpoint does not serve any more are ended, and no others.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    io::{self, ErrorKind},
    net::{IpAddr, SocketAddr, UdpSocket},
    process::{Child, Command},
    time::Duration,
};

use rustix::thread::CapabilitySet;
use tests::{
    Agent, Build, EchoServer, NetNs, TestNode, Transport, deploy, eventually, manifest::Service, request,
    sandbox::skip, test_node::expected_dump,
};

const LIMIT: Duration = Duration::from_secs(20);

fn web_ips() -> [IpAddr; 2] {
    [[10, 96, 0, 10].into(), [0xfd00, 0x10, 0x96, 0, 0, 0, 0, 0x10].into()]
}

fn endpoint(n: u16) -> [IpAddr; 2] {
    [[10, 244, 1, n as u8].into(), [0xfd00, 0x10, 0x244, 0, 0, 0, 1, n].into()]
}

fn web(endpoints: &[u16]) -> Service {
    let web = Service::new("web", &web_ips()).port("tcp", "TCP", 80, 8080).port("udp", "UDP", 80, 8080);
    endpoints.iter().fold(web, |web, n| web.endpoint(&format!("web-{n}"), &endpoint(*n)))
}

/// Every way to write web's address.
fn addresses() -> [SocketAddr; 3] {
    let [v4, v6] = web_ips();
    let IpAddr::V4(inner) = v4 else { unreachable!("the first is of IPv4") };
    [v4, v6, inner.to_ipv6_mapped().into()].map(|ip| SocketAddr::new(ip, 80))
}

struct Node {
    _servers: Vec<EchoServer>,
    agent: Option<Agent>,
    world: TestNode,
}

impl Node {
    fn or_skip(test: &str) -> Option<Self> {
        let world = TestNode::or_skip(test)?;
        if !has_destroy() {
            skip(test, "this kernel cannot end sockets: CONFIG_INET_DIAG_DESTROY");
            return None;
        }
        let servers = (1..=2).flat_map(|n| endpoint(n).map(|ip| (n, ip)));
        let servers = servers.map(|(n, ip)| {
            if ip.is_ipv6() {
                world.netns().add_address(ip).unwrap();
            }
            EchoServer::start(&format!("web-{n}"), SocketAddr::new(ip, 8080)).unwrap()
        });
        Some(Self { _servers: servers.collect(), agent: None, world })
    }

    fn start(&mut self, endpoints: &[u16], arguments: &[&str], more: CapabilitySet) {
        self.world.write(&[web(endpoints)]);
        let setting = self.world.command(Build::Product).capabilities(deploy::capabilities().unwrap() | more);
        let setting = arguments.iter().fold(setting, tests::agent::AgentCommand::arg);
        let mut agent = setting.start(self.world.sandbox()).unwrap();
        let log = agent.log_path().to_owned();
        agent
            .wait_until(LIMIT, || std::fs::read_to_string(&log).is_ok_and(|it| it.contains("state active")))
            .unwrap();
        self.agent = Some(agent);
    }

    fn scale(&mut self, endpoints: &[u16]) {
        self.world.write(&[web(endpoints)]);
        let expected = expected_dump(&[web(endpoints)]);
        let Self { agent, world, .. } = self;
        let is_in_force = || world.dump(Build::Product).is_ok_and(|it| it == expected);
        agent.as_mut().unwrap().wait_until(LIMIT, is_in_force).unwrap();
    }
}

/// Whether this kernel was built with it, as far as it says.
fn has_destroy() -> bool {
    let config =
        Command::new("sh").args(["-c", "zcat /proc/config.gz || cat /boot/config-$(uname -r)"]).output();
    let config = config.map(|it| String::from_utf8_lossy(&it.stdout).into_owned()).unwrap_or_default();
    config.is_empty() || config.contains("CONFIG_INET_DIAG_DESTROY=y")
}

/// A connected socket, and who is at its other end.
struct Flow {
    socket: UdpSocket,
    to: SocketAddr,
    answerer: String,
}

impl Flow {
    fn new(to: SocketAddr) -> Self {
        let socket = UdpSocket::bind(if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
        let mut flow = Self { socket, to, answerer: String::new() };
        flow.connect();
        flow
    }

    fn connect(&mut self) {
        self.socket.connect(self.to).unwrap();
        self.answerer = self.ask().unwrap();
    }

    fn ask(&self) -> io::Result<String> {
        self.socket.send(b"who?")?;
        let mut answer = [0; 64];
        let length = self.socket.recv(&mut answer)?;
        Ok(String::from_utf8_lossy(&answer[..length]).into_owned())
    }

    /// Waits for the end: the errors that the program gets.
    #[track_caller]
    fn wait_for_end(&self) {
        self.socket.set_read_timeout(Some(LIMIT)).unwrap();
        let error = self.socket.recv(&mut [0; 64]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionAborted, "{} {error}", self.to);
        let error = self.socket.send(b"who?").unwrap_err();
        assert_eq!(error.raw_os_error(), Some(nix::libc::EDESTADDRREQ), "{} {error}", self.to);
        self.socket.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    }
}

/// Enough to have both endpoints.
fn flows() -> Vec<Flow> {
    let flows: Vec<_> = addresses().into_iter().flat_map(|it| [it; 12]).map(Flow::new).collect();
    for name in ["web-1", "web-2"] {
        assert!(flows.iter().any(|it| it.answerer == name));
    }
    flows
}

/// Those of endpoint 1 end and find the other; all others go on, untouched.
fn check(flows: &mut [Flow]) {
    for flow in flows.iter_mut() {
        if flow.to.port() == 80 && flow.answerer == "web-1" {
            flow.wait_for_end();
            flow.connect();
            assert_eq!(flow.answerer, "web-2");
            assert_eq!(flow.socket.peer_addr().unwrap(), flow.to);
        }
    }
    for flow in flows.iter() {
        assert_eq!(flow.ask().unwrap(), flow.answerer, "{}", flow.to);
    }
}

#[test]
fn connected_udp_is_ended_with_its_endpoint() {
    // With slots for all of them, and with slots for two.
    for arguments in [&[][..], &["--socket-slots", "2"]] {
        let Some(mut node) = Node::or_skip("connected_udp_is_ended_with_its_endpoint") else { return };
        node.start(&[1, 2], arguments, CapabilitySet::empty());
        let mut flows = flows();
        // Straight to the pod: nobody's business.
        flows.extend(endpoint(1).map(|ip| Flow::new(SocketAddr::new(ip, 8080))));
        node.scale(&[1, 2, 3]);
        node.scale(&[2]);
        check(&mut flows);
        // What stays stays, whatever else changes.
        node.scale(&[2, 1]);
        for flow in &flows {
            assert_eq!(flow.ask().unwrap(), flow.answerer);
        }
    }
}

#[test]
fn connected_udp_is_ended_though_its_endpoint_went_while_there_was_no_proxy() {
    let Some(mut node) =
        Node::or_skip("connected_udp_is_ended_though_its_endpoint_went_while_there_was_no_proxy")
    else {
        return;
    };
    node.start(&[1, 2], &[], CapabilitySet::empty());
    let mut flows = flows();
    node.agent.take().unwrap().kill9().unwrap();
    assert!(flows.iter().all(|it| it.ask().is_ok()));
    node.start(&[2], &[], CapabilitySet::empty());
    check(&mut flows);
}

/// A process that does nothing, inside a namespace.
struct Pod(Child);

impl Drop for Pod {
    fn drop(&mut self) {
        // It may be gone already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn connected_udp_of_pods_is_ended_where_namespaces_may_be_entered() {
    let Some(mut node) = Node::or_skip("connected_udp_of_pods_is_ended_where_namespaces_may_be_entered")
    else {
        return;
    };
    // To look at the namespace of another process takes the second.
    node.start(&[1, 2], &[], CapabilitySet::SYS_ADMIN | CapabilitySet::SYS_PTRACE);
    let namespace = NetNs::new().unwrap();
    namespace.ip(&["route", "add", "local", "10.244.0.0/16", "dev", "lo"]).unwrap();
    let inside = namespace.enter().unwrap();
    let _pod = Pod(Command::new("sleep").arg("600").spawn().unwrap());
    let _servers = [1, 2]
        .map(|n| EchoServer::start(&format!("web-{n}"), SocketAddr::new(endpoint(n)[0], 8080)).unwrap());
    let mut flows: Vec<_> = [addresses()[0]; 24].map(Flow::new).into();
    flows.push(Flow::new(SocketAddr::new(endpoint(1)[0], 8080)));
    drop(inside);
    assert!(eventually(LIMIT, || request(Transport::Udp, addresses()[0]).is_ok()));
    node.scale(&[2]);
    let _inside = namespace.enter().unwrap();
    check(&mut flows);
}
