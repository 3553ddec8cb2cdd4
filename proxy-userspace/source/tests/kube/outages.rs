//! Outages of the API server.

use std::{sync::Arc, time::Duration};

use api_server::{Answers, Resource, Settings, Verb, WatchList};

use source::kube::{Options, Timing};

use super::source_test::{
    ALWAYS, QUICK, SourceTest, at, fail, has_error, has_service, options, server, service, slice, status,
    synced, with_kubeconfig,
};

/// Longer than any test.
const NEVER: Duration = Duration::from_secs(1000);

#[tokio::test]
async fn a_server_that_is_down_or_starts_is_retried_soon_and_no_role_is_blamed() {
    let mut server = server(Settings::default());
    server.stop();
    let timing = Timing { backoff: (NEVER, NEVER), ..QUICK };
    let mut test = SourceTest::start(&Options { timing, ..options(at(&server)) });
    test.wait_for(has_error(0, &["services", "refused"])).await;
    assert!(test.source.resources()[0].age().is_none(), "there is no cluster state");
    server.inject_fault(Resource::Services, Verb::Watch, ALWAYS, status(403, "forbidden"));
    server.resume().unwrap();
    test.wait_for(has_error(0, &["403 Forbidden", "the API server is starting"])).await;
    server.clear_faults();
    test.next().await;
    assert!(test.service("web").is_some());
    assert!(test.source.resources().iter().all(|it| it.error.is_none()));
}

#[tokio::test]
async fn the_last_state_stays_active_during_an_outage_and_its_age_is_reported() {
    let (mut server, mut test) = synced(Settings::default()).await;
    let (before, web) = (test.cluster.clone(), test.service("web").unwrap());
    server.stop();
    test.wait_for(|it| it.resources().iter().all(|it| it.error.is_some())).await;
    let age = |test: &SourceTest| test.source.resources()[0].age().unwrap();
    let first = age(&test);
    test.wait_for(|it| it.resources()[0].age().unwrap() > first + Duration::from_millis(100)).await;
    assert_eq!(test.cluster, before);

    server.set(service("other", "10.96.0.11"));
    server.resume().unwrap();
    test.until(has_service("other")).await;
    assert!(test.source.resources()[0].error.is_none());
    assert!(Arc::ptr_eq(&web, &test.service("web").unwrap()));
}

#[tokio::test]
async fn a_server_that_was_restored_from_a_backup_is_listed_again() {
    for watch_list in [WatchList::Supported, WatchList::Rejected] {
        let (mut server, mut test) = synced(Settings { watch_list, ..Settings::default() }).await;
        let backup = server.version();
        for n in 11..20 {
            server.set(service(&format!("after-{n}"), &format!("10.96.0.{n}")));
        }
        test.until(has_service("after-19")).await;
        server.stop();
        server.restore(backup);
        server.resume().unwrap();
        test.until(|cluster| !has_service("after-19")(cluster)).await;
        assert!(test.service("web").is_some() && test.service("after-11").is_none());
        // Versions that were followed before are given to other changes now.
        server.set(service("anew", "10.96.0.11"));
        test.until(has_service("anew")).await;
        // One that was not restored is not listed again.
        let _ = server.requests();
        server.stop();
        test.wait_for(has_error(0, &["services"])).await;
        server.resume().unwrap();
        server.set(service("later", "10.96.0.12"));
        test.until(has_service("later")).await;
        let lists =
            server.requests().into_iter().filter(|it| !it.contains("watch=true") && !it.contains("limit=1"));
        assert_eq!(lists.collect::<Vec<_>>(), Vec::<String>::new());
    }
}

#[tokio::test]
async fn a_server_that_hangs_with_its_watches_open_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    // With HTTP/2 by a ping that is not answered, with HTTP/1 by a watch that does not end.
    for has_http2 in [true, false] {
        let mut server = server(Settings { is_tls: true, has_http2, ..Settings::default() });
        let client_config = with_kubeconfig(server.kubeconfig(folder.path()).unwrap());
        let timing = match has_http2 {
            true => QUICK,
            false => Timing {
                unpinged_watch: Duration::from_secs(2),
                watch_slack: Duration::from_millis(200),
                ..QUICK
            },
        };
        let mut test = SourceTest::started(&Options { timing, ..options(client_config) }).await;
        server.hang();
        test.wait_for(|it| it.resources().iter().all(|it| it.error.is_some())).await;
        server.go_on();
        test.receives_other(&server).await;
        test.wait_for(|it| it.resources().iter().all(|it| it.error.is_none())).await;
    }
}

#[tokio::test]
async fn a_server_that_answers_nothing_but_keeps_its_watches_open_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let server = server(Settings { is_tls: true, ..Settings::default() });
    let client_config = with_kubeconfig(server.kubeconfig(folder.path()).unwrap());
    let idle = (Duration::from_millis(300), Duration::from_millis(300));
    let timing = Timing { idle, ..QUICK };
    let mut test = SourceTest::started(&Options { timing, ..options(client_config) }).await;
    test.wait_for(|_| server.requests().iter().any(|it| it == "/version")).await;
    let cases: [(_, &[&str]); 2] =
        [(Answers::None, &["/version: no response within"]), (Answers::Unavailable, &["/version: 503"])];
    for (n, (answers, words)) in cases.into_iter().enumerate() {
        server.configure(|it| it.answers = answers);
        test.wait_for(|source| (0..3).all(|resource| has_error(resource, words)(source))).await;
        let name = format!("new-{n}");
        server.set(service(&name, &format!("10.96.0.2{n}")));
        test.until(has_service(&name)).await;
        server.configure(|it| it.answers = Answers::All);
        test.wait_for(|it| it.resources().iter().all(|it| it.error.is_none())).await;
    }
    // The watches were not begun again, neither by the outage nor by its end.
    let requests = server.requests();
    assert!(requests.iter().all(|it| it == "/version"), "{requests:?}");
}

#[tokio::test]
async fn when_one_resource_is_followed_again_the_others_are_tried_at_once() {
    let server = server(Settings::default());
    fail(&server, Resource::EndpointSlices, ALWAYS, &status(500, "busy"));
    let timing = Timing { backoff: (NEVER, NEVER), ..QUICK };
    let mut test = SourceTest::start(&Options { timing, ..options(at(&server)) });
    test.wait_for(|it| it.resources().map(|it| it.error.is_some()) == [false, true, false]).await;
    server.clear_faults();
    // Services are followed again soon, since their server could not be reached.
    server.disconnect_all();
    test.next().await;
    assert!(test.slice("web-1").is_some());
}

#[tokio::test]
async fn the_api_servers_own_last_endpoints_stay_until_others_are_reported() {
    let server = server(Settings::default());
    server.set(service("kubernetes", "10.96.0.1"));
    server.set(slice("kubernetes", "kubernetes", &["192.0.2.1"]));
    let mut test = SourceTest::synced(&server).await;
    let endpoints = test.slice("kubernetes").unwrap();

    // The slice is emptied and deleted, and the Service with it: none of that takes effect.
    server.set(slice("kubernetes", "kubernetes", &[]));
    server.delete(Resource::EndpointSlices, "default/kubernetes");
    server.delete(Resource::Services, "default/kubernetes");
    server.set(slice("web-2", "web", &["10.244.0.2"]));
    server.set(service("other", "10.96.0.11"));
    test.until(|it| it.slices().count() == 3 && has_service("other")(it)).await;
    assert!(Arc::ptr_eq(&endpoints, &test.slice("kubernetes").unwrap()));
    assert!(test.service("kubernetes").is_some());

    // A new endpoint takes effect at once.
    server.set(service("kubernetes", "10.96.0.1"));
    server.set(slice("kubernetes", "kubernetes", &["192.0.2.2"]));
    let moved = |it: &model::cluster::EndpointSlice| it.endpoints[0].address.to_string() == "192.0.2.2";
    test.until(|it| it.slices().any(|it| !it.endpoints.is_empty() && moved(it))).await;
}
