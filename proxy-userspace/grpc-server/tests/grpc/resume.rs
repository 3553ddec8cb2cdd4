//! Resuming by content: what a client has is not sent again.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use model::{
    Timestamp,
    state::{NodeInfo, NodeState, ServiceState},
};
use proxy_contract::localv1::{Digests, EmptyOp, Extension, Kept, op_item::Op};
use tokio::{
    io::copy_bidirectional,
    net::{UnixListener, UnixStream},
};
use tokio_util::io::InspectReader;

use crate::{
    cluster_resume,
    common::{Brain, Folder, in_time, service, state, while_following},
    peer::{ClusterObjects, NodeObjects, NodePeer, Objects, Peer},
};

/// A socket in front of a brain's, and the bytes that pass it in both directions.
pub(crate) struct Front {
    pub(crate) folder: Folder,
    bytes: Arc<AtomicUsize>,
}

impl Front {
    pub(crate) fn new(brain: PathBuf) -> Self {
        let (folder, bytes) = (Folder::new(), Arc::<AtomicUsize>::default());
        let listener = UnixListener::bind(folder.socket()).unwrap();
        let front = Self { folder, bytes: Arc::clone(&bytes) };
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                // While there is no brain, the connection ends.
                let Ok(server) = UnixStream::connect(&brain).await else { continue };
                let counted = |stream, bytes: Arc<AtomicUsize>| {
                    InspectReader::new(stream, move |it: &[u8]| {
                        bytes.fetch_add(it.len(), Ordering::Relaxed);
                    })
                };
                let mut client = counted(client, Arc::clone(&bytes));
                let mut server = counted(server, Arc::clone(&bytes));
                tokio::spawn(async move { copy_bidirectional(&mut client, &mut server).await });
            }
        });
        front
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }
}

const KEYS: [&str; 10] = ["p0", "p1", "p2", "p3", "p4", "p5", "p6", "p7", "p8", "p9"];

/// Services of ten endpoints, and a tenth as many nodes.
pub(crate) fn large(services: usize) -> NodeState {
    let endpoints: Vec<_> = KEYS.into_iter().zip(1..).collect();
    let nodes = (0..services / 10).map(|it| (format!("n{it}").into(), NodeInfo::default()));
    let all = (0..services).map(|it| service(&format!("namespace-{}/service-{it}", it % 50), &endpoints));
    NodeState { nodes: Arc::new(nodes.collect()), ..state(all) }
}

/// Restarts the brain with another state; returns the bytes that this takes until the client has the state.
async fn bytes_of_a_restart(before: NodeState, after: NodeState, until: &str) -> usize {
    let (folder, brain) = Brain::serving(before.clone()).await;
    let front = Front::new(folder.socket());
    while_following(front.folder.upstream(), async |mut states| {
        let first = states.next().await.unwrap();
        assert_eq!(first.state, before);
        brain.stop().await;
        let start = front.bytes();
        let brain = Brain::start(&folder).await;
        brain.publisher.publish(after.clone());
        if before != after {
            assert_eq!(states.next().await.unwrap().state, after, "{until}");
        }
        // A change shows that the client follows.
        let mut last = after;
        last.services.insert(service("zz/last", &[]).1);
        brain.publisher.publish(last.clone());
        while states.next().await.unwrap().state != last {}
        let bytes = front.bytes() - start;
        brain.stop().await;
        bytes
    })
    .await
}

#[tokio::test]
async fn a_restart_of_the_brain_costs_a_client_that_missed_nothing_almost_nothing() {
    let state = large(2_000);
    let bytes = bytes_of_a_restart(state.clone(), state, "equal").await;
    // 16 bytes for each of 2,048 buckets, and some frames; the state has 2.4 MB.
    assert!((30_000..50_000).contains(&bytes), "{bytes} bytes");
}

#[tokio::test]
async fn a_client_receives_what_it_missed() {
    let before = large(500);
    let mut after = before.clone();
    let (_, changed) = service("namespace-7/service-7", &[("p0", 1), ("other", 2)]);
    after.services.insert(changed);
    after.services.remove(&model::ServiceName::new("namespace-8", "service-8"));
    after.services.insert(service("new/new", &[("p", 9)]).1);
    let nodes = Arc::make_mut(&mut after.nodes);
    nodes.remove("n3");
    nodes.insert("new".into(), NodeInfo { is_being_deleted: true, ..NodeInfo::default() });
    let bytes = bytes_of_a_restart(before.clone(), after, "some changes").await;
    assert!((8_000..25_000).contains(&bytes), "{bytes} bytes");
    // A client that has nothing of it.
    let bytes = bytes_of_a_restart(before, NodeState::default(), "nothing").await;
    assert!(bytes < 20_000, "{bytes} bytes");
    bytes_of_a_restart(NodeState::default(), large(10), "everything").await;
}

#[tokio::test]
async fn the_time_of_a_change_is_no_difference() {
    let triggered = |micros| {
        let (name, it) = service("ns/a", &[("p", 1)]);
        let trigger_time = Some(Timestamp::from_micros(micros));
        let more = (0..200).map(|it| service(&format!("ns/s{it}"), &[("p", 1), ("q", 2)]));
        state(more.chain([(name, Arc::new(ServiceState { trigger_time, ..(*it).clone() }))]))
    };
    let bytes = bytes_of_a_restart(triggered(7), triggered(8), "times").await;
    assert!(bytes < 10_000, "{bytes} bytes");
}

/// Sizes that are no list of digests, and long ones: each is refused, and no other client is affected.
async fn check_hostile_digests<O: Objects>(folder: &Folder) {
    let resumes = [Extension::Resume.into()];
    for length in [0, 1, 15, 17, 16 * 2_049, 60 << 10] {
        let have = Some(Digests { version: 1, buckets: vec![7; length] });
        let mut peer = Peer::<O>::resuming(folder, &resumes, have).await;
        assert!(matches!(peer.item().await, Op::Reset(_)));
        let error = peer.fails().await;
        assert_eq!(error.code(), tonic::Code::InvalidArgument, "{length} bytes: {error}");
        assert!(error.message().contains(&format!("has {length} bytes")), "{error}");
    }
    // A hundred megabytes are not even received.
    let have = Some(Digests { version: 1, buckets: vec![7; 100 << 20] });
    let mut peer = Peer::<O>::resuming(folder, &resumes, have).await;
    assert!(matches!(in_time(peer.items.message()).await, Err(_) | Ok(None)));
}

#[tokio::test]
async fn hostile_digests_are_refused_and_nobody_else_notices() {
    let (folder, brain) = Brain::serving(large(20)).await;
    brain.publish_cluster(cluster_resume::large(20));
    let mut good = NodePeer::synced(&folder).await;
    check_hostile_digests::<NodeObjects>(&folder).await;
    check_hostile_digests::<ClusterObjects>(&folder).await;
    good.ask("n1").await;
    brain.publish([]);
    assert_eq!(good.change_set().await.len(), 20 * 11);
    brain.stop().await;
}

/// Without the extension or a known version, and with digests that fit nothing, a client receives the whole state.
async fn check_unknown_digests<O: Objects>(folder: &Folder) {
    let (mut plain, _) = Peer::<O>::with_extensions(folder, &[]).await;
    let all = plain.change_set().await;
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
        let mut peer = Peer::<O>::resuming(folder, requested, have).await;
        let reset = EmptyOp { extensions: carried.to_vec(), ..EmptyOp::default() };
        assert_eq!(peer.item().await, Op::Reset(reset));
        if let Some(buckets) = kept {
            assert_eq!(peer.item().await, Op::Kept(Kept { buckets }));
        }
        assert_eq!(peer.change_set().await, all);
    }
}

#[tokio::test]
async fn digests_that_fit_nothing_and_rules_of_the_future_bring_the_whole_state() {
    let (folder, brain) = Brain::serving(large(20)).await;
    brain.publish_cluster(cluster_resume::large(20));
    check_unknown_digests::<NodeObjects>(&folder).await;
    check_unknown_digests::<ClusterObjects>(&folder).await;
    brain.stop().await;
}
