//! The requests to the API server, for the metrics of every Kubernetes client (`rest_client_…`).
//!
//! Invariant: bounded, and no request waits for it.

use std::{mem, sync::Arc, time::Duration};

use parking_lot::Mutex;

use tokio::time::Instant;

/// How many requests are kept until they are taken; further ones are not counted.
const MAX_REQUESTS: usize = 1000;

/// A request that was answered, or has failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiRequest {
    pub method: String,
    /// Host and port of the server.
    pub host: String,
    /// The status of the answer; `None` without one.
    pub code: Option<u16>,
    /// The time until the head of the answer, or the failure.
    pub took: Duration,
}

/// The requests of a client, oldest first. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct RequestLog(Arc<Mutex<Vec<ApiRequest>>>);

impl RequestLog {
    /// The requests since the last call.
    pub(super) fn take(&self) -> Vec<ApiRequest> {
        mem::take(&mut self.0.lock())
    }

    /// A request is sent.
    pub(super) fn begin<B>(&self, request: &http::Request<B>) -> Pending {
        Pending {
            log: self.clone(),
            method: request.method().to_string(),
            host: request.uri().authority().map_or_else(String::new, ToString::to_string),
            begin: Instant::now(),
        }
    }
}

/// A request that is not answered yet.
#[derive(Debug)]
pub(super) struct Pending {
    log: RequestLog,
    method: String,
    host: String,
    begin: Instant,
}

impl Pending {
    /// Records the status of the answer, or that there is none.
    pub(super) fn end(self, status: Option<http::StatusCode>) {
        let Self { log, method, host, begin } = self;
        let mut requests = log.0.lock();
        if requests.len() < MAX_REQUESTS {
            let code = status.map(|it| it.as_u16());
            requests.push(ApiRequest { method, host, code, took: begin.elapsed() });
        }
    }
}
