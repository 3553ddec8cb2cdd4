//! A conversation about a view of the state: what the two `Sets/Watch` have in common.
//!
//! The one rule: one request buys one change set, and whatever happens until then collapses into it.

use std::{future::Future, pin::Pin};

use proxy_contract::localv1::{EmptyOp, OpItem, op_item::Op};
use tokio::sync::mpsc::{self, Sender};
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tonic::{Status, Streaming};
use wire::Extensions;

/// How many operations are made in advance for a watcher.
const AHEAD: usize = 32;

/// The operations as they are sent.
pub(super) type Items = Pin<Box<dyn Stream<Item = Result<OpItem, Status>> + Send>>;

/// What is told in change sets.
pub(super) trait View: Send + 'static {
    /// What a client asks by.
    type Request: Send + 'static;
    /// What makes a state of the one before.
    type Changes: Iterator<Item = OpItem> + Send;

    /// What of that which the first request wants will be said.
    fn grant(&mut self, request: &Self::Request) -> Extensions;

    /// Takes a request; true if it is to be answered even if nothing differs.
    fn ask(&mut self, request: Self::Request) -> Result<bool, Status>;

    /// Waits for a state that has not been told of, and tells what is different; nothing is lost if it is dropped while
    /// it waits.
    fn next(&mut self) -> impl Future<Output = Result<Self::Changes, End>> + Send;

    /// Waits for the end of the source.
    fn closed(&mut self) -> impl Future<Output = ()> + Send;

    /// What is said when the changes have been told.
    fn sync(&self) -> EmptyOp;
}

/// Why a conversation is over.
pub(super) enum End {
    /// The client or the source is gone.
    Gone,
    /// What the client asks for cannot be had.
    Refused(Status),
}

/// Begins a conversation; its part of it.
pub(super) fn converse<V: View>(view: V, requests: Streaming<V::Request>) -> Items {
    let (sender, items) = mpsc::channel(AHEAD);
    let watcher = Watcher { view, requests, more_requests: true, sender, credit: 0 };
    tokio::spawn(watcher.serve());
    Box::pin(ReceiverStream::new(items))
}

struct Watcher<V: View> {
    view: V,
    requests: Streaming<V::Request>,
    /// Whether the client may still ask.
    more_requests: bool,
    sender: Sender<Result<OpItem, Status>>,
    /// How many change sets it has asked for.
    credit: u32,
}

impl<V: View> Watcher<V> {
    async fn serve(mut self) {
        let Err(end) = self.converse().await;
        if let End::Refused(status) = end {
            // If the client is gone by now, it does not need to know.
            let _ = self.sender.send(Err(status)).await;
        }
    }

    async fn converse(&mut self) -> Result<std::convert::Infallible, End> {
        let request = self.first_request().await?;
        let granted = self.view.grant(&request).numbers();
        self.send(Op::Reset(EmptyOp { extensions: granted, ..EmptyOp::default() })).await?;
        // The first state, and another view, are told of even if nothing differs.
        let mut is_owed = self.view.ask(request).map_err(End::Refused)?;
        loop {
            let mut changes = tokio::select! {
                biased;
                () = self.sender.closed() => return Err(End::Gone),
                message = self.requests.message(), if self.more_requests => {
                    match message {
                        Ok(Some(request)) => {
                            self.credit = self.credit.saturating_add(1);
                            is_owed |= self.view.ask(request).map_err(End::Refused)?;
                        }
                        // It asks for nothing more, but gets what it has asked for.
                        Ok(None) if self.credit > 0 => self.more_requests = false,
                        Ok(None) | Err(_) => return Err(End::Gone),
                    }
                    continue;
                }
                changes = next_if(self.credit > 0, &mut self.view) => changes?.peekable(),
            };
            if changes.peek().is_none() && !is_owed {
                continue;
            }
            for item in changes {
                self.sender.send(Ok(item)).await.map_err(|_| End::Gone)?;
            }
            self.send(Op::Sync(self.view.sync())).await?;
            is_owed = false;
            self.credit -= 1;
            if self.credit == 0 && !self.more_requests {
                return Err(End::Gone);
            }
        }
    }

    async fn first_request(&mut self) -> Result<V::Request, End> {
        tokio::select! {
            () = self.sender.closed() => Err(End::Gone),
            message = self.requests.message() => match message {
                Ok(Some(request)) => {
                    self.credit = 1;
                    Ok(request)
                }
                Ok(None) | Err(_) => Err(End::Gone),
            }
        }
    }

    async fn send(&mut self, op: Op) -> Result<(), End> {
        self.sender.send(Ok(OpItem { op: Some(op) })).await.map_err(|_| End::Gone)
    }
}

/// The next changes if they may be sent; an end if the source is gone.
async fn next_if<V: View>(may_be_sent: bool, view: &mut V) -> Result<V::Changes, End> {
    if may_be_sent {
        return view.next().await;
    }
    view.closed().await;
    Err(End::Gone)
}
