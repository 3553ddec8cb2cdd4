//! `localv1.Sets/Watch`: the state of one node as a stream of changes.
//!
//! A change set is the difference to what the stream has sent before, even if that was the state of another node; the first
//! one is that to what the client says it has.

use std::sync::Arc;

use model::state::NodeState;
use proxy_contract::{
    digest::Digest,
    localv1::{EmptyOp, Extension, Revision, WatchReq, sets_server::Sets},
};
use publish::{
    NodeStates, Published, Subscription,
    followers::{Followers, Following},
};
use tonic::{Request, Response, Status, Streaming};
use tracing::{Span, field::Empty};
use wire::Extensions;

use super::{
    authz::Peer,
    change_set::ChangeSet,
    change_stream::{self, ChangeSource, End, Items, RequestKind, Turns},
    encoded::{NodeDigests, kept},
    node_changes::NodeChanges,
    node_diff::NodeDiff,
    resume, status,
};

/// What the streams of a server share.
#[derive(Clone)]
pub(crate) struct NodeSets {
    nodes: Arc<dyn NodeStates>,
    turns: Turns,
    node_digests: Arc<NodeDigests>,
    node_changes: Arc<NodeChanges>,
    followers: Followers,
}

impl NodeSets {
    pub(crate) fn new(nodes: Arc<dyn NodeStates>, turns: Turns, followers: Followers) -> Self {
        Self { nodes, turns, node_digests: Arc::default(), node_changes: Arc::default(), followers }
    }
}

#[tonic::async_trait]
impl Sets for NodeSets {
    type WatchStream = Items;

    async fn watch(&self, request: Request<Streaming<WatchReq>>) -> Result<Response<Items>, Status> {
        let peer = Peer::of(&request)?;
        let span = tracing::info_span!("watch_node", client = %peer, node = Empty);
        let source = NodeChangeSource {
            peer,
            shared: self.clone(),
            node: None,
            extensions: Extensions::default(),
            have: None,
            sent: None,
            following: None,
        };
        Ok(Response::new(change_stream::start(source, request.into_inner(), self.turns.clone(), span)))
    }
}

struct NodeChangeSource {
    peer: Peer,
    shared: NodeSets,
    /// The requested name, and the states of that node.
    node: Option<(String, Subscription)>,
    extensions: Extensions,
    /// The digests of what the client has, until the first state is sent.
    have: Option<Vec<Digest>>,
    sent: Option<Arc<Published>>,
    /// This client among the followers.
    following: Option<Following>,
}

impl ChangeSource for NodeChangeSource {
    type Request = WatchReq;
    type Diff = NodeDiff;

    fn negotiate(&mut self, request: &WatchReq) -> Extensions {
        self.extensions = resume::negotiate(Extensions::LOCAL, request.extensions(), request.have.as_ref());
        self.extensions
    }

    fn request(&mut self, request: WatchReq) -> Result<RequestKind, Status> {
        let node = request.node_name;
        if self.node.is_none() {
            self.have = resume::parse(request.have, self.extensions)?;
        }
        if let Some(it) = self.following.as_ref().filter(|_| !request.unconfirmed) {
            it.acknowledged(request.confirmed.map(|it| (it.instance_id, it.rev)));
        }
        if self.node.as_ref().is_some_and(|(name, _)| *name == node) {
            return Ok(if request.confirmed.is_some() {
                RequestKind::Acknowledgment
            } else {
                RequestKind::Change
            });
        }
        self.peer.authorize_node(&node)?;
        let states = self.shared.nodes.subscribe(&node).map_err(|it| status::of_subscription(&it, &node))?;
        let shown = if node.is_empty() { "(the brain's own)" } else { &node };
        Span::current().record("node", shown);
        self.following = Some(self.shared.followers.add(shown.into(), states.resubscribe()));
        self.node = Some((node, states));
        // Also if the state of one node is that of the other.
        Ok(RequestKind::State)
    }

    async fn next(&mut self) -> Result<ChangeSet<NodeDiff>, End> {
        let (_, states) = self.node.as_mut().ok_or(End::Closed)?;
        let published = states.next().await.ok_or(End::Closed)?;
        let is_shared = self.shared.turns.shares_encoding();
        let have = self.have.take();
        let resumed =
            have.map(|it| kept(&published.state, self.extensions, &it, is_shared, &self.shared.node_digests));
        let empty = NodeState::default();
        let before = match (&self.sent, &resumed) {
            (Some(sent), _) => &sent.state,
            (None, Some((_, rest))) => rest,
            (None, None) => &empty,
        };
        let node_changes = if self.extensions.has(Extension::Nodes) {
            // What is left of a client's own nodes is like no other's.
            let is_shared = is_shared && resumed.is_none();
            self.shared.node_changes.between(&before.nodes, &published.state.nodes, is_shared)
        } else {
            Arc::default()
        };
        let mut changes =
            NodeDiff::change_set(before, &published.state, node_changes, self.extensions, is_shared);
        if let Some((kept, _)) = &resumed {
            changes.begin_with(resume::keep(kept));
        }
        self.sent = Some(published);
        Ok(changes)
    }

    async fn closed(&mut self) {
        if let Some((_, states)) = &mut self.node {
            states.closed().await;
        }
    }

    fn skipped(&self) {
        if let (Some(it), Some(state)) = (&self.following, &self.sent) {
            it.unchanged(state);
        }
    }

    fn sync(&self) -> EmptyOp {
        let sent = self.sent.as_ref().filter(|_| self.extensions.has(Extension::Revisions));
        if let (Some(it), Some(sent)) = (&self.following, &self.sent) {
            it.sent(sent);
        }
        let revision = sent.map(|it| Revision { instance_id: it.instance_id, rev: it.rev });
        EmptyOp { revision, ..EmptyOp::default() }
    }
}
