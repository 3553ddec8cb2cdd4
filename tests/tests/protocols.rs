//! Which sockets are translated: those of TCP and of UDP, each for itself, and no others.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    fs,
    io::{ErrorKind, Read as _},
    mem::MaybeUninit,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream},
    thread,
    time::Duration,
};

use nix::{
    errno::Errno,
    mount::{MsFlags, mount},
};
use socket2::{Domain, Protocol, Socket, Type};
use tests::{
    Agent, Build, EchoServer, TestNode, Transport, eventually, manifest::Service, request, sandbox::skip,
    scaled, test_node::CANARY,
};

const LIMIT: Duration = Duration::from_secs(10);
const PORT: u16 = 80;
const ENDPOINT: Ipv4Addr = Ipv4Addr::new(10, 244, 1, 1);
const ENDPOINT6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x10, 0x244, 0, 0, 0, 0, 1);
const WEB: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(10, 96, 0, 10)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 0, 0x10)),
];
const TRANSPORTS: [Transport; 3] = [Transport::Tcp, Transport::Udp, Transport::UdpUnconnected];
const EMPTY: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 66);

/// A node with a Service at TCP and UDP whose addresses are this host's as well: what is not translated is answered
/// here.
struct Node {
    _server: [EchoServer; 2],
    agent: Agent,
    world: TestNode,
}

impl Node {
    fn or_skip(test: &str) -> Option<Self> {
        let world = TestNode::or_skip(test)?;
        for address in WEB.into_iter().chain([ENDPOINT6.into()]) {
            world.netns().add_address(address).unwrap();
        }
        let endpoints = [IpAddr::from(ENDPOINT), ENDPOINT6.into()];
        let server = endpoints.map(|it| EchoServer::start("endpoint", SocketAddr::new(it, 8080)).unwrap());
        let web = Service::new("web", &WEB)
            .port("tcp", "TCP", PORT, 8080)
            .port("udp", "UDP", PORT, 8080)
            .endpoint("web", &endpoints);
        let empty = Service::new("empty", &[EMPTY.into()]).port("", "TCP", PORT, 8080);
        world.write(&[web, empty]);
        let mut agent = world.command(Build::Product).start(world.sandbox()).unwrap();
        agent.wait_until(LIMIT, || world.is_attached()).unwrap();
        for (ip, transport) in WEB.into_iter().flat_map(|ip| TRANSPORTS.map(|it| (ip, it))) {
            assert_eq!(request(transport, SocketAddr::new(ip, PORT)).unwrap(), "endpoint");
        }
        Some(Self { _server: server, agent, world })
    }
}

#[test]
fn tcp_and_udp_of_one_port_are_two_frontends() {
    let Some(mut node) = Node::or_skip("tcp_and_udp_of_one_port_are_two_frontends") else { return };
    // One Service with two targets, and two Services that share an address.
    let shared = IpAddr::from([203, 0, 113, 7]);
    let of = |name: &str, ip: u8, protocol, target| {
        Service::new(name, &[[10, 96, 1, ip].into()])
            .port("", protocol, 53, target)
            .external_ips(&[shared])
            .endpoint(name, &[ENDPOINT.into()])
    };
    let both = Service::new("both", &[[10, 96, 1, 3].into()])
        .port("stream", "TCP", 53, 5301)
        .port("datagram", "UDP", 53, 5302)
        .endpoint("both", &[ENDPOINT.into()]);
    let services = [of("stream", 1, "TCP", 5301), of("datagram", 2, "UDP", 5302), both];
    let _servers = [("stream", 5301), ("datagram", 5302)]
        .map(|(name, port)| EchoServer::start(name, SocketAddr::from((ENDPOINT, port))).unwrap());
    let wanted = |ip: IpAddr| {
        let address = SocketAddr::new(ip, 53);
        request(Transport::Tcp, address).is_ok_and(|it| it == "stream")
            && request(Transport::Udp, address).is_ok_and(|it| it == "datagram")
            && request(Transport::UdpUnconnected, address).is_ok_and(|it| it == "datagram")
    };
    node.world.write(&services);
    node.agent.wait_until(LIMIT, || wanted(shared)).unwrap();
    assert!(wanted([10, 96, 1, 3].into()));
    // What a Service does not have is not translated, and no route leads there.
    for (ip, transport) in [(1, Transport::Udp), (1, Transport::UdpUnconnected), (2, Transport::Tcp)] {
        let error = request(transport, SocketAddr::from(([10, 96, 1, ip], 53))).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NetworkUnreachable, "{transport:?}: {error}");
    }
}

/// A socket of another protocol than TCP and UDP reaches whoever is really at the Service's address, and no hook tells
/// it otherwise.
#[track_caller]
fn passes(protocol: Protocol, ip: IpAddr) {
    let address = SocketAddr::new(ip, PORT);
    let kind = if protocol == Protocol::SCTP { Type::STREAM } else { Type::DGRAM };
    let socket = || {
        let socket = Socket::new(Domain::for_address(address), kind, Some(protocol)).unwrap();
        socket.set_read_timeout(Some(scaled(Duration::from_secs(2)))).unwrap();
        socket
    };
    let (host, client) = (socket(), socket());
    host.bind(&address.into()).unwrap();
    let peer = if kind == Type::STREAM {
        host.listen(1).unwrap();
        client.connect(&address.into()).unwrap();
        let (accepted, _) = host.accept().unwrap();
        accepted
    } else {
        client.connect(&address.into()).unwrap();
        client.send(b"connected").unwrap();
        client.send_to(b"named", &address.into()).unwrap();
        let unconnected = socket();
        unconnected.send_to(b"unconnected", &address.into()).unwrap();
        host
    };
    assert_eq!(client.peer_addr().unwrap().as_socket().unwrap(), address);
    let mut buffer = [MaybeUninit::uninit(); 64];
    if kind == Type::STREAM {
        client.send(b"connected").unwrap();
        assert_eq!(peer.recv(&mut buffer).unwrap(), "connected".len());
        return;
    }
    for sent in ["connected", "named", "unconnected"] {
        assert_eq!(peer.recv(&mut buffer).unwrap(), sent.len(), "{protocol:?}");
    }
}

#[test]
fn sctp_passes_untouched() {
    const NAME: &str = "sctp_passes_untouched";
    if let Err(error) = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::SCTP)) {
        skip(NAME, &format!("this kernel has no SCTP: {error}"));
        return;
    }
    let Some(_node) = Node::or_skip(NAME) else { return };
    WEB.iter().for_each(|ip| passes(Protocol::SCTP, *ip));
}

#[test]
fn udp_lite_passes_untouched() {
    const NAME: &str = "udp_lite_passes_untouched";
    if let Err(error) = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDPLITE)) {
        skip(NAME, &format!("this kernel has no UDP-Lite: {error}"));
        return;
    }
    let Some(node) = Node::or_skip(NAME) else { return };
    WEB.iter().for_each(|ip| passes(Protocol::UDPLITE, *ip));
    // Nor do the canary's addresses, of which every program knows without a table.
    node.world.netns().add_address(CANARY[1]).unwrap();
    CANARY.iter().for_each(|ip| passes(Protocol::UDPLITE, *ip));
}

#[test]
fn icmp_passes_untouched() {
    let Some(_node) = Node::or_skip("icmp_passes_untouched") else { return };
    // Any group may ask.
    fs::write("/proc/sys/net/ipv4/ping_group_range", "0 2147483647").unwrap();
    for (ip, protocol) in WEB.into_iter().zip([Protocol::ICMPV4, Protocol::ICMPV6]) {
        let (request, reply) = if ip.is_ipv4() { (8, 0) } else { (128, 129) };
        for kind in [Type::DGRAM, Type::RAW] {
            let socket = Socket::new(Domain::for_address((ip, 0).into()), kind, Some(protocol)).unwrap();
            socket.set_read_timeout(Some(scaled(Duration::from_secs(2)))).unwrap();
            // Raw sockets have no port, and refuse to be given one over IPv6.
            let port = if kind == Type::RAW { 0 } else { PORT };
            socket.connect(&SocketAddr::new(ip, port).into()).unwrap();
            if kind == Type::DGRAM {
                let peer = socket.peer_addr().unwrap().as_socket().unwrap();
                assert_eq!(peer, SocketAddr::new(ip, PORT), "{protocol:?}");
            }
            let mut echo = [request, 0, 0, 0, 0x12, 0x34, 0, 1];
            // Whose checksum the kernel writes elsewhere: it is the only one.
            let checksum = !(u16::from_be_bytes([request, 0]) + 0x1234 + 1);
            echo[2..4].copy_from_slice(&checksum.to_be_bytes());
            socket.send(&echo).unwrap();
            assert!(
                is_answered(&socket, reply, ip.is_ipv4() && kind == Type::RAW),
                "{protocol:?} {kind:?} {ip}"
            );
        }
    }
}

/// Whether a message of this type comes, after other ones.
fn is_answered(socket: &Socket, wanted: u8, with_header: bool) -> bool {
    let mut buffer = [0; 256];
    let mut socket = socket;
    while let Ok(length) = socket.read(&mut buffer) {
        let begin = if with_header { usize::from(buffer[0] & 0xf) * 4 } else { 0 };
        if begin < length && buffer[begin] == wanted {
            return true;
        }
    }
    false
}

/// Has the kernel mount a share, in the name of whoever mounts, and says how that fails.
fn mount_share(node: &Node, ip: Ipv4Addr) -> Errno {
    let place = node.world.sandbox().files().join("share");
    fs::create_dir_all(&place).unwrap();
    let unc = format!("\\\\{ip}\\share");
    let options = format!("ip={ip},unc={unc},port={PORT},username=u,password=p,vers=3.0");
    let source = format!("//{ip}/share");
    mount(Some(&*source), &place, Some("cifs"), MsFlags::empty(), Some(&*options)).unwrap_err()
}

/// A node whose kernel has a client that can be tried.
fn node_with_client_or_skip(test: &str) -> Option<Node> {
    if !fs::read_to_string("/proc/filesystems").unwrap().lines().any(|it| it.ends_with("\tcifs")) {
        skip(test, "this kernel has no CIFS");
        return None;
    }
    Node::or_skip(test)
}

#[test]
fn a_client_in_the_kernel_is_refused_and_not_forbidden() {
    let name = "a_client_in_the_kernel_is_refused_and_not_forbidden";
    let Some(node) = node_with_client_or_skip(name) else { return };
    assert_eq!(mount_share(&node, EMPTY), Errno::ECONNREFUSED);
    assert_eq!(TcpStream::connect((EMPTY, PORT)).unwrap_err().kind(), ErrorKind::ConnectionRefused);
}

#[test]
fn a_client_in_the_kernel_reaches_a_service_and_leaves_nothing() {
    let name = "a_client_in_the_kernel_reaches_a_service_and_leaves_nothing";
    let Some(node) = node_with_client_or_skip(name) else { return };
    let share = Ipv4Addr::new(10, 96, 0, 68);
    let listener = TcpListener::bind((ENDPOINT, 4450)).unwrap();
    let service =
        Service::new("share", &[share.into()]).port("", "TCP", PORT, 4450).endpoint("s", &[ENDPOINT.into()]);
    node.world.write(&[service]);
    assert!(eventually(LIMIT, || TcpStream::connect((share, PORT)).is_ok()));
    drop(listener.accept().unwrap());
    assert!(eventually(LIMIT, || node.world.used_socket_slots() == 0));
    let server = thread::spawn(move || drop(listener.accept().unwrap()));
    // The server hangs up, whatever the client makes of that.
    mount_share(&node, share);
    assert!(eventually(LIMIT, || server.is_finished()));
    assert_eq!(node.world.used_socket_slots(), 0, "its release is told to nobody");
}
