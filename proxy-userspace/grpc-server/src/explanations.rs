//! `localv1.Explanations/Explain`: the brain's decisions for a connection.
//!
//! May know: the messages, and who may ask about which node. Only the function that answers knows what a question means.
//! Invariant: one explanation at a time is computed, whether its client still waits for it or not.

use std::{pin::Pin, sync::Arc};

use prost::Message as _;
use proxy_contract::localv1::{ExplainReq, Explanation, explanations_server::Explanations};
use publish::SubscribeError;
use tokio::sync::Mutex;
use tonic::{Request, Response, Status};

use super::{authz::Peer, status};

/// The longest answer, in bytes: about 100,000 endpoints.
const MAX_ANSWER_SIZE: usize = 16 << 20;

/// Explains a connection of a node, or of the brain's own node if the name is empty; the words of the question are those of
/// [`ExplainReq`].
pub type Explain = Arc<dyn Fn(String, Vec<String>) -> PendingExplanation + Send + Sync>;

/// An explanation, as soon as there is a cluster state.
pub type PendingExplanation = Pin<Box<dyn Future<Output = Result<Explanation, Unexplained>> + Send>>;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unexplained {
    /// The question has no answer; with the reason.
    #[error("{0}")]
    InvalidQuestion(String),
    /// The node's state is not available.
    #[error(transparent)]
    Node(#[from] SubscribeError),
}

pub(crate) struct ExplanationService {
    pub(crate) explainer: Explain,
    pub(crate) turn: Arc<Mutex<()>>,
}

#[tonic::async_trait]
impl Explanations for ExplanationService {
    async fn explain(&self, request: Request<ExplainReq>) -> Result<Response<Explanation>, Status> {
        let peer = Peer::of(&request)?;
        let ExplainReq { node_name, question } = request.into_inner();
        peer.authorize_node(&node_name)?;
        let turn = Arc::clone(&self.turn).lock_owned().await;
        let pending = (self.explainer)(node_name.clone(), question);
        // A client that goes does not let the next one begin before this answer is computed.
        let answer = tokio::spawn(async move {
            let _turn = turn;
            pending.await
        });
        let answer = answer.await.map_err(|it| Status::internal(it.to_string()))?;
        let answer = answer.map_err(|error| match error {
            Unexplained::InvalidQuestion(error) => Status::invalid_argument(error),
            Unexplained::Node(error) => status::of_subscription(&error, &node_name),
        })?;
        if answer.encoded_len() > MAX_ANSWER_SIZE {
            let endpoints = answer.endpoints.len();
            let size = MAX_ANSWER_SIZE >> 20;
            return Err(Status::resource_exhausted(format!(
                "the explanation has {endpoints} endpoints, and is longer than {size} MiB; ask on the host of the brain"
            )));
        }
        Ok(Response::new(answer))
    }
}
