//! What sockets leave to packets: calls about which only NAT knows enough. `--backend nft`, where packets do everything, is the
//! control of each test.

use std::{
    io::ErrorKind,
    net::{IpAddr, SocketAddr, TcpStream, UdpSocket},
    time::Duration,
};

use nix::{
    libc, setsockopt_impl, sockopt_impl,
    sys::socket::{setsockopt, sockopt},
};
use socket2::{Domain, Socket, Type};
use tests::{
    EchoServer, NetNs, REQUEST_TIMEOUT, Service, TIMEOUT, TestCluster, Transport, connected_udp_socket,
    eventually, exchange, exchange_connected, kernel_at_least, manifest, metric, scaled, skip,
};

use super::*;
use crate::pod_annotations;

/// Runs a test with each backend and with sockets of pods and nodes with the proxy.
fn each(services: &[Service], arguments: &[&str], test: impl Fn(RunningCluster)) {
    RunningCluster::each(services, arguments, |it| test(it.enter()));
}

fn cluster_or_skip(services: &[Service], arguments: &[&str]) -> Option<RunningCluster> {
    Some(RunningCluster::or_skip("ebpf", services, arguments)?.enter())
}

/// The counter `kube_proxy_ebpf_SERIES` of a port of `default/NAME`, which is named after its protocol.
fn counter(it: &RunningCluster, series: &str, name: &str, port: &str) -> Option<f64> {
    let protocol = port.to_uppercase();
    let labels = format!(r#"namespace="default",service="{name}",port="{port}",protocol="{protocol}""#);
    it.n1.run(|| metric(&format!("kube_proxy_ebpf_{series}{{{labels}}}")))
}

/// How many calls to `default/NAME` were left to packets.
fn left(it: &RunningCluster, name: &str, port: &str) -> Option<f64> {
    counter(it, "left_to_packets_total", name, port)
}

fn bound(transport: Type, address: SocketAddr) -> Socket {
    let socket = Socket::new(Domain::for_address(address), transport, None).unwrap();
    socket.set_reuse_address(true).unwrap();
    socket.set_read_timeout(Some(scaled(REQUEST_TIMEOUT))).unwrap();
    socket.bind(&address.into()).unwrap();
    socket
}

fn udp(address: SocketAddr) -> UdpSocket {
    bound(Type::DGRAM, address).into()
}

/// Whether a client gets the answer of a server that it sends to.
fn is_answered(server: (&NetNs, SocketAddr), client: (&NetNs, SocketAddr), by: Answer) -> bool {
    let (server_netns, address) = server;
    let socket = server_netns.run(|| udp(address));
    let client = client.0.run(|| udp(client.1));
    client.send_to(b"question", address).unwrap();
    let mut buffer = [0; 16];
    let (_, from) = socket.recv_from(&mut buffer).unwrap();
    match by {
        Answer::SendTo => socket.send_to(b"answer", from).unwrap(),
        Answer::SecondSocket => server_netns.run(|| {
            let second = udp(address);
            second.connect(from).unwrap();
            second.send(b"answer").unwrap()
        }),
    };
    client.set_read_timeout(Some(scaled(Duration::from_secs(2)))).unwrap();
    client.recv_from(&mut buffer).is_ok_and(|it| it == ("answer".len(), address))
}

#[derive(Clone, Copy, Debug)]
enum Answer {
    /// By `sendto`.
    SendTo,
    /// By a socket that it connects to the client, as servers of DTLS and QUIC do.
    SecondSocket,
}

#[test]
fn an_answer_is_no_request_to_a_service_whatever_the_clients_port() {
    const SIP: u16 = 5060;
    let web = internal("web", 1).endpoint_on("n2", "p3", &P3);
    let sip = Service::new("sip", &cluster_ips(2)).port("", "UDP", SIP, TARGET).load_balancer_ips(&N2);
    let services = [web, sip.endpoint_on("n2", "p3", &P3)];
    each(&services, &[], |it| {
        for (server, client) in P1.into_iter().zip(N2) {
            for (port, by) in [NODE_PORT + 1, SIP]
                .into_iter()
                .flat_map(|it| [(it, Answer::SendTo), (it, Answer::SecondSocket)])
            {
                // Both programs may use the same port.
                for server in [5555, port].map(|it| at(server, it)) {
                    let client = at(client, port);
                    let is_answered = is_answered((&it.pods[0], server), (&it.n2, client), by);
                    assert!(is_answered, "{client} is not answered by {by:?} of {server}");
                }
            }
        }
        // Whom the socket has not heard from is reached at its Service, also from a port that was answered.
        for (n2, p1) in N2.into_iter().zip(P1) {
            let client = it.pods[0].run(|| udp(at(p1, 5556)));
            let (name, from) = exchange(&client, at(n2, SIP)).unwrap();
            assert!(name.starts_with("p3 ") && from == at(n2, SIP), "{name} at {from}");
        }
    });
}

#[test]
fn udp_to_a_service_without_endpoints_fails_later_and_arrives_once_there_are_some() {
    let empty = [internal("empty", 1)];
    each(&empty, &[], |mut it| {
        let sockets = internal_frontends(1).map(|frontend| {
            let [connected, unconnected] =
                [(); 2].map(|()| it.pods[0].run(|| tests::client::udp_socket(frontend).unwrap()));
            connected.connect(frontend).unwrap();
            connected.send(b"who?").unwrap();
            // The refusal is a packet, and comes later.
            let error = connected.recv(&mut [0; 16]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{frontend}");
            for _ in 0..10 {
                unconnected.send_to(b"who?", frontend).unwrap();
            }
            (frontend, connected, unconnected)
        });
        it.apply(&empty.clone().map(|it| it.endpoint_on("n2", "p3", &P3)));
        for (frontend, connected, unconnected) in sockets {
            let mut name = None;
            let arrives = || {
                name = exchange_connected(&connected).ok();
                name.is_some()
            };
            assert!(eventually(TIMEOUT, arrives), "{frontend}");
            assert!(name.unwrap().starts_with("p3 "));
            assert!(eventually(TIMEOUT, || exchange(&unconnected, frontend).is_ok()), "{frontend}");
        }
        if it.backend == "ebpf" {
            assert!(counter(&it, "no_backend_total", "empty", "udp") >= Some(22.0));
        }
    });
}

sockopt_impl!(
    /// Through which interface an IPv4 socket sends what is for no other network, by index in network byte order.
    UnicastIf4, SetOnly, libc::IPPROTO_IP, libc::IP_UNICAST_IF, u32
);
sockopt_impl!(
    /// Through which interface an IPv6 socket sends what is for no other network, by index in network byte order.
    UnicastIf6, SetOnly, libc::IPPROTO_IPV6, libc::IPV6_UNICAST_IF, u32
);

/// As a resolver asks the servers of a link.
fn set_unicast_interface(socket: &UdpSocket, interface: &str) {
    let index = nix::net::if_::if_nametoindex(interface).unwrap().to_be();
    match socket.local_addr().unwrap() {
        SocketAddr::V4(_) => setsockopt(socket, UnicastIf4, &index).unwrap(),
        SocketAddr::V6(_) => setsockopt(socket, UnicastIf6, &index).unwrap(),
    }
}

#[test]
fn a_socket_with_an_interface_of_its_own_reaches_a_service_that_is_elsewhere() {
    let web = internal("web", 1).endpoint("p1", &P1);
    each(&[web], &[], |it| {
        for frontend in internal_frontends(1) {
            for connects in [false, true] {
                // The endpoint is behind another interface.
                let reply = it.n1.run(|| {
                    let socket = tests::client::udp_socket(frontend).unwrap();
                    set_unicast_interface(&socket, "eth0");
                    if connects {
                        socket.connect(frontend)?;
                        exchange_connected(&socket)
                    } else {
                        exchange(&socket, frontend).map(|it| it.0)
                    }
                });
                assert!(reply.unwrap().starts_with("p1 "), "{frontend}");
            }
            // A pod's device is the way to everything.
            it.pods[1].run(|| {
                let socket = Socket::new(Domain::for_address(frontend), Type::STREAM, None).unwrap();
                setsockopt(&socket, sockopt::BindToDevice, &"eth0".into()).unwrap();
                socket.connect(&frontend.into()).unwrap();
            });
        }
        if it.backend == "ebpf" {
            assert_eq!(left(&it, "web", "udp"), Some(4.0));
            assert_eq!(left(&it, "web", "tcp"), Some(2.0));
        }
    });
}

#[test]
fn two_services_with_one_endpoint_can_be_reached_from_one_port() {
    let services = [1, 2].map(|n| internal(&format!("web-{n}"), n).endpoint_on("n2", "p3", &P3));
    each(&services, &[], |it| {
        for (family, p1) in P1.into_iter().enumerate() {
            let connect = |n: u8, port: u16| {
                it.pods[0].run(|| {
                    let socket = bound(Type::STREAM, at(p1, port));
                    socket.connect(&internal_frontends(n)[family].into()).map(|()| socket)
                })
            };
            let [first, second] = [1, 2].map(|n| connect(n, 40_000).unwrap());
            drop((first, second));
            // A port that the kernel has chosen belongs to no other socket: such a socket is redirected.
            drop(connect(1, 0).unwrap());
        }
        if it.backend == "ebpf" {
            assert_eq!(left(&it, "web-1", "tcp"), Some(2.0));
        }
    });
}

#[test]
fn a_socket_at_an_address_that_endpoints_cannot_answer_reaches_them() {
    if !knows_the_nodes_netns() {
        return;
    }
    let web = [on_both_nodes(internal("web", 1))];
    each(&web, &["--cluster-cidr=10.244.0.0/16,fd00:244::/32"], |it| {
        let bridge: [IpAddr; 2] = ["172.17.0.1", "fd00:17::1"].map(|it| it.parse().unwrap());
        it.n1.ip(&["link", "add", "docker0", "type", "bridge"]).unwrap();
        it.n1.ip(&["link", "set", "docker0", "up"]).unwrap();
        for (address, length) in bridge.into_iter().zip([16, 64]) {
            it.n1.add_interface_address(&format!("{address}/{length}"), "docker0").unwrap();
        }
        let is_known = || {
            let output = it.n1.run(|| run(&mut it.cli("dump"))).stdout;
            it.backend == "nft" || output.contains("node-address 172.17.0.1 interface")
        };
        assert!(eventually(TIMEOUT, is_known), "the agent follows addresses");
        for (family, frontend) in internal_frontends(1).into_iter().enumerate() {
            it.n1.run(|| {
                for _ in 0..10 {
                    bound(Type::STREAM, at(bridge[family], 0)).connect(&frontend.into()).unwrap();
                    let socket = udp(at(bridge[family], 0));
                    assert_eq!(exchange(&socket, frontend).unwrap().1, frontend);
                    // The node's own address is known to all, and its sockets are redirected.
                    bound(Type::STREAM, at(N1[family], 0)).connect(&frontend.into()).unwrap();
                }
            });
        }
        if it.backend == "ebpf" {
            assert_eq!(left(&it, "web", "tcp"), Some(20.0));
            assert_eq!(left(&it, "web", "udp"), Some(20.0));
        }
    });
}

/// Before 5.14 user space cannot ask for the cookie of its network namespace: the initial one counts as the node's.
fn knows_the_nodes_netns() -> bool {
    let knows = kernel_at_least(5, 14);
    if !knows {
        skip(
            "this kernel does not tell which network namespace is the node's, unless it is the initial one (Linux 5.14)",
        );
    }
    knows
}

#[test]
fn a_client_bound_to_loopback_is_refused_at_a_node_port_on_loopback() {
    if !knows_the_nodes_netns() {
        return;
    }
    let web = internal("web", 1).endpoint("p1", &P1);
    let Some(it) = cluster_or_skip(&[web], &[]) else { return };
    for loopback in ["127.0.0.1", "::1"].map(|it| it.parse::<IpAddr>().unwrap()) {
        let node_port = at(loopback, NODE_PORT + 1);
        let connect =
            |it: &NetNs, source| it.run(|| bound(Type::STREAM, at(source, 0)).connect(&node_port.into()));
        let error = connect(&it.n1, loopback).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{loopback}");
        let any = if loopback.is_ipv4() { "0.0.0.0" } else { "::" };
        connect(&it.n1, any.parse().unwrap()).unwrap();
        // Packets are not translated there, so nothing else that a program chooses is left to them.
        let at_port = it.n1.run(|| bound(Type::STREAM, at(any.parse::<IpAddr>().unwrap(), 40_080)));
        at_port.connect(&node_port.into()).unwrap();
    }
}

/// Waits until a flow has left its endpoint for p3, soon after the change; the socket gets no error.
#[track_caller]
fn wait_for_p3(socket: &UdpSocket, what: &str) {
    let mut name = None;
    let arrives = || match exchange_connected(socket) {
        Ok(it) => name.insert(it).starts_with("p3 "),
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::WouldBlock, "{what}");
            false
        }
    };
    assert!(eventually(TIMEOUT, arrives), "{what}: {name:?}");
}

#[test]
fn a_connected_udp_socket_outlives_its_endpoint_where_udp_is_left_to_packets() {
    let web = || internal("web", 1).annotation("kube-proxy-ebpf.io/udp", "packets");
    each(&[web().endpoint("p2", &P2)], &[], |mut it| {
        let sockets = internal_frontends(1).map(|frontend| {
            let socket = it.pods[0].run(|| connected_udp_socket(frontend).unwrap());
            assert!(exchange_connected(&socket).unwrap().starts_with("p2 "), "{frontend}");
            // TCP is redirected as ever.
            it.pods[0].run(|| TcpStream::connect(frontend)).unwrap();
            (frontend, socket)
        });
        it.apply(&[web().endpoint_on("n2", "p3", &P3)]);
        for (frontend, socket) in sockets {
            wait_for_p3(&socket, &frontend.to_string());
        }
        if it.backend == "ebpf" {
            assert_eq!(left(&it, "web", "udp"), Some(2.0));
            assert_eq!(left(&it, "web", "tcp").unwrap_or_default(), 0.0);
        }
    });
}

#[test]
fn sockets_of_a_pod_are_translated_as_packets_as_its_annotation_says() {
    let web = || internal("web", 1);
    for (socket_lb, redirected) in [("off", 0.0), ("tcp-only", 2.0)] {
        let (services, flag) = ([web().endpoint("p2", &P2)], [pod_annotations::FLAG]);
        let Some(mut it) = cluster_or_skip(&services, &flag) else { return };
        let _kubelets = pod_annotations::kubelets(it.sandbox());
        let cgroup = pod_annotations::cgroup_of(it.sandbox(), 1);
        manifest::write_atomically(&it.manifests().join("pods.yaml"), &pod_annotations::pod(1, socket_lb))
            .unwrap();
        it.agent.wait_until_logged(TIMEOUT, "sockets left to packets pod=default/pod-1").unwrap();
        cgroup.enter();
        let connections = |port: &str| counter(&it, "connections_total", "web", port).unwrap_or_default();
        let sockets = internal_frontends(1).map(|frontend| {
            let socket = it.pods[0].run(|| connected_udp_socket(frontend).unwrap());
            assert!(exchange_connected(&socket).unwrap().starts_with("p2 "), "{socket_lb}: {frontend}");
            assert_eq!(server(&it.pods[0], frontend), "p2");
            (frontend, socket)
        });
        assert_eq!((connections("tcp"), connections("udp")), (redirected, 0.0), "{socket_lb}");
        it.apply(&[web().endpoint_on("n2", "p3", &P3)]);
        for (frontend, socket) in sockets {
            wait_for_p3(&socket, &format!("{socket_lb}: {frontend}"));
        }
        it.sandbox().add_process(std::process::id()).unwrap();
    }
}

/// Starts servers in the host's network at this port of each node, which reply with their name and the source they see.
fn start_on_nodes(cluster: &TestCluster, port: u16) -> Vec<EchoServer> {
    let nodes = [("n1", &cluster.n1, N1), ("n2", &cluster.n2, N2)];
    let servers = nodes.into_iter().flat_map(|(name, netns, addresses)| {
        addresses.map(|ip| netns.run(|| EchoServer::start_showing_source(name, at(ip, port)).unwrap()))
    });
    servers.collect()
}

#[test]
fn an_endpoint_that_is_an_address_of_a_service_is_reached_by_one_translation() {
    const PORT: u16 = 8443;
    // External IPs that are node addresses, and a node port as the target port.
    let edge = Service::new("edge", &cluster_ips(1)).tcp_and_udp(PORT, PORT);
    let edge = edge.external_ips(&[N1, N2].concat());
    let target = NODE_PORT + 9;
    let node_port = Service::new("node-port", &cluster_ips(2)).tcp_and_udp(PORT, target).node_ports(target);
    let services = [edge, node_port].map(|it| it.endpoint("n1", &N1).endpoint_on("n2", "n2", &N2));
    for backend in BACKENDS {
        let Some(cluster) = TestCluster::or_skip() else { return };
        let _servers = [PORT, target].map(|port| start_on_nodes(&cluster, port));
        cluster.write(&services);
        let _agent = start_ready(&cluster, &cluster.command(backend));
        let _guard = cluster.sandbox().enter().unwrap();
        for (family, p1) in P1.into_iter().enumerate() {
            for frontend in [1, 2].map(|n| at(cluster_ips(n)[family], PORT)) {
                for transport in [Transport::Tcp, Transport::Udp] {
                    let replies = replies(&cluster.pods[0], transport, frontend);
                    let expected = ["n1", "n2"].map(|it| Reply { name: it.to_owned(), source: p1 });
                    assert_eq!(replies, expected.into(), "{backend}: {frontend} over {transport:?}");
                }
            }
        }
    }
}

#[test]
fn a_datagram_without_room_is_left_to_packets() {
    const MANY: u8 = 30;
    let services: Vec<_> =
        (1..=MANY).map(|n| internal(&format!("web-{n}"), n).endpoint_on("n2", "p3", &P3)).collect();
    // Little room, and connections that take more of it than they get.
    let arguments = ["--udp-addresses=64", "--socket-slots=8"];
    let Some(it) = cluster_or_skip(&services, &arguments) else { return };
    let connections: Vec<_> =
        (0..200).map(|_| it.pods[0].run(|| TcpStream::connect(internal_frontends(1)[0]).unwrap())).collect();
    let shows_service = |stream: &TcpStream| stream.peer_addr().unwrap() == internal_frontends(1)[0];
    let shown = connections.iter().filter(|stream| shows_service(stream)).count();
    assert!((1..20).contains(&shown), "TCP takes what its share has room for: {shown}");
    for frontends in (1..=MANY).map(internal_frontends) {
        for frontend in frontends {
            let socket = it.pods[0].run(|| tests::client::udp_socket(frontend).unwrap());
            assert_eq!(exchange(&socket, frontend).unwrap().1, frontend);
        }
    }
    let socket = it.pods[0].run(|| tests::client::udp_socket(internal_frontends(1)[0]).unwrap());
    for n in 1..=MANY {
        let [frontend, _] = internal_frontends(n);
        assert_eq!(exchange(&socket, frontend).unwrap().1, frontend);
    }
    assert!(left(&it, "web-30", "udp") > Some(0.0));
}
