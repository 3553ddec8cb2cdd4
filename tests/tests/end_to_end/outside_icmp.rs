//! Packets from outside that do not fit, and ICMP errors about answers.

use std::{
    io::{Read as _, Write as _},
    net::UdpSocket,
    process::Command,
};

use tests::{EchoConnection, IngressCluster, TIMEOUT, eventually, run};

use crate::outside::{NETWORKS, cluster_or_skip, frontends, web};

/// What a wrapping leaves of the MTU, and what it leaves behind the router.
const ROOM: [u32; 2] = [1_456, 1_424];
const NARROW: &str = "1400";

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
    let connections: Vec<_> = frontends()
        .into_iter()
        .cycle()
        .take(30)
        .map(|it| cluster.clients[0].run(|| EchoConnection::connect(it)).unwrap())
        .collect();
    // Its endpoint gets no new connections, and its rows another owner.
    cluster.write(&[web(&cluster, &[1, 2])]);
    frontends().iter().for_each(|it| cluster.wait_until_forwarded(*it, &[(1, 1), (2, 1)]));
    cluster.router.ip(&["link", "set", "client0", "mtu", NARROW]).unwrap();
    let held: Vec<_> = connections
        .iter()
        .filter(|it| it.name().starts_with(&format!("{} ", cluster.nodes[0].name())))
        .collect();
    assert!(held.len() >= 2, "{} connections", held.len());
    held.into_iter().for_each(check_long_answer);
}
