//! Pods with our annotation, which are watched on request, and which not every server permits.

use api_server::{ApiServer, Resource, Settings, WatchList};
use model::cluster::ClusterState;
use serde_json::{Value, json};
use source::kube::{Options, WatchedPods};

use super::source_test::{ALWAYS, SourceTest, at, fail, has_service, options, server, service, status};

fn pod(name: &str, node: &str, annotations: &Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "uid": format!("uid-of-{name}"), "annotations": annotations},
        "spec": {"nodeName": node, "containers": [{"name": "c", "image": "i"}]},
    })
}

fn off() -> Value {
    json!({"kube-proxy-ebpf.io/socket-lb": "off"})
}

/// The UIDs of the pods, in the order of their names.
fn uids(cluster: &ClusterState) -> Vec<String> {
    cluster.pods().values().map(|it| it.uid.to_string()).collect()
}

fn start(server: &ApiServer, pods: WatchedPods) -> SourceTest {
    SourceTest::start(&Options { pods, ..options(at(server)) })
}

#[tokio::test]
async fn the_annotated_pods_of_a_node_or_of_all_are_in_the_first_state_and_followed() {
    for watch_list in [WatchList::Supported, WatchList::Rejected] {
        for (pods, first) in [
            (WatchedPods::None, &[][..]),
            (WatchedPods::OfNode("n1".into()), &["uid-of-a"]),
            (WatchedPods::All, &["uid-of-a", "uid-of-b"]),
        ] {
            let server = server(Settings { watch_list, ..Settings::default() });
            server.set(pod("a", "n1", &off()));
            server.set(pod("b", "n2", &off()));
            server.set(pod("c", "n1", &json!({"example.com/other": "off"})));
            let mut test = start(&server, pods.clone());
            test.next().await;
            assert_eq!(uids(&test.cluster), first, "{pods:?}");
            if pods == WatchedPods::None {
                assert!(server.requests().iter().all(|it| !it.contains("/pods")), "they are not asked for");
                continue;
            }
            // An annotation is added, changed to a default, and removed with its pod.
            server.set(pod("c", "n1", &off()));
            test.until(|it| it.pods().contains_key("default/c")).await;
            server.set(pod("a", "n1", &json!({"kube-proxy-ebpf.io/socket-lb": "on"})));
            test.until(|it| !it.pods().contains_key("default/a")).await;
            server.delete(Resource::Pods, "default/c");
            test.until(|it| !it.pods().contains_key("default/c")).await;
        }
    }
}

#[tokio::test]
async fn a_server_that_permits_no_pods_is_followed_without_their_annotations() {
    let server = server(Settings::default());
    server.set(pod("a", "n1", &off()));
    let forbid = || fail(&server, Resource::Pods, ALWAYS, &status(403, "no"));
    forbid();
    let mut test = start(&server, WatchedPods::OfNode("n1".into()));
    test.next().await;
    assert!(test.service("web").is_some() && uids(&test.cluster).is_empty());
    server.set(service("other", "10.96.0.11"));
    test.until(has_service("other")).await;
    assert!(test.health.resources().iter().all(|it| it.error.is_none()), "it is no outage");
    // The role was given.
    server.clear_faults();
    test.until(|it| uids(it) == ["uid-of-a"]).await;
    // And was removed: what is known stays.
    forbid();
    server.disconnect_all();
    server.set(service("third", "10.96.0.12"));
    test.until(has_service("third")).await;
    assert_eq!(uids(&test.cluster), ["uid-of-a"]);
}
