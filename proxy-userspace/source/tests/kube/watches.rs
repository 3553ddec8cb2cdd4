//! Watches.

use std::{num::NonZeroU32, sync::Arc};

use api_server::{ApiServer, Fault, Resource, Settings, Verb};
use model::{Effect, Rejections, RequestedMetadata, ServiceMetadata, ServiceName, cluster::ClusterState};
use serde_json::{Value, json};
use source::kube::Options;

use super::source_test::{
    SourceTest, at, has_service, node, options, paging, server, service, slice, synced,
};

#[tokio::test]
async fn objects_are_followed_from_an_empty_cluster_on_and_in_fragments() {
    let server = ApiServer::start(Settings::default()).unwrap();
    for it in [Resource::Services, Resource::EndpointSlices] {
        server.inject_fault(it, Verb::Watch, 1, Fault::Fragments(3));
    }
    let mut test = SourceTest::follow(&server);
    assert_eq!(test.next().await, 0);
    assert!(test.is_synced());
    server.set(service("web", "10.96.0.10"));
    test.receives_other(&server).await;
    server.set(service("other", "10.96.0.12"));
    test.until(|it| it.services.values().any(|it| it.cluster_ips[0].to_string() == "10.96.0.12")).await;
    server.delete(Resource::Services, "default/other");
    test.until(|it| !has_service("other")(it)).await;
    assert!(test.service("web").is_some());

    let mut web = slice("web-1", "web", &["10.244.0.1", "10.244.0.2"]);
    server.set(web.clone());
    test.until(|it| it.slices().any(|it| it.endpoints.len() == 2)).await;
    // Without its label, a slice belongs to no Service.
    web["metadata"]["labels"] = json!({});
    server.set(web);
    test.until(|it| it.slices().count() == 0).await;
}

#[tokio::test]
async fn a_change_of_an_annotation_alone_is_followed() {
    let (server, mut test) = synced(Settings::default()).await;
    let drain = |it: &ClusterState| it.services.values().find_map(|it| it.load_balancing.drain);
    let mut web = service("web", "10.96.0.10");
    web["metadata"]["annotations"] = json!({"kube-proxy-ebpf.io/drain": "30s"});
    server.set(web.clone());
    test.until(|it| drain(it) == NonZeroU32::new(30)).await;
    // An invalid value means the default, is reported, and keeps the Service.
    assert_eq!(test.source.take_rejected(), None);
    web["metadata"]["annotations"] = json!({"kube-proxy-ebpf.io/drain": "0s"});
    server.set(web.clone());
    test.until(|it| drain(it).is_none()).await;
    assert!(test.service("web").is_some());
    let rejected = test.source.take_rejected().unwrap();
    let web_name = ServiceName { namespace: "default".into(), name: "web".into() };
    assert_eq!(
        rejected.iter().map(|it| &it.effect).collect::<Vec<_>>(),
        [&Effect::AnnotationIgnored(web_name)]
    );
    assert_eq!(test.source.take_rejected(), None, "once for a change");
    web["metadata"]["annotations"] = json!({"kube-proxy-ebpf.io/drain": "30s"});
    server.set(web);
    test.until(|it| drain(it) == NonZeroU32::new(30)).await;
    assert_eq!(test.source.take_rejected(), Some(Rejections::default()));
}

#[tokio::test]
async fn a_change_of_a_label_alone_is_followed_if_it_is_requested() {
    let server = server(Settings::default());
    let with_labels = |labels: Value| {
        let mut web = service("web", "10.96.0.10");
        web["metadata"]["labels"] = labels;
        web["metadata"]["annotations"] = json!({"note": "long"});
        web
    };
    server.set(with_labels(json!({"app": "one", "tier": "x"})));
    let requested = RequestedMetadata::new(vec!["app".parse().unwrap()], Vec::new());
    let mut test =
        SourceTest::started(&Options { service_metadata: requested, ..options(at(&server)) }).await;
    let metadata = |test: &SourceTest| test.service("web").unwrap().metadata.clone().unwrap();
    let app = |value: &str| ServiceMetadata {
        labels: [("app".to_owned(), value.to_owned())].into(),
        ..ServiceMetadata::default()
    };
    assert_eq!(*metadata(&test), app("one"));
    let before = test.service("web").unwrap();
    server.set(with_labels(json!({"app": "one", "tier": "y"})));
    server.set(service("other", "10.96.0.11"));
    // If the label were a change, it would be handed over before the other Service, or with it.
    assert_eq!(test.next().await, 1);
    assert!(Arc::ptr_eq(&before, &test.service("web").unwrap()));
    server.set(with_labels(json!({"app": "two", "tier": "y"})));
    assert_eq!(test.next().await, 1);
    assert_eq!(*metadata(&test), app("two"));
}

#[tokio::test]
async fn a_node_heartbeat_is_not_a_change() {
    let (server, mut test) = synced(Settings::default()).await;
    let before = Arc::clone(test.cluster.nodes.get("n1").unwrap());
    let mut heartbeat = node("n1", "a");
    heartbeat["status"]["conditions"][0]["lastHeartbeatTime"] = "2026-01-01T00:05:00Z".into();
    server.set(heartbeat);
    server.set(node("n2", "b"));
    // If the heartbeat were a change, it would be handed over before n2, or with it.
    assert_eq!(test.next().await, 1);
    assert!(test.cluster.nodes.get("n2").is_some());
    assert!(Arc::ptr_eq(&before, test.cluster.nodes.get("n1").unwrap()));
}

#[tokio::test]
async fn an_expired_version_is_listed_again_and_missing_objects_are_deleted_be_it_all_of_them() {
    for settings in [Settings::default(), paging()] {
        let mut server = server(settings);
        server.set(service("other", "10.96.0.11"));
        let mut test = SourceTest::synced(&server).await;
        let web = test.service("web").unwrap();
        server.stop();
        server.delete(Resource::Services, "default/other");
        server.set(service("new", "10.96.0.12"));
        server.compact();
        server.resume().unwrap();
        test.until(has_service("new")).await;
        assert!(test.service("other").is_none(), "both changes are handed over together");
        assert!(Arc::ptr_eq(&web, &test.service("web").unwrap()));

        server.stop();
        ["default/web", "default/new"].iter().for_each(|it| server.delete(Resource::Services, it));
        server.delete(Resource::EndpointSlices, "default/web-1");
        server.compact();
        server.resume().unwrap();
        test.until(|it| it.services.is_empty() && it.slices().count() == 0).await;
    }
}

#[tokio::test]
async fn of_error_events_only_that_for_an_expired_version_lists_again() {
    for (code, message, times, expect) in
        [(410, "too old resource version", 1, 1), (500, "etcd is down", 2, 0)]
    {
        let (server, mut test) = synced(Settings::default()).await;
        let event = Fault::ErrorEvent { code, message: message.into() };
        server.inject_fault(Resource::Services, Verb::Watch, times, event);
        let _ = server.requests();
        server.disconnect_all();
        test.receives_other(&server).await;
        let requests = server.requests();
        let lists: Vec<_> = requests.iter().filter(|it| it.contains("sendInitialEvents")).collect();
        assert_eq!(lists.len(), expect, "{message}: {requests:?}");
        assert!(lists.iter().all(|it| it.starts_with("/api/v1/services?")), "{requests:?}");
    }
}

#[tokio::test]
async fn a_watch_interrupted_within_an_object_continues_from_its_version() {
    let (server, mut test) = synced(Settings::default()).await;
    let before = test.service("web").unwrap();
    let _ = server.requests();
    server.inject_fault(Resource::Services, Verb::Watch, 1, Fault::DisconnectAfter(700));
    server.disconnect_all();
    server.set(service("one", "10.96.0.11"));
    server.set(service("two", "10.96.0.12"));
    test.until(has_service("two")).await;
    assert!(test.service("one").is_some());
    assert!(Arc::ptr_eq(&before, &test.service("web").unwrap()));
    assert!(server.requests().iter().all(|it| !it.contains("sendInitialEvents")));
}

#[tokio::test]
async fn bookmarks_advance_the_version_of_an_idle_resource() {
    let settings =
        Settings { bookmark_interval: std::time::Duration::from_millis(20), ..Settings::default() };
    let (server, mut test) = synced(settings).await;
    // Other resources change.
    for n in 1..50 {
        server.set(slice("web-1", "web", &[&format!("10.244.0.{n}")]));
    }
    let newest = server.version();
    let contact = test.source.resources()[2].last_contact;
    test.wait_for(|it| it.resources()[2].last_contact > contact).await;
    test.wait_for(|it| it.resources()[1].last_contact > contact).await;
    // After a whole round of bookmarks, the version of the Nodes is the newest.
    let contact = test.source.resources()[2].last_contact;
    test.wait_for(|it| it.resources()[2].last_contact > contact).await;
    let _ = server.requests();
    server.disconnect_all();
    server.set(node("n2", "b"));
    test.until(|it| it.nodes.get("n2").is_some()).await;
    let requests = server.requests();
    let nodes =
        requests.iter().find(|it| it.starts_with("/api/v1/nodes") && it.contains("watch=true")).unwrap();
    assert!(nodes.ends_with(&format!("resourceVersion={newest}")), "{nodes}");
}
