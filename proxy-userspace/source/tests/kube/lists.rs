//! The first list, and the selectors.

use std::sync::Arc;

use api_server::{ApiServer, Fault, Resource, Settings, Verb, WatchList};
use prometheus_client::{encoding::text::encode, registry::Registry};
use source::kube::Options;

use super::source_test::{
    SourceTest, at, fail, has_service, node, options, paging, server, service, slice, status, synced,
};

#[tokio::test]
async fn nothing_is_handed_over_before_all_resources_are_listed() {
    let server = server(Settings::default());
    server.inject_fault(Resource::Nodes, Verb::Watch, 1, Fault::NoResponse);
    let mut test = SourceTest::follow(&server);
    test.wait_for(|it| it.resources()[0].is_synced && it.resources()[1].is_synced).await;
    assert_eq!(test.cluster.services.len(), 0, "Nodes are not listed yet");
    assert!(!test.is_synced());
    test.next().await;
    assert!(test.is_synced());
    assert!(test.service("web").is_some() && test.slice("web-1").is_some());
    assert!(test.cluster.nodes.get("n1").is_some());
}

#[tokio::test]
async fn requests_are_counted_by_their_answers() {
    let (server, test) = synced(paging()).await;
    let mut registry = Registry::default();
    test.source.requests.register(&mut registry);
    let text = || {
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        text
    };
    let host = server.url().replace("http://", "");
    let has_code = |code: &str| {
        text()
            .contains(&format!(r#"rest_client_requests_total{{code="{code}",host="{host}",method="GET"}} "#))
    };
    // Streaming lists are refused, pages are not.
    assert!(has_code("422") && has_code("200"), "{}", text());
    let durations = format!(r#"rest_client_request_duration_seconds_count{{host="{host}",verb="GET"}} "#);
    assert!(text().contains(&durations), "{}", text());
    drop(server);
    while !has_code("<error>") {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn lists_are_paged_if_the_server_cannot_stream_and_begin_anew_if_a_page_expires() {
    for (expired, pages) in [(0, 3), (1, 5)] {
        let server = server(Settings { has_cache: false, ..paging() });
        fill(&server, 1200);
        // The first page arrives in fragments, and the second one has expired.
        server.inject_fault(Resource::Services, Verb::List, expired, Fault::Fragments(1000));
        server.inject_fault(Resource::Services, Verb::List, expired, status(410, "too old"));
        let test = SourceTest::synced(&server).await;
        assert_eq!(test.cluster.services.len(), 1201);
        let lists = service_lists(&server);
        assert_eq!(lists.len(), pages, "{lists:?}");
        assert!(lists.iter().all(|it| it.contains("limit=500")), "{lists:?}");
    }
}

fn fill(server: &ApiServer, services: usize) {
    for n in 0..services {
        server.set(service(&format!("s{n}"), &format!("10.97.{}.{}", n / 250, 1 + n % 250)));
    }
}

/// The requests for Services since the last call, without those for a version alone, which an outage adds.
fn service_requests(server: &ApiServer) -> Vec<String> {
    let is_kept = |it: &String| it.starts_with("/api/v1/services?") && !it.ends_with("limit=1");
    server.requests().into_iter().filter(is_kept).collect()
}

/// The lists among them, without those that begin a watch.
fn service_lists(server: &ApiServer) -> Vec<String> {
    service_requests(server).into_iter().filter(|it| !it.contains("watch=true")).collect()
}

#[tokio::test]
async fn lists_are_answered_from_the_servers_cache() {
    let server = server(paging());
    fill(&server, 1200);
    let mut test = SourceTest::synced(&server).await;
    assert_eq!(test.cluster.services.len(), 1201);
    let lists = service_lists(&server);
    assert_eq!(lists.len(), 1, "{lists:?}");
    assert!(lists[0].contains("resourceVersion=0&resourceVersionMatch=NotOlderThan"), "{lists:?}");

    // Later lists are not older than what is known, and cached as well: without a limit.
    server.compact();
    server.disconnect_all();
    server.set(service("other", "10.96.0.11"));
    server.compact();
    test.until(has_service("other")).await;
    let lists = service_lists(&server);
    assert_eq!(lists.len(), 1, "{lists:?}");
    let version = lists[0].split_once("resourceVersion=").unwrap().1.split_once('&').unwrap();
    assert!(version.0.parse::<u64>().unwrap() > 1200, "{lists:?}");
    assert!(version.1.contains("NotOlderThan") && !lists[0].contains("limit"), "{lists:?}");

    // A server that does not have that version is asked for its newest state.
    let too_large = status(504, "Timeout: Too large resource version: 1204, current: 7");
    fail(&server, Resource::Services, 1, &too_large);
    server.disconnect_all();
    server.set(service("last", "10.96.0.12"));
    test.until(has_service("last")).await;
    let lists = service_lists(&server);
    assert!(lists[0].contains("NotOlderThan") && !lists[1].contains("NotOlderThan"), "{lists:?}");
    assert!(lists[1].contains("limit=500"), "{lists:?}");
}

#[tokio::test]
async fn a_long_list_is_compressed_and_survives_an_interruption() {
    let server = server(paging());
    fill(&server, 1200);
    let before = server.sent();
    let mut test = SourceTest::synced(&server).await;
    assert_eq!(test.cluster.services.len(), 1201);
    // 1,201 Services are more than 300 KB.
    let sent = server.sent() - before;
    assert!(sent < 60_000, "{sent} bytes");
    server.compact();
    for (after, name) in [(5, "a"), (10_000, "b")] {
        server.inject_fault(Resource::Services, Verb::List, 1, Fault::DisconnectAfter(after));
        server.disconnect_all();
        server.set(service(name, "10.96.0.11"));
        server.compact();
        test.until(has_service(name)).await;
        assert!(test.cluster.services.len() > 1201, "an incomplete list deletes nothing");
    }
}

#[tokio::test]
async fn a_streaming_list_that_fails_is_followed_by_one_in_pages_and_tried_again_later() {
    let failures = [
        // It never ends.
        (1, None),
        (1, Some(Fault::NoResponse)),
        (1, Some(Fault::DisconnectAfter(10))),
        // Without the field selector it is asked once more.
        (2, Some(status(400, "unknown parameter"))),
        (1, Some(status(405, "no watch"))),
        (1, Some(status(500, "not today"))),
        (1, Some(Fault::ErrorEvent { code: 500, message: "not today".into() })),
    ];
    for (times, fault) in failures {
        let watch_list = if fault.is_none() { WatchList::Ignored } else { WatchList::Supported };
        let bookmark_interval = std::time::Duration::from_millis(50);
        let server = server(Settings { watch_list, bookmark_interval, ..Settings::default() });
        if let Some(fault) = &fault {
            server.inject_fault(Resource::Services, Verb::Watch, times, fault.clone());
        }
        let mut test = SourceTest::synced(&server).await;
        assert!(test.service("web").is_some());
        let requests = service_requests(&server);
        let streaming = |it: &str| it.starts_with("/api/v1/services?") && it.contains("sendInitialEvents");
        let (failed, others) = requests.split_at(times);
        assert!(failed.iter().all(|it| streaming(it)), "{fault:?}: {requests:?}");
        assert!(others[0].contains("limit=500"), "{fault:?}: {requests:?}");
        test.receives_other(&server).await;
        // Whenever everything is listed again after that.
        test.wait_for(|_| {
            server.compact();
            server.set(service("other", "10.96.0.11"));
            server.compact();
            server.disconnect_all();
            server.requests().iter().any(|it| streaming(it))
        })
        .await;
    }
}

#[tokio::test]
async fn an_interrupted_list_hands_over_nothing() {
    for settings in [Settings::default(), paging()] {
        let verb = if settings.watch_list == WatchList::Supported { Verb::Watch } else { Verb::List };
        let server = server(settings);
        server.set(service("other", "10.96.0.11"));
        server.inject_fault(Resource::Services, verb, 2, Fault::DisconnectAfter(900));
        let test = SourceTest::synced(&server).await;
        assert_eq!(test.cluster.services.len(), 2);
    }
}

#[tokio::test]
async fn the_server_streams_lists_and_filters_them_by_kube_proxys_selectors() {
    let server = server(Settings::default());
    let mut labeled = service("other", "10.96.0.11");
    labeled["metadata"]["labels"] = serde_json::json!({"service.kubernetes.io/service-proxy-name": "mine"});
    server.set(labeled);
    server.set(service("headless", "None"));
    let mut headless = slice("headless-1", "headless", &["10.244.0.9"]);
    headless["metadata"]["labels"]["service.kubernetes.io/headless"] = "".into();
    server.set(headless);
    server.set(node("n2", "b"));

    let mut options = Options { node: Some("n1".into()), ..options(at(&server)) };
    let mut test = SourceTest::started(&options).await;
    assert_eq!(test.cluster.services.len(), 1);
    assert_eq!(test.cluster.slices().count(), 1);
    assert_eq!(test.cluster.nodes.len(), 1);
    let requests = server.requests();
    assert_eq!(requests.len(), 4, "{requests:?}");
    assert!(requests.iter().all(|it| it.contains("sendInitialEvents=true")), "{requests:?}");
    let selectors = requests.concat();
    for it in [
        "labelSelector=%21service.kubernetes.io%2Fservice-proxy-name",
        "labelSelector=%21service.kubernetes.io%2Fheadless",
        "fieldSelector=spec.clusterIP%21%3DNone",
        "fieldSelector=metadata.name%3Dn1",
    ] {
        assert!(selectors.contains(it), "{it} is not in {selectors}");
    }

    options.service_proxy_name = Some("mine".into());
    let mine = SourceTest::started(&options).await;
    assert_eq!(mine.cluster.services.len(), 1);
    assert!(mine.service("other").is_some());

    // Adding the label removes the Service, and removing it adds the Service.
    let mut web = service("web", "10.96.0.10");
    test.receives_other(&server).await;
    web["metadata"]["labels"] = serde_json::json!({"service.kubernetes.io/service-proxy-name": "mine"});
    server.set(web);
    test.until(|it| !has_service("web")(it)).await;
}

#[tokio::test]
async fn an_object_that_cannot_be_decoded_is_rejected_alone() {
    let server = server(paging());
    let mut broken = service("broken", "10.96.0.11");
    broken["spec"]["ports"] = "none".into();
    server.set(broken.clone());
    let mut test = SourceTest::synced(&server).await;
    assert_eq!(test.cluster.services.len(), 1);
    assert_eq!(test.source.take_rejected().unwrap().len(), 1);

    // In a watch, the last valid version stays active.
    let before = test.service("web").unwrap();
    broken["metadata"]["name"] = "web".into();
    server.set(broken);
    server.set(service("last", "10.96.0.12"));
    test.until(has_service("last")).await;
    assert!(Arc::ptr_eq(&before, &test.service("web").unwrap()));
    assert_eq!(test.source.take_rejected().unwrap().len(), 2);
}
