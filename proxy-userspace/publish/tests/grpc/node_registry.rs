//! Any node's state, on request.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use model::state::{NodeInfo, NodeState};
use publish::{NodeRegistry, Publisher, SubscribeError, grpc::NodeStates};
use tokio::time::timeout;

use crate::common::{Brain, Folder, LIMIT, Peer, service, state};

/// A Service whose name says which node sees it.
fn seen_by(node: &str, endpoints: &[(&str, u8)]) -> NodeState {
    state([service(&format!("ns/{node}"), endpoints)])
}

/// Plays the brain: derives what is asked for, and remembers what that was.
async fn derive(nodes: &NodeRegistry, asked: &std::cell::RefCell<BTreeSet<Arc<str>>>) {
    loop {
        for node in nodes.requested().await {
            nodes.publish(&node, seen_by(&node, &[]));
            assert!(asked.borrow_mut().insert(node), "it is asked for once");
        }
    }
}

#[tokio::test]
async fn a_node_is_derived_when_it_is_first_asked_for() {
    let folder = Folder::new();
    let publisher = Publisher::new("n1");
    publisher.publish(seen_by("n1", &[]));
    let ready = publisher.for_node("never");
    let nodes = NodeRegistry::new(publisher);
    let brain = Brain::with(&folder.socket(), ready, nodes.requests()).await;
    let asked = Default::default();
    let clients = async {
        let mut own = Peer::start(&folder.socket(), "").await;
        assert_eq!(own.change_set().await, ["+s ns/n1"]);
        for _ in 0..2 {
            let mut peer = Peer::start(&folder.socket(), "n2").await;
            assert_eq!(peer.change_set().await, ["+s ns/n2"]);
            // It changes its mind.
            peer.ask("n3").await;
            assert_eq!(peer.change_set().await, ["+s ns/n3", "-s ns/n2"]);
            peer.ask("n1").await;
            assert_eq!(peer.change_set().await, ["+s ns/n1", "-s ns/n3"]);
        }
        let mut peer = Peer::silent(&folder.socket()).await;
        peer.ask("No Node").await;
        peer.item().await;
        let refused = timeout(LIMIT, peer.items.message()).await.unwrap().unwrap_err();
        assert_eq!(refused.code(), tonic::Code::InvalidArgument);
        own.hears_nothing().await;
    };
    tokio::select! {
        () = clients => {}
        () = derive(&nodes, &asked) => unreachable!("it never ends"),
    }
    assert_eq!(asked.into_inner(), ["n2".into(), "n3".into()].into());
    brain.stop().await;
}

#[tokio::test]
async fn when_the_source_closes_the_stream_of_any_node_ends_with_ok() {
    let folder = Folder::new();
    let publisher = Publisher::new("n1");
    let ready = publisher.for_node("never");
    let nodes = NodeRegistry::new(publisher);
    let brain = Brain::with(&folder.socket(), ready, nodes.requests()).await;
    let mut peer = Peer::start(&folder.socket(), "n2").await;
    assert_eq!(nodes.requested().await, ["n2".into()]);
    nodes.publish("n2", seen_by("n2", &[]));
    assert_eq!(peer.change_set().await, ["+s ns/n2"]);
    drop(nodes);
    peer.is_at_the_end().await;
    brain.stop().await;
}

#[tokio::test]
async fn a_node_that_nobody_follows_is_let_go_of_at_the_second_look() {
    let nodes = NodeRegistry::new(Publisher::new("n1"));
    let requests = nodes.requests();
    let watcher = requests.subscribe("n2", (0, 0)).unwrap();
    assert_eq!(nodes.requested().await, ["n2".into()]);
    assert!(nodes.remove_idle().is_empty() && nodes.remove_idle().is_empty());
    drop(watcher);
    assert!(nodes.remove_idle().is_empty());
    // A reconnect begins the count anew, and needs no derivation.
    drop(requests.subscribe("n2", (0, 0)).unwrap());
    assert!(nodes.remove_idle().is_empty());
    assert!(timeout(Duration::from_millis(20), nodes.requested()).await.is_err());
    assert_eq!(nodes.remove_idle(), ["n2".into()]);
    assert!(nodes.remove_idle().is_empty());
    // Whoever comes after that asks anew; the brain's own node is never let go of.
    let _watcher = requests.subscribe("n2", (0, 0)).unwrap();
    assert_eq!(nodes.requested().await, ["n2".into()]);
    drop(requests.subscribe("n1", (0, 0)).unwrap());
    assert!(nodes.remove_idle().is_empty() && nodes.remove_idle().is_empty());
}

#[tokio::test]
async fn strangers_are_bounded_and_nodes_of_the_cluster_are_not() {
    let nodes = NodeRegistry::new(Publisher::new("n1"));
    let requests = nodes.requests();
    nodes.set_cluster_nodes([("known".into(), NodeInfo::default())].into_iter().collect());
    let follow = |it: &str| requests.subscribe(it, (0, 0)).map(drop);
    for it in 0..5_000 {
        follow(&format!("stranger-{it}")).unwrap();
    }
    assert_eq!(follow("one-more"), Err(SubscribeError::TooManyUnknownNodes(5_000)));
    assert_eq!(follow("stranger-17"), Ok(()));
    assert_eq!(follow("known"), Ok(()));
    assert_eq!(follow(""), Ok(()));
    // They are gone, and make room.
    assert_eq!((nodes.remove_idle().len(), nodes.remove_idle().len()), (0, 5_001));
    assert!(timeout(Duration::from_millis(20), nodes.requested()).await.is_err());
    assert_eq!(follow("one-more"), Ok(()));
}

#[tokio::test]
async fn without_facts_only_the_own_node_is_served() {
    let nodes = NodeRegistry::new(Publisher::new("n1"));
    let requests = nodes.requests();
    let follow = |it: &str| requests.subscribe(it, (0, 0)).map(drop);
    let other = requests.subscribe("n2", (0, 0)).unwrap();
    assert_eq!(nodes.clear(), ["n2".into()]);
    assert!(timeout(LIMIT, other.clone().next()).await.unwrap().is_none(), "its follower is told of the end");
    assert!(timeout(Duration::from_millis(20), nodes.requested()).await.is_err());
    assert_eq!(follow("n2"), Err(SubscribeError::NoClusterState));
    assert_eq!(follow("n1"), Ok(()));
    nodes.set_cluster_nodes([("n2".into(), NodeInfo::default())].into_iter().collect());
    assert_eq!(follow("n2"), Ok(()));
    assert_eq!(nodes.requested().await, ["n2".into()]);
}

#[tokio::test]
async fn no_two_states_of_a_process_have_one_revision() {
    let nodes = NodeRegistry::new(Publisher::new("n1"));
    let requests = nodes.requests();
    let revision = async |node: &str, endpoint| {
        let mut states = requests.subscribe(node, (0, 0)).unwrap();
        nodes.publish(node, seen_by(node, &[("p", endpoint)]));
        let it = states.next().await.unwrap();
        (it.instance_id, it.rev)
    };
    let (instance, first) = revision("n1", 1).await;
    assert_eq!(first, 1);
    let mut seen = BTreeSet::from([first]);
    for endpoint in 2..5 {
        for node in ["n1", "n2", "n3"] {
            let (same, rev) = revision(node, endpoint).await;
            assert!(same == instance && seen.insert(rev));
        }
        // A node that was let go of, and comes back.
        nodes.remove_idle();
        nodes.remove_idle();
    }
}

#[tokio::test]
async fn a_thousand_watchers_are_each_told_of_one_change() {
    let folder = Folder::new();
    let publisher = Publisher::new("n1");
    let ready = publisher.for_node("never");
    let nodes = NodeRegistry::new(publisher);
    let brain = Brain::with(&folder.socket(), ready, nodes.requests()).await;
    let channel = crate::common::channel(&folder.socket()).await;
    let names: Vec<_> = (0..1000).map(|it| format!("node-{it}")).collect();
    let clients = async {
        let mut peers = Vec::new();
        for name in &names {
            let mut peer = Peer::over(channel.clone()).await;
            peer.ask(name).await;
            peer.item().await;
            assert_eq!(peer.change_set().await, [format!("+s ns/{name}")]);
            peer.ask(name).await;
            peers.push(peer);
        }
        for name in &names {
            nodes.publish(name, seen_by(name, &[("p", 1)]));
        }
        for (peer, name) in peers.iter_mut().zip(&names) {
            assert_eq!(peer.change_set().await, [format!("+e ns/{name}/p")]);
        }
    };
    let asked = Default::default();
    tokio::select! {
        () = clients => {}
        () = derive(&nodes, &asked) => unreachable!("it never ends"),
    }
    brain.stop().await;
}
