//! `localv1.Sets/Watch`: the state of one node as a stream of changes.
//!
//! A change set is the difference to what the stream has sent before, even if that was the state of another node.

use std::sync::Arc;

use proxy_contract::localv1::{EmptyOp, Revision, WatchReq, sets_server::Sets};
use tonic::{Request, Response, Status, Streaming};
use wire::Extensions;

use super::{
    authz::Peer,
    change_set::ChangeSet,
    node_diff::NodeDiff,
    watch_session::{self, End, Items, Turns, View},
};
use crate::{
    node_states::NodeStates,
    publisher::{Published, Subscription},
};

pub(super) struct NodeWatch {
    pub(super) nodes: Arc<dyn NodeStates>,
    pub(super) turns: Turns,
}

#[tonic::async_trait]
impl Sets for NodeWatch {
    type WatchStream = Items;

    async fn watch(&self, request: Request<Streaming<WatchReq>>) -> Result<Response<Items>, Status> {
        let view = NodeView {
            peer: Peer::of(&request)?,
            nodes: Arc::clone(&self.nodes),
            node: None,
            extensions: Extensions::default(),
            sent: None,
        };
        Ok(Response::new(watch_session::start(view, request.into_inner(), self.turns.clone())))
    }
}

struct NodeView {
    peer: Peer,
    nodes: Arc<dyn NodeStates>,
    /// The requested name, and the states of that node.
    node: Option<(String, Subscription)>,
    extensions: Extensions,
    /// The last state that was sent.
    sent: Option<Arc<Published>>,
}

impl View for NodeView {
    type Request = WatchReq;
    type Diff = NodeDiff;

    fn negotiate(&mut self, request: &WatchReq) -> Extensions {
        self.extensions = Extensions::LOCAL.negotiate(request.extensions());
        self.extensions
    }

    fn request(&mut self, request: WatchReq) -> Result<bool, Status> {
        let node = request.node_name;
        if self.node.as_ref().is_some_and(|(name, _)| *name == node) {
            return Ok(false);
        }
        self.peer.authorize_node(&node)?;
        let states = self.nodes.subscribe(&node, (0, 0)).map_err(|it| it.status(&node))?;
        self.node = Some((node, states));
        Ok(true)
    }

    async fn next(&mut self) -> Result<ChangeSet<NodeDiff>, End> {
        let (_, states) = self.node.as_mut().ok_or(End::Closed)?;
        let published = states.next().await.ok_or(End::Closed)?;
        let changes = match &self.sent {
            Some(sent) => NodeDiff::change_set(&sent.state, &published.state, self.extensions),
            None => NodeDiff::change_set(&Default::default(), &published.state, self.extensions),
        };
        self.sent = Some(published);
        Ok(changes)
    }

    async fn closed(&mut self) {
        if let Some((_, states)) = &mut self.node {
            states.closed().await;
        }
    }

    fn sync(&self) -> EmptyOp {
        let sent = self.sent.as_ref().filter(|_| self.extensions.revisions);
        let revision = sent.map(|it| Revision { instance_id: it.instance_id, rev: it.rev });
        EmptyOp { revision, ..EmptyOp::default() }
    }
}
