//! The page `/trace`: a line of JSON for each decision, for as long as the client reads.
//!
//! Its query has the filters, as in `/trace?service=default/web&failed`.

use std::{fmt, future::Future, pin::Pin, sync::Arc};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};

/// The filters of a trace: names and values.
pub type TraceFilters = Vec<(String, String)>;

/// The lines of a trace, or why there is none.
pub type PendingTrace = Pin<Box<dyn Future<Output = Result<mpsc::Receiver<String>, String>> + Send>>;

/// A trace that runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceStatus {
    /// When it began.
    pub since: Timestamp,
    /// Its filters, as flags of the command.
    pub filters: String,
}

impl fmt::Display for TraceStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { since, filters } = self;
        write!(f, "since {since:.0}")?;
        if filters.is_empty() { f.write_str(", without a filter") } else { write!(f, ", with {filters}") }
    }
}

/// A trace that runs, and how it is asked to end.
#[derive(Debug)]
pub(crate) struct RunningTrace {
    pub(crate) status: TraceStatus,
    /// Dropping it asks the trace to end.
    pub(crate) replacing: Option<oneshot::Sender<()>>,
}

/// Starts traces.
#[derive(Clone)]
pub(crate) struct Tracer(Arc<dyn Fn(TraceFilters) -> PendingTrace + Send + Sync>);

impl fmt::Debug for Tracer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tracer")
    }
}

impl Tracer {
    pub(crate) fn new(start: impl Fn(TraceFilters) -> PendingTrace + Send + Sync + 'static) -> Self {
        Self(Arc::new(start))
    }

    /// Starts a trace by the query of the page.
    pub(crate) async fn start(&self, query: &str) -> Result<mpsc::Receiver<String>, String> {
        (self.0)(form_urlencoded::parse(query.as_bytes()).into_owned().collect()).await
    }
}

/// The path and query of a trace with these filters.
pub(crate) fn path(filters: &[(String, String)]) -> String {
    let mut query = form_urlencoded::Serializer::new(String::new());
    query.extend_pairs(filters);
    format!("/trace?{}", query.finish())
}
