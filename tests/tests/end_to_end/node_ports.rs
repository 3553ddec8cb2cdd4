//! Node ports as programs on the node and in pods use them: the addresses that serve them, and the binds that are refused.

use std::{
    io::{self, ErrorKind},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
};

use tests::{
    EchoConnection, NODE, NetNs, Service, TIMEOUT, TestNode, Transport, eventually, kernel_at_least,
    manifest, request,
};

const PORT: u16 = 30_080;
const LOCAL_PORT: u16 = 30_090;
/// On an interface of this node.
const OWN: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const OWN6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);
/// An address of this node in its Node object only.
const EXTERNAL: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 1);
/// An address of another node.
const OTHER: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);

/// A node with a Service at the node port [`PORT`] (TCP, UDP), and one with the external policy Local at [`LOCAL_PORT`] (TCP).
fn node_or_skip(arguments: &[&str]) -> Option<TestNode> {
    let mut node = TestNode::or_skip()?;
    for address in [IpAddr::from(OWN), OWN6.into()] {
        node.netns().add_address(address).unwrap();
    }
    node.serve([1]);
    let ips = |n: u8| [IpAddr::from([10, 96, 0, n]), [0xfd00, 0x10, 0x96, 0, 0, 0, 0, u16::from(n)].into()];
    let web = Service::new("web", &ips(1)).tcp_and_udp(80, 8080).node_ports(PORT).endpoints([1]);
    let local = Service::new("local", &ips(2))
        .port("tcp", "TCP", 80, 8080)
        .node_port(LOCAL_PORT)
        .external_local()
        .endpoints([1]);
    node.write_file("nodes.yaml", &nodes(EXTERNAL));
    node.write(&[web, local]);
    node.start(arguments);
    Some(node)
}

fn nodes(external: Ipv4Addr) -> String {
    let own = manifest::node_with_addresses(NODE, &[OWN.into(), external.into()]);
    own + "---\n" + &manifest::node_with_addresses("n2", &[OTHER.into()])
}

#[track_caller]
fn assert_served(ip: impl Into<IpAddr>, port: u16) {
    let address = SocketAddr::new(ip.into(), port);
    for transport in if port == PORT { &Transport::ALL[..] } else { &[Transport::Tcp] } {
        let reply = request(*transport, address);
        assert_eq!(reply.as_deref().ok(), Some("web-1"), "{transport:?} {address}: {reply:?}");
    }
    assert_eq!(EchoConnection::connect(address).unwrap().stream().peer_addr().unwrap(), address);
}

#[track_caller]
fn assert_not_served(ip: impl Into<IpAddr>, port: u16) {
    let error = TcpStream::connect((ip.into(), port)).unwrap_err();
    let errno = error.raw_os_error();
    assert!([Some(nix::libc::ENETUNREACH), Some(nix::libc::ECONNREFUSED)].contains(&errno), "{error}");
}

/// An older kernel does not report the network namespace of a socket: the initial namespace is taken for the node's, and
/// this is another.
fn knows_its_namespace() -> bool {
    kernel_at_least(5, 14)
}

#[test]
fn a_node_port_is_served_at_every_address_of_the_node() {
    let Some(node) = node_or_skip(&[]) else { return };
    for port in [PORT, LOCAL_PORT] {
        assert_served(OWN, port);
        assert_served(OWN.to_ipv6_mapped(), port);
        assert_served(OWN6, port);
        assert_served(EXTERNAL, port);
    }
    assert_not_served(OWN, PORT + 1);
    assert_not_served([198, 51, 100, 1], PORT);
    assert_served(OTHER, PORT);
    assert_not_served(OTHER, LOCAL_PORT);
    // An address is added and removed.
    let late = IpAddr::from([192, 0, 2, 99]);
    assert_not_served(late, PORT);
    node.netns().add_address(late).unwrap();
    assert!(eventually(TIMEOUT, || request(Transport::Tcp, SocketAddr::new(late, PORT)).is_ok()));
    node.netns().remove_address(late).unwrap();
    assert!(eventually(TIMEOUT, || request(Transport::Tcp, SocketAddr::new(late, PORT)).is_err()));
    assert_served(OWN, PORT);
    // The Node object changes.
    let other = Ipv4Addr::new(203, 0, 113, 2);
    assert_not_served(other, PORT);
    node.write_file("nodes.yaml", &nodes(other));
    assert!(eventually(TIMEOUT, || request(Transport::Tcp, (other, PORT).into()).is_ok()));
    assert_not_served(EXTERNAL, PORT);
    assert_served(OWN, PORT);
}

#[test]
fn a_node_port_is_served_on_loopback_in_the_nodes_namespace_only() {
    let Some(_node) = node_or_skip(&[]) else { return };
    if !knows_its_namespace() {
        assert_not_served(Ipv4Addr::LOCALHOST, PORT);
        assert_not_served(Ipv6Addr::LOCALHOST, PORT);
        return;
    }
    assert_served(Ipv4Addr::LOCALHOST, PORT);
    assert_served([127, 1, 2, 3], PORT);
    assert_served(Ipv4Addr::LOCALHOST.to_ipv6_mapped(), PORT);
    assert_served(Ipv6Addr::LOCALHOST, PORT);
    NetNs::with_local_endpoints().unwrap().run(|| {
        assert_not_served(Ipv4Addr::LOCALHOST, PORT);
        assert_not_served(Ipv6Addr::LOCALHOST, PORT);
        // The node's other addresses are served in every namespace.
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        socket.connect((OWN, PORT)).unwrap();
        assert_eq!(socket.peer_addr().unwrap(), (OWN, PORT).into());
    });
}

#[test]
fn node_ports_are_served_only_at_nodeport_addresses() {
    let arguments = ["--nodeport-addresses", "203.0.113.0/24,2001:db8::/32"];
    let Some(node) = node_or_skip(&arguments) else { return };
    assert_served(EXTERNAL, PORT);
    assert_served(OWN6, PORT);
    for ip in [OWN, OTHER, Ipv4Addr::LOCALHOST] {
        assert_not_served(ip, PORT);
    }
    drop(node);
    // As with kube-proxy, a family without a range is not restricted.
    let Some(node) = node_or_skip(&["--nodeport-addresses", "203.0.113.0/24"]) else { return };
    assert_served(EXTERNAL, PORT);
    assert_served(OWN6, PORT);
    assert_not_served(OWN, PORT);
    drop(node);
    let Some(_node) = node_or_skip(&["--nodeport-addresses", "primary"]) else { return };
    assert_served(OWN, PORT);
    assert_served(OTHER, PORT);
    assert_not_served(EXTERNAL, PORT);
    // The Node object has no address of this family.
    assert_served(OWN6, PORT);
    // The port can be bound at the other addresses.
    TcpListener::bind((Ipv4Addr::LOCALHOST, PORT)).unwrap();
    assert_eq!(TcpListener::bind((OWN, PORT)).is_err(), knows_its_namespace());
}

#[test]
fn a_node_port_of_one_family_can_be_bound_in_the_other() {
    let Some(node) = node_or_skip(&[]) else { return };
    let web = Service::new("web", &[[10, 96, 0, 1].into()]).port("tcp", "TCP", 80, 8080);
    node.write(&[web.node_port(PORT).endpoints([1])]);
    assert!(eventually(TIMEOUT, || TcpListener::bind((OWN6, PORT)).is_ok()));
    for address in ["0.0.0.0", "192.0.2.1", "[::]", "[::ffff:192.0.2.1]", "[::ffff:0.0.0.0]"] {
        let bound = TcpListener::bind(format!("{address}:{PORT}"));
        assert_eq!(bound.is_err(), knows_its_namespace(), "{address}: {bound:?}");
    }
}

#[test]
fn a_node_port_cannot_be_bound_on_the_node() {
    let Some(_node) = node_or_skip(&[]) else { return };
    if !knows_its_namespace() {
        TcpListener::bind(("0.0.0.0", PORT)).unwrap();
        return;
    }
    let assert_refused = |result: io::Result<()>| {
        let kind = if kernel_at_least(5, 18) { ErrorKind::AddrInUse } else { ErrorKind::PermissionDenied };
        assert_eq!(result.unwrap_err().kind(), kind);
    };
    for address in ["0.0.0.0", "[::]", "127.0.0.1", "192.0.2.1", "[2001:db8::1]"] {
        assert_refused(TcpListener::bind(format!("{address}:{PORT}")).map(drop));
        assert_refused(UdpSocket::bind(format!("{address}:{PORT}")).map(drop));
        assert_refused(TcpListener::bind(format!("{address}:{LOCAL_PORT}")).map(drop));
        // Another protocol, another port, and no port.
        UdpSocket::bind(format!("{address}:{LOCAL_PORT}")).unwrap();
        TcpListener::bind(format!("{address}:{}", PORT + 1)).unwrap();
        TcpListener::bind(format!("{address}:0")).unwrap();
    }
    NetNs::new().unwrap().run(|| TcpListener::bind(("0.0.0.0", PORT)).unwrap());
}

#[test]
fn a_node_port_can_be_bound_without_protection() {
    let Some(_node) = node_or_skip(&["--protect-node-ports", "false"]) else { return };
    TcpListener::bind(("0.0.0.0", PORT)).unwrap();
}
