//! What the brain knows of the states that are active.

use std::{sync::Arc, time::Duration};

use model::state::{NodeInfo, NodeState};
use proxy_contract::{
    globalv1::{ListNodesReq, NodeStatus, nodes_client::NodesClient},
    localv1::{Revision, WatchReq},
};
use tokio::{sync::watch, time::sleep};

use crate::{
    common::{Brain, Folder, channel, in_time, service, state, while_following},
    peer::NodePeer,
};

/// The only node that is followed, as soon as `is_so`.
async fn wait_for(folder: &Folder, is_so: impl Fn(&NodeStatus) -> bool) -> NodeStatus {
    let address = Some("10.1.0.7".parse().unwrap());
    in_time(async {
        loop {
            let nodes = folder.client().nodes(address).await.unwrap();
            if let [node] = &nodes[..]
                && is_so(node)
            {
                return node.clone();
            }
            sleep(Duration::from_millis(5)).await;
        }
    })
    .await
}

/// Waits until this revision is acknowledged and the client is not behind.
async fn wait_for_acknowledged(folder: &Folder, rev: u64) -> NodeStatus {
    wait_for(folder, |it| newest(it).1 == Some(rev) && it.behind_ms.is_none()).await
}

/// The newest and the acknowledged revision.
fn newest(node: &NodeStatus) -> (Option<u64>, Option<u64>) {
    let rev = |it: &Option<Revision>| it.as_ref().map(|it| it.rev);
    (rev(&node.newest), rev(&node.acknowledged))
}

/// The acknowledged revision once this one is the newest.
async fn acknowledged_at(folder: &Folder, newest_rev: u64) -> Option<u64> {
    newest(&wait_for(folder, |it| newest(it).0 == Some(newest_rev)).await).1
}

fn unconfirmed() -> WatchReq {
    WatchReq { node_name: "n1".into(), unconfirmed: true, ..WatchReq::default() }
}

#[tokio::test]
async fn the_next_request_acknowledges_a_state_unless_it_says_otherwise() {
    let (folder, brain) = Brain::new().await;
    assert_eq!(folder.client().nodes(None).await.unwrap(), []);
    brain.publisher.publish(NodeState::default());
    let mut peer = NodePeer::synced(&folder).await;
    let node = wait_for(&folder, |it| it.newest.is_some()).await;
    assert_eq!((node.name.as_str(), newest(&node)), ("n1", (Some(1), None)));
    assert!(node.behind_ms.is_some() && node.has_address == Some(false) && node.latency_ms.is_none());
    peer.ask("n1").await;
    let node = wait_for_acknowledged(&folder, 1).await;
    assert!(node.has_address == Some(false) && node.latency_ms.is_some());

    brain.publish([service("ns/a", &[("p", 7)])]);
    peer.change_set().await;
    peer.request(unconfirmed()).await;
    brain.publish([service("ns/a", &[("p", 7), ("q", 8)])]);
    peer.change_set().await;
    let node = wait_for(&folder, |it| newest(it).0 == Some(3)).await;
    assert_eq!((newest(&node).1, node.has_address), (Some(1), Some(false)));
    peer.ask("n1").await;
    assert_eq!(wait_for_acknowledged(&folder, 3).await.has_address, Some(true));

    drop(peer);
    in_time(async { while !folder.client().nodes(None).await.unwrap().is_empty() {} }).await;
    let mut client = NodesClient::new(channel(&folder).await);
    let error = client.list(ListNodesReq { address: "nonsense".into() }).await.unwrap_err();
    assert!(error.message().contains("\"nonsense\" is no IP address"), "{error}");
    brain.stop().await;
}

#[tokio::test]
async fn an_agent_acknowledges_what_is_in_force() {
    let (folder, brain) = Brain::serving(NodeState::default()).await;
    let active = watch::Sender::new(None);
    let upstream = folder.upstream().confirmed_by(active.subscribe());
    while_following(upstream, async |mut states| {
        let first = states.next().await.unwrap();
        assert_eq!(acknowledged_at(&folder, 1).await, None);
        active.send_replace(Some(first.revision()));
        wait_for(&folder, |it| newest(it).1 == Some(1)).await;
        // What cannot be applied is not acknowledged, and delays the next state by a moment only.
        brain.publish([service("ns/a", &[])]);
        states.next().await.unwrap();
        brain.publish([service("ns/b", &[])]);
        let third = states.next().await.unwrap();
        assert_eq!(acknowledged_at(&folder, 3).await, Some(1));
        active.send_replace(Some(third.revision()));
        wait_for_acknowledged(&folder, 3).await;
    })
    .await;
    brain.stop().await;
}

#[tokio::test]
async fn a_client_for_which_nothing_changes_is_not_behind() {
    let (folder, brain) = Brain::new().await;
    let first = state([service("ns/a", &[("p", 7)])]);
    brain.publisher.publish(first.clone());
    let mut peer = NodePeer::synced(&folder).await;
    // A change, and back, before it asks again.
    brain.publish([service("ns/a", &[])]);
    brain.publisher.publish(first.clone());
    peer.ask("n1").await;
    wait_for_acknowledged(&folder, 3).await;
    // It has not requested nodes.
    let nodes = Arc::new([("n2".into(), NodeInfo::default())].into());
    brain.publisher.publish(NodeState { nodes, ..first.clone() });
    wait_for_acknowledged(&folder, 4).await;
    // What is not active yet becomes no more so by changes that it does not see.
    let second = state([service("ns/b", &[("q", 8)])]);
    brain.publisher.publish(second.clone());
    peer.change_set().await;
    peer.request(unconfirmed()).await;
    let nodes = Arc::new([("n3".into(), NodeInfo::default())].into());
    brain.publisher.publish(NodeState { nodes, ..second });
    peer.receives_nothing().await;
    assert_eq!(acknowledged_at(&folder, 6).await, Some(4));
    // A revision that was not sent acknowledges nothing, and neither asks for a change set.
    let current = brain.publisher.current().unwrap();
    let confirmed = |rev| WatchReq {
        node_name: "n1".into(),
        confirmed: Some(Revision { instance_id: current.instance_id, rev }),
        ..WatchReq::default()
    };
    peer.request(confirmed(4)).await;
    peer.receives_nothing().await;
    assert_eq!(acknowledged_at(&folder, 6).await, Some(4));
    peer.request(confirmed(5)).await;
    wait_for_acknowledged(&folder, 6).await;
    for name in ["ns/c", "ns/d"] {
        brain.publish([service(name, &[])]);
    }
    peer.change_set().await;
    peer.receives_nothing().await;
    brain.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_client_that_comes_late_has_no_latency_from_before() {
    let (folder, brain) = Brain::serving(NodeState::default()).await;
    let age = Duration::from_secs(3_600);
    sleep(age).await;
    let peer = NodePeer::synced(&folder).await;
    peer.ask("n1").await;
    let node = wait_for(&folder, |it| it.latency_ms.is_some()).await;
    assert!(node.latency_ms < Some(age.as_millis() as u64), "{node:?}");
    brain.stop().await;
}

#[tokio::test(start_paused = true)]
async fn an_agent_acknowledges_a_state_that_becomes_active_late() {
    let (folder, brain) = Brain::serving(NodeState::default()).await;
    let active = watch::Sender::new(None);
    let upstream = folder.upstream().confirmed_by(active.subscribe());
    while_following(upstream, async |mut states| {
        let first = states.next().await.unwrap();
        sleep(Duration::from_secs(3)).await;
        assert_eq!(acknowledged_at(&folder, 1).await, None);
        active.send_replace(Some(first.revision()));
        wait_for_acknowledged(&folder, 1).await;
        // Later ones are acknowledged, and paced, as ever.
        brain.publish([service("ns/a", &[])]);
        let second = states.next().await.unwrap();
        brain.publish([service("ns/b", &[])]);
        active.send_replace(Some(second.revision()));
        let third = states.next().await.unwrap();
        active.send_replace(Some(third.revision()));
        wait_for_acknowledged(&folder, 3).await;
    })
    .await;
    brain.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_reconnect_acknowledges_nothing_that_is_not_active() {
    let (folder, brain) = Brain::new().await;
    let served = state([service("ns/a", &[("p", 7)])]);
    brain.publisher.publish(served.clone());
    let active = watch::Sender::new(None);
    let upstream = folder.upstream().confirmed_by(active.subscribe());
    while_following(upstream, async |mut states| {
        let first = states.next().await.unwrap();
        // It cannot be applied; meanwhile the brain is replaced by one with the same state.
        sleep(Duration::from_secs(3)).await;
        let brain = brain.restart(&folder).await;
        brain.publisher.publish(served);
        assert_eq!(newest(&wait_for(&folder, |it| it.newest.is_some()).await).1, None);
        sleep(Duration::from_secs(4)).await;
        assert_eq!(newest(&wait_for(&folder, |it| it.newest.is_some()).await).1, None);
        active.send_replace(Some(first.revision()));
        wait_for(&folder, |it| it.behind_ms.is_none()).await;
        brain.stop().await;
    })
    .await;
}
