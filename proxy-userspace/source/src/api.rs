//! The source `api:TARGET`: another brain, ours or KPNG's.
//!
//! The cluster state is preferred: from `globalv1.Sets/Watch`, this brain computes the state of any node itself. A peer
//! that does not offer it, or denies access, is asked for the state of the one node instead (`localv1.Sets/Watch`), which
//! is used unchanged; from time to time the cluster state is requested again.

use std::{future::pending, sync::Arc};

use model::{RequestedMetadata, cluster::ClusterState, state::NodeState};
use proxy_contract::client::{ChangeWatch, Client, Refused};
use tokio::{sync::watch, task::JoinSet};
use wire::{Extensions, NodeStateDecoder, cluster::ClusterDecoder};

use crate::RejectionLog;

/// What another brain reports.
#[derive(Clone, Debug)]
pub enum Update {
    Cluster(Arc<ClusterState>),
    /// The state of the node, as the other brain computed it.
    Node(NodeState),
}

/// A running source; it stops when it is dropped.
///
/// While the other brain is unreachable, its last update stays active; the log reports its age.
#[derive(Debug)]
pub struct ApiSource {
    /// The newest update, `None` before the first one.
    pub updates: watch::Receiver<Option<Update>>,
    /// Why the other brain cannot be followed now, as [`Client::outage`] says.
    pub outage: watch::Receiver<Option<String>>,
    pub address: String,
    _task: JoinSet<()>,
}

impl ApiSource {
    /// Follows the brain of `client`, on behalf of its node, with the requested labels and annotations of Services. Must be
    /// called within a tokio runtime.
    pub fn start(client: Client, requested: RequestedMetadata) -> Self {
        let (sender, updates) = watch::channel(None);
        let (outage, address) = (client.outage(), client.targets().to_string());
        let _task = JoinSet::from_iter([follow(client, requested, sender)]);
        Self { updates, outage, address, _task }
    }
}

async fn follow(client: Client, requested: RequestedMetadata, sender: watch::Sender<Option<Update>>) {
    let mut cluster = client.clone().request_extensions(Extensions::GLOBAL.iter()).cluster();
    let mut cluster_decoder = ClusterDecoder::new(requested.clone());
    let mut log = RejectionLog::default();
    // Follows the node's state, while the cluster state is not offered.
    let mut local: Option<(ChangeWatch, NodeStateDecoder)> = None;
    loop {
        let local_change = async {
            match &mut local {
                Some((changes, decoder)) => decoder.apply(&changes.next().await),
                None => pending().await,
            }
        };
        tokio::select! {
            change = cluster.next() => match change {
                Ok(change) => {
                    local = None;
                    let cluster = cluster_decoder.apply(&change);
                    log.update(&cluster_decoder.rejections);
                    sender.send_replace(Some(Update::Cluster(cluster)));
                }
                Err(Refused(reason)) if local.is_none() => {
                    tracing::info!(
                        brain = %client.targets(),
                        node = client.node(),
                        reason,
                        "the cluster state is not available; following the state of the node instead"
                    );
                    let changes = client.clone().request_extensions(Extensions::LOCAL.iter()).changes();
                    local = Some((changes, NodeStateDecoder::new(requested.clone())));
                }
                Err(Refused(reason)) => {
                    tracing::debug!(brain = %client.targets(), reason, "the cluster state is not available");
                }
            },
            state = local_change => drop(sender.send_replace(Some(Update::Node(state)))),
        }
    }
}
