//! `globalv1.Sets/Watch`, as a client of KPNG's meets it.

use std::{sync::Arc, time::Duration};

use model::{
    Family, Protocol, ServiceName, Timestamp,
    cluster::{ClusterState, Endpoint, EndpointSlice, Service, ServicePort, SliceName, SlicePort},
    state::TargetPort,
};
use proxy_contract::{
    Target,
    client::{Client, Refused},
    globalv1::GlobalWatchReq,
    localv1::{EmptyOp, Extension, op_item::Op},
};
use publish::cluster::ClusterSnapshot;
use tokio::time::timeout;

use crate::{
    common::{Brain, Folder, LIMIT},
    global_peer::GlobalPeer,
};

pub(crate) fn service(name: &str) -> Service {
    let number = |port| std::num::NonZeroU16::new(port).unwrap();
    Service {
        cluster_ips: vec!["10.96.0.1".parse().unwrap()],
        ports: vec![ServicePort {
            name: "http".into(),
            protocol: Protocol::Tcp,
            port: number(80),
            node_port: None,
            target_port: TargetPort::Number(number(8080)),
        }],
        ..Service::new(ServiceName::new("ns", name))
    }
}

pub(crate) fn endpoint(address: &str) -> Endpoint {
    Endpoint { node: Some("n1".into()), ..Endpoint::new(address.parse().unwrap()) }
}

pub(crate) fn slice(name: &str, service: &str, endpoints: &[&str]) -> EndpointSlice {
    EndpointSlice {
        ports: vec![SlicePort {
            name: "http".into(),
            protocol: Protocol::Tcp,
            port: std::num::NonZeroU16::new(8080).unwrap(),
        }],
        endpoints: endpoints.iter().map(|it| endpoint(it)).collect(),
        ..EndpointSlice::new(
            SliceName { namespace: "ns".into(), name: name.into() },
            ServiceName::new("ns", service),
            Family::V4,
        )
    }
}

fn facts(nodes: &[&str], services: &[&str], slices: &[EndpointSlice]) -> Arc<ClusterState> {
    let mut facts = ClusterState::default();
    for it in nodes {
        facts.set_node(model::cluster::Node { name: (*it).into(), zone: None, info: Default::default() });
    }
    for it in services {
        facts.set_service(service(it));
    }
    for it in slices {
        facts.set_slice(it.clone());
    }
    facts.into()
}

#[tokio::test]
async fn facts_come_in_the_order_that_keeps_endpoints_with_their_services() {
    let folder = Folder::new();
    let brain = Brain::start(&folder.socket()).await;
    let mut peer = GlobalPeer::start(&folder.socket()).await;
    let slices = [slice("a-1", "a", &["10.1.0.2", "10.1.0.1"]), slice("a-b-1", "a-b", &["10.1.0.3"])];
    brain.cluster.publish(ClusterSnapshot::State(facts(&["n", "n-1"], &["a", "a-b"], &slices)));
    assert_eq!(
        peer.change_set().await,
        [
            "+n |n-1||",
            "+n |n||",
            "+s ns|a-b||",
            "+s ns|a||",
            "+e ns|a-b|a-b-1|10.1.0.3",
            "+e ns|a|a-1|10.1.0.1",
            "+e ns|a|a-1|10.1.0.2",
            "+e ns||a-1|10.1.0.1",
            "+e ns||a-1|10.1.0.2",
            "+e ns||a-b-1|10.1.0.3",
        ]
    );
    peer.ask().await;
    // A slice is given another Service, and the Service that had it is gone.
    let slices = [slice("a-1", "c", &["10.1.0.2", "10.1.0.4"])];
    brain.cluster.publish(ClusterSnapshot::State(facts(&["n"], &["a", "c"], &slices)));
    assert_eq!(
        peer.change_set().await,
        [
            "+s ns|c||",
            "+e ns|c|a-1|10.1.0.2",
            "+e ns|c|a-1|10.1.0.4",
            "+e ns||a-1|10.1.0.2",
            "+e ns||a-1|10.1.0.4",
            "-e ns||a-b-1|10.1.0.3",
            "-e ns||a-1|10.1.0.1",
            "-e ns|a|a-1|10.1.0.2",
            "-e ns|a|a-1|10.1.0.1",
            "-e ns|a-b|a-b-1|10.1.0.3",
            "-s ns|a-b||",
            "-n |n-1||",
        ]
    );
    brain.stop().await;
}

#[tokio::test]
async fn what_nobody_can_serve_is_not_told() {
    let folder = Folder::new();
    let brain = Brain::start(&folder.socket()).await;
    let mut all = ClusterState::clone(&facts(&[], &["plain"], &[slice("orphan", "nobody", &["10.1.0.1"])]));
    all.set_service(Service { cluster_ips: Vec::new(), ..service("headless") });
    all.set_service(Service { kind: None, ..service("external-name") });
    all.set_service(Service { proxy_name: Some("mesh".into()), ..service("other") });
    for it in ["headless", "external-name", "other"] {
        all.set_slice(slice(&format!("{it}-1"), it, &["10.1.0.1"]));
    }
    all.set_slice(EndpointSlice { headless: true, ..slice("plain-1", "plain", &["10.1.0.2"]) });
    all.set_slice(EndpointSlice { ports: Vec::new(), ..slice("plain-2", "plain", &["10.1.0.2"]) });
    brain.cluster.publish(ClusterSnapshot::State(all.into()));
    let mut peer = GlobalPeer::start(&folder.socket()).await;
    assert_eq!(peer.change_set().await, ["+s ns|plain||"]);
    // Another brain may serve for another proxy.
    let mut peer = GlobalPeer::silent(&folder.socket()).await;
    let wanted = vec![Extension::OtherProxies.into(), 4711];
    peer.requests.send(GlobalWatchReq { extensions: wanted }).await.unwrap();
    let granted = vec![Extension::OtherProxies.into()];
    assert_eq!(peer.item().await, Op::Reset(EmptyOp { extensions: granted, ..EmptyOp::default() }));
    let words = peer.change_set().await;
    assert_eq!(words.len(), 4, "{words:?}");
    let other = peer.services["ns|other||"].service.as_ref().unwrap();
    assert_eq!(other.labels["service.kubernetes.io/service-proxy-name"], "mesh");
    brain.stop().await;
}

#[tokio::test]
async fn one_request_buys_one_change_set_of_facts_and_an_empty_first_state_has_a_sync() {
    let folder = Folder::new();
    let brain = Brain::start(&folder.socket()).await;
    let mut peer = GlobalPeer::start(&folder.socket()).await;
    let nothing = async |peer: &mut GlobalPeer| {
        let heard = timeout(Duration::from_millis(100), peer.items.message()).await;
        assert!(heard.is_err(), "{heard:?}");
    };
    nothing(&mut peer).await;
    brain.cluster.publish(ClusterSnapshot::State(Arc::default()));
    assert!(peer.change_set().await.is_empty());
    for last in 1..5 {
        let slices = [slice("a-1", "a", &[&format!("10.1.0.{last}")])];
        brain.cluster.publish(ClusterSnapshot::State(facts(&[], &["a"], &slices)));
    }
    nothing(&mut peer).await;
    peer.ask().await;
    assert_eq!(peer.change_set().await.len(), 3);
    // The same facts again are no change.
    peer.ask().await;
    brain.cluster.publish(ClusterSnapshot::State(facts(&[], &["a"], &[slice("a-1", "a", &["10.1.0.4"])])));
    nothing(&mut peer).await;
    brain.stop().await;
    assert_eq!(timeout(LIMIT, peer.items.message()).await.unwrap().unwrap(), None);
}

#[tokio::test]
async fn a_trigger_time_alone_is_told_to_those_who_want_it() {
    let folder = Folder::new();
    let brain = Brain::start(&folder.socket()).await;
    let at = |micros| EndpointSlice {
        trigger_time: Some(Timestamp::from_micros(micros)),
        ..slice("a-1", "a", &["10.1.0.1"])
    };
    brain.cluster.publish(ClusterSnapshot::State(facts(&[], &["a"], &[at(1)])));
    let mut wanting = GlobalPeer::silent(&folder.socket()).await;
    let request = GlobalWatchReq { extensions: vec![Extension::TriggerTimes.into()] };
    wanting.requests.send(request.clone()).await.unwrap();
    wanting.item().await;
    let mut plain = GlobalPeer::start(&folder.socket()).await;
    assert_eq!(wanting.change_set().await, plain.change_set().await);
    wanting.requests.send(request).await.unwrap();
    plain.ask().await;
    brain.cluster.publish(ClusterSnapshot::State(facts(&[], &["a"], &[at(2)])));
    assert_eq!(wanting.change_set().await, ["+s ns|a||"]);
    assert_eq!(wanting.services["ns|a||"].trigger_time, Some(2));
    assert!(timeout(Duration::from_millis(100), plain.items.message()).await.is_err());
    brain.stop().await;
}

#[tokio::test]
async fn a_watcher_of_facts_that_never_reads_costs_two_states_of_them() {
    let folder = Folder::new();
    let brain = Brain::start(&folder.socket()).await;
    let publish = |revision: u8| {
        let addresses: Vec<_> = (0..250).map(|it| format!("10.1.{revision}.{it}")).collect();
        let addresses: Vec<_> = addresses.iter().map(String::as_str).collect();
        let slices: Vec<_> = (0..20).map(|it| slice(&format!("a-{it}"), "a", &addresses)).collect();
        let facts = facts(&[], &["a"], &slices);
        brain.cluster.publish(ClusterSnapshot::State(Arc::clone(&facts)));
        Arc::downgrade(&facts)
    };
    let mut held = vec![publish(0)];
    let slow = GlobalPeer::start(&folder.socket()).await;
    let mut quick = GlobalPeer::start(&folder.socket()).await;
    quick.change_set().await;
    for _ in 0..8 {
        slow.ask().await;
    }
    for revision in 1..6 {
        held.push(publish(revision));
        quick.ask().await;
        assert!(!quick.change_set().await.is_empty());
    }
    let alive = held.iter().filter(|it| it.strong_count() > 0).count();
    assert!(alive <= 2, "{alive} states are held");
    brain.stop().await;
}

#[tokio::test]
async fn a_brain_without_facts_says_so() {
    let folder = Folder::new();
    let brain = Brain::start(&folder.socket()).await;
    brain.cluster.publish(ClusterSnapshot::Unavailable);
    let mut cluster = Client::new(Target::Unix(folder.socket()), "n1").cluster();
    let Err(Refused(reason)) = timeout(LIMIT, cluster.next()).await.unwrap() else { panic!("not refused") };
    assert!(reason.contains("has no facts"), "{reason}");
    brain.stop().await;
}
