//! `localv1.Sets/Watch`: one node's state as a stream of changes.
//!
//! The one rule: one request buys one change set, and whatever happens until then collapses into it.

use std::{pin::Pin, sync::Arc};

use proto::localv1::{Addition, EmptyOp, OpItem, Revision, WatchReq, op_item::Op, sets_server::Sets};
use tokio::sync::mpsc::{self, Sender};
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tonic::{Request, Response, Status, Streaming};

use super::{Nodes, changes::Changes, peer::Peer};
use crate::{Published, Subscription};

/// How many operations are made in advance for a watcher.
const AHEAD: usize = 32;

pub(super) struct Watch {
    pub(super) nodes: Arc<dyn Nodes>,
}

#[tonic::async_trait]
impl Sets for Watch {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<OpItem, Status>> + Send>>;

    async fn watch(
        &self,
        request: Request<Streaming<WatchReq>>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let peer = Peer::of(&request)?;
        let (sender, items) = mpsc::channel(AHEAD);
        let watcher = Watcher {
            peer,
            nodes: Arc::clone(&self.nodes),
            requests: request.into_inner(),
            more_requests: true,
            sender,
            sent: None,
            credit: 0,
        };
        tokio::spawn(watcher.serve());
        Ok(Response::new(Box::pin(ReceiverStream::new(items))))
    }
}

struct Watcher {
    peer: Peer,
    nodes: Arc<dyn Nodes>,
    requests: Streaming<WatchReq>,
    /// Whether the client may still ask.
    more_requests: bool,
    sender: Sender<Result<OpItem, Status>>,
    /// What the client has.
    sent: Option<Arc<Published>>,
    /// How many change sets it has asked for.
    credit: u32,
}

/// Why a conversation is over.
enum End {
    /// The client or the source is gone.
    Gone,
    /// What the client asks for cannot be had.
    Refused(Status),
}

impl Watcher {
    async fn serve(mut self) {
        let Err(end) = self.converse().await;
        if let End::Refused(status) = end {
            // If the client is gone by now, it does not need to know.
            let _ = self.sender.send(Err(status)).await;
        }
    }

    async fn converse(&mut self) -> Result<std::convert::Infallible, End> {
        let mut request = self.first_request().await?;
        self.send(Op::Reset(EmptyOp::default())).await?;
        let mut states = self.follow(&request)?;
        // The first state, and that of another node, are told of even if nothing differs.
        let mut is_owed = true;
        loop {
            let changes = tokio::select! {
                biased;
                () = self.sender.closed() => return Err(End::Gone),
                message = self.requests.message(), if self.more_requests => {
                    match message {
                        Ok(Some(next)) => {
                            self.credit = self.credit.saturating_add(1);
                            if next.node_name != request.node_name {
                                states = self.follow(&next)?;
                                is_owed = true;
                            }
                            request = next;
                        }
                        // It asks for nothing more, but gets what it has asked for.
                        Ok(None) if self.credit > 0 => self.more_requests = false,
                        Ok(None) | Err(_) => return Err(End::Gone),
                    }
                    continue;
                }
                published = next_if(self.credit > 0, &mut states) => {
                    let published = published.ok_or(End::Gone)?;
                    let changes = match &self.sent {
                        Some(sent) => Changes::new(&sent.state, &published.state),
                        None => Changes::new(&Default::default(), &published.state),
                    };
                    self.sent = Some(published);
                    changes
                }
            };
            if changes.is_empty() && !is_owed {
                continue;
            }
            for item in changes {
                self.sender.send(Ok(item)).await.map_err(|_| End::Gone)?;
            }
            self.send(Op::Sync(EmptyOp { revision: self.revision(&request) })).await?;
            is_owed = false;
            self.credit -= 1;
            if self.credit == 0 && !self.more_requests {
                return Err(End::Gone);
            }
        }
    }

    async fn first_request(&mut self) -> Result<WatchReq, End> {
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

    fn follow(&self, request: &WatchReq) -> Result<Subscription, End> {
        let node = &request.node_name;
        self.peer.may(node).map_err(End::Refused)?;
        self.nodes.follow(node, (0, 0)).map_err(|it| End::Refused(it.status(node)))
    }

    /// What is complete now, for a client that wants to know.
    fn revision(&self, request: &WatchReq) -> Option<Revision> {
        let sent = self.sent.as_ref()?;
        let is_wanted = request.wanted.contains(&Addition::Revisions.into());
        is_wanted.then_some(Revision { instance_id: sent.instance_id, rev: sent.rev })
    }

    async fn send(&self, op: Op) -> Result<(), End> {
        self.sender.send(Ok(OpItem { op: Some(op) })).await.map_err(|_| End::Gone)
    }
}

/// The next state if it may be sent; none if the source is gone.
async fn next_if(may_be_sent: bool, states: &mut Subscription) -> Option<Arc<Published>> {
    if may_be_sent {
        return states.next().await;
    }
    states.closed().await;
    None
}
