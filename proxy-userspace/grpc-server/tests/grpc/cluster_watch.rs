//! `globalv1.Sets/Watch`, for a client that keeps KPNG's rules.

use std::sync::Arc;

use model::{
    Family, Protocol, ServiceName, Timestamp,
    cluster::{ClusterState, Endpoint, EndpointSlice, Node, Service, SliceName, SlicePort},
    state::{NodeInfo, ServiceKind, ServicePort, TargetPort},
};
use proxy_contract::{client::Refused, localv1::Extension};
use publish::cluster::ClusterSnapshot;

use crate::{
    common::{Brain, in_time},
    peer::ClusterPeer,
};

pub(crate) fn service(name: &str) -> Service {
    let number = |port| std::num::NonZeroU16::new(port).unwrap();
    Service {
        cluster_ips: vec!["10.96.0.1".parse().unwrap()],
        ports: vec![ServicePort {
            name: "http".into(),
            target_port: TargetPort::Number(number(8080)),
            ..ServicePort::new(Protocol::Tcp, number(80))
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

fn cluster(nodes: &[&str], services: &[&str], slices: &[EndpointSlice]) -> Arc<ClusterState> {
    let mut state = ClusterState::default();
    for it in nodes {
        state.nodes.insert(Node { name: (*it).into(), zone: None, info: Default::default() });
    }
    for it in services {
        state.services.insert(service(it));
    }
    for it in slices {
        state.set_slice(it.clone());
    }
    state.into()
}

#[tokio::test]
async fn cluster_operations_never_leave_an_endpoint_without_its_service() {
    let (folder, brain) = Brain::new().await;
    let mut peer = ClusterPeer::start(&folder).await;
    let slices = [slice("a-1", "a", &["10.1.0.2", "10.1.0.1"]), slice("a-b-1", "a-b", &["10.1.0.3"])];
    brain.publish_cluster(cluster(&["n", "n-1"], &["a", "a-b"], &slices));
    assert_eq!(
        peer.change_set().await,
        [
            "+n |n||",
            "+n |n-1||",
            "+s ns|a||",
            "+s ns|a-b||",
            "+e ns|a|a-1|10.1.0.1",
            "+e ns||a-1|10.1.0.1",
            "+e ns|a|a-1|10.1.0.2",
            "+e ns||a-1|10.1.0.2",
            "+e ns|a-b|a-b-1|10.1.0.3",
            "+e ns||a-b-1|10.1.0.3",
        ]
    );
    peer.ask().await;
    // A slice changes to another Service, and a Service is deleted.
    let slices = [slice("a-1", "c", &["10.1.0.2", "10.1.0.4"])];
    brain.publish_cluster(cluster(&["n"], &["a", "c"], &slices));
    assert_eq!(
        peer.change_set().await,
        [
            "+s ns|c||",
            "+e ns|c|a-1|10.1.0.2",
            "+e ns||a-1|10.1.0.2",
            "+e ns|c|a-1|10.1.0.4",
            "+e ns||a-1|10.1.0.4",
            "-e ns|a-b|a-b-1|10.1.0.3",
            "-e ns||a-b-1|10.1.0.3",
            "-e ns|a|a-1|10.1.0.2",
            "-e ns|a|a-1|10.1.0.1",
            "-e ns||a-1|10.1.0.1",
            "-s ns|a-b||",
            "-n |n-1||",
        ]
    );
}

#[tokio::test]
async fn what_cannot_be_served_is_not_sent() {
    let (folder, brain) = Brain::new().await;
    let mut all =
        ClusterState::clone(&cluster(&[], &["plain"], &[slice("orphan", "missing", &["10.1.0.1"])]));
    all.services.insert(Service { cluster_ips: Vec::new(), ..service("headless") });
    all.services.insert(Service { kind: ServiceKind::ExternalName, ..service("external-name") });
    all.services.insert(Service { proxy_name: Some("mesh".into()), ..service("other") });
    for it in ["headless", "external-name", "other"] {
        all.set_slice(slice(&format!("{it}-1"), it, &["10.1.0.1"]));
    }
    all.set_slice(EndpointSlice { headless: true, ..slice("plain-1", "plain", &["10.1.0.2"]) });
    all.set_slice(EndpointSlice { ports: Vec::new(), ..slice("plain-2", "plain", &["10.1.0.2"]) });
    for it in ["n|1", "n/1"] {
        all.nodes.insert(Node { name: it.into(), zone: None, info: NodeInfo::default() });
    }
    brain.publish_cluster(all);
    let mut peer = ClusterPeer::start(&folder).await;
    assert_eq!(peer.change_set().await, ["+s ns|plain||"]);
    // On request, the Services of other proxies are sent too.
    let requested = [Extension::OtherProxies.into(), 4711];
    let (mut peer, extensions) = ClusterPeer::with_extensions(&folder, &requested).await;
    assert_eq!(extensions, requested[..1]);
    let operations = peer.change_set().await;
    assert_eq!(operations.len(), 4, "{operations:?}");
    let other = peer.services["ns|other||"].service.as_ref().unwrap();
    assert_eq!(other.labels["service.kubernetes.io/service-proxy-name"], "mesh");
}

#[tokio::test]
async fn a_changed_trigger_time_is_sent_only_on_request() {
    let (folder, brain) = Brain::new().await;
    let at = |micros| EndpointSlice {
        trigger_time: Some(Timestamp::from_micros(micros)),
        ..slice("a-1", "a", &["10.1.0.1"])
    };
    brain.publish_cluster(cluster(&[], &["a"], &[at(1)]));
    let requested = [Extension::TriggerTimes.into()];
    let (mut requesting, _) = ClusterPeer::with_extensions(&folder, &requested).await;
    let mut plain = ClusterPeer::start(&folder).await;
    assert_eq!(requesting.change_set().await, plain.change_set().await);
    requesting.ask().await;
    plain.ask().await;
    brain.publish_cluster(cluster(&[], &["a"], &[at(2)]));
    assert_eq!(requesting.change_set().await, ["+s ns|a||"]);
    assert_eq!(requesting.services["ns|a||"].trigger_time, Some(2));
    plain.receives_nothing().await;
}

#[tokio::test]
async fn a_cluster_watcher_that_never_reads_holds_at_most_two_states() {
    let (folder, brain) = Brain::new().await;
    let publish = |revision: u8| {
        let addresses: Vec<_> = (0..250).map(|it| format!("10.1.{revision}.{it}")).collect();
        let addresses: Vec<_> = addresses.iter().map(String::as_str).collect();
        let slices: Vec<_> = (0..20).map(|it| slice(&format!("a-{it}"), "a", &addresses)).collect();
        let state = cluster(&[], &["a"], &slices);
        brain.publish_cluster(Arc::clone(&state));
        Arc::downgrade(&state)
    };
    let mut held = vec![publish(0)];
    let slow = ClusterPeer::start(&folder).await;
    let mut quick = ClusterPeer::start(&folder).await;
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
}

#[tokio::test]
async fn a_brain_without_a_cluster_state_refuses() {
    let (folder, brain) = Brain::new().await;
    brain.cluster.publish(ClusterSnapshot::Unavailable);
    let mut cluster = folder.client().cluster();
    let Err(Refused(reason)) = in_time(cluster.next()).await else { panic!("not refused") };
    assert!(reason.contains("has no cluster state"), "{reason}");
}
