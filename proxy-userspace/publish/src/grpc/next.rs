//! `localnetv1.Endpoints/Next`: the long poll of KEP-2104.
//!
//! The one rule: an answer is one full state, whole, and whoever has it waits for another.

use std::{pin::Pin, sync::Arc};

use model::state::ServiceState;
use proxy_contract::localnetv1::{NextFilter, NextItem, ServiceEndpoints, endpoints_server::Endpoints};
use tokio::sync::mpsc::{self, Sender};
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tonic::{Request, Response, Status};
use wire::Extensions;

use super::{NodeStates, authz::Peer};
use crate::Subscription;

/// How many items are made in advance for a client.
const AHEAD: usize = 8;

pub(super) struct Next {
    pub(super) nodes: Arc<dyn NodeStates>,
}

#[tonic::async_trait]
impl Endpoints for Next {
    type NextStream = Pin<Box<dyn Stream<Item = Result<NextItem, Status>> + Send>>;

    async fn next(&self, request: Request<NextFilter>) -> Result<Response<Self::NextStream>, Status> {
        let peer = Peer::of(&request)?;
        let filter = request.into_inner();
        peer.may(&filter.node_name)?;
        let states = self.nodes.subscribe(&filter.node_name, (filter.instance_id, filter.rev));
        let states = states.map_err(|it| it.status(&filter.node_name))?;
        let (sender, items) = mpsc::channel(AHEAD);
        tokio::spawn(answer(filter, states, sender));
        Ok(Response::new(Box::pin(ReceiverStream::new(items))))
    }
}

/// Sends the state when there is another; ends early if the client or the source is gone.
async fn answer(filter: NextFilter, mut states: Subscription, sender: Sender<Result<NextItem, Status>>) {
    let published = tokio::select! {
        () = sender.closed() => return,
        published = states.next() => match published {
            Some(published) => published,
            None => return,
        }
    };
    let additions = Extensions::LOCAL.negotiate(filter.extensions());
    let next = NextFilter { instance_id: published.instance_id, rev: published.rev, ..filter };
    let first = NextItem { next: Some(next), extensions: additions.numbers(), ..NextItem::default() };
    if sender.send(Ok(first)).await.is_err() {
        return;
    }
    for (name, node) in published.state.nodes.iter().filter(|_| additions.nodes) {
        let item = NextItem { node: Some(wire::node(name, node)), ..NextItem::default() };
        if sender.send(Ok(item)).await.is_err() {
            return;
        }
    }
    for state in published.state.services.values() {
        let item = NextItem { endpoints: Some(service_endpoints(state, additions)), ..NextItem::default() };
        if sender.send(Ok(item)).await.is_err() {
            return;
        }
    }
}

fn service_endpoints(state: &ServiceState, additions: Extensions) -> ServiceEndpoints {
    ServiceEndpoints {
        service: Some(wire::service_with_extensions(state, additions)),
        endpoints: state.endpoints.iter().map(|it| wire::endpoint(&state.service, it)).collect(),
        keys: state.endpoints.iter().map(|it| wire::endpoint_key(it).to_owned()).collect(),
    }
}
