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
use tonic::{Code, Status, Streaming, transport::Channel};

use super::{Client, PATIENCE, backoff::Backoff, connect, failure};
use crate::localv1::{OpItem, Ref, Set, Value, op_item::Op};

/// What is followed: one of the services whose streams carry change sets.
pub(super) trait View: Clone + Send + Sync + 'static {
    type Request: Send + 'static;
    type Event: Send;

    fn request(&self) -> Self::Request;

    /// Begins a conversation.
    fn open(
        channel: Channel,
        requests: ReceiverStream<Self::Request>,
    ) -> impl Future<Output = Result<Streaming<OpItem>, Status>> + Send;

    /// What an item means; what cannot be read is refused alone.
    fn decode_op(op: Op) -> Result<Self::Event, String>;
}

/// The peer does not offer a view, or not to us; what it said.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Refused(pub String);

pub(super) struct Session<V: View> {
    client: Client,
    view: V,
    backoff: Backoff,
    stage: Stage<V>,
}

enum Stage<V: View> {
    /// Until it is time to try again.
    Waiting(Instant),
    Opening(Pin<Box<dyn Future<Output = Result<Conversation<V>, Failure>> + Send>>),
    Open(Box<Conversation<V>>),
}

struct Conversation<V: View> {
    requests: mpsc::Sender<V::Request>,
    items: Streaming<OpItem>,
    /// Whether the last request has been answered.
    answered: bool,
}

/// Why a conversation is over.
struct Failure {
    reason: String,
    is_refusal: bool,
}

impl Failure {
    fn new(status: &Status) -> Self {
        let is_refusal = matches!(status.code(), Code::Unimplemented | Code::PermissionDenied);
        Self { reason: failure(status), is_refusal }
    }
}

impl From<String> for Failure {
    fn from(reason: String) -> Self {
        Self { reason, is_refusal: false }
    }
}

impl<V: View> fmt::Debug for Session<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("client", &self.client).finish_non_exhaustive()
    }
}

impl<V: View> Session<V> {
    pub(super) fn new(client: &Client, view: V) -> Self {
        let backoff = Backoff::new(&client.target);
        Self { client: client.clone(), view, backoff, stage: Stage::Waiting(Instant::now()) }
    }

    /// The next event, however long it takes. Nothing is lost if it is dropped while it waits.
    pub(super) async fn next(&mut self) -> V::Event {
        loop {
            match self.try_next().await {
                Ok(event) => return event,
                Err(Refused(reason)) => self.stage = Stage::Waiting(self.backoff.failed(&reason)),
            }
        }
    }

    /// The same; but whoever is refused is told so at once, and is not asked again for a long while.
    pub(super) async fn try_next(&mut self) -> Result<V::Event, Refused> {
        loop {
            let failed = match &mut self.stage {
                Stage::Waiting(until) => {
                    sleep_until(*until).await;
                    let (client, view) = (self.client.clone(), self.view.clone());
                    self.stage = Stage::Opening(Box::pin(open(client, view)));
                    continue;
                }
                Stage::Opening(opening) => match opening.await {
                    Ok(conversation) => {
                        self.stage = Stage::Open(Box::new(conversation));
                        continue;
                    }
                    Err(failed) => failed,
                },
                Stage::Open(conversation) => match conversation.next(&self.view).await {
                    Ok(op) => {
                        let is_sync = matches!(op, Op::Sync(_));
                        match V::decode_op(op) {
                            Ok(event) => {
                                if is_sync {
                                    self.backoff.synced();
                                }
                                return Ok(event);
                            }
                            Err(reason) => tracing::warn!("{}: passed over: {reason}", self.client.target),
                        }
                        continue;
                    }
                    Err(failed) => failed,
                },
            };
            if failed.is_refusal {
                self.stage = Stage::Waiting(self.backoff.refused());
                return Err(Refused(failed.reason));
            }
            self.stage = Stage::Waiting(self.backoff.failed(&failed.reason));
        }
    }
}

async fn open<V: View>(client: Client, view: V) -> Result<Conversation<V>, Failure> {
    let channel = connect(&client).await?;
    let (requests, outgoing) = mpsc::channel(1);
    requests.try_send(view.request()).map_err(|it| it.to_string())?;
    let answer = timeout(PATIENCE, V::open(channel, ReceiverStream::new(outgoing))).await;
    let answer = answer.map_err(|_| format!("no answer within {PATIENCE:?}"))?;
    let items = answer.map_err(|it| Failure::new(&it))?;
    Ok(Conversation { requests, items, answered: false })
}

impl<V: View> Conversation<V> {
    async fn next(&mut self, view: &V) -> Result<Op, Failure> {
        loop {
            if self.answered {
                self.answered = false;
                // There is room for it: the one before has been answered. If it cannot be sent any more, the items end.
                let _ = self.requests.try_send(view.request());
            }
            let item = self.items.message().await.map_err(|it| Failure::new(&it))?;
            let item = item.ok_or_else(|| "the brain has ended the stream".to_owned())?;
            let Some(op) = item.op else {
                tracing::warn!("passed over: an operation that is not known");
                continue;
            };
            self.answered = matches!(op, Op::Sync(_));
            return Ok(op);
        }
    }
}

/// A value that was set, with its place: the set, the path, and the bytes.
pub(super) fn value(it: Value) -> Result<(Set, String, Vec<u8>), String> {
    let (set, path) = place(it.r#ref)?;
    Ok((set, path, it.bytes))
}

/// Where something is: the set and the path.
pub(super) fn place(it: Option<Ref>) -> Result<(Set, String), String> {
    let Ref { set, path } = it.ok_or("an item without a place")?;
    let set = Set::try_from(set).map_err(|_| format!("the path {path:?} in set {set}"))?;
    Ok((set, path))
}

/// The message in a value.
pub(super) fn decode<T: Message + Default>(path: &str, bytes: &[u8]) -> Result<T, String> {
    T::decode(bytes).map_err(|it| format!("the value of {path}: {it}"))
}
