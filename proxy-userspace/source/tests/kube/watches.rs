//! Following what happens.

use std::sync::Arc;

use api_server::{Fault, Resource, Settings, Verb};

use super::common::{World, has_service, node, paging, server, service, slice};

#[tokio::test]
async fn what_is_added_changed_and_deleted_is_followed() {
    let server = server(Settings::default());
    let mut world = World::follow(&server);
    world.next().await;
    server.set(service("other", "10.96.0.11"));
    world.until(has_service("other")).await;
    server.set(service("other", "10.96.0.12"));
    world.until(|it| it.services().values().any(|it| it.cluster_ips[0].to_string() == "10.96.0.12")).await;
    server.delete(Resource::Services, "default/other");
    world.until(|it| !has_service("other")(it)).await;
    assert!(world.service("web").is_some());
}

#[tokio::test]
async fn a_heartbeat_is_no_news() {
    let server = server(Settings::default());
    let mut world = World::follow(&server);
    world.next().await;
    let before = Arc::clone(world.facts.node("n1").unwrap());
    let mut beating = node("n1", "a");
    beating["status"]["conditions"][0]["lastHeartbeatTime"] = "2026-01-01T00:05:00Z".into();
    server.set(beating);
    server.set(node("n2", "b"));
    // Had the heartbeat been news, it would have come before n2, or with it.
    assert_eq!(world.next().await, 1);
    assert!(world.facts.node("n2").is_some());
    assert!(Arc::ptr_eq(&before, world.facts.node("n1").unwrap()));
}

#[tokio::test]
async fn of_an_object_that_changed_often_only_the_newest_is_handed_over() {
    let server = server(Settings::default());
    let mut world = World::follow(&server);
    world.next().await;
    for n in 1..=200 {
        server.set(service("often", &format!("10.96.1.{n}")));
    }
    server.set(service("last", "10.96.0.12"));
    world.eventually(|it| it.resources()[0].objects == 3).await;
    let often = world.service("often").unwrap();
    assert_eq!(often.cluster_ips[0].to_string(), "10.96.1.200");
}

#[tokio::test]
async fn a_version_that_expired_is_listed_again_and_what_is_gone_is_deleted() {
    for settings in [Settings::default(), paging()] {
        let mut server = server(settings);
        server.set(service("other", "10.96.0.11"));
        let mut world = World::follow(&server);
        world.next().await;
        let web = world.service("web").unwrap();
        server.stop();
        server.delete(Resource::Services, "default/other");
        server.set(service("new", "10.96.0.12"));
        server.compact();
        server.resume().unwrap();
        world.until(has_service("new")).await;
        assert!(world.service("other").is_none(), "both came in one");
        assert!(Arc::ptr_eq(&web, &world.service("web").unwrap()));
    }
}

#[tokio::test]
async fn an_error_event_of_an_expired_version_is_listed_again() {
    let server = server(Settings::default());
    let mut world = World::follow(&server);
    world.next().await;
    let gone = Fault::ErrorEvent { code: 410, message: "too old resource version".into() };
    server.inject_fault(Resource::Services, Verb::Watch, 1, gone);
    let _ = server.requests();
    server.disconnect_all();
    server.set(service("other", "10.96.0.11"));
    world.until(has_service("other")).await;
    let requests = server.requests();
    let lists = requests
        .iter()
        .filter(|it| it.starts_with("/api/v1/services?") && it.contains("sendInitialEvents=true"));
    assert_eq!(lists.count(), 1, "{requests:?}");
}

#[tokio::test]
async fn an_error_event_of_another_kind_is_no_reason_to_list_again() {
    let server = server(Settings::default());
    let mut world = World::follow(&server);
    world.next().await;
    let failure = Fault::ErrorEvent { code: 500, message: "etcd is away".into() };
    server.inject_fault(Resource::Services, Verb::Watch, 2, failure);
    let _ = server.requests();
    server.disconnect_all();
    server.set(service("other", "10.96.0.11"));
    world.until(has_service("other")).await;
    assert!(server.requests().iter().all(|it| !it.contains("sendInitialEvents")));
}

#[tokio::test]
async fn a_watch_that_is_cut_in_the_middle_of_an_object_goes_on_where_it_was() {
    let server = server(Settings::default());
    let mut world = World::follow(&server);
    world.next().await;
    let before = world.service("web").unwrap();
    let _ = server.requests();
    server.inject_fault(Resource::Services, Verb::Watch, 1, Fault::DisconnectAfter(700));
    server.disconnect_all();
    server.set(service("one", "10.96.0.11"));
    server.set(service("two", "10.96.0.12"));
    world.until(has_service("two")).await;
    assert!(world.service("one").is_some());
    assert!(Arc::ptr_eq(&before, &world.service("web").unwrap()));
    assert!(server.requests().iter().all(|it| !it.contains("sendInitialEvents")));
}

#[tokio::test]
async fn bookmarks_keep_the_place_of_a_kind_that_nothing_happens_to() {
    let settings =
        Settings { bookmark_interval: std::time::Duration::from_millis(20), ..Settings::default() };
    let server = server(settings);
    let mut world = World::follow(&server);
    world.next().await;
    // Much happens elsewhere, and then it is forgotten.
    for n in 1..50 {
        server.set(slice("web-1", "web", &[&format!("10.244.0.{n}")]));
    }
    let newest = "resourceVersion=52";
    let contact = world.health.resources()[2].last_contact;
    world.eventually(|it| it.resources()[2].last_contact > contact).await;
    world.eventually(|it| it.resources()[1].last_contact > contact).await;
    // After a whole round of bookmarks the place of the Nodes is the newest of all.
    let contact = world.health.resources()[2].last_contact;
    world.eventually(|it| it.resources()[2].last_contact > contact).await;
    let _ = server.requests();
    server.disconnect_all();
    server.set(node("n2", "b"));
    world.until(|it| it.node("n2").is_some()).await;
    let requests = server.requests();
    let nodes = requests.iter().find(|it| it.starts_with("/api/v1/nodes")).unwrap();
    assert!(nodes.ends_with(newest), "{nodes}");
}

#[tokio::test]
async fn a_slice_that_loses_its_label_is_gone() {
    let server = server(Settings::default());
    let mut world = World::follow(&server);
    world.next().await;
    let mut orphan = slice("web-1", "web", &["10.244.0.1"]);
    orphan["metadata"]["labels"] = serde_json::json!({});
    server.set(orphan);
    world.until(|it| it.slices().count() == 0).await;
}
