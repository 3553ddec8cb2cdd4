//! An API server that is away.

use std::{sync::Arc, time::Duration};

use api_server::{Fault, Resource, Settings, Verb};

use super::common::{World, complains, has_service, paging, server, service, slice};

#[tokio::test]
async fn a_server_that_is_away_at_the_start_is_waited_for() {
    let mut server = server(Settings::default());
    server.stop();
    let mut world = World::follow(&server);
    world.eventually(complains(0, &["services", "refused"])).await;
    assert!(world.health.resources()[0].age().is_none(), "there are no facts");
    server.resume().unwrap();
    world.next().await;
    assert!(world.service("web").is_some());
    assert!(world.health.resources().iter().all(|it| it.error.is_none()));
}

#[tokio::test]
async fn the_last_facts_stay_while_the_server_is_away_and_their_age_is_known() {
    let mut server = server(Settings::default());
    let mut world = World::follow(&server);
    world.next().await;
    let before = world.facts.clone();
    server.stop();
    world.eventually(|it| it.resources().iter().all(|it| it.error.is_some())).await;
    let age = |world: &World| world.health.resources()[0].age().unwrap();
    let first = age(&world);
    world.eventually(|it| it.resources()[0].age().unwrap() > first + Duration::from_millis(100)).await;
    assert_eq!(world.facts, before);

    server.set(service("other", "10.96.0.11"));
    server.resume().unwrap();
    world.until(has_service("other")).await;
    assert!(world.health.resources()[0].error.is_none());
    let same = |a, b| Arc::ptr_eq(before.service(a).unwrap(), world.facts.service(b).unwrap());
    let web = model::ServiceName::new("default", "web");
    assert!(same(&web, &web));
}

#[tokio::test]
async fn a_server_that_accepts_and_says_nothing_is_given_up() {
    let server = server(paging());
    server.inject_fault(Resource::Services, Verb::List, 1000, Fault::NoResponse);
    let mut world = World::follow(&server);
    world.eventually(complains(0, &["services: no answer within"])).await;
    server.clear_faults();
    world.next().await;
    assert!(world.service("web").is_some());
}

#[tokio::test]
async fn a_server_that_comes_back_empty_is_believed() {
    let mut server = server(Settings::default());
    let mut world = World::follow(&server);
    world.next().await;
    server.stop();
    server.delete(Resource::Services, "default/web");
    server.delete(Resource::EndpointSlices, "default/web-1");
    server.compact();
    server.resume().unwrap();
    world.until(|it| it.services().is_empty() && it.slices().count() == 0).await;
}

#[tokio::test]
async fn that_the_api_server_itself_has_no_endpoints_is_not_believed_at_once() {
    let server = server(Settings::default());
    server.set(service("kubernetes", "10.96.0.1"));
    server.set(slice("kubernetes", "kubernetes", &["192.0.2.1"]));
    let mut world = World::follow(&server);
    world.next().await;
    let endpoints = world.slice("kubernetes").unwrap();

    // Emptied, deleted, and the Service with it: nothing of that is handed over.
    server.set(slice("kubernetes", "kubernetes", &[]));
    server.delete(Resource::EndpointSlices, "default/kubernetes");
    server.delete(Resource::Services, "default/kubernetes");
    server.set(slice("web-2", "web", &["10.244.0.2"]));
    server.set(service("other", "10.96.0.11"));
    world.until(|it| it.slices().count() == 3 && has_service("other")(it)).await;
    assert!(Arc::ptr_eq(&endpoints, &world.slice("kubernetes").unwrap()));
    assert!(world.service("kubernetes").is_some());

    // It is back, elsewhere: that is believed at once.
    server.set(service("kubernetes", "10.96.0.1"));
    server.set(slice("kubernetes", "kubernetes", &["192.0.2.2"]));
    let moved = |it: &model::cluster::EndpointSlice| it.endpoints[0].address.to_string() == "192.0.2.2";
    world.until(|it| it.slices().any(|it| !it.endpoints.is_empty() && moved(it))).await;
}
