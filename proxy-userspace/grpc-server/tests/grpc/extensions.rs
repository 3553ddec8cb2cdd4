//! Extensions of KPNG's API.

use std::{net::SocketAddr, sync::Arc};

use model::{
    Family, Timestamp,
    state::{
        ForwardedPort, NodeInfo, NodeInfos, NodeShare, NodeState, Pod, PortTarget, ServiceCidr, ServiceState,
        SocketLb,
    },
};
use prost::Message as _;
use proxy_contract::{
    localnetv1::{NextFilter, NextItem, ServiceEndpoints},
    localv1::{Digests, Extension, Kept, OpItem, Service, Set, op_item::Op},
};
use publish::Published;

use crate::{
    common::{Brain, service, state, while_following},
    long_poll::poll,
    peer::{NodeObjects, NodePeer},
};

const UNKNOWN: i32 = 4711;

/// A state with a trigger time.
fn triggered(micros: i64, endpoints: &[(&str, u8)]) -> NodeState {
    let (name, it) = service("ns/a", endpoints);
    let trigger_time = Some(Timestamp::from_micros(micros));
    state([(name, Arc::new(ServiceState { trigger_time, ..(*it).clone() }))])
}

#[tokio::test]
async fn without_known_extensions_the_response_equals_kpngs() {
    let (folder, _brain) = Brain::serving(triggered(7, &[("p", 1)])).await;
    let mut streams = Vec::new();
    for requested in [&[][..], &[UNKNOWN], &[UNKNOWN, 0, -1]] {
        let (mut peer, extensions) = NodePeer::with_extensions(&folder, requested).await;
        assert!(extensions.is_empty());
        let mut items = Vec::new();
        loop {
            let op = peer.item().await;
            if let Op::Set(it) = &op
                && let Ok(it) = Service::decode(&*it.bytes)
            {
                assert_eq!(it.trigger_time, None);
            }
            let is_last = matches!(op, Op::Sync(_));
            items.push(OpItem { op: Some(op) }.encode_to_vec());
            if is_last {
                break;
            }
        }
        // As KPNG's recorded sync.
        assert_eq!(items.last().unwrap(), &[0x0a, 0]);
        streams.push(items);
    }
    assert!(streams.iter().all(|it| *it == streams[0]));
    // Known extensions are sent even if unknown ones are requested too.
    let (_, extensions) =
        NodePeer::with_extensions(&folder, &[UNKNOWN, Extension::TriggerTimes.into()]).await;
    assert_eq!(extensions, [i32::from(Extension::TriggerTimes)]);
}

#[tokio::test]
async fn a_trigger_time_is_sent_with_its_change() {
    let (folder, brain) = Brain::serving(triggered(1, &[("p", 1)])).await;
    let (mut requesting, _) = NodePeer::with_extensions(&folder, &[Extension::TriggerTimes.into()]).await;
    let (mut plain, _) = NodePeer::with_extensions(&folder, &[]).await;
    for peer in [&mut requesting, &mut plain] {
        assert_eq!(peer.change_set().await, ["+s ns/a", "+e ns/a/p"]);
        peer.ask("n1").await;
    }
    assert_eq!(requesting.services["ns/a"].trigger_time, Some(1));
    brain.publisher.publish(triggered(2, &[("p", 1), ("q", 2)]));
    assert_eq!(requesting.change_set().await, ["+s ns/a", "+e ns/a/q"]);
    assert_eq!(plain.change_set().await, ["+e ns/a/q"]);
    assert_eq!(requesting.services["ns/a"].trigger_time, Some(2));
    for peer in [&requesting, &plain] {
        peer.ask("n1").await;
    }
    // With the same time, only the change is sent; a new time alone is not published.
    brain.publisher.publish(triggered(2, &[("p", 1)]));
    assert_eq!(requesting.change_set().await, ["-e ns/a/q"]);
    assert_eq!(plain.change_set().await, ["-e ns/a/q"]);
    requesting.ask("n1").await;
    brain.publisher.publish(triggered(3, &[("p", 1)]));
    requesting.receives_nothing().await;
}

#[tokio::test]
async fn the_long_poll_sends_requested_extensions() {
    let (folder, _brain) = Brain::serving(triggered(9, &[])).await;
    for (requested, extensions, time) in [
        (vec![], vec![], None),
        (vec![UNKNOWN], vec![], None),
        (vec![UNKNOWN, Extension::TriggerTimes.into()], vec![Extension::TriggerTimes.into()], Some(9)),
    ] {
        let filter = NextFilter { extensions: requested.clone(), ..NextFilter::default() };
        let [first, second] = <[_; 2]>::try_from(poll(&folder, filter).await).unwrap();
        assert_eq!((first.extensions, first.next.unwrap().extensions), (extensions, requested));
        assert_eq!(second.endpoints.unwrap().service.unwrap().trigger_time, time);
    }
}

/// What a long poll sends, by the paths of the stream.
fn objects(items: Vec<NextItem>) -> NodeObjects {
    let mut objects = NodeObjects::default();
    for NextItem { service_cidr, pod, node, endpoints, .. } in items {
        objects.service_cidrs.extend(service_cidr.map(|it| (it.name.clone(), it)));
        objects.pods.extend(pod.map(|it| (format!("{}/{}", it.namespace, it.name), it)));
        objects.nodes.extend(node.map(|it| (it.name.clone(), it)));
        let Some(ServiceEndpoints { service: Some(service), endpoints, keys }) = endpoints else { continue };
        let path = format!("{}/{}", service.namespace, service.name);
        assert_eq!(keys.len(), endpoints.len());
        objects.endpoints.extend(keys.iter().map(|key| format!("{path}/{key}")).zip(endpoints));
        objects.services.insert(path, service);
    }
    objects
}

#[tokio::test]
async fn the_long_poll_sends_what_the_stream_sends() {
    let (folder, brain) = Brain::new().await;
    let with_anonymous = state([service("ns/a", &[("p", 1), ("@x", 2)]), service("ns/b", &[])]);
    // A poll needs neither: it is one answer.
    let all = wire::Extensions::LOCAL.without(&[Extension::Resume, Extension::Heartbeats]).numbers();
    for published in [with_node("192.0.2.1", 8), with_anonymous, NodeState::default()] {
        brain.publisher.publish(published);
        for extensions in [vec![], all.clone()] {
            let (mut peer, _) = NodePeer::with_extensions(&folder, &extensions).await;
            peer.change_set().await;
            let filter = NextFilter { extensions, ..NextFilter::default() };
            assert_eq!(objects(poll(&folder, filter).await), peer.objects);
        }
    }
}

/// A state with a node, a trigger time, and a target that serves but is not selected.
fn with_node(address: &str, last: u8) -> NodeState {
    let (name, it) = service("ns/a", &[("p", 1)]);
    let target: SocketAddr = format!("10.1.0.{last}:53").parse().unwrap();
    let other_serving = [PortTarget { index: 0, target }].into();
    let not_serving = [PortTarget { index: 0, target: SocketAddr::new(target.ip(), 54) }].into();
    let forwarded = ForwardedPort {
        index: 0,
        family: Family::V4,
        nodes: [NodeShare { node: "n7".into(), endpoints: last.into() }].into(),
        targets: [target].into(),
    };
    let it = ServiceState {
        other_serving,
        not_serving,
        forwarded: [forwarded].into(),
        trigger_time: Some(Timestamp::from_micros(last.into())),
        ..(*it).clone()
    };
    let it = Arc::new(it);
    let node = NodeInfo {
        addresses: vec![address.parse().unwrap(), "fd00::7".parse().unwrap()],
        pod_cidrs: vec!["10.1.0.0/24".parse().unwrap()],
        is_being_deleted: last > 8,
    };
    let cidr = ServiceCidr { name: "c".into(), cidrs: vec![format!("10.{last}.0.0/16").parse().unwrap()] };
    let pod = Pod { name: "ns/p".into(), uid: format!("u{last}").into(), socket_lb: SocketLb::TcpOnly };
    NodeState {
        nodes: Arc::new([("n7".into(), node)].into()),
        service_cidrs: Arc::new([(Arc::clone(&cidr.name), Arc::new(cidr))].into()),
        pods: Arc::new([(Arc::clone(&pod.name), Arc::new(pod))].into()),
        ..state([(name, it)])
    }
}

#[tokio::test]
async fn nodes_service_cidrs_pods_targets_and_forwarded_ports_are_sent_on_request() {
    let (folder, brain) = Brain::serving(with_node("192.0.2.1", 8)).await;
    let all = [Extension::Nodes, Extension::OtherServing, Extension::ServiceCidrs, Extension::Pods];
    let all = all.into_iter().chain([Extension::Forwarding]).map(Into::into).collect::<Vec<_>>();
    let (mut requesting, extensions) = NodePeer::with_extensions(&folder, &all).await;
    assert_eq!(extensions, all);
    let (mut plain, _) = NodePeer::with_extensions(&folder, &[]).await;
    assert_eq!(requesting.change_set().await, ["+c c", "+p ns/p", "+n n7", "+s ns/a", "+e ns/a/p"]);
    assert_eq!(requesting.service_cidrs["c"].cidrs, ["10.8.0.0/16"]);
    assert_eq!(requesting.pods["ns/p"].uid, "u8");
    assert_eq!(plain.change_set().await, ["+s ns/a", "+e ns/a/p"]);
    assert_eq!(requesting.services["ns/a"].ports[0].other_serving, ["10.1.0.8:53"]);
    assert_eq!(requesting.nodes["n7"].addresses, ["192.0.2.1", "fd00::7"]);
    assert_eq!(requesting.services["ns/a"].ports[0].not_serving, ["10.1.0.8:54"]);
    assert!(plain.services["ns/a"].ports[0].other_serving.is_empty());
    assert!(plain.services["ns/a"].ports[0].not_serving.is_empty());
    let forwarded = requesting.services["ns/a"].ports[0].forwarded.as_ref().unwrap();
    assert_eq!((forwarded.v4.as_ref().unwrap().nodes[0].endpoints, &forwarded.v6), (8, &None));
    assert_eq!(plain.services["ns/a"].ports[0].forwarded, None);
    for peer in [&requesting, &plain] {
        peer.ask("n1").await;
    }
    // Without the extensions, their changes are not sent.
    brain.publisher.publish(with_node("192.0.2.1", 9));
    assert_eq!(requesting.change_set().await, ["+c c", "+p ns/p", "+n n7", "+s ns/a"]);
    assert!(requesting.nodes["n7"].is_being_deleted);
    requesting.ask("n1").await;
    let services = with_node("192.0.2.1", 9).services;
    brain.publisher.publish(NodeState { services, ..NodeState::default() });
    assert_eq!(requesting.change_set().await, ["-n n7", "-p ns/p", "-c c"]);
    plain.receives_nothing().await;
}

fn trigger_times(state: &NodeState) -> Vec<Option<Timestamp>> {
    state.services.values().map(|it| it.trigger_time).collect()
}

#[tokio::test]
async fn an_agent_has_the_same_state_as_its_brain() {
    let (folder, brain) = Brain::new().await;
    while_following(folder.upstream(), async |mut states| {
        let without_nodes = NodeState { nodes: NodeInfos::default(), ..with_node("192.0.2.1", 9) };
        for expected in
            [with_node("192.0.2.1", 8), with_node("192.0.2.2", 8), without_nodes, NodeState::default()]
        {
            brain.publisher.publish(expected.clone());
            let received = states.next().await.unwrap();
            let published = brain.publisher.current().unwrap();
            // Also for clients that receive fewer parts of it.
            let revisions = |it: &Published| {
                (it.revision(), [0, 1, 2, 3].map(|part| it.rev_for(part == 1, part == 2, part == 3)))
            };
            assert_eq!(revisions(&received), revisions(&published));
            assert_eq!((&received.node, &received.state), (&published.node, &published.state));
            // A comparison of states leaves out the times.
            assert_eq!(trigger_times(&received.state), trigger_times(&expected));
        }
    })
    .await;
}

#[tokio::test]
async fn every_combination_of_extensions_brings_the_same_state_and_nothing_that_was_not_requested() {
    let (folder, _brain) = Brain::serving(with_node("192.0.2.1", 8)).await;
    let all = wire::Extensions::LOCAL.numbers();
    for combination in 0..1_u32 << all.len() {
        let chosen =
            all.iter().enumerate().filter(|(bit, _)| combination & (1 << bit) != 0).map(|(_, it)| *it);
        let chosen: Vec<_> = chosen.collect();
        let has = |it: Extension| chosen.contains(&it.into());
        // Whether or not it may, a client says what it has.
        let have = Some(Digests { version: 1, buckets: vec![combination as u8; 16] });
        let mut peer = NodePeer::resuming(&folder, &chosen, have).await;
        let Op::Reset(reset) = peer.item().await else { panic!("no reset") };
        assert_eq!(reset.extensions, chosen);
        if has(Extension::Resume) {
            assert_eq!(peer.item().await, Op::Kept(Kept { buckets: vec![0] }));
        }
        let mut sent = Vec::new();
        let sync = loop {
            match peer.item().await {
                Op::Set(it) => sent.push((it.r#ref.unwrap().set, it.bytes)),
                Op::Sync(it) => break it,
                other => panic!("{other:?} with {chosen:?}"),
            }
        };
        let is_sent = |set: Set| sent.iter().any(|it| it.0 == i32::from(set));
        assert!(is_sent(Set::ServicesSet) && is_sent(Set::EndpointsSet));
        assert_eq!(is_sent(Set::NodesSet), has(Extension::Nodes));
        assert_eq!(is_sent(Set::ServiceCidrsSet), has(Extension::ServiceCidrs));
        assert_eq!(is_sent(Set::PodsSet), has(Extension::Pods));
        assert_eq!(sync.revision.is_some(), has(Extension::Revisions));
        let (_, service) = sent.iter().find(|it| it.0 == i32::from(Set::ServicesSet)).unwrap();
        let service = Service::decode(&**service).unwrap();
        assert_eq!(service.trigger_time.is_some(), has(Extension::TriggerTimes));
    }
}
