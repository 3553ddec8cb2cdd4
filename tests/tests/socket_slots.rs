//! Where a connected socket remembers the Service: a slot that nobody takes from it, and that it gives back.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    io::Read as _,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream, UdpSocket},
    time::Duration,
};

use socket2::{Domain, Protocol, Socket, Type};
use tests::{
    Agent, Build, EchoConnection, EchoServer, TestNode, Transport, agent::AgentCommand, eventually,
    http::metric, manifest::Service, program_stats::ProgramStats, request, sandbox::skip,
};

const LIMIT: Duration = Duration::from_secs(10);
const WEB: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 96, 0, 10), 80);
const ENDPOINT: Ipv4Addr = Ipv4Addr::new(10, 244, 1, 1);

struct Node {
    _server: EchoServer,
    agent: Agent,
    world: TestNode,
}

impl Node {
    fn or_skip(test: &str, slots: &str) -> Option<Self> {
        Self::with(test, |world| world.command(Build::Product).arg("--socket-slots").arg(slots))
    }

    fn with(test: &str, setting: impl Fn(&TestNode) -> AgentCommand) -> Option<Self> {
        let world = TestNode::or_skip(test)?;
        let server = EchoServer::start("web", SocketAddr::from((ENDPOINT, 8080))).unwrap();
        let web = Service::new("web", &[WEB.0.into()])
            .port("tcp", "TCP", 80, 8080)
            .port("udp", "UDP", 80, 8080)
            .endpoint("web", &[IpAddr::from(ENDPOINT)]);
        world.write(&[web]);
        let mut agent = setting(&world).start(world.sandbox()).unwrap();
        agent.wait_until(LIMIT, || request(Transport::Tcp, WEB.into()).is_ok()).unwrap();
        Some(Self { _server: server, agent, world })
    }
}

#[test]
fn sockets_beyond_the_slots_remember_too() {
    let Some(node) = Node::or_skip("sockets_beyond_the_slots_remember_too", "2") else { return };
    let mut probes: Vec<_> = (0..20).map(|_| EchoConnection::connect(WEB.into()).unwrap()).collect();
    let sockets: Vec<_> = (0..20).map(|_| UdpSocket::bind("0.0.0.0:0").unwrap()).collect();
    for socket in &sockets {
        socket.connect(WEB).unwrap();
    }
    assert_eq!(node.world.used_socket_slots(), 2);
    assert!(eventually(LIMIT, || metric("kube_proxy_ebpf_socket_slot_overflows_total") >= Some(38.0)));
    for probe in &mut probes {
        probe.ping().unwrap();
        assert_eq!(probe.stream().peer_addr().unwrap(), WEB.into());
    }
    // One that goes to the endpoint itself is not shown the Service any more, wherever it remembered it.
    for socket in &sockets {
        assert_eq!(socket.peer_addr().unwrap(), WEB.into());
        socket.connect((ENDPOINT, 8080)).unwrap();
        assert_eq!(socket.peer_addr().unwrap(), (ENDPOINT, 8080).into());
    }
}

#[test]
fn a_closed_socket_leaves_its_slot() {
    let Some(node) = Node::or_skip("a_closed_socket_leaves_its_slot", "65536") else { return };
    assert!(eventually(LIMIT, || node.world.used_socket_slots() == 0));
    let probes: Vec<_> = (0..100).map(|_| EchoConnection::connect(WEB.into()).unwrap()).collect();
    let copies: Vec<_> = probes.iter().map(|it| it.stream().try_clone().unwrap()).collect();
    assert_eq!(node.world.used_socket_slots(), 100);
    drop(probes);
    assert_eq!(node.world.used_socket_slots(), 100, "a copy of the descriptor is the same socket");
    assert!(copies.iter().all(|it| it.peer_addr().unwrap() == WEB.into()));
    drop(copies);
    assert_eq!(node.world.used_socket_slots(), 0);
}

#[test]
fn a_process_in_the_root_cgroup_is_not_taken_for_the_kernel() {
    let Some(node) = Node::or_skip("a_process_in_the_root_cgroup_is_not_taken_for_the_kernel", "65536")
    else {
        return;
    };
    assert!(eventually(LIMIT, || node.world.used_socket_slots() == 0));
    let tcp = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP)).unwrap();
    let tcp6 = Socket::new(Domain::IPV6, Type::STREAM, Some(Protocol::TCP)).unwrap();
    let (udp, udp6) = (UdpSocket::bind("0.0.0.0:0").unwrap(), UdpSocket::bind("[::]:0").unwrap());
    let root = node.world.sandbox().call_from_root().unwrap();
    let mapped = SocketAddr::from((WEB.0.to_ipv6_mapped(), WEB.1));
    tcp.connect(&SocketAddr::from(WEB).into()).unwrap();
    tcp6.connect(&mapped.into()).unwrap();
    udp.connect(WEB).unwrap();
    udp6.connect(mapped).unwrap();
    assert_eq!(node.world.used_socket_slots(), 4);
    drop(root);
    assert_eq!(tcp.peer_addr().unwrap().as_socket(), Some(WEB.into()));
    assert_eq!(udp6.peer_addr().unwrap(), mapped);
    drop((tcp, tcp6, udp, udp6));
    assert_eq!(node.world.used_socket_slots(), 0);
}

#[test]
fn programs_do_without_what_the_verifier_refuses_to_have_read() {
    let node = Node::with("programs_do_without_what_the_verifier_refuses_to_have_read", |world| {
        world.command(Build::Failpoints).env("KUBE_PROXY_EBPF_FAULT", "sockets-not-shown")
    });
    let Some(node) = node else { return };
    assert!(node.agent.log().contains("who calls is asked instead: load of program"), "{}", node.agent.log());
    assert!(eventually(LIMIT, || node.world.used_socket_slots() == 0));
    let probe = EchoConnection::connect(WEB.into()).unwrap();
    assert_eq!(probe.stream().peer_addr().unwrap(), WEB.into());
    assert_eq!(node.world.used_socket_slots(), 1);
    drop(probe);
    assert_eq!(node.world.used_socket_slots(), 0);
}

/// A verifier of another version may go through ten times as many: that of Linux 5.15 once gave up on a program for which
/// that of 6.18 needed 74,000.
#[test]
fn programs_leave_verifiers_room() {
    const TEST: &str = "programs_leave_verifiers_room";
    let Some(node) = Node::or_skip(TEST, "65536") else { return };
    assert!(eventually(LIMIT, || node.world.is_attached()));
    for hook in ["connect4", "connect6", "sendmsg4", "sendmsg6", "recvmsg4", "recvmsg6", "sock_release"] {
        let Some(instructions) = ProgramStats::of_verifier(&node.world.program(hook)).unwrap() else {
            skip(TEST, "this kernel does not tell what its verifier goes through (Linux 5.16)");
            return;
        };
        assert!((1..100_000).contains(&instructions), "{hook}: {instructions}");
    }
}

#[test]
fn an_mptcp_client_reaches_a_service_and_leaves_nothing() {
    let Some(node) = Node::or_skip("an_mptcp_client_reaches_a_service_and_leaves_nothing", "65536") else {
        return;
    };
    let mptcp = match Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::MPTCP)) {
        Ok(socket) => socket,
        Err(error) => {
            let reason = format!("this kernel has no MPTCP: {error}");
            skip("an_mptcp_client_reaches_a_service_and_leaves_nothing", &reason);
            return;
        }
    };
    assert!(eventually(LIMIT, || node.world.used_socket_slots() == 0));
    mptcp.connect(&SocketAddr::from(WEB).into()).unwrap();
    let mut greeting = [0; 4];
    TcpStream::from(mptcp).read_exact(&mut greeting).unwrap();
    assert_eq!(&greeting, b"web\n");
    assert_eq!(node.world.used_socket_slots(), 0, "no program can ask for the peer of a subflow");
}
