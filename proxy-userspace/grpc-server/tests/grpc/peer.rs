//! Clients that keep KPNG's rules, and panic where KPNG's crash.

use std::{collections::BTreeMap, ops::Deref, time::Duration};

use prost::Message as _;
use proxy_contract::{
    globalv1::{self, EndpointInfo, GlobalWatchReq, NodeInfo, ServiceInfo},
    localv1::{self, Digests, EmptyOp, OpItem, Ref, Set, Value, WatchReq, op_item::Op},
};
use tokio::{sync::mpsc, time::timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Response, Status, Streaming, transport::Channel};

use crate::common::{Folder, channel, in_time};

/// The objects of one kind of stream, by path.
pub(crate) trait Objects: Default {
    type Request;

    /// A request for the node `n1`, or for the cluster.
    fn request(extensions: Vec<i32>, have: Option<Digests>) -> Self::Request;

    async fn open(
        channel: Channel,
        requests: ReceiverStream<Self::Request>,
    ) -> Result<Response<Streaming<OpItem>>, Status>;

    fn set(&mut self, set: Set, path: String, bytes: &[u8]);

    /// Returns whether the object existed.
    fn delete(&mut self, set: Set, path: &str) -> bool;

    /// Checks the objects at a sync.
    fn check(&self) {}
}

/// A stream and the objects that it has sent.
pub(crate) struct Peer<O: Objects> {
    pub(crate) requests: mpsc::Sender<O::Request>,
    pub(crate) items: Streaming<OpItem>,
    pub(crate) objects: O,
}

pub(crate) type NodePeer = Peer<NodeObjects>;
pub(crate) type ClusterPeer = Peer<ClusterObjects>;

impl<O: Objects> Deref for Peer<O> {
    type Target = O;

    fn deref(&self) -> &O {
        &self.objects
    }
}

impl<O: Objects> Peer<O> {
    /// Opens a stream without a request.
    pub(crate) async fn silent(folder: &Folder) -> Self {
        Self::over(channel(folder).await).await
    }

    /// Opens a stream with these extensions and digests.
    pub(crate) async fn resuming(folder: &Folder, extensions: &[i32], have: Option<Digests>) -> Self {
        let peer = Self::silent(folder).await;
        peer.request(O::request(extensions.to_vec(), have)).await;
        peer
    }

    /// Opens a stream with these extensions; returns those of the reset, too.
    pub(crate) async fn with_extensions(folder: &Folder, requested: &[i32]) -> (Self, Vec<i32>) {
        let mut peer = Self::resuming(folder, requested, None).await;
        let Op::Reset(EmptyOp { extensions, revision: None }) = peer.item().await else { panic!("no reset") };
        (peer, extensions)
    }

    pub(crate) async fn over(channel: Channel) -> Self {
        let (requests, outgoing) = mpsc::channel(8);
        let items = O::open(channel, ReceiverStream::new(outgoing)).await.unwrap().into_inner();
        Self { requests, items, objects: O::default() }
    }

    pub(crate) async fn request(&self, request: O::Request) {
        self.requests.send(request).await.unwrap();
    }

    pub(crate) async fn item(&mut self) -> Op {
        in_time(self.items.message()).await.unwrap().unwrap().op.unwrap()
    }

    pub(crate) async fn receives_nothing(&mut self) {
        let item = timeout(Duration::from_millis(150), self.items.message()).await;
        assert!(item.is_err(), "{item:?}");
    }

    /// The stream ends with OK.
    pub(crate) async fn ends(&mut self) {
        assert_eq!(in_time(self.items.message()).await.unwrap(), None);
    }

    /// The stream ends with an error.
    pub(crate) async fn fails(&mut self) -> Status {
        in_time(self.items.message()).await.unwrap_err()
    }

    /// Receives a change set; returns its operations: `+s` sets a Service, `-e` deletes an endpoint.
    pub(crate) async fn change_set(&mut self) -> Vec<String> {
        let mut operations = Vec::new();
        loop {
            match self.item().await {
                Op::Sync(_) => break,
                Op::Reset(_) => panic!("a second reset"),
                Op::Set(Value { r#ref: Some(Ref { set, path }), bytes }) => {
                    let set = Set::try_from(set).unwrap();
                    operations.push(format!("+{} {path}", letter(set)));
                    self.objects.set(set, path, &bytes);
                }
                Op::Delete(Ref { set, path }) => {
                    let set = Set::try_from(set).unwrap();
                    operations.push(format!("-{} {path}", letter(set)));
                    assert!(self.objects.delete(set, &path), "deleted {path}, which does not exist");
                }
                other @ (Op::Set(_) | Op::Kept(_) | Op::Heartbeat(_)) => panic!("{other:?}"),
            }
        }
        self.objects.check();
        operations
    }
}

fn letter(set: Set) -> char {
    match set {
        Set::NodesSet | Set::GlobalNodeInfos => 'n',
        Set::ServicesSet | Set::GlobalServiceInfos => 's',
        Set::EndpointsSet | Set::GlobalEndpointInfos => 'e',
        Set::ServiceCidrsSet => 'c',
        Set::PodsSet => 'p',
        Set::UnknownSet => panic!("an unknown set"),
    }
}

/// What `localv1.Sets/Watch` sends.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct NodeObjects {
    pub(crate) services: BTreeMap<String, localv1::Service>,
    pub(crate) endpoints: BTreeMap<String, localv1::Endpoint>,
    /// Only if requested.
    pub(crate) service_cidrs: BTreeMap<String, localv1::ServiceCidr>,
    /// Only if requested.
    pub(crate) pods: BTreeMap<String, localv1::Pod>,
    pub(crate) nodes: BTreeMap<String, localv1::Node>,
}

impl NodePeer {
    /// Requests a node, and receives the reset.
    pub(crate) async fn start(folder: &Folder, node: &str) -> Self {
        let mut peer = Self::silent(folder).await;
        peer.ask(node).await;
        assert_eq!(peer.item().await, Op::Reset(EmptyOp::default()));
        peer
    }

    /// Follows the node `n1`, and has received its state.
    pub(crate) async fn synced(folder: &Folder) -> Self {
        let mut peer = Self::start(folder, "n1").await;
        peer.change_set().await;
        peer
    }

    pub(crate) async fn ask(&self, node: &str) {
        self.request(WatchReq { node_name: node.into(), ..WatchReq::default() }).await;
    }
}

impl Objects for NodeObjects {
    type Request = WatchReq;

    fn request(extensions: Vec<i32>, have: Option<Digests>) -> WatchReq {
        WatchReq { node_name: "n1".into(), extensions, have, ..WatchReq::default() }
    }

    async fn open(
        channel: Channel,
        requests: ReceiverStream<WatchReq>,
    ) -> Result<Response<Streaming<OpItem>>, Status> {
        localv1::sets_client::SetsClient::new(channel).watch(requests).await
    }

    fn set(&mut self, set: Set, path: String, bytes: &[u8]) {
        match letter(set) {
            'c' => {
                let it = localv1::ServiceCidr::decode(bytes).unwrap();
                self.service_cidrs.insert(path, it);
            }
            'p' => {
                let it = localv1::Pod::decode(bytes).unwrap();
                assert_eq!(path, format!("{}/{}", it.namespace, it.name));
                self.pods.insert(path, it);
            }
            'n' => {
                let it = localv1::Node::decode(bytes).unwrap();
                assert_eq!(path, it.name);
                self.nodes.insert(path, it);
            }
            's' => {
                let it = localv1::Service::decode(bytes).unwrap();
                let ips = it.ips.as_ref().expect("Service.IPs is present");
                assert!(ips.cluster_ips.is_some(), "ClusterIPs is present");
                assert!(ips.external_ips.is_some(), "ExternalIPs is present");
                assert_eq!(path, format!("{}/{}", it.namespace, it.name));
                self.services.insert(path, it);
            }
            _ => {
                let it = localv1::Endpoint::decode(bytes).unwrap();
                assert!(it.ips.is_some(), "Endpoint.IPs is present");
                assert!(it.scopes.is_some(), "Endpoint.Scopes is present");
                let service = path.rsplit_once('/').unwrap().0;
                assert!(self.services.contains_key(service), "{path} is an orphan");
                self.endpoints.insert(path, it);
            }
        }
    }

    fn delete(&mut self, set: Set, path: &str) -> bool {
        match letter(set) {
            'c' => self.service_cidrs.remove(path).is_some(),
            'p' => self.pods.remove(path).is_some(),
            'n' => self.nodes.remove(path).is_some(),
            's' => {
                let prefix = format!("{path}/");
                let orphan = self.endpoints.keys().find(|it| it.starts_with(&prefix));
                assert_eq!(orphan, None, "it is an orphan");
                self.services.remove(path).is_some()
            }
            _ => self.endpoints.remove(path).is_some(),
        }
    }
}

/// What `globalv1.Sets/Watch` sends.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct ClusterObjects {
    pub(crate) nodes: BTreeMap<String, NodeInfo>,
    pub(crate) services: BTreeMap<String, ServiceInfo>,
    pub(crate) endpoints: BTreeMap<String, EndpointInfo>,
}

impl ClusterPeer {
    /// Sends KPNG's request, and receives the reset.
    pub(crate) async fn start(folder: &Folder) -> Self {
        let (peer, extensions) = Self::with_extensions(folder, &[]).await;
        assert!(extensions.is_empty());
        peer
    }

    pub(crate) async fn ask(&self) {
        self.request(GlobalWatchReq::default()).await;
    }
}

/// Splits a path as KPNG does.
fn parts(path: &str) -> [&str; 4] {
    let parts: Vec<_> = path.split('|').collect();
    parts.try_into().unwrap_or_else(|parts| panic!("{path}: {parts:?} are not four parts"))
}

impl Objects for ClusterObjects {
    type Request = GlobalWatchReq;

    fn request(extensions: Vec<i32>, have: Option<Digests>) -> GlobalWatchReq {
        GlobalWatchReq { extensions, have }
    }

    async fn open(
        channel: Channel,
        requests: ReceiverStream<GlobalWatchReq>,
    ) -> Result<Response<Streaming<OpItem>>, Status> {
        globalv1::sets_client::SetsClient::new(channel).watch(requests).await
    }

    fn set(&mut self, set: Set, path: String, bytes: &[u8]) {
        match letter(set) {
            'n' => {
                let it = NodeInfo::decode(bytes).unwrap();
                let name = &it.node.as_ref().expect("Node is present").name;
                assert_eq!(parts(&path), ["", name, "", ""]);
                let before = self.nodes.insert(path, it.clone());
                assert!(before.is_none_or(|before| before.hash != it.hash));
            }
            's' => {
                let it = ServiceInfo::decode(bytes).unwrap();
                let service = it.service.as_ref().expect("Service is present");
                let ips = service.ips.as_ref().expect("Service.IPs is present");
                assert!(ips.cluster_ips.is_some() && ips.external_ips.is_some());
                assert_eq!(parts(&path), [&service.namespace, &service.name, "", ""]);
                let before = self.services.insert(path, it.clone());
                assert!(before.is_none_or(|before| before.hash != it.hash));
            }
            _ => {
                let it = EndpointInfo::decode(bytes).unwrap();
                let endpoint = it.endpoint.as_ref().expect("Endpoint is present");
                assert!(endpoint.ips.is_some() && endpoint.scopes.is_some());
                assert!(it.conditions.is_some() && it.topology.is_some() && it.hints.is_some());
                let [namespace, service, source, _] = parts(&path);
                assert_eq!((namespace, source), (it.namespace.as_str(), it.source_name.as_str()));
                assert!(service.is_empty() || service == it.service_name);
                let before = self.endpoints.insert(path, it.clone());
                assert!(before.is_none_or(|before| before.hash != it.hash));
            }
        }
    }

    fn delete(&mut self, set: Set, path: &str) -> bool {
        match letter(set) {
            'n' => self.nodes.remove(path).is_some(),
            's' => self.services.remove(path).is_some(),
            _ => self.endpoints.remove(path).is_some(),
        }
    }

    /// At a sync, no endpoint lacks its Service, and each exists under both paths.
    fn check(&self) {
        for (path, it) in &self.endpoints {
            let [namespace, service, source, key] = parts(path);
            let owner = format!("{namespace}|{}||", it.service_name);
            assert!(self.services.contains_key(&owner), "{path} is an orphan");
            let other_path = match service {
                "" => format!("{namespace}|{}|{source}|{key}", it.service_name),
                _ => format!("{namespace}||{source}|{key}"),
            };
            assert_eq!(self.endpoints.get(&other_path), Some(it), "{path} and {other_path}");
        }
    }
}
