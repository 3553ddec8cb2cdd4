//! `globalv1.Sets/Watch`: the cluster state as a stream of changes, for brains that follow this one.
//!
//! It carries everything that node states are computed from, and nothing that this brain has computed. A change set is the
//! difference to what the stream has sent before; the first one is that to what the client says it has.

use std::{pin::Pin, sync::Arc};

use model::cluster::ClusterState;
use proxy_contract::{
    digest::Digest,
    globalv1::{GlobalWatchReq, sets_server::Sets},
    localv1::EmptyOp,
};
use publish::cluster::{ClusterSnapshot, ClusterSubscription, ClusterWatcher};
use tonic::{Request, Response, Status, Streaming};
use wire::Extensions;

use super::{
    authz::Peer,
    change_set::ChangeSet,
    change_stream::{self, ChangeSource, End, Items, RequestKind, Turns},
    cluster_diff::{ClusterDiff, Filter},
    resume::{self, negotiate, rest},
};

pub(crate) struct ClusterSets {
    pub(crate) cluster: ClusterSubscription,
    pub(crate) turns: Turns,
}

#[tonic::async_trait]
impl Sets for ClusterSets {
    type WatchStream = Items;

    async fn watch(&self, request: Request<Streaming<GlobalWatchReq>>) -> Result<Response<Items>, Status> {
        let peer = Peer::of(&request)?;
        peer.authorize_cluster()?;
        let span = tracing::info_span!("watch_cluster", client = %peer);
        let source = ClusterChangeSource::new(self.cluster.watch());
        Ok(Response::new(change_stream::start(source, request.into_inner(), self.turns.clone(), span)))
    }
}

struct ClusterChangeSource {
    cluster: ClusterWatcher,
    extensions: Extensions,
    has_request: bool,
    /// The digests of what the client has, until there is a state.
    have: Option<Vec<Digest>>,
    /// The first change set of a client that has something.
    resuming: Option<Pin<Box<dyn Future<Output = ChangeSet<ClusterDiff>> + Send>>>,
    sent: Option<Arc<ClusterState>>,
}

impl ChangeSource for ClusterChangeSource {
    type Request = GlobalWatchReq;
    type Diff = ClusterDiff;

    fn negotiate(&mut self, request: &GlobalWatchReq) -> Extensions {
        self.extensions = negotiate(Extensions::GLOBAL, request.extensions(), request.have.as_ref());
        self.extensions
    }

    fn request(&mut self, request: GlobalWatchReq) -> Result<RequestKind, Status> {
        if std::mem::replace(&mut self.has_request, true) {
            return Ok(RequestKind::Change);
        }
        self.have = resume::parse(request.have, self.extensions)?;
        Ok(RequestKind::State)
    }

    async fn next(&mut self) -> Result<ChangeSet<ClusterDiff>, End> {
        let resuming = match &mut self.resuming {
            Some(it) => it,
            None => {
                let diff = self.diff().await?;
                let Some(have) = self.have.take() else { return Ok(ChangeSet::new(diff)) };
                self.resuming.insert(Box::pin(rest(diff, have)))
            }
        };
        let changes = resuming.await;
        self.resuming = None;
        Ok(changes)
    }

    async fn closed(&mut self) {
        self.cluster.closed().await;
    }

    fn sync(&self) -> EmptyOp {
        EmptyOp::default()
    }
}

impl ClusterChangeSource {
    fn new(cluster: ClusterWatcher) -> Self {
        Self {
            cluster,
            extensions: Extensions::default(),
            has_request: false,
            have: None,
            resuming: None,
            sent: None,
        }
    }

    /// Waits for a state that was not sent yet, and returns what leads to it. Cancel safe.
    async fn diff(&mut self) -> Result<ClusterDiff, End> {
        match self.cluster.next(self.sent.as_ref()).await {
            Some(ClusterSnapshot::State(state)) => {
                let proxy_name = self.cluster.proxy_name.as_deref();
                let filter = Filter { proxy_name, extensions: self.extensions };
                let diff = match &self.sent {
                    Some(sent) => ClusterDiff::new(sent, &state, filter),
                    None => ClusterDiff::new(&ClusterState::default(), &state, filter),
                };
                self.sent = Some(state);
                Ok(diff)
            }
            Some(ClusterSnapshot::Unavailable) => Err(End::Refused(Status::unimplemented(
                "this brain follows the state of a single node and has no cluster state; follow the brain that it follows",
            ))),
            Some(ClusterSnapshot::Pending) | None => Err(End::Closed),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::ready;

    use model::{cluster::Node, state::NodeInfo};
    use proxy_contract::localv1::op_item::Op;
    use publish::cluster::ClusterPublisher;
    use tokio::task::yield_now;

    use super::*;

    #[tokio::test]
    async fn a_client_that_asks_again_meanwhile_resumes() {
        let mut state = ClusterState::default();
        for it in 0..1_000 {
            state.nodes.insert(Node { name: it.to_string().into(), zone: None, info: NodeInfo::default() });
        }
        let publisher = ClusterPublisher::new(None);
        publisher.publish(ClusterSnapshot::State(Arc::new(state)));
        let have = Some(vec![Digest::default()]);
        let mut source =
            ClusterChangeSource { have, ..ClusterChangeSource::new(publisher.subscribe().watch()) };
        let mut requests = 0;
        let changes = loop {
            tokio::select! {
                biased;
                it = source.next() => break it,
                () = ready(()) => requests += 1,
            }
            yield_now().await;
        };
        assert!(requests > 0, "the digests are computed at once");
        let items: Vec<_> = changes.unwrap_or_else(|_| panic!("no change set")).map(|it| it.op).collect();
        assert!(matches!(items[0], Some(Op::Kept(_))) && items.len() == 1_001, "{}", items.len());
    }
}
