//! One `Sets/Watch` stream: what the node's and the cluster's stream have in common.
//!
//! Invariant: each request is answered with one change set; changes in between are merged into it.

use std::{convert::Infallible, future::Future, pin::Pin, time::Duration};

use proxy_contract::localv1::{EmptyOp, OpItem, op_item::Op};
use tokio::{
    sync::mpsc::{self, Sender},
    time::timeout,
};
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tonic::{Status, Streaming};
use wire::Extensions;

use super::change_set::{ChangeSet, Diff};

/// How many operations are encoded ahead of the connection.
const QUEUE_DEPTH: usize = 32;

/// How long a client may leave a change set unread; then its stream ends, and what it holds is freed.
const READ_TIMEOUT: Duration = Duration::from_secs(300);

/// The response stream.
pub(super) type Items = Pin<Box<dyn Stream<Item = Result<OpItem, Status>> + Send>>;

/// The state that a stream sends.
pub(super) trait View: Send + 'static {
    type Request: Send + 'static;
    type Diff: Diff;

    /// The extensions of the first request that the stream will carry.
    fn negotiate(&mut self, request: &Self::Request) -> Extensions;

    /// Takes a request; returns whether it must be answered even if the change set is empty.
    fn request(&mut self, request: Self::Request) -> Result<bool, Status>;

    /// Waits for a state that was not sent yet, and returns the change set that leads to it. Cancel safe.
    fn next(&mut self) -> impl Future<Output = Result<ChangeSet<Self::Diff>, End>> + Send;

    /// Waits until the publisher is dropped.
    fn closed(&mut self) -> impl Future<Output = ()> + Send;

    /// The sync after a change set.
    fn sync(&self) -> EmptyOp;
}

/// Why a session ended.
pub(super) enum End {
    /// The client disconnected, or the publisher was dropped.
    Closed,
    /// The request cannot be answered.
    Refused(Status),
}

/// Starts a session; returns its response stream.
pub(super) fn start<V: View>(view: V, requests: Streaming<V::Request>) -> Items {
    let (sender, items) = mpsc::channel(QUEUE_DEPTH);
    let session = Session { view, requests, is_half_closed: false, sender, pending_requests: 0 };
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
        self.pending_requests = 1;
        let extensions = self.view.negotiate(&request).numbers();
        self.send(Op::Reset(EmptyOp { extensions, ..EmptyOp::default() })).await?;
        // The first state, and that of another node, are sent even if the change set is empty.
        let mut must_answer = self.view.request(request).map_err(End::Refused)?;
        loop {
            let mut changes = tokio::select! {
                biased;
                () = self.sender.closed() => return Err(End::Closed),
                message = self.requests.message(), if !self.is_half_closed => {
                    match message {
                        Ok(Some(request)) => {
                            self.pending_requests = self.pending_requests.saturating_add(1);
                            must_answer |= self.view.request(request).map_err(End::Refused)?;
                        }
                        // The pending requests are still answered.
                        Ok(None) if self.pending_requests > 0 => self.is_half_closed = true,
                        Ok(None) | Err(_) => return Err(End::Closed),
                    }
                    continue;
                }
                changes = next_if(self.pending_requests > 0, &mut self.view) => changes?.peekable(),
            };
            if changes.peek().is_none() && !must_answer {
                continue;
            }
            for item in changes {
                self.send_item(item).await?;
            }
            self.send(Op::Sync(self.view.sync())).await?;
            must_answer = false;
            self.pending_requests -= 1;
            if self.pending_requests == 0 && self.is_half_closed {
                return Err(End::Closed);
            }
        }
    }

    async fn send(&mut self, op: Op) -> Result<(), End> {
        self.send_item(OpItem { op: Some(op) }).await
    }

    /// A client that does not read keeps two states from being freed, so it must not do so for ever.
    async fn send_item(&mut self, item: OpItem) -> Result<(), End> {
        match timeout(READ_TIMEOUT, self.sender.send(Ok(item))).await {
            Ok(sent) => sent.map_err(|_| End::Closed),
            Err(_) => Err(End::Closed),
        }
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
