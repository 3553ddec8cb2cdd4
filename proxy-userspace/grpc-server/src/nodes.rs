//! `globalv1.Nodes/List`: the clients that follow this brain.

use std::{collections::HashMap, net::IpAddr, pin::Pin, sync::Arc, time::Duration};

use model::{
    Family,
    state::{NodeState, ServiceState},
};
use proxy_contract::{
    globalv1::{ListNodesReq, NodeStatus, nodes_server::Nodes},
    localv1::Revision,
};
use publish::{
    Published,
    followers::{FollowerStatus, Followers},
};
use tokio::{sync::Semaphore, task::spawn_blocking};
use tokio_stream::Stream;
use tonic::{Request, Response, Status};

use super::authz::Peer;

pub(crate) struct NodesList {
    pub(crate) followers: Followers,
    /// An answer may take a while: one at a time.
    pub(crate) turn: Semaphore,
}

impl NodesList {
    pub(crate) fn new(followers: Followers) -> Self {
        Self { followers, turn: Semaphore::new(1) }
    }
}

#[tonic::async_trait]
impl Nodes for NodesList {
    type ListStream = Pin<Box<dyn Stream<Item = Result<NodeStatus, Status>> + Send>>;

    async fn list(&self, request: Request<ListNodesReq>) -> Result<Response<Self::ListStream>, Status> {
        Peer::of(&request)?.authorize_cluster()?;
        let address = request.into_inner().address;
        let address = match address.as_str() {
            "" => None,
            it => Some(it.parse::<IpAddr>().map_err(|_| {
                let shown: String = it.chars().take(80).collect();
                Status::invalid_argument(format!("{shown:?} is no IP address; give that of an endpoint"))
            })?),
        };
        // It is never closed.
        let _turn = self.turn.acquire().await;
        let statuses = self.followers.statuses();
        let messages = spawn_blocking(move || messages(&statuses, address)).await;
        let messages = messages.map_err(|it| Status::internal(it.to_string()))?;
        Ok(Response::new(Box::pin(tokio_stream::iter(messages.into_iter().map(Ok)))))
    }
}

fn messages(statuses: &[FollowerStatus], address: Option<IpAddr>) -> Vec<NodeStatus> {
    let mut finder = address.map(AddressFinder::new);
    let message = |it: &FollowerStatus| NodeStatus {
        name: it.node.to_string(),
        newest: revision(&it.newest),
        acknowledged: revision(&it.acknowledged),
        behind_ms: it.behind.map(millis),
        latency_ms: it.latency.map(millis),
        connected_ms: millis(it.connected),
        has_address: finder
            .as_mut()
            .map(|finder| it.acknowledged.as_ref().is_some_and(|it| finder.is_in(&it.state))),
    };
    statuses.iter().map(message).collect()
}

fn revision(published: &Option<Arc<Published>>) -> Option<Revision> {
    published.as_ref().map(|it| Revision { instance_id: it.instance_id, rev: it.rev })
}

fn millis(time: Duration) -> u64 {
    time.as_millis().try_into().unwrap_or(u64::MAX)
}

/// Finds an address among the endpoints of many states, and looks at what they share once.
#[derive(Debug)]
struct AddressFinder {
    address: IpAddr,
    /// The addresses in memory of the Services that were looked at, and whether they have it. The states keep them alive.
    known: HashMap<usize, bool>,
}

impl AddressFinder {
    fn new(address: IpAddr) -> Self {
        Self { address, known: HashMap::new() }
    }

    /// Whether a state has an endpoint with the address. `state` must live as long as this.
    fn is_in(&mut self, state: &NodeState) -> bool {
        state.services.values().any(|it| {
            let place = Arc::as_ptr(it).addr();
            *self.known.entry(place).or_insert_with(|| has_endpoint(it, self.address))
        })
    }
}

fn has_endpoint(state: &ServiceState, address: IpAddr) -> bool {
    let family = Family::of(address);
    state.endpoints.iter().any(|it| it.address(family) == Some(address))
}
