//! Posting of Events.

use api_server::{ApiServer, Settings};
use model::ServiceName;
use source::kube::{EventRecorder, KubeSource, ServiceEvent};

use super::{
    credential_plugin::Plugin,
    source_test::{SourceTest, at, options},
};

fn warning(note: &str) -> ServiceEvent {
    ServiceEvent {
        service: ServiceName::new("shop", "web"),
        is_warning: true,
        reason: "Broken",
        action: "Listen",
        note: note.into(),
        is_of_cluster: false,
    }
}

/// The source must live as long as its recorder.
fn recorder(server: &ApiServer, node: &str) -> (KubeSource, EventRecorder) {
    let source = KubeSource::start(&options(at(server))).unwrap();
    let recorder = source.event_recorder(node);
    (source, recorder)
}

#[tokio::test]
async fn an_event_refers_to_its_service() {
    let server = ApiServer::start(Settings::default()).unwrap();
    let (_source, mut recorder) = recorder(&server, &"n".repeat(200));
    recorder.post(warning("it is broken")).await;
    recorder.post(warning(&"ä".repeat(1_000))).await;
    let posted = server.events();
    assert_eq!(posted.len(), 2, "{posted:?}");
    let first = &posted[0];
    let regarding =
        serde_json::json!({"apiVersion": "v1", "kind": "Service", "namespace": "shop", "name": "web"});
    assert_eq!(first["regarding"], regarding);
    for (key, value) in
        [("type", "Warning"), ("reason", "Broken"), ("action", "Listen"), ("note", "it is broken")]
    {
        assert_eq!(first[key], value);
    }
    // Longer fields, which the API would reject, are truncated.
    assert_eq!(posted[1]["note"].as_str().unwrap().len(), 1_024);
    let instance = first["reportingInstance"].as_str().unwrap();
    assert!(instance.starts_with("kube-proxy-ebpf-n") && instance.len() == 128, "{instance}");
    assert_ne!(posted[0]["metadata"]["name"], posted[1]["metadata"]["name"]);
}

#[tokio::test]
async fn what_every_node_posts_is_stored_once() {
    let server = ApiServer::start(Settings::default()).unwrap();
    let event = |note| ServiceEvent { is_of_cluster: true, is_warning: false, ..warning(note) };
    for node in ["n1", "n2"] {
        let (_source, mut recorder) = recorder(&server, node);
        recorder.post(event("for all")).await;
        recorder.post(event("another")).await;
    }
    let posted = server.events();
    let fields: Vec<_> =
        posted.iter().map(|it| [&it["note"], &it["type"], &it["reportingInstance"]]).collect();
    let instance = "kube-proxy-ebpf-n1";
    assert_eq!(fields, [["for all", "Normal", instance], ["another", "Normal", instance]]);
}

#[tokio::test]
async fn events_that_cannot_be_posted_are_dropped() {
    let mut server = ApiServer::start(Settings { accepts_events: false, ..Settings::default() }).unwrap();
    let (_source, mut recorder) = recorder(&server, "n1");
    recorder.post(warning("forbidden")).await;
    server.stop();
    recorder.post(warning("not reachable")).await;
    server.resume().unwrap();
    server.configure(|it| it.accepts_events = true);
    recorder.post(warning("accepted")).await;
    let notes: Vec<_> = server.events().iter().map(|it| it["note"].clone()).collect();
    assert_eq!(notes, ["accepted"]);
}

#[tokio::test]
async fn events_are_posted_with_the_credentials_of_the_watches() {
    let plugin = Plugin::new("1 hour");
    let server = ApiServer::start(Settings { token: Some("first".into()), ..Settings::default() }).unwrap();
    let test = SourceTest::started(&options(plugin.access(&server))).await;
    let mut recorder = test.source.event_recorder("n1");
    for note in ["one", "two", "three"] {
        recorder.post(warning(note)).await;
    }
    assert_eq!((server.events().len(), plugin.runs()), (3, 1));
}
