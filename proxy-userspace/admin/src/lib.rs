//! What a node does, told to whoever asks: kubelet, load balancers, Prometheus, people.
//!
//! The one rule: it only watches. Nothing here decides, waits for or slows what is served, and whatever goes wrong here
//! takes nothing else down.

#![forbid(unsafe_code)]

mod ask;
mod counted;
mod flag;
mod health;
mod health_checks;
mod metrics;
mod pages;
mod record;
mod server;
mod status;
mod tally;

#[cfg(test)]
mod sample;

use std::{
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime},
};

use datapath::{ApplyReport, AttachStatus, ProbeResult, TableStats, TerminationReport};
use model::Rejected;
use publish::{Published, Subscription};
use reconciler::{Observer, Step};
use tokio::time::Instant;

pub use ask::{Asked, ask, get, is_ready};
pub use flag::Bind;
pub use health::LATE;
pub use health_checks::{FailedCheck, HealthChecks};
pub use pages::Site;
pub use record::PortCountLookup;
pub use server::{Endpoint, Servers};
pub use status::{CountedStatus, RejectedStatus, Revision, SourceStatus, Status, TableStatus};

use crate::{
    metrics::Metrics,
    record::{Count, Counters, Moment, Record},
};

/// What is known of this process, and who is told what happens.
///
/// A copy is the same one.
#[derive(Clone, Debug)]
pub struct Admin {
    record: Arc<Mutex<Record>>,
    metrics: Arc<Metrics>,
}

/// What a process does with a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It brings it into force in the kernel.
    Backend,
    /// It only tells others.
    Brain,
}

/// Who refuses things.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stage {
    /// Who reads the objects of a cluster.
    Source,
    /// Who decides.
    Brain,
    /// Who programs the kernel.
    Backend,
    /// Who tells load balancers of the endpoints here.
    HealthChecks,
}

impl Stage {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Source, Self::Brain, Self::Backend, Self::HealthChecks];

    /// Its name, as in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Brain => "brain",
            Self::Backend => "backend",
            Self::HealthChecks => "health-checks",
        }
    }
}

/// How a source of facts stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Source {
    /// Whether everything was read once.
    pub synced: bool,
    /// When it was heard last, if it is known.
    pub last_contact: Option<SystemTime>,
    /// What is wrong with it now.
    pub error: Option<String>,
}

impl Admin {
    /// Nothing is known yet of the node of that name.
    pub fn new(node: impl Into<Arc<str>>, role: Role) -> Self {
        let record = Arc::new(Mutex::new(Record::new(node.into(), role, Moment::now())));
        let metrics = Arc::new(Metrics::new(Arc::clone(&record)));
        Self { record, metrics }
    }

    /// Says how a source stands; one that was never told of is not waited for.
    pub fn source(&self, name: &str, source: Source) {
        self.record().sources.insert(name.to_owned(), source);
    }

    /// Says what is refused now, and why.
    pub fn rejected(&self, stage: Stage, rejected: impl IntoIterator<Item = Rejected>) {
        self.record().rejected.insert(stage, rejected.into_iter().collect());
    }

    /// Says whom to ask how many follow the states of this process.
    pub fn watchers(&self, count: impl Fn() -> usize + Send + Sync + 'static) {
        self.record().watchers = Some(Count(Box::new(count)));
    }

    /// Sets how the counters of service ports are read; they are left out while they cannot be.
    pub fn set_counter_source(&self, read: impl Fn() -> Option<PortCountLookup> + Send + Sync + 'static) {
        self.record().counters = Some(Counters(Arc::new(read)));
    }

    /// Follows what is published, until the publisher is gone.
    pub async fn follow(&self, mut states: Subscription) {
        while let Some(published) = states.next().await {
            let changes = self.record().published(&published, Moment::now());
            self.metrics.changed(changes);
        }
    }

    fn record(&self) -> MutexGuard<'_, Record> {
        lock(&self.record)
    }
}

/// What was recorded before somebody panicked is still true.
fn lock<T>(record: &Mutex<T>) -> MutexGuard<'_, T> {
    record.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Observer for Admin {
    fn on_dequeued(&self, published: &Arc<Published>) {
        let mut record = self.record();
        // Who publishes and who takes up are not heard in order.
        let changes = record.published(published, Moment::now());
        let again = record.taken(published);
        drop(record);
        self.metrics.changed(changes);
        self.metrics.taken(again);
    }

    fn on_applied(&self, published: &Arc<Published>, report: &ApplyReport, took: Duration) {
        let mut record = self.record();
        // The same state once more is an update only where it leads elsewhere, as when the host's addresses are others.
        let is_update = report.flipped || !record.is_in_force(published);
        let triggers = record.in_force(published, report, Moment::now());
        drop(record);
        if is_update {
            self.metrics.in_force(report, took, &triggers);
        }
    }

    fn on_failed(&self, doing: Step, error: &str) {
        self.record().failed(doing, error);
        self.metrics.failed(doing);
    }

    fn on_attach_checked(&self, hooks: Result<&AttachStatus, &str>) {
        self.metrics.looked(hooks);
        self.record().looked(hooks, Instant::now());
    }

    fn on_packet_path(&self, packets: Option<&Rejected>) {
        self.record().lacking = packets.cloned();
    }

    fn on_probed(&self, heard: &[ProbeResult]) {
        self.record().tried(heard, Instant::now());
    }

    fn on_terminated(&self, ended: &io::Result<TerminationReport>) {
        self.metrics.ended(ended.as_ref().map_or(0, |it| it.sockets));
    }

    fn on_table_stats(&self, memory: TableStats) {
        self.record().memory = memory;
    }
}
