//! What a program sees of a Service: its connects, sends, receives and getpeername, on real sockets.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    io::ErrorKind,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use socket2::{Domain, Socket, Type};
use tests::{
    Agent, Build, EchoConnection, EchoServer, NetNs, TestNode, Transport, eventually, manifest::Service,
    request, requirements::kernel_at_least, test_node::expected_dump,
};

const LIMIT: Duration = Duration::from_secs(10);
const WEB4: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 10);
const WEB6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 0, 0x10);
const EMPTY4: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 66);
const EMPTY6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 0, 0x66);

/// A node that serves `web` (TCP and UDP, both families) and `empty`, with echo servers at web's endpoints.
struct Node {
    servers: Vec<EchoServer>,
    agent: Agent,
    world: TestNode,
}

fn endpoint(n: u16) -> [IpAddr; 2] {
    [[10, 244, 1, n as u8].into(), [0xfd00, 0x10, 0x244, 0, 0, 0, 1, n].into()]
}

fn web(endpoints: impl IntoIterator<Item = u16>) -> Service {
    let web = Service::new("web", &[WEB4.into(), WEB6.into()])
        .port("tcp", "TCP", 80, 8080)
        .port("udp", "UDP", 80, 8080);
    endpoints.into_iter().fold(web, |web, n| web.endpoint(&format!("web-{n}"), &endpoint(n)))
}

fn empty() -> Service {
    Service::new("empty", &[EMPTY4.into(), EMPTY6.into()])
        .port("tcp", "TCP", 80, 8080)
        .port("udp", "UDP", 80, 8080)
}

impl Node {
    fn or_skip(test: &str, endpoints: u16) -> Option<Self> {
        let world = TestNode::or_skip(test)?;
        let servers = (1..=endpoints)
            .flat_map(|n| endpoint(n).map(|address| (n, address)))
            .map(|(n, address)| {
                if address.is_ipv6() {
                    world.netns().add_address(address).unwrap();
                }
                EchoServer::start(&format!("web-{n}"), SocketAddr::new(address, 8080)).unwrap()
            })
            .collect();
        world.write(&[web(1..=endpoints), empty()]);
        let mut agent = world.command(Build::Product).start(world.sandbox()).unwrap();
        // The program for v6 is the last to be attached.
        agent.wait_until(LIMIT, || TcpStream::connect((WEB6, 80)).is_ok()).unwrap();
        Some(Self { servers, agent, world })
    }

    /// Writes the Services and waits until web has exactly these endpoints in force.
    fn scale(&mut self, endpoints: impl IntoIterator<Item = u16>) {
        let services = [web(endpoints), empty()];
        self.world.write(&services);
        let expected = expected_dump(&services);
        let Self { agent, world, .. } = self;
        agent.wait_until(LIMIT, || world.dump(Build::Product).is_ok_and(|it| it == expected)).unwrap();
    }
}

fn udp(service: SocketAddr) -> UdpSocket {
    let any: IpAddr =
        if service.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    socket
}

/// Sends to `service` without being connected, and returns who answers; the answer must bear the Service's address.
#[track_caller]
fn exchange(socket: &UdpSocket, service: SocketAddr) -> String {
    socket.send_to(b"who?", service).unwrap();
    let mut answer = [0; 64];
    let (length, from) = socket.recv_from(&mut answer).unwrap();
    assert_eq!((from.ip(), from.port()), (service.ip(), service.port()));
    String::from_utf8_lossy(&answer[..length]).into_owned()
}

/// Every way to write web's address.
fn addresses() -> [SocketAddr; 3] {
    [(WEB4, 80).into(), (WEB6, 80).into(), (WEB4.to_ipv6_mapped(), 80).into()]
}

#[test]
fn every_transport_and_family_reaches_every_endpoint() {
    let Some(node) = Node::or_skip("every_transport_and_family_reaches_every_endpoint", 3) else { return };
    for address in addresses() {
        for transport in [Transport::Tcp, Transport::Udp, Transport::UdpUnconnected] {
            let mut seen = std::collections::BTreeMap::<String, usize>::new();
            for _ in 0..300 {
                *seen.entry(request(transport, address).unwrap()).or_default() += 1;
            }
            assert_eq!(seen.len(), 3, "{transport:?} to {address}: {seen:?}");
            // Of 300 a fair choice gives each 100, and less than 50 once in 10^9 runs.
            assert!(seen.values().all(|it| *it > 50), "{transport:?} to {address}: {seen:?}");
        }
    }
    assert!(node.servers.iter().all(|it| it.connections() > 0 && it.datagrams() > 0));
}

#[test]
fn getpeername_shows_the_service() {
    let Some(_node) = Node::or_skip("getpeername_shows_the_service", 1) else { return };
    for address in addresses() {
        let mut probe = EchoConnection::connect(address).unwrap();
        assert_eq!(probe.stream().peer_addr().unwrap(), address);
        probe.ping().unwrap();
        let socket = udp(address);
        socket.connect(address).unwrap();
        assert_eq!(socket.peer_addr().unwrap(), address);
    }
}

#[test]
fn a_duplicated_socket_shows_the_service_too() {
    let Some(_node) = Node::or_skip("a_duplicated_socket_shows_the_service_too", 1) else { return };
    let stream = TcpStream::connect((WEB4, 80)).unwrap();
    let copy = stream.try_clone().unwrap();
    drop(stream);
    assert_eq!(copy.peer_addr().unwrap(), (WEB4, 80).into());
}

#[test]
fn an_accepted_socket_shows_its_client() {
    let Some(_node) = Node::or_skip("an_accepted_socket_shows_its_client", 1) else { return };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (accepted, from) = listener.accept().unwrap();
    assert_eq!(accepted.peer_addr().unwrap(), from);
    assert_eq!(client.local_addr().unwrap(), from);
}

#[test]
fn sendto_on_a_connected_socket_goes_to_the_connected_endpoint() {
    let Some(_node) = Node::or_skip("sendto_on_a_connected_socket_goes_to_the_connected_endpoint", 5) else {
        return;
    };
    for address in addresses() {
        let socket = udp(address);
        socket.connect(address).unwrap();
        socket.send(b"who?").unwrap();
        let mut answer = [0; 64];
        let length = socket.recv(&mut answer).unwrap();
        let first = String::from_utf8_lossy(&answer[..length]).into_owned();
        for _ in 0..20 {
            // A reply from any other endpoint would be filtered out, and the exchange would time out.
            assert_eq!(exchange(&socket, address), first);
        }
    }
}

#[test]
fn an_unconnected_socket_keeps_its_endpoint_while_it_serves() {
    let Some(mut node) = Node::or_skip("an_unconnected_socket_keeps_its_endpoint_while_it_serves", 5) else {
        return;
    };
    let sockets: Vec<_> = addresses().into_iter().flat_map(|it| [(udp(it), it), (udp(it), it)]).collect();
    let mut answerers: Vec<_> = sockets.iter().map(|(socket, address)| exchange(socket, *address)).collect();
    // In and out, first and last: slots move, and nobody is disturbed whose endpoint stays.
    for endpoints in [vec![5, 4, 3, 2, 1], vec![2, 3, 5], vec![1, 5], vec![4, 5], vec![1, 2, 3, 4, 5]] {
        node.scale(endpoints.clone());
        let serves = |name: &str| endpoints.iter().any(|n| format!("web-{n}") == name);
        for ((socket, address), answerer) in sockets.iter().zip(&mut answerers) {
            let now = exchange(socket, *address);
            assert!(serves(&now), "{now} of {endpoints:?}");
            assert!(
                now == *answerer || !serves(answerer),
                "{answerer} serves, {now} answers, of {endpoints:?}"
            );
            *answerer = now;
        }
    }
}

#[test]
fn one_socket_talks_to_several_services() {
    let Some(node) = Node::or_skip("one_socket_talks_to_several_services", 2) else { return };
    let others: Vec<Service> = (1..=3)
        .map(|n| {
            Service::new(&format!("other-{n}"), &[Ipv4Addr::new(10, 96, 1, n).into()])
                .port("", "UDP", 53, 8080)
                .endpoint("a", &[endpoint(u16::from(n)).into_iter().next().unwrap()])
        })
        .collect();
    let _server = EchoServer::start("web-3", SocketAddr::new(endpoint(3)[0], 8080)).unwrap();
    node.world.write(&[vec![web(1..=2), empty()], others].concat());
    let last = SocketAddr::from(([10, 96, 1, 3], 53));
    assert!(eventually(LIMIT, || request(Transport::UdpUnconnected, last).is_ok()));
    let socket = udp(last);
    for _ in 0..10 {
        for n in 1..=3 {
            let answer = exchange(&socket, SocketAddr::from(([10, 96, 1, n], 53)));
            assert_eq!(answer, format!("web-{n}"));
        }
    }
}

#[test]
fn external_and_load_balancer_ips_lead_to_the_endpoints() {
    let Some(mut node) = Node::or_skip("external_and_load_balancer_ips_lead_to_the_endpoints", 2) else {
        return;
    };
    let outside: [IpAddr; 4] = [
        [203, 0, 113, 10].into(),
        [0xfd00, 0x10, 0xeee, 0, 0, 0, 0, 0x10].into(),
        [203, 0, 113, 20].into(),
        [0xfd00, 0x10, 0xeee, 0, 0, 0, 0, 0x20].into(),
    ];
    let services = [web(1..=2).load_balancer_ips(&outside[..2]).external_ips(&outside[2..]), empty()];
    node.world.write(&services);
    let Node { agent, world, .. } = &mut node;
    agent
        .wait_until(LIMIT, || world.dump(Build::Product).is_ok_and(|it| it == expected_dump(&services)))
        .unwrap();
    for address in outside.map(|it| SocketAddr::new(it, 80)) {
        for transport in [Transport::Tcp, Transport::Udp, Transport::UdpUnconnected] {
            let answer = request(transport, address);
            assert!(
                answer.as_ref().is_ok_and(|it| it.starts_with("web-")),
                "{transport:?} {address}: {answer:?}"
            );
        }
        assert_eq!(EchoConnection::connect(address).unwrap().stream().peer_addr().unwrap(), address);
    }
}

#[test]
fn of_two_services_with_one_endpoint_the_one_asked_last_answers() {
    let Some(node) = Node::or_skip("of_two_services_with_one_endpoint_the_one_asked_last_answers", 1) else {
        return;
    };
    let twin = SocketAddr::from(([10, 96, 1, 1], 80));
    let other = Service::new("twin", &[twin.ip()]).port("", "UDP", 80, 8080).endpoint("web-1", &endpoint(1));
    node.world.write(&[web(1..=1), empty(), other]);
    assert!(eventually(LIMIT, || request(Transport::UdpUnconnected, twin).is_ok()));
    let socket = udp(twin);
    let web = SocketAddr::from((WEB4, 80));
    for service in [web, twin, web, web, twin, twin, web] {
        // The answer bears the address that was asked, or the exchange fails.
        exchange(&socket, service);
    }
}

#[test]
fn an_endpoint_that_is_asked_directly_answers_as_itself() {
    let Some(_node) = Node::or_skip("an_endpoint_that_is_asked_directly_answers_as_itself", 1) else {
        return;
    };
    for (n, service) in [(0, SocketAddr::from((WEB4, 80))), (1, (WEB6, 80).into())] {
        let direct = SocketAddr::new(endpoint(1)[n], 8080);
        let socket = udp(service);
        exchange(&socket, service);
        exchange(&socket, direct);
        exchange(&socket, service);
        socket.connect(direct).unwrap();
        socket.send(b"who?").unwrap();
        assert_eq!(socket.recv_from(&mut [0; 64]).unwrap().1, direct);
    }
}

#[test]
fn a_pod_can_be_its_own_endpoint() {
    let Some(_node) = Node::or_skip("a_pod_can_be_its_own_endpoint", 1) else { return };
    let pod = NetNs::new().unwrap();
    for address in endpoint(1) {
        pod.add_address(address).unwrap();
    }
    thread::scope(|scope| {
        scope.spawn(|| {
            let _inside = pod.enter().unwrap();
            let _servers = endpoint(1).map(|it| EchoServer::start("self", (it, 8080).into()).unwrap());
            for address in addresses() {
                for transport in [Transport::Tcp, Transport::Udp, Transport::UdpUnconnected] {
                    assert_eq!(request(transport, address).unwrap(), "self");
                }
                let probe = EchoConnection::connect(address).unwrap();
                // It comes from itself: no address stands between.
                assert!(endpoint(1).contains(&probe.stream().local_addr().unwrap().ip().to_canonical()));
            }
        });
    });
}

#[test]
fn a_refused_connect_leaves_a_socket_where_it_was() {
    let Some(_node) = Node::or_skip("a_refused_connect_leaves_a_socket_where_it_was", 3) else { return };
    let (service, empty) = (SocketAddr::from((WEB4, 80)), SocketAddr::from((EMPTY4, 80)));
    let socket = udp(service);
    socket.connect(service).unwrap();
    if !kernel_at_least(5, 18) {
        // Such a kernel cannot be told to refuse: the socket is led to a port where nobody is.
        socket.connect(empty).unwrap();
        return;
    }
    assert_eq!(socket.connect(empty).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    assert_eq!(socket.peer_addr().unwrap(), service);
    socket.send(b"who?").unwrap();
    assert_eq!(socket.recv_from(&mut [0; 64]).unwrap().1, service);
}

#[test]
fn a_service_without_endpoints_refuses_at_once() {
    let Some(mut node) = Node::or_skip("a_service_without_endpoints_refuses_at_once", 1) else { return };
    let check = || {
        for address in [(EMPTY4, 80).into(), (EMPTY6, 80).into(), (EMPTY4.to_ipv6_mapped(), 80).into()] {
            let address: SocketAddr = address;
            let begin = Instant::now();
            assert_eq!(TcpStream::connect(address).unwrap_err().kind(), ErrorKind::ConnectionRefused);
            let socket = udp(address);
            let sent = udp(address).send_to(b"who?", address).unwrap_err().kind();
            if kernel_at_least(5, 18) {
                assert_eq!(socket.connect(address).unwrap_err().kind(), ErrorKind::ConnectionRefused);
                assert_eq!(sent, ErrorKind::ConnectionRefused);
            } else {
                socket.connect(address).unwrap();
                assert!(
                    (0..2).any(|_| socket.send(b"who?").is_err()),
                    "{address}: two datagrams went somewhere"
                );
                assert_eq!(sent, ErrorKind::PermissionDenied);
            }
            assert!(begin.elapsed() < LIMIT, "nothing waits for a time-out");
        }
    };
    check();
    // The last endpoint of web goes: the same for it.
    node.scale([]);
    assert_eq!(TcpStream::connect((WEB4, 80)).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    node.scale([1]);
    TcpStream::connect((WEB4, 80)).unwrap();
}

#[test]
fn untranslated_traffic_is_untouched() {
    let Some(_node) = Node::or_skip("untranslated_traffic_is_untouched", 1) else { return };
    let server = EchoServer::start("direct", "127.0.0.1:0".parse().unwrap()).unwrap();
    assert_eq!(request(Transport::Tcp, server.address()).unwrap(), "direct");
    assert_eq!(request(Transport::UdpUnconnected, server.address()).unwrap(), "direct");
    // Another port, another protocol of a Service's address: not ours, and no route leads there.
    for port in [79, 81, 8080] {
        let error = TcpStream::connect((WEB4, port)).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(nix::libc::ENETUNREACH), "{error}");
    }
    // Straight to the endpoint: it shows itself.
    let address = SocketAddr::new(endpoint(1)[0], 8080);
    let probe = EchoConnection::connect(address).unwrap();
    assert_eq!(probe.stream().peer_addr().unwrap(), address);
}

#[test]
fn a_socket_that_connects_elsewhere_forgets_the_service() {
    let Some(_node) = Node::or_skip("a_socket_that_connects_elsewhere_forgets_the_service", 1) else {
        return;
    };
    let (service, direct) = (SocketAddr::from((WEB4, 80)), SocketAddr::new(endpoint(1)[0], 8080));
    let socket = udp(service);
    socket.connect(service).unwrap();
    assert_eq!(socket.peer_addr().unwrap(), service);
    // The same endpoint, but this time by its own address.
    socket.connect(direct).unwrap();
    assert_eq!(socket.peer_addr().unwrap(), direct);
    socket.send(b"who?").unwrap();
    let mut answer = [0; 64];
    assert_eq!(socket.recv_from(&mut answer).unwrap().1, direct);
}

#[test]
fn a_tcp_socket_that_connects_again_forgets_the_service() {
    let name = "a_tcp_socket_that_connects_again_forgets_the_service";
    let Some(node) = Node::or_skip(name, 1) else { return };
    // Nobody listens there yet.
    let late = web([1]).port("late", "TCP", 81, 9090);
    node.world.write(std::slice::from_ref(&late));
    let expected = expected_dump(&[late]);
    assert!(eventually(LIMIT, || node.world.dump(Build::Product).is_ok_and(|it| it == expected)));
    let [IpAddr::V4(direct4), direct6] = endpoint(1) else { unreachable!("v4 and v6") };
    let ways: [(IpAddr, IpAddr); 3] = [
        (WEB4.into(), direct4.into()),
        (WEB6.into(), direct6),
        (WEB4.to_ipv6_mapped().into(), direct4.to_ipv6_mapped().into()),
    ];
    for (service, direct) in ways {
        let (service, direct) = (SocketAddr::new(service, 81), SocketAddr::new(direct, 9090));
        let socket = Socket::new(Domain::for_address(service), Type::STREAM, None).unwrap();
        let error = socket.connect(&service.into()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "by the endpoint");
        let _listener = TcpListener::bind(SocketAddr::new(direct.ip().to_canonical(), 9090)).unwrap();
        socket.connect(&direct.into()).unwrap();
        assert_eq!(socket.peer_addr().unwrap().as_socket(), Some(direct));
        // And the other way round.
        let socket = Socket::new(Domain::for_address(service), Type::STREAM, None).unwrap();
        let closed = SocketAddr::new(direct.ip(), 9091);
        assert_eq!(socket.connect(&closed.into()).unwrap_err().kind(), ErrorKind::ConnectionRefused);
        socket.connect(&service.into()).unwrap();
        assert_eq!(socket.peer_addr().unwrap().as_socket(), Some(service));
    }
}

#[test]
fn what_is_outside_the_cgroup_is_not_translated() {
    let Some(node) = Node::or_skip("what_is_outside_the_cgroup_is_not_translated", 1) else { return };
    let home = node.world.sandbox().cgroup().parent().unwrap().join("cgroup.procs");
    std::fs::write(home, std::process::id().to_string()).unwrap();
    let error = TcpStream::connect((WEB4, 80)).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(nix::libc::ENETUNREACH), "{error}");
    node.world.sandbox().adopt(std::process::id()).unwrap();
    TcpStream::connect((WEB4, 80)).unwrap();
}

#[test]
fn a_connection_outlives_its_endpoints_place_in_the_service() {
    let Some(mut node) = Node::or_skip("a_connection_outlives_its_endpoints_place_in_the_service", 2) else {
        return;
    };
    let mut probes: Vec<_> = (0..10).map(|_| EchoConnection::connect((WEB4, 80).into()).unwrap()).collect();
    node.scale([]);
    thread::sleep(Duration::from_millis(50));
    for probe in &mut probes {
        probe.ping().unwrap();
        assert_eq!(probe.stream().peer_addr().unwrap(), (WEB4, 80).into());
    }
}

#[test]
fn a_connect_that_fails_does_not_lead_what_is_sent_later() {
    let Some(node) = Node::or_skip("a_connect_that_fails_does_not_lead_what_is_sent_later", 1) else {
        return;
    };
    let door = SocketAddr::from((EMPTY4, 80));
    let serve_at = |ip: [u8; 4]| node.world.write(&[web([1]), empty().endpoint("e", &[ip.into()])]);
    let socket = udp(door);
    socket.connect((WEB4, 80)).unwrap();
    // No route leads there; the socket stays connected where it was.
    serve_at([203, 0, 113, 77]);
    let has_failed = || socket.connect(door).is_err_and(|it| it.kind() == ErrorKind::NetworkUnreachable);
    assert!(eventually(LIMIT, has_failed));
    let server = UdpSocket::bind(("10.244.1.9", 8080)).unwrap();
    server.set_read_timeout(Some(LIMIT)).unwrap();
    serve_at([10, 244, 1, 9]);
    assert!(eventually(LIMIT, || socket.send_to(b"hello", door).is_ok()));
    assert_eq!(server.recv(&mut [0; 16]).unwrap(), 5);
}
