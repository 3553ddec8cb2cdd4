//! Resuming by content, for brains that follow another one: what they have is not sent again.

use std::{sync::Arc, time::Duration};

use model::{
    ServiceName,
    cluster::{ClusterState, Node, SliceName},
    state::NodeInfo,
};
use proxy_contract::{
    client::{Client, ClusterChange, ClusterWatch},
    globalv1::{GlobalWatchReq, ServiceInfo, sets_server::SetsServer},
    localv1::{Digests, EmptyOp, Extension, Kept, Set, op_item::Op},
};
use publish::cluster::ClusterSnapshot;
use tokio::time::timeout;
use tonic::transport::Server;
use wire::{
    Extensions,
    cluster::{ClusterDecoder, service_info},
};

use crate::{
    cluster_watch::{service, slice},
    common::{Brain, Folder, LIMIT},
    peer::ClusterPeer,
    resume::Front,
    scripted_brain::{ScriptedBrain, serve_at, set},
};

fn watch(client: Client) -> ClusterWatch {
    client.request_extensions(Extensions::GLOBAL.iter()).cluster()
}

async fn next(cluster: &mut ClusterWatch) -> ClusterChange {
    timeout(LIMIT, cluster.next()).await.unwrap().unwrap()
}

fn node(name: &str) -> Node {
    Node { name: name.into(), zone: None, info: NodeInfo::default() }
}

fn publish(brain: &Brain, state: &ClusterState) {
    brain.cluster.publish(ClusterSnapshot::State(Arc::new(state.clone())));
}

/// Services of a slice with ten endpoints, and a tenth as many nodes.
fn large(services: u8) -> ClusterState {
    let mut state = ClusterState::default();
    for it in 0..services / 10 {
        state.set_node(node(&format!("n{it}")));
    }
    for it in 0..services {
        let addresses: Vec<_> = (0..10).map(|last| format!("10.1.{it}.{last}")).collect();
        let addresses: Vec<_> = addresses.iter().map(String::as_str).collect();
        state.set_service(service(&format!("s{it}")));
        state.set_slice(slice(&format!("s{it}-1"), &format!("s{it}"), &addresses));
    }
    state
}

#[tokio::test]
async fn a_brain_that_reconnects_receives_what_it_missed() {
    let (folder, brain) = Brain::new().await;
    let mut state = large(250);
    publish(&brain, &state);
    let front = Front::new(folder.socket());
    let mut cluster = watch(front.folder.client());
    let mut decoder = ClusterDecoder::default();
    decoder.apply(&next(&mut cluster).await);
    let all = front.bytes();
    brain.stop().await;
    // A Service loses an endpoint, one is new, one is gone, and so is a node.
    state.set_slice(slice("s7-1", "s7", &["10.1.7.1"]));
    state.set_service(service("new"));
    state.delete_service(&ServiceName::new("ns", "s8"));
    state.delete_slice(&SliceName { namespace: "ns".into(), name: "s8-1".into() });
    state.delete_node("n3");
    let brain = Brain::start(&folder).await;
    publish(&brain, &state);
    let change = next(&mut cluster).await;
    let missed = front.bytes() - all;
    let received = decoder.apply(&change);
    assert_eq!(received.services(), state.services());
    assert_eq!(received.nodes(), state.nodes());
    assert_eq!(change.services.keys().map(|it| &**it).collect::<Vec<_>>(), ["ns/new", "ns/s7", "ns/s8"]);
    assert_eq!(change.nodes.keys().map(|it| &**it).collect::<Vec<_>>(), ["n3"]);
    // 16 bytes for each of 512 buckets, what is in the same bucket as a change, and some frames.
    assert!(missed > 8_000 && missed * 40 < all, "{missed} bytes after {all} bytes");
    brain.stop().await;
    // Another brain has the same.
    let brain = Brain::start(&folder).await;
    let before = front.bytes();
    publish(&brain, &state);
    let unchanged = timeout(Duration::from_millis(500), cluster.next()).await;
    assert!(unchanged.is_err(), "{unchanged:?}");
    state.set_node(node("last"));
    publish(&brain, &state);
    let change = next(&mut cluster).await;
    assert_eq!((change.nodes.len(), change.services.len()), (1, 0));
    let nothing = front.bytes() - before;
    assert!((8_000..12_000).contains(&nothing), "{nothing} bytes");
    brain.stop().await;
}

#[tokio::test]
async fn an_older_brain_sends_everything() {
    let (folder, brain) = Brain::new().await;
    publish(&brain, &large(20));
    let front = Front::new(folder.socket());
    let mut cluster = watch(front.folder.client());
    let mut decoder = ClusterDecoder::default();
    decoder.apply(&next(&mut cluster).await);
    brain.stop().await;
    // It ignores what the client has.
    let info = |name: &str| -> ServiceInfo { service_info(&service(name), None).unwrap() };
    let change_set = ["s7", "s8"].map(|it| set(Set::GlobalServiceInfos, &format!("ns|{it}||"), &info(it)));
    let older = ScriptedBrain::new([change_set.to_vec()]);
    serve_at(&folder.socket(), Server::builder().add_service(SetsServer::new(older)));
    let state = decoder.apply(&next(&mut cluster).await);
    let names = ["s7", "s8"].map(|it| ServiceName::new("ns", it));
    assert!(state.services().keys().eq(&names), "{:?}", state.services());
    assert_eq!((state.nodes().len(), state.slices_of(&names[0]).count()), (0, 0));
}

/// Opens a stream with these extensions and digests.
async fn resume(folder: &Folder, extensions: &[i32], have: Option<Digests>) -> ClusterPeer {
    let peer = ClusterPeer::silent(folder).await;
    peer.request(GlobalWatchReq { extensions: extensions.to_vec(), have }).await;
    peer
}

#[tokio::test]
async fn older_clients_and_digests_that_fit_nothing_bring_the_whole_state() {
    let (folder, brain) = Brain::new().await;
    publish(&brain, &large(20));
    let all = ClusterPeer::start(&folder).await.change_set().await;
    let digests = |version, length| Some(Digests { version, buckets: vec![7; length] });
    let resumes = [Extension::Resume.into()];
    for (requested, have, carried, kept) in [
        (&[][..], digests(1, 16), &[][..], None),
        (&resumes, None, &resumes, None),
        (&resumes, digests(1, 16 * 9), &resumes, Some(vec![0; 2])),
        // No bucket is equal, not even an empty one.
        (&resumes, digests(1, 16 * 2_048), &resumes, Some(vec![0; 256])),
        (&resumes, digests(2, 3), &[], None),
    ] {
        let mut peer = resume(&folder, requested, have).await;
        let reset = EmptyOp { extensions: carried.to_vec(), ..EmptyOp::default() };
        assert_eq!(peer.item().await, Op::Reset(reset));
        if let Some(buckets) = kept {
            assert_eq!(peer.item().await, Op::Kept(Kept { buckets }));
        }
        assert_eq!(peer.change_set().await, all);
    }
    for length in [0, 15, 16 * 2_049] {
        let mut peer = resume(&folder, &resumes, digests(1, length)).await;
        assert!(matches!(peer.item().await, Op::Reset(_)));
        assert_eq!(peer.fails().await.code(), tonic::Code::InvalidArgument, "{length} bytes");
    }
    brain.stop().await;
}
