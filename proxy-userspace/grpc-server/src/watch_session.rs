//! One `Sets/Watch` stream: what the node's and the cluster's stream have in common.
//!
//! Invariant: each request that asks for one is answered with one change set; changes in between are merged into it.
//! Long change sets take turns: thousands of them delay none that is short.

use std::{convert::Infallible, future::Future, iter::Peekable, pin::Pin, sync::Arc, time::Duration};

use proxy_contract::localv1::{EmptyOp, OpItem, op_item::Op};
use tokio::{
    sync::{
        Semaphore,
        mpsc::{self, Sender},
    },
    task::yield_now,
    time::{sleep, timeout},
};
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tonic::{Status, Streaming};
use wire::Extensions;

use super::change_set::{ChangeSet, Diff};

/// How many operations are encoded ahead of the connection.
const QUEUE_DEPTH: usize = 64;

/// How many operations a change set may have that waits for no turn.
const SHORT: usize = 16;
/// How many operations of a long change set are sent per turn.
const BATCH_SIZE: usize = QUEUE_DEPTH;

/// From how many sessions on encoded Services are shared.
const CROWD: usize = 16;

/// How long nothing is sent to a client that requests heartbeats; it takes a server for dead after three times as long.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(10);

/// How long a client may leave a change set unread; then its stream ends, and what it holds is freed.
const READ_TIMEOUT: Duration = Duration::from_secs(300);

/// The response stream.
pub(crate) type Items = Pin<Box<dyn Stream<Item = Result<OpItem, Status>> + Send>>;

/// The state that a stream sends.
pub(crate) trait View: Send + 'static {
    type Request: Send + 'static;
    type Diff: Diff;

    /// The extensions of the first request that the stream will carry.
    fn negotiate(&mut self, request: &Self::Request) -> Extensions;

    /// Takes a request; returns what it asks for.
    fn request(&mut self, request: Self::Request) -> Result<Asked, Status>;

    /// Waits for a state that was not sent yet, and returns the change set that leads to it. Cancel safe.
    fn next(&mut self) -> impl Future<Output = Result<ChangeSet<Self::Diff>, End>> + Send;

    /// Waits until the publisher is dropped.
    fn closed(&mut self) -> impl Future<Output = ()> + Send;

    /// The change set is empty, and is not sent.
    fn skipped(&self) {}

    /// The sync after a change set.
    fn sync(&self) -> EmptyOp;
}

/// What a request asks for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Asked {
    /// A change set, even if it is empty.
    State,
    /// A change set that is not empty.
    Change,
    /// Nothing: it only acknowledges.
    Nothing,
}

/// Whose turn it is to send a batch of a long change set; the sessions of a server share it. One session has it at a time,
/// until its connection has had a chance to send the batch, and never while it waits for its client: tasks that are ready
/// wait for one batch and not for one of each session.
#[derive(Clone)]
pub(crate) struct Turns(Arc<Semaphore>);

impl Default for Turns {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(1)))
    }
}

impl Turns {
    /// Whether there are so many sessions that what they have in common is worth keeping.
    pub(crate) fn is_crowd(&self) -> bool {
        Arc::strong_count(&self.0) > CROWD
    }
}

/// Why a session ended.
pub(crate) enum End {
    /// The client disconnected, or the publisher was dropped.
    Closed,
    /// The request cannot be answered.
    Refused(Status),
}

/// Starts a session; returns its response stream.
pub(crate) fn start<V: View>(view: V, requests: Streaming<V::Request>, turns: Turns) -> Items {
    let (sender, items) = mpsc::channel(QUEUE_DEPTH);
    let session = Session {
        view,
        requests,
        is_half_closed: false,
        sender,
        pending_requests: 0,
        must_answer: false,
        turns,
    };
    tokio::spawn(session.run());
    Box::pin(ReceiverStream::new(items))
}

struct Session<V: View> {
    view: V,
    requests: Streaming<V::Request>,
    /// Whether the client will send no more requests.
    is_half_closed: bool,
    sender: Sender<Result<OpItem, Status>>,
    /// The number of requests without a change set.
    pending_requests: u32,
    /// Whether one of them must be answered even if the change set is empty.
    must_answer: bool,
    turns: Turns,
}

impl<V: View> Session<V> {
    async fn run(mut self) {
        let Err(end) = self.serve().await;
        if let End::Refused(status) = end {
            // Fails only if the client has disconnected.
            let _ = self.sender.send(Err(status)).await;
        }
    }

    async fn serve(&mut self) -> Result<Infallible, End> {
        let request = tokio::select! {
            () = self.sender.closed() => return Err(End::Closed),
            message = self.requests.message() => message.ok().flatten().ok_or(End::Closed)?,
        };
        let extensions = self.view.negotiate(&request);
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
                () = sleep(HEARTBEAT_INTERVAL), if extensions.heartbeats => {
                    self.send(Op::Heartbeat(EmptyOp::default())).await?;
                    continue;
                }
                changes = next_if(self.pending_requests > 0, &mut self.view) => changes?.peekable(),
            };
            if changes.peek().is_none() && !self.must_answer {
                self.view.skipped();
                continue;
            }
            self.send_changes(changes).await?;
            self.send(Op::Sync(self.view.sync())).await?;
            self.must_answer = false;
            self.pending_requests -= 1;
            if self.pending_requests == 0 && self.is_half_closed {
                return Err(End::Closed);
            }
        }
    }

    fn request(&mut self, request: V::Request) -> Result<(), End> {
        let asked = self.view.request(request).map_err(End::Refused)?;
        self.pending_requests = self.pending_requests.saturating_add((asked != Asked::Nothing).into());
        self.must_answer |= asked == Asked::State;
        Ok(())
    }

    async fn send_changes(&mut self, mut changes: Peekable<ChangeSet<V::Diff>>) -> Result<(), End> {
        let room = room_for(self.sender.reserve_many(SHORT)).await?;
        room.zip(&mut changes).for_each(|(room, item)| room.send(Ok(item)));
        while changes.peek().is_some() {
            let room = room_for(self.sender.reserve_many(BATCH_SIZE)).await?;
            // It is never closed.
            let _turn = self.turns.0.acquire().await;
            room.zip(&mut changes).for_each(|(room, item)| room.send(Ok(item)));
            // First the task of the response, and then that of the connection.
            yield_now().await;
            yield_now().await;
        }
        Ok(())
    }

    async fn send(&mut self, op: Op) -> Result<(), End> {
        room_for(self.sender.reserve()).await?.send(Ok(OpItem { op: Some(op) }));
        Ok(())
    }
}

/// Room for items. A client that does not read keeps states from being freed, so it must not do so for ever.
pub(crate) async fn room_for<T, E>(reserved: impl Future<Output = Result<T, E>>) -> Result<T, End> {
    match timeout(READ_TIMEOUT, reserved).await {
        Ok(room) => room.map_err(|_| End::Closed),
        Err(_) => Err(End::Closed),
    }
}

/// The next change set if there is a request for it; otherwise waits until the publisher is dropped.
async fn next_if<V: View>(is_requested: bool, view: &mut V) -> Result<ChangeSet<V::Diff>, End> {
    if is_requested {
        return view.next().await;
    }
    view.closed().await;
    Err(End::Closed)
}
