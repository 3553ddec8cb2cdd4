//! How a process stands, in one object: the page `/status`, and what the command of that name reads.

use std::time::SystemTime;

use datapath::PortCounts;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{
    Admin, Role, Stage,
    counted::Counted,
    health::Health,
    record::{Moment, Record},
};

/// How a process stands.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    /// The node it serves.
    pub node: String,
    /// Its version.
    pub version: String,
    /// Since when it runs.
    pub started: Timestamp,
    /// Whether all is well, but for the node's own eligibility.
    pub healthy: bool,
    /// Whether load balancers may send to this node.
    pub node_eligible: bool,
    /// What is wrong.
    pub problems: Vec<String>,
    /// The newest state.
    pub published: Option<Revision>,
    /// The state in force.
    pub in_force: Option<Revision>,
    /// For how many seconds the oldest change waits that is not in force.
    pub waiting_seconds: Option<f64>,
    /// What failed last, if it still does.
    pub failure: Option<String>,
    /// How many Services are served.
    pub services: usize,
    /// How many endpoints they have, together.
    pub endpoints: usize,
    /// Where the facts come from.
    pub sources: Vec<SourceStatus>,
    /// What is refused.
    pub rejected: Vec<RejectedStatus>,
    /// How full the maps are.
    pub tables: Vec<TableStatus>,
    /// How many follow the states of this process, where they can.
    pub watchers: Option<usize>,
    /// What the Services that are served have counted together, where it is counted.
    pub counted: Option<CountedStatus>,
}

/// What was counted; see [`PortCounts`].
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CountedStatus {
    /// Connections, and UDP associations, that were led to an endpoint.
    pub connections: u64,
    /// Those that were refused for want of endpoints.
    pub no_backend: u64,
    /// What was refused for another reason.
    pub denied: u64,
}

impl From<PortCounts> for CountedStatus {
    fn from(it: PortCounts) -> Self {
        let PortCounts { connections, no_backend, denied } = it;
        Self { connections, no_backend, denied }
    }
}

/// A state by its number.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Revision {
    /// The process that counts. A string, as in proto3 JSON.
    pub instance_id: String,
    /// Its count.
    pub rev: String,
    /// Since when.
    pub since: Timestamp,
}

/// How a source stands.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SourceStatus {
    /// Its name.
    pub name: String,
    /// Whether everything was read once.
    pub synced: bool,
    /// When it was heard last.
    pub last_contact: Option<Timestamp>,
    /// What is wrong with it.
    pub error: Option<String>,
}

/// Something that is refused.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RejectedStatus {
    /// Who refuses it: source, brain or backend.
    pub by: String,
    /// What.
    pub item: String,
    /// Why.
    pub reason: String,
}

/// How full a table is.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TableStatus {
    /// Its name.
    pub name: String,
    /// How many entries it has.
    pub entries: u32,
    /// How many it has room for as it is.
    pub capacity: u32,
}

impl Admin {
    /// How this process stands.
    pub fn status(&self) -> Status {
        let counted = Counted::read(&self.record).map(|it| it.total().into());
        Status { counted, ..status(&self.record(), Moment::now()) }
    }
}

fn status(record: &Record, now: Moment) -> Status {
    let health = Health::live(record, now);
    let revision = |published: &publish::Published, since: Moment| Revision {
        instance_id: published.instance_id.to_string(),
        rev: published.rev.to_string(),
        since: timestamp(since.wall),
    };
    let sources = record.sources.iter().map(|(name, it)| SourceStatus {
        name: name.clone(),
        synced: it.synced,
        last_contact: it.last_contact.map(timestamp),
        error: it.error.clone(),
    });
    let rejected = |stage: &Stage| {
        let items = record.rejected.get(stage).into_iter().flatten();
        let by = stage.name();
        items
            .map(move |it| RejectedStatus {
                by: by.to_owned(),
                item: it.item.clone(),
                reason: it.reason.clone(),
            })
            .collect::<Vec<_>>()
    };
    let tables = record.in_force.iter().flat_map(|it| &it.tables).map(|it| TableStatus {
        name: it.name.to_owned(),
        entries: it.entries,
        capacity: it.capacity,
    });
    let failure = record.failure.as_ref();
    Status {
        node: record.node.to_string(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        started: timestamp(record.started.wall),
        healthy: health.is_ok(),
        node_eligible: record.node_eligible(),
        problems: health.into_problems(),
        published: record.published.as_ref().map(|(it, since)| revision(it, *since)),
        in_force: record.in_force.as_ref().map(|it| revision(&it.published, it.since)),
        waiting_seconds: record.waiting_for(now.instant).map(|it| it.as_secs_f64()),
        failure: failure.map(|it| format!("{}: {}", it.doing.name(), it.error)),
        services: record.tally.services,
        endpoints: record.tally.endpoints,
        sources: sources.collect(),
        rejected: Stage::ALL.iter().flat_map(rejected).collect(),
        tables: tables.collect(),
        watchers: record.watchers.as_ref().map(|it| (it.0)()),
        counted: None,
    }
}

impl Record {
    /// The state that is served, by whatever means.
    pub(crate) fn served(&self) -> Option<std::sync::Arc<publish::Published>> {
        match self.role {
            Role::Backend => self.in_force.as_ref().map(|it| &it.published),
            Role::Brain => self.published.as_ref().map(|(it, _)| it),
        }
        .cloned()
    }
}

fn timestamp(time: SystemTime) -> Timestamp {
    Timestamp::try_from(time).unwrap_or(Timestamp::UNIX_EPOCH)
}
