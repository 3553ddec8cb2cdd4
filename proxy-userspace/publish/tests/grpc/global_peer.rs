//! A client of the cluster's facts that keeps KPNG's rules, and panics where KPNG's crashes.

use std::{collections::BTreeMap, path::Path};

use prost::Message as _;
use proxy_contract::{
    globalv1::{EndpointInfo, GlobalWatchReq, NodeInfo, ServiceInfo, sets_client::SetsClient},
    localv1::{self, EmptyOp, OpItem, Ref, Value, op_item::Op},
};
use tokio::{sync::mpsc, time::timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use crate::common::{LIMIT, channel};

pub(crate) struct GlobalPeer {
    pub(crate) requests: mpsc::Sender<GlobalWatchReq>,
    pub(crate) items: Streaming<OpItem>,
    /// What it was told, by path.
    pub(crate) nodes: BTreeMap<String, NodeInfo>,
    pub(crate) services: BTreeMap<String, ServiceInfo>,
    pub(crate) endpoints: BTreeMap<String, EndpointInfo>,
}

/// The four parts of a path, as KPNG takes them apart.
fn parts(path: &str) -> [&str; 4] {
    let parts: Vec<_> = path.split('|').collect();
    parts.try_into().unwrap_or_else(|parts| panic!("{path}: {parts:?} are not four parts"))
}

impl GlobalPeer {
    pub(crate) async fn silent(path: &Path) -> Self {
        let (requests, outgoing) = mpsc::channel(8);
        let items = SetsClient::new(channel(path).await).watch(ReceiverStream::new(outgoing)).await.unwrap();
        let (nodes, services, endpoints) = Default::default();
        Self { requests, items: items.into_inner(), nodes, services, endpoints }
    }

    /// Asks as KPNG does, and is reset.
    pub(crate) async fn start(path: &Path) -> Self {
        let mut peer = Self::silent(path).await;
        peer.ask().await;
        assert_eq!(peer.item().await, Op::Reset(EmptyOp::default()));
        peer
    }

    pub(crate) async fn ask(&self) {
        self.requests.send(GlobalWatchReq::default()).await.unwrap();
    }

    pub(crate) async fn item(&mut self) -> Op {
        timeout(LIMIT, self.items.message()).await.unwrap().unwrap().unwrap().op.unwrap()
    }

    /// Takes a change set in and gives back its operations in words: `+n` a Node set, `-e` an endpoint deleted.
    pub(crate) async fn change_set(&mut self) -> Vec<String> {
        let mut words = Vec::new();
        loop {
            match self.item().await {
                Op::Sync(_) => break,
                Op::Reset(_) => panic!("a second reset"),
                Op::Set(Value { r#ref: Some(Ref { set, path }), bytes }) => {
                    words.push(format!("+{} {path}", letter(set)));
                    self.set(set, path, &bytes);
                }
                Op::Delete(Ref { set, path }) => {
                    words.push(format!("-{} {path}", letter(set)));
                    let is_there = match letter(set) {
                        'n' => self.nodes.remove(&path).is_some(),
                        's' => self.services.remove(&path).is_some(),
                        _ => self.endpoints.remove(&path).is_some(),
                    };
                    assert!(is_there, "only what is there is deleted, not {path}");
                }
                other @ Op::Set(_) => panic!("{other:?}"),
            }
        }
        self.check();
        words
    }

    fn set(&mut self, set: i32, path: String, bytes: &[u8]) {
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

    /// At a sync, no endpoint is without its Service, and each is there under both paths.
    fn check(&self) {
        for (path, it) in &self.endpoints {
            let [namespace, service, source, key] = parts(path);
            let owner = format!("{namespace}|{}||", it.service_name);
            assert!(self.services.contains_key(&owner), "{path} is an orphan");
            let twin = match service {
                "" => format!("{namespace}|{}|{source}|{key}", it.service_name),
                _ => format!("{namespace}||{source}|{key}"),
            };
            assert_eq!(self.endpoints.get(&twin), Some(it), "{path} and {twin}");
        }
    }
}

fn letter(set: i32) -> char {
    match localv1::Set::try_from(set) {
        Ok(localv1::Set::GlobalNodeInfos) => 'n',
        Ok(localv1::Set::GlobalServiceInfos) => 's',
        Ok(localv1::Set::GlobalEndpointInfos) => 'e',
        other => panic!("{other:?}"),
    }
}
