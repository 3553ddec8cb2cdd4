//! Socket slots: the Service of a connected socket is kept in a slot, which is never taken over and is freed on close.

use std::{
    fs,
    io::Read as _,
    net::{SocketAddr, TcpStream, UdpSocket},
};

use aya::{
    maps::{Array, MapData},
    programs::ProgramInfo,
};
use socket2::{Domain, Protocol, Socket, Type};
use tests::{
    AgentCommand, Build, EchoConnection, FRONTEND, TIMEOUT, TestNode, Transport, WEB4, connected_udp_socket,
    endpoint, eventually, http::health_status, metric, request, run, skip, web,
};

/// The default number of slots.
const MANY: [&str; 2] = ["--socket-slots", "65536"];

fn node_or_skip(command: impl Fn(AgentCommand) -> AgentCommand, build: Build) -> Option<TestNode> {
    let mut node = TestNode::prepared_or_skip([1], &[web([1])])?;
    node.start_with(&command(node.command(build)));
    assert_eq!(request(Transport::Tcp, FRONTEND).unwrap(), "web-1");
    Some(node)
}

fn node_with_slots_or_skip(arguments: [&str; 2]) -> Option<TestNode> {
    let node = node_or_skip(|it| it.args(arguments), Build::Product)?;
    assert!(eventually(TIMEOUT, || node.used_socket_slots() == 0));
    Some(node)
}

fn connect() -> EchoConnection {
    EchoConnection::connect(FRONTEND).unwrap()
}

#[test]
fn sockets_beyond_the_slots_keep_their_service() {
    let Some(node) = node_with_slots_or_skip(["--socket-slots", "8"]) else { return };
    let mut connections: Vec<_> = (0..20).map(|_| connect()).collect();
    let sockets: Vec<_> = (0..20).map(|_| connected_udp_socket(FRONTEND).unwrap()).collect();
    // A network namespace may use a quarter of them.
    assert_eq!(node.used_socket_slots(), 2);
    assert!(eventually(TIMEOUT, || metric("kube_proxy_ebpf_socket_overflow_sockets_total") >= Some(38.0)));
    for connection in &mut connections {
        connection.ping().unwrap();
        assert_eq!(connection.stream().peer_addr().unwrap(), FRONTEND);
    }
    // A socket that reconnects to the endpoint itself shows the endpoint, wherever its Service was stored.
    let direct = SocketAddr::new(endpoint(1)[0], 8080);
    for socket in &sockets {
        assert_eq!(socket.peer_addr().unwrap(), FRONTEND);
        socket.connect(direct).unwrap();
        assert_eq!(socket.peer_addr().unwrap(), direct);
    }
}

#[test]
fn sockets_of_the_node_that_have_used_up_their_share_do_not_make_it_unhealthy() {
    let small = |it: AgentCommand| it.args(["--socket-slots", "8", "--udp-addresses", "8"]);
    let Some(node) = node_or_skip(small, Build::Product) else { return };
    // A TCP socket without room shows the endpoint.
    let is_stored = |it: &EchoConnection| it.stream().peer_addr().unwrap() == FRONTEND;
    let mut held: Vec<_> = std::iter::repeat_with(connect).take_while(is_stored).collect();
    let is_known =
        |hook: &str| metric(&format!("kube_proxy_ebpf_probe_success{{hook=\"{hook}\"}}")).is_some();
    let without_room = eventually(TIMEOUT, || {
        // The last room may have been the probe's.
        held.extend(std::iter::repeat_with(connect).take_while(is_stored));
        is_known("connect4") && !is_known("getpeername4") && !is_known("sendmsg4")
    });
    assert!(without_room, "{}", node.log());
    assert_eq!(metric("kube_proxy_ebpf_probe_success{hook=\"connect4\"}"), Some(1.0));
    assert_eq!(health_status("/livez"), 200);
    let check = run(&mut node.cli("check"));
    assert!(check.stdout.contains("have used up their share"), "{}", check.stdout);
    drop(held);
    assert!(eventually(TIMEOUT, || is_known("getpeername4") && is_known("sendmsg4")));
}

#[test]
fn a_closed_socket_frees_its_slot() {
    let Some(node) = node_with_slots_or_skip(MANY) else { return };
    let connections: Vec<_> = (0..100).map(|_| connect()).collect();
    let copies: Vec<_> = connections.iter().map(|it| it.stream().try_clone().unwrap()).collect();
    assert_eq!(node.used_socket_slots(), 100);
    drop(connections);
    assert_eq!(node.used_socket_slots(), 100, "a duplicated descriptor is the same socket");
    assert!(copies.iter().all(|it| it.peer_addr().unwrap() == FRONTEND));
    drop(copies);
    assert_eq!(node.used_socket_slots(), 0);
    // Nor is it counted any more: the share of the namespace is free. (The agent's probe may have one at any moment.)
    assert!(eventually(TIMEOUT, || counted_slots(&node) == 0));
}

/// How many slots are counted in the shares of network namespaces.
fn counted_slots(node: &TestNode) -> u64 {
    let shares: Array<MapData, u64> = node.map("sock_nat4/slot_shares").try_into().unwrap();
    shares.iter().map(Result::unwrap).sum()
}

#[test]
fn a_process_in_the_root_cgroup_is_not_mistaken_for_the_kernel() {
    let Some(node) = node_with_slots_or_skip(MANY) else { return };
    let tcp = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP)).unwrap();
    let tcp6 = Socket::new(Domain::IPV6, Type::STREAM, Some(Protocol::TCP)).unwrap();
    let (udp, udp6) = (UdpSocket::bind("0.0.0.0:0").unwrap(), UdpSocket::bind("[::]:0").unwrap());
    let root = node.sandbox().enter_root_cgroup().unwrap();
    let mapped = SocketAddr::from((WEB4.to_ipv6_mapped(), 80));
    tcp.connect(&FRONTEND.into()).unwrap();
    tcp6.connect(&mapped.into()).unwrap();
    udp.connect(FRONTEND).unwrap();
    udp6.connect(mapped).unwrap();
    assert_eq!(node.used_socket_slots(), 4);
    drop(root);
    assert_eq!(tcp.peer_addr().unwrap().as_socket(), Some(FRONTEND));
    assert_eq!(udp6.peer_addr().unwrap(), mapped);
    drop((tcp, tcp6, udp, udp6));
    assert_eq!(node.used_socket_slots(), 0);
}

#[test]
fn helpers_read_sockets_if_the_verifier_rejects_a_cast() {
    const TEXT: &str = "programs cannot cast sockets on this kernel; slower helpers read them";
    let failing = |it: AgentCommand| it.env("KUBE_PROXY_EBPF_FAULT", "sockets-not-cast");
    let Some(node) = node_or_skip(failing, Build::Failpoints) else { return };
    if !fs::read_to_string("/proc/kallsyms").unwrap().contains(" bpf_rdonly_cast") {
        return skip("this kernel has no bpf_rdonly_cast (Linux 6.2)");
    }
    assert!(node.log().contains(TEXT), "{}", node.log());
    let connection = connect();
    assert_eq!(node.used_socket_slots(), 1);
    drop((connection, node));
    let Some(node) = node_or_skip(|it| it, Build::Product) else { return };
    assert!(!node.log().contains(TEXT), "{}", node.log());
}

#[test]
fn programs_fall_back_if_the_verifier_rejects_socket_reads() {
    let failing = |it: AgentCommand| it.env("KUBE_PROXY_EBPF_FAULT", "sockets-not-shown");
    let Some(mut node) = node_or_skip(failing, Build::Failpoints) else { return };
    node.wait_until_logged(&["the calling process is checked instead", "error=\"load of program"]);
    assert!(eventually(TIMEOUT, || node.used_socket_slots() == 0));
    let connection = connect();
    assert_eq!(connection.stream().peer_addr().unwrap(), FRONTEND);
    assert_eq!(node.used_socket_slots(), 1);
    drop(connection);
    assert_eq!(node.used_socket_slots(), 0);
}

/// Another version's verifier may process ten times as many instructions: that of Linux 5.15 once gave up on a program
/// for which that of 6.18 needed 74,000; that of today's programs is tried by the tests on old kernels.
#[test]
fn programs_stay_far_below_the_verifier_limit() {
    let Some(node) = node_with_slots_or_skip(MANY) else { return };
    for hook in
        ["connect4", "connect6", "sendmsg4", "sendmsg6", "recvmsg4", "recvmsg6", "sock_release", "sock_ops"]
    {
        let Some(instructions) =
            ProgramInfo::from_pin(node.program(hook)).unwrap().verified_instruction_count()
        else {
            return skip("this kernel does not report the number of verified instructions (Linux 5.16)");
        };
        assert!((1..120_000).contains(&instructions), "{hook}: {instructions}");
    }
}

#[test]
fn an_mptcp_client_reaches_a_service_and_leaks_no_slot() {
    let Some(node) = node_with_slots_or_skip(MANY) else { return };
    let mptcp = match Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::MPTCP)) {
        Ok(socket) => socket,
        Err(error) => return skip(&format!("this kernel has no MPTCP: {error}")),
    };
    mptcp.connect(&FRONTEND.into()).unwrap();
    let mut greeting = [0; 6];
    TcpStream::from(mptcp).read_exact(&mut greeting).unwrap();
    assert_eq!(&greeting, b"web-1\n");
    assert_eq!(node.used_socket_slots(), 0, "no program can run getpeername on a subflow");
}
