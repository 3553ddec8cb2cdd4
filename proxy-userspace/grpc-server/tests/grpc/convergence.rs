//! After any sequence of events, the client ends with the newest published state.

use std::time::Duration;

use model::state::NodeState;
use proptest::{collection::vec, prelude::*, test_runner::Config};
use tokio::time::sleep;

use crate::{
    common::{Brain, block_on, is_pending, service, state, while_following},
    peer::NodePeer,
};

#[derive(Clone, Debug)]
enum Step {
    Publish(NodeState),
    /// The brain restarts.
    Restart,
    /// The clients read.
    Read,
    /// Time passes.
    Wait,
}

fn some_state() -> impl Strategy<Value = NodeState> {
    let key = prop_oneof![Just("p"), Just("q"), Just("@q"), Just("@x"), Just("@y")];
    let endpoints = vec((key, 1_u8..4), 0..4);
    let name = prop_oneof![Just("a/s"), Just("a-b/s"), Just("a/t"), Just("b/s")];
    vec((name, endpoints), 0..4).prop_map(|services| {
        state(services.into_iter().map(|(name, mut endpoints)| {
            // Each path has one endpoint.
            endpoints.sort_by_key(|(key, _)| key.trim_start_matches('@'));
            endpoints.dedup_by_key(|(key, _)| key.trim_start_matches('@'));
            service(name, &endpoints)
        }))
    })
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => some_state().prop_map(Step::Publish),
        1 => Just(Step::Restart),
        2 => Just(Step::Read),
        2 => Just(Step::Wait),
    ]
}

async fn play(steps: Vec<Step>) {
    let (folder, mut brain) = Brain::new().await;
    let mut newest = NodeState::default();
    brain.publisher.publish(newest.clone());
    let mut peer = NodePeer::start(&folder, "n1").await;
    while_following(folder.upstream(), async |mut states| {
        for step in steps {
            match step {
                Step::Publish(state) => {
                    newest = state;
                    brain.publisher.publish(newest.clone());
                }
                Step::Restart => {
                    brain = brain.restart(&folder).await;
                    brain.publisher.publish(newest.clone());
                    peer = NodePeer::start(&folder, "n1").await;
                }
                Step::Read => {
                    // The peer checks the rules; there may be nothing to read.
                    if is_pending(3, peer.change_set()).await {
                        peer = NodePeer::start(&folder, "n1").await;
                    } else {
                        peer.ask("n1").await;
                    }
                }
                Step::Wait => sleep(Duration::from_millis(2)).await,
            }
        }
        // The client ends with the newest state.
        while states.next().await.unwrap().state != newest {}
        let peer = NodePeer::synced(&folder).await;
        let count = newest.services.values().map(|it| it.endpoints.len()).sum::<usize>();
        assert_eq!((peer.services.len(), peer.endpoints.len()), (newest.services.len(), count));
        brain.stop().await;
    })
    .await;
}

#[test]
fn every_history_ends_with_the_newest_state() {
    let config = Config { cases: 48, max_shrink_iters: 12, failure_persistence: None, ..Config::default() };
    proptest!(config, |(steps in vec(step(), 1..12))| block_on(play(steps)));
}
