//! `localv1.Sets/Watch`, for a client that keeps KPNG's rules.

use std::sync::Arc;

use model::state::{NodeState, ServiceState, TargetPort};
use proxy_contract::localv1::op_item::Op;
use publish::{NodeStates, Publisher, SubscribeError, Subscription};

use crate::{
    common::{Brain, Folder, service, state, until},
    peer::NodePeer,
};

#[tokio::test]
async fn the_server_waits_for_a_request_and_then_resets_at_once() {
    let (folder, brain) = Brain::new().await;
    let mut peer = NodePeer::silent(&folder).await;
    peer.receives_nothing().await;
    peer.ask("n1").await;
    // No state is published yet.
    assert_eq!(peer.item().await, Op::Reset(Default::default()));
    peer.receives_nothing().await;
    brain.publish([service("ns/a", &[])]);
    assert_eq!(peer.change_set().await, ["+s ns/a"]);
}

#[tokio::test]
async fn each_request_gets_one_change_set_and_changes_in_between_are_merged() {
    let (folder, brain) = Brain::serving(state([service("ns/a", &[("p1", 1)])])).await;
    let mut peer = NodePeer::start(&folder, "n1").await;
    assert_eq!(peer.change_set().await, ["+s ns/a", "+e ns/a/p1"]);
    for last in 2..9 {
        brain.publish([service("ns/a", &[("p1", last)])]);
    }
    peer.receives_nothing().await;
    peer.ask("n1").await;
    assert_eq!(peer.change_set().await, ["+e ns/a/p1"]);
    assert_eq!(peer.endpoints["ns/a/p1"].ips.as_ref().unwrap().v4, ["10.1.0.8"]);
    // A change that is reverted is no change, and leaves the request pending.
    peer.ask("n1").await;
    peer.receives_nothing().await;
    brain.publish([service("ns/a", &[("p1", 8)]), service("ns/b", &[])]);
    assert_eq!(peer.change_set().await, ["+s ns/b"]);
}

/// `ns/a`, whose target port has a name, with endpoints that listen on these ports.
fn with_named_target(ports: &[u16]) -> NodeState {
    let endpoints: Vec<_> = ["p1", "p2", "p3"].into_iter().zip(1..).take(ports.len()).collect();
    let (name, it) = service("ns/a", &endpoints);
    let mut service = (*it.service).clone();
    service.ports[0].target_port = TargetPort::Name("web".into());
    let endpoints = it.endpoints.iter().zip(ports).map(|(endpoint, port)| {
        let mut endpoint = (**endpoint).clone();
        Arc::make_mut(&mut endpoint.ports)[0].port = (*port).try_into().unwrap();
        endpoint
    });
    state([(name, Arc::new(ServiceState::new(service, endpoints)))])
}

#[tokio::test]
async fn a_named_target_port_has_the_number_that_all_endpoints_agree_on() {
    let (folder, brain) = Brain::serving(with_named_target(&[])).await;
    let mut peer = NodePeer::start(&folder, "n1").await;
    let mut sent = Vec::new();
    for ports in [&[][..], &[8080], &[8080, 8080], &[8080, 9090], &[9090, 9090]] {
        brain.publisher.publish(with_named_target(ports));
        let changes = peer.change_set().await;
        let port = &peer.services["ns/a"].ports[0];
        assert_eq!(port.target_port_name, "web");
        sent.push((port.target_port, changes.contains(&"+s ns/a".to_owned())));
        peer.ask("").await;
    }
    // The Service is sent again only if the number has changed.
    assert_eq!(sent, [(0, true), (8080, true), (8080, false), (0, true), (9090, true)]);
}

#[tokio::test]
async fn operations_never_leave_an_endpoint_without_its_service() {
    let (folder, brain) = Brain::new().await;
    let deleted = |name| service(name, &[("p", 1), ("@x", 2)]);
    brain.publish([
        deleted("a/gone"),
        deleted("a-b/gone"),
        service("ns/s", &[("p1", 1), ("p2", 2), ("p3", 3), ("@x", 4), ("@y", 5), ("q", 6), ("@r", 7)]),
    ]);
    let mut peer = NodePeer::start(&folder, "n1").await;
    assert_eq!(
        peer.change_set().await,
        [
            "+s a/gone",
            "+s a-b/gone",
            "+s ns/s",
            "+e a/gone/p",
            "+e a/gone/x",
            "+e a-b/gone/p",
            "+e a-b/gone/x",
            "+e ns/s/p1",
            "+e ns/s/p2",
            "+e ns/s/p3",
            "+e ns/s/q",
            "+e ns/s/r",
            "+e ns/s/x",
            "+e ns/s/y",
        ]
    );
    peer.ask("n1").await;
    // A pod's endpoint becomes anonymous and the other way round, under the same path.
    brain.publish([
        service("a/new", &[("p", 1)]),
        service("a-b/new", &[]),
        service("ns/s", &[("p1", 8), ("p4", 9), ("@z", 1), ("@q", 6), ("r", 7)]),
    ]);
    assert_eq!(
        peer.change_set().await,
        [
            "+s a/new",
            "+s a-b/new",
            "+e a/new/p",
            "+e ns/s/p1",
            "+e ns/s/p4",
            "+e ns/s/r",
            "+e ns/s/q",
            "+e ns/s/z",
            "-e ns/s/y",
            "-e ns/s/x",
            "-e ns/s/p3",
            "-e ns/s/p2",
            "-e a-b/gone/x",
            "-e a-b/gone/p",
            "-e a/gone/x",
            "-e a/gone/p",
            "-s a-b/gone",
            "-s a/gone",
        ]
    );
}

struct TwoNodes([Subscription; 2]);

impl NodeStates for TwoNodes {
    fn subscribe(&self, node: &str) -> Result<Subscription, SubscribeError> {
        let position = ["n1", "n2"].iter().position(|it| *it == node).ok_or(SubscribeError::NotServed)?;
        Ok(self.0[position].resubscribe())
    }
}

#[tokio::test]
async fn another_node_name_is_answered_at_once_with_the_difference() {
    let folder = Folder::new();
    let [one, two] = ["n1", "n2"].map(Publisher::new);
    one.publish(state([service("ns/both", &[]), service("ns/one", &[("p", 1)])]));
    two.publish(state([service("ns/both", &[]), service("ns/two", &[("p", 1)])]));
    let nodes = TwoNodes([one.subscribe(), two.subscribe()]);
    let brain = Brain::with(&folder, one, nodes).await;
    let mut peer = NodePeer::start(&folder, "n1").await;
    assert_eq!(peer.change_set().await, ["+s ns/both", "+s ns/one", "+e ns/one/p"]);
    // Also while a request is pending.
    peer.ask("n1").await;
    peer.receives_nothing().await;
    peer.ask("n2").await;
    assert_eq!(peer.change_set().await, ["+s ns/two", "+e ns/two/p", "-e ns/one/p", "-s ns/one"]);
    two.publish(state([service("ns/both", &[])]));
    assert_eq!(peer.change_set().await, ["-e ns/two/p", "-s ns/two"]);
    // An equal state of another node: only a sync.
    brain.publish([service("ns/both", &[])]);
    peer.ask("n1").await;
    assert!(peer.change_set().await.is_empty());
    peer.ask("n3").await;
    let error = peer.fails().await;
    assert_eq!(error.code(), tonic::Code::NotFound);
}

#[tokio::test]
async fn the_stream_ends_with_ok_when_the_publisher_is_dropped() {
    let (folder, brain) = Brain::serving(state([service("ns/a", &[])])).await;
    let mut waiting = NodePeer::start(&folder, "n1").await;
    let mut idle = NodePeer::start(&folder, "n1").await;
    for peer in [&mut waiting, &mut idle] {
        peer.change_set().await;
    }
    waiting.ask("n1").await;
    brain.stop().await;
    waiting.ends().await;
    idle.ends().await;
}

#[tokio::test]
async fn pending_requests_of_a_half_closed_stream_are_answered() {
    let (folder, brain) = Brain::new().await;
    let mut peer = NodePeer::start(&folder, "n1").await;
    peer.requests = tokio::sync::mpsc::channel(1).0;
    peer.receives_nothing().await;
    brain.publish([service("ns/a", &[])]);
    assert_eq!(peer.change_set().await, ["+s ns/a"]);
    peer.ends().await;
}

#[tokio::test]
async fn a_disconnected_watcher_is_dropped_at_once() {
    let (folder, brain) = Brain::serving(state([service("ns/a", &[])])).await;
    let before = brain.publisher.subscribers();
    let mut peers = Vec::new();
    for _ in 0..5 {
        peers.push(NodePeer::synced(&folder).await);
    }
    assert!(brain.publisher.subscribers() >= before + 5);
    drop(peers);
    until(|| brain.publisher.subscribers() <= before).await;
}
