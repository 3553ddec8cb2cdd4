//! `localnetv1.Endpoints/Next`, the long poll.

use std::{sync::Arc, time::Duration};

use model::state::NodeState;
use proxy_contract::{
    localnetv1::{NextFilter, NextItem, endpoints_client::EndpointsClient},
    localv1::Extension,
};
use tokio::time::sleep;

use crate::common::{Brain, Folder, channel, in_time, is_pending, service, state};

/// The items of a response.
pub(crate) async fn poll(folder: &Folder, filter: NextFilter) -> Vec<NextItem> {
    let mut client = EndpointsClient::new(channel(folder).await);
    let mut items = client.next(filter).await.unwrap().into_inner();
    let mut all = Vec::new();
    while let Some(item) = items.message().await.unwrap() {
        all.push(item);
    }
    all
}

#[tokio::test]
async fn the_first_item_carries_the_filter_and_the_stream_ends_after_the_state() {
    let (folder, brain) =
        Brain::serving(state([service("ns/a", &[("p", 1), ("@x", 2)]), service("ns/b", &[])])).await;
    let items = poll(&folder, NextFilter::default()).await;
    let current = brain.publisher.current().unwrap();
    let next = items[0].next.as_ref().unwrap();
    assert_eq!((next.instance_id, next.rev), (current.instance_id, 1));
    assert!(items[0].endpoints.is_none());
    let rest: Vec<_> = items[1..].iter().map(|it| it.endpoints.as_ref().unwrap()).collect();
    assert!(items[1..].iter().all(|it| it.next.is_none()));
    let names: Vec<_> = rest.iter().map(|it| it.service.as_ref().unwrap().name.as_str()).collect();
    assert_eq!(names, ["a", "b"]);
    assert_eq!(rest[0].keys, ["p", "x"]);
    assert_eq!(rest[0].endpoints.len(), 2);
}

#[tokio::test]
async fn the_empty_state_is_only_a_filter() {
    let (folder, _brain) = Brain::serving(NodeState::default()).await;
    assert_eq!(poll(&folder, NextFilter::default()).await.len(), 1);
}

#[tokio::test]
async fn the_poll_waits_only_if_the_revision_is_current() {
    let (folder, brain) = Brain::new().await;
    // Nothing is published yet: even revision 0 waits.
    let waits = async |filter| is_pending(100, poll(&folder, filter)).await;
    assert!(waits(NextFilter::default()).await);
    brain.publish([service("ns/a", &[])]);
    let known = poll(&folder, NextFilter::default()).await.remove(0).next.unwrap();
    assert!(waits(known.clone()).await);
    for other in [
        NextFilter { rev: 0, ..known.clone() },
        NextFilter { rev: 7, ..known.clone() },
        NextFilter { instance_id: known.instance_id ^ 1, ..known.clone() },
        NextFilter { node_name: "n1".into(), ..NextFilter::default() },
    ] {
        assert_eq!(poll(&folder, other).await.len(), 2);
    }
    let publish = async {
        sleep(Duration::from_millis(20)).await;
        brain.publish([service("ns/a", &[]), service("ns/b", &[])]);
    };
    let (items, ()) = tokio::join!(in_time(poll(&folder, known)), publish);
    assert_eq!((items[0].next.as_ref().unwrap().rev, items.len()), (2, 3));
}

#[tokio::test]
async fn a_change_of_what_the_client_does_not_receive_is_no_answer() {
    let (folder, brain) = Brain::new().await;
    let services = || state([service("ns/a", &[])]);
    let with_node =
        |name: &str| NodeState { nodes: Arc::new([(name.into(), Default::default())].into()), ..services() };
    brain.publisher.publish(with_node("n1"));
    let with_nodes = NextFilter { extensions: vec![Extension::Nodes.into()], ..NextFilter::default() };
    let next = async |filter| poll(&folder, filter).await.remove(0).next.unwrap();
    let waits = async |filter| is_pending(100, poll(&folder, filter)).await;
    let (plain, known) = (next(NextFilter::default()).await, next(with_nodes.clone()).await);
    assert!(waits(plain.clone()).await && waits(known.clone()).await);
    // Another Node comes.
    brain.publisher.publish(with_node("n2"));
    assert!(waits(plain.clone()).await);
    let known = next(known).await;
    assert!(waits(known.clone()).await);
    // A Service comes.
    brain
        .publisher
        .publish(NodeState { services: state([service("ns/b", &[])]).services, ..with_node("n2") });
    for filter in [plain, known] {
        let after = next(filter.clone()).await;
        assert!(after.rev > filter.rev && waits(after).await);
    }
}
