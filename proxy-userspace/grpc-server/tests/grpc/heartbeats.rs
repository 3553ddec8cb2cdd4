//! Heartbeats: signs of life of a brain that has nothing to say.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use model::state::NodeState;
use proxy_contract::localv1::{
    EmptyOp, Extension, OpItem, WatchReq,
    op_item::Op,
    sets_server::{Sets, SetsServer},
};
use tokio::time::Instant;
use tonic::{Request, Response, Status, Streaming, transport::server::Server};

use crate::{
    common::{Brain, Folder, is_pending, service},
    peer::NodePeer,
    scripted_brain::{Items, serve_at},
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
async fn a_client_that_does_not_ask_hears_nothing() {
    let (folder, brain) = Brain::new().await;
    brain.publisher.publish(NodeState::default());
    let mut peer = NodePeer::start(&folder, "n1").await;
    assert!(matches!(peer.item().await, Op::Sync(_)));
    assert!(is_pending(25_000, peer.items.message()).await);
    brain.stop().await;
}

/// A brain that hangs as soon as it has sent a state; it counts its streams.
#[derive(Clone)]
struct Hanging {
    extensions: Vec<i32>,
    streams: Arc<AtomicUsize>,
}

#[tonic::async_trait]
impl Sets for Hanging {
    type WatchStream = Items;

    async fn watch(&self, _: Request<Streaming<WatchReq>>) -> Result<Response<Items>, Status> {
        self.streams.fetch_add(1, Ordering::SeqCst);
        let reset = EmptyOp { extensions: self.extensions.clone(), ..EmptyOp::default() };
        let items = [Op::Reset(reset), Op::Sync(EmptyOp::default())].map(|op| Ok(OpItem { op: Some(op) }));
        let items = tokio_stream::StreamExt::chain(tokio_stream::iter(items), tokio_stream::pending());
        Ok(Response::new(Box::pin(items)))
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_leaves_a_brain_whose_heartbeats_stop() {
    // Without the extension, as from KPNG's brain, silence means that nothing has changed.
    for (extensions, expected) in [(vec![Extension::Heartbeats.into()], 4), (Vec::new(), 1)] {
        let folder = Folder::new();
        let streams = Arc::<AtomicUsize>::default();
        let brain = Hanging { extensions, streams: Arc::clone(&streams) };
        serve_at(&folder.socket(), Server::builder().add_service(SetsServer::new(brain)));
        let client = folder.client().request_extensions([Extension::Heartbeats]);
        let mut states = client.watch();
        assert!(states.next().await.services.is_empty());
        let outage = client.outage();
        // Cancelling does not postpone it.
        for _ in 0..100 {
            is_pending(1_000, states.next()).await;
        }
        assert_eq!(streams.load(Ordering::SeqCst), expected);
        assert_eq!(*outage.borrow(), None, "each connection has had a state");
    }
}
