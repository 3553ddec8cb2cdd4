//! One full state at a time, by the long poll of KEP-2104.
//!
//! The one rule: what was handed out is not handed out again, and its revision is enough to go on from there in another
//! process.

use std::{collections::BTreeMap, fmt, future::Future, pin::Pin, sync::Arc};

use tokio::time::{Instant, sleep_until};

use super::{Client, LONGEST_MESSAGE, ServiceEndpoints, State, backoff::Backoff, connect, failure};
use crate::{
    localnetv1::{self, NextFilter, NextItem, endpoints_client::EndpointsClient},
    localv1::Revision,
};

type Asking = Pin<Box<dyn Future<Output = Result<State, String>> + Send>>;

/// Asks for one full state after the other: what [`Client::poll`] returns.
pub struct Poll {
    client: Client,
    filter: NextFilter,
    backoff: Backoff,
    retry_at: Instant,
    asking: Option<Asking>,
}

impl fmt::Debug for Poll {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Poll").field("client", &self.client).finish_non_exhaustive()
    }
}

impl Poll {
    pub(super) fn new(client: &Client, from: NextFilter) -> Self {
        let filter = NextFilter { node_name: client.node.clone(), extensions: client.requested(), ..from };
        let backoff = Backoff::new(&client.target);
        Self { client: client.clone(), filter, backoff, retry_at: Instant::now(), asking: None }
    }

    /// Waits for a state of another revision than the last one: the newest.
    ///
    /// It is never `None`: no error and no outage is the end. Nothing is lost if it is dropped while it waits.
    pub async fn next(&mut self) -> Option<Arc<State>> {
        loop {
            let asking = match &mut self.asking {
                Some(asking) => asking,
                none => {
                    sleep_until(self.retry_at).await;
                    none.insert(Box::pin(ask(self.client.clone(), self.filter.clone())))
                }
            };
            let answer = asking.await;
            self.asking = None;
            match answer {
                Ok(state) => {
                    self.backoff.synced();
                    let Revision { instance_id, rev } = state.revision.unwrap_or_default();
                    (self.filter.instance_id, self.filter.rev) = (instance_id, rev);
                    return Some(Arc::new(state));
                }
                Err(reason) => self.retry_at = self.backoff.failed(&reason),
            }
        }
    }
}

async fn ask(client: Client, filter: NextFilter) -> Result<State, String> {
    let channel = connect(&client).await?;
    let mut endpoints = EndpointsClient::new(channel).max_decoding_message_size(LONGEST_MESSAGE);
    let mut items = endpoints.next(filter).await.map_err(|it| failure(&it))?.into_inner();
    let mut message = async || items.message().await.map_err(|it| failure(&it));
    let first = message().await?;
    let extensions = first.iter().flat_map(NextItem::extensions).collect();
    let Some(NextItem { next: Some(next), .. }) = first else {
        return Err("the brain has ended the stream without a state".to_owned());
    };
    let (mut services, mut nodes) = (BTreeMap::new(), BTreeMap::new());
    while let Some(item) = message().await? {
        if let Some(node) = item.node {
            nodes.insert(node.name.as_str().into(), Arc::new(node));
        }
        let Some((name, it)) = item.endpoints.and_then(service_endpoints) else { continue };
        services.insert(name.into(), Arc::new(it));
    }
    let revision = Revision { instance_id: next.instance_id, rev: next.rev };
    Ok(State { revision: Some(revision), extensions, nodes, services })
}

fn service_endpoints(message: localnetv1::ServiceEndpoints) -> Option<(String, ServiceEndpoints)> {
    let localnetv1::ServiceEndpoints { service, endpoints, keys } = message;
    let service = service?;
    let mut keys = keys.into_iter();
    let endpoints = endpoints.into_iter().enumerate().map(|(position, it)| {
        let key = keys.next().filter(|key| !key.is_empty());
        // A server that does not say what an endpoint is called: any word that is its own will do.
        let key = key.or_else(|| Some(it.pod_name.clone()).filter(|pod| !pod.is_empty()));
        (key.unwrap_or_else(|| format!("#{position}")).into(), Arc::new(it))
    });
    let endpoints = endpoints.collect();
    Some((format!("{}/{}", service.namespace, service.name), ServiceEndpoints { service, endpoints }))
}
