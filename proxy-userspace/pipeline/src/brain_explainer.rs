//! Explains connections by asking the brain that computes the state of this node.

use std::time::Duration;

use brain::Explanation;
use proxy_contract::client::{Client, ExplainError};
use tokio::time::timeout;

use crate::explanation_message;

/// How long to wait for an answer.
const TIMEOUT: Duration = Duration::from_secs(3);

/// Explains connections by asking a brain, which is connected to for each question. Clones share it.
#[derive(Clone, Debug)]
pub struct BrainExplainer(Client);

/// Why a brain gives no reasons.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoReasons {
    /// The question has no answer.
    #[error("{0}")]
    Invalid(String),
    /// There is no answer now, or from this brain.
    #[error("the brain at {target} gives no reasons: {error}")]
    Unavailable {
        /// Its address.
        target: String,
        /// Why.
        error: String,
    },
}

impl BrainExplainer {
    /// Asks the brain of this client about the client's node.
    pub fn new(client: Client) -> Self {
        Self(client)
    }

    /// Explains where a connection goes; the words are those of a [`Query`](brain::Query).
    ///
    /// # Errors
    ///
    /// If the question has no answer, or the brain gives none in time.
    pub async fn explain(&self, words: &[String]) -> Result<Explanation, NoReasons> {
        let unavailable =
            |error: String| NoReasons::Unavailable { target: self.0.targets().to_string(), error };
        match timeout(TIMEOUT, self.0.explain(words)).await {
            Ok(Ok(answer)) => explanation_message::decode(answer).map_err(|it| {
                unavailable(format!("its answer is not understood ({it}); it is newer than this program"))
            }),
            Ok(Err(ExplainError::InvalidQuestion(error))) => Err(NoReasons::Invalid(error)),
            Ok(Err(error)) => Err(unavailable(error.to_string())),
            Err(_) => Err(unavailable(format!("no answer within {} s", TIMEOUT.as_secs()))),
        }
    }
}
