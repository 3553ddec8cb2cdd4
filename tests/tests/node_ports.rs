//! Node ports as a program on the node, or in a pod, meets them: at whose addresses they serve, and that nobody binds them.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    io::{self, ErrorKind},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    thread,
    time::Duration,
};

use tests::{
    Agent, Build, EchoConnection, EchoServer, NetNs, TestNode, Transport,
    agent::AgentCommand,
    eventually,
    manifest::{self, Service},
    request,
    requirements::kernel_at_least,
    test_node::NODE,
};

const LIMIT: Duration = Duration::from_secs(10);
const PORT: u16 = 30_080;
const LOCAL_PORT: u16 = 30_090;
const ENDPOINTS: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::new(10, 244, 1, 1)), IpAddr::V6(Ipv6Addr::new(0xfd00, 0x10, 0x244, 0, 0, 0, 0, 1))];
/// On an interface of this node.
const OWN: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const OWN6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);
/// Said of this node by its Node object alone.
const OUTSIDE: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 1);
const OTHER: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);

struct Node {
    _servers: Vec<EchoServer>,
    _agent: Agent,
    world: TestNode,
}

impl Node {
    /// A node with a Service at the node port [`PORT`] of TCP and UDP, and one whose external policy is Local at
    /// [`LOCAL_PORT`] of TCP.
    fn or_skip(test: &str, arguments: &[&str]) -> Option<Self> {
        let world = TestNode::or_skip(test)?;
        for address in [IpAddr::from(OWN), OWN6.into(), ENDPOINTS[1]] {
            world.netns().add_address(address).unwrap();
        }
        let servers = ENDPOINTS.map(|it| EchoServer::start("web", SocketAddr::new(it, 8080)).unwrap()).into();
        let ips =
            |n: u8| [IpAddr::from([10, 96, 0, n]), [0xfd00, 0x10, 0x96, 0, 0, 0, 0, u16::from(n)].into()];
        let services = [
            Service::new("web", &ips(1))
                .port("tcp", "TCP", 80, 8080)
                .node_port(PORT)
                .port("udp", "UDP", 80, 8080)
                .node_port(PORT)
                .endpoint("web", &ENDPOINTS),
            Service::new("local", &ips(2))
                .port("tcp", "TCP", 80, 8080)
                .node_port(LOCAL_PORT)
                .external_local()
                .endpoint("web", &ENDPOINTS),
        ];
        let nodes = [
            manifest::node_with_addresses(NODE, &[OWN.into(), OUTSIDE.into()]),
            manifest::node_with_addresses("n2", &[OTHER.into()]),
        ];
        manifest::write_atomically(&world.manifests().join("nodes.yaml"), &nodes.join("---\n")).unwrap();
        world.write(&services);
        let setting = arguments.iter().fold(world.command(Build::Product), AgentCommand::arg);
        let mut agent = setting.start(world.sandbox()).unwrap();
        agent.wait_until(LIMIT, || world.is_attached()).unwrap();
        Some(Self { _servers: servers, _agent: agent, world })
    }
}

fn served(ip: impl Into<IpAddr>, port: u16) {
    let address = SocketAddr::new(ip.into(), port);
    let transports = if port == PORT {
        vec![Transport::Tcp, Transport::Udp, Transport::UdpUnconnected]
    } else {
        vec![Transport::Tcp]
    };
    for transport in transports {
        let answer = request(transport, address);
        assert_eq!(
            answer.as_ref().ok().map(String::as_str),
            Some("web"),
            "{transport:?} {address}: {answer:?}"
        );
    }
    assert_eq!(EchoConnection::connect(address).unwrap().stream().peer_addr().unwrap(), address);
}

#[track_caller]
fn untouched(ip: impl Into<IpAddr>, port: u16) {
    let error = TcpStream::connect((ip.into(), port)).unwrap_err();
    let errno = error.raw_os_error();
    assert!([Some(nix::libc::ENETUNREACH), Some(nix::libc::ECONNREFUSED)].contains(&errno), "{error}");
}

/// An older kernel tells nobody in which namespace he is: the first of all is taken for the node's, and this is another.
fn knows_its_namespace() -> bool {
    kernel_at_least(5, 14)
}

/// Does something in a network namespace of its own, which the endpoints' addresses lead to.
fn in_a_pod<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let pod = NetNs::new().unwrap();
    pod.ip(&["route", "add", "local", "10.244.0.0/16", "dev", "lo"]).unwrap();
    thread::scope(|scope| {
        let inside = scope.spawn(|| {
            let _inside = pod.enter().unwrap();
            work()
        });
        inside.join().unwrap()
    })
}

#[test]
fn a_node_port_is_served_at_every_address_of_the_node() {
    let Some(node) = Node::or_skip("a_node_port_is_served_at_every_address_of_the_node", &[]) else { return };
    for port in [PORT, LOCAL_PORT] {
        served(OWN, port);
        served(OWN.to_ipv6_mapped(), port);
        served(OWN6, port);
        served(OUTSIDE, port);
    }
    untouched(OWN, PORT + 1);
    untouched([198, 51, 100, 1], PORT);
    // An address comes, and goes.
    let late = IpAddr::from([192, 0, 2, 99]);
    untouched(late, PORT);
    node.world.netns().add_address(late).unwrap();
    assert!(eventually(LIMIT, || request(Transport::Tcp, SocketAddr::new(late, PORT)).is_ok()));
    node.world.netns().remove_address(late).unwrap();
    assert!(eventually(LIMIT, || request(Transport::Tcp, SocketAddr::new(late, PORT)).is_err()));
    served(OWN, PORT);
    // The Node object says something else.
    let other = IpAddr::from([203, 0, 113, 2]);
    untouched(other, PORT);
    let nodes = manifest::node_with_addresses(NODE, &[OWN.into(), other]);
    manifest::write_atomically(&node.world.manifests().join("nodes.yaml"), &nodes).unwrap();
    assert!(eventually(LIMIT, || request(Transport::Tcp, SocketAddr::new(other, PORT)).is_ok()));
    untouched(OUTSIDE, PORT);
    served(OWN, PORT);
}

#[test]
fn a_node_port_is_served_on_loopback_in_the_nodes_namespace_only() {
    let Some(_node) = Node::or_skip("a_node_port_is_served_on_loopback_in_the_nodes_namespace_only", &[])
    else {
        return;
    };
    if !knows_its_namespace() {
        untouched(Ipv4Addr::LOCALHOST, PORT);
        untouched(Ipv6Addr::LOCALHOST, PORT);
        return;
    }
    served(Ipv4Addr::LOCALHOST, PORT);
    served([127, 1, 2, 3], PORT);
    served(Ipv4Addr::LOCALHOST.to_ipv6_mapped(), PORT);
    served(Ipv6Addr::LOCALHOST, PORT);
    in_a_pod(|| {
        untouched(Ipv4Addr::LOCALHOST, PORT);
        untouched(Ipv6Addr::LOCALHOST, PORT);
        // The node's other addresses are the node's from everywhere.
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        socket.connect((OWN, PORT)).unwrap();
        assert_eq!(socket.peer_addr().unwrap(), (OWN, PORT).into());
    });
}

#[test]
fn other_nodes_decide_where_the_policy_is_local() {
    let Some(_node) = Node::or_skip("other_nodes_decide_where_the_policy_is_local", &[]) else { return };
    served(OTHER, PORT);
    untouched(OTHER, LOCAL_PORT);
    served(OWN, LOCAL_PORT);
}

#[test]
fn node_ports_are_served_only_at_the_addresses_that_are_asked_for() {
    let arguments = ["--nodeport-addresses", "203.0.113.0/24,2001:db8::/32"];
    let Some(node) =
        Node::or_skip("node_ports_are_served_only_at_the_addresses_that_are_asked_for", &arguments)
    else {
        return;
    };
    served(OUTSIDE, PORT);
    served(OWN6, PORT);
    for ip in [OWN, OTHER, Ipv4Addr::LOCALHOST] {
        untouched(ip, PORT);
    }
    drop(node);
    let arguments = ["--nodeport-addresses", "primary"];
    let Some(_node) =
        Node::or_skip("node_ports_are_served_only_at_the_addresses_that_are_asked_for", &arguments)
    else {
        return;
    };
    served(OWN, PORT);
    served(OTHER, PORT);
    untouched(OUTSIDE, PORT);
    untouched(OWN6, PORT);
    // Nor is it taken at the others.
    for own in [IpAddr::from(OWN6), Ipv4Addr::LOCALHOST.into()] {
        TcpListener::bind((own, PORT)).unwrap();
    }
    assert_eq!(TcpListener::bind((OWN, PORT)).is_err(), knows_its_namespace());
}

#[test]
fn a_node_port_of_one_family_can_be_bound_in_the_other() {
    let Some(node) = Node::or_skip("a_node_port_of_one_family_can_be_bound_in_the_other", &[]) else {
        return;
    };
    let web = Service::new("web", &[[10, 96, 0, 1].into()])
        .port("tcp", "TCP", 80, 8080)
        .node_port(PORT)
        .endpoint("web", &ENDPOINTS[..1]);
    node.world.write(&[web]);
    assert!(eventually(LIMIT, || TcpListener::bind((OWN6, PORT)).is_ok()));
    for taken in ["0.0.0.0", "192.0.2.1", "[::]", "[::ffff:192.0.2.1]", "[::ffff:0.0.0.0]"] {
        let bound = TcpListener::bind(format!("{taken}:{PORT}"));
        assert_eq!(bound.is_err(), knows_its_namespace(), "{taken}: {bound:?}");
    }
}

#[test]
fn a_node_port_cannot_be_bound_on_the_node() {
    let Some(_node) = Node::or_skip("a_node_port_cannot_be_bound_on_the_node", &[]) else { return };
    if !knows_its_namespace() {
        TcpListener::bind(("0.0.0.0", PORT)).unwrap();
        return;
    }
    let refused = |result: io::Result<()>| {
        let kind = if kernel_at_least(5, 18) { ErrorKind::AddrInUse } else { ErrorKind::PermissionDenied };
        assert_eq!(result.unwrap_err().kind(), kind);
    };
    for any in ["0.0.0.0", "[::]", "127.0.0.1", "192.0.2.1", "[2001:db8::1]"] {
        refused(TcpListener::bind(format!("{any}:{PORT}")).map(drop));
        refused(UdpSocket::bind(format!("{any}:{PORT}")).map(drop));
        refused(TcpListener::bind(format!("{any}:{LOCAL_PORT}")).map(drop));
        // Another protocol, another port, and whichever the kernel likes.
        UdpSocket::bind(format!("{any}:{LOCAL_PORT}")).unwrap();
        TcpListener::bind(format!("{any}:{}", PORT + 1)).unwrap();
        TcpListener::bind(format!("{any}:0")).unwrap();
    }
    in_a_pod(|| TcpListener::bind(("0.0.0.0", PORT)).unwrap());
}

#[test]
fn a_node_port_can_be_bound_where_that_is_asked_for() {
    let arguments = ["--protect-node-ports", "false"];
    let Some(_node) = Node::or_skip("a_node_port_can_be_bound_where_that_is_asked_for", &arguments) else {
        return;
    };
    TcpListener::bind(("0.0.0.0", PORT)).unwrap();
}
