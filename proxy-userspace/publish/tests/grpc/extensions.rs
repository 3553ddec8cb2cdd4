//! What is said beyond KPNG's API, and to whom.

use std::sync::Arc;

use model::{
    Timestamp,
    state::{NodeState, OtherServing, ServiceState},
};
use prost::Message as _;
use proxy_contract::{
    Target,
    client::Client,
    localnetv1::{NextFilter, endpoints_client::EndpointsClient},
    localv1::{EmptyOp, Extension, OpItem, Service, WatchReq, op_item::Op},
};
use publish::upstream::Upstream;
use tokio::time::timeout;

use crate::common::{Brain, Folder, LIMIT, Peer, channel, service, state};

/// An addition that nobody knows yet.
const UNKNOWN: i32 = 4711;

/// Asks, wanting these, and is reset.
async fn start(folder: &Folder, wanted: &[i32]) -> (Peer, Vec<i32>) {
    let mut peer = Peer::silent(&folder.socket()).await;
    let request = WatchReq { node_name: String::new(), extensions: wanted.to_vec() };
    peer.requests.send(request).await.unwrap();
    let Op::Reset(EmptyOp { extensions: granted, revision: None }) = peer.item().await else {
        panic!("no reset")
    };
    (peer, granted)
}

/// A state whose last change happened at that time.
fn triggered(micros: i64, endpoints: &[(&str, u8)]) -> NodeState {
    let (name, it) = service("ns/a", endpoints);
    let trigger_time = Some(Timestamp::from_micros(micros));
    state([(name, Arc::new(ServiceState { trigger_time, ..(*it).clone() }))])
}

#[tokio::test]
async fn revisions_are_said_to_those_who_want_them() {
    let folder = Folder::new();
    let brain = Brain::start(&folder.socket()).await;
    brain.publisher.publish(NodeState::default());
    let (mut peer, granted) = start(&folder, &[Extension::Revisions.into()]).await;
    assert_eq!(granted, [i32::from(Extension::Revisions)]);
    let Op::Sync(sync) = peer.item().await else { panic!("no sync") };
    let current = brain.publisher.current().unwrap();
    let revision = sync.revision.unwrap();
    assert_eq!((revision.instance_id, revision.rev), (current.instance_id, current.rev));
    // What the first request wants holds for the stream.
    peer.ask("").await;
    brain.publisher.publish(state([service("ns/a", &[])]));
    assert!(matches!(peer.item().await, Op::Set(_)));
    assert!(matches!(peer.item().await, Op::Sync(EmptyOp { revision: Some(it), .. }) if it.rev == 2));
    brain.stop().await;
}

#[tokio::test]
async fn who_wants_nothing_that_is_known_is_answered_as_kpng_would() {
    let folder = Folder::new();
    let brain = Brain::start(&folder.socket()).await;
    brain.publisher.publish(triggered(7, &[("p", 1)]));
    let mut heard = Vec::new();
    for wanted in [&[][..], &[UNKNOWN], &[UNKNOWN, 0, -1]] {
        let (mut peer, granted) = start(&folder, wanted).await;
        assert!(granted.is_empty());
        let mut items = Vec::new();
        loop {
            let op = peer.item().await;
            if let Op::Set(it) = &op
                && let Ok(it) = Service::decode(it.bytes.as_slice())
            {
                assert_eq!(it.trigger_time, None);
            }
            let is_last = matches!(op, Op::Sync(_));
            items.push(OpItem { op: Some(op) }.encode_to_vec());
            if is_last {
                break;
            }
        }
        // As recorded.
        assert_eq!(items.last().unwrap(), &[0x0a, 0]);
        heard.push(items);
    }
    assert!(heard.iter().all(|it| *it == heard[0]));
    // Among what is not known, what is known is granted.
    let (_, granted) = start(&folder, &[UNKNOWN, Extension::TriggerTimes.into()]).await;
    assert_eq!(granted, [i32::from(Extension::TriggerTimes)]);
    brain.stop().await;
}

#[tokio::test]
async fn the_trigger_time_travels_with_the_change_it_led_to() {
    let folder = Folder::new();
    let brain = Brain::start(&folder.socket()).await;
    brain.publisher.publish(triggered(1, &[("p", 1)]));
    let (mut wanting, _) = start(&folder, &[Extension::TriggerTimes.into()]).await;
    let (mut plain, _) = start(&folder, &[]).await;
    for peer in [&mut wanting, &mut plain] {
        assert_eq!(peer.change_set().await, ["+s ns/a", "+e ns/a/p"]);
        peer.ask("").await;
    }
    assert_eq!(wanting.services["ns/a"].trigger_time, Some(1));
    brain.publisher.publish(triggered(2, &[("p", 1), ("q", 2)]));
    assert_eq!(wanting.change_set().await, ["+s ns/a", "+e ns/a/q"]);
    assert_eq!(plain.change_set().await, ["+e ns/a/q"]);
    assert_eq!(wanting.services["ns/a"].trigger_time, Some(2));
    for peer in [&wanting, &plain] {
        peer.ask("").await;
    }
    // The same time again came from another change; and a time alone is no change.
    brain.publisher.publish(triggered(2, &[("p", 1)]));
    assert_eq!(wanting.change_set().await, ["-e ns/a/q"]);
    assert_eq!(plain.change_set().await, ["-e ns/a/q"]);
    wanting.ask("").await;
    brain.publisher.publish(triggered(3, &[("p", 1)]));
    wanting.hears_nothing().await;
    brain.stop().await;
}

#[tokio::test]
async fn an_agent_hears_of_all_that_is_said_about_a_state() {
    let folder = Folder::new();
    let brain = Brain::start(&folder.socket()).await;
    brain.publisher.publish(triggered(1, &[("p", 1)]));
    let client = || Client::new(Target::Unix(folder.socket()), "n1");
    let time = |it: &NodeState| it.services.values().next().unwrap().trigger_time.map(Timestamp::as_micros);
    for upstream in [Upstream::new(client(), "n1"), Upstream::new(client(), "n1").resume_from(0, 0)] {
        let mut states = upstream.subscribe();
        let heard = async {
            assert_eq!(time(&states.next().await.unwrap().state), Some(1));
            brain.publisher.publish(triggered(5, &[("q", 1)]));
            assert_eq!(time(&states.next().await.unwrap().state), Some(5));
            brain.publisher.publish(triggered(1, &[("p", 1)]));
        };
        tokio::select! {
            it = timeout(LIMIT, heard) => it.unwrap(),
            () = upstream.run() => panic!("it never ends"),
        }
    }
    brain.stop().await;
}

#[tokio::test]
async fn the_long_poll_says_what_is_wanted() {
    let folder = Folder::new();
    let brain = Brain::start(&folder.socket()).await;
    brain.publisher.publish(triggered(9, &[]));
    for (wanted, granted, time) in [
        (vec![], vec![], None),
        (vec![UNKNOWN], vec![], None),
        (vec![UNKNOWN, Extension::TriggerTimes.into()], vec![Extension::TriggerTimes.into()], Some(9)),
    ] {
        let filter = NextFilter { extensions: wanted.clone(), ..NextFilter::default() };
        let mut client = EndpointsClient::new(channel(&folder.socket()).await);
        let mut items = client.next(filter).await.unwrap().into_inner();
        let first = items.message().await.unwrap().unwrap();
        assert_eq!((first.extensions, first.next.unwrap().extensions), (granted, wanted));
        let service = items.message().await.unwrap().unwrap().endpoints.unwrap().service.unwrap();
        assert_eq!(service.trigger_time, time);
    }
    brain.stop().await;
}

/// A state that tells of a node, and of a target that is served unselected.
fn told(address: &str, last: u8) -> NodeState {
    let (name, it) = service("ns/a", &[("p", 1)]);
    let target = format!("10.1.0.{last}:53").parse().unwrap();
    let unselected = [OtherServing { index: 0, target }].into();
    let it = Arc::new(ServiceState { other_serving: unselected, ..(*it).clone() });
    let node = model::state::NodeInfo {
        addresses: vec![address.parse().unwrap(), "fd00::7".parse().unwrap()],
        pod_cidrs: vec!["10.1.0.0/24".parse().unwrap()],
        is_being_deleted: last > 8,
    };
    NodeState { nodes: [("n7".into(), node)].into_iter().collect(), ..state([(name, it)]) }
}

#[tokio::test]
async fn nodes_and_unselected_targets_are_told_to_those_who_want_them() {
    let folder = Folder::new();
    let brain = Brain::start(&folder.socket()).await;
    brain.publisher.publish(told("192.0.2.1", 8));
    let both = [Extension::Nodes.into(), Extension::OtherServing.into()];
    let (mut wanting, granted) = start(&folder, &both).await;
    assert_eq!(granted, both);
    let (mut plain, _) = start(&folder, &[]).await;
    assert_eq!(wanting.change_set().await, ["+n n7", "+s ns/a", "+e ns/a/p"]);
    assert_eq!(plain.change_set().await, ["+s ns/a", "+e ns/a/p"]);
    assert_eq!(wanting.services["ns/a"].ports[0].other_serving, ["10.1.0.8:53"]);
    assert_eq!(wanting.nodes["n7"].addresses, ["192.0.2.1", "fd00::7"]);
    assert!(plain.services["ns/a"].ports[0].other_serving.is_empty());
    for peer in [&wanting, &plain] {
        peer.ask("").await;
    }
    // To who does not want them, they are no change at all.
    brain.publisher.publish(told("192.0.2.1", 9));
    assert_eq!(wanting.change_set().await, ["+n n7", "+s ns/a"]);
    assert!(wanting.nodes["n7"].is_being_deleted);
    wanting.ask("").await;
    let nodes = model::state::NodeInfos::default();
    brain.publisher.publish(NodeState { nodes, ..told("192.0.2.1", 9) });
    assert_eq!(wanting.change_set().await, ["-n n7"]);
    plain.hears_nothing().await;
    brain.stop().await;
}

#[tokio::test]
async fn an_agent_has_the_very_state_of_its_brain() {
    let folder = Folder::new();
    let brain = Brain::start(&folder.socket()).await;
    let client = || Client::new(Target::Unix(folder.socket()), "n1");
    for upstream in [Upstream::new(client(), "n1"), Upstream::new(client(), "n1").resume_from(0, 0)] {
        let mut states = upstream.subscribe();
        let heard = async {
            let without_nodes =
                NodeState { nodes: model::state::NodeInfos::default(), ..told("192.0.2.1", 9) };
            for expected in [told("192.0.2.1", 8), told("192.0.2.2", 8), without_nodes, NodeState::default()]
            {
                brain.publisher.publish(expected.clone());
                while states.next().await.unwrap().state != expected {}
            }
        };
        tokio::select! {
            it = timeout(LIMIT, heard) => it.expect("each state arrives"),
            () = upstream.run() => panic!("it never ends"),
        }
    }
    brain.stop().await;
}
