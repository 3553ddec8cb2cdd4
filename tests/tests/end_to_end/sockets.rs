//! What a program observes of a Service: connect, send, receive and getpeername on real sockets.

use std::{
    io::ErrorKind,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
};

use socket2::{Domain, Socket, Type};
use tests::{
    EchoConnection, EchoServer, NetNs, Service, TIMEOUT, TestNode, Transport, WEB4, WEB6, client,
    connected_udp_socket, endpoint, eventually, exchange_connected, kernel_at_least, request, udp_socket,
    web, web_frontends,
};

const EMPTY4: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 66);
const EMPTY6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 0, 0x66);

/// A Service without endpoints.
fn empty() -> Service {
    Service::new("empty", &[EMPTY4.into(), EMPTY6.into()]).tcp_and_udp(80, 8080)
}

/// A node that serves `web`, with servers at its endpoints, and `empty`.
fn node_or_skip(endpoints: u8) -> Option<TestNode> {
    TestNode::running_or_skip(1..=endpoints, &[web(1..=endpoints), empty()], &[])
}

/// Sends to `service` on an unconnected socket: the name in the reply, which must come from the Service's address.
#[track_caller]
fn exchange(socket: &UdpSocket, service: SocketAddr) -> String {
    let (name, from) = client::exchange(socket, service).unwrap();
    assert_eq!((from.ip(), from.port()), (service.ip(), service.port()));
    name
}

#[test]
fn getpeername_shows_the_service() {
    let Some(_node) = node_or_skip(1) else { return };
    for address in web_frontends() {
        let mut connection = EchoConnection::connect(address).unwrap();
        assert_eq!(connection.stream().peer_addr().unwrap(), address);
        connection.ping().unwrap();
        let socket = connected_udp_socket(address).unwrap();
        assert_eq!(socket.peer_addr().unwrap(), address);
    }
}

#[test]
fn an_accepted_socket_shows_its_client() {
    let Some(_node) = node_or_skip(1) else { return };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (accepted, from) = listener.accept().unwrap();
    assert_eq!(accepted.peer_addr().unwrap(), from);
    assert_eq!(client.local_addr().unwrap(), from);
}

#[test]
fn sendto_on_a_connected_socket_goes_to_the_connected_endpoint() {
    let Some(_node) = node_or_skip(5) else { return };
    for address in web_frontends() {
        let socket = connected_udp_socket(address).unwrap();
        let first = exchange_connected(&socket).unwrap();
        for _ in 0..20 {
            // A reply from another endpoint would be dropped, and the exchange would time out.
            assert_eq!(exchange(&socket, address), first);
        }
    }
}

#[test]
fn an_unconnected_socket_keeps_its_endpoint_while_it_serves() {
    let Some(mut node) = node_or_skip(5) else { return };
    let sockets: Vec<_> = web_frontends().into_iter().flat_map(|it| [it; 2]).collect();
    let sockets: Vec<_> = sockets.into_iter().map(|it| (udp_socket(it).unwrap(), it)).collect();
    let mut servers: Vec<_> = sockets.iter().map(|(socket, address)| exchange(socket, *address)).collect();
    // Endpoints are removed and added at either end of the list: their slots move.
    for endpoints in [vec![5, 4, 3, 2, 1], vec![2, 3, 5], vec![1, 5], vec![4, 5], vec![1, 2, 3, 4, 5]] {
        node.apply(&[web(endpoints.clone()), empty()]);
        let serves = |name: &str| endpoints.iter().any(|n| format!("web-{n}") == name);
        for ((socket, address), before) in sockets.iter().zip(&mut servers) {
            let now = exchange(socket, *address);
            assert!(serves(&now), "{now} of {endpoints:?}");
            assert!(now == *before || !serves(before), "from {before} to {now} of {endpoints:?}");
            *before = now;
        }
    }
}

#[test]
fn of_two_services_with_one_endpoint_replies_bear_the_address_used_last() {
    let Some(mut node) = node_or_skip(1) else { return };
    let twin = SocketAddr::from(([10, 96, 1, 1], 80));
    let other = Service::new("twin", &[twin.ip()]).port("", "UDP", 80, 8080).endpoints([1]);
    node.apply(&[web([1]), empty(), other]);
    let socket = udp_socket(twin).unwrap();
    let web = SocketAddr::from((WEB4, 80));
    for service in [web, twin, web, web, twin, twin, web] {
        // It fails unless the reply bears the address of the request.
        exchange(&socket, service);
    }
}

#[test]
fn a_reply_to_a_direct_request_bears_the_endpoints_address() {
    let Some(_node) = node_or_skip(1) else { return };
    for (n, service) in [(0, SocketAddr::from((WEB4, 80))), (1, (WEB6, 80).into())] {
        let direct = SocketAddr::new(endpoint(1)[n], 8080);
        let socket = udp_socket(service).unwrap();
        exchange(&socket, service);
        exchange(&socket, direct);
        exchange(&socket, service);
        socket.connect(direct).unwrap();
        socket.send(b"who?").unwrap();
        assert_eq!(client::receive(&socket).unwrap().1, direct);
    }
}

#[test]
fn a_pod_can_be_its_own_endpoint() {
    let Some(_node) = node_or_skip(1) else { return };
    let pod = NetNs::new().unwrap();
    for address in endpoint(1) {
        pod.add_address(address).unwrap();
    }
    pod.run(|| {
        let _servers = endpoint(1).map(|it| EchoServer::start("self", (it, 8080).into()).unwrap());
        for address in web_frontends() {
            for transport in Transport::ALL {
                assert_eq!(request(transport, address).unwrap(), "self");
            }
            let connection = EchoConnection::connect(address).unwrap();
            // The source is the pod itself: nothing is masqueraded.
            assert!(endpoint(1).contains(&connection.stream().local_addr().unwrap().ip().to_canonical()));
        }
    });
}

#[test]
fn a_service_without_endpoints_refuses_at_once() {
    let Some(_node) = node_or_skip(1) else { return };
    let addresses: [SocketAddr; 3] =
        [(EMPTY4, 80).into(), (EMPTY6, 80).into(), (EMPTY4.to_ipv6_mapped(), 80).into()];
    for address in addresses {
        assert_eq!(TcpStream::connect(address).unwrap_err().kind(), ErrorKind::ConnectionRefused);
        let socket = udp_socket(address).unwrap();
        let unconnected = udp_socket(address).unwrap().send_to(b"who?", address).unwrap_err().kind();
        if kernel_at_least(5, 18) {
            assert_eq!(socket.connect(address).unwrap_err().kind(), ErrorKind::ConnectionRefused);
            assert_eq!(unconnected, ErrorKind::ConnectionRefused);
        } else {
            socket.connect(address).unwrap();
            assert!((0..2).any(|_| socket.send(b"who?").is_err()), "{address}: two datagrams were sent");
            assert_eq!(unconnected, ErrorKind::PermissionDenied);
        }
    }
}

#[test]
fn a_refused_connect_keeps_the_previous_peer() {
    let Some(_node) = node_or_skip(3) else { return };
    let (service, empty) = (SocketAddr::from((WEB4, 80)), SocketAddr::from((EMPTY4, 80)));
    let socket = connected_udp_socket(service).unwrap();
    if !kernel_at_least(5, 18) {
        // A program cannot refuse a connect on such a kernel: it redirects to a port without a listener.
        socket.connect(empty).unwrap();
        return;
    }
    assert_eq!(socket.connect(empty).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    assert_eq!(socket.peer_addr().unwrap(), service);
    socket.send(b"who?").unwrap();
    assert_eq!(client::receive(&socket).unwrap().1, service);
}

#[test]
fn untranslated_traffic_is_untouched() {
    let Some(_node) = node_or_skip(1) else { return };
    let server = EchoServer::start("direct", "127.0.0.1:0".parse().unwrap()).unwrap();
    assert_eq!(request(Transport::Tcp, server.address()).unwrap(), "direct");
    assert_eq!(request(Transport::UdpUnconnected, server.address()).unwrap(), "direct");
    // Another port of a Service's address is not translated, and has no route.
    for port in [79, 81, 8080] {
        let error = TcpStream::connect((WEB4, port)).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(nix::libc::ENETUNREACH), "{error}");
    }
    // A direct connection to the endpoint shows the endpoint.
    let address = SocketAddr::new(endpoint(1)[0], 8080);
    let connection = EchoConnection::connect(address).unwrap();
    assert_eq!(connection.stream().peer_addr().unwrap(), address);
}

#[test]
fn a_udp_socket_that_reconnects_elsewhere_shows_its_new_peer() {
    let Some(_node) = node_or_skip(1) else { return };
    let (service, direct) = (SocketAddr::from((WEB4, 80)), SocketAddr::new(endpoint(1)[0], 8080));
    let socket = connected_udp_socket(service).unwrap();
    assert_eq!(socket.peer_addr().unwrap(), service);
    // The same endpoint, by its own address.
    socket.connect(direct).unwrap();
    assert_eq!(socket.peer_addr().unwrap(), direct);
    socket.send(b"who?").unwrap();
    assert_eq!(client::receive(&socket).unwrap().1, direct);
}

#[test]
fn a_tcp_socket_that_reconnects_shows_its_new_peer() {
    let Some(mut node) = node_or_skip(1) else { return };
    // Nothing listens on the target port yet.
    node.apply(&[web([1]).port("late", "TCP", 81, 9090)]);
    let [IpAddr::V4(direct4), direct6] = endpoint(1) else { unreachable!("v4 and v6") };
    let pairs: [(IpAddr, IpAddr); 3] = [
        (WEB4.into(), direct4.into()),
        (WEB6.into(), direct6),
        (WEB4.to_ipv6_mapped().into(), direct4.to_ipv6_mapped().into()),
    ];
    for (service, direct) in pairs {
        let (service, direct) = (SocketAddr::new(service, 81), SocketAddr::new(direct, 9090));
        let socket = Socket::new(Domain::for_address(service), Type::STREAM, None).unwrap();
        let error = socket.connect(&service.into()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "by the endpoint");
        let _listener = TcpListener::bind(SocketAddr::new(direct.ip().to_canonical(), 9090)).unwrap();
        socket.connect(&direct.into()).unwrap();
        assert_eq!(socket.peer_addr().unwrap().as_socket(), Some(direct));
        // From the endpoint's address to the Service's.
        let socket = Socket::new(Domain::for_address(service), Type::STREAM, None).unwrap();
        let closed = SocketAddr::new(direct.ip(), 9091);
        assert_eq!(socket.connect(&closed.into()).unwrap_err().kind(), ErrorKind::ConnectionRefused);
        socket.connect(&service.into()).unwrap();
        assert_eq!(socket.peer_addr().unwrap().as_socket(), Some(service));
    }
}

#[test]
fn processes_outside_the_cgroup_are_not_translated() {
    let Some(node) = node_or_skip(1) else { return };
    let root = node.sandbox().enter_root_cgroup().unwrap();
    let error = TcpStream::connect((WEB4, 80)).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(nix::libc::ENETUNREACH), "{error}");
    drop(root);
    TcpStream::connect((WEB4, 80)).unwrap();
}

#[test]
fn a_failed_connect_does_not_affect_later_datagrams() {
    let Some(node) = node_or_skip(1) else { return };
    let frontend = SocketAddr::from((EMPTY4, 80));
    let serve_at = |ip: [u8; 4]| node.write(&[web([1]), empty().endpoint("e", &[ip.into()])]);
    let socket = udp_socket(frontend).unwrap();
    socket.connect((WEB4, 80)).unwrap();
    // The endpoint has no route; the socket stays connected to its previous peer.
    serve_at([203, 0, 113, 77]);
    let has_failed = || socket.connect(frontend).is_err_and(|it| it.kind() == ErrorKind::NetworkUnreachable);
    assert!(eventually(TIMEOUT, has_failed));
    let server = UdpSocket::bind(("10.244.1.9", 8080)).unwrap();
    server.set_read_timeout(Some(TIMEOUT)).unwrap();
    serve_at([10, 244, 1, 9]);
    assert!(eventually(TIMEOUT, || socket.send_to(b"hello", frontend).is_ok()));
    assert_eq!(server.recv(&mut [0; 16]).unwrap(), 5);
}
