//! Explanations of connections of nodes.

use std::{future::Future, pin::Pin};

use proxy_contract::localv1::Explanation;

use crate::node_states::SubscribeError;

/// An explanation, as soon as there is a cluster state.
pub type PendingExplanation = Pin<Box<dyn Future<Output = Result<Explanation, Unexplained>> + Send>>;

/// Explains where the connections of nodes go.
pub trait Explain: Send + Sync + 'static {
    /// Explains a connection of a node, or of the brain's own node if the name is empty; the words of the question are those
    /// of [`ExplainReq`](proxy_contract::localv1::ExplainReq).
    fn explain(&self, node: &str, question: &[String]) -> PendingExplanation;
}

/// Why a connection is not explained.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unexplained {
    /// The question has no answer; with the reason.
    #[error("{0}")]
    InvalidQuestion(String),
    /// The node's state is not available.
    #[error(transparent)]
    Node(#[from] SubscribeError),
}
