//! The facts of a whole cluster: `globalv1.Sets/Watch`, for a brain that follows another one.
//!
//! The one rule: a state is handed out whole, and what did not change is shared with the one before.

use std::{collections::BTreeMap, future::Future, sync::Arc};

use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming, transport::Channel};

use super::{
    Client, LONGEST_MESSAGE,
    session::{Refused, Session, View, decode, place, value},
};
use crate::{
    globalv1::{EndpointInfo, GlobalWatchReq, NodeInfo, ServiceInfo, sets_client::SetsClient},
    localv1::{Extension, OpItem, Set, op_item::Op},
};

/// All that a brain knows of its cluster.
///
/// What did not change is shared with the state before: pointers that are equal are values that are equal.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Cluster {
    /// What the brain says beyond KPNG's API.
    pub extensions: Vec<Extension>,
    /// The Nodes, by name.
    pub nodes: BTreeMap<Arc<str>, Arc<NodeInfo>>,
    /// The Services, by `namespace/name`.
    pub services: BTreeMap<Arc<str>, Arc<ClusterService>>,
}

/// A Service and all endpoints that name it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ClusterService {
    /// The Service.
    pub service: ServiceInfo,
    /// The endpoints, by `slice|key`.
    pub endpoints: BTreeMap<Arc<str>, Arc<EndpointInfo>>,
}

/// Follows the facts of a cluster: what [`Client::cluster`] returns.
#[derive(Debug)]
pub struct ClusterWatch {
    session: Session<Global>,
    building: Cluster,
    /// Whether anything has been said since the last state, and whether it was begun anew.
    touched: bool,
    anew: bool,
    last: Option<Arc<Cluster>>,
}

impl ClusterWatch {
    pub(super) fn new(client: &Client) -> Self {
        let request = GlobalWatchReq { extensions: client.requested() };
        let session = Session::new(client, Global { request });
        Self { session, building: Cluster::default(), touched: false, anew: false, last: None }
    }

    /// Waits for facts that differ from those before: the newest. Several changes while nobody waits are one.
    ///
    /// # Errors
    ///
    /// The peer does not offer this API, or not to us. That is not the end: called again, it asks again after a minute.
    /// No other error and no outage is reported here, and nothing is lost if it is dropped while it waits.
    pub async fn next(&mut self) -> Result<Arc<Cluster>, Refused> {
        loop {
            match self.session.try_next().await? {
                Event::Reset(extensions) => {
                    self.building = Cluster { extensions, ..Cluster::default() };
                    (self.touched, self.anew) = (true, true);
                }
                Event::Sync => {
                    if let Some(state) = self.finish() {
                        return Ok(state);
                    }
                }
                event => {
                    self.touched = true;
                    self.building.take_in(event);
                }
            }
        }
    }

    /// The state, unless it is the last one again.
    fn finish(&mut self) -> Option<Arc<Cluster>> {
        let (touched, anew) = (std::mem::take(&mut self.touched), std::mem::take(&mut self.anew));
        if let Some(last) = &self.last {
            if !touched {
                return None;
            }
            if anew {
                let services = share(&mut self.building.services, &last.services);
                let nodes = share(&mut self.building.nodes, &last.nodes);
                if services && nodes && self.building.extensions == last.extensions {
                    return None;
                }
            }
        }
        let state = Arc::new(self.building.clone());
        self.last = Some(Arc::clone(&state));
        Some(state)
    }
}

impl Cluster {
    fn take_in(&mut self, event: Event) {
        match event {
            Event::SetNode(name, it) => drop(self.nodes.insert(name.into(), Arc::new(it))),
            Event::DeleteNode(name) => drop(self.nodes.remove(name.as_str())),
            Event::SetService(name, it) => {
                Arc::make_mut(self.services.entry(name.into()).or_default()).service = it;
            }
            Event::DeleteService(name) => drop(self.services.remove(name.as_str())),
            Event::SetEndpoint(service, key, it) => {
                let known = self.services.entry(service.into()).or_default();
                Arc::make_mut(known).endpoints.insert(key.into(), Arc::new(it));
            }
            Event::DeleteEndpoint(service, key) => {
                if let Some(known) = self.services.get_mut(service.as_str()) {
                    Arc::make_mut(known).endpoints.remove(key.as_str());
                }
            }
            Event::Reset(_) | Event::Sync | Event::Twin => {}
        }
    }
}

/// Takes over what is equal; whether all is.
fn share<T: PartialEq>(now: &mut BTreeMap<Arc<str>, Arc<T>>, before: &BTreeMap<Arc<str>, Arc<T>>) -> bool {
    let mut equal = 0;
    for (name, it) in &mut *now {
        if let Some(old) = before.get(name).filter(|old| *old == it) {
            *it = Arc::clone(old);
            equal += 1;
        }
    }
    equal == before.len() && equal == now.len()
}

#[derive(Clone, Debug)]
struct Global {
    request: GlobalWatchReq,
}

/// What a brain says. Services are called `namespace/name`, endpoints `slice|key`.
#[derive(Debug)]
enum Event {
    Reset(Vec<Extension>),
    SetNode(String, NodeInfo),
    DeleteNode(String),
    SetService(String, ServiceInfo),
    DeleteService(String),
    SetEndpoint(String, String, EndpointInfo),
    DeleteEndpoint(String, String),
    /// An endpoint under its second path.
    Twin,
    Sync,
}

impl View for Global {
    type Request = GlobalWatchReq;
    type Event = Event;

    fn request(&self) -> GlobalWatchReq {
        self.request.clone()
    }

    fn open(
        channel: Channel,
        requests: ReceiverStream<GlobalWatchReq>,
    ) -> impl Future<Output = Result<Streaming<OpItem>, Status>> + Send {
        let mut sets = SetsClient::new(channel).max_decoding_message_size(LONGEST_MESSAGE);
        async move { Ok(sets.watch(requests).await?.into_inner()) }
    }

    fn decode_op(op: Op) -> Result<Event, String> {
        match op {
            Op::Reset(it) => Ok(Event::Reset(it.extensions().collect())),
            Op::Sync(_) => Ok(Event::Sync),
            Op::Set(it) => {
                let (set, path, bytes) = value(it)?;
                match Place::of(set, &path)? {
                    Place::Node(name) => decode(&path, &bytes).map(|it| Event::SetNode(name, it)),
                    Place::Service(name) => decode(&path, &bytes).map(|it| Event::SetService(name, it)),
                    Place::Endpoint(service, key) => {
                        decode(&path, &bytes).map(|it| Event::SetEndpoint(service, key, it))
                    }
                    Place::Twin => Ok(Event::Twin),
                }
            }
            Op::Delete(it) => {
                let (set, path) = place(Some(it))?;
                Ok(match Place::of(set, &path)? {
                    Place::Node(name) => Event::DeleteNode(name),
                    Place::Service(name) => Event::DeleteService(name),
                    Place::Endpoint(service, key) => Event::DeleteEndpoint(service, key),
                    Place::Twin => Event::Twin,
                })
            }
        }
    }
}

enum Place {
    Node(String),
    Service(String),
    Endpoint(String, String),
    Twin,
}

impl Place {
    fn of(set: Set, path: &str) -> Result<Self, String> {
        let parts: Vec<_> = path.split('|').collect();
        match (set, parts.as_slice()) {
            (Set::GlobalNodeInfos, ["", name, "", ""]) if !name.is_empty() => {
                Ok(Self::Node((*name).to_owned()))
            }
            (Set::GlobalServiceInfos, [namespace, name, "", ""])
                if !namespace.is_empty() && !name.is_empty() =>
            {
                Ok(Self::Service(format!("{namespace}/{name}")))
            }
            (Set::GlobalEndpointInfos, [_, "", _, _]) => Ok(Self::Twin),
            (Set::GlobalEndpointInfos, [namespace, service, slice, key]) if !namespace.is_empty() => {
                Ok(Self::Endpoint(format!("{namespace}/{service}"), format!("{slice}|{key}")))
            }
            _ => Err(format!("the path {path:?} in set {}", set.as_str_name())),
        }
    }
}
