//! The states of any node on request.

use std::{collections::BTreeSet, sync::Arc};

use model::state::{NodeInfo, NodeState};
use publish::{NodeRegistry, NodeStates, Publisher, SubscribeError};

use crate::{
    common::{Brain, in_time, is_pending, service, state},
    peer::NodePeer,
};

/// A state with a Service named after the node.
fn state_of(node: &str, endpoints: &[(&str, u8)]) -> NodeState {
    state([service(&format!("ns/{node}"), endpoints)])
}

/// Plays the brain: publishes the states of requested nodes, and records the requests.
async fn compute(nodes: &NodeRegistry, requested: &std::cell::RefCell<BTreeSet<Arc<str>>>) {
    loop {
        for node in nodes.requested().await {
            nodes.publish(&node, state_of(&node, &[]));
            assert!(requested.borrow_mut().insert(node), "each node is requested once");
        }
    }
}

#[tokio::test]
async fn a_node_is_computed_when_first_requested() {
    let (folder, _brain, nodes) = Brain::any_node().await;
    nodes.publish("n1", state_of("n1", &[]));
    let requested = Default::default();
    let clients = async {
        let mut own = NodePeer::start(&folder, "").await;
        assert_eq!(own.change_set().await, ["+s ns/n1"]);
        for _ in 0..2 {
            let mut peer = NodePeer::start(&folder, "n2").await;
            assert_eq!(peer.change_set().await, ["+s ns/n2"]);
            // Another node on the same stream.
            peer.ask("n3").await;
            assert_eq!(peer.change_set().await, ["+s ns/n3", "-s ns/n2"]);
            peer.ask("n1").await;
            assert_eq!(peer.change_set().await, ["+s ns/n1", "-s ns/n3"]);
        }
        let mut peer = NodePeer::silent(&folder).await;
        peer.ask("No Node").await;
        peer.item().await;
        let error = peer.fails().await;
        assert_eq!(error.code(), tonic::Code::InvalidArgument);
        own.receives_nothing().await;
    };
    tokio::select! {
        () = clients => {}
        () = compute(&nodes, &requested) => unreachable!("it never returns"),
    }
    assert_eq!(requested.into_inner(), ["n2".into(), "n3".into()].into());
}

#[tokio::test]
async fn the_stream_of_a_requested_node_ends_with_ok_when_the_registry_is_dropped() {
    let (folder, _brain, nodes) = Brain::any_node().await;
    let mut peer = NodePeer::start(&folder, "n2").await;
    assert_eq!(nodes.requested().await, ["n2".into()]);
    nodes.publish("n2", state_of("n2", &[]));
    assert_eq!(peer.change_set().await, ["+s ns/n2"]);
    drop(nodes);
    peer.ends().await;
}

#[tokio::test]
async fn an_idle_node_is_removed_at_the_second_check() {
    let nodes = NodeRegistry::new(Publisher::new("n1"));
    let requests = nodes.requests();
    let watcher = requests.subscribe("n2").unwrap();
    assert_eq!(nodes.requested().await, ["n2".into()]);
    assert!(nodes.remove_idle().is_empty() && nodes.remove_idle().is_empty());
    drop(watcher);
    assert!(nodes.remove_idle().is_empty());
    // A reconnect restarts the count, and is not a new request.
    drop(requests.subscribe("n2").unwrap());
    assert!(nodes.remove_idle().is_empty());
    assert!(is_pending(20, nodes.requested()).await);
    assert_eq!(nodes.remove_idle(), ["n2".into()]);
    assert!(nodes.remove_idle().is_empty());
    // After the removal, a subscription is a new request; the brain's own node is never removed.
    let _watcher = requests.subscribe("n2").unwrap();
    assert_eq!(nodes.requested().await, ["n2".into()]);
    drop(requests.subscribe("n1").unwrap());
    assert!(nodes.remove_idle().is_empty() && nodes.remove_idle().is_empty());
}

#[tokio::test]
async fn unknown_nodes_are_limited_and_nodes_of_the_cluster_are_not() {
    let nodes = NodeRegistry::new(Publisher::new("n1"));
    let requests = nodes.requests();
    nodes.set_cluster_nodes(Arc::new([("known".into(), NodeInfo::default())].into()));
    let follow = |it: &str| requests.subscribe(it).map(drop);
    for it in 0..5_000 {
        follow(&format!("unknown-{it}")).unwrap();
    }
    assert_eq!(follow("one-more"), Err(SubscribeError::TooManyUnknownNodes(5_000)));
    assert_eq!(follow("unknown-17"), Ok(()));
    assert_eq!(follow("known"), Ok(()));
    assert_eq!(follow(""), Ok(()));
    // Their removal makes room.
    assert_eq!((nodes.remove_idle().len(), nodes.remove_idle().len()), (0, 5_001));
    assert!(is_pending(20, nodes.requested()).await);
    assert_eq!(follow("one-more"), Ok(()));
}

#[tokio::test]
async fn without_a_cluster_state_only_the_own_node_is_served() {
    let nodes = NodeRegistry::new(Publisher::new("n1"));
    let requests = nodes.requests();
    let follow = |it: &str| requests.subscribe(it).map(drop);
    let other = requests.subscribe("n2").unwrap();
    assert_eq!(nodes.clear(), ["n2".into()]);
    assert!(in_time(other.clone().next()).await.is_none(), "its subscription ends");
    assert!(is_pending(20, nodes.requested()).await);
    assert_eq!(follow("n2"), Err(SubscribeError::NoClusterState));
    assert_eq!(follow("n1"), Ok(()));
    nodes.set_cluster_nodes(Arc::new([("n2".into(), NodeInfo::default())].into()));
    assert_eq!(follow("n2"), Ok(()));
    assert_eq!(nodes.requested().await, ["n2".into()]);
}

#[tokio::test]
async fn revisions_are_unique_across_nodes() {
    let nodes = NodeRegistry::new(Publisher::new("n1"));
    let requests = nodes.requests();
    let revision = async |node: &str, endpoint| {
        let mut states = requests.subscribe(node).unwrap();
        nodes.publish(node, state_of(node, &[("p", endpoint)]));
        states.next().await.unwrap().revision()
    };
    let (instance, first) = revision("n1", 1).await;
    assert_eq!(first, 1);
    let mut seen = BTreeSet::from([first]);
    for endpoint in 2..5 {
        for node in ["n1", "n2", "n3"] {
            let (same, rev) = revision(node, endpoint).await;
            assert!(same == instance && seen.insert(rev));
        }
        // Nodes that are removed and requested again.
        nodes.remove_idle();
        nodes.remove_idle();
    }
}
