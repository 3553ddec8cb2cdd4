//! What is left alone: sockets that were connected before, addresses that are the packet path's, and ports that the kernel
//! chooses.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    fs,
    net::{IpAddr, SocketAddr, TcpListener, UdpSocket},
    time::Duration,
};

use tests::{
    Build, EchoConnection, EchoServer, TestNode, Transport, eventually, manifest::Service, request,
    requirements::kernel_at_least, scaled,
};

const LIMIT: Duration = Duration::from_secs(10);
const NODE_PORT: u16 = 30_080;

fn web() -> [IpAddr; 2] {
    ["10.96.0.10", "fd00:10:96::10"].map(|it| it.parse().unwrap())
}

fn endpoint() -> [IpAddr; 2] {
    ["10.244.1.1", "fd00:10:244::1"].map(|it| it.parse().unwrap())
}

fn service() -> Service {
    Service::new("web", &web())
        .port("tcp", "TCP", 80, 8080)
        .node_port(NODE_PORT)
        .port("udp", "UDP", 80, 8080)
        .node_port(NODE_PORT)
        .endpoint("endpoint", &endpoint())
}

fn servers(world: &TestNode) -> [EchoServer; 2] {
    world.netns().add_address(endpoint()[1]).unwrap();
    endpoint().map(|it| EchoServer::start("endpoint", SocketAddr::new(it, 8080)).unwrap())
}

/// A UDP socket that is connected to an address, and what it gets from there.
struct Connected(UdpSocket, SocketAddr);

impl Connected {
    fn new(to: SocketAddr) -> Self {
        let socket = UdpSocket::bind(if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }).unwrap();
        socket.set_read_timeout(Some(scaled(Duration::from_secs(2)))).unwrap();
        socket.connect(to).unwrap();
        Self(socket, to)
    }

    #[track_caller]
    fn is_answered_by(&self, name: &str) {
        let Self(socket, to) = self;
        for is_named in [false, true] {
            if is_named { socket.send_to(b"who?", to) } else { socket.send(b"who?") }.unwrap();
            let mut answer = [0; 64];
            let (length, from) =
                socket.recv_from(&mut answer).unwrap_or_else(|it| panic!("{to}, {is_named}: {it}"));
            assert_eq!((&answer[..length], from), (name.as_bytes(), *to), "{is_named}");
        }
        assert_eq!(socket.peer_addr().unwrap(), *to);
    }
}

#[test]
fn a_socket_from_before_the_proxy_is_left_alone() {
    let Some(world) = TestNode::or_skip("a_socket_from_before_the_proxy_is_left_alone") else { return };
    let _servers = servers(&world);
    let mapped = match web()[0] {
        IpAddr::V4(it) => it.to_ipv6_mapped(),
        IpAddr::V6(it) => it,
    };
    let addresses = [web()[0], web()[1], mapped.into()].map(|it| SocketAddr::new(it, 80));
    // Somebody is at the Service's addresses already.
    let before: Vec<_> = addresses[..2]
        .iter()
        .map(|it| {
            world.netns().add_address(it.ip()).unwrap();
            EchoServer::start("before", *it).unwrap()
        })
        .collect();
    let mut streams =
        addresses.map(|it| EchoConnection::connect(it).unwrap_or_else(|error| panic!("{it}: {error}")));
    let datagrams = addresses.map(Connected::new);
    datagrams.iter().for_each(|it| it.is_answered_by("before"));

    world.write(&[service()]);
    let mut agent = world.command(Build::Product).start(world.sandbox()).unwrap();
    let is_served = |it: &SocketAddr| request(Transport::Tcp, *it).is_ok_and(|name| name == "endpoint");
    agent.wait_until(LIMIT, || addresses.iter().all(is_served)).unwrap();
    for address in addresses {
        Connected::new(address).is_answered_by("endpoint");
    }
    for (stream, address) in streams.iter_mut().zip(addresses) {
        stream.ping().unwrap();
        assert_eq!((stream.name(), stream.stream().peer_addr().unwrap()), ("before", address));
    }
    datagrams.iter().for_each(|it| it.is_answered_by("before"));
    drop(before);
}

#[test]
fn a_load_balancer_ip_with_source_ranges_is_left_to_the_packet_path() {
    let Some(world) = TestNode::or_skip("a_load_balancer_ip_with_source_ranges_is_left_to_the_packet_path")
    else {
        return;
    };
    let _servers = servers(&world);
    let ips: [IpAddr; 2] = ["203.0.113.10", "fd00:10:eee::10"].map(|it| it.parse().unwrap());
    let ranges = ["192.0.2.0/24"];
    world.write(&[service().load_balancer_ips(&ips).source_ranges(&ranges)]);
    let mut agent = world.command(Build::Product).start(world.sandbox()).unwrap();
    // Only the family that has ranges is guarded.
    let open = SocketAddr::new(ips[1], 80);
    agent.wait_until(LIMIT, || request(Transport::Tcp, open).is_ok()).unwrap();
    assert_eq!(request(Transport::Udp, open).unwrap(), "endpoint");
    assert_eq!(request(Transport::Tcp, SocketAddr::new(web()[0], 80)).unwrap(), "endpoint");
    let guarded = SocketAddr::new(ips[0], 80);
    for transport in [Transport::Tcp, Transport::Udp, Transport::UdpUnconnected] {
        let error = request(transport, guarded).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(nix::libc::ENETUNREACH), "{transport:?}: {error}");
    }
    // Without ranges it is served.
    world.write(&[service().load_balancer_ips(&ips)]);
    assert!(eventually(LIMIT, || request(Transport::Tcp, guarded).is_ok()));
}

#[test]
fn a_bind_without_a_port_is_never_refused() {
    let Some(world) = TestNode::or_skip("a_bind_without_a_port_is_never_refused") else { return };
    let _servers = servers(&world);
    world.write(&[service()]);
    let mut agent = world.command(Build::Product).start(world.sandbox()).unwrap();
    agent.wait_until(LIMIT, || world.is_attached()).unwrap();
    // An older kernel does not tell that this is the node's namespace, and nothing is refused.
    assert_eq!(TcpListener::bind(("0.0.0.0", NODE_PORT)).is_err(), kernel_at_least(5, 14));
    // There is no other port to choose from; the canary would take it for a moment.
    agent.kill9().unwrap();
    fs::write("/proc/sys/net/ipv4/ip_local_port_range", format!("{NODE_PORT} {NODE_PORT}")).unwrap();
    for any in ["0.0.0.0:0", "[::]:0", "127.0.0.1:0"] {
        assert_eq!(TcpListener::bind(any).unwrap().local_addr().unwrap().port(), NODE_PORT);
        assert_eq!(UdpSocket::bind(any).unwrap().local_addr().unwrap().port(), NODE_PORT);
    }
}
