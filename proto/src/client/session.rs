//! A `Sets/Watch` stream that reconnects, as a sequence of events.
//!
//! A change set is requested only while the caller waits for an event: a slow caller skips intermediate states.

use std::{fmt, future::Future, pin::Pin, sync::Arc, time::Duration};

use prost::Message;
use tokio::{
    sync::mpsc,
    time::{Instant, sleep_until, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming, transport::Channel};

use super::{
    backoff::ReconnectBackoff,
    connect::{Connector, error_chain},
};
use crate::localv1::{Extension, OpItem, Ref, Revision, ServiceCidr, Set, Value, op_item::Op};

/// How long to wait for the response headers of the stream.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);

/// One of the services whose streams carry change sets.
pub(super) trait View: Clone + fmt::Debug + Send + 'static {
    type Request: Clone + Send + 'static;
    type Node: Message + Clone + Default + PartialEq;
    type Service: Message + Clone + Default + PartialEq;
    type Endpoint: Message + Clone + Default + PartialEq;

    fn request(connector: &Connector) -> Self::Request;

    /// Opens the stream.
    fn open(
        channel: Channel,
        requests: ReceiverStream<Self::Request>,
    ) -> impl Future<Output = Result<Streaming<OpItem>, Status>> + Send;

    /// What the path in a set refers to; `None` if it is invalid.
    fn parse_path(set: Set, path: &str) -> Option<Path>;
}

/// What a path refers to. The name of a Service is `namespace/name`.
pub(super) enum Path {
    ServiceCidr(Arc<str>),
    Node(Arc<str>),
    Service(Arc<str>),
    /// The Service, and the key of the endpoint within it.
    Endpoint(Arc<str>, Arc<str>),
    /// An endpoint that is also sent under another path.
    Duplicate,
}

/// An operation of the stream. Names are those of [`Path`].
#[derive(Clone, Debug)]
pub(super) enum Event<V: View> {
    /// Everything received before is void; the stream carries these extensions.
    Reset(Vec<Extension>),
    SetServiceCidr(Arc<str>, ServiceCidr),
    DeleteServiceCidr(Arc<str>),
    SetNode(Arc<str>, V::Node),
    DeleteNode(Arc<str>),
    SetService(Arc<str>, V::Service),
    DeleteService(Arc<str>),
    SetEndpoint(Arc<str>, Arc<str>, V::Endpoint),
    DeleteEndpoint(Arc<str>, Arc<str>),
    /// The change set is complete.
    Sync(Option<Revision>),
}

/// The peer does not offer a view, or does not permit it; with its message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Refused(pub String);

pub(super) struct Session<V: View> {
    connector: Connector,
    backoff: ReconnectBackoff,
    stage: Stage<V>,
}

enum Stage<V: View> {
    /// Until it is time to connect.
    Waiting(Instant),
    Opening(Pin<Box<dyn Future<Output = Result<WatchStream<V>, Failure>> + Send>>),
    Open(Box<WatchStream<V>>),
}

struct WatchStream<V: View> {
    request: V::Request,
    requests: mpsc::Sender<V::Request>,
    items: Streaming<OpItem>,
    /// Whether the last request has been answered.
    is_answered: bool,
}

/// Why a stream ended.
struct Failure {
    reason: String,
    is_refusal: bool,
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        let is_refusal = matches!(status.code(), Code::Unimplemented | Code::PermissionDenied);
        Self { reason: error_chain(&status), is_refusal }
    }
}

impl From<String> for Failure {
    fn from(reason: String) -> Self {
        Self { reason, is_refusal: false }
    }
}

impl<V: View> fmt::Debug for Session<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("connector", &self.connector).finish_non_exhaustive()
    }
}

impl<V: View> Session<V> {
    pub(super) fn new(connector: &Connector) -> Self {
        let backoff = ReconnectBackoff::new(&connector.target, &connector.outage);
        Self { connector: connector.clone(), backoff, stage: Stage::Waiting(Instant::now()) }
    }

    /// Waits for the next event. Cancel safe.
    pub(super) async fn next(&mut self) -> Event<V> {
        loop {
            match self.try_next().await {
                Ok(event) => return event,
                Err(Refused(reason)) => self.stage = Stage::Waiting(self.backoff.failed(&reason)),
            }
        }
    }

    /// Waits for the next event, but returns at once if the peer refuses; the call after that waits before it reconnects.
    pub(super) async fn try_next(&mut self) -> Result<Event<V>, Refused> {
        loop {
            let failure = match &mut self.stage {
                Stage::Waiting(until) => {
                    sleep_until(*until).await;
                    self.stage = Stage::Opening(Box::pin(open(self.connector.clone())));
                    continue;
                }
                Stage::Opening(opening) => match opening.await {
                    Ok(stream) => {
                        self.stage = Stage::Open(Box::new(stream));
                        continue;
                    }
                    Err(failure) => failure,
                },
                Stage::Open(stream) => match stream.next().await {
                    Ok(op) => {
                        match decode(op) {
                            Ok(Some(event)) => {
                                if matches!(event, Event::Sync(_)) {
                                    self.backoff.synced();
                                }
                                return Ok(event);
                            }
                            Ok(None) => {}
                            Err(reason) => tracing::warn!("{}: ignored {reason}", self.connector.target),
                        }
                        continue;
                    }
                    Err(failure) => failure,
                },
            };
            if failure.is_refusal {
                self.stage = Stage::Waiting(ReconnectBackoff::refused());
                return Err(Refused(failure.reason));
            }
            self.stage = Stage::Waiting(self.backoff.failed(&failure.reason));
        }
    }
}

async fn open<V: View>(connector: Connector) -> Result<WatchStream<V>, Failure> {
    let channel = connector.connect().await?;
    let (requests, outgoing) = mpsc::channel(1);
    let request = V::request(&connector);
    requests.try_send(request.clone()).map_err(|it| it.to_string())?;
    let response = timeout(RESPONSE_TIMEOUT, V::open(channel, ReceiverStream::new(outgoing))).await;
    let items = response.map_err(|_| format!("no response within {RESPONSE_TIMEOUT:?}"))??;
    Ok(WatchStream { request, requests, items, is_answered: false })
}

impl<V: View> WatchStream<V> {
    async fn next(&mut self) -> Result<Op, Failure> {
        loop {
            if self.is_answered {
                self.is_answered = false;
                // The channel has room, since the last request was answered. If it is closed, the items end.
                let _ = self.requests.try_send(self.request.clone());
            }
            let item = self.items.message().await?;
            let item = item.ok_or_else(|| "the brain ended the stream".to_owned())?;
            let Some(op) = item.op else {
                tracing::warn!("ignored an unknown operation");
                continue;
            };
            self.is_answered = matches!(op, Op::Sync(_));
            return Ok(op);
        }
    }
}

/// The event of an operation; `None` for an endpoint's second path.
fn decode<V: View>(op: Op) -> Result<Option<Event<V>>, String> {
    Ok(Some(match op {
        Op::Reset(it) => Event::Reset(it.extensions().collect()),
        Op::Sync(it) => Event::Sync(it.revision),
        Op::Set(Value { r#ref, bytes }) => match parse_ref::<V>(r#ref)? {
            Path::ServiceCidr(name) => {
                Event::SetServiceCidr(name.clone(), message("ServiceCIDR", &name, &bytes)?)
            }
            Path::Node(name) => Event::SetNode(name.clone(), message("node", &name, &bytes)?),
            Path::Service(name) => Event::SetService(name.clone(), message("service", &name, &bytes)?),
            Path::Endpoint(service, key) => {
                let endpoint = message("endpoint", &format!("{service}/{key}"), &bytes)?;
                Event::SetEndpoint(service, key, endpoint)
            }
            Path::Duplicate => return Ok(None),
        },
        Op::Delete(it) => match parse_ref::<V>(Some(it))? {
            Path::ServiceCidr(name) => Event::DeleteServiceCidr(name),
            Path::Node(name) => Event::DeleteNode(name),
            Path::Service(name) => Event::DeleteService(name),
            Path::Endpoint(service, key) => Event::DeleteEndpoint(service, key),
            Path::Duplicate => return Ok(None),
        },
    }))
}

fn parse_ref<V: View>(it: Option<Ref>) -> Result<Path, String> {
    let Ref { set, path } = it.ok_or("an item without a path")?;
    let known = Set::try_from(set).map_err(|_| format!("path {path:?} of the unknown set {set}"))?;
    V::parse_path(known, &path)
        .ok_or_else(|| format!("path {path:?}, which is invalid in set {}", known.as_str_name()))
}

fn message<T: Message + Default>(kind: &str, name: &str, bytes: &[u8]) -> Result<T, String> {
    T::decode(bytes).map_err(|it| format!("{kind} {name}: {it}"))
}
