//! A stream recorded from KPNG's brain.

use std::{
    path::Path,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use model::state::{EndpointKey, Scopes};
use prost::Message as _;
use proxy_contract::localv1::{
    OpItem, WatchReq,
    sets_server::{Sets, SetsServer},
};
use tokio::{net::UnixListener, sync::mpsc, time::timeout};
use tokio_stream::{
    Stream,
    wrappers::{ReceiverStream, UnixListenerStream},
};
use tonic::{Request, Response, Status, Streaming};

use crate::common::{Folder, LIMIT};

const REQUEST: &str = "0a026e31";
const RESET: &str = "2200";
const CHANGE_SET: [&str; 4] = [
    "12540a150801121164656661756c742f6974702d6c6f63616c123b0a0764656661756c7412096974702d6c6f63616c1a09436c7573746572\
     4950220e0a0c0a0a31302e39362e302e32303208100118bb0328fb416001",
    "12310a190802121564656661756c742f6974702d6c6f63616c2f702d611214120a0a0831302e302e312e3218012a0408011001",
    "122d0a190802121564656661756c742f6974702d6c6f63616c2f702d621210120a0a0831302e302e322e322a021001",
    "0a00",
];

fn bytes(hex: &str) -> Vec<u8> {
    let pairs = (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap());
    pairs.collect()
}

fn item(hex: &str) -> OpItem {
    OpItem::decode(bytes(hex).as_slice()).unwrap()
}

/// Sends the recording once per stream; the first streams break off.
struct Player {
    breaks: usize,
    streams: AtomicUsize,
}

#[tonic::async_trait]
impl Sets for Player {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<OpItem, Status>> + Send>>;

    async fn watch(
        &self,
        request: Request<Streaming<WatchReq>>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let mut requests = request.into_inner();
        let first = requests.message().await?.unwrap();
        // Apart from extensions, the request is the recorded one.
        assert!(first.encode_to_vec().starts_with(&bytes(REQUEST)));
        let (sender, items) = mpsc::channel(16);
        let stream = self.streams.fetch_add(1, Ordering::SeqCst);
        let is_broken = stream < self.breaks;
        tokio::spawn(async move {
            for hex in std::iter::once(RESET).chain(CHANGE_SET) {
                if is_broken && hex == CHANGE_SET[stream + 1] {
                    let _ = sender.send(Err(Status::unavailable("the recording breaks off"))).await;
                    return;
                }
                sender.send(Ok(item(hex))).await.unwrap();
            }
            // Like KPNG, it does not answer a request without changes.
            let _ = requests.message().await;
            sender.closed().await;
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(items))))
    }
}

fn play(socket: &Path, player: Player) -> tokio::task::JoinHandle<()> {
    let listener = UnixListener::bind(socket).unwrap();
    tokio::spawn(async move {
        let server = tonic::transport::Server::builder().add_service(SetsServer::new(player));
        server.serve_with_incoming(UnixListenerStream::new(listener)).await.unwrap();
    })
}

#[tokio::test]
async fn the_recording_is_decoded() {
    let folder = Folder::new();
    let player = play(&folder.socket(), Player { breaks: 0, streams: AtomicUsize::new(0) });
    let upstream = folder.upstream();
    let mut states = upstream.subscribe();
    let published = tokio::select! {
        published = timeout(LIMIT, states.next()) => published.unwrap().unwrap(),
        () = upstream.run() => panic!("it never returns"),
    };
    // KPNG sends no revisions: the publisher counts.
    assert_eq!((published.rev, published.state.services.len()), (1, 1));
    let state = published.state.services.values().next().unwrap();
    assert_eq!(state.service.name.to_string(), "default/itp-local");
    assert_eq!(state.service.ports[0].port.get(), 443);
    let [a, b] = state.endpoints.as_slice() else { panic!("{:?}", state.endpoints) };
    assert_eq!((&a.key, a.local), (&EndpointKey::Anonymous("p-a".into()), true));
    assert_eq!((&b.key, b.local), (&EndpointKey::Anonymous("p-b".into()), false));
    assert_eq!(a.ports[0].port.get(), 8443);
    assert_eq!(a.ports[0].scopes, Scopes { internal: true, external: true, cluster: true });
    assert_eq!(b.ports[0].scopes, Scopes { internal: false, external: true, cluster: true });
    player.abort();
}

#[tokio::test]
async fn an_incomplete_change_set_is_never_returned() {
    let folder = Folder::new();
    // Breaks off after the Service, and then after the first endpoint.
    let player = play(&folder.socket(), Player { breaks: 2, streams: AtomicUsize::new(0) });
    let client = folder.client();
    let mut watch = client.watch();
    let state = timeout(LIMIT, watch.next()).await.unwrap().unwrap();
    assert_eq!(state.services["default/itp-local"].endpoints.len(), 2);
    assert!(timeout(std::time::Duration::from_millis(200), watch.next()).await.is_err());
    assert_eq!(Arc::strong_count(&state), 2);
    player.abort();
}
