//! `globalv1.Sets/Watch`: the facts of the cluster as a stream of changes, for brains that follow this one.
//!
//! The one rule: it tells all that a state can come from, and nothing that only this brain decides.

use std::sync::Arc;

use model::cluster::ClusterState;
use proto::{
    globalv1::{GlobalWatchReq, sets_server::Sets},
    localv1::EmptyOp,
};
use tonic::{Request, Response, Status, Streaming};
use wire::Extensions;

use super::{
    conversation::{End, Items, View, converse},
    facts_changes::{FactsChanges, Selection},
    peer::Peer,
};
use crate::cluster::{ClusterFollower, ClusterSubscription, Known};

pub(super) struct GlobalWatch {
    pub(super) cluster: ClusterSubscription,
}

#[tonic::async_trait]
impl Sets for GlobalWatch {
    type WatchStream = Items;

    async fn watch(&self, request: Request<Streaming<GlobalWatchReq>>) -> Result<Response<Items>, Status> {
        Peer::of(&request)?.may_all()?;
        let view = Global {
            cluster: self.cluster.follow(),
            additions: Extensions::default(),
            has_asked: false,
            sent: None,
        };
        Ok(Response::new(converse(view, request.into_inner())))
    }
}

/// The facts.
struct Global {
    cluster: ClusterFollower,
    additions: Extensions,
    has_asked: bool,
    /// What the client has.
    sent: Option<Arc<ClusterState>>,
}

impl View for Global {
    type Request = GlobalWatchReq;
    type Changes = FactsChanges;

    fn grant(&mut self, request: &GlobalWatchReq) -> Extensions {
        self.additions = Extensions::GLOBAL.negotiate(request.wanted());
        self.additions
    }

    fn ask(&mut self, _: GlobalWatchReq) -> Result<bool, Status> {
        Ok(!std::mem::replace(&mut self.has_asked, true))
    }

    async fn next(&mut self) -> Result<FactsChanges, End> {
        match self.cluster.next(self.sent.as_ref()).await {
            Some(Known::Facts(facts)) => {
                let selection = Selection {
                    proxy_name: self.cluster.proxy_name().map(AsRef::as_ref),
                    additions: self.additions,
                };
                let changes = match &self.sent {
                    Some(sent) => FactsChanges::new(sent, &facts, selection),
                    None => FactsChanges::new(&ClusterState::default(), &facts, selection),
                };
                self.sent = Some(facts);
                Ok(changes)
            }
            Some(Known::NoFacts) => Err(End::Refused(Status::unimplemented(
                "this brain follows the state of one node, and has no facts; follow the brain that it follows",
            ))),
            Some(Known::Nothing) | None => Err(End::Gone),
        }
    }

    async fn closed(&mut self) {
        self.cluster.closed().await;
    }

    fn sync(&self) -> EmptyOp {
        EmptyOp::default()
    }
}
