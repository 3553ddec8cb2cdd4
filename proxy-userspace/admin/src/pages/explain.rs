//! The page `/explain`: why a connection goes where it goes.
//!
//! Its query has the words of the question in order, as in `/explain?node&10.96.0.10:80/tcp`.
//! May know: how words come and answers go. Only the function that answers knows what they say.

use std::time::Duration;

use hyper::StatusCode;
use pipeline::NoReasons;
use tokio::time::timeout;

use crate::state::Explainer;

/// How long to wait for a cluster state; shorter than the timeout of who asks, and longer than that of a question to a brain.
const TIMEOUT: Duration = Duration::from_secs(4);

/// The answer to the question in a query, or the status and why there is none.
pub(crate) async fn answer(
    explainer: Option<Explainer>,
    query: &str,
) -> Result<String, (StatusCode, String)> {
    let missing = || (StatusCode::NOT_IMPLEMENTED, "this process cannot explain connections".into());
    let explainer = explainer.ok_or_else(missing)?;
    let words = form_urlencoded::parse(query.as_bytes()).map(|(word, _)| word.into_owned()).collect();
    match timeout(TIMEOUT, explainer(words)).await {
        Ok(answer) => answer.map_err(|error| match error {
            NoReasons::Invalid(error) => (StatusCode::BAD_REQUEST, error),
            error => (StatusCode::SERVICE_UNAVAILABLE, error.to_string()),
        }),
        Err(_) => {
            let error = "the cluster state has not been read completely yet: ask again in a moment";
            Err((StatusCode::SERVICE_UNAVAILABLE, error.into()))
        }
    }
}

/// The path and query of a question.
pub(crate) fn path(words: &[String]) -> String {
    let words = words.iter().map(|it| form_urlencoded::byte_serialize(it.as_bytes()).collect::<String>());
    format!("/explain?{}", words.collect::<Vec<_>>().join("&"))
}
