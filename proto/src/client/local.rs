//! One node's state: `localv1.Sets/Watch`.
//!
//! The one rule: paths are taken apart here, and nowhere else.

use std::future::Future;

use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming, transport::Channel};

use super::{
    Client, LONGEST_MESSAGE,
    session::{View, decode, place, value},
};
use crate::localv1::{
    Endpoint, Extension, Node, OpItem, Revision, Service, Set, WatchReq, op_item::Op, sets_client::SetsClient,
};

/// What a brain says. Services are called `namespace/name`, endpoints by the last part of their path.
#[derive(Debug)]
pub(super) enum Event {
    /// What was said before is void; what is said beyond KPNG's API from now on.
    Reset(Vec<Extension>),
    SetService(String, Service),
    DeleteService(String),
    SetEndpoint(String, String, Endpoint),
    DeleteEndpoint(String, String),
    SetNode(String, Node),
    DeleteNode(String),
    /// What was said is complete.
    Sync(Option<Revision>),
}

#[derive(Clone, Debug)]
pub(super) struct Local {
    request: WatchReq,
}

impl Local {
    pub(super) fn new(client: &Client) -> Self {
        let request = WatchReq { node_name: client.node.clone(), extensions: client.requested() };
        Self { request }
    }
}

impl View for Local {
    type Request = WatchReq;
    type Event = Event;

    fn request(&self) -> WatchReq {
        self.request.clone()
    }

    fn open(
        channel: Channel,
        requests: ReceiverStream<WatchReq>,
    ) -> impl Future<Output = Result<Streaming<OpItem>, Status>> + Send {
        let mut sets = SetsClient::new(channel).max_decoding_message_size(LONGEST_MESSAGE);
        async move { Ok(sets.watch(requests).await?.into_inner()) }
    }

    fn decode_op(op: Op) -> Result<Event, String> {
        match op {
            Op::Reset(it) => Ok(Event::Reset(it.extensions().collect())),
            Op::Sync(it) => Ok(Event::Sync(it.revision)),
            Op::Set(it) => {
                let (set, path, bytes) = value(it)?;
                match Place::of(set, path)? {
                    Place::Service(name) => decode(&name, &bytes).map(|it| Event::SetService(name, it)),
                    Place::Node(name) => decode(&name, &bytes).map(|it| Event::SetNode(name, it)),
                    Place::Endpoint(service, key) => {
                        let endpoint = decode(&format!("{service}/{key}"), &bytes)?;
                        Ok(Event::SetEndpoint(service, key, endpoint))
                    }
                }
            }
            Op::Delete(it) => {
                let (set, path) = place(Some(it))?;
                Ok(match Place::of(set, path)? {
                    Place::Service(name) => Event::DeleteService(name),
                    Place::Node(name) => Event::DeleteNode(name),
                    Place::Endpoint(service, key) => Event::DeleteEndpoint(service, key),
                })
            }
        }
    }
}

enum Place {
    Service(String),
    Node(String),
    Endpoint(String, String),
}

impl Place {
    fn of(set: Set, path: String) -> Result<Self, String> {
        let parts: Vec<_> = path.split('/').collect();
        match (set, parts.as_slice()) {
            (_, parts) if parts.contains(&"") => Err(format!("the path {path:?}, of which a part is empty")),
            (Set::ServicesSet, [_, _]) => Ok(Self::Service(path)),
            (Set::NodesSet, [_]) => Ok(Self::Node(path)),
            (Set::EndpointsSet, [namespace, service, key]) => {
                Ok(Self::Endpoint(format!("{namespace}/{service}"), (*key).to_owned()))
            }
            _ => Err(format!("the path {path:?} in set {}", set.as_str_name())),
        }
    }
}
