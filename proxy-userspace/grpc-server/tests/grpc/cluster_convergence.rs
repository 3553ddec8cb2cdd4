//! Node states computed from a cluster state that was sent over the wire equal those computed from the original.

use std::{collections::BTreeSet, sync::Arc};

use brain::{Options, node_state};
use fuzz::random_cluster::apply_changes;
use model::{
    Timestamp,
    cluster::{ClusterState, Node},
    state::{self, NodeState},
};
use proptest::{collection::vec, prelude::*, test_runner::Config};
use proxy_contract::client::ClusterWatch;
use wire::{Extensions, cluster::ClusterDecoder};

use crate::{
    common::{Brain, Folder, block_on, in_time},
    peer::ClusterPeer,
};

/// A brain that follows another one.
struct Downstream {
    cluster: ClusterWatch,
    decoder: ClusterDecoder,
}

impl Downstream {
    fn new(folder: &Folder) -> Self {
        let client = folder.client().request_extensions(Extensions::GLOBAL.iter());
        Self { cluster: client.cluster(), decoder: ClusterDecoder::default() }
    }

    async fn next(&mut self) -> Arc<ClusterState> {
        let change = in_time(self.cluster.next()).await.unwrap();
        self.decoder.apply(&change)
    }
}

/// The states of all nodes, for two proxies, with their trigger times.
fn node_states(state: &ClusterState) -> Vec<(NodeState, Vec<Option<Timestamp>>)> {
    let mut states = Vec::new();
    let nodes: BTreeSet<&str> = state.nodes.keys().map(|it| &**it).chain(["n1", "n2", "unknown"]).collect();
    for service_proxy_name in [None, Some("mesh".to_owned())] {
        let options = Options { service_proxy_name, ..Options::default() };
        for node in &nodes {
            let state = node_state(state, node, &options);
            let times = state.services.values().map(|it| it.trigger_time).collect();
            states.push((state, times));
        }
    }
    states
}

/// Changes with each batch, so that there is always a change to wait for.
fn mark(batch: usize) -> Node {
    let zone = Some(format!("zone-{batch}").into());
    Node { name: "mark".into(), zone, info: state::NodeInfo::default() }
}

/// Applies random changes; a downstream brain and a peer that keeps KPNG's rules follow.
async fn play(batches: Vec<Vec<u8>>) {
    let (folder, brain) = Brain::new().await;
    let mut downstream = Downstream::new(&folder);
    let mut state = ClusterState::default();
    let mut peer: Option<ClusterPeer> = None;
    for (batch, bytes) in batches.into_iter().enumerate() {
        apply_changes(&mut state, &bytes);
        state.nodes.insert(mark(batch));
        if batch % 2 == 0 {
            let cidrs = vec![format!("10.{batch}.0.0/16").parse().unwrap()];
            state.set_service_cidr(state::ServiceCidr { name: "mark".into(), cidrs });
            let uid = format!("u{batch}").into();
            state.set_pod(state::Pod { name: "ns/mark".into(), uid, socket_lb: state::SocketLb::Off });
        } else {
            state.delete_pod("ns/mark");
            state.delete_service_cidr("mark");
        }
        brain.publish_cluster(state.clone());
        let received = downstream.next().await;
        assert_eq!(received.nodes.get("mark"), state.nodes.get("mark"));
        assert_eq!(node_states(&received), node_states(&state));
        match &peer {
            Some(peer) => peer.ask().await,
            None => peer = Some(ClusterPeer::start(&folder).await),
        }
        peer.as_mut().unwrap().change_set().await;
    }
    // A new peer receives the same as one that has followed all changes.
    let mut late = ClusterPeer::start(&folder).await;
    late.change_set().await;
    if let Some(peer) = peer {
        assert_eq!(peer.objects, late.objects);
    }
    brain.stop().await;
}

#[test]
fn a_brain_that_follows_computes_the_same_states() {
    let config = Config { cases: 96, max_shrink_iters: 64, failure_persistence: None, ..Config::default() };
    let batches = vec(vec(any::<u8>(), 0..600), 1..6);
    proptest!(config, |(batches in batches)| block_on(play(batches)));
}

/// Replaces the brain with each batch: the downstream brain has missed it.
async fn play_with_restarts(batches: Vec<Vec<u8>>) {
    let folder = Folder::new();
    let mut downstream = Downstream::new(&folder);
    let mut state = ClusterState::default();
    for (batch, bytes) in batches.into_iter().enumerate() {
        apply_changes(&mut state, &bytes);
        state.nodes.insert(mark(batch));
        let brain = Brain::start(&folder).await;
        brain.publish_cluster(state.clone());
        let states = |it: &ClusterState| node_states(it).into_iter().map(|(it, _)| it).collect::<Vec<_>>();
        assert_eq!(states(&*downstream.next().await), states(&state));
        brain.stop().await;
    }
}

#[test]
fn a_brain_that_follows_replaced_ones_computes_the_same_states() {
    let config = Config { cases: 12, max_shrink_iters: 64, failure_persistence: None, ..Config::default() };
    let batches = vec(vec(any::<u8>(), 0..400), 1..8);
    proptest!(config, |(batches in batches)| block_on(play_with_restarts(batches)));
}

#[tokio::test]
async fn the_scenarios_are_unchanged_by_the_wire() {
    let (folder, brain) = Brain::new().await;
    let mut downstream = Downstream::new(&folder);
    let steps = scenarios::all().into_iter().flat_map(|it| it.steps);
    for (count, step) in steps.enumerate() {
        let mut state = step.cluster();
        // A change even if the scenario before has the same objects.
        state.nodes.insert(mark(count));
        brain.publish_cluster(state.clone());
        assert_eq!(node_states(&*downstream.next().await), node_states(&state), "{}", step.about);
    }
    brain.stop().await;
}
