//! Protocols other than TCP and UDP are not translated.

use std::{
    fs,
    io::{ErrorKind, Read as _},
    mem::MaybeUninit,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    thread,
};

use nix::{
    errno::Errno,
    mount::{MsFlags, mount},
};
use socket2::{Domain, Protocol, Socket, Type};
use tests::{
    REQUEST_TIMEOUT, Service, TIMEOUT, TestNode, Transport, WEB, endpoint, eventually, request, scaled, skip,
    test_node::PROBE, web, web_frontends,
};

const PORT: u16 = 80;
const EMPTY: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 66);

/// A node with `web`, whose cluster IPs are local so that untranslated traffic gets here, and a Service without endpoints.
fn node_or_skip() -> Option<TestNode> {
    let mut node = TestNode::or_skip()?;
    WEB.iter().for_each(|it| node.netns().add_ipvs_address(*it).unwrap());
    node.serve([1]);
    let empty = Service::new("empty", &[EMPTY.into()]).port("", "TCP", PORT, 8080);
    node.write(&[web([1]), empty]);
    node.start(&[]);
    for (frontend, transport) in web_frontends().into_iter().flat_map(|it| Transport::ALL.map(|by| (it, by)))
    {
        assert_eq!(request(transport, frontend).unwrap(), "web-1");
    }
    Some(node)
}

/// A socket of this protocol reaches the server that really has the Service's address; no hook changes an address it sees.
#[track_caller]
fn passes(protocol: Protocol, ip: IpAddr) {
    let address = SocketAddr::new(ip, PORT);
    let kind = if protocol == Protocol::SCTP { Type::STREAM } else { Type::DGRAM };
    let socket = || {
        let socket = Socket::new(Domain::for_address(address), kind, Some(protocol)).unwrap();
        socket.set_read_timeout(Some(scaled(REQUEST_TIMEOUT))).unwrap();
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
    if let Err(error) = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::SCTP)) {
        return skip(&format!("this kernel has no SCTP: {error}"));
    }
    let Some(_node) = node_or_skip() else { return };
    WEB.iter().for_each(|ip| passes(Protocol::SCTP, *ip));
}

#[test]
fn udp_lite_passes_untouched() {
    if let Err(error) = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDPLITE)) {
        return skip(&format!("this kernel has no UDP-Lite: {error}"));
    }
    let Some(node) = node_or_skip() else { return };
    WEB.iter().for_each(|ip| passes(Protocol::UDPLITE, *ip));
    // The same holds for the probe's addresses, which are constants of every program.
    node.netns().add_address(PROBE[1]).unwrap();
    // The programs redirect the connect that shows whether there is a route yet.
    let lite = Socket::new(Domain::IPV6, Type::DGRAM, Some(Protocol::UDPLITE)).unwrap();
    assert!(eventually(TIMEOUT, || lite.connect(&SocketAddr::new(PROBE[1], PORT).into()).is_ok()));
    PROBE.iter().for_each(|ip| passes(Protocol::UDPLITE, *ip));
}

#[test]
fn icmp_passes_untouched() {
    let Some(node) = node_or_skip() else { return };
    // Any group may open ICMP sockets.
    node.netns().set_sysctl("ipv4/ping_group_range", "0 2147483647").unwrap();
    for (ip, protocol) in WEB.into_iter().zip([Protocol::ICMPV4, Protocol::ICMPV6]) {
        let (request, reply) = if ip.is_ipv4() { (8, 0) } else { (128, 129) };
        for kind in [Type::DGRAM, Type::RAW] {
            let socket = Socket::new(Domain::for_address((ip, 0).into()), kind, Some(protocol)).unwrap();
            socket.set_read_timeout(Some(scaled(REQUEST_TIMEOUT))).unwrap();
            // Raw sockets have no port; over IPv6 connect rejects one.
            let port = if kind == Type::RAW { 0 } else { PORT };
            socket.connect(&SocketAddr::new(ip, port).into()).unwrap();
            if kind == Type::DGRAM {
                let peer = socket.peer_addr().unwrap().as_socket().unwrap();
                assert_eq!(peer, SocketAddr::new(ip, PORT), "{protocol:?}");
            }
            let mut echo = [request, 0, 0, 0, 0x12, 0x34, 0, 1];
            // The kernel computes the checksum for all other kinds of sockets.
            let checksum = !(u16::from_be_bytes([request, 0]) + 0x1234 + 1);
            echo[2..4].copy_from_slice(&checksum.to_be_bytes());
            socket.send(&echo).unwrap();
            let has_header = ip.is_ipv4() && kind == Type::RAW;
            assert!(receives(&socket, reply, has_header), "{protocol:?} {kind:?} {ip}");
        }
    }
}

/// Whether a message of this type is received, possibly after others.
fn receives(socket: &Socket, wanted: u8, has_header: bool) -> bool {
    let mut buffer = [0; 256];
    let mut socket = socket;
    while let Ok(length) = socket.read(&mut buffer) {
        let begin = if has_header { usize::from(buffer[0] & 0xf) * 4 } else { 0 };
        if begin < length && buffer[begin] == wanted {
            return true;
        }
    }
    false
}

/// Has the kernel mount a CIFS share, which fails: the error.
fn mount_share(node: &TestNode, ip: Ipv4Addr) -> Errno {
    let mount_point = node.sandbox().files().join("share");
    fs::create_dir_all(&mount_point).unwrap();
    let unc = format!("\\\\{ip}\\share");
    let options = format!("ip={ip},unc={unc},port={PORT},username=u,password=p,vers=3.0");
    let source = format!("//{ip}/share");
    mount(Some(&*source), &mount_point, Some("cifs"), MsFlags::empty(), Some(&*options)).unwrap_err()
}

fn node_with_cifs_or_skip() -> Option<TestNode> {
    if !fs::read_to_string("/proc/filesystems").unwrap().lines().any(|it| it.ends_with("\tcifs")) {
        skip("this kernel has no CIFS");
        return None;
    }
    node_or_skip()
}

#[test]
fn an_in_kernel_client_is_refused_with_econnrefused() {
    let Some(node) = node_with_cifs_or_skip() else { return };
    assert_eq!(mount_share(&node, EMPTY), Errno::ECONNREFUSED);
    assert_eq!(TcpStream::connect((EMPTY, PORT)).unwrap_err().kind(), ErrorKind::ConnectionRefused);
}

#[test]
fn an_in_kernel_client_reaches_a_service_and_leaks_no_slot() {
    let Some(node) = node_with_cifs_or_skip() else { return };
    let share = Ipv4Addr::new(10, 96, 0, 68);
    let pod = endpoint(1)[0];
    let listener = TcpListener::bind((pod, 4450)).unwrap();
    let service = Service::new("share", &[share.into()]).port("", "TCP", PORT, 4450).endpoint("s", &[pod]);
    node.write(&[service]);
    assert!(eventually(TIMEOUT, || TcpStream::connect((share, PORT)).is_ok()));
    drop(listener.accept().unwrap());
    assert!(eventually(TIMEOUT, || node.used_socket_slots() == 0));
    let server = thread::spawn(move || drop(listener.accept().unwrap()));
    // The server closes the connection at once; the client's error does not matter.
    mount_share(&node, share);
    assert!(eventually(TIMEOUT, || server.is_finished()));
    assert_eq!(node.used_socket_slots(), 0, "no program runs when the kernel releases its socket");
}
