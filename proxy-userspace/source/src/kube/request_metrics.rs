//! Counts the requests to the API server, as every Kubernetes client does (`rest_client_…`).

use metrics::{Histograms, add, histograms};
use prometheus_client::{
    metrics::{counter::Counter, family::Family, histogram::Histogram},
    registry::Registry,
};
use tokio::time::Instant;

/// The buckets of client-go.
const BUCKETS: [f64; 12] = [0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0];

/// The requests of a client. Clones share them.
#[derive(Clone, Debug)]
pub struct RequestMetrics {
    requests: Family<[(&'static str, String); 3], Counter>,
    durations: Histograms<[(&'static str, String); 2]>,
}

impl Default for RequestMetrics {
    fn default() -> Self {
        let durations = histograms(|| Histogram::new(BUCKETS));
        Self { requests: Family::default(), durations }
    }
}

impl RequestMetrics {
    pub fn register(&self, registry: &mut Registry) {
        add(registry, "rest_client_requests", self.requests.clone());
        add(registry, "rest_client_request_duration_seconds", self.durations.clone());
    }

    /// A request is sent. The result is called at the head of the answer, with its status, or at the failure.
    pub fn begin<B>(&self, request: &http::Request<B>) -> impl FnOnce(Option<http::StatusCode>) + use<B> {
        let (metrics, begin) = (self.clone(), Instant::now());
        let method = request.method().to_string();
        let host = request.uri().authority().map_or_else(String::new, ToString::to_string);
        move |status| {
            let code = status.map_or_else(|| "<error>".to_owned(), |it| it.as_str().to_owned());
            let labels = [("code", code), ("host", host.clone()), ("method", method.clone())];
            metrics.requests.get_or_create(&labels).inc();
            let labels = [("host", host), ("verb", method)];
            metrics.durations.get_or_create(&labels).observe(begin.elapsed().as_secs_f64());
        }
    }
}
