//! What the brain knows of the states that are active.

use std::time::Duration;

use model::state::{NodeInfo, NodeState};
use proxy_contract::{globalv1::NodeStatus, localv1::WatchReq};
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};

use crate::{
    common::{Brain, Folder, LIMIT, service, state, while_following},
    peer::NodePeer,
};

/// The only node that is followed, as soon as `is_so`.
async fn wait_for(folder: &Folder, is_so: impl Fn(&NodeStatus) -> bool) -> NodeStatus {
    let address = Some("10.1.0.7".parse().unwrap());
    let wait = async {
        loop {
            let nodes = folder.client().nodes(address).await.unwrap();
            if let [node] = &nodes[..]
                && is_so(node)
            {
                return node.clone();
            }
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(LIMIT, wait).await.expect("it becomes so")
}

fn rev(it: &Option<proxy_contract::localv1::Revision>) -> Option<u64> {
    it.as_ref().map(|it| it.rev)
}

#[tokio::test]
async fn the_next_request_acknowledges_a_state_unless_it_says_otherwise() {
    let (folder, brain) = Brain::new().await;
    assert_eq!(folder.client().nodes(None).await.unwrap(), []);
    brain.publisher.publish(NodeState::default());
    let mut peer = NodePeer::start(&folder, "n1").await;
    peer.change_set().await;
    let node = wait_for(&folder, |it| it.newest.is_some()).await;
    assert_eq!((node.name.as_str(), rev(&node.newest), rev(&node.acknowledged)), ("n1", Some(1), None));
    assert!(node.behind_ms.is_some() && node.has_address == Some(false) && node.latency_ms.is_none());
    peer.ask("n1").await;
    let node = wait_for(&folder, |it| it.behind_ms.is_none()).await;
    assert_eq!((rev(&node.acknowledged), node.has_address), (Some(1), Some(false)));
    assert!(node.latency_ms.is_some());

    brain.publisher.publish(state([service("ns/a", &[("p", 7)])]));
    peer.change_set().await;
    peer.request(WatchReq { node_name: "n1".into(), unconfirmed: true, ..WatchReq::default() }).await;
    brain.publisher.publish(state([service("ns/a", &[("p", 7), ("q", 8)])]));
    peer.change_set().await;
    let node = wait_for(&folder, |it| rev(&it.newest) == Some(3)).await;
    assert_eq!((rev(&node.acknowledged), node.has_address), (Some(1), Some(false)));
    peer.ask("n1").await;
    let node = wait_for(&folder, |it| it.behind_ms.is_none()).await;
    assert_eq!((rev(&node.acknowledged), node.has_address), (Some(3), Some(true)));

    drop(peer);
    let gone = async { while !folder.client().nodes(None).await.unwrap().is_empty() {} };
    timeout(LIMIT, gone).await.unwrap();
    let error = tonic_error(&folder).await;
    assert!(error.contains("\"nonsense\" is no IP address"), "{error}");
    brain.stop().await;
}

async fn tonic_error(folder: &Folder) -> String {
    use proxy_contract::globalv1::{ListNodesReq, nodes_client::NodesClient};
    let mut client = NodesClient::new(crate::common::channel(folder).await);
    client.list(ListNodesReq { address: "nonsense".into() }).await.unwrap_err().message().to_owned()
}

#[tokio::test]
async fn an_agent_acknowledges_what_is_in_force() {
    let (folder, brain) = Brain::new().await;
    brain.publisher.publish(NodeState::default());
    let in_force = watch::Sender::new(None);
    let upstream = folder.upstream().confirmed_by(in_force.subscribe());
    let mut states = upstream.subscribe();
    while_following(&upstream, async {
        let first = states.next().await.unwrap();
        let node = wait_for(&folder, |it| rev(&it.newest) == Some(1)).await;
        assert_eq!(rev(&node.acknowledged), None);
        in_force.send_replace(Some((first.instance_id, first.rev)));
        wait_for(&folder, |it| rev(&it.acknowledged) == Some(1)).await;
        // What cannot be applied is not acknowledged, and delays the next state by a moment only.
        brain.publisher.publish(state([service("ns/a", &[])]));
        states.next().await.unwrap();
        brain.publisher.publish(state([service("ns/b", &[])]));
        let third = states.next().await.unwrap();
        let node = wait_for(&folder, |it| rev(&it.newest) == Some(3)).await;
        assert_eq!(rev(&node.acknowledged), Some(1));
        in_force.send_replace(Some((third.instance_id, third.rev)));
        wait_for(&folder, |it| rev(&it.acknowledged) == Some(3) && it.behind_ms.is_none()).await;
    })
    .await;
    brain.stop().await;
}

#[tokio::test]
async fn a_client_for_which_nothing_changes_is_not_behind() {
    let (folder, brain) = Brain::new().await;
    let first = state([service("ns/a", &[("p", 7)])]);
    brain.publisher.publish(first.clone());
    let mut peer = NodePeer::start(&folder, "n1").await;
    peer.change_set().await;
    // A change, and back, before it asks again.
    brain.publisher.publish(state([service("ns/a", &[])]));
    brain.publisher.publish(first.clone());
    peer.ask("n1").await;
    let node = wait_for(&folder, |it| it.behind_ms.is_none()).await;
    assert_eq!(rev(&node.acknowledged), Some(3));
    // It has not requested nodes.
    let nodes = [("n2".into(), NodeInfo::default())].into_iter().collect();
    brain.publisher.publish(NodeState { nodes, ..first.clone() });
    let node = wait_for(&folder, |it| rev(&it.newest) == Some(4) && it.behind_ms.is_none()).await;
    assert_eq!(rev(&node.acknowledged), Some(4));
    // What is not active yet becomes no more so by changes that it does not see.
    let second = state([service("ns/b", &[("q", 8)])]);
    brain.publisher.publish(second.clone());
    peer.change_set().await;
    let unconfirmed = WatchReq { node_name: "n1".into(), unconfirmed: true, ..WatchReq::default() };
    peer.request(unconfirmed).await;
    let nodes = [("n3".into(), NodeInfo::default())].into_iter().collect();
    brain.publisher.publish(NodeState { nodes, ..second });
    peer.receives_nothing().await;
    let node = wait_for(&folder, |it| rev(&it.newest) == Some(6)).await;
    assert_eq!(rev(&node.acknowledged), Some(4));
    // A revision that was not sent acknowledges nothing, and neither asks for a change set.
    let current = brain.publisher.current().unwrap();
    let confirmed = |rev| WatchReq {
        node_name: "n1".into(),
        confirmed: Some(proxy_contract::localv1::Revision { instance_id: current.instance_id, rev }),
        ..WatchReq::default()
    };
    peer.request(confirmed(4)).await;
    peer.receives_nothing().await;
    let node = wait_for(&folder, |it| rev(&it.newest) == Some(6)).await;
    assert_eq!(rev(&node.acknowledged), Some(4));
    peer.request(confirmed(5)).await;
    let node = wait_for(&folder, |it| it.behind_ms.is_none()).await;
    assert_eq!(rev(&node.acknowledged), Some(6));
    for name in ["ns/c", "ns/d"] {
        brain.publisher.publish(state([service(name, &[])]));
    }
    peer.change_set().await;
    peer.receives_nothing().await;
    brain.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_client_that_comes_late_has_no_latency_from_before() {
    let (folder, brain) = Brain::new().await;
    brain.publisher.publish(NodeState::default());
    let age = Duration::from_secs(3_600);
    sleep(age).await;
    let mut peer = NodePeer::start(&folder, "n1").await;
    peer.change_set().await;
    peer.ask("n1").await;
    let node = wait_for(&folder, |it| it.latency_ms.is_some()).await;
    assert!(node.latency_ms < Some(age.as_millis() as u64), "{node:?}");
    brain.stop().await;
}

#[tokio::test(start_paused = true)]
async fn an_agent_acknowledges_a_state_that_becomes_active_late() {
    let (folder, brain) = Brain::new().await;
    brain.publisher.publish(NodeState::default());
    let in_force = watch::Sender::new(None);
    let upstream = folder.upstream().confirmed_by(in_force.subscribe());
    let mut states = upstream.subscribe();
    while_following(&upstream, async {
        let first = states.next().await.unwrap();
        sleep(Duration::from_secs(3)).await;
        let node = wait_for(&folder, |it| rev(&it.newest) == Some(1)).await;
        assert_eq!(rev(&node.acknowledged), None);
        in_force.send_replace(Some((first.instance_id, first.rev)));
        wait_for(&folder, |it| rev(&it.acknowledged) == Some(1) && it.behind_ms.is_none()).await;
        // Later ones are acknowledged, and paced, as ever.
        brain.publisher.publish(state([service("ns/a", &[])]));
        let second = states.next().await.unwrap();
        brain.publisher.publish(state([service("ns/b", &[])]));
        in_force.send_replace(Some((second.instance_id, second.rev)));
        let third = states.next().await.unwrap();
        in_force.send_replace(Some((third.instance_id, third.rev)));
        wait_for(&folder, |it| rev(&it.acknowledged) == Some(3) && it.behind_ms.is_none()).await;
    })
    .await;
    brain.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_reconnect_acknowledges_nothing_that_is_not_active() {
    let (folder, brain) = Brain::new().await;
    let served = state([service("ns/a", &[("p", 7)])]);
    brain.publisher.publish(served.clone());
    let in_force = watch::Sender::new(None);
    let upstream = folder.upstream().confirmed_by(in_force.subscribe());
    let mut states = upstream.subscribe();
    while_following(&upstream, async {
        let first = states.next().await.unwrap();
        // It cannot be applied; meanwhile the brain is replaced by one with the same state.
        sleep(Duration::from_secs(3)).await;
        brain.stop().await;
        let brain = Brain::start(&folder).await;
        brain.publisher.publish(served);
        let node = wait_for(&folder, |it| it.newest.is_some()).await;
        assert_eq!(rev(&node.acknowledged), None);
        sleep(Duration::from_secs(4)).await;
        let node = wait_for(&folder, |it| it.newest.is_some()).await;
        assert_eq!(rev(&node.acknowledged), None);
        in_force.send_replace(Some((first.instance_id, first.rev)));
        wait_for(&folder, |it| it.behind_ms.is_none()).await;
        brain.stop().await;
    })
    .await;
}
