//! Session affinity on the socket path: what identifies a client, and how long it keeps its endpoint.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr, UdpSocket},
    sync::Barrier,
    thread,
};

use aya::maps::{Array, HashMap, MapData};
use socket2::{Domain, Socket, Type};
use tests::{
    FRONTEND, Service, TIMEOUT, TestNode, Transport, endpoint, eventually, exchange, exchange_connected,
    metric, pod_with_servers, request, udp_socket, udp_socket_at, web, web_frontends,
};

fn node_or_skip() -> Option<TestNode> {
    TestNode::running_or_skip(1..=10, &[web(1..=10).affinity(3600)], &[])
}

/// A node with the addresses 10.244.2.1 to 10.244.2.50, each of which is a client.
fn node_with_addresses_or_skip() -> Option<TestNode> {
    let mut node = TestNode::prepared_or_skip(1..=10, &[web(1..=10).affinity(3600)])?;
    for n in 1..=50 {
        node.netns().ip(&["address", "add", &format!("10.244.2.{n}/32"), "dev", "lo"]).unwrap();
    }
    node.start(&[]);
    Some(node)
}

#[track_caller]
fn servers(transport: Transport, address: SocketAddr, times: usize) -> BTreeSet<String> {
    (0..times).map(|_| request(transport, address).unwrap()).collect()
}

fn connect_from(source: [u8; 4]) -> UdpSocket {
    let socket = udp_socket_at((source, 0).into()).unwrap();
    socket.connect(FRONTEND).unwrap();
    socket
}

/// The number of clients in the session affinity table.
fn clients(node: &TestNode) -> usize {
    let clients: HashMap<MapData, [u64; 4], [u64; 4]> = node.map("affinity2/affinity").try_into().unwrap();
    clients.keys().count()
}

#[test]
fn a_client_keeps_its_endpoint() {
    let Some(mut node) = node_or_skip() else { return };
    let request_all = || {
        let [v4, v6, _] = web_frontends();
        let all = [v4, v6].into_iter().flat_map(|address| Transport::ALL.map(|it| (it, address)));
        all.map(|(transport, address)| servers(transport, address, 20)).collect::<Vec<_>>()
    };
    let before = request_all();
    for servers in &before {
        assert_eq!(servers.len(), 1, "{servers:?}");
    }
    // Connected and unconnected UDP use the same service port.
    assert_eq!(before[1], before[2]);
    assert_eq!(before[4], before[5]);
    // A restart and a new generation do not change that.
    node.kill();
    node.start(&[]);
    assert_eq!(request_all(), before);
}

#[test]
fn concurrent_connects_of_a_new_client_get_one_endpoint() {
    let Some(_node) = node_with_addresses_or_skip() else { return };
    const THREADS: usize = 8;
    for n in 1..=50 {
        let start = Barrier::new(THREADS);
        let connect = || {
            let socket = udp_socket_at(([10, 244, 2, n], 0).into()).unwrap();
            start.wait();
            socket.connect(FRONTEND).unwrap();
            exchange_connected(&socket).unwrap()
        };
        let servers: BTreeSet<_> = thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(connect)).collect();
            threads.into_iter().map(|it| it.join().unwrap()).collect()
        });
        assert_eq!(servers.len(), 1, "client {n}: {servers:?}");
    }
}

#[test]
fn each_namespace_and_each_address_of_the_node_is_a_client() {
    let Some(_node) = node_with_addresses_or_skip() else { return };
    let server_of = |source| exchange_connected(&connect_from(source)).unwrap();
    // The probability that 30 clients share one of 10 endpoints is 10^-29.
    let mut servers_seen = BTreeSet::new();
    for n in 1..=30 {
        let first = server_of([10, 244, 2, n]);
        assert!((0..5).all(|_| server_of([10, 244, 2, n]) == first), "client {n}");
        servers_seen.insert(first);
    }
    assert!(servers_seen.len() > 1);
    // Neither a loopback address nor one that is not the node's identifies a client other than the namespace.
    let unbound = request(Transport::Udp, FRONTEND).unwrap();
    assert!((1..=30).all(|n| server_of([127, 0, 1, n]) == unbound));
    assert!((1..=30).all(|n| server_of([10, 244, 3, n]) == unbound));
    // A socket that is not bound is identified by its namespace.
    let mut servers_seen = BTreeSet::new();
    for _ in 0..30 {
        let (pod, _servers) = pod_with_servers(1..=10);
        let servers = pod.run(|| servers(Transport::Tcp, FRONTEND, 5));
        assert_eq!(servers.len(), 1, "{servers:?}");
        servers_seen.extend(servers);
    }
    assert!(servers_seen.len() > 1);
}

#[test]
fn a_source_address_chosen_by_the_kernel_is_not_a_client() {
    let Some(node) = node_or_skip() else { return };
    for (family, address) in web_frontends().into_iter().take(2).enumerate() {
        let first = request(Transport::Udp, address).unwrap();
        assert_eq!(clients(&node), family + 1);
        // All endpoints are local: a socket connected to one has the endpoint's address as its source.
        for n in 1..=10 {
            let socket = udp_socket(address).unwrap();
            let endpoint = SocketAddr::new(endpoint(n)[family], 8080);
            socket.connect(endpoint).unwrap();
            assert_eq!(socket.local_addr().unwrap().ip(), endpoint.ip());
            // The reply is dropped, because it does not come from the peer.
            socket.send_to(b"who?", address).unwrap();
            for _ in 0..2 {
                socket.connect(address).unwrap();
                assert_eq!(exchange_connected(&socket).unwrap(), first);
            }
            assert_eq!(clients(&node), family + 1, "clients after endpoint {n}");
        }
    }
}

#[test]
fn binding_to_the_unspecified_address_does_not_identify_a_client() {
    let Some(node) = node_or_skip() else { return };
    let [v4, _, mapped] = web_frontends();
    let first = request(Transport::Udp, v4).unwrap();
    for any in ["[::]:0", "[::ffff:0.0.0.0]:0"] {
        for is_connected in [true, false] {
            let socket = Socket::new(Domain::IPV6, Type::DGRAM, None).unwrap();
            socket.set_only_v6(false).unwrap();
            socket.bind(&any.parse::<SocketAddr>().unwrap().into()).unwrap();
            let socket = UdpSocket::from(socket);
            socket.set_read_timeout(Some(TIMEOUT)).unwrap();
            let server = if is_connected {
                socket.connect(mapped).unwrap();
                exchange_connected(&socket).unwrap()
            } else {
                exchange(&socket, mapped).unwrap().0
            };
            assert_eq!(server, first);
        }
    }
    assert_eq!(clients(&node), 1);
}

#[test]
fn the_least_recently_used_affinity_is_evicted_first() {
    let Some(mut node) = TestNode::or_skip() else { return };
    // A client is counted at each Service.
    let ip = |n: u16| IpAddr::from([10, 97, (n >> 8) as u8, n as u8]);
    let service =
        |n| Service::new(&format!("s-{n}"), &[ip(n)]).port("", "UDP", 80, 8080).endpoints([1]).affinity(3600);
    node.write(&(0..1024).map(service).collect::<Vec<_>>());
    node.start(&["--affinity-clients", "128"]);
    let socket = udp_socket(FRONTEND).unwrap();
    for n in 0..1024 {
        socket.connect((ip(n), 80)).unwrap();
    }
    let count = clients(&node);
    assert!((1..=128).contains(&count), "{count} clients");
    // The table accepted every client.
    let inserts: Array<MapData, u64> = node.map("affinity2/affinity_inserts").try_into().unwrap();
    assert_eq!(inserts.get(&0, 0).unwrap(), 1024);
    assert!(eventually(TIMEOUT, || metric("kube_proxy_ebpf_affinity_inserts_total") == Some(1024.0)));
    assert_eq!(metric("kube_proxy_ebpf_affinity_capacity"), Some(128.0));
}
