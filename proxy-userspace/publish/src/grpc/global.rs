//! `globalv1.Sets/Watch`: the facts of the cluster as a stream of changes, for brains that follow this one.
//!
//! The one rule: it tells all that a state can come from, and nothing that only this brain decides.

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
    cluster_diff::{ClusterDiff, Selection},
    watch_session::{End, Items, View, converse},
};
use crate::cluster::{ClusterSnapshot, ClusterSubscription, ClusterWatcher};

pub(super) struct GlobalWatch {
    pub(super) cluster: ClusterSubscription,
}

#[tonic::async_trait]
impl Sets for GlobalWatch {
    type WatchStream = Items;

    async fn watch(&self, request: Request<Streaming<GlobalWatchReq>>) -> Result<Response<Items>, Status> {
        Peer::of(&request)?.may_all()?;
        let view = Global {
            cluster: self.cluster.watch(),
            additions: Extensions::default(),
            has_asked: false,
            sent: None,
        };
        Ok(Response::new(converse(view, request.into_inner())))
    }
}

/// The facts.
struct Global {
    cluster: ClusterWatcher,
    additions: Extensions,
    has_asked: bool,
    /// What the client has.
    sent: Option<Arc<ClusterState>>,
}

impl View for Global {
    type Request = GlobalWatchReq;
    type Changes = ClusterDiff;

    fn grant(&mut self, request: &GlobalWatchReq) -> Extensions {
        self.additions = Extensions::GLOBAL.negotiate(request.extensions());
        self.additions
    }

    fn ask(&mut self, _: GlobalWatchReq) -> Result<bool, Status> {
        Ok(!std::mem::replace(&mut self.has_asked, true))
    }

    async fn next(&mut self) -> Result<ClusterDiff, End> {
        match self.cluster.next(self.sent.as_ref()).await {
            Some(ClusterSnapshot::State(facts)) => {
                let selection = Selection {
                    proxy_name: self.cluster.proxy_name().map(AsRef::as_ref),
                    additions: self.additions,
                };
                let changes = match &self.sent {
                    Some(sent) => ClusterDiff::new(sent, &facts, selection),
                    None => ClusterDiff::new(&ClusterState::default(), &facts, selection),
                };
                self.sent = Some(facts);
                Ok(changes)
            }
            Some(ClusterSnapshot::Unavailable) => Err(End::Refused(Status::unimplemented(
                "this brain follows the state of one node, and has no facts; follow the brain that it follows",
            ))),
            Some(ClusterSnapshot::Pending) | None => Err(End::Gone),
        }
    }

    async fn closed(&mut self) {
        self.cluster.closed().await;
    }

    fn sync(&self) -> EmptyOp {
        EmptyOp::default()
    }
}
