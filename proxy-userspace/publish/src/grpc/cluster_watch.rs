//! `globalv1.Sets/Watch`: the cluster state as a stream of changes, for brains that follow this one.
//!
//! It carries everything that node states are computed from, and nothing that this brain has computed.

use std::sync::Arc;

use model::cluster::ClusterState;
use proxy_contract::{
    globalv1::{GlobalWatchReq, sets_server::Sets},
    localv1::EmptyOp,
};
use tonic::{Request, Response, Status, Streaming};
use wire::Extensions;

use super::{
    authz::Peer,
    change_set::ChangeSet,
    cluster_diff::{ClusterDiff, Filter},
    watch_session::{self, Asked, End, Items, Turns, View},
};
use crate::cluster::{ClusterSnapshot, ClusterSubscription, ClusterWatcher};

pub(super) struct ClusterWatch {
    pub(super) cluster: ClusterSubscription,
    pub(super) turns: Turns,
}

#[tonic::async_trait]
impl Sets for ClusterWatch {
    type WatchStream = Items;

    async fn watch(&self, request: Request<Streaming<GlobalWatchReq>>) -> Result<Response<Items>, Status> {
        Peer::of(&request)?.authorize_cluster()?;
        let view = ClusterView {
            cluster: self.cluster.watch(),
            extensions: Extensions::default(),
            has_request: false,
            sent: None,
        };
        Ok(Response::new(watch_session::start(view, request.into_inner(), self.turns.clone())))
    }
}

struct ClusterView {
    cluster: ClusterWatcher,
    extensions: Extensions,
    has_request: bool,
    /// The last state that was sent.
    sent: Option<Arc<ClusterState>>,
}

impl View for ClusterView {
    type Request = GlobalWatchReq;
    type Diff = ClusterDiff;

    fn negotiate(&mut self, request: &GlobalWatchReq) -> Extensions {
        self.extensions = Extensions::GLOBAL.negotiate(request.extensions());
        self.extensions
    }

    fn request(&mut self, _: GlobalWatchReq) -> Result<Asked, Status> {
        Ok(if std::mem::replace(&mut self.has_request, true) { Asked::Change } else { Asked::State })
    }

    async fn next(&mut self) -> Result<ChangeSet<ClusterDiff>, End> {
        match self.cluster.next(self.sent.as_ref()).await {
            Some(ClusterSnapshot::State(state)) => {
                let proxy_name = self.cluster.proxy_name().map(AsRef::as_ref);
                let filter = Filter { proxy_name, extensions: self.extensions };
                let changes = match &self.sent {
                    Some(sent) => ClusterDiff::change_set(sent, &state, filter),
                    None => ClusterDiff::change_set(&ClusterState::default(), &state, filter),
                };
                self.sent = Some(state);
                Ok(changes)
            }
            Some(ClusterSnapshot::Unavailable) => Err(End::Refused(Status::unimplemented(
                "this brain follows the state of a single node and has no cluster state; follow the brain that it follows",
            ))),
            Some(ClusterSnapshot::Pending) | None => Err(End::Closed),
        }
    }

    async fn closed(&mut self) {
        self.cluster.closed().await;
    }

    fn sync(&self) -> EmptyOp {
        EmptyOp::default()
    }
}
