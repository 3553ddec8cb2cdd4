//! Resuming by content, for brains that follow another one: what they have is not sent again.

use model::{
    ServiceName,
    cluster::{ClusterState, Node, SliceName},
    state::NodeInfo,
};
use proxy_contract::{
    client::{Client, ClusterChange, ClusterWatch},
    globalv1::sets_server::SetsServer,
    localv1::Set,
};
use tonic::transport::Server;
use wire::{
    Extensions,
    cluster::{ClusterDecoder, service_info},
};

use crate::{
    cluster_watch::{service, slice},
    common::{Brain, in_time, is_pending},
    resume::Front,
    scripted_brain::{ScriptedBrain, serve_at, set},
};

fn watch(client: Client) -> ClusterWatch {
    client.request_extensions(Extensions::GLOBAL.iter()).cluster()
}

async fn next(cluster: &mut ClusterWatch) -> ClusterChange {
    in_time(cluster.next()).await.unwrap()
}

fn node(name: &str) -> Node {
    Node { name: name.into(), zone: None, info: NodeInfo::default() }
}

/// Services of a slice with ten endpoints, and a tenth as many nodes.
pub(crate) fn large(services: u8) -> ClusterState {
    let mut state = ClusterState::default();
    for it in 0..services / 10 {
        state.nodes.insert(node(&format!("n{it}")));
    }
    for it in 0..services {
        let addresses: Vec<_> = (0..10).map(|last| format!("10.1.{it}.{last}")).collect();
        let addresses: Vec<_> = addresses.iter().map(String::as_str).collect();
        state.services.insert(service(&format!("s{it}")));
        state.set_slice(slice(&format!("s{it}-1"), &format!("s{it}"), &addresses));
    }
    state
}

#[tokio::test]
async fn a_brain_that_reconnects_receives_what_it_missed() {
    let (folder, brain) = Brain::new().await;
    let mut state = large(250);
    brain.publish_cluster(state.clone());
    let front = Front::new(folder.socket());
    let mut cluster = watch(front.folder.client());
    let mut decoder = ClusterDecoder::default();
    decoder.apply(&next(&mut cluster).await);
    let all = front.bytes();
    brain.stop().await;
    // A Service loses an endpoint, one is new, one is gone, and so is a node.
    state.set_slice(slice("s7-1", "s7", &["10.1.7.1"]));
    state.services.insert(service("new"));
    state.services.remove(&ServiceName::new("ns", "s8"));
    state.delete_slice(&SliceName { namespace: "ns".into(), name: "s8-1".into() });
    state.nodes.remove("n3");
    let brain = Brain::start(&folder).await;
    brain.publish_cluster(state.clone());
    let change = next(&mut cluster).await;
    let missed = front.bytes() - all;
    let received = decoder.apply(&change);
    assert_eq!(received.services, state.services);
    assert_eq!(received.nodes, state.nodes);
    assert_eq!(change.services.keys().map(|it| &**it).collect::<Vec<_>>(), ["ns/new", "ns/s7", "ns/s8"]);
    assert_eq!(change.nodes.keys().map(|it| &**it).collect::<Vec<_>>(), ["n3"]);
    // 16 bytes for each of 512 buckets, what is in the same bucket as a change, and some frames.
    assert!(missed > 8_000 && missed * 40 < all, "{missed} bytes after {all} bytes");
    brain.stop().await;
    // Another brain has the same.
    let brain = Brain::start(&folder).await;
    let before = front.bytes();
    brain.publish_cluster(state.clone());
    assert!(is_pending(500, cluster.next()).await);
    state.nodes.insert(node("last"));
    brain.publish_cluster(state.clone());
    let change = next(&mut cluster).await;
    assert_eq!((change.nodes.len(), change.services.len()), (1, 0));
    let nothing = front.bytes() - before;
    assert!((8_000..12_000).contains(&nothing), "{nothing} bytes");
    brain.stop().await;
}

#[tokio::test]
async fn an_older_brain_sends_everything() {
    let (folder, brain) = Brain::new().await;
    brain.publish_cluster(large(20));
    let front = Front::new(folder.socket());
    let mut cluster = watch(front.folder.client());
    let mut decoder = ClusterDecoder::default();
    decoder.apply(&next(&mut cluster).await);
    brain.stop().await;
    // It ignores what the client has.
    let info = |name: &str| service_info(&service(name), None);
    let change_set = ["s7", "s8"].map(|it| set(Set::GlobalServiceInfos, &format!("ns|{it}||"), &info(it)));
    let older = ScriptedBrain::new([change_set.to_vec()]);
    serve_at(&folder.socket(), Server::builder().add_service(SetsServer::new(older)));
    let state = decoder.apply(&next(&mut cluster).await);
    let names = ["s7", "s8"].map(|it| ServiceName::new("ns", it));
    assert!(state.services.keys().eq(&names), "{:?}", state.services);
    assert_eq!((state.nodes.len(), state.slices_of(&names[0]).count()), (0, 0));
}
