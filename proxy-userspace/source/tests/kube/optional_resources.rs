//! Resources that not every server has or permits: ServiceCIDRs, and Pods with our annotation, which are watched on request.

use std::time::Duration;

use api_server::{ApiServer, Fault, Resource, Settings, Verb, WatchList};
use model::cluster::ClusterState;
use serde_json::{Value, json};
use source::kube::{Options, Timing, WatchedPods};

use super::source_test::{
    ALWAYS, QUICK, SourceTest, at, fail, has_service, options, server, service, status,
};

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
    cluster.pods.values().map(|it| it.uid.to_string()).collect()
}

fn start(server: &ApiServer, pods: WatchedPods) -> SourceTest {
    SourceTest::start(&Options { pods, ..options(at(server)) })
}

fn service_cidr(name: &str, cidrs: &[&str]) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR",
        "metadata": {"name": name}, "spec": {"cidrs": cidrs},
    })
}

/// The ranges of each ServiceCIDR.
fn cidrs(cluster: &ClusterState) -> Vec<String> {
    let all = cluster.service_cidrs.iter();
    all.map(|(name, it)| format!("{name} {:?}", it.cidrs)).collect()
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
            test.until(|it| it.pods.contains_key("default/c")).await;
            server.set(pod("a", "n1", &json!({"kube-proxy-ebpf.io/socket-lb": "on"})));
            test.until(|it| !it.pods.contains_key("default/a")).await;
            server.delete(Resource::Pods, "default/c");
            test.until(|it| !it.pods.contains_key("default/c")).await;
        }
    }
}

/// The first requests may fail, as after an outage or while a server is starting: an error says nothing about what the server has.
#[tokio::test]
async fn service_cidrs_are_in_the_first_state_and_followed() {
    let (supported, rejected) = (WatchList::Supported, WatchList::Rejected);
    for (watch_list, failures) in [(supported, 0), (rejected, 0), (supported, 2), (rejected, 2)] {
        let server = server(Settings { watch_list, ..Settings::default() });
        server.set(service_cidr("kubernetes", &["10.96.0.0/16", "fd00:96::/112"]));
        fail(&server, Resource::ServiceCidrs, failures, &status(500, "starting"));
        let mut test = SourceTest::synced(&server).await;
        assert!(test.service("web").is_some());
        assert_eq!(cidrs(&test.cluster), ["kubernetes [10.96.0.0/16, fd00:96::/112]"]);
        server.set(service_cidr("more", &["10.97.0.0/16", "nowhere"]));
        test.until(|it| cidrs(it).len() == 2).await;
        assert_eq!(cidrs(&test.cluster)[1], "more [10.97.0.0/16]");
        server.delete(Resource::ServiceCidrs, "kubernetes");
        test.until(|it| cidrs(it).len() == 1).await;
    }
}

#[tokio::test]
async fn a_server_without_an_optional_resource_or_the_permission_is_followed() {
    let (no_cidrs, no_pods) = (Resource::ServiceCidrs, Resource::Pods);
    for (resource, code) in [(no_cidrs, 404), (no_cidrs, 403), (no_cidrs, 500), (no_pods, 403)] {
        let server = server(Settings::default());
        server.set(service_cidr("kubernetes", &["10.96.0.0/16"]));
        server.set(pod("a", "n1", &off()));
        let known = |cluster: &ClusterState| (cidrs(cluster).len(), uids(cluster).len());
        let refuse = || fail(&server, resource, ALWAYS, &status(code, "no"));
        refuse();
        let mut test = start(&server, WatchedPods::OfNode("n1".into()));
        test.next().await;
        assert!(test.service("web").is_some());
        assert_eq!(known(&test.cluster), if resource == no_cidrs { (0, 1) } else { (1, 0) });
        test.receives_other(&server).await;
        assert!(test.is_synced());
        assert!(test.source.resources().iter().all(|it| it.error.is_none()), "it is no outage");
        // The server was upgraded, or the role was given.
        server.clear_faults();
        test.until(|it| known(it) == (1, 1)).await;
        // What is known stays when it is gone again.
        refuse();
        server.disconnect_all();
        server.set(service("third", "10.96.0.12"));
        test.until(has_service("third")).await;
        assert_eq!(cidrs(&test.cluster), ["kubernetes [10.96.0.0/16]"]);
        assert_eq!(uids(&test.cluster), ["uid-of-a"]);
    }
}

#[tokio::test]
async fn a_server_that_does_not_answer_for_service_cidrs_delays_the_first_state_for_a_moment_only() {
    let server = server(Settings::default());
    server.inject_fault(Resource::ServiceCidrs, Verb::Watch, ALWAYS, Fault::NoResponse);
    let test = SourceTest::synced(&server).await;
    assert!(test.service("web").is_some() && test.is_synced());
}

/// As any resource: that the server has too much to do says nothing of what it has.
#[tokio::test]
async fn an_overloaded_server_is_asked_for_service_cidrs_again_when_it_says_so() {
    let server = server(Settings::default());
    server.set(service_cidr("kubernetes", &["10.96.0.0/16"]));
    let overload = Fault::Status { code: 429, message: "too many".into(), retry_after: Some(1) };
    server.inject_fault(Resource::ServiceCidrs, Verb::Watch, 1, overload);
    let timing = Timing { missing_retry: Duration::from_secs(3600), ..QUICK };
    let mut test = SourceTest::start(&Options { timing, ..options(at(&server)) });
    test.until(|it| cidrs(it).len() == 1).await;
}
