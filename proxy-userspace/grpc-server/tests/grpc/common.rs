//! A brain that serves at a unix socket, and its states.

use std::{net::Ipv4Addr, num::NonZeroU16, path::PathBuf, sync::Arc, time::Duration};

use grpc_server::{Explain, Listener, ServeError, ServedData};
use model::{
    Protocol, ServiceName,
    cluster::ClusterState,
    state::{
        Endpoint, EndpointKey, EndpointPort, NodeState, PerFamily, Scopes, Service, ServicePort,
        ServiceState, TargetPort,
    },
};
use proxy_contract::{Target, client::Client};
use publish::{
    NodeRegistry, NodeStates, Publisher, SingleNode, Subscription,
    cluster::{ClusterPublisher, ClusterSnapshot},
    upstream::Upstream,
};
use tokio::{
    sync::oneshot,
    task::JoinHandle,
    time::{sleep, timeout},
};
use tonic::transport::{Channel, Endpoint as TonicEndpoint};

use crate::explanations::echo;

/// Only a hang takes as long.
const LIMIT: Duration = Duration::from_secs(120);

/// A Service with one port, and endpoints with a key and the last byte of their address; keys of anonymous ones begin
/// with `@`.
pub(crate) fn service(path: &str, endpoints: &[(&str, u8)]) -> (ServiceName, Arc<ServiceState>) {
    let (namespace, name) = path.split_once('/').unwrap();
    let name = ServiceName::new(namespace, name);
    let number = |port| NonZeroU16::new(port).unwrap();
    // A cluster IP of its own: FNV-1a of the name.
    let hash =
        path.bytes().fold(0x811c_9dc5_u32, |hash, it| (hash ^ u32::from(it)).wrapping_mul(0x0100_0193));
    let service = Service {
        cluster_ips: vec![Ipv4Addr::from(0x6400_0000 | hash >> 8).into()],
        ports: vec![ServicePort {
            name: "http".into(),
            target_port: TargetPort::Number(number(8080)),
            has_any_endpoint: PerFamily { v4: true, v6: false },
            ..ServicePort::new(Protocol::Tcp, number(80))
        }],
        ..Service::new(name.clone())
    };
    let endpoint = |(key, last): &(&str, u8)| Endpoint {
        v4: Some(Ipv4Addr::new(10, 1, 0, *last)),
        local: *last < 100,
        ports: [EndpointPort {
            index: 0,
            port: number(8080),
            scopes: Scopes { internal: true, external: true, cluster: true },
        }]
        .into(),
        ..Endpoint::new(match key.strip_prefix('@') {
            Some(key) => EndpointKey::Anonymous(key.into()),
            None => EndpointKey::Pod((*key).into()),
        })
    };
    let mut endpoints: Vec<_> = endpoints.iter().map(endpoint).collect();
    endpoints.sort_by(|a, b| a.key.cmp(&b.key));
    (name, Arc::new(ServiceState::new(service, endpoints)))
}

pub(crate) fn state(services: impl IntoIterator<Item = (ServiceName, Arc<ServiceState>)>) -> NodeState {
    NodeState { services: services.into_iter().collect(), ..NodeState::default() }
}

/// The result of `work`, which ends unless something hangs.
pub(crate) async fn in_time<T>(work: impl Future<Output = T>) -> T {
    timeout(LIMIT, work).await.expect("it ends in time")
}

pub(crate) async fn until(holds: impl Fn() -> bool) {
    in_time(async {
        while !holds() {
            sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
}

/// Whether `work` does not end within a number of milliseconds.
pub(crate) async fn is_pending<T>(millis: u64, work: impl Future<Output = T>) -> bool {
    timeout(Duration::from_millis(millis), work).await.is_err()
}

/// The result of `check`, which gets the states that `upstream` publishes while it follows its brain.
pub(crate) async fn while_following<T>(upstream: Upstream, check: impl AsyncFnOnce(Subscription) -> T) -> T {
    tokio::select! {
        it = in_time(check(upstream.subscribe())) => it,
        () = upstream.run() => panic!("it never returns"),
    }
}

/// Runs an async test of a property, for each of its inputs.
pub(crate) fn block_on<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
}

/// A brain that serves at the socket of a folder.
pub(crate) struct Brain {
    pub(crate) publisher: Publisher,
    pub(crate) cluster: ClusterPublisher,
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), ServeError>>,
}

impl Brain {
    /// Serves only the node `n1`, at a new socket.
    pub(crate) async fn new() -> (Folder, Self) {
        let folder = Folder::new();
        let brain = Self::start(&folder).await;
        (folder, brain)
    }

    /// Serves only the node `n1`, whose state this is, at a new socket.
    pub(crate) async fn serving(state: NodeState) -> (Folder, Self) {
        let (folder, brain) = Self::new().await;
        brain.publisher.publish(state);
        (folder, brain)
    }

    /// Serves only the node `n1`.
    pub(crate) async fn start(folder: &Folder) -> Self {
        let publisher = Publisher::new("n1");
        let nodes = SingleNode::new("n1", publisher.subscribe());
        Self::with(folder, publisher, nodes).await
    }

    /// Serves the node `n1` and any other, at a new socket.
    pub(crate) async fn any_node() -> (Folder, Self, NodeRegistry) {
        let folder = Folder::new();
        let publisher = Publisher::new("n1");
        let ready = publisher.for_node("never");
        let nodes = NodeRegistry::new(publisher);
        let brain = Self::with(&folder, ready, nodes.requests()).await;
        (folder, brain, nodes)
    }

    pub(crate) async fn with(folder: &Folder, publisher: Publisher, nodes: impl NodeStates) -> Self {
        let listener = Listener::bind(&Target::Unix(folder.socket())).await.unwrap();
        let cluster = ClusterPublisher::new(None);
        let served = ServedData::new(nodes, &cluster);
        let (stop, stopped) = oneshot::channel();
        let mut states = publisher.subscribe();
        let task = tokio::spawn(async move {
            let ready = async { drop(states.next().await) };
            let stopped = async { drop(stopped.await) };
            grpc_server::serve(listener, served, ready, stopped).await
        });
        Self { publisher, cluster, stop, task }
    }

    /// Publishes a state of these Services.
    pub(crate) fn publish(&self, services: impl IntoIterator<Item = (ServiceName, Arc<ServiceState>)>) {
        self.publisher.publish(state(services));
    }

    pub(crate) fn publish_cluster(&self, state: impl Into<Arc<ClusterState>>) {
        self.cluster.publish(ClusterSnapshot::State(state.into()));
    }

    /// Replaces it by another brain at the same socket.
    pub(crate) async fn restart(self, folder: &Folder) -> Self {
        self.stop().await;
        Self::start(folder).await
    }

    /// Stops as at SIGTERM: the publishers first.
    pub(crate) async fn stop(self) {
        drop((self.publisher, self.cluster));
        drop(self.stop);
        self.task.await.unwrap().unwrap();
    }
}

/// Serves these nodes, and an empty cluster state, until the runtime ends.
pub(crate) fn serve(listener: Listener, nodes: impl NodeStates) {
    serve_explained(listener, nodes, Arc::new(echo));
}

/// Serves these nodes, an empty cluster state and explanations, until the runtime ends.
pub(crate) fn serve_explained(listener: Listener, nodes: impl NodeStates, explainer: Explain) {
    let cluster = ClusterPublisher::new(None);
    cluster.publish(ClusterSnapshot::State(Arc::default()));
    let served = ServedData { explainer: Some(explainer), ..ServedData::new(nodes, &cluster) };
    tokio::spawn(async move {
        grpc_server::serve(listener, served, async {}, std::future::pending()).await.unwrap();
        drop(cluster);
    });
}

pub(crate) struct Folder(tempfile::TempDir);

impl Folder {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.0.path().join("proxy.sock")
    }

    /// A client of the brain at the socket, for the node `n1`.
    pub(crate) fn client(&self) -> Client {
        Client::new(Target::Unix(self.socket()).into(), "n1")
    }

    pub(crate) fn upstream(&self) -> Upstream {
        Upstream::new(self.client(), "n1")
    }
}

pub(crate) async fn channel(folder: &Folder) -> Channel {
    let endpoint = TonicEndpoint::from_shared(format!("unix://{}", folder.socket().display())).unwrap();
    // A small window, so that the server soon waits for a client that does not read.
    endpoint.initial_stream_window_size(65_535).connect().await.unwrap()
}
