//! Node states computed from a cluster state that was sent over the wire equal those computed from the original.

use std::{collections::BTreeSet, sync::Arc};

use brain::{Options, node_state};
use model::{
    Family, Timestamp,
    cluster::{ClusterState, Conditions, Endpoint, EndpointSlice, Node, Service, SliceName, SlicePort},
    state::{self, NodeState, ServiceKind, TrafficPolicy},
};
use proptest::{collection::vec, option, prelude::*, sample::select, test_runner::Config};
use proxy_contract::client::ClusterWatch;
use publish::cluster::ClusterSnapshot;
use tokio::time::timeout;
use wire::{Extensions, cluster::ClusterDecoder};

use crate::{
    cluster_watch::{endpoint, service, slice},
    common::{Brain, Folder, LIMIT},
    peer::ClusterPeer,
};

/// A brain that follows another one.
struct Downstream {
    cluster: ClusterWatch,
    decoder: ClusterDecoder,
}

impl Downstream {
    fn new(folder: &Folder) -> Self {
        let client = folder.client();
        Self {
            cluster: client.request_extensions(Extensions::GLOBAL.iter()).cluster(),
            decoder: ClusterDecoder::default(),
        }
    }

    async fn next(&mut self) -> Arc<ClusterState> {
        let cluster = timeout(LIMIT, self.cluster.next()).await.unwrap().unwrap();
        self.decoder.decode(&cluster)
    }
}

/// The states of all nodes, for two proxies, with their trigger times.
fn node_states(state: &ClusterState) -> Vec<(NodeState, Vec<Option<Timestamp>>)> {
    let mut states = Vec::new();
    let nodes: BTreeSet<&str> = state.nodes().keys().map(|it| &**it).chain(["n1", "n2", "unknown"]).collect();
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

#[derive(Clone, Debug)]
enum Step {
    Service(Box<Service>),
    DeleteService(&'static str),
    Slice(Box<EndpointSlice>),
    DeleteSlice(u8),
    Node(&'static str, Option<&'static str>),
    DeleteNode(&'static str),
}

const SERVICES: [&str; 3] = ["a", "a-b", "b"];
const NODES: [&str; 3] = ["n", "n1", "n2"];

fn some_service() -> impl Strategy<Value = Service> {
    let flags = any::<[bool; 6]>();
    let conflict = (option::of(0..3_i64), 0..4_usize, 0..9_u8);
    (select(SERVICES.to_vec()), flags, conflict).prop_map(
        |(name, [local, external_local, v6_first, is_lb, second_port, ranges], (age, families, kind))| {
            let mut it = service(name);
            let policy = |local| if local { TrafficPolicy::Local } else { TrafficPolicy::Cluster };
            it.created = age.map(Timestamp::from_micros);
            it.cluster_ips =
                ["10.96.0.1", "fd00::1"].map(|it| it.parse().unwrap())[..families.min(2)].to_vec();
            if v6_first {
                it.cluster_ips.reverse();
            }
            it.kind = if kind == 0 { None } else { Some(ServiceKind::NodePort) };
            it.proxy_name = (kind == 1).then(|| "mesh".to_owned());
            it.internal_policy = policy(local);
            it.external_policy = policy(external_local);
            it.external_ips =
                ["fd00::7", "192.0.2.7", "192.0.2.8"].map(|it| it.parse().unwrap())[families % 3..].to_vec();
            if is_lb {
                it.kind = Some(ServiceKind::LoadBalancer);
                it.load_balancer_ips = vec!["192.0.2.1".parse().unwrap()];
                it.health_check_node_port = std::num::NonZeroU16::new(30_999);
            }
            if ranges {
                it.source_ranges =
                    ["fd00::/8", "10.0.0.0/8", "192.0.2.0/24"].map(|it| it.parse().unwrap()).to_vec();
            }
            if second_port {
                let mut port = it.ports[0].clone();
                port.name = String::new();
                port.protocol = model::Protocol::Udp;
                port.node_port = std::num::NonZeroU16::new(30_080);
                it.ports.insert(0, port);
            }
            it
        },
    )
}

fn some_endpoint(family: Family) -> impl Strategy<Value = Endpoint> {
    let hints = (vec(select(vec!["n1", "n2"]), 0..2), vec(select(vec!["a", "b"]), 0..2));
    let pod = option::of(select(vec!["p", "q"]));
    let node = option::of(select(vec!["n1", "n2"]));
    (1..4, any::<[bool; 3]>(), pod, node, select(vec!["", "h"]), hints).prop_map(
        move |(last, [ready, serving, terminating], pod, node, hostname, (nodes, zones))| {
            let address = match family {
                Family::V4 => format!("10.1.0.{last}"),
                Family::V6 => format!("fd00:1::{last}"),
            };
            Endpoint {
                conditions: Conditions { ready, serving, terminating },
                node: node.map(Into::into),
                pod: pod.map(Into::into),
                hostname: hostname.into(),
                node_hints: nodes.into_iter().map(Into::into).collect(),
                zone_hints: zones.into_iter().map(Into::into).collect(),
                ..endpoint(&address)
            }
        },
    )
}

fn some_slice() -> impl Strategy<Value = EndpointSlice> {
    let port = (select(vec!["", "http"]), any::<bool>(), 8080..8082_u16).prop_map(|(name, is_udp, port)| {
        SlicePort {
            name: name.into(),
            protocol: if is_udp { model::Protocol::Udp } else { model::Protocol::Tcp },
            port: std::num::NonZeroU16::new(port).unwrap(),
        }
    });
    (select(vec![Family::V4, Family::V6]), vec(port, 0..3)).prop_flat_map(|(family, ports)| {
        let rest = (0..5_u8, select(vec!["a", "a-b", "b", "missing"]), option::of(0..9_i64), 0..9_u8);
        (vec(some_endpoint(family), 0..4), rest).prop_map(
            move |(endpoints, (name, service, time, headless))| EndpointSlice {
                family,
                headless: headless == 0,
                ports: ports.clone(),
                endpoints,
                trigger_time: time.map(Timestamp::from_micros),
                ..slice(&format!("slice-{name}"), service, &[])
            },
        )
    })
}

fn some_step() -> impl Strategy<Value = Step> {
    let zone = option::of(select(vec!["a", "b"]));
    prop_oneof![
        4 => some_service().prop_map(|it| Step::Service(Box::new(it))),
        1 => select(SERVICES.to_vec()).prop_map(Step::DeleteService),
        6 => some_slice().prop_map(|it| Step::Slice(Box::new(it))),
        2 => (0..5_u8).prop_map(Step::DeleteSlice),
        2 => (select(NODES.to_vec()), zone).prop_map(|(name, zone)| Step::Node(name, zone)),
        1 => select(NODES.to_vec()).prop_map(Step::DeleteNode),
    ]
}

fn apply(state: &mut ClusterState, step: Step) {
    match step {
        Step::Service(it) => drop(state.set_service(*it)),
        Step::DeleteService(it) => drop(state.delete_service(&model::ServiceName::new("ns", it))),
        Step::Slice(it) => drop(state.set_slice(*it)),
        Step::DeleteSlice(it) => {
            let name = SliceName { namespace: "ns".into(), name: format!("slice-{it}").into() };
            drop(state.delete_slice(&name));
        }
        Step::Node(name, zone) => {
            let info = state::NodeInfo {
                addresses: vec![if zone.is_some() { "192.0.2.1" } else { "fd00::9" }.parse().unwrap()],
                pod_cidrs: vec!["10.1.0.0/16".parse().unwrap()],
                is_being_deleted: zone == Some("b"),
            };
            drop(state.set_node(Node { name: name.into(), zone: zone.map(Into::into), info }));
        }
        Step::DeleteNode(it) => drop(state.delete_node(it)),
    }
}

/// Applies the steps; a downstream brain and a peer that keeps KPNG's rules follow.
async fn play(batches: Vec<Vec<Step>>) {
    let (folder, brain) = Brain::new().await;
    let mut downstream = Downstream::new(&folder);
    let mut state = ClusterState::default();
    // Changes with each batch, so that there is always a change to wait for.
    let mark = |batch: usize| Node {
        name: "mark".into(),
        zone: Some(format!("zone-{batch}").into()),
        info: state::NodeInfo::default(),
    };
    let mut peer: Option<ClusterPeer> = None;
    for (batch, steps) in batches.into_iter().enumerate() {
        steps.into_iter().for_each(|it| apply(&mut state, it));
        state.set_node(mark(batch));
        brain.cluster.publish(ClusterSnapshot::State(Arc::new(state.clone())));
        let received = downstream.next().await;
        assert_eq!(received.node("mark"), state.node("mark"));
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
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let config = Config { cases: 96, max_shrink_iters: 64, failure_persistence: None, ..Config::default() };
    let batches = vec(vec(some_step(), 1..8), 1..6);
    proptest!(config, |(batches in batches)| runtime.block_on(play(batches)));
}

#[tokio::test]
async fn the_scenarios_are_unchanged_by_the_wire() {
    let (folder, brain) = Brain::new().await;
    let mut downstream = Downstream::new(&folder);
    let steps = scenarios::all().into_iter().flat_map(|it| it.steps);
    for (count, step) in steps.enumerate() {
        let mut state = step.cluster();
        // A change even if the scenario before has the same objects.
        let zone = Some(format!("zone-{count}").into());
        state.set_node(Node { name: "mark".into(), zone, info: state::NodeInfo::default() });
        brain.cluster.publish(ClusterSnapshot::State(Arc::new(state.clone())));
        assert_eq!(node_states(&*downstream.next().await), node_states(&state), "{}", step.about);
    }
    brain.stop().await;
}
