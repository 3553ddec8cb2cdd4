//! `localv1.Explanations/Explain`: the brain's decisions for a connection.
//!
//! Invariant: one explanation at a time is computed, whether its client still waits for it or not.

use std::sync::Arc;

use prost::Message as _;
use proxy_contract::localv1::{ExplainReq, Explanation, explanations_server::Explanations};
use publish::explain::Explain;
use tokio::sync::Semaphore;
use tonic::{Request, Response, Status};

use super::{authz::Peer, status};

/// The longest answer, in bytes: about 100,000 endpoints.
const MAX_ANSWER_SIZE: usize = 16 << 20;

pub(crate) struct ExplanationService {
    explainer: Arc<dyn Explain>,
    turn: Arc<Semaphore>,
}

impl ExplanationService {
    pub(crate) fn new(explainer: Arc<dyn Explain>) -> Self {
        Self { explainer, turn: Arc::new(Semaphore::new(1)) }
    }
}

#[tonic::async_trait]
impl Explanations for ExplanationService {
    async fn explain(&self, request: Request<ExplainReq>) -> Result<Response<Explanation>, Status> {
        let peer = Peer::of(&request)?;
        let ExplainReq { node_name, question } = request.into_inner();
        peer.authorize_node(&node_name)?;
        // It is never closed.
        let turn = Arc::clone(&self.turn).acquire_owned().await;
        let pending = self.explainer.explain(&node_name, &question);
        // A client that goes does not let the next one begin before this answer is computed.
        let answer = tokio::spawn(async move {
            let _turn = turn;
            pending.await
        });
        let answer = answer.await.map_err(|it| Status::internal(it.to_string()))?;
        let answer = answer.map_err(|it| status::of_explanation(&it, &node_name))?;
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
