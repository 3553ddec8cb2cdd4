//! What passes untranslated: sockets connected before the proxy started, cluster IPs of the host, and binds without a port.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};

use tests::{
    EchoConnection, EchoServer, FRONTEND, Service, TIMEOUT, TestNode, Transport, WEB, WEB4,
    connected_udp_socket, eventually, exchange, exchange_connected, kernel_at_least, request, web_frontends,
};

const NODE_PORT: u16 = 30_080;

fn web() -> Service {
    tests::web([1]).node_ports(NODE_PORT)
}

/// Checks who answers a socket that is connected to an address.
#[track_caller]
fn assert_served_by(name: &str, socket: &UdpSocket, peer: SocketAddr) {
    assert_eq!(exchange_connected(socket).unwrap(), name, "{peer}");
    assert_eq!(exchange(socket, peer).unwrap(), (name.to_owned(), peer));
    assert_eq!(socket.peer_addr().unwrap(), peer);
}

#[test]
fn sockets_connected_before_the_proxy_started_are_not_translated() {
    let Some(mut node) = TestNode::serving_or_skip([1]) else { return };
    // Other servers at the Service's addresses.
    let frontends = web_frontends();
    let _before: Vec<_> = frontends[..2]
        .iter()
        .map(|it| {
            node.netns().add_ipvs_address(it.ip()).unwrap();
            EchoServer::start("before", *it).unwrap()
        })
        .collect();
    let mut streams =
        frontends.map(|it| EchoConnection::connect(it).unwrap_or_else(|error| panic!("{it}: {error}")));
    let datagrams = frontends.map(|it| connected_udp_socket(it).unwrap());
    let are_served_before = || {
        datagrams.iter().zip(frontends).for_each(|(socket, peer)| assert_served_by("before", socket, peer));
    };
    are_served_before();

    node.write(&[web()]);
    node.start(&[]);
    for frontend in frontends {
        assert_eq!(request(Transport::Tcp, frontend).unwrap(), "web-1");
        assert_served_by("web-1", &connected_udp_socket(frontend).unwrap(), frontend);
    }
    for (stream, frontend) in streams.iter_mut().zip(frontends) {
        stream.ping().unwrap();
        assert_eq!((stream.name(), stream.stream().peer_addr().unwrap()), ("before", frontend));
    }
    are_served_before();
}

#[test]
fn a_cluster_ip_on_an_interface_of_the_host_is_left_to_it() {
    let Some(mut node) = TestNode::running_or_skip([1], &[web()], &[]) else { return };
    let is_served_by =
        |name: &str| Transport::ALL.iter().all(|it| request(*it, FRONTEND).is_ok_and(|reply| reply == name));
    assert!(is_served_by("web-1"));
    // As NodeLocal DNSCache does: an interface with the DNS Service's address, and a server there.
    node.netns().add_address(WEB4.into()).unwrap();
    let cache = EchoServer::start("cache", FRONTEND).unwrap();
    assert!(eventually(TIMEOUT, || is_served_by("cache")));
    node.wait_until_logged(&["left to this host", "service=default/web addresses=[10.96.0.10"]);
    // The other family is served, and so are node ports.
    assert_eq!(request(Transport::Tcp, (WEB[1], 80).into()).unwrap(), "web-1");
    assert_eq!(
        request(Transport::Tcp, (Ipv4Addr::LOCALHOST, NODE_PORT).into()).is_ok(),
        kernel_at_least(5, 14)
    );
    // A start finds it.
    node.kill();
    node.start(&[]);
    assert!(is_served_by("cache"));
    drop(cache);
    node.netns().remove_address(WEB4.into()).unwrap();
    assert!(eventually(TIMEOUT, || is_served_by("web-1")));
}

#[test]
fn a_bind_without_a_port_is_never_refused() {
    let Some(mut node) = TestNode::running_or_skip([1], &[web()], &[]) else { return };
    // An older kernel does not identify the node's namespace, and nothing is refused.
    assert_eq!(TcpListener::bind(("0.0.0.0", NODE_PORT)).is_err(), kernel_at_least(5, 14));
    // The only port that the kernel can choose. The agent's probe would use it briefly.
    node.kill();
    node.netns().set_sysctl("ipv4/ip_local_port_range", &format!("{NODE_PORT} {NODE_PORT}")).unwrap();
    for any in ["0.0.0.0:0", "[::]:0", "127.0.0.1:0"] {
        assert_eq!(TcpListener::bind(any).unwrap().local_addr().unwrap().port(), NODE_PORT);
        assert_eq!(UdpSocket::bind(any).unwrap().local_addr().unwrap().port(), NODE_PORT);
    }
}
