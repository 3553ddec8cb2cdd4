//! The state behind all pages: the newest report of every part of the process, and its time.
//!
//! Invariant: only observations are stored here; `health` judges them. Nothing here knows of HTTP.

pub(crate) mod counters;
mod moment;
pub(crate) mod rates;
mod readers;
pub(crate) mod timeline;
pub(crate) mod totals;

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, SystemTime},
};

use datapath::{ApplyReport, AttachStatus, HookBehavior, PacketAffinity, ProbeResult, TableFill, TableStats};
use model::{Family, Rejected, Rejections, state::NodeState};
use pipeline::SyncStatus;
use publish::Published;
use reconciler::Step;
use tokio::time::Instant;

pub(crate) use self::moment::{Moment, triggered};
pub use self::readers::{
    Configuration, CounterLookup, Explainer, PendingAnswer, PendingTrace, PortCountLookup, Readers,
    TraceFilters,
};
use self::{
    timeline::{Changes, Timeline},
    totals::{ChangeCounts, Totals},
};
use crate::pages::RunningTrace;

/// What a process does with a node's state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// It applies the state to the kernel.
    #[default]
    Backend,
    /// It only publishes the state.
    Brain,
}

/// The part of the process that rejects an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum RejectedBy {
    /// Reads the objects of the cluster.
    Source,
    /// Computes the node's state.
    Brain,
    /// Programs the kernel.
    Backend,
    /// Serves the health-check node ports.
    HealthChecks,
}

impl RejectedBy {
    pub(crate) const ALL: [Self; 4] = [Self::Source, Self::Brain, Self::Backend, Self::HealthChecks];

    /// Its name, as in metrics.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Brain => "brain",
            Self::Backend => "backend",
            Self::HealthChecks => "health-checks",
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct AdminState {
    pub(crate) node: Arc<str>,
    pub(crate) role: Role,
    pub(crate) started: Moment,
    pub(crate) sources: BTreeMap<String, SyncStatus>,
    /// The newest published state.
    pub(crate) published: Option<(Arc<Published>, Moment)>,
    pub(crate) active: Option<ActiveState>,
    /// What serves until a state is active.
    pub(crate) inherited: Option<Inherited>,
    pub(crate) pending: Pending,
    /// The last failure since a state became active.
    pub(crate) failure: Option<Failure>,
    pub(crate) datapath: DatapathState,
    /// The entries of the namespace with most, as `--max-namespace-entries` counts them.
    pub(crate) namespace_entries: u64,
    pub(crate) rejected: BTreeMap<RejectedBy, Rejections>,
    pub(crate) totals: Totals,
    /// Whether the source has the Node object of every node, so that a missing one is known to be missing.
    pub(crate) requires_node: bool,
    /// Whether the last Node object of this node was not about to be deleted; `None` if there never was one.
    was_node_eligible: Option<bool>,
    pub(crate) readers: Readers,
    pub(crate) trace: Option<RunningTrace>,
    /// The newest generations; `None` if there is no page for people.
    pub(crate) timeline: Option<Timeline>,
}

/// The state that is active in the kernel.
#[derive(Debug)]
pub(crate) struct ActiveState {
    pub(crate) published: Arc<Published>,
    pub(crate) since: Moment,
    pub(crate) tables: Vec<TableFill>,
}

/// What an earlier process left in the kernel, which serves until the first state of this one is active.
#[derive(Clone, Debug)]
pub struct Inherited {
    /// What it serves, as in `3 Services`.
    pub serves: String,
    /// Whether its programs are attached, or why not.
    pub programs: Result<(), String>,
}

/// A failed step that will be retried.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) step: Step,
    pub(crate) error: String,
}

impl AdminState {
    pub(crate) fn new(node: Arc<str>, role: Role) -> Self {
        Self { node, role, ..Self::default() }
    }

    /// The body of `/proxyMode`: the socket path if it is on, else the packet path; kube-proxy's words where it has them.
    pub(crate) fn proxy_mode(&self) -> &'static str {
        let is_packet_path_only = self.role == Role::Backend && !self.readers.has_sockets;
        if is_packet_path_only { "nftables" } else { "ebpf" }
    }

    /// The state that is served: the active one, or the newest one in a process that applies none.
    pub(crate) fn served(&self) -> Option<Arc<Published>> {
        match self.role {
            Role::Backend => self.active.as_ref().map(|it| &it.published),
            Role::Brain => self.published.as_ref().map(|(it, _)| it),
        }
        .cloned()
    }

    /// Records a published state, and returns its difference from the one before; empty if it was recorded already.
    pub(crate) fn on_published(&mut self, published: &Arc<Published>, now: Moment) -> ChangeCounts {
        if self.published.as_ref().is_some_and(|(it, _)| it.revision() == published.revision()) {
            return ChangeCounts::default();
        }
        let empty = NodeState::default();
        let before = self.published.as_ref().map_or(&empty, |(it, _)| &it.state);
        let mut changes = ChangeCounts::default();
        let mut named = Changes::default();
        for (name, before, after) in published.state.diff(before) {
            changes.add(before, after);
            if self.timeline.is_some() {
                named.add(name, before, after);
            }
        }
        if let Some(it) = &mut self.timeline {
            it.on_published(published, named, now);
        }
        if self.role == Role::Brain {
            self.totals.update(before, &published.state);
        }
        if let Some(node) = published.state.nodes.get(&self.node) {
            self.was_node_eligible = Some(!node.is_being_deleted);
        }
        self.published = Some((Arc::clone(published), now));
        self.pending.on_published(now.instant);
        changes
    }

    /// Records that the reconciler dequeued a state; returns whether this is a retry.
    pub(crate) fn on_dequeued(&mut self, published: &Published) -> bool {
        if let Some(it) = &mut self.timeline {
            it.on_dequeued(published, Instant::now());
        }
        self.pending.on_dequeued(published.revision())
    }

    /// Records that a state is active; returns the delay of each change in it whose time is known, in each family of its
    /// Service.
    pub(crate) fn on_applied(
        &mut self,
        published: &Arc<Published>,
        report: &ApplyReport,
        now: Moment,
    ) -> Vec<(Family, Duration)> {
        let empty = NodeState::default();
        let before = self.active.as_ref().map_or(&empty, |it| &it.published.state);
        self.totals.update(before, &published.state);
        let delays = published.state.diff(before).filter_map(|(_, before, after)| {
            // Like kube-proxy, ignore changes that precede the start of the process.
            let trigger = triggered(before, after).filter(|it| *it >= self.started.wall)?;
            let delay = now.wall.duration_since(trigger).unwrap_or_default();
            Some(after?.service.cluster_ips.iter().map(move |ip| (Family::of(*ip), delay)))
        });
        let delays = delays.flatten().collect();
        if let Some(it) = &mut self.timeline {
            it.on_applied(published, report, now.instant);
        }
        let before = self.active.as_ref().filter(|it| it.published.revision() == published.revision());
        let since = before.map_or(now, |it| it.since);
        self.active =
            Some(ActiveState { published: Arc::clone(published), since, tables: report.tables.clone() });
        self.inherited = None;
        self.rejected.insert(RejectedBy::Backend, report.rejected.iter().cloned().collect());
        self.pending.on_applied(published.revision());
        self.failure = None;
        delays
    }

    pub(crate) fn is_active(&self, published: &Published) -> bool {
        self.active.as_ref().is_some_and(|it| it.published.revision() == published.revision())
    }

    pub(crate) fn on_failed(&mut self, step: Step, error: &str) {
        if let (Some(it), Step::Apply) = (&mut self.timeline, step) {
            it.on_failed(error);
        }
        self.failure = Some(Failure { step, error: error.to_owned() });
    }

    /// Whether load balancers may send to this node (KEP-3836). As in kube-proxy, a Node object that never existed means no,
    /// and one that was deleted counts as it was last. Where Node objects may be unknown, as without any in manifests or from
    /// a brain, a missing one means nothing.
    pub(crate) fn is_node_eligible(&self) -> bool {
        let has_others = || {
            self.role == Role::Backend
                && self.published.as_ref().is_some_and(|(it, _)| !it.state.nodes.is_empty())
        };
        let is_missing = || self.published.is_some() && (self.requires_node || has_others());
        self.was_node_eligible.unwrap_or_else(|| !is_missing())
    }

    /// Published changes that are not active yet.
    pub(crate) fn pending_changes(&self) -> ChangeCounts {
        let empty = NodeState::default();
        let active = self.active.as_ref().map_or(&empty, |it| &it.published.state);
        let mut changes = ChangeCounts::default();
        if let (Some((published, _)), Role::Backend) = (&self.published, self.role) {
            published.state.diff(active).for_each(|(_, before, after)| changes.add(before, after));
        }
        changes
    }

    /// Age of the oldest change that is not active.
    pub(crate) fn pending_for(&self, now: Instant) -> Option<Duration> {
        let since = if self.role == Role::Backend { self.pending.since } else { None };
        since.map(|it| now.duration_since(it))
    }
}

/// The newest reports about the kernel: attach checks, probes and tables.
#[derive(Debug, Default)]
pub(crate) struct DatapathState {
    /// The result of the last successful attach check.
    pub(crate) attach_status: Option<AttachStatus>,
    /// The last check that found all programs attached; before that, the first check.
    pub(crate) last_attached: Option<Instant>,
    pub(crate) attach_check_error: Option<String>,
    /// Why the packet path is unavailable or behind.
    pub(crate) packet_path_error: Option<Rejected>,
    pub(crate) probe_results: Vec<ProbeResult>,
    /// The last conclusive probe; before that, the time since when one is expected. Where the hooks could never be probed,
    /// the last attempt.
    pub(crate) last_probe: Option<Instant>,
    has_conclusive_probe: bool,
    pub(crate) table_stats: TableStats,
    /// As of the last count.
    pub(crate) packet_affinity: PacketAffinity,
    pub(crate) has_kube_proxy_rules: bool,
}

impl DatapathState {
    pub(crate) fn on_attach_checked(&mut self, status: Result<&AttachStatus, &str>, now: Instant) {
        let first = *self.last_attached.get_or_insert(now);
        match status {
            Ok(status) => {
                self.last_attached = Some(if status.is_complete() { now } else { first });
                // From now on probes are expected, if there are programs.
                if status.is_complete() && status.hooks.iter().any(|it| it.program.is_some()) {
                    self.last_probe.get_or_insert(now);
                }
                self.attach_check_error = None;
                self.attach_status = Some(status.clone());
            }
            Err(error) => self.attach_check_error = Some(error.to_owned()),
        }
    }

    pub(crate) fn on_probed(&mut self, results: &[ProbeResult], now: Instant) {
        let is_conclusive = results.iter().any(|it| !matches!(it.behavior, HookBehavior::Unknown(_)));
        self.has_conclusive_probe |= is_conclusive;
        if is_conclusive || !self.has_conclusive_probe {
            self.last_probe = Some(now);
        }
        self.probe_results = results.to_vec();
    }
}

/// Since when changes wait until they are active.
#[derive(Debug, Default)]
pub(crate) struct Pending {
    /// Arrival of the oldest change that is not active.
    since: Option<Instant>,
    /// Arrival of the oldest change after the state that is being applied.
    next_since: Option<Instant>,
    /// Arrival of the oldest change of the last dequeued state.
    dequeued_since: Option<Instant>,
    /// Instance and revision of the last dequeued state.
    last_dequeued: Option<(u64, u64)>,
}

impl Pending {
    fn on_published(&mut self, now: Instant) {
        self.since.get_or_insert(now);
        self.next_since.get_or_insert(now);
    }

    /// Returns whether this is a retry.
    fn on_dequeued(&mut self, key: (u64, u64)) -> bool {
        let since = self.next_since.take();
        let is_retry = self.last_dequeued.replace(key) == Some(key);
        if !is_retry {
            self.dequeued_since = since;
        }
        is_retry
    }

    fn on_applied(&mut self, key: (u64, u64)) {
        // One half of the datapath may have taken a newer state meanwhile.
        let is_last = self.last_dequeued.is_none_or(|it| it == key);
        self.since = if is_last { self.next_since } else { self.dequeued_since.or(self.next_since) };
    }
}

/// Seconds since 1970.
pub(crate) fn seconds(time: SystemTime) -> f64 {
    time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}
