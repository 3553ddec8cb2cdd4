//! EventRecorder that are posted, and that cannot be.

use api_server::{ApiServer, Settings};
use model::ServiceName;
use source::kube::{ClientConfig, EventRecorder, WarningEvent};

fn warning(note: &str) -> WarningEvent {
    let service = ServiceName::new("shop", "web");
    WarningEvent { service, reason: "Broken", action: "Listen", note: note.into() }
}

fn events(server: &ApiServer) -> EventRecorder {
    EventRecorder::new(
        ClientConfig { server: Some(server.url()), ..ClientConfig::default() },
        &"n".repeat(200),
    )
}

#[tokio::test]
async fn an_event_stands_beside_its_service() {
    let server = ApiServer::start(Settings::default()).unwrap();
    let mut events = events(&server);
    events.post(warning("it is broken")).await;
    events.post(warning(&"ä".repeat(1_000))).await;
    let posted = server.events();
    assert_eq!(posted.len(), 2, "{posted:?}");
    let first = &posted[0];
    let regarding =
        serde_json::json!({"apiVersion": "v1", "kind": "Service", "namespace": "shop", "name": "web"});
    assert_eq!(first["regarding"], regarding);
    for (key, value) in
        [("type", "WarningEvent"), ("reason", "Broken"), ("action", "Listen"), ("note", "it is broken")]
    {
        assert_eq!(first[key], value);
    }
    // Whatever is too long is cut where the API would refuse it.
    assert_eq!(posted[1]["note"].as_str().unwrap().len(), 1_024);
    let instance = first["reportingInstance"].as_str().unwrap();
    assert!(instance.starts_with("kube-proxy-ebpf-n") && instance.len() == 128, "{instance}");
    assert_ne!(posted[0]["metadata"]["name"], posted[1]["metadata"]["name"]);
}

#[tokio::test]
async fn what_cannot_be_posted_is_forgotten() {
    let mut server = ApiServer::start(Settings { accepts_events: false, ..Settings::default() }).unwrap();
    let mut events = events(&server);
    events.post(warning("refused")).await;
    server.stop();
    events.post(warning("nobody is there")).await;
    server.resume().unwrap();
    server.configure(|it| it.accepts_events = true);
    events.post(warning("heard")).await;
    let notes: Vec<_> = server.events().iter().map(|it| it["note"].clone()).collect();
    assert_eq!(notes, ["heard"]);
}
