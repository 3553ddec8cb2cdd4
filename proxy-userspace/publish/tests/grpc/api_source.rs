//! `--source api:TARGET`: a brain that follows another one, ours or one that keeps KPNG's habits.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use brain::{Options, node_state};
use model::cluster::ClusterState;
use proxy_contract::{
    Target,
    client::Client,
    globalv1::{self, GlobalWatchReq},
    localv1::{
        self, EmptyOp, OpItem, Ref, Set, Value, WatchReq,
        op_item::Op,
        sets_server::{Sets, SetsServer},
    },
};
use publish::cluster::ClusterSnapshot;
use source::api::{ApiSource, Update};
use tokio::{
    net::UnixListener,
    sync::{mpsc, watch},
    task::JoinHandle,
    time::timeout,
};
use tokio_stream::{
    Stream,
    wrappers::{ReceiverStream, UnixListenerStream},
};
use tonic::{Request, Response, Status, Streaming};

use crate::{
    common::{Brain, Folder, LIMIT, service as service_state, state},
    global::{service, slice},
};

fn source(folder: &Folder) -> ApiSource {
    ApiSource::start(Client::new(Target::Unix(folder.socket()), "n1"))
}

/// What is said when it is as expected.
async fn until(said: &mut watch::Receiver<Option<Update>>, expected: impl Fn(&Update) -> bool) {
    let is_so = |it: &Option<Update>| it.as_ref().is_some_and(&expected);
    timeout(LIMIT, said.wait_for(is_so)).await.expect("it is said in the end").unwrap();
}

fn facts(address: &str) -> Arc<ClusterState> {
    let mut facts = ClusterState::default();
    facts.set_service(service("web"));
    facts.set_slice(slice("web-1", "web", &[address]));
    facts.into()
}

#[tokio::test]
async fn the_facts_of_another_brain_are_followed_and_stay_while_it_is_away() {
    let folder = Folder::new();
    let brain = Brain::start(&folder.socket()).await;
    brain.cluster.publish(ClusterSnapshot::State(facts("10.1.0.1")));
    let source = source(&folder);
    let mut said = source.updates();
    let says = |expected: Arc<ClusterState>| {
        move |said: &Update| match said {
            Update::Cluster(it) => {
                node_state(it, "n1", &Options::default()) == node_state(&expected, "n1", &Options::default())
            }
            Update::Node(_) => false,
        }
    };
    until(&mut said, says(facts("10.1.0.1"))).await;
    said.mark_unchanged();
    brain.stop().await;
    let brain = Brain::start(&folder.socket()).await;
    brain.cluster.publish(ClusterSnapshot::State(facts("10.1.0.2")));
    timeout(LIMIT, said.changed()).await.expect("it is followed again").unwrap();
    // Nothing was said in between: the last word stood.
    assert!(says(facts("10.1.0.2"))(said.borrow().as_ref().unwrap()));
    brain.stop().await;
}

#[tokio::test]
async fn without_facts_the_state_of_the_node_is_followed_as_it_is() {
    let folder = Folder::new();
    let brain = Brain::start(&folder.socket()).await;
    brain.cluster.publish(ClusterSnapshot::Unavailable);
    let expected = state([service_state("ns/a", &[("p", 1), ("@x", 2)])]);
    brain.publisher.publish(expected.clone());
    let source = source(&folder);
    until(&mut source.updates(), |said| matches!(said, Update::Node(it) if *it == expected)).await;
    brain.stop().await;
}

type Items = Pin<Box<dyn Stream<Item = Result<OpItem, Status>> + Send>>;

/// A brain with KPNG's habits: it resets once per stream, never syncs an empty difference, adds nothing of ours, and
/// passes over what it does not know.
#[derive(Clone)]
struct Kpng {
    /// The change sets, each of which is said when it is there.
    waves: watch::Receiver<usize>,
    says: fn(usize) -> Vec<OpItem>,
    streams: Arc<AtomicUsize>,
}

impl Kpng {
    async fn converse<R: Send + 'static>(&self, mut requests: Streaming<R>) -> Items {
        let (sender, items) = mpsc::channel(4);
        let Self { mut waves, says, streams } = self.clone();
        streams.fetch_add(1, Ordering::SeqCst);
        tokio::spawn(async move {
            let mut said = 0;
            let mut is_first = true;
            while let Ok(Some(_)) = requests.message().await {
                if std::mem::take(&mut is_first) {
                    let reset = OpItem { op: Some(Op::Reset(EmptyOp::default())) };
                    let _ = sender.send(Ok(reset)).await;
                }
                let Ok(wave) = waves.wait_for(|it| *it > said).await.map(|it| *it) else { return };
                for item in (said..wave).flat_map(says) {
                    let _ = sender.send(Ok(item)).await;
                }
                said = wave;
                let _ = sender.send(Ok(OpItem { op: Some(Op::Sync(EmptyOp::default())) })).await;
            }
        });
        Box::pin(ReceiverStream::new(items))
    }
}

#[tonic::async_trait]
impl Sets for Kpng {
    type WatchStream = Items;

    async fn watch(&self, request: Request<Streaming<WatchReq>>) -> Result<Response<Items>, Status> {
        Ok(Response::new(self.converse(request.into_inner()).await))
    }
}

#[tonic::async_trait]
impl globalv1::sets_server::Sets for Kpng {
    type WatchStream = Items;

    async fn watch(&self, request: Request<Streaming<GlobalWatchReq>>) -> Result<Response<Items>, Status> {
        Ok(Response::new(self.converse(request.into_inner()).await))
    }
}

fn set(set: Set, path: &str, message: &impl prost::Message) -> OpItem {
    let reference = Ref { set: set.into(), path: path.into() };
    OpItem { op: Some(Op::Set(Value { r#ref: Some(reference), bytes: message.encode_to_vec() })) }
}

fn delete(set: Set, path: &str) -> OpItem {
    OpItem { op: Some(Op::Delete(Ref { set: set.into(), path: path.into() })) }
}

fn ips(v4: &str) -> Option<localv1::IpSet> {
    Some(localv1::IpSet { v4: vec![v4.into()], v6: Vec::new() })
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

/// A dual path for each endpoint, and a pod in the second change set that replaces the first.
fn global_waves(wave: usize) -> Vec<OpItem> {
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
    let paths = ["ns|web|web-x7k2p|", "ns||web-x7k2p|"];
    match wave {
        0 => {
            let service =
                globalv1::ServiceInfo { hash: 1, service: Some(kpng_service()), ..Default::default() };
            let mut items = vec![set(Set::GlobalServiceInfos, "ns|web||", &service)];
            items.extend(
                paths.map(|it| set(Set::GlobalEndpointInfos, &format!("{it}a1"), &info("10.1.0.1", "p"))),
            );
            items
        }
        _ => paths
            .into_iter()
            .flat_map(|it| {
                [
                    set(Set::GlobalEndpointInfos, &format!("{it}b2"), &info("10.1.0.2", "q")),
                    delete(Set::GlobalEndpointInfos, &format!("{it}a1")),
                ]
            })
            .collect(),
    }
}

fn local_waves(wave: usize) -> Vec<OpItem> {
    match wave {
        0 => vec![
            set(Set::ServicesSet, "ns/web", &kpng_service()),
            set(Set::EndpointsSet, "ns/web/p", &kpng_endpoint("10.1.0.1")),
        ],
        _ => vec![
            set(Set::EndpointsSet, "ns/web/q", &kpng_endpoint("10.1.0.2")),
            delete(Set::EndpointsSet, "ns/web/p"),
        ],
    }
}

/// Serves the view of `is_global` alone.
fn play(folder: &Folder, is_global: bool) -> (watch::Sender<usize>, Arc<AtomicUsize>, JoinHandle<()>) {
    let (sender, waves) = watch::channel(0);
    let streams = Arc::new(AtomicUsize::new(0));
    let says = if is_global { global_waves } else { local_waves };
    let kpng = Kpng { waves, says, streams: Arc::clone(&streams) };
    let incoming = UnixListenerStream::new(UnixListener::bind(folder.socket()).unwrap());
    let mut server = tonic::transport::Server::builder();
    let router = match is_global {
        true => server.add_service(globalv1::sets_server::SetsServer::new(kpng)),
        false => server.add_service(SetsServer::new(kpng)),
    };
    let task = tokio::spawn(async move { router.serve_with_incoming(incoming).await.unwrap() });
    (sender, streams, task)
}

/// The addresses that the Service leads to.
fn addresses(said: &Update) -> Vec<String> {
    let state = match said {
        Update::Cluster(facts) => node_state(facts, "n1", &Options::default()),
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
async fn a_brain_with_kpngs_habits_is_followed() {
    for is_global in [true, false] {
        let folder = Folder::new();
        let (waves, streams, server) = play(&folder, is_global);
        let source = source(&folder);
        let mut said = source.updates();
        // Its cluster is empty, and it says nothing of that: there is no state, and nobody asks twice.
        assert!(timeout(std::time::Duration::from_millis(200), said.changed()).await.is_err());
        waves.send_replace(1);
        until(&mut said, |it| addresses(it) == ["10.1.0.1:8080"]).await;
        waves.send_replace(2);
        until(&mut said, |it| addresses(it) == ["10.1.0.2:8080"]).await;
        assert!(said.borrow().as_ref().is_some_and(|it| matches!(it, Update::Cluster(_)) == is_global));
        assert_eq!(streams.load(Ordering::SeqCst), 1);
        server.abort();
    }
}
