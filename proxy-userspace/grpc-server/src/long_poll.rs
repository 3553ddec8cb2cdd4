//! `localnetv1.Endpoints/Next`: the long poll of KEP-2104. A response is one full state.

use std::{pin::Pin, sync::Arc};

use model::state::ServiceState;
use proxy_contract::{
    localnetv1::{NextFilter, NextItem, ServiceEndpoints, endpoints_server::Endpoints},
    localv1::Extension,
};
use publish::{NodeStates, Subscription};
use tokio::sync::mpsc::{self, Sender};
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tonic::{Request, Response, Status};
use wire::Extensions;

use super::{
    authz::Peer,
    change_stream::{End, reserve_with_timeout},
    status,
};

/// The number of items that are encoded ahead of the connection.
const QUEUE_DEPTH: usize = 8;

pub(crate) struct LongPoll {
    pub(crate) nodes: Arc<dyn NodeStates>,
}

type Item = Result<NextItem, Status>;

#[tonic::async_trait]
impl Endpoints for LongPoll {
    type NextStream = Pin<Box<dyn Stream<Item = Item> + Send>>;

    async fn next(&self, request: Request<NextFilter>) -> Result<Response<Self::NextStream>, Status> {
        let peer = Peer::of(&request)?;
        let filter = request.into_inner();
        peer.authorize_node(&filter.node_name)?;
        let states = self.nodes.subscribe(&filter.node_name);
        let states = states.map_err(|it| status::of_subscription(&it, &filter.node_name))?;
        let (sender, items) = mpsc::channel(QUEUE_DEPTH + 1);
        // A stream that merely ended would be taken for a complete state.
        let room_for_error = sender.clone().try_reserve_owned();
        tokio::spawn(async move {
            // Fails only if the client has disconnected, or does not read.
            if let (Err(_), Ok(room)) = (respond(filter, states, sender).await, room_for_error) {
                room.send(Err(Status::deadline_exceeded("the state was not read in time; ask again")));
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(items))))
    }
}

/// Sends the next state; nothing if the client disconnects or the publisher is dropped before.
async fn respond(filter: NextFilter, mut states: Subscription, sender: Sender<Item>) -> Result<(), End> {
    let extensions = Extensions::POLL.negotiate(filter.extensions());
    let [nodes, service_cidrs, pods] =
        [Extension::Nodes, Extension::ServiceCidrs, Extension::Pods].map(|it| extensions.has(it));
    let (published, rev) = loop {
        let published = tokio::select! {
            () = sender.closed() => return Ok(()),
            published = states.next() => match published {
                Some(published) => published,
                None => return Ok(()),
            }
        };
        // What the client does not receive is no change for it.
        let rev = published.rev_for(nodes, service_cidrs, pods);
        if (published.instance_id, rev) != (filter.instance_id, filter.rev) {
            break (published, rev);
        }
    };
    let next = NextFilter { instance_id: published.instance_id, rev, ..filter };
    let first = NextItem { next: Some(next), extensions: extensions.numbers(), ..NextItem::default() };
    let send = async |item| reserve_with_timeout(sender.reserve()).await.map(|room| room.send(Ok(item)));
    send(first).await?;
    for it in published.state.service_cidrs.values().filter(|_| service_cidrs) {
        send(NextItem { service_cidr: Some(wire::service_cidr(it)), ..NextItem::default() }).await?;
    }
    for it in published.state.pods.values().filter(|_| pods) {
        send(NextItem { pod: Some(wire::pod(it)), ..NextItem::default() }).await?;
    }
    for (name, node) in published.state.nodes.iter().filter(|_| nodes) {
        send(NextItem { node: Some(wire::node(name, node)), ..NextItem::default() }).await?;
    }
    for state in published.state.services.values() {
        let endpoints = Some(service_endpoints(state, extensions));
        send(NextItem { endpoints, ..NextItem::default() }).await?;
    }
    Ok(())
}

fn service_endpoints(state: &ServiceState, extensions: Extensions) -> ServiceEndpoints {
    ServiceEndpoints {
        service: Some(wire::service_with_extensions(state, extensions)),
        endpoints: state.endpoints.iter().map(|it| wire::endpoint(&state.service, it)).collect(),
        keys: state.endpoints.iter().map(|it| wire::endpoint_key(it).to_owned()).collect(),
    }
}
