//! One conversation after the other, as one stream of events.
//!
//! The one rule: a change set is asked for only when somebody waits for it, so that whoever is slow skips what was
//! overtaken.

use std::{fmt, future::Future, pin::Pin};

use prost::Message;
use tokio::{
    sync::mpsc,
    time::{Instant, sleep_until, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use super::{Client, LONGEST_MESSAGE, PATIENCE, connect, failure, outage::Outage};
use crate::localv1::{
    Addition, Endpoint, OpItem, Ref, Revision, Service, Set, Value, WatchReq, op_item::Op,
    sets_client::SetsClient,
};

/// What a brain says. Services are called `namespace/name`, endpoints by the last part of their path.
#[derive(Debug)]
pub(super) enum Event {
    /// What was said before is void.
    Reset,
    SetService(String, Service),
    DeleteService(String),
    SetEndpoint(String, String, Endpoint),
    DeleteEndpoint(String, String),
    /// What was said is complete.
    Sync(Option<Revision>),
}

pub(super) struct Session {
    client: Client,
    outage: Outage,
    stage: Stage,
}

enum Stage {
    /// Until it is time to try again.
    Waiting(Instant),
    Opening(Pin<Box<dyn Future<Output = Result<Conversation, String>> + Send>>),
    Open(Box<Conversation>),
}

struct Conversation {
    requests: mpsc::Sender<WatchReq>,
    items: Streaming<OpItem>,
    /// Whether the last request has been answered.
    answered: bool,
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("client", &self.client).finish_non_exhaustive()
    }
}

impl Session {
    pub(super) fn new(client: &Client) -> Self {
        let outage = Outage::new(&client.target);
        Self { client: client.clone(), outage, stage: Stage::Waiting(Instant::now()) }
    }

    /// The next event, however long it takes. Nothing is lost if it is dropped while it waits.
    pub(super) async fn next(&mut self) -> Event {
        loop {
            let failed = match &mut self.stage {
                Stage::Waiting(until) => {
                    sleep_until(*until).await;
                    self.stage = Stage::Opening(Box::pin(open(self.client.clone())));
                    continue;
                }
                Stage::Opening(opening) => match opening.await {
                    Ok(conversation) => {
                        self.stage = Stage::Open(Box::new(conversation));
                        continue;
                    }
                    Err(reason) => reason,
                },
                Stage::Open(conversation) => match conversation.next(&self.client.node).await {
                    Ok(item) => match understand(item) {
                        Ok(event) => {
                            if let Event::Sync(_) = event {
                                self.outage.synced();
                            }
                            return event;
                        }
                        Err(reason) => {
                            tracing::warn!("{}: passed over: {reason}", self.client.target);
                            continue;
                        }
                    },
                    Err(reason) => reason,
                },
            };
            self.stage = Stage::Waiting(self.outage.failed(&failed));
        }
    }
}

fn request(node: &str) -> WatchReq {
    WatchReq { node_name: node.to_owned(), wanted: vec![Addition::Revisions.into()] }
}

async fn open(client: Client) -> Result<Conversation, String> {
    let channel = connect(&client).await?;
    let (requests, outgoing) = mpsc::channel(1);
    requests.try_send(request(&client.node)).map_err(|it| it.to_string())?;
    let mut sets = SetsClient::new(channel).max_decoding_message_size(LONGEST_MESSAGE);
    let answer = timeout(PATIENCE, sets.watch(ReceiverStream::new(outgoing))).await;
    let answer = answer.map_err(|_| format!("no answer within {PATIENCE:?}"))?;
    let items = answer.map_err(|it| failure(&it))?.into_inner();
    Ok(Conversation { requests, items, answered: false })
}

impl Conversation {
    async fn next(&mut self, node: &str) -> Result<OpItem, String> {
        if self.answered {
            self.answered = false;
            // There is room for it: the one before has been answered. If it cannot be sent any more, the items end.
            let _ = self.requests.try_send(request(node));
        }
        let item = self.items.message().await.map_err(|it| failure(&it))?;
        let item = item.ok_or("the brain has ended the stream")?;
        self.answered = matches!(item.op, Some(Op::Sync(_)));
        Ok(item)
    }
}

/// Reads an item; what cannot be read is refused alone.
fn understand(item: OpItem) -> Result<Event, String> {
    match item.op.ok_or("an operation that is not known")? {
        Op::Reset(_) => Ok(Event::Reset),
        Op::Sync(it) => Ok(Event::Sync(it.revision)),
        Op::Set(Value { r#ref, bytes }) => match place(r#ref)? {
            Place::Service(name) => decode(&name, &bytes).map(|it| Event::SetService(name, it)),
            Place::Endpoint(service, key) => {
                let endpoint = decode(&format!("{service}/{key}"), &bytes)?;
                Ok(Event::SetEndpoint(service, key, endpoint))
            }
        },
        Op::Delete(it) => match place(Some(it))? {
            Place::Service(name) => Ok(Event::DeleteService(name)),
            Place::Endpoint(service, key) => Ok(Event::DeleteEndpoint(service, key)),
        },
    }
}

enum Place {
    Service(String),
    Endpoint(String, String),
}

fn place(reference: Option<Ref>) -> Result<Place, String> {
    let Ref { set, path } = reference.ok_or("an item without a place")?;
    let parts: Vec<_> = path.split('/').collect();
    match (Set::try_from(set), parts.as_slice()) {
        (_, parts) if parts.contains(&"") => Err(format!("the path {path:?}, of which a part is empty")),
        (Ok(Set::ServicesSet), [_, _]) => Ok(Place::Service(path)),
        (Ok(Set::EndpointsSet), [namespace, service, key]) => {
            Ok(Place::Endpoint(format!("{namespace}/{service}"), (*key).to_owned()))
        }
        _ => Err(format!("the path {path:?} in set {set}")),
    }
}

fn decode<T: Message + Default>(path: &str, bytes: &[u8]) -> Result<T, String> {
    T::decode(bytes).map_err(|it| format!("the value of {path}: {it}"))
}
