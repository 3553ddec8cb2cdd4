//! `localv1.Sets/Watch`: one node's state as a stream of changes.
//!
//! The one rule: what is sent is the difference to what this stream has been sent, of whichever node that was.

use std::sync::Arc;

use proxy_contract::localv1::{EmptyOp, Revision, WatchReq, sets_server::Sets};
use tonic::{Request, Response, Status, Streaming};
use wire::Extensions;

use super::{
    NodeStates,
    authz::Peer,
    node_diff::NodeDiff,
    watch_session::{End, Items, View, converse},
};
use crate::{Published, Subscription};

pub(super) struct Watch {
    pub(super) nodes: Arc<dyn NodeStates>,
}

#[tonic::async_trait]
impl Sets for Watch {
    type WatchStream = Items;

    async fn watch(&self, request: Request<Streaming<WatchReq>>) -> Result<Response<Items>, Status> {
        let view = Local {
            peer: Peer::of(&request)?,
            nodes: Arc::clone(&self.nodes),
            followed: None,
            additions: Extensions::default(),
            sent: None,
        };
        Ok(Response::new(converse(view, request.into_inner())))
    }
}

/// A node's state.
struct Local {
    peer: Peer,
    nodes: Arc<dyn NodeStates>,
    /// The node, as the client calls it, and its states.
    followed: Option<(String, Subscription)>,
    additions: Extensions,
    /// What the client has.
    sent: Option<Arc<Published>>,
}

impl View for Local {
    type Request = WatchReq;
    type Changes = NodeDiff;

    fn grant(&mut self, request: &WatchReq) -> Extensions {
        self.additions = Extensions::LOCAL.negotiate(request.extensions());
        self.additions
    }

    fn ask(&mut self, request: WatchReq) -> Result<bool, Status> {
        let node = request.node_name;
        if self.followed.as_ref().is_some_and(|(followed, _)| *followed == node) {
            return Ok(false);
        }
        self.peer.may(&node)?;
        let states = self.nodes.subscribe(&node, (0, 0)).map_err(|it| it.status(&node))?;
        self.followed = Some((node, states));
        Ok(true)
    }

    async fn next(&mut self) -> Result<NodeDiff, End> {
        let (_, states) = self.followed.as_mut().ok_or(End::Gone)?;
        let published = states.next().await.ok_or(End::Gone)?;
        let changes = match &self.sent {
            Some(sent) => NodeDiff::new(&sent.state, &published.state, self.additions),
            None => NodeDiff::new(&Default::default(), &published.state, self.additions),
        };
        self.sent = Some(published);
        Ok(changes)
    }

    async fn closed(&mut self) {
        if let Some((_, states)) = &mut self.followed {
            states.closed().await;
        }
    }

    fn sync(&self) -> EmptyOp {
        let sent = self.sent.as_ref().filter(|_| self.additions.revisions);
        let revision = sent.map(|it| Revision { instance_id: it.instance_id, rev: it.rev });
        EmptyOp { revision, ..EmptyOp::default() }
    }
}
