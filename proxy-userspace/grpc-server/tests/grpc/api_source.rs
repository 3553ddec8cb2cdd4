//! `--source api:TARGET`: a brain that follows another one, ours or one that behaves like KPNG's.

use std::sync::{Arc, atomic::Ordering};

use brain::{Options, node_state};
use model::RequestedMetadata;
use proxy_contract::{
    globalv1::{
        self, GlobalWatchReq,
        sets_server::{Sets, SetsServer},
    },
    localv1::{self, OpItem, Set},
};
use publish::cluster::ClusterSnapshot;
use source::api::{ApiSource, Update};
use tokio::sync::watch;
use tonic::{Request, Response, Status, Streaming, transport::Server};

use crate::{
    common::{Brain, Folder, in_time, is_pending, service, state},
    scripted_brain::{Items, ScriptedBrain, delete, serve_at, set},
};

fn source(folder: &Folder) -> ApiSource {
    ApiSource::start(folder.client(), RequestedMetadata::everything())
}

/// Waits for an expected update.
async fn until(updates: &mut watch::Receiver<Option<Update>>, expected: impl Fn(&Update) -> bool) {
    let is_expected = |it: &Option<Update>| it.as_ref().is_some_and(&expected);
    in_time(updates.wait_for(is_expected)).await.unwrap();
}

#[tokio::test]
async fn without_a_cluster_state_the_node_state_is_followed() {
    let (folder, brain) = Brain::new().await;
    brain.cluster.publish(ClusterSnapshot::Unavailable);
    let expected = state([service("ns/a", &[("p", 1), ("@x", 2)])]);
    brain.publisher.publish(expected.clone());
    let source = source(&folder);
    until(&mut source.updates.clone(), |update| matches!(update, Update::Node(it) if *it == expected)).await;
}

#[tonic::async_trait]
impl Sets for ScriptedBrain {
    type WatchStream = Items;

    async fn watch(&self, request: Request<Streaming<GlobalWatchReq>>) -> Result<Response<Items>, Status> {
        Ok(self.start(request.into_inner(), |_| true))
    }
}

fn ips(v4: &str) -> Option<localv1::IpSet> {
    Some(localv1::IpSet::of([v4]))
}

fn kpng_service() -> localv1::Service {
    localv1::Service {
        namespace: "ns".into(),
        name: "web".into(),
        r#type: "ClusterIP".into(),
        ips: Some(localv1::ServiceIPs {
            cluster_ips: ips("10.96.0.1"),
            external_ips: Some(localv1::IpSet::default()),
            ..Default::default()
        }),
        ports: vec![localv1::PortMapping {
            protocol: localv1::Protocol::Tcp.into(),
            port: 80,
            target_port: 8080,
            ..Default::default()
        }],
        ..Default::default()
    }
}

fn kpng_endpoint(address: &str) -> localv1::Endpoint {
    let port_overrides = vec![localv1::PortName { port: 8080, ..Default::default() }];
    let scopes = Some(localv1::EndpointScopes { internal: true, external: true, cluster: None });
    localv1::Endpoint { ips: ips(address), port_overrides, scopes, ..Default::default() }
}

/// Two paths per endpoint; in the second change set another pod replaces the first one.
fn cluster_change_sets() -> [Vec<OpItem>; 2] {
    let info = |address: &str, pod: &str| globalv1::EndpointInfo {
        hash: 7,
        namespace: "ns".into(),
        source_name: "web-x7k2p".into(),
        service_name: "web".into(),
        endpoint: Some(kpng_endpoint(address)),
        conditions: Some(globalv1::EndpointConditions { ready: true, ..Default::default() }),
        pod_name: pod.into(),
        ..Default::default()
    };
    let service = globalv1::ServiceInfo { hash: 1, service: Some(kpng_service()), ..Default::default() };
    let endpoints = Set::GlobalEndpointInfos;
    let first = [
        set(Set::GlobalServiceInfos, "ns|web||", &service),
        set(endpoints, "ns|web|web-x7k2p|a1", &info("10.1.0.1", "p")),
        set(endpoints, "ns||web-x7k2p|a1", &info("10.1.0.1", "p")),
    ];
    let second = [
        set(endpoints, "ns|web|web-x7k2p|b2", &info("10.1.0.2", "q")),
        delete(endpoints, "ns|web|web-x7k2p|a1"),
        set(endpoints, "ns||web-x7k2p|b2", &info("10.1.0.2", "q")),
        delete(endpoints, "ns||web-x7k2p|a1"),
    ];
    [first.into(), second.into()]
}

fn node_change_sets() -> [Vec<OpItem>; 2] {
    let first = [
        set(Set::ServicesSet, "ns/web", &kpng_service()),
        set(Set::EndpointsSet, "ns/web/p", &kpng_endpoint("10.1.0.1")),
    ];
    let second = [
        set(Set::EndpointsSet, "ns/web/q", &kpng_endpoint("10.1.0.2")),
        delete(Set::EndpointsSet, "ns/web/p"),
    ];
    [first.into(), second.into()]
}

/// The targets of the Service.
fn addresses(update: &Update) -> Vec<String> {
    let state = match update {
        Update::Cluster(cluster) => node_state(cluster, "n1", &Options::default()),
        Update::Node(state) => state.clone(),
    };
    let services = state.services.values();
    let of = |it: &Arc<model::state::ServiceState>| {
        let targets = it.targets(0, model::Family::V4, model::state::Scope::Internal);
        targets.map(|it| it.to_string()).collect::<Vec<_>>()
    };
    services.flat_map(of).collect()
}

#[tokio::test]
async fn a_brain_that_behaves_like_kpngs_is_followed() {
    for is_cluster in [true, false] {
        let folder = Folder::new();
        let brain = ScriptedBrain::new(if is_cluster { cluster_change_sets() } else { node_change_sets() });
        let (available, streams) = (Arc::clone(&brain.available), Arc::clone(&brain.streams));
        available.send_replace(0);
        match is_cluster {
            true => serve_at(&folder.socket(), Server::builder().add_service(SetsServer::new(brain))),
            false => brain.serve(&folder.socket()),
        }
        let source = source(&folder);
        let mut updates = source.updates.clone();
        // It does not sync its empty cluster: there is no state, and the client sends no second request.
        assert!(is_pending(200, updates.changed()).await);
        available.send_replace(1);
        until(&mut updates, |it| addresses(it) == ["10.1.0.1:8080"]).await;
        available.send_replace(2);
        until(&mut updates, |it| addresses(it) == ["10.1.0.2:8080"]).await;
        assert!(updates.borrow().as_ref().is_some_and(|it| matches!(it, Update::Cluster(_)) == is_cluster));
        assert_eq!(streams.load(Ordering::SeqCst), 1);
    }
}
