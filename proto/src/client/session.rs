//! A `Sets/Watch` stream that reconnects, as a sequence of differences between states.
//!
//! A change set is requested only while the caller waits for a difference: a slow caller skips intermediate states.

use std::{fmt, future::Future, mem, pin::Pin, sync::Arc, time::Duration};

use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep_until, timeout_at},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};
use tracing::{Instrument as _, Span};

use super::{
    backoff::ReconnectBackoff,
    connect::{Client, Round, error_chain, in_time},
    inventory::Inventory,
    tracker::{ChangeOf, Tracker},
    view::{Event, View, decode},
};
use crate::{
    digest::{Digest, KeptBuckets},
    localv1::{Extension, Kept, OpItem, Revision, op_item::Op},
};

/// After this time without an item, a brain that sends heartbeats (every 10 s) is considered dead.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(30);

/// The peer does not offer a view, or does not permit it; with its message.
///
/// ```
/// use proxy_contract::client::Refused;
///
/// assert_eq!(Refused("no access to the cluster state".into()).to_string(), "no access to the cluster state");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Refused(pub String);

pub(super) struct Session<V: View> {
    client: Client,
    /// Empty while a stream is being opened, which holds it.
    round: Round,
    backoff: ReconnectBackoff,
    stage: Stage<V>,
    /// `None` if the client did not request the extension `Resume`.
    inventory: Option<Inventory>,
    tracker: Tracker<V>,
    /// Whether the last difference is not active at the client, which the next request says.
    pub(super) is_unconfirmed: bool,
    /// The number of buckets in the first request of the stream.
    buckets: usize,
    span: Span,
}

/// The stages of a session, in their order. A failure in any of them leads back to the first.
enum Stage<V: View> {
    /// Waits until it is time to connect.
    Waiting(Instant),
    /// Connects to a brain, and sends the first request with what the client has.
    Opening(Opening<V>),
    /// Receives operations, and requests the next change set after each sync.
    Open(Box<OpenStream<V>>),
}

type Opening<V> = Pin<Box<dyn Future<Output = (Round, Result<OpenStream<V>, Failure>)> + Send>>;

struct OpenStream<V: View> {
    request: V::Request,
    requests: mpsc::Sender<V::Request>,
    items: Streaming<OpItem>,
    /// Whether the last request has been answered.
    is_answered: bool,
    /// Whether any has been.
    is_synced: bool,
    revision: Option<Revision>,
    /// Whether the last request has said that the state before it is not active.
    says_unconfirmed: bool,
    /// When the brain is considered dead, if it sends heartbeats.
    silent_until: Option<Instant>,
    /// Whether `silent_until` has been postponed since the last item, because the caller was busy.
    is_postponed: bool,
    outage: watch::Sender<Option<String>>,
}

/// Why a stream ended.
enum Failure {
    /// The brain does not offer the view, or does not permit it.
    Refused(String),
    /// Anything else, such as a lost connection.
    Broken(String),
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        let reason = error_chain(&status);
        match status.code() {
            Code::Unimplemented | Code::PermissionDenied => Self::Refused(reason),
            _ => Self::Broken(reason),
        }
    }
}

impl From<String> for Failure {
    fn from(reason: String) -> Self {
        Self::Broken(reason)
    }
}

impl<V: View> fmt::Debug for Session<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("client", &self.client).finish_non_exhaustive()
    }
}

impl<V: View> Session<V> {
    pub(super) fn new(client: &Client) -> Self {
        let wants_resume = client.extensions.contains(&Extension::Resume);
        Self {
            client: client.clone(),
            round: Round::default(),
            backoff: ReconnectBackoff::new(&client.targets, &client.outage),
            stage: Stage::Waiting(Instant::now()),
            inventory: wants_resume.then(Inventory::default),
            tracker: Tracker::default(),
            is_unconfirmed: false,
            buckets: 0,
            span: tracing::info_span!("session", node = client.node),
        }
    }

    /// The last state, which was unconfirmed, is active now.
    pub(super) fn confirm(&mut self) {
        self.is_unconfirmed = false;
        let Stage::Open(stream) = &mut self.stage else { return };
        // Unless the next request says so anyway.
        if let (true, Some(revision)) = (mem::take(&mut stream.says_unconfirmed), stream.revision) {
            let mut request = stream.request.clone();
            V::confirmed(&mut request, revision);
            let _ = stream.requests.try_send(request);
        }
    }

    /// Waits for a state that differs from the last one, and returns the difference. Cancel safe.
    pub(super) async fn next(&mut self) -> ChangeOf<V> {
        loop {
            match self.try_next().await {
                Ok(change) => return change,
                Err(Refused(reason)) => {
                    let until = self.span.in_scope(|| self.backoff.failed(&self.round, &reason));
                    self.stage = Stage::Waiting(until);
                }
            }
        }
    }

    /// Waits for a difference, but returns at once if the peer refuses; the call after that waits before it reconnects.
    pub(super) async fn try_next(&mut self) -> Result<ChangeOf<V>, Refused> {
        let span = self.span.clone();
        async {
            loop {
                match self.advance().await {
                    Ok(Some(Event::Sync(revision))) => {
                        // Otherwise another brain has the same state: what is said of that stays.
                        if let Some(change) = self.tracker.finish(revision) {
                            self.is_unconfirmed = false;
                            return Ok(change);
                        }
                    }
                    Ok(Some(event)) => self.tracker.apply(event),
                    Ok(None) => {}
                    Err(Failure::Broken(reason)) => {
                        self.stage = Stage::Waiting(self.backoff.failed(&self.round, &reason));
                    }
                    Err(Failure::Refused(reason)) => {
                        self.stage = Stage::Waiting(ReconnectBackoff::refused());
                        return Err(Refused(reason));
                    }
                }
            }
        }
        .instrument(span)
        .await
    }

    /// Completes one step of the current stage. Cancel safe.
    async fn advance(&mut self) -> Result<Option<Event<V>>, Failure> {
        match &mut self.stage {
            Stage::Waiting(until) => {
                sleep_until(*until).await;
                self.stage = Stage::Opening(self.open());
                Ok(None)
            }
            Stage::Opening(opening) => {
                let (round, stream) = opening.await;
                self.round = round;
                self.stage = Stage::Open(Box::new(stream?));
                Ok(None)
            }
            Stage::Open(stream) => match stream.next(self.is_unconfirmed).await? {
                Op::Kept(it) => self.keep(it).map(Some),
                op => Ok(self.receive(op)),
            },
        }
    }

    fn open(&mut self) -> Opening<V> {
        let have = self.inventory.as_ref().and_then(Inventory::message);
        self.buckets = have.as_ref().map_or(0, |it| it.buckets.len() / size_of::<Digest>());
        let request = V::request(&self.client, have);
        let (client, mut round) = (self.client.clone(), mem::take(&mut self.round));
        Box::pin(async move {
            let stream = open(client, &mut round, request).await;
            (round, stream)
        })
    }

    fn keep(&mut self, message: Kept) -> Result<Event<V>, Failure> {
        let kept = KeptBuckets::parse(message.buckets, self.buckets);
        if let (Some(kept), Some(inventory)) = (kept, &mut self.inventory) {
            inventory.keep(&kept);
            return Ok(Event::Keep(Arc::new(kept)));
        }
        self.forget();
        Err(Failure::Broken("the brain keeps buckets that were not in the request".to_owned()))
    }

    /// The event of an operation; `None` if it changes no state.
    fn receive(&mut self, op: Op) -> Option<Event<V>> {
        if let Some(it) = &mut self.inventory {
            it.record(&op);
        }
        match decode(op) {
            Ok(event) => {
                if matches!(event, Some(Event::Sync(_))) {
                    self.backoff.synced(&mut self.round);
                }
                event
            }
            Err(error) => {
                let brain = self.round.shown(&self.client.targets);
                tracing::warn!(brain, error, "ignored an operation");
                // It is not part of the state.
                self.forget();
                None
            }
        }
    }

    /// The next stream begins with everything.
    fn forget(&mut self) {
        if let Some(it) = &mut self.inventory {
            *it = Inventory::default();
        }
    }
}

async fn open<V: View>(
    client: Client,
    round: &mut Round,
    first: V::Request,
) -> Result<OpenStream<V>, Failure> {
    let channel = client.connect(round).await?;
    // A request, and a confirmation.
    let (requests, outgoing) = mpsc::channel(2);
    let request = V::request(&client, None);
    requests.try_send(first).map_err(|it| it.to_string())?;
    let items = in_time(V::open(channel, ReceiverStream::new(outgoing))).await??;
    Ok(OpenStream {
        request,
        requests,
        items,
        is_answered: false,
        is_synced: false,
        revision: None,
        says_unconfirmed: false,
        silent_until: None,
        is_postponed: false,
        outage: client.outage,
    })
}

impl<V: View> OpenStream<V> {
    /// The next operation; requests a change set before, if the last one is complete.
    async fn next(&mut self, is_unconfirmed: bool) -> Result<Op, Failure> {
        loop {
            if mem::take(&mut self.is_answered) {
                let mut request = self.request.clone();
                if is_unconfirmed {
                    V::unconfirmed(&mut request);
                }
                self.says_unconfirmed = is_unconfirmed;
                // The channel has room, since the last request was answered. If it is closed, the items end.
                let _ = self.requests.try_send(request);
            }
            let item = self.item().await?;
            let item = item.ok_or_else(|| "the brain ended the stream".to_owned())?;
            match item.op {
                None => tracing::warn!("ignored an unknown operation"),
                Some(Op::Heartbeat(_)) => {
                    // A stream of another kind may have failed meanwhile.
                    self.outage.send_modify(|it| *it = it.take().filter(|_| !self.is_synced));
                }
                Some(op) => {
                    self.observe(&op);
                    return Ok(op);
                }
            }
        }
    }

    fn observe(&mut self, op: &Op) {
        match op {
            Op::Reset(it) if it.extensions().any(|it| it == Extension::Heartbeats) => {
                self.silent_until = Some(Instant::now() + HEARTBEAT_TIMEOUT);
            }
            Op::Sync(it) => {
                (self.is_answered, self.is_synced) = (true, true);
                self.revision = it.revision;
                self.says_unconfirmed = false;
            }
            _ => {}
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
