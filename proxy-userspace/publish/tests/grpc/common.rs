//! A brain to talk to, states to talk about, and a peer that keeps KPNG's rules.

use std::{
    collections::BTreeMap,
    net::Ipv4Addr,
    num::NonZeroU16,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use model::{
    Protocol, ServiceName,
    state::{
        Endpoint, EndpointKey, EndpointPort, NodeState, PerFamily, Scopes, Service, ServicePort,
        ServiceState, TargetPort,
    },
};
use prost::Message as _;
use proxy_contract::{
    Target,
    localv1::{self, OpItem, Ref, Value, WatchReq, op_item::Op, sets_client::SetsClient},
};
use publish::{
    Publisher, Subscription,
    cluster::ClusterPublisher,
    grpc::{self, Listener, NodeStates, ServedData, SingleNode},
};
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinHandle,
    time::timeout,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Streaming, transport};

pub(crate) const LIMIT: Duration = Duration::from_secs(10);

/// A Service with one port, and endpoints by their keys: `@` begins an anonymous one.
pub(crate) fn service(path: &str, endpoints: &[(&str, u8)]) -> (ServiceName, Arc<ServiceState>) {
    let (namespace, name) = path.split_once('/').unwrap();
    let name = ServiceName::new(namespace, name);
    let number = |port| NonZeroU16::new(port).unwrap();
    let service = Service {
        cluster_ips: vec![Ipv4Addr::new(10, 96, 0, 1).into()],
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
        ports: vec![EndpointPort {
            index: 0,
            port: number(8080),
            scopes: Scopes { internal: true, external: true, cluster: true },
        }],
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

/// A brain that serves at a socket.
pub(crate) struct Brain {
    pub(crate) publisher: Publisher,
    pub(crate) cluster: ClusterPublisher,
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), grpc::ServeError>>,
}

impl Brain {
    /// Of the node `n1` alone.
    pub(crate) async fn start(path: &Path) -> Self {
        let publisher = Publisher::new("n1");
        let nodes = SingleNode::new("n1", publisher.subscribe());
        Self::with(path, publisher, nodes).await
    }

    pub(crate) async fn with(path: &Path, publisher: Publisher, nodes: impl NodeStates) -> Self {
        let listener = Listener::bind(&Target::Unix(path.into())).await.unwrap();
        let cluster = ClusterPublisher::new(None);
        let served = ServedData { nodes: Arc::new(nodes), cluster: cluster.subscribe() };
        let (stop, stopped) = oneshot::channel();
        let mut first: Subscription = publisher.subscribe();
        let task = tokio::spawn(async move {
            let ready = async { drop(first.next().await) };
            let stopped = async { drop(stopped.await) };
            grpc::serve(listener, served, ready, stopped).await
        });
        Self { publisher, cluster, stop, task }
    }

    /// Ends it as SIGTERM does: the source first.
    pub(crate) async fn stop(self) {
        drop((self.publisher, self.cluster));
        drop(self.stop);
        self.task.await.unwrap().unwrap();
    }
}

pub(crate) struct Folder(tempfile::TempDir);

impl Folder {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.0.path().join("proxy.sock")
    }
}

pub(crate) async fn channel(path: &Path) -> transport::Channel {
    let endpoint = transport::Endpoint::from_shared(format!("unix://{}", path.display())).unwrap();
    // What may be on its way, so that a client that does not read is soon waited for.
    endpoint.initial_stream_window_size(65_535).connect().await.unwrap()
}

/// A client written as KPNG's: it panics where they crash.
pub(crate) struct Peer {
    pub(crate) requests: mpsc::Sender<WatchReq>,
    pub(crate) items: Streaming<OpItem>,
    /// What it was told, by path.
    pub(crate) services: BTreeMap<String, localv1::Service>,
    pub(crate) endpoints: BTreeMap<String, localv1::Endpoint>,
    /// Told of only if they are wanted.
    pub(crate) nodes: BTreeMap<String, localv1::Node>,
}

impl Peer {
    /// Asks for a node, and is reset.
    pub(crate) async fn start(path: &Path, node: &str) -> Self {
        let mut peer = Self::silent(path).await;
        peer.ask(node).await;
        assert_eq!(peer.item().await, Op::Reset(localv1::EmptyOp::default()));
        peer
    }

    pub(crate) async fn silent(path: &Path) -> Self {
        Self::over(channel(path).await).await
    }

    pub(crate) async fn over(channel: transport::Channel) -> Self {
        let (requests, outgoing) = mpsc::channel(8);
        let items = SetsClient::new(channel).watch(ReceiverStream::new(outgoing)).await.unwrap();
        let (services, endpoints, nodes) = Default::default();
        Self { requests, items: items.into_inner(), services, endpoints, nodes }
    }

    pub(crate) async fn ask(&self, node: &str) {
        self.requests.send(WatchReq { node_name: node.into(), ..Default::default() }).await.unwrap();
    }

    pub(crate) async fn item(&mut self) -> Op {
        timeout(LIMIT, self.items.message()).await.unwrap().unwrap().unwrap().op.unwrap()
    }

    /// Nothing comes for a while.
    pub(crate) async fn hears_nothing(&mut self) {
        let heard = timeout(Duration::from_millis(150), self.items.message()).await;
        assert!(heard.is_err(), "{heard:?}");
    }

    /// The stream ends, and with OK.
    pub(crate) async fn is_at_the_end(&mut self) {
        assert_eq!(timeout(LIMIT, self.items.message()).await.unwrap().unwrap(), None);
    }

    /// Takes a change set in and gives back its operations in words: `+s` a Service set, `-e` an endpoint deleted.
    pub(crate) async fn change_set(&mut self) -> Vec<String> {
        let mut words = Vec::new();
        loop {
            match self.item().await {
                Op::Sync(_) => break,
                Op::Reset(_) => panic!("a second reset"),
                Op::Set(Value { r#ref: Some(Ref { set, path }), bytes }) => {
                    words.push(format!("+{} {path}", letter(set)));
                    if set == i32::from(localv1::Set::NodesSet) {
                        let it = localv1::Node::decode(bytes.as_slice()).unwrap();
                        assert_eq!(path, it.name);
                        self.nodes.insert(path, it);
                    } else if set == i32::from(localv1::Set::ServicesSet) {
                        let it = localv1::Service::decode(bytes.as_slice()).unwrap();
                        let ips = it.ips.as_ref().expect("Service.IPs is present");
                        assert!(ips.cluster_ips.is_some(), "ClusterIPs is present");
                        assert!(ips.external_ips.is_some(), "ExternalIPs is present");
                        assert_eq!(path, format!("{}/{}", it.namespace, it.name));
                        self.services.insert(path, it);
                    } else {
                        let it = localv1::Endpoint::decode(bytes.as_slice()).unwrap();
                        assert!(it.ips.is_some(), "Endpoint.IPs is present");
                        assert!(it.scopes.is_some(), "Endpoint.Scopes is present");
                        let service = path.rsplit_once('/').unwrap().0;
                        assert!(self.services.contains_key(service), "{path} is an orphan");
                        self.endpoints.insert(path, it);
                    }
                }
                Op::Delete(Ref { set, path }) => {
                    words.push(format!("-{} {path}", letter(set)));
                    if set == i32::from(localv1::Set::NodesSet) {
                        self.nodes.remove(&path).expect("only what is there is deleted");
                    } else if set == i32::from(localv1::Set::ServicesSet) {
                        self.services.remove(&path).expect("only what is there is deleted");
                        let below = format!("{path}/");
                        let orphan = self.endpoints.range(below.clone()..).next();
                        assert!(
                            !orphan.is_some_and(|(it, _)| it.starts_with(&below)),
                            "{orphan:?} is an orphan"
                        );
                    } else {
                        self.endpoints.remove(&path).expect("only what is there is deleted");
                    }
                }
                other @ Op::Set(_) => panic!("{other:?}"),
            }
        }
        words
    }
}

fn letter(set: i32) -> char {
    match localv1::Set::try_from(set) {
        Ok(localv1::Set::ServicesSet) => 's',
        Ok(localv1::Set::EndpointsSet) => 'e',
        Ok(localv1::Set::NodesSet) => 'n',
        other => panic!("{other:?}"),
    }
}
