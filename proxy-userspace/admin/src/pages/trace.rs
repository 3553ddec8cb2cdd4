//! The page `/trace`: a line of JSON for each decision, for as long as the client reads.
//!
//! Its query has the filters, as in `/trace?service=default/web&failed`.

use std::fmt;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use crate::state::TraceFilters;

/// A trace that runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceStatus {
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

/// The filters in the query of the page.
pub(crate) fn filters(query: &str) -> TraceFilters {
    form_urlencoded::parse(query.as_bytes()).into_owned().collect()
}

/// The path and query of a trace with these filters.
pub(crate) fn path(filters: &[(String, String)]) -> String {
    let mut query = form_urlencoded::Serializer::new(String::new());
    query.extend_pairs(filters);
    format!("/trace?{}", query.finish())
}
