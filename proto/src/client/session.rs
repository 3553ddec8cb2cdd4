//! A `Sets/Watch` stream that reconnects, as a sequence of events.
//!
//! A change set is requested only while the caller waits for an event: a slow caller skips intermediate states.

use std::{fmt, future::Future, mem, pin::Pin, sync::Arc, time::Duration};

use prost::Message;
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep_until, timeout, timeout_at},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming, transport::Channel};

#[cfg(feature = "resume")]
use super::inventory::Inventory;
use super::{
    backoff::ReconnectBackoff,
    connect::{CONNECT_TIMEOUT, Connector, Round, error_chain},
};
use crate::localv1::{Extension, OpItem, Pod, Ref, Revision, ServiceCidr, Set, Value, op_item::Op};
#[cfg(feature = "resume")]
use crate::{
    digest::{Digest, KeptBuckets},
    localv1::Digests,
};

/// After this time without an item, a brain that sends heartbeats (every 10 s) is taken for dead.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(30);

/// One of the services whose streams carry change sets.
pub(super) trait View: Clone + fmt::Debug + Send + 'static {
    type Request: Clone + Send + 'static;
    type Node: Message + Clone + Default + PartialEq;
    type Service: Message + Clone + Default + PartialEq;
    type Endpoint: Message + Clone + Default + PartialEq;

    fn request(connector: &Connector) -> Self::Request;

    /// Says in the first request of a stream what the client has.
    #[cfg(feature = "resume")]
    fn resume(request: &mut Self::Request, have: Option<Digests>);

    /// Where the group of a name is; Services, nodes, ServiceCIDRs and pods are told apart by the sets of a node's view.
    #[cfg(feature = "resume")]
    fn position(set: Set, name: &str) -> u32;

    /// Says in a request that the last state is not active.
    fn unconfirmed(_request: &mut Self::Request) {}

    /// Makes a request say that the state of this revision, which was unconfirmed, is active now.
    fn confirmed(_request: &mut Self::Request, _revision: Revision) {}

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
    Pod(Arc<str>),
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
    /// What is in these buckets is not void.
    #[cfg(feature = "resume")]
    Keep(Arc<KeptBuckets>),
    SetServiceCidr(Arc<str>, ServiceCidr),
    DeleteServiceCidr(Arc<str>),
    SetPod(Arc<str>, Pod),
    DeletePod(Arc<str>),
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
    /// While a stream is being opened, that has it.
    round: Round,
    backoff: ReconnectBackoff,
    stage: Stage<V>,
    /// If the client asks for it.
    #[cfg(feature = "resume")]
    inventory: Option<Inventory>,
    /// How many buckets the first request of the stream had.
    #[cfg(feature = "resume")]
    buckets: usize,
}

enum Stage<V: View> {
    /// Until it is time to connect.
    Waiting(Instant),
    Opening(Opening<V>),
    Open(Box<WatchStream<V>>),
}

type Opening<V> = Pin<Box<dyn Future<Output = (Round, Result<WatchStream<V>, Failure>)> + Send>>;

struct WatchStream<V: View> {
    request: V::Request,
    requests: mpsc::Sender<V::Request>,
    items: Streaming<OpItem>,
    /// Whether the last request has been answered.
    is_answered: bool,
    /// Whether any has been.
    is_synced: bool,
    /// The revision of the last state.
    revision: Option<Revision>,
    activity: Activity,
    /// When the brain is taken for dead, if it sends heartbeats.
    silent_until: Option<Instant>,
    /// Whether `silent_until` has been postponed since the last item, because the caller was busy.
    is_postponed: bool,
    outage: watch::Sender<Option<String>>,
}

/// Whether the last state is active at the client.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Activity {
    /// It is, or the client has not said otherwise.
    Active,
    /// It is not, which the next request says.
    Inactive,
    /// It is not, as the last request has said.
    Unconfirmed,
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
        let backoff = ReconnectBackoff::new(&connector.targets, &connector.outage);
        Self {
            round: Round::default(),
            backoff,
            stage: Stage::Waiting(Instant::now()),
            #[cfg(feature = "resume")]
            inventory: connector.extensions.contains(&Extension::Resume).then(Inventory::default),
            #[cfg(feature = "resume")]
            buckets: 0,
            connector: connector.clone(),
        }
    }

    /// The next request says that the last state is not active.
    pub(super) fn unconfirmed(&mut self) {
        if let Stage::Open(stream) = &mut self.stage {
            stream.unconfirmed();
        }
    }

    /// The last state, which was unconfirmed, is active now.
    pub(super) fn confirm(&mut self) {
        if let Stage::Open(stream) = &mut self.stage {
            stream.confirm();
        }
    }

    /// Waits for the next event. Cancel safe.
    pub(super) async fn next(&mut self) -> Event<V> {
        loop {
            match self.try_next().await {
                Ok(event) => return event,
                Err(Refused(reason)) => {
                    self.stage = Stage::Waiting(self.backoff.failed(&self.round, &reason));
                }
            }
        }
    }

    /// Waits for the next event, but returns at once if the peer refuses; the call after that waits before it reconnects.
    pub(super) async fn try_next(&mut self) -> Result<Event<V>, Refused> {
        loop {
            let failure = match &mut self.stage {
                Stage::Waiting(until) => {
                    sleep_until(*until).await;
                    let request = V::request(&self.connector);
                    #[cfg(feature = "resume")]
                    let request = {
                        let mut request = request;
                        let have = self.inventory.as_ref().and_then(Inventory::message);
                        self.buckets = have.as_ref().map_or(0, |it| it.buckets.len() / size_of::<Digest>());
                        V::resume(&mut request, have);
                        request
                    };
                    let (connector, mut round) = (self.connector.clone(), mem::take(&mut self.round));
                    self.stage = Stage::Opening(Box::pin(async move {
                        let stream = open(connector, &mut round, request).await;
                        (round, stream)
                    }));
                    continue;
                }
                Stage::Opening(opening) => {
                    let (round, stream) = opening.await;
                    self.round = round;
                    match stream {
                        Ok(stream) => {
                            self.stage = Stage::Open(Box::new(stream));
                            continue;
                        }
                        Err(failure) => failure,
                    }
                }
                Stage::Open(stream) => match stream.next().await {
                    #[cfg(feature = "resume")]
                    Ok(Op::Kept(it)) => {
                        match (KeptBuckets::parse(it.buckets, self.buckets), &mut self.inventory) {
                            (Some(kept), Some(inventory)) => {
                                inventory.keep(&kept);
                                return Ok(Event::Keep(Arc::new(kept)));
                            }
                            _ => {
                                self.inventory = self.inventory.take().map(|_| Inventory::default());
                                "the brain keeps buckets that were not in the request".to_owned().into()
                            }
                        }
                    }
                    Ok(op) => {
                        #[cfg(feature = "resume")]
                        if let Some(it) = &mut self.inventory {
                            record(it, &op);
                        }
                        match decode(op) {
                            Ok(Some(event)) => {
                                if matches!(event, Event::Sync(_)) {
                                    self.backoff.synced(&mut self.round);
                                }
                                return Ok(event);
                            }
                            Ok(None) => {}
                            Err(reason) => {
                                let brain = self.round.shown(&self.connector.targets);
                                tracing::warn!("{brain}: ignored {reason}");
                                // The caller has not got it.
                                #[cfg(feature = "resume")]
                                self.inventory.iter_mut().for_each(|it| *it = Inventory::default());
                            }
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
            self.stage = Stage::Waiting(self.backoff.failed(&self.round, &failure.reason));
        }
    }
}

/// Notes what an operation means for what the client has.
#[cfg(feature = "resume")]
pub(super) fn record(inventory: &mut Inventory, op: &Op) {
    let set_of = |it: &Ref| Set::try_from(it.set).ok().filter(|it| *it != Set::UnknownSet);
    match op {
        Op::Reset(_) => inventory.reset(),
        Op::Sync(_) => inventory.sync(),
        Op::Set(Value { r#ref: Some(it), bytes }) => {
            if let Some(set) = set_of(it) {
                inventory.set(set, &it.path, bytes);
            }
        }
        Op::Delete(it) => {
            if let Some(set) = set_of(it) {
                inventory.delete(set, &it.path);
            }
        }
        Op::Set(_) | Op::Kept(_) | Op::Heartbeat(_) => {}
    }
}

async fn open<V: View>(
    connector: Connector,
    round: &mut Round,
    first: V::Request,
) -> Result<WatchStream<V>, Failure> {
    let channel = connector.connect(round).await?;
    // A request, and a confirmation.
    let (requests, outgoing) = mpsc::channel(2);
    let request = V::request(&connector);
    requests.try_send(first).map_err(|it| it.to_string())?;
    let response = timeout(CONNECT_TIMEOUT, V::open(channel, ReceiverStream::new(outgoing))).await;
    let items = response.map_err(|_| format!("no response within {CONNECT_TIMEOUT:?}"))??;
    Ok(WatchStream {
        request,
        requests,
        items,
        is_answered: false,
        is_synced: false,
        revision: None,
        activity: Activity::Active,
        silent_until: None,
        is_postponed: false,
        outage: connector.outage,
    })
}

impl<V: View> WatchStream<V> {
    fn unconfirmed(&mut self) {
        if self.activity == Activity::Active {
            self.activity = Activity::Inactive;
        }
    }

    fn confirm(&mut self) {
        // Unless the next request says so anyway.
        if let (Activity::Unconfirmed, Some(revision)) =
            (mem::replace(&mut self.activity, Activity::Active), self.revision)
        {
            let mut request = self.request.clone();
            V::confirmed(&mut request, revision);
            let _ = self.requests.try_send(request);
        }
    }

    async fn next(&mut self) -> Result<Op, Failure> {
        loop {
            if self.is_answered {
                self.is_answered = false;
                let mut request = self.request.clone();
                if self.activity == Activity::Inactive {
                    V::unconfirmed(&mut request);
                    self.activity = Activity::Unconfirmed;
                }
                // The channel has room, since the last request was answered. If it is closed, the items end.
                let _ = self.requests.try_send(request);
            }
            let item = self.item().await?;
            let item = item.ok_or_else(|| "the brain ended the stream".to_owned())?;
            let Some(op) = item.op else {
                tracing::warn!("ignored an unknown operation");
                continue;
            };
            match &op {
                Op::Heartbeat(_) => {
                    // A stream of another kind may have failed meanwhile.
                    self.outage.send_modify(|it| *it = it.take().filter(|_| !self.is_synced));
                    continue;
                }
                Op::Reset(it) if it.extensions().any(|it| it == Extension::Heartbeats) => {
                    self.silent_until = Some(Instant::now() + HEARTBEAT_TIMEOUT);
                }
                _ => {}
            }
            if let Op::Sync(it) = &op {
                (self.is_answered, self.is_synced) = (true, true);
                self.revision = it.revision;
                self.activity = Activity::Active;
            }
            return Ok(op);
        }
    }

    async fn item(&mut self) -> Result<Option<OpItem>, Failure> {
        let Some(mut until) = self.silent_until else { return Ok(self.items.message().await?) };
        if Instant::now() >= until && !mem::replace(&mut self.is_postponed, true) {
            // The caller may have been busy for long, and the connection with it.
            until = Instant::now() + HEARTBEAT_TIMEOUT / 3;
            self.silent_until = Some(until);
        }
        let item = timeout_at(until, self.items.message()).await;
        let item = item.map_err(|_| format!("no sign of life within {HEARTBEAT_TIMEOUT:?}"))??;
        self.silent_until = Some(Instant::now() + HEARTBEAT_TIMEOUT);
        self.is_postponed = false;
        Ok(item)
    }
}

/// The event of an operation; `None` for an endpoint's second path.
pub(super) fn decode<V: View>(op: Op) -> Result<Option<Event<V>>, String> {
    Ok(Some(match op {
        Op::Reset(it) => Event::Reset(it.extensions().collect()),
        Op::Sync(it) => Event::Sync(it.revision),
        // Neither was requested.
        Op::Kept(_) | Op::Heartbeat(_) => return Ok(None),
        Op::Set(Value { r#ref, bytes }) => match parse_ref::<V>(r#ref)? {
            Path::ServiceCidr(name) => {
                Event::SetServiceCidr(name.clone(), message("ServiceCIDR", &name, &bytes)?)
            }
            Path::Pod(name) => Event::SetPod(name.clone(), message("pod", &name, &bytes)?),
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
            Path::Pod(name) => Event::DeletePod(name),
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
