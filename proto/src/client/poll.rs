//! The long poll of KEP-2104: one full state at a time.
//!
//! All requests use one connection, until one fails.
//! A state that was returned is not returned again; its revision suffices to continue in another process.

use std::{fmt, future::Future, mem, pin::Pin, sync::Arc};

use tokio::time::{Instant, sleep_until};
use tonic::transport::Channel;

use super::{
    backoff::ReconnectBackoff,
    connect::{Client, MAX_MESSAGE_SIZE, Round, error_chain},
    state::{ServiceEndpoints, State},
};
use crate::{
    localnetv1::{self, NextFilter, NextItem, endpoints_client::EndpointsClient},
    localv1::Revision,
};

/// The answer, and the connection on which it came.
type Response = Result<(State, Channel), String>;
type Pending = Pin<Box<dyn Future<Output = (Round, Response)> + Send>>;

/// Polls for full states; returned by [`Client::poll`](super::Client::poll).
///
/// ```no_run
/// # use proxy_contract::{client::Client, localnetv1::NextFilter};
/// # async fn example(client: Client) {
/// let state = client.poll(NextFilter::default()).next().await;
/// // Later, in another process: waits for the next state.
/// let revision = state.revision.unwrap_or_default();
/// let from = NextFilter { instance_id: revision.instance_id, rev: revision.rev, ..NextFilter::default() };
/// let next = client.poll(from).next().await;
/// # }
/// ```
pub struct Poll {
    client: Client,
    filter: NextFilter,
    /// Empty while there is a request, which holds it.
    round: Round,
    backoff: ReconnectBackoff,
    retry_at: Instant,
    pending: Option<Pending>,
    /// `None` after a request has failed.
    connection: Option<Channel>,
}

impl fmt::Debug for Poll {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Poll").field("client", &self.client).finish_non_exhaustive()
    }
}

impl Poll {
    pub(super) fn new(client: &Client, from: NextFilter) -> Self {
        let extensions = client.extension_numbers();
        let filter = NextFilter { node_name: client.node.clone(), extensions, ..from };
        let backoff = ReconnectBackoff::new(&client.targets, &client.outage);
        Self {
            client: client.clone(),
            filter,
            round: Round::default(),
            backoff,
            retry_at: Instant::now(),
            pending: None,
            connection: None,
        }
    }

    /// Waits for a state whose revision differs from that of the last one, and returns the newest.
    ///
    /// Errors and outages are logged, and it reconnects. Cancel safe.
    pub async fn next(&mut self) -> Arc<State> {
        loop {
            let pending = match &mut self.pending {
                Some(pending) => pending,
                none => {
                    sleep_until(self.retry_at).await;
                    let (client, filter) = (self.client.clone(), self.filter.clone());
                    let (connection, mut round) = (self.connection.take(), mem::take(&mut self.round));
                    none.insert(Box::pin(async move {
                        let response = request(client, &mut round, connection, filter).await;
                        (round, response)
                    }))
                }
            };
            let (round, response) = pending.await;
            (self.pending, self.round) = (None, round);
            match response {
                Ok((state, connection)) => {
                    self.connection = Some(connection);
                    self.backoff.synced(&mut self.round);
                    let Revision { instance_id, rev } = state.revision.unwrap_or_default();
                    (self.filter.instance_id, self.filter.rev) = (instance_id, rev);
                    return Arc::new(state);
                }
                Err(reason) => self.retry_at = self.backoff.failed(&self.round, &reason),
            }
        }
    }
}

async fn request(
    client: Client,
    round: &mut Round,
    connection: Option<Channel>,
    filter: NextFilter,
) -> Response {
    let channel = match connection {
        Some(it) => it,
        None => client.connect(round).await?,
    };
    let mut endpoints = EndpointsClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE_SIZE);
    let mut items = endpoints.next(filter).await.map_err(|it| error_chain(&it))?.into_inner();
    let mut message = async || items.message().await.map_err(|it| error_chain(&it));
    let first = message().await?;
    let extensions = first.iter().flat_map(NextItem::extensions).collect();
    let Some(NextItem { next: Some(next), .. }) = first else {
        return Err("the brain ended the stream without a state".to_owned());
    };
    let revision = Some(Revision { instance_id: next.instance_id, rev: next.rev });
    let mut state = State { revision, extensions, ..State::default() };
    while let Some(item) = message().await? {
        if let Some(it) = item.service_cidr {
            state.service_cidrs.insert(it.name.as_str().into(), Arc::new(it));
        }
        if let Some(it) = item.pod {
            state.pods.insert(format!("{}/{}", it.namespace, it.name).into(), Arc::new(it));
        }
        if let Some(node) = item.node {
            state.nodes.insert(node.name.as_str().into(), Arc::new(node));
        }
        let Some((name, it)) = item.endpoints.and_then(service_endpoints) else { continue };
        state.services.insert(name.into(), Arc::new(it));
    }
    Ok((state, channel))
}

fn service_endpoints(message: localnetv1::ServiceEndpoints) -> Option<(String, ServiceEndpoints)> {
    let localnetv1::ServiceEndpoints { service, endpoints, keys } = message;
    let service = service?;
    let mut keys = keys.into_iter();
    let endpoints = endpoints.into_iter().enumerate().map(|(position, it)| {
        let key = keys.next().filter(|key| !key.is_empty());
        // A server without keys: any unique key will do.
        let key = key.or_else(|| Some(it.pod_name.clone()).filter(|pod| !pod.is_empty()));
        (key.unwrap_or_else(|| format!("#{position}")).into(), Arc::new(it))
    });
    let endpoints = endpoints.collect();
    Some((format!("{}/{}", service.namespace, service.name), ServiceEndpoints { service, endpoints }))
}
