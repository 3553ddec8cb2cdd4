//! Which endpoint a connection gets: that with fewer connections, and fewer connections for a new one; on real sockets.

use std::{collections::BTreeMap, thread, time::Duration};

use tests::{
    EchoConnection, FRONTEND, Service, TARGET_PORT, TIMEOUT, TestNode, WEB4, count_each, endpoint,
    eventually, exchange_connected, scaled, udp_socket, web4,
};

fn least_connections(endpoints: impl IntoIterator<Item = u8>) -> Service {
    web4(endpoints).annotation("kube-proxy-ebpf.io/load-balancing", "least-connections")
}

fn node_or_skip(servers: impl IntoIterator<Item = u8>, service: Service) -> Option<TestNode> {
    TestNode::running_or_skip(servers, &[service], &[])
}

fn hold(connections: usize) -> Vec<EchoConnection> {
    (0..connections).map(|_| EchoConnection::connect(FRONTEND).unwrap()).collect()
}

fn by_server(connections: &[EchoConnection]) -> BTreeMap<&str, usize> {
    count_each(connections.iter().map(EchoConnection::name))
}

/// Between two endpoints both are always compared.
#[test]
fn a_connection_goes_to_the_endpoint_with_fewer() {
    let Some(_node) = node_or_skip([1, 2], least_connections([1, 2])) else { return };
    let mut held = hold(100);
    assert_eq!(by_server(&held), BTreeMap::from([("web-1", 50), ("web-2", 50)]));
    held.retain(|it| it.name() != "web-2");
    assert_eq!(by_server(&hold(50)), BTreeMap::from([("web-2", 50)]));
    // The fifty are closed again.
    held.truncate(20);
    held.extend(hold(80));
    assert_eq!(by_server(&held), BTreeMap::from([("web-1", 50), ("web-2", 50)]));
}

#[test]
fn open_connections_are_known_after_a_restart_and_counted_while_the_proxy_is_down() {
    let Some(mut node) = node_or_skip([1, 2], least_connections([1])) else { return };
    let first = hold(30);
    node.kill();
    let second = hold(10);
    node.start(&[]);
    node.apply(&[least_connections([1, 2])]);
    assert_eq!(by_server(&hold(40)), BTreeMap::from([("web-2", 40)]));
    node.kill();
    drop(first);
    node.start(&[]);
    assert_eq!(by_server(&second), BTreeMap::from([("web-1", 10)]));
    assert_eq!(by_server(&hold(90)), BTreeMap::from([("web-1", 40), ("web-2", 50)]));
}

/// A refused one as well, as soon as the program closes its socket.
#[test]
fn failed_connections_do_not_stay_open() {
    let (service, off) = (least_connections([1, 2]), ["--passive-health=off"]);
    let Some(mut node) = TestNode::running_or_skip([], &[service], &off) else { return };
    for _ in 0..50 {
        assert!(EchoConnection::connect(FRONTEND).is_err());
    }
    node.serve([1, 2]);
    assert_eq!(by_server(&hold(20)), BTreeMap::from([("web-1", 10), ("web-2", 10)]));
}

/// TCP sockets hardly ever do.
#[test]
fn a_socket_that_connects_again_is_counted_once() {
    let service = |endpoints: &[u8]| {
        let service = Service::new("web", &[WEB4.into()]).port("", "UDP", 80, TARGET_PORT);
        service
            .endpoints(endpoints.iter().copied())
            .annotation("kube-proxy-ebpf.io/load-balancing", "least-connections")
    };
    let Some(mut node) = node_or_skip([1, 2], service(&[1])) else { return };
    let sockets: Vec<_> = (0..20).map(|_| udp_socket(FRONTEND).unwrap()).collect();
    for socket in &sockets {
        (0..5).for_each(|_| socket.connect(FRONTEND).unwrap());
    }
    // Elsewhere, and no Service.
    sockets[10..].iter().for_each(|it| it.connect((endpoint(1)[0], TARGET_PORT)).unwrap());
    node.apply(&[service(&[1, 2])]);
    let more: Vec<_> = (0..10).map(|_| udp_socket(FRONTEND).unwrap()).collect();
    for socket in &more {
        socket.connect(FRONTEND).unwrap();
        assert_eq!(exchange_connected(socket).unwrap(), "web-2", "ten are open to web-1");
    }
}

#[test]
fn session_affinity_comes_before_open_connections() {
    let Some(_node) = node_or_skip([1, 2], least_connections([1, 2]).affinity(3600)) else { return };
    assert_eq!(by_server(&hold(20)).len(), 1);
}

/// How many of 300 connections reach endpoint 2.
fn connections_to_the_second() -> usize {
    by_server(&hold(300)).get("web-2").copied().unwrap_or(0)
}

/// If a restart made all endpoints new, both would have the same share.
#[test]
fn the_share_of_a_new_endpoint_grows_through_a_restart_and_anew_when_it_returns() {
    let time = scaled(Duration::from_secs(12));
    let seconds = format!("{}s", time.as_secs());
    let service = |it: &[u8]| web4(it.iter().copied()).annotation("kube-proxy-ebpf.io/slow-start", &seconds);
    let Some(mut node) = node_or_skip([1, 2], service(&[1])) else { return };
    thread::sleep(time + Duration::from_secs(1));
    node.apply(&[service(&[1, 2])]);
    node.kill();
    node.start(&[]);
    let first = connections_to_the_second();
    assert!((5..110).contains(&first), "a tenth of the other's at first: {first}");
    assert!(eventually(TIMEOUT, || connections_to_the_second() > 130));
    node.apply(&[service(&[1])]);
    node.apply(&[service(&[1, 2])]);
    let again = connections_to_the_second();
    assert!((5..110).contains(&again), "{again}");
}
