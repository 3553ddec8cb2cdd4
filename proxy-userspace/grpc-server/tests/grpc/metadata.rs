//! Labels and annotations of Services: every client receives what the source keeps.

use std::{collections::BTreeMap, sync::Arc};

use brain::{Options, node_state};
use model::{
    RequestedMetadata, ServiceMetadata,
    cluster::ClusterState,
    state::{NodeState, Service, ServiceState},
};
use proxy_contract::localnetv1::NextFilter;
use source::api::{ApiSource, Update};

use crate::{
    cluster_watch,
    common::{Brain, in_time, service, state, while_following},
    long_poll::poll,
    peer::{ClusterPeer, NodePeer},
};

fn map(items: &[(&str, &str)]) -> BTreeMap<String, String> {
    items.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

/// The label `app`, and an annotation.
fn metadata(app: &str) -> Option<Arc<ServiceMetadata>> {
    let annotations = map(&[("example.com/note", "any\ntext")]);
    Some(Arc::new(ServiceMetadata { labels: map(&[("app", app)]), annotations }))
}

/// The Service `ns/a` with these, and `ns/b` without any.
fn labeled(app: &str) -> NodeState {
    let (name, it) = service("ns/a", &[("p", 1)]);
    let with_metadata = Service { metadata: metadata(app), ..(*it.service).clone() };
    let it = ServiceState { service: Arc::new(with_metadata), ..(*it).clone() };
    state([(name, Arc::new(it)), service("ns/b", &[])])
}

#[tokio::test]
async fn a_client_without_extensions_receives_labels_and_their_changes() {
    let (folder, brain) = Brain::serving(labeled("one")).await;
    let mut peer = NodePeer::start(&folder, "").await;
    assert_eq!(peer.change_set().await, ["+s ns/a", "+s ns/b", "+e ns/a/p"]);
    assert_eq!(peer.services["ns/a"].labels, map(&[("app", "one")]));
    assert_eq!(peer.services["ns/a"].annotations, map(&[("example.com/note", "any\ntext")]));
    assert!(peer.services["ns/b"].labels.is_empty() && peer.services["ns/b"].annotations.is_empty());
    let polled = poll(&folder, NextFilter::default()).await.remove(1).endpoints.unwrap().service.unwrap();
    assert_eq!(polled.labels, map(&[("app", "one")]));
    peer.ask("").await;
    brain.publisher.publish(labeled("two"));
    assert_eq!(peer.change_set().await, ["+s ns/a"]);
    assert_eq!(peer.services["ns/a"].labels, map(&[("app", "two")]));
    peer.ask("").await;
    brain.publisher.publish(labeled("two"));
    peer.receives_nothing().await;
}

#[tokio::test]
async fn a_change_of_a_label_is_none_for_a_client_that_keeps_no_labels() {
    let (folder, brain) = Brain::new().await;
    let [plain, keeping] = [RequestedMetadata::default(), RequestedMetadata::everything()]
        .map(|it| folder.upstream().with_metadata(it));
    for (upstream, keeps) in [(plain, false), (keeping, true)] {
        brain.publisher.publish(labeled("one"));
        while_following(upstream, async |mut states| {
            let one = states.next().await.unwrap();
            brain.publisher.publish(labeled("two"));
            let two = states.next().await.unwrap();
            assert_ne!(one.rev, two.rev);
            assert_eq!(one.state != two.state, keeps);
            assert_eq!(two.state == labeled("two"), keeps);
        })
        .await;
    }
}

#[tokio::test]
async fn a_brain_that_follows_hands_out_what_is_requested_of_it_and_its_upstream_has() {
    let (folder, brain) = Brain::new().await;
    let publish = |app: &str| {
        let mut state = ClusterState::default();
        let service = Service { metadata: metadata(app), ..cluster_watch::service("a") };
        state.services.insert(service);
        brain.publish_cluster(state);
    };
    publish("one");
    let mut peer = ClusterPeer::start(&folder).await;
    assert_eq!(peer.change_set().await, ["+s ns|a||"]);
    assert_eq!(peer.services["ns|a||"].service.as_ref().unwrap().labels, map(&[("app", "one")]));
    peer.ask().await;
    let patterns = |it: &str| vec![it.parse().unwrap()];
    let requests = [
        (RequestedMetadata::new(patterns("app"), Vec::new()), map(&[("app", "two")])),
        (RequestedMetadata::new(patterns("tier"), Vec::new()), map(&[])),
        (RequestedMetadata::default(), map(&[])),
    ];
    let sources = requests.map(|(requested, expect)| (ApiSource::start(folder.client(), requested), expect));
    publish("two");
    assert_eq!(peer.change_set().await, ["+s ns|a||"]);
    for (source, expect) in sources {
        let mut updates = source.updates.clone();
        let has_labels = |it: &Option<Update>| {
            let Some(Update::Cluster(cluster)) = it else { return false };
            let state = node_state(cluster, "n1", &Options::default());
            let message = wire::service(&state.services.values().next().unwrap().service);
            message.labels == expect && message.annotations.is_empty()
        };
        in_time(updates.wait_for(has_labels)).await.unwrap();
    }
}
