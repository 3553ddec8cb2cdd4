//! Nodes that packets from outside are forwarded to, while they cannot unwrap them, or do not answer.

use std::{
    collections::BTreeSet,
    net::{SocketAddr, UdpSocket},
    time::Duration,
};

use tests::{
    EchoConnection, NetNs, TIMEOUT, eventually,
    ingress_cluster::{IngressCluster, OUTSIDE_CLIENTS},
};

use crate::outside::{NETWORKS, frontends, web, wrapped_datagram};

/// A cluster of three nodes with endpoints on each; no proxy runs.
pub(crate) fn cluster_or_skip() -> Option<IngressCluster> {
    let cluster = IngressCluster::or_skip(3)?;
    cluster.write(&[web(&cluster, &[0, 1, 2])]);
    Some(cluster)
}

/// The servers that new connections reach, each with whether it saw the client's own address.
pub(crate) fn servers(cluster: &IngressCluster) -> BTreeSet<(String, bool)> {
    let _outside = cluster.clients[0].enter().unwrap();
    let connect = |it: usize| EchoConnection::connect(frontends()[it % 2]).ok();
    let connections: Vec<_> = (0..40).filter_map(connect).collect();
    let seen = |it: &EchoConnection| {
        let (name, source) = it.name().split_once(' ')?;
        Some((name.to_owned(), OUTSIDE_CLIENTS[0].contains(&source.parse().ok()?)))
    };
    connections.iter().filter_map(seen).collect()
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
    cluster.set_next_hops(NETWORKS, &[0]);
    cluster.start(0, &[]);
    cluster.start(1, &[]);
    let log = "nodes do not answer probes";
    cluster.nodes[0].agent.as_mut().unwrap().wait_until_logged(TIMEOUT, log).unwrap();
    wait_for(&cluster, &["n1", "n2", "n3"], false);
    cluster.start(2, &[]);
    wait_for(&cluster, &["n1", "n2", "n3"], true);
}

#[test]
fn a_node_that_does_not_answer_gets_no_connections() {
    let Some(mut cluster) = cluster_or_skip() else { return };
    cluster.set_next_hops(NETWORKS, &[0, 1]);
    for node in 0..3 {
        cluster.start(node, &[]);
    }
    wait_for(&cluster, &["n1", "n2", "n3"], true);
    // Without a proxy the programs answer.
    cluster.nodes[2].agent.take().unwrap().kill9().unwrap();
    cluster.plug(2, false);
    wait_for(&cluster, &["n1", "n2"], true);
    for node in 0..2 {
        let agent = cluster.nodes[node].agent.as_mut().unwrap();
        agent.wait_until_logged(TIMEOUT, "nodes do not answer any more").unwrap();
    }
    cluster.plug(2, true);
    wait_for(&cluster, &["n1", "n2", "n3"], true);
}

#[test]
fn pods_and_programs_of_nodes_cannot_send_wrapped_packets() {
    let Some(mut cluster) = cluster_or_skip() else { return };
    cluster.set_next_hops(NETWORKS, &[0]);
    for node in 0..3 {
        cluster.start(node, &[]);
    }
    wait_for(&cluster, &["n1", "n2", "n3"], true);
    let node = SocketAddr::new(cluster.nodes[0].addresses()[0], 16_081);
    let is_taken = |sender: &NetNs| {
        let client = cluster.clients[0].run(|| UdpSocket::bind("0.0.0.0:0")).unwrap();
        client.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        let bytes = wrapped_datagram(client.local_addr().unwrap().port());
        let _inside = sender.enter().unwrap();
        // The kernel may tell the sender at once.
        let _ = UdpSocket::bind("0.0.0.0:0").unwrap().send_to(&bytes, node);
        client.recv(&mut [0; 64]).is_ok()
    };
    let last = &cluster.nodes[2];
    assert!(!is_taken(&last.netns), "of a program of a node");
    assert!(!is_taken(&last.pods), "of a pod");
    assert!(!is_taken(&cluster.clients[0]), "of a host that is no node");
    // What protects is the program at the sender's uplink: without it the packet of a node is taken.
    cluster.nodes[2].agent.take().unwrap().kill9().unwrap();
    cluster.cleanup(2);
    assert!(is_taken(&cluster.nodes[2].netns), "the packet is a good one");
}
