//! Nodes that packets from outside are forwarded to, while they cannot unwrap them, or do not answer.

use std::{
    collections::BTreeSet,
    fs,
    io::Read as _,
    net::{SocketAddr, TcpStream},
    ops::RangeInclusive,
    process::Command,
};

use socket2::{Domain, Socket, Type};
use tests::{EchoConnection, IngressCluster, OUTSIDE_CLIENTS, TIMEOUT, eventually, reset_on_close, run};

use crate::outside::{NETWORKS, connect, frontends, is_taken, seen, web};

/// A cluster of three nodes with endpoints on each, whose router sends everything to the first one; no proxy runs.
pub(crate) fn cluster_or_skip() -> Option<IngressCluster> {
    let cluster = IngressCluster::or_skip(3)?;
    cluster.write(&[web(&cluster, &[0, 1, 2])]);
    cluster.set_next_hops(NETWORKS, &[0]);
    Some(cluster)
}

/// The servers that new connections reach, each with whether it saw the client's own address.
pub(crate) fn servers(cluster: &IngressCluster) -> BTreeSet<(String, bool)> {
    let _outside = cluster.clients[0].enter().unwrap();
    let connect = |it: usize| EchoConnection::connect(frontends()[it % 2]).ok();
    let connections: Vec<_> = (0..40).filter_map(connect).collect();
    let replies = connections.iter().map(|it| seen(it.name()));
    replies.map(|(server, is_own)| (server.to_owned(), is_own)).collect()
}

#[track_caller]
pub(crate) fn wait_for(cluster: &IngressCluster, names: &[&str], own_address: bool) {
    let wanted: BTreeSet<_> = names.iter().map(|it| ((*it).to_owned(), own_address)).collect();
    assert!(
        eventually(TIMEOUT, || servers(cluster) == wanted),
        "{:?} instead of {wanted:?}",
        servers(cluster)
    );
}

#[test]
fn packets_are_translated_until_every_node_can_unwrap_them() {
    let Some(mut cluster) = cluster_or_skip() else { return };
    cluster.start(0, &[]);
    cluster.start(1, &[]);
    cluster.agent(0).wait_until_logged(TIMEOUT, "nodes do not answer probes").unwrap();
    wait_for(&cluster, &["n1", "n2", "n3"], false);
    let translated = {
        let _outside = cluster.clients[0].enter().unwrap();
        let mut connection = TcpStream::connect(frontends()[0]).unwrap();
        // What is not read would reset it.
        assert!(connection.read(&mut [0; 256]).unwrap() > 0);
        connection
    };
    cluster.start(2, &[]);
    wait_for(&cluster, &["n1", "n2", "n3"], true);
    // The kernel tracks it for two minutes after both sides have closed it.
    drop(translated);
    cluster.wait_until_settled();
}

/// The ports of a client that uses them again.
const REUSED: RangeInclusive<u16> = 20_000..=20_019;

/// Connects from each of the ports, waits for the server's name, and resets the connection.
fn connect_and_reset(cluster: &IngressCluster) {
    let _outside = cluster.clients[0].enter().unwrap();
    for port in REUSED {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.bind(&SocketAddr::from((OUTSIDE_CLIENTS[0][0], port)).into()).unwrap();
        socket.connect_timeout(&frontends()[0].into(), TIMEOUT).unwrap();
        let mut stream = TcpStream::from(socket);
        assert!(stream.read(&mut [0; 256]).unwrap() > 0);
        reset_on_close(&stream).unwrap();
    }
}

#[test]
fn a_connection_from_the_port_of_a_translated_one_goes_to_its_node_while_forwarding_begins() {
    let Some(mut cluster) = cluster_or_skip() else { return };
    // The connections of the test are known as long as it takes.
    let keep = || fs::write("/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_close", "600");
    cluster.nodes[0].netns.run(keep).unwrap();
    cluster.start(0, &[]);
    cluster.start(1, &[]);
    wait_for(&cluster, &["n1", "n2", "n3"], false);
    let _forwarding_begins = connect(&cluster, 1);
    connect_and_reset(&cluster);
    cluster.start(2, &[]);
    wait_for(&cluster, &["n1", "n2", "n3"], true);
    connect_and_reset(&cluster);
    let mut left = String::new();
    let are_closed = eventually(TIMEOUT, || {
        let range = format!("dport >= :{} and dport <= :{}", REUSED.start(), REUSED.end());
        let list = || run(Command::new("ss").args(["-Htn", "state", "established", &range])).success();
        left = cluster.nodes.iter().map(|it| it.pods.run(list)).collect();
        left.is_empty()
    });
    assert!(are_closed, "servers have not seen that the client has closed these:\n{left}");
}

#[test]
fn a_node_that_does_not_answer_gets_no_connections() {
    let Some(mut cluster) = cluster_or_skip() else { return };
    cluster.set_next_hops(NETWORKS, &[0, 1]);
    cluster.start_all();
    wait_for(&cluster, &["n1", "n2", "n3"], true);
    // Without a proxy the programs answer.
    cluster.kill(2);
    cluster.plug(2, false);
    wait_for(&cluster, &["n1", "n2"], true);
    for node in 0..2 {
        cluster.agent(node).wait_until_logged(TIMEOUT, "nodes do not answer any more").unwrap();
    }
    cluster.plug(2, true);
    wait_for(&cluster, &["n1", "n2", "n3"], true);
}

#[test]
fn pods_and_programs_of_nodes_cannot_send_wrapped_packets() {
    let Some(mut cluster) = cluster_or_skip() else { return };
    cluster.start_all();
    wait_for(&cluster, &["n1", "n2", "n3"], true);
    let last = &cluster.nodes[2];
    assert!(!is_taken(&cluster, &last.netns), "of a program of a node");
    assert!(!is_taken(&cluster, &last.pods), "of a pod");
    assert!(!is_taken(&cluster, &cluster.clients[0]), "of a host that is no node");
    // What protects is the program at the sender's uplink: without it the packet of a node is taken.
    cluster.kill(2);
    cluster.cleanup(2);
    assert!(is_taken(&cluster, &cluster.nodes[2].netns), "the packet is a good one");
}
