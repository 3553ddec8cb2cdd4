//! One `Sets/Watch` stream: what the node's and the cluster's stream have in common.
//!
//! Invariant: each request that asks for one is answered with one change set; changes in between are merged into it.
//! Long change sets take turns: thousands of them delay none that is short.

use std::{convert::Infallible, future::Future, iter::Peekable, pin::Pin, sync::Arc, time::Duration};

use proxy_contract::localv1::{EmptyOp, Extension, OpItem, op_item::Op};
use tokio::{
    sync::{
        Mutex,
        mpsc::{self, Sender},
    },
    task::yield_now,
    time::{Instant, sleep, timeout},
};
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tonic::{Status, Streaming};
use tracing::{Instrument as _, Span};
use wire::Extensions;

use super::change_set::{ChangeSet, Diff};

/// The number of operations that are encoded ahead of the connection.
const QUEUE_DEPTH: usize = 64;

/// The number of operations that a change set sends without waiting for a turn.
const SMALL_CHANGE_SET: usize = 16;
/// The number of operations of a long change set that are sent per turn.
const BATCH_SIZE: usize = QUEUE_DEPTH;

/// With more streams than this, encoded Services are shared.
const SHARED_ENCODING_THRESHOLD: usize = 16;

/// After this time without an item, a client that requests heartbeats gets one; after three times as long, it considers the
/// server dead.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(10);

/// The time for which a client may leave a change set unread. Then its stream ends, and its states are freed.
const READ_TIMEOUT: Duration = Duration::from_secs(300);

pub(crate) type Items = Pin<Box<dyn Stream<Item = Result<OpItem, Status>> + Send>>;

/// The source of the change sets of a stream.
pub(crate) trait ChangeSource: Send + 'static {
    type Request: Send + 'static;
    type Diff: Diff;

    /// The extensions of the first request that the stream will carry.
    fn negotiate(&mut self, request: &Self::Request) -> Extensions;

    fn request(&mut self, request: Self::Request) -> Result<RequestKind, Status>;

    /// Waits for a state that was not sent yet, and returns the change set that leads to it. Cancel safe.
    fn next(&mut self) -> impl Future<Output = Result<ChangeSet<Self::Diff>, End>> + Send;

    /// Waits until the publisher is dropped.
    fn closed(&mut self) -> impl Future<Output = ()> + Send;

    /// The change set is empty, and is not sent.
    fn skipped(&self) {}

    fn sync(&self) -> EmptyOp;
}

/// The answer that a request asks for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum RequestKind {
    /// A change set, even if it is empty.
    State,
    /// A change set that is not empty.
    Change,
    /// None: it only acknowledges.
    Acknowledgment,
}

/// Serializes batches of long change sets across the streams of a server, so that short ones are not starved.
///
/// A stream keeps its turn until its connection has had a chance to send the batch, and never while it waits for its client.
#[derive(Clone, Default)]
pub(crate) struct Turns(Arc<Mutex<()>>);

impl Turns {
    /// Whether there are so many streams that what they have in common is worth keeping.
    pub(crate) fn shares_encoding(&self) -> bool {
        Arc::strong_count(&self.0) > SHARED_ENCODING_THRESHOLD
    }
}

/// Why a stream ended.
pub(crate) enum End {
    /// The client disconnected, or the publisher was dropped.
    Closed,
    /// The request cannot be answered.
    Refused(Status),
}

/// Starts a stream, whose log lines are in `span`; returns its responses.
pub(crate) fn start<S: ChangeSource>(
    source: S,
    requests: Streaming<S::Request>,
    turns: Turns,
    span: Span,
) -> Items {
    let (sender, items) = mpsc::channel(QUEUE_DEPTH);
    let stream = ChangeStream {
        source,
        requests,
        is_half_closed: false,
        sender,
        pending_requests: 0,
        must_answer: false,
        turns,
    };
    tokio::spawn(stream.run().instrument(span));
    Box::pin(ReceiverStream::new(items))
}

struct ChangeStream<S: ChangeSource> {
    source: S,
    requests: Streaming<S::Request>,
    /// Whether the client will send no more requests.
    is_half_closed: bool,
    sender: Sender<Result<OpItem, Status>>,
    /// The number of requests without a change set.
    pending_requests: u32,
    /// Whether one of them must be answered even if the change set is empty.
    must_answer: bool,
    turns: Turns,
}

impl<S: ChangeSource> ChangeStream<S> {
    async fn run(mut self) {
        let Err(end) = self.serve().await;
        match end {
            End::Closed => tracing::debug!("stream closed"),
            End::Refused(status) => {
                tracing::debug!(error = status.message(), "request refused");
                // Fails only if the client has disconnected.
                let _ = self.sender.send(Err(status)).await;
            }
        }
    }

    async fn serve(&mut self) -> Result<Infallible, End> {
        let request = tokio::select! {
            () = self.sender.closed() => return Err(End::Closed),
            message = self.requests.message() => message.ok().flatten().ok_or(End::Closed)?,
        };
        let extensions = self.source.negotiate(&request);
        self.send(Op::Reset(EmptyOp { extensions: extensions.numbers(), ..EmptyOp::default() })).await?;
        self.request(request)?;
        loop {
            let mut changes = tokio::select! {
                biased;
                () = self.sender.closed() => return Err(End::Closed),
                message = self.requests.message(), if !self.is_half_closed => {
                    match message {
                        Ok(Some(request)) => self.request(request)?,
                        // The pending requests are still answered.
                        Ok(None) if self.pending_requests > 0 => self.is_half_closed = true,
                        Ok(None) | Err(_) => return Err(End::Closed),
                    }
                    continue;
                }
                () = sleep(HEARTBEAT_INTERVAL), if extensions.has(Extension::Heartbeats) => {
                    self.send(Op::Heartbeat(EmptyOp::default())).await?;
                    continue;
                }
                changes = next_if(self.pending_requests > 0, &mut self.source) => changes?.peekable(),
            };
            if changes.peek().is_none() && !self.must_answer {
                self.source.skipped();
                continue;
            }
            self.send_changes(changes).await?;
            self.must_answer = false;
            self.pending_requests -= 1;
            if self.pending_requests == 0 && self.is_half_closed {
                return Err(End::Closed);
            }
        }
    }

    fn request(&mut self, request: S::Request) -> Result<(), End> {
        let kind = self.source.request(request).map_err(End::Refused)?;
        let asks_for_changes = kind != RequestKind::Acknowledgment;
        self.pending_requests = self.pending_requests.saturating_add(asks_for_changes.into());
        self.must_answer |= kind == RequestKind::State;
        Ok(())
    }

    async fn send_changes(&mut self, mut changes: Peekable<ChangeSet<S::Diff>>) -> Result<(), End> {
        let begin = Instant::now();
        let permits = reserve_with_timeout(self.sender.reserve_many(SMALL_CHANGE_SET)).await?;
        permits.zip(&mut changes).for_each(|(permit, item)| permit.send(Ok(item)));
        while changes.peek().is_some() {
            let permits = reserve_with_timeout(self.sender.reserve_many(BATCH_SIZE)).await?;
            let _turn = self.turns.0.lock().await;
            permits.zip(&mut changes).for_each(|(permit, item)| permit.send(Ok(item)));
            // First the task of the response, and then that of the connection.
            yield_now().await;
            yield_now().await;
        }
        let sync = self.source.sync();
        tracing::debug!(revision = sync.revision.map(|it| it.rev), took = ?begin.elapsed(), "change set sent");
        self.send(Op::Sync(sync)).await
    }

    async fn send(&mut self, op: Op) -> Result<(), End> {
        reserve_with_timeout(self.sender.reserve()).await?.send(Ok(OpItem { op: Some(op) }));
        Ok(())
    }
}

/// Waits for the permits of a channel. A client that does not read keeps states from being freed, so the time is limited.
pub(crate) async fn reserve_with_timeout<T, E>(
    reserved: impl Future<Output = Result<T, E>>,
) -> Result<T, End> {
    match timeout(READ_TIMEOUT, reserved).await {
        Ok(permits) => permits.map_err(|_| End::Closed),
        Err(_) => Err(End::Closed),
    }
}

/// The next change set if there is a request for it; otherwise waits until the publisher is dropped.
async fn next_if<S: ChangeSource>(is_requested: bool, source: &mut S) -> Result<ChangeSet<S::Diff>, End> {
    if is_requested {
        return source.next().await;
    }
    source.closed().await;
    Err(End::Closed)
}
