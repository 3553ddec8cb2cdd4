//! Clients that are slow, silent or send garbage.

use std::{path::Path, time::Duration};

use model::state::NodeState;
use proptest::{collection::vec, prelude::*, test_runner::Config};
use proxy_contract::{
    localnetv1::{NextFilter, endpoints_client::EndpointsClient},
    localv1::op_item::Op,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixStream,
    time::sleep,
};

use crate::{
    common::{Brain, Folder, channel, in_time, is_pending, service, state},
    peer::NodePeer,
};

/// HTTP/2's connection preface and an empty SETTINGS frame.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

async fn send(socket: &Path, bytes: &[u8]) {
    let mut stream = UnixStream::connect(socket).await.unwrap();
    // The server may disconnect in the middle.
    if stream.write_all(bytes).await.is_ok() {
        is_pending(2, stream.read(&mut [0; 1024])).await;
    }
}

fn garbage() -> impl Strategy<Value = Vec<u8>> {
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
fn garbage_affects_no_other_client() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let folder = Folder::new();
    let socket = folder.socket();
    let (brain, mut peer) = runtime.block_on(async {
        let brain = Brain::start(&folder).await;
        brain.publisher.publish(NodeState::default());
        (brain, NodePeer::synced(&folder).await)
    });
    proptest!(Config::with_cases(64), |(bytes in garbage())| runtime.block_on(send(&socket, &bytes)));
    runtime.block_on(async {
        brain.publish([service("ns/a", &[])]);
        peer.ask("n1").await;
        assert_eq!(peer.change_set().await, ["+s ns/a"]);
        let mut other = NodePeer::start(&folder, "n1").await;
        assert_eq!(other.change_set().await, ["+s ns/a"]);
        brain.stop().await;
    });
}

#[tokio::test]
async fn an_invalid_message_ends_only_its_own_stream() {
    use tonic::codegen::http::uri::PathAndQuery;
    let (folder, brain) = Brain::serving(NodeState::default()).await;
    let channel = channel(&folder).await;
    let mut good = NodePeer::synced(&folder).await;
    // A node name that is not UTF-8, and one that is too long.
    let long = "n".repeat(1 << 20);
    let revision = proxy_contract::localv1::Revision { instance_id: 3, rev: 4 };
    let mut client = tonic::client::Grpc::new(channel);
    client.ready().await.unwrap();
    let codec = tonic_prost::ProstCodec::<_, proxy_contract::localv1::OpItem>::default();
    let path = PathAndQuery::from_static("/localv1.Sets/Watch");
    let answer = client.streaming(tonic::Request::new(tokio_stream::once(revision)), path, codec).await;
    let item = answer.unwrap().into_inner().message().await;
    assert!(matches!(item, Err(_) | Ok(None)), "{item:?}");
    let mut peer = NodePeer::silent(&folder).await;
    peer.ask(&long).await;
    assert!(matches!(in_time(peer.items.message()).await, Err(_) | Ok(None)));
    good.ask("n1").await;
    brain.publish([service("ns/a", &[])]);
    assert_eq!(good.change_set().await, ["+s ns/a"]);
    brain.stop().await;
}

/// Streams without a request, and connections that end within the first bytes of HTTP/2.
#[tokio::test]
async fn a_thousand_half_open_streams_affect_no_other_client() {
    const CONNECTIONS: usize = 20;
    const STREAMS: usize = 50;
    let (folder, brain) = Brain::serving(state([service("ns/a", &[])])).await;
    let mut good = NodePeer::synced(&folder).await;
    let mut half_open = Vec::new();
    let mut cut_off = Vec::new();
    for _ in 0..CONNECTIONS {
        let channel = channel(&folder).await;
        for _ in 0..STREAMS {
            half_open.push(in_time(NodePeer::over(channel.clone())).await);
        }
        for length in [0, 1, 23] {
            let mut stream = UnixStream::connect(folder.socket()).await.unwrap();
            stream.write_all(&PREFACE[..length]).await.unwrap();
            cut_off.push(stream);
        }
    }
    assert_eq!(half_open.len(), 1000);
    let mut held = Vec::new();
    for number in 0..8 {
        held.push(std::sync::Arc::downgrade(&brain.publisher.current().unwrap()));
        brain.publish([service(&format!("ns/s{number}"), &[])]);
        good.ask("n1").await;
        assert_eq!(good.change_set().await.len(), 2, "one Service comes, and one goes");
    }
    let mut late = NodePeer::start(&folder, "n1").await;
    assert_eq!(late.change_set().await, ["+s ns/s7"]);
    // The clients that asked hold what they were sent last, and the others nothing.
    let alive = held.iter().map(std::sync::Weak::strong_count).collect::<Vec<_>>();
    assert!(alive[..6].iter().all(|it| *it == 0), "{alive:?}");
    // Each can still become a client.
    half_open[999].ask("n1").await;
    assert!(matches!(half_open[999].item().await, Op::Reset(_)));
    assert_eq!(half_open[999].change_set().await, ["+s ns/s7"]);
    brain.stop().await;
}

/// A state of 6,060 objects, larger than the window of a connection.
pub(crate) fn large(revision: u8) -> NodeState {
    let keys: Vec<_> = (0..100).map(|it| format!("pod-with-a-name-as-long-as-names-are-{it}")).collect();
    let endpoints: Vec<_> = keys.iter().map(|it| (it.as_str(), revision)).collect();
    state((0..60).map(|it| service(&format!("ns/s{it}"), &endpoints)))
}

#[tokio::test]
async fn a_watcher_that_never_reads_holds_at_most_two_states() {
    let (folder, brain) = Brain::serving(large(1)).await;
    let mut slow = NodePeer::start(&folder, "n1").await;
    let mut quick = NodePeer::synced(&folder).await;
    // It sends many requests and reads nothing.
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
    // Only the published state and the one being sent still exist.
    let alive = held.iter().filter(|it| it.strong_count() > 0).count();
    assert!(alive <= 2, "{alive} states are held");
    // When it reads, it receives the state that was being sent and then the newest one, but none in between.
    slow.change_set().await;
    slow.change_set().await;
    assert_eq!(slow.endpoints, quick.endpoints);
    slow.receives_nothing().await;
    brain.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_long_poll_that_is_not_read_holds_its_state_for_five_minutes() {
    let (folder, brain) = Brain::serving(large(1)).await;
    let held = std::sync::Arc::downgrade(&brain.publisher.current().unwrap());
    let mut client = EndpointsClient::new(channel(&folder).await);
    let mut items = client.next(NextFilter::default()).await.unwrap().into_inner();
    brain.publisher.publish(large(2));
    sleep(Duration::from_secs(290)).await;
    assert!(held.strong_count() > 0, "it might still be read");
    sleep(Duration::from_secs(20)).await;
    assert_eq!(held.strong_count(), 0);
    // What was sent of it does not pass for a complete state.
    let end = loop {
        match items.message().await {
            Ok(Some(_)) => {}
            end => break end,
        }
    };
    assert_eq!(end.unwrap_err().code(), tonic::Code::DeadlineExceeded);
    brain.stop().await;
}
