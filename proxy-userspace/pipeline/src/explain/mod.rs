//! Explains connections: by the cluster state of a pipeline, or by asking the brain that is followed.
//!
//! May know: the brain, where a cluster state comes from, and the messages of the contract. Neither the kernel, nor who asks: a
//! command, a page, or a client over gRPC.

mod message;

use std::{sync::Arc, time::Duration};

use brain::{Explanation, InvalidQuery, Options, Query};
use grpc_server::{Explain, PendingExplanation, Unexplained};
use proxy_contract::client::{Client, ExplainError};
use publish::{
    SubscribeError,
    cluster::{ClusterSnapshot, ClusterSubscription},
};
use tokio::{task::spawn_blocking, time::timeout};

/// How long to wait for the answer of a brain.
const TIMEOUT: Duration = Duration::from_secs(3);

/// Explains connections of a node. Clones share it.
#[derive(Clone, Debug)]
pub enum Explainer {
    /// By the cluster state of this process.
    Own { cluster: ClusterSubscription, options: Options, node: String },
    /// By a brain, which is connected to for each question about the client's node.
    Brain(Client),
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoReasons {
    /// The question has no answer.
    #[error("{0}")]
    Invalid(String),
    /// The pipeline follows the state of a node that another brain has computed.
    #[error(
        "the brain that is followed serves no cluster state (globalv1.Sets), only the result for this node: ask on its host"
    )]
    NoClusterState,
    /// There is no answer now, or from this brain.
    #[error("{0}")]
    Unavailable(String),
}

impl From<InvalidQuery> for NoReasons {
    fn from(error: InvalidQuery) -> Self {
        Self::Invalid(error.to_string())
    }
}

impl Explainer {
    /// Explains where a connection goes, as soon as the source has been read completely; the words are those of a [`Query`].
    ///
    /// # Errors
    ///
    /// If the question has no answer, there is no cluster state, or the brain gives no answer in time.
    pub async fn explain(&self, words: &[String]) -> Result<Explanation, NoReasons> {
        let query = Query::parse(words)?;
        match self {
            Self::Own { cluster, options, node } => {
                by_cluster(cluster, options.clone(), node.clone(), query).await
            }
            Self::Brain(client) => by_brain(client, words).await,
        }
    }
}

async fn by_cluster(
    cluster: &ClusterSubscription,
    options: Options,
    node: String,
    query: Query,
) -> Result<Explanation, NoReasons> {
    let stopped = || NoReasons::Unavailable("the source has stopped; the log names the reason".into());
    let cluster = match cluster.watch().next(None).await {
        Some(ClusterSnapshot::State(cluster)) => cluster,
        Some(ClusterSnapshot::Unavailable) => return Err(NoReasons::NoClusterState),
        Some(ClusterSnapshot::Pending) | None => return Err(stopped()),
    };
    // It takes time that is proportional to the cluster.
    let explained = spawn_blocking(move || brain::explain(&cluster, &options, &node, &query)).await;
    Ok(explained.map_err(|_| stopped())??)
}

async fn by_brain(client: &Client, words: &[String]) -> Result<Explanation, NoReasons> {
    let unavailable = |error: String| {
        NoReasons::Unavailable(format!("the brain at {} gives no reasons: {error}", client.targets()))
    };
    match timeout(TIMEOUT, client.explain(words)).await {
        Ok(Ok(answer)) => message::decode(answer).map_err(|it| {
            unavailable(format!("its answer is not understood ({it}); it is newer than this program"))
        }),
        Ok(Err(ExplainError::InvalidQuestion(error))) => Err(NoReasons::Invalid(error)),
        Ok(Err(error)) => Err(unavailable(error.to_string())),
        Err(_) => Err(unavailable(format!("no answer within {} s", TIMEOUT.as_secs()))),
    }
}

/// Explains connections to the clients of a brain: those of its own node, or of any.
pub(crate) fn served(cluster: ClusterSubscription, options: Options, own: String, any_node: bool) -> Explain {
    Arc::new(move |node: String, words: Vec<String>| -> PendingExplanation {
        let (cluster, options) = (cluster.clone(), options.clone());
        let node = if node.is_empty() { own.clone() } else { node };
        let is_served = any_node || node == own;
        Box::pin(async move {
            if !is_served {
                return Err(SubscribeError::NotServed.into());
            }
            let query = Query::parse(&words).map_err(|it| Unexplained::InvalidQuestion(it.to_string()))?;
            let explained = by_cluster(&cluster, options, node, query).await;
            explained.map(message::encode).map_err(|error| match error {
                NoReasons::Invalid(error) => Unexplained::InvalidQuestion(error),
                NoReasons::NoClusterState => SubscribeError::NoClusterState.into(),
                NoReasons::Unavailable(_) => SubscribeError::ShuttingDown.into(),
            })
        })
    })
}
