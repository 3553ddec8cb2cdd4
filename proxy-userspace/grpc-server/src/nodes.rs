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
use tokio::{sync::Mutex, task::spawn_blocking};
use tokio_stream::Stream;
use tonic::{Request, Response, Status};

use super::authz::Peer;

pub(crate) struct NodesList {
    pub(crate) followers: Followers,
    /// An answer may take a while: one at a time.
    pub(crate) turn: Mutex<()>,
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
        let _turn = self.turn.lock().await;
        let statuses = self.followers.statuses();
        let messages = spawn_blocking(move || messages(&statuses, address)).await;
        let messages = messages.map_err(|it| Status::internal(it.to_string()))?;
        Ok(Response::new(Box::pin(tokio_stream::iter(messages.into_iter().map(Ok)))))
    }
}

fn messages(statuses: &[FollowerStatus], address: Option<IpAddr>) -> Vec<NodeStatus> {
    // By the addresses in memory of the Services: what states share is looked at once, and `statuses` keeps it alive.
    let mut known = HashMap::new();
    let mut is_in = |address: IpAddr, state: &NodeState| {
        state
            .services
            .values()
            .any(|it| *known.entry(Arc::as_ptr(it).addr()).or_insert_with(|| has_endpoint(it, address)))
    };
    let message = |it: &FollowerStatus| NodeStatus {
        name: it.node.to_string(),
        newest: revision(&it.newest),
        acknowledged: revision(&it.acknowledged),
        behind_ms: it.behind.map(millis),
        latency_ms: it.latency.map(millis),
        connected_ms: millis(it.connected),
        has_address: address
            .map(|address| it.acknowledged.as_ref().is_some_and(|it| is_in(address, &it.state))),
    };
    statuses.iter().map(message).collect()
}

fn revision(published: &Option<Arc<Published>>) -> Option<Revision> {
    published.as_ref().map(|it| Revision { instance_id: it.instance_id, rev: it.rev })
}

fn millis(time: Duration) -> u64 {
    time.as_millis().try_into().unwrap_or(u64::MAX)
}

fn has_endpoint(state: &ServiceState, address: IpAddr) -> bool {
    let family = Family::of(address);
    state.endpoints.iter().any(|it| it.address(family) == Some(address))
}
