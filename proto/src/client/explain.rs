//! Asks a brain for its reasons.

use tonic::Code;

use super::connect::{Client, MAX_MESSAGE_SIZE, error_chain};
use crate::localv1::{ExplainReq, Explanation, explanations_client::ExplanationsClient};

/// Why a brain does not explain a connection; returned by [`Client::explain`](super::Client::explain).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExplainError {
    /// The question has no answer; with the reason.
    #[error("{0}")]
    InvalidQuestion(String),
    /// The brain answers no such questions.
    #[error(
        "it does not explain connections (localv1.Explanations): it is older than this program, or another one"
    )]
    Unsupported,
    /// The brain cannot be reached, or gives no answer now.
    #[error("{0}")]
    Failed(String),
}

pub(super) async fn ask(client: &Client, question: &[String]) -> Result<Explanation, ExplainError> {
    let channel = client.connect_any().await.map_err(ExplainError::Failed)?;
    let mut brain = ExplanationsClient::new(channel).max_decoding_message_size(MAX_MESSAGE_SIZE);
    let request = ExplainReq { node_name: client.node.clone(), question: question.to_vec() };
    match brain.explain(request).await {
        Ok(answer) => Ok(answer.into_inner()),
        Err(status) => Err(match status.code() {
            Code::InvalidArgument => ExplainError::InvalidQuestion(status.message().to_owned()),
            Code::Unimplemented => ExplainError::Unsupported,
            _ => ExplainError::Failed(error_chain(&status)),
        }),
    }
}
