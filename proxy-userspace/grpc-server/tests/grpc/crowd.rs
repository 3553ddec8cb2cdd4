//! Many clients that ask at the same time.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use model::state::NodeState;

use crate::{
    common::{Brain, service, state},
    misbehaving_clients::large,
    peer::NodePeer,
};

const OTHERS: usize = 60;

#[tokio::test]
async fn a_change_waits_for_no_first_states_of_others() {
    let (folder, _brain, nodes) = Brain::any_node().await;
    nodes.publish("n1", NodeState::default());
    let mut peer = NodePeer::synced(&folder).await;
    peer.ask("n1").await;

    let received = Arc::<AtomicUsize>::default();
    for index in 0..OTHERS {
        let mut other = NodePeer::start(&folder, &format!("crowd-{index}")).await;
        let received = Arc::clone(&received);
        tokio::spawn(async move {
            while let Ok(Some(_)) = other.items.message().await {
                received.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    for node in nodes.requested().await {
        nodes.publish(&node, large(1));
    }
    let received = || received.load(Ordering::Relaxed);
    // Each of them is in the middle of its state.
    while received() < OTHERS * 100 {
        tokio::task::yield_now().await;
    }
    let before = received();
    nodes.publish("n1", state([service("ns/a", &[])]));
    assert_eq!(peer.change_set().await, ["+s ns/a"]);
    // Not even one batch of each is sent meanwhile.
    let meanwhile = received() - before;
    assert!(meanwhile < OTHERS * 16, "{meanwhile} objects were sent before the change");
    assert!(received() < OTHERS * 6_060, "the others are not done");
}
