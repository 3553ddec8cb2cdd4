//! Explains connections by the cluster state of a pipeline.

use std::sync::Arc;

use brain::{Explanation, InvalidQuery, Options, Query};
use grpc_server::{Explain, PendingExplanation, Unexplained};
use publish::{
    SubscribeError,
    cluster::{ClusterSnapshot, ClusterSubscription},
};
use tokio::task::spawn_blocking;

use crate::explanation_message;

/// Explains connections by the cluster state of a pipeline. Clones share it.
#[derive(Clone, Debug)]
pub struct Explainer {
    cluster: ClusterSubscription,
    options: Options,
}

/// Why there is no explanation.
#[derive(Debug, thiserror::Error)]
pub enum ExplainError {
    /// The question has no answer.
    #[error(transparent)]
    Invalid(#[from] InvalidQuery),
    /// The pipeline follows the state of a node that another brain has computed.
    #[error(
        "the brain that is followed serves no cluster state (globalv1.Sets), only the result for this node: ask on its host"
    )]
    NoClusterState,
    /// The pipeline has stopped.
    #[error("the source has stopped; the log names the reason")]
    Stopped,
}

impl Explainer {
    pub(crate) fn new(cluster: ClusterSubscription, options: Options) -> Self {
        Self { cluster, options }
    }

    /// Explains where a connection goes from `node`, as soon as the source has been read completely.
    ///
    /// # Errors
    ///
    /// If the query names something that does not exist, or there is no cluster state.
    pub async fn explain(&self, node: &str, query: &Query) -> Result<Explanation, ExplainError> {
        let cluster = match self.cluster.watch().next(None).await {
            Some(ClusterSnapshot::State(cluster)) => cluster,
            Some(ClusterSnapshot::Unavailable) => return Err(ExplainError::NoClusterState),
            Some(ClusterSnapshot::Pending) | None => return Err(ExplainError::Stopped),
        };
        let (options, node, query) = (self.options.clone(), node.to_owned(), query.clone());
        // It takes time that is proportional to the cluster.
        let explained = spawn_blocking(move || brain::explain(&cluster, &options, &node, &query)).await;
        Ok(explained.map_err(|_| ExplainError::Stopped)??)
    }
}

/// Explains connections to the clients of a brain: those of its own node, or of any.
pub(crate) fn served(explainer: Explainer, own: String, any_node: bool) -> Explain {
    Arc::new(move |node, words| -> PendingExplanation {
        let (explainer, is_served) = (explainer.clone(), any_node || node.is_empty() || node == own);
        let node = if node.is_empty() { own.clone() } else { node };
        Box::pin(async move {
            if !is_served {
                return Err(SubscribeError::NotServed.into());
            }
            let query = Query::parse(&words).map_err(|it| Unexplained::InvalidQuestion(it.to_string()))?;
            explainer.explain(&node, &query).await.map(explanation_message::encode).map_err(|it| match it {
                ExplainError::Invalid(it) => Unexplained::InvalidQuestion(it.to_string()),
                ExplainError::NoClusterState => SubscribeError::NoClusterState.into(),
                ExplainError::Stopped => SubscribeError::ShuttingDown.into(),
            })
        })
    })
}
