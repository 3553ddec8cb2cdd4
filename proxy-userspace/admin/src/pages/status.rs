//! The status of a process as one object: the page `/status`, which the command `status` reads.

use std::iter;

use datapath::PortCounts;
use jiff::Timestamp;
use publish::{Published, Watchers};
use serde::{Deserialize, Serialize};

use super::TraceStatus;
use crate::{
    admin::Admin,
    health::{Health, timestamp},
    http::body::Parts,
    state::{AdminState, Moment, RejectedBy},
};

/// Where the rejected items begin in the page.
const REJECTED: &str = r#""rejected":["#;

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    pub node: String,
    pub version: String,
    pub started: Timestamp,
    /// Whether it is healthy, regardless of the node's eligibility.
    pub healthy: bool,
    /// Whether load balancers may send to this node.
    pub node_eligible: bool,
    /// Why it is not healthy.
    pub problems: Vec<String>,
    /// The newest state.
    pub published: Option<Revision>,
    pub active: Option<Revision>,
    /// What the kernel serves while no state of this process is active, as in `3 Services`.
    #[serde(default)]
    pub inherited: Option<String>,
    /// Age of the oldest change that is not active, in seconds.
    pub pending_seconds: Option<f64>,
    /// The last failure, until an apply succeeds.
    pub failure: Option<String>,
    pub services: usize,
    pub endpoints: usize,
    pub sources: Vec<SourceStatus>,
    pub rejected: Vec<RejectedStatus>,
    /// The fill levels of the tables in the kernel.
    pub tables: Vec<TableStatus>,
    /// The endpoints that clients avoid because their connections to them failed.
    #[serde(default)]
    pub ejected: Vec<EjectedStatus>,
    /// The trace that runs.
    #[serde(default)]
    pub trace: Option<TraceStatus>,
    /// Number of watchers, in a process that serves them.
    pub watchers: Option<usize>,
    /// Sums over the Services that are served, in a process with counters.
    pub counters: Option<CountersStatus>,
}

/// Sums of counters; see [`PortCounts`].
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CountersStatus {
    /// Connections and UDP associations that were redirected to an endpoint.
    pub connections: u64,
    /// Connections that were refused because there was no endpoint.
    pub no_backend: u64,
    /// Calls that were denied for another reason.
    pub denied: u64,
    /// Calls that were left to the packet path.
    #[serde(default)]
    pub left_to_packets: u64,
}

impl From<PortCounts> for CountersStatus {
    fn from(it: PortCounts) -> Self {
        let PortCounts { connections, no_backend, denied, left_to_packets, .. } = it;
        Self { connections, no_backend, denied, left_to_packets }
    }
}

/// A revision of the node's state.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Revision {
    /// The process that numbers the revisions. A string, as in proto3 JSON.
    pub instance_id: String,
    /// Its number. A string, as in proto3 JSON.
    pub rev: String,
    /// When it was published or became active.
    pub since: Timestamp,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SourceStatus {
    pub name: String,
    #[serde(default)]
    pub address: Option<String>,
    /// Whether it was read completely at least once.
    pub synced: bool,
    pub last_contact: Option<Timestamp>,
    pub error: Option<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RejectedStatus {
    /// The part of the process that rejects it: source, brain, backend or health-checks.
    pub by: String,
    pub item: String,
    pub reason: String,
}

/// The fill level of a table.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TableStatus {
    pub name: String,
    pub entries: u32,
    pub capacity: u32,
}

/// An endpoint that clients avoid.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EjectedStatus {
    /// The Service, as in `default/web`.
    pub service: String,
    /// The name of the port; empty if it has none.
    pub port: String,
    pub endpoint: String,
    /// Number of clients that avoid it; each is a network namespace.
    pub clients: usize,
    /// Whether the node's own network namespace is one of them, so that packets avoid it, too.
    #[serde(default)]
    pub node: bool,
}

impl Admin {
    pub fn status(&self) -> Status {
        let (status, rejected) = self.status_and_rejected();
        Status { rejected: rejected.collect(), ..status }
    }

    pub(crate) fn status_parts(&self) -> Result<Parts, String> {
        let (status, rejected) = self.status_and_rejected();
        let text = serde_json::to_string(&status).map_err(|it| it.to_string())?;
        // In a string, quotes are escaped: this is the field.
        let (head, tail) = text.split_once(REJECTED).ok_or("the status has no rejected items")?;
        let (head, tail) = (format!("{head}{REJECTED}"), tail.to_owned());
        let items = rejected.enumerate().map(|(n, it)| {
            let json = serde_json::to_string(&it).map_err(|it| it.to_string())?;
            Ok(if n == 0 { json } else { format!(",{json}") })
        });
        Ok(Box::new(iter::once(Ok(head)).chain(items).chain(iter::once(Ok(tail)))))
    }

    /// The status without the rejected items, of which there may be many.
    fn status_and_rejected(&self) -> (Status, impl Iterator<Item = RejectedStatus> + Send + use<>) {
        let reading = self.metrics.counters.read(&self.state);
        let served = self.state().served();
        let counters = served.and_then(|it| reading.total(it.state.services.values())).map(Into::into);
        let state = self.state();
        let all = RejectedBy::ALL.map(|by| (by, state.rejected.get(&by).cloned().unwrap_or_default()));
        let rejected = all.into_iter().flat_map(|(by, it)| {
            it.into_parts().map(move |it| RejectedStatus {
                by: by.name().to_owned(),
                item: it.item,
                reason: it.reason,
            })
        });
        let counters = counters.filter(|_| state.readers.has_sockets);
        (Status { counters, ..status(&state, Moment::now()) }, rejected)
    }
}

/// Without rejected items and counters.
fn status(state: &AdminState, now: Moment) -> Status {
    let health = Health::live(state, now);
    let revision = |published: &Published, since: Moment| Revision {
        instance_id: published.instance_id.to_string(),
        rev: published.rev.to_string(),
        since: timestamp(since.wall),
    };
    let sources = state.sources.iter().map(|(name, it)| SourceStatus {
        name: name.clone(),
        address: it.address.clone(),
        synced: it.is_synced,
        last_contact: it.last_contact.map(timestamp),
        error: it.error.clone(),
    });
    let tables = state.active.iter().flat_map(|it| &it.tables).map(|it| TableStatus {
        name: it.name.to_owned(),
        entries: it.entries,
        capacity: it.capacity,
    });
    let ejected = state.datapath.table_stats.ejected.iter().map(|it| EjectedStatus {
        service: it.service.to_string(),
        port: it.port.clone(),
        endpoint: it.endpoint.to_string(),
        clients: it.clients,
        node: it.has_node,
    });
    let failure = state.failure.as_ref();
    Status {
        node: state.node.to_string(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        started: timestamp(state.started.wall),
        healthy: health.is_ok(),
        node_eligible: state.is_node_eligible(),
        problems: health.problems,
        published: state.published.as_ref().map(|(it, since)| revision(it, *since)),
        active: state.active.as_ref().map(|it| revision(&it.published, it.since)),
        inherited: state.inherited.as_ref().map(|it| it.serves.clone()),
        pending_seconds: state.pending_for(now.instant).map(|it| it.as_secs_f64()),
        failure: failure.map(|it| format!("{}: {}", it.step.name(), it.error)),
        services: state.totals.services,
        endpoints: state.totals.endpoints,
        sources: sources.collect(),
        rejected: Vec::new(),
        tables: tables.collect(),
        ejected: ejected.collect(),
        trace: state.trace.as_ref().map(|it| it.status.clone()),
        watchers: state.readers.watchers.as_ref().map(Watchers::count),
        counters: None,
    }
}
