//! Traffic from outside that is forwarded whole: nodes behind a router that spreads connections over them, packets that do not
//! fit, and ICMP errors about answers.

use std::{
    collections::BTreeSet,
    io::{self, Read as _, Write as _},
    net::{IpAddr, SocketAddr, UdpSocket},
    process::Command,
    time::Duration,
};

use tests::{
    EchoConnection, IngressCluster, NetNs, OUTSIDE_CLIENTS, Service, TIMEOUT, eventually, run,
    test_cluster::TARGET,
};

/// The network of the Service's addresses, and its addresses.
pub(crate) const NETWORKS: [&str; 2] = ["203.0.113.0/24", "2001:db8::/64"];
pub(crate) const FRONTENDS: [&str; 2] = ["203.0.113.1:80", "[2001:db8::1]:80"];
const CONNECTIONS: usize = 100;
/// The first three nodes, by index, with an endpoint each.
pub(crate) const FIRST_THREE: [(usize, u32); 3] = [(0, 1), (1, 1), (2, 1)];
/// What a wrapping leaves of the MTU, and what it leaves behind the router.
const ROOM: [u32; 2] = [1_456, 1_424];
const NARROW: &str = "1400";

pub(crate) fn frontends() -> [SocketAddr; 2] {
    FRONTENDS.map(|it| it.parse().unwrap())
}

/// A Service with endpoints on these nodes, by index, that is forwarded.
pub(crate) fn web(cluster: &IngressCluster, endpoints: &[usize]) -> Service {
    translated_web(cluster, endpoints).annotation("kube-proxy-ebpf.io/external-forwarding", "dsr")
}

/// A Service with endpoints on these nodes, by index, that is translated.
pub(crate) fn translated_web(cluster: &IngressCluster, endpoints: &[usize]) -> Service {
    let service = Service::new("web", &["10.96.0.1", "fd00:96::1"].map(|it| it.parse::<IpAddr>().unwrap()))
        .load_balancer_ips(&frontends().map(|it| it.ip()))
        .tcp_and_udp(80, TARGET);
    endpoints.iter().map(|it| &cluster.nodes[*it]).fold(service, |service, node| {
        service.endpoint_on(&node.name(), &format!("pod-{}", node.name()), &node.pod_addresses())
    })
}

/// A cluster of four nodes with endpoints on the first three, which forward.
pub(crate) fn cluster_or_skip() -> Option<IngressCluster> {
    let cluster = running_cluster_or_skip(4, |it| web(it, &[0, 1, 2]))?;
    wait_until_forwarded(&cluster, &FIRST_THREE);
    Some(cluster)
}

/// A cluster with a Service, all proxies running.
pub(crate) fn running_cluster_or_skip(
    nodes: u8,
    service: impl FnOnce(&IngressCluster) -> Service,
) -> Option<IngressCluster> {
    let mut cluster = IngressCluster::or_skip(nodes)?;
    cluster.write(&[service(&cluster)]);
    cluster.start_all();
    for node in 0..cluster.nodes.len() {
        cluster.agent(node).wait_until_applied(TIMEOUT).unwrap();
    }
    Some(cluster)
}

/// Connects from the first client, to each address in turn.
pub(crate) fn connect(cluster: &IngressCluster, count: usize) -> Vec<EchoConnection> {
    let _outside = cluster.clients[0].enter().unwrap();
    (0..count).map(|it| EchoConnection::connect(frontends()[it % 2]).unwrap()).collect()
}

#[track_caller]
fn assert_alive(connections: &mut [EchoConnection], after: &str) {
    let broken: Vec<_> = connections.iter_mut().filter_map(|it| it.ping().err()).collect();
    assert!(broken.is_empty(), "{after}: {} of {} broke: {:?}", broken.len(), connections.len(), broken[0]);
}

/// Two nodes, which a slow emulated machine can run.
#[test]
fn a_node_forwards_to_another() {
    let Some(cluster) = running_cluster_or_skip(2, |it| web(it, &[1])) else { return };
    wait_until_forwarded(&cluster, &[(1, 1)]);
    cluster.set_next_hops(NETWORKS, &[0]);
    let connections = connect(&cluster, 2);
    assert!(connections.iter().all(has_own_address), "{connections:?}");
}

#[test]
fn connections_survive_proxies_that_die_and_return() {
    let Some(mut cluster) = cluster_or_skip() else { return };
    cluster.set_next_hops(NETWORKS, &[0, 1, 2, 3]);
    let mut connections = connect(&cluster, CONNECTIONS);
    // Rows of the fourth node have a second from here on, which its next process and those of the others know.
    cluster.write(&[web(&cluster, &[0, 1, 2, 3])]);
    wait_for_servers(&cluster, &["n1", "n2", "n3", "n4"]);
    restart_each(&mut cluster, &[], &mut connections);
}

/// Kills the proxy of each node, and starts it again with more arguments.
#[track_caller]
fn restart_each(cluster: &mut IngressCluster, arguments: &[&str], connections: &mut [EchoConnection]) {
    for node in 0..cluster.nodes.len() {
        cluster.kill(node);
        assert_alive(connections, &format!("n{} is dead", node + 1));
        cluster.start(node, arguments);
        cluster.agent(node).wait_until_applied(TIMEOUT).unwrap();
        assert_alive(connections, &format!("n{} is back with {arguments:?}", node + 1));
    }
}

#[test]
fn connections_survive_the_beginning_and_the_end_of_forwarding() {
    let Some(mut cluster) = running_cluster_or_skip(4, |it| translated_web(it, &[0, 1, 2])) else { return };
    cluster.set_next_hops(NETWORKS, &[0, 1, 2, 3]);
    let mut connections = connect(&cluster, CONNECTIONS);
    assert!(!has_own_address(&connections[0]), "{:?} is translated", connections[0]);
    cluster.write(&[web(&cluster, &[0, 1, 2])]);
    wait_until_forwarded(&cluster, &FIRST_THREE);
    assert_alive(&mut connections, "forwarding has begun");
    let forwarded = connect(&cluster, CONNECTIONS);
    assert!(forwarded.iter().all(has_own_address));
    connections.extend(forwarded);
    cluster.write(&[translated_web(&cluster, &[0, 1, 2])]);
    wait_until_translated(&cluster);
    assert_alive(&mut connections, "forwarding has ended");
    connections.extend(connect(&cluster, CONNECTIONS));
    cluster.write(&[web(&cluster, &[0, 1, 2])]);
    wait_until_forwarded(&cluster, &FIRST_THREE);
    assert_alive(&mut connections, "forwarding has begun again");
    // As an upgrade with other flags does.
    cluster.write(&[translated_web(&cluster, &[0, 1, 2])]);
    wait_until_translated(&cluster);
    for flag in ["dsr", "nat"] {
        restart_each(&mut cluster, &["--external-forwarding", flag], &mut connections);
        if flag == "dsr" {
            wait_until_forwarded(&cluster, &FIRST_THREE);
        } else {
            wait_until_translated(&cluster);
        }
        assert_alive(&mut connections, flag);
        connections.extend(connect(&cluster, 20));
    }
}

#[test]
fn a_node_with_a_narrow_uplink_translates_and_serves_what_others_forward() {
    let Some(cluster) = cluster_or_skip() else { return };
    cluster.set_next_hops(NETWORKS, &[0]);
    let mut connections = connect(&cluster, CONNECTIONS);
    assert!(connections.iter().all(has_own_address));
    // Too little for the wrapping of 1,280 bytes, which every IPv6 path takes whole.
    cluster.nodes[0].netns.ip(&["link", "set", "eth0", "mtu", "1300"]).unwrap();
    let is_ipv6_translated = || {
        let new = connect(&cluster, 20);
        new.iter().enumerate().all(|(number, it)| has_own_address(it) == (number % 2 == 0))
    };
    assert!(eventually(TIMEOUT, is_ipv6_translated));
    assert_alive(&mut connections, "the uplink is narrow");
    cluster.set_next_hops(NETWORKS, &[1]);
    assert_alive(&mut connections, "by another node");
    let by_another = connect(&cluster, 40);
    assert!(by_another.iter().all(has_own_address), "{by_another:?}");
    assert!(by_another.iter().any(|it| it.name().starts_with("n1 ")), "{by_another:?}");
}

/// The server of a reply, and whether it saw the client's own address.
pub(crate) fn seen(reply: &str) -> (&str, bool) {
    let (server, source) = reply.split_once(' ').unwrap();
    (server, OUTSIDE_CLIENTS[0].contains(&source.parse().unwrap()))
}

fn has_own_address(connection: &EchoConnection) -> bool {
    seen(connection.name()).1
}

#[track_caller]
pub(crate) fn wait_until_forwarded(cluster: &IngressCluster, nodes: &[(usize, u32)]) {
    for frontend in frontends() {
        cluster.wait_until_forwarded(frontend, nodes);
    }
}

#[track_caller]
fn wait_until_translated(cluster: &IngressCluster) {
    let is_translated = || connect(cluster, 40).iter().all(|it| !has_own_address(it));
    assert!(eventually(TIMEOUT, is_translated), "new connections are still forwarded");
}

#[test]
fn data_of_any_size_passes() {
    let Some(cluster) = cluster_or_skip() else { return };
    // By the node without an endpoint: all is wrapped.
    cluster.set_next_hops(NETWORKS, &[3]);
    for connection in connect(&cluster, 2) {
        let sent: Vec<_> = (0..1_u32 << 16).map(|it| (it.wrapping_mul(it) >> 7) as u8).collect();
        let mut received = vec![0; sent.len()];
        let mut stream = connection.stream();
        // As much as the echo server's socket takes at a time.
        for round in 0..64 {
            stream.write_all(&sent).unwrap();
            stream.read_exact(&mut received).unwrap();
            assert!(sent == received, "round {round} of {connection:?}");
        }
    }
}

#[test]
fn what_no_node_has_wrapped_is_not_taken() {
    let Some(cluster) = cluster_or_skip() else { return };
    cluster.set_next_hops(NETWORKS, &[0, 1, 2]);
    assert!(!is_taken(&cluster, &cluster.clients[0]), "the client is no node");
    for length in [0, 8, 16, 24, 60, 1_000] {
        send_wrapped(&cluster, &cluster.clients[0], &vec![0x45; length]).unwrap();
    }
    assert_alive(&mut connect(&cluster, 20), "forged packets");
}

/// Whether the first node takes a datagram of the client that another host has wrapped.
pub(crate) fn is_taken(cluster: &IngressCluster, wrapped_by: &NetNs) -> bool {
    let client = cluster.clients[0].run(|| UdpSocket::bind("0.0.0.0:0")).unwrap();
    client.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    // The kernel may tell the sender at once that it drops the packet.
    let _ = send_wrapped(cluster, wrapped_by, &wrapped_datagram(client.local_addr().unwrap().port()));
    client.recv(&mut [0; 64]).is_ok()
}

/// Sends these bytes to the first node as if they were wrapped.
fn send_wrapped(cluster: &IngressCluster, from: &NetNs, bytes: &[u8]) -> io::Result<usize> {
    let node = SocketAddr::new(cluster.nodes[0].addresses()[0], 16_081);
    from.run(|| UdpSocket::bind("0.0.0.0:0")?.send_to(bytes, node))
}

/// What the header of UDP is followed by in a wrapped datagram from a port of the client to the IPv4 frontend.
fn wrapped_datagram(source_port: u16) -> Vec<u8> {
    let IpAddr::V4(client) = OUTSIDE_CLIENTS[0][0] else { panic!("IPv4 comes first") };
    let mut ip =
        [&[0x45, 0, 0, 29, 0, 0, 0x40, 0, 64, 17, 0, 0][..], &client.octets(), &[203, 0, 113, 1]].concat();
    let sum: u32 = ip.chunks(2).map(|it| u32::from(it[0]) << 8 | u32::from(it[1])).sum();
    ip[10..12].copy_from_slice(&(!((sum & 0xffff) + (sum >> 16)) as u16).to_be_bytes());
    let geneve = [2, 0x40, 8, 0, 0, 0, 0, 0, 0xff, 0x4b, 0x81, 1, 0, 0, 0, 0];
    let udp = [&source_port.to_be_bytes()[..], &[0, 80, 0, 9, 0, 0], b"?"].concat();
    [&geneve[..], &ip, &udp].concat()
}

/// Waits until new connections reach these servers, and no others.
#[track_caller]
fn wait_for_servers(cluster: &IngressCluster, names: &[&str]) {
    let servers = || {
        let connections = connect(cluster, 40);
        connections.iter().map(|it| seen(it.name()).0.to_owned()).collect::<BTreeSet<_>>()
    };
    assert!(eventually(TIMEOUT, || servers().iter().eq(names)), "{:?} instead of {names:?}", servers());
}

#[test]
fn a_client_is_told_how_long_its_packets_may_be() {
    let Some(cluster) = cluster_or_skip() else { return };
    // By the node without an endpoint: all is wrapped.
    cluster.set_next_hops(NETWORKS, &[3]);
    let client = &cluster.clients[0];
    for ((frontend, room), headers) in frontends().into_iter().zip(ROOM).zip([28, 48]) {
        let _inside = client.enter().unwrap();
        let any = if frontend.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let socket = UdpSocket::bind(any).unwrap();
        socket.connect(frontend).unwrap();
        // One that fits is answered by a server.
        socket.set_read_timeout(Some(TIMEOUT)).unwrap();
        socket.send(&vec![b'x'; room as usize - headers]).unwrap();
        socket.recv(&mut [0; 2_000]).unwrap();
        socket.send(&vec![b'x'; room as usize - headers + 1]).unwrap();
        let address = frontend.ip().to_string();
        let route = || run(Command::new("ip").args(["route", "get", &address])).success();
        assert!(eventually(TIMEOUT, || route().contains(&format!(" mtu {room}"))), "{}", route());
    }
}

/// Has the client send what the narrow link takes, and ask for more: a virtual interface drops longer packets that arrive.
fn send_less(cluster: &IngressCluster) {
    let client = &cluster.clients[0];
    for (family, advertised) in [("-4", "1460"), ("-6", "1440")] {
        let show = || run(Command::new("ip").args([family, "route", "show", "default"])).success();
        let route = client.run(show);
        let change = format!("{family} route replace {} mtu {NARROW} advmss {advertised}", route.trim());
        client.ip(&change.split(' ').collect::<Vec<_>>()).unwrap();
    }
}

#[test]
fn a_server_is_told_how_long_its_answers_may_be() {
    let Some(cluster) = cluster_or_skip() else { return };
    send_less(&cluster);
    cluster.set_next_hops(NETWORKS, &[3]);
    cluster.router.ip(&["link", "set", "client0", "mtu", NARROW]).unwrap();
    for frontend in frontends() {
        check_long_answer(&cluster.clients[0].run(|| EchoConnection::connect(frontend)).unwrap());
    }
}

/// Checks that the server can answer with more than fits behind the router.
#[track_caller]
fn check_long_answer(connection: &EchoConnection) {
    let mut stream = connection.stream();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    let (sent, mut received) = (vec![7; 1 << 16], vec![0; 1 << 16]);
    stream.write_all(&sent).unwrap();
    stream.read_exact(&mut received).unwrap_or_else(|error| panic!("{connection:?}: {error}"));
    assert!(sent == received, "{connection:?}");
}

#[test]
fn the_second_is_told_how_long_answers_of_its_connections_may_be() {
    let Some(cluster) = cluster_or_skip() else { return };
    send_less(&cluster);
    cluster.set_next_hops(NETWORKS, &[3]);
    let connections = connect(&cluster, 30);
    // Its endpoint gets no new connections, and its rows another owner.
    cluster.write(&[web(&cluster, &[1, 2])]);
    wait_until_forwarded(&cluster, &[(1, 1), (2, 1)]);
    cluster.router.ip(&["link", "set", "client0", "mtu", NARROW]).unwrap();
    let held: Vec<_> = connections.iter().filter(|it| seen(it.name()).0 == "n1").collect();
    assert!(held.len() >= 2, "{} connections", held.len());
    held.into_iter().for_each(check_long_answer);
}
