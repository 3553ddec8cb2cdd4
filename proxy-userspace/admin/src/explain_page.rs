//! The page `/explain`: why a connection goes where it goes.
//!
//! Its query has the words of the question in order, as in `/explain?node&10.96.0.10:80/tcp`.

use std::{fmt, future::Future, pin::Pin, sync::Arc, time::Duration};

use hyper::StatusCode;
use tokio::time::timeout;

/// How long to wait for a cluster state; shorter than the timeout of who asks, and longer than that of a question to a brain.
const TIMEOUT: Duration = Duration::from_secs(4);

/// An answer as JSON, or why there is none.
pub type PendingAnswer = Pin<Box<dyn Future<Output = Result<String, NoAnswer>> + Send>>;

/// Why a question is not answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoAnswer {
    /// What is wrong with the question.
    Invalid(String),
    /// Nobody knows the answer now.
    Unavailable(String),
}

/// Answers questions.
#[derive(Clone)]
pub(crate) struct Explainer(Arc<dyn Fn(Vec<String>) -> PendingAnswer + Send + Sync>);

impl fmt::Debug for Explainer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Explainer")
    }
}

impl Explainer {
    pub(crate) fn new(answer: impl Fn(Vec<String>) -> PendingAnswer + Send + Sync + 'static) -> Self {
        Self(Arc::new(answer))
    }

    /// The answer to the question in a query, or the status and why there is none.
    pub(crate) async fn answer(&self, query: &str) -> Result<String, (StatusCode, String)> {
        let words = form_urlencoded::parse(query.as_bytes()).map(|(word, _)| word.into_owned()).collect();
        match timeout(TIMEOUT, (self.0)(words)).await {
            Ok(answer) => answer.map_err(|error| match error {
                NoAnswer::Invalid(error) => (StatusCode::BAD_REQUEST, error),
                NoAnswer::Unavailable(error) => (StatusCode::SERVICE_UNAVAILABLE, error),
            }),
            Err(_) => {
                let error = "the cluster state has not been read completely yet: ask again in a moment";
                Err((StatusCode::SERVICE_UNAVAILABLE, error.into()))
            }
        }
    }
}

/// The path and query of a question.
pub(crate) fn path(words: &[String]) -> String {
    let words = words.iter().map(|it| form_urlencoded::byte_serialize(it.as_bytes()).collect::<String>());
    format!("/explain?{}", words.collect::<Vec<_>>().join("&"))
}
