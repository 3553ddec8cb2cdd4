//! The source `api:TARGET`: another brain, ours or KPNG's.
//!
//! The one rule: the facts are preferred.
//! From the cluster's facts (`globalv1.Sets/Watch`) the brain here decides for itself, for any node. A peer that does not
//! offer them, or not to us, is asked for the state of the one node instead (`localv1.Sets/Watch`), which is taken over as
//! it is; and now and then it is asked for the facts again.

use std::sync::Arc;

use model::{cluster::ClusterState, state::NodeState};
use proxy_contract::client::{ChangeWatch, Client, ClusterWatch, NodeChange, Refused};
use tokio::{sync::watch as channel, task::JoinHandle};
use wire::{Extensions, NodeStateDecoder, cluster::ClusterDecoder};

/// What another brain says, at one time.
#[derive(Clone, Debug)]
pub enum Said {
    /// The facts of its cluster.
    Facts(Arc<ClusterState>),
    /// The state of the node, as it has decided it.
    State(NodeState),
}

/// A running source; it ends when it is dropped.
///
/// While the other brain is away its last word stays; the log says how old it is.
#[derive(Debug)]
pub struct ApiSource {
    said: channel::Receiver<Option<Said>>,
    task: JoinHandle<()>,
}

impl ApiSource {
    /// Follows the brain of `client`, on behalf of its node. Must be called within a tokio runtime.
    pub fn start(client: Client) -> Self {
        let (sender, said) = channel::channel(None);
        let task = tokio::spawn(Follower::new(client, sender).follow());
        Self { said, task }
    }

    /// Where arrives what it says: always the newest, and `None` until there is something.
    pub fn said(&self) -> channel::Receiver<Option<Said>> {
        self.said.clone()
    }
}

impl Drop for ApiSource {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Follower {
    client: Client,
    cluster: ClusterWatch,
    facts: ClusterDecoder,
    /// The node's state, where there are no facts.
    local: Option<(ChangeWatch, NodeStateDecoder)>,
    sender: channel::Sender<Option<Said>>,
}

impl Follower {
    fn new(client: Client, sender: channel::Sender<Option<Said>>) -> Self {
        let cluster = client.clone().request_extensions(Extensions::GLOBAL.iter()).cluster();
        Self { client, cluster, facts: ClusterDecoder::default(), local: None, sender }
    }

    async fn follow(mut self) {
        loop {
            tokio::select! {
                facts = self.cluster.next() => match facts {
                    Ok(cluster) => {
                        self.local = None;
                        self.sender.send_replace(Some(Said::Facts(self.facts.decode(&cluster))));
                    }
                    Err(Refused(reason)) if self.local.is_none() => {
                        tracing::info!(
                            "{}: the facts of the cluster are not to be had ({reason}); following the state of node {}",
                            self.client.target(),
                            self.client.node(),
                        );
                        let client = self.client.clone().request_extensions(Extensions::LOCAL.iter());
                        self.local = Some((client.changes(), NodeStateDecoder::default()));
                    }
                    Err(Refused(reason)) => tracing::debug!("{}: {reason}", self.client.target()),
                },
                change = next(&mut self.local) => {
                    if let Some((_, decoder)) = &mut self.local {
                        self.sender.send_replace(Some(Said::State(decoder.apply(&change))));
                    }
                }
            }
        }
    }
}

/// The next change of the node's state, if that is followed.
async fn next(local: &mut Option<(ChangeWatch, NodeStateDecoder)>) -> NodeChange {
    if let Some((changes, _)) = local
        && let Some(change) = changes.next().await
    {
        return change;
    }
    std::future::pending().await
}
