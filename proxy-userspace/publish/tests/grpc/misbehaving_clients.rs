//! Clients that are slow, silent or talk nonsense.

use std::{path::Path, time::Duration};

use model::state::NodeState;
use proptest::{collection::vec, prelude::*, test_runner::Config};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixStream,
    time::timeout,
};

use crate::common::{Brain, Folder, LIMIT, Peer, service, state};

/// What begins every connection of HTTP/2, and an empty SETTINGS frame.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

async fn send(socket: &Path, bytes: &[u8]) {
    let mut stream = UnixStream::connect(socket).await.unwrap();
    // The server may hang up in the middle of it.
    if stream.write_all(bytes).await.is_ok() {
        let _ = timeout(Duration::from_millis(2), stream.read(&mut [0; 1024])).await;
    }
}

fn nonsense() -> impl Strategy<Value = Vec<u8>> {
    let bytes = || vec(any::<u8>(), 0..400);
    let frame = (any::<u8>(), any::<u8>(), 0_u8..4, vec(any::<u8>(), 0..40)).prop_map(
        |(kind, flags, stream, payload)| {
            let length = u8::try_from(payload.len()).unwrap();
            let mut frame = vec![0, 0, length, kind % 10, flags, 0, 0, 0, stream];
            frame.extend(payload);
            frame
        },
    );
    let frames = vec(frame, 1..6).prop_map(|it| [PREFACE, &it.concat()].concat());
    prop_oneof![bytes(), bytes().prop_map(|it| [PREFACE, &it].concat()), frames]
}

#[test]
fn nonsense_disturbs_nobody() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let folder = Folder::new();
    let socket = folder.socket();
    let (brain, mut peer) = runtime.block_on(async {
        let brain = Brain::start(&socket).await;
        brain.publisher.publish(NodeState::default());
        let mut peer = Peer::start(&socket, "n1").await;
        peer.change_set().await;
        (brain, peer)
    });
    proptest!(Config::with_cases(64), |(bytes in nonsense())| runtime.block_on(send(&socket, &bytes)));
    runtime.block_on(async {
        brain.publisher.publish(state([service("ns/a", &[])]));
        peer.ask("n1").await;
        assert_eq!(peer.change_set().await, ["+s ns/a"]);
        let mut other = Peer::start(&socket, "n1").await;
        assert_eq!(other.change_set().await, ["+s ns/a"]);
        brain.stop().await;
    });
}

#[tokio::test]
async fn a_message_that_is_none_ends_its_own_stream_only() {
    use tonic::codegen::http::uri::PathAndQuery;
    let folder = Folder::new();
    let brain = Brain::start(&folder.socket()).await;
    brain.publisher.publish(NodeState::default());
    let channel = crate::common::channel(&folder.socket()).await;
    let mut good = Peer::start(&folder.socket(), "n1").await;
    good.change_set().await;
    // A node name that is no text, and one that is too long.
    let long = "n".repeat(1 << 20);
    let revision = proxy_contract::localv1::Revision { instance_id: 3, rev: 4 };
    let mut client = tonic::client::Grpc::new(channel);
    client.ready().await.unwrap();
    let codec = tonic_prost::ProstCodec::<_, proxy_contract::localv1::OpItem>::default();
    let path = PathAndQuery::from_static("/localv1.Sets/Watch");
    let answer = client.streaming(tonic::Request::new(tokio_stream::once(revision)), path, codec).await;
    let item = answer.unwrap().into_inner().message().await;
    assert!(matches!(item, Err(_) | Ok(None)), "{item:?}");
    let mut peer = Peer::silent(&folder.socket()).await;
    peer.ask(&long).await;
    assert!(matches!(timeout(LIMIT, peer.items.message()).await.unwrap(), Err(_) | Ok(None)));
    good.ask("n1").await;
    brain.publisher.publish(state([service("ns/a", &[])]));
    assert_eq!(good.change_set().await, ["+s ns/a"]);
    brain.stop().await;
}

/// A state that does not fit into what a connection may hold.
fn large(revision: u8) -> NodeState {
    let keys: Vec<_> = (0..100).map(|it| format!("pod-with-a-name-as-long-as-names-are-{it}")).collect();
    let endpoints: Vec<_> = keys.iter().map(|it| (it.as_str(), revision)).collect();
    state((0..60).map(|it| service(&format!("ns/s{it}"), &endpoints)))
}

#[tokio::test]
async fn a_watcher_that_never_reads_costs_no_growing_memory() {
    let folder = Folder::new();
    let brain = Brain::start(&folder.socket()).await;
    brain.publisher.publish(large(1));
    let mut slow = Peer::start(&folder.socket(), "n1").await;
    let mut quick = Peer::start(&folder.socket(), "n1").await;
    quick.change_set().await;
    // It asks for as much as it can and reads nothing.
    for _ in 0..8 {
        slow.ask("n1").await;
    }
    let mut held = Vec::new();
    for revision in 2..14 {
        brain.publisher.publish(large(revision));
        quick.ask("n1").await;
        assert!(!quick.change_set().await.is_empty());
        let current = brain.publisher.current().unwrap();
        held.push(std::sync::Arc::downgrade(&current));
    }
    // Of all those states, only what is published now and what is being sent are still there.
    let alive = held.iter().filter(|it| it.strong_count() > 0).count();
    assert!(alive <= 2, "{alive} states are held");
    // When it reads at last, it gets what it was being sent, and then the newest state and nothing in between.
    slow.change_set().await;
    slow.change_set().await;
    assert_eq!(slow.endpoints, quick.endpoints);
    slow.hears_nothing().await;
    brain.stop().await;
}
