//! What a pod can do to the proxy and to other pods with nothing but sockets: no more than its share.

use std::net::{SocketAddr, TcpListener, TcpStream};

use tests::{
    Attack, Build, FRONTEND, MemoryCgroup, NetNs, Pod, Service, TIMEOUT, TestNode, eventually, exchange,
    metric, pod_with_servers, repetitions, udp_socket, web, web4,
};

/// The address of a Service of [`resolvers`].
fn resolver(n: u8) -> SocketAddr {
    ([10, 97, 0, n], 53).into()
}

/// Services with a UDP port and an endpoint.
fn resolvers(number: u8) -> Vec<Service> {
    let ip = |n| resolver(n).ip();
    let service = |n| Service::new(&format!("s-{n}"), &[ip(n)]).port("", "UDP", 53, 8080).endpoints([n]);
    (1..=number).map(service).collect()
}

/// Sends to every Service of [`resolvers`] from one socket, and expects each reply from the Service's address.
#[track_caller]
fn resolve_all(netns: &NetNs, number: u8) {
    netns.run(|| {
        let socket = udp_socket(resolver(1)).unwrap();
        for n in 1..=number {
            assert_eq!(exchange(&socket, resolver(n)).unwrap(), (format!("web-{n}"), resolver(n)));
        }
    });
}

#[test]
fn what_pods_open_does_not_charge_the_agent_beyond_its_budget() {
    let Some(mut node) = TestNode::or_skip() else { return };
    let Some(memory) = MemoryCgroup::or_skip(node.sandbox()) else { return };
    node.write(&resolvers(3));
    node.start_with(&node.command(Build::Product).memory_cgroup(&memory));
    let before = memory.kernel().unwrap();
    assert!(before > 1 << 20, "{before} bytes cannot be all of the agent's kernel memory");
    // Each takes a slot, as far as the share goes, and after that entries in the overflow table, as far as that share goes.
    let sockets = repetitions(19_000);
    let pod =
        Pod::attack(node.sandbox(), "pod", &Attack::send_udp(sockets, &[1, 2, 3].map(resolver))).unwrap();
    assert_eq!(pod.report.done + pod.report.refused, 3 * sockets);
    let charged = memory.kernel().unwrap().saturating_sub(before);
    assert!(charged < 4 << 20, "{charged} bytes were charged for {:?}", pod.report);
    // What was enough for a start without pods is enough for a change and for several starts beside them.
    if let Ok(peak) = memory.peak() {
        memory.limit(peak + (8 << 20)).unwrap();
    }
    node.apply(&resolvers(4));
    for _ in 0..3 {
        node.kill();
        node.start_with(&node.command(Build::Product).memory_cgroup(&memory));
    }
    let (netns, _servers) = pod_with_servers(1..=4);
    resolve_all(&netns, 4);
    // The cgroup waits for its processes.
    node.kill();
}

#[test]
fn a_pod_that_fills_its_share_of_udp_addresses_affects_no_other() {
    let Some(node) = TestNode::running_or_skip([], &resolvers(10), &["--udp-addresses", "512"]) else {
        return;
    };
    let attack = Attack::send_udp(200, &(1..=10).map(resolver).collect::<Vec<_>>());
    let pod = Pod::attack(node.sandbox(), "pod", &attack).unwrap();
    assert!(pod.report.refused > 1000, "{:?}", pod.report);
    let (netns, _servers) = pod_with_servers(1..=10);
    for _ in 0..3 {
        resolve_all(&netns, 10);
    }
    // Nor do several.
    let _more = ["b", "c", "d"].map(|it| Pod::attack(node.sandbox(), it, &attack).unwrap());
    resolve_all(&netns, 10);
    // The culprits are named.
    let named = r#"kube_proxy_ebpf_socket_refused_by_cgroup{cgroup="/pod"}"#;
    assert!(eventually(TIMEOUT, || metric(named) > Some(1000.0)));
    assert!(eventually(TIMEOUT, || node.log().contains("(ENOBUFS)") && node.log().contains("most=\"/")));
    // What is closed is free again.
    drop((pod, _more));
    let again = Pod::attack(node.sandbox(), "pod", &attack).unwrap();
    assert!(again.report.done > 200, "{:?}", again.report);
}

#[test]
fn a_pod_that_opens_many_connections_takes_only_its_share_of_slots() {
    let Some(node) = TestNode::running_or_skip([], &[web([1])], &["--socket-slots", "2048"]) else { return };
    let before = node.used_socket_slots();
    let attack = Attack::connect_tcp(4000, FRONTEND);
    let pod = Pod::attack(node.sandbox(), "pod", &attack).unwrap();
    assert_eq!((pod.report.done, pod.report.refused), (4000, 0), "TCP is never refused");
    assert!(node.used_socket_slots() <= before + 2048 / 4 + 8, "{} slots", node.used_socket_slots());
    let (netns, _servers) = pod_with_servers([1]);
    netns.run(|| {
        let connections: Vec<_> = (0..50).map(|_| TcpStream::connect(FRONTEND).unwrap()).collect();
        for connection in &connections {
            assert_eq!(connection.peer_addr().unwrap(), FRONTEND);
        }
    });
    drop(pod);
    assert!(eventually(TIMEOUT, || node.used_socket_slots() <= before));
}

#[test]
fn the_host_is_recognized_though_its_loopback_interface_is_down() {
    let service = web4([1]).node_port(30080);
    let Some(mut node) = TestNode::prepared_or_skip([], &[service]) else { return };
    let other = NetNs::new().unwrap();
    node.netns().ip(&["link", "set", "lo", "down"]).unwrap();
    node.start(&[]);
    let bind = || TcpListener::bind(("0.0.0.0", 30080)).map(|_| ());
    assert_eq!(bind().unwrap_err().kind(), std::io::ErrorKind::AddrInUse);
    other.run(|| bind().unwrap());
}
