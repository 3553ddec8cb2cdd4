//! Heartbeats: signs of life of a brain that has nothing to say.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use model::state::NodeState;
use proxy_contract::localv1::{EmptyOp, Extension, op_item::Op};
use tokio::time::Instant;

use crate::{
    common::{Brain, Folder, is_pending, service},
    peer::NodePeer,
    scripted_brain::ScriptedBrain,
};

#[tokio::test(start_paused = true)]
async fn a_client_that_asks_for_heartbeats_hears_every_ten_seconds_from_the_brain() {
    let (folder, brain) = Brain::new().await;
    let heartbeats = [Extension::Heartbeats.into()];
    let (mut peer, extensions) = NodePeer::with_extensions(&folder, &heartbeats).await;
    assert_eq!(extensions, heartbeats);
    let beats = async |peer: &mut NodePeer| {
        let start = Instant::now();
        assert_eq!(peer.item().await, Op::Heartbeat(EmptyOp::default()));
        let elapsed = start.elapsed();
        assert!((Duration::from_secs(9)..Duration::from_secs(12)).contains(&elapsed), "{elapsed:?}");
    };
    // Before there is a state, while the client asks, and while it does not.
    beats(&mut peer).await;
    brain.publisher.publish(NodeState::default());
    assert!(matches!(peer.item().await, Op::Sync(_)));
    beats(&mut peer).await;
    peer.ask("n1").await;
    beats(&mut peer).await;
    brain.publish([service("ns/a", &[])]);
    assert!(matches!(peer.item().await, Op::Set(_)));
    assert!(matches!(peer.item().await, Op::Sync(_)));
    brain.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_client_leaves_a_brain_whose_heartbeats_stop() {
    // Without the extension, as from KPNG's brain, silence means that nothing has changed.
    for (extensions, expected) in [(vec![Extension::Heartbeats.into()], 4), (Vec::new(), 1)] {
        let folder = Folder::new();
        // It hangs as soon as it has sent a state.
        let brain = ScriptedBrain { extensions, ..ScriptedBrain::new([Vec::new()]) };
        let streams = Arc::clone(&brain.streams);
        brain.serve(&folder.socket());
        let client = folder.client().request_extensions([Extension::Heartbeats]);
        let mut states = client.watch();
        assert!(states.next().await.services.is_empty());
        let outage = client.outage();
        // Canceling does not postpone it.
        for _ in 0..100 {
            is_pending(1_000, states.next()).await;
        }
        assert_eq!(streams.load(Ordering::SeqCst), expected);
        assert_eq!(*outage.borrow(), None, "each connection has had a state");
    }
}
