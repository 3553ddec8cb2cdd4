//! Explanations by a brain to its clients.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use grpc_server::{Explain, Listener, PendingExplanation, Unexplained};
use model::state::NodeState;
use proxy_contract::{
    Target,
    client::ExplainError,
    localv1::{ExplainedEndpoint, Explanation},
};
use publish::{Publisher, SingleNode};
use tokio::{
    sync::Semaphore,
    time::{Duration, sleep},
};

use crate::common::{Brain, Folder, in_time, serve_explained, until};

/// Repeats the question; `invalid` has no answer, and `long` one that is longer than anyone accepts.
pub(crate) fn echo(node_name: String, question: Vec<String>) -> PendingExplanation {
    let reason = question.join(" ");
    Box::pin(async move {
        if reason == "invalid" {
            return Err(Unexplained::InvalidQuestion("ask something else".into()));
        }
        let endpoints = if reason == "long" { 1 << 18 } else { 0 };
        let endpoint = ExplainedEndpoint { reason: "x".repeat(64), ..ExplainedEndpoint::default() };
        Ok(Explanation { node_name, reason, endpoints: vec![endpoint; endpoints], ..Explanation::default() })
    })
}

async fn serve(folder: &Folder, explainer: Explain) {
    let publisher = Publisher::new("n1");
    publisher.publish(NodeState::default());
    let listener = Listener::bind(&Target::Unix(folder.socket())).await.unwrap();
    serve_explained(listener, SingleNode::new("n1", publisher.subscribe()), explainer);
}

async fn ask(folder: &Folder, question: &str) -> Result<Explanation, ExplainError> {
    let words: Vec<_> = question.split(' ').map(str::to_owned).collect();
    in_time(folder.client().explain(&words)).await
}

#[tokio::test]
async fn a_client_asks_about_its_node_and_is_answered_or_refused() {
    let folder = Folder::new();
    serve(&folder, Arc::new(echo)).await;
    let answer = ask(&folder, "node 10.0.0.1:80").await.unwrap();
    assert_eq!((answer.node_name.as_str(), answer.reason.as_str()), ("n1", "node 10.0.0.1:80"));
    let invalid = ask(&folder, "invalid").await.unwrap_err();
    assert_eq!(invalid, ExplainError::InvalidQuestion("ask something else".into()));
    let long = ask(&folder, "long").await.unwrap_err().to_string();
    assert!(long.contains("262144 endpoints, and is longer than 16 MiB"), "{long}");
}

#[tokio::test]
async fn a_brain_without_explanations_or_no_brain_is_told_apart() {
    let (folder, brain) = Brain::new().await;
    assert_eq!(ask(&folder, "node 10.0.0.1:80").await, Err(ExplainError::Unsupported));
    brain.stop().await;
    assert!(matches!(ask(&folder, "node 10.0.0.1:80").await, Err(ExplainError::Failed(_))));
}

/// Answers when it is allowed to.
#[derive(Clone)]
struct Slow {
    allowed: Arc<Semaphore>,
    begun: Arc<AtomicUsize>,
}

impl Slow {
    async fn answer(self) -> Result<Explanation, Unexplained> {
        self.begun.fetch_add(1, Ordering::Relaxed);
        self.allowed.acquire().await.unwrap().forget();
        Ok(Explanation::default())
    }
}

#[tokio::test]
async fn one_explanation_at_a_time_is_computed_even_if_its_client_has_gone() {
    let folder = Arc::new(Folder::new());
    let slow = Slow { allowed: Arc::new(Semaphore::new(0)), begun: Arc::default() };
    let explainer = slow.clone();
    serve(&folder, Arc::new(move |_, _| -> PendingExplanation { Box::pin(explainer.clone().answer()) }))
        .await;
    let start = || {
        let folder = Arc::clone(&folder);
        tokio::spawn(async move { ask(&folder, "node 10.0.0.1:80").await })
    };
    let begun = || slow.begun.load(Ordering::Relaxed);
    let first = start();
    until(|| begun() > 0).await;
    first.abort();
    let second = start();
    sleep(Duration::from_millis(200)).await;
    assert_eq!(begun(), 1);
    slow.allowed.add_permits(2);
    second.await.unwrap().unwrap();
    assert_eq!(begun(), 2);
}
