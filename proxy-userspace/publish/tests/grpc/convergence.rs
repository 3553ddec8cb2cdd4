//! Whatever happens, the client ends with the publisher's newest state.

use std::time::Duration;

use model::state::NodeState;
use proptest::{collection::vec, prelude::*, test_runner::Config};
use proxy_contract::{Target, client::Client};
use publish::upstream::Upstream;
use tokio::time::{sleep, timeout};

use crate::common::{Brain, Folder, LIMIT, Peer, service, state};

#[derive(Clone, Debug)]
enum Step {
    Publish(NodeState),
    /// The brain dies, and another takes its place.
    Restart,
    /// The clients read.
    Read,
    /// Something is on its way.
    Pause,
}

fn some_state() -> impl Strategy<Value = NodeState> {
    let key = prop_oneof![Just("p"), Just("q"), Just("@q"), Just("@x"), Just("@y")];
    let endpoints = vec((key, 1_u8..4), 0..4);
    let name = prop_oneof![Just("a/s"), Just("a-b/s"), Just("a/t"), Just("b/s")];
    vec((name, endpoints), 0..4).prop_map(|services| {
        state(services.into_iter().map(|(name, mut endpoints)| {
            // A path is one endpoint's alone.
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
        2 => Just(Step::Pause),
    ]
}

async fn play(steps: Vec<Step>) {
    let folder = Folder::new();
    let mut brain = Brain::start(&folder.socket()).await;
    let mut newest = NodeState::default();
    brain.publisher.publish(newest.clone());
    let upstream = Upstream::new(Client::new(Target::Unix(folder.socket()), "n1"), "n1");
    let mut states = upstream.subscribe();
    let mut peer = Peer::start(&folder.socket(), "n1").await;
    let history = async {
        for step in steps {
            match step {
                Step::Publish(state) => {
                    newest = state;
                    brain.publisher.publish(newest.clone());
                }
                Step::Restart => {
                    brain.stop().await;
                    brain = Brain::start(&folder.socket()).await;
                    brain.publisher.publish(newest.clone());
                    peer = Peer::start(&folder.socket(), "n1").await;
                }
                Step::Read => {
                    // The peer checks the rules; it may have nothing to read.
                    if timeout(Duration::from_millis(3), peer.change_set()).await.is_ok() {
                        peer.ask("n1").await;
                    } else {
                        peer = Peer::start(&folder.socket(), "n1").await;
                    }
                }
                Step::Pause => sleep(Duration::from_millis(2)).await,
            }
        }
        let converged = async { while states.next().await.unwrap().state != newest {} };
        timeout(LIMIT, converged).await.expect("the client ends with the newest state");
        let mut peer = Peer::start(&folder.socket(), "n1").await;
        peer.change_set().await;
        let count = newest.services.values().map(|it| it.endpoints.len()).sum::<usize>();
        assert_eq!((peer.services.len(), peer.endpoints.len()), (newest.services.len(), count));
        brain.stop().await;
    };
    tokio::select! {
        () = history => {}
        () = upstream.run() => panic!("it never ends"),
    }
}

#[test]
fn every_history_ends_with_the_newest_state() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let config = Config { cases: 48, max_shrink_iters: 12, failure_persistence: None, ..Config::default() };
    proptest!(config, |(steps in vec(step(), 1..12))| runtime.block_on(play(steps)));
}
