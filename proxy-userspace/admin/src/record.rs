//! What is known: the newest of everything, and since when.
//!
//! The one rule: plain facts, without a judgement. What they mean is said in `health`.

use std::{
    collections::BTreeMap,
    fmt,
    sync::Arc,
    time::{Duration, SystemTime},
};

use datapath::{ApplyReport, AttachStatus, HookBehavior, PortCounts, ProbeResult, TableFill, TableStats};
use model::{Protocol, Rejected, ServiceName, Timestamp, state::NodeState};
use publish::Published;
use reconciler::Step;
use tokio::time::Instant;

use crate::{
    Role, Source, Stage,
    tally::{Changes, Tally},
};

/// One moment by both clocks: one that only goes forward, and one that others have too.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment {
    pub(crate) instant: Instant,
    pub(crate) wall: SystemTime,
}

impl Moment {
    pub(crate) fn now() -> Self {
        Self { instant: Instant::now(), wall: SystemTime::now() }
    }
}

#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) node: Arc<str>,
    pub(crate) role: Role,
    pub(crate) started: Moment,
    /// By name.
    pub(crate) sources: BTreeMap<String, Source>,
    /// The newest state that was published.
    pub(crate) published: Option<(Arc<Published>, Moment)>,
    /// The state that is in force.
    pub(crate) in_force: Option<InForce>,
    /// Since when the oldest change waits that is not in force.
    pub(crate) waiting: Option<Instant>,
    /// The same for changes that came after the state that is being brought into force.
    waiting_next: Option<Instant>,
    /// Instance and revision of what was taken up last.
    taken: Option<(u64, u64)>,
    /// What failed since a state came into force.
    pub(crate) failure: Option<Failure>,
    /// What the kernel said last of the programs.
    pub(crate) hooks: Option<AttachStatus>,
    /// When it last said that all of them are in effect; when they were first looked for, before that.
    pub(crate) proven: Option<Instant>,
    /// Why it would not say, the last time.
    pub(crate) look_error: Option<String>,
    /// Why traffic that has no socket here is not served though it should be.
    pub(crate) lacking: Option<Rejected>,
    /// What was heard last when the hooks were tried.
    pub(crate) canary: Vec<ProbeResult>,
    /// When that said last whether hooks act; since when it is waited for, before that. Where they could never be tried,
    /// when that was said last.
    pub(crate) sung: Option<Instant>,
    /// Whether it ever said so.
    has_sung: bool,
    /// What the kernel said last of what is remembered for sockets and clients.
    pub(crate) memory: TableStats,
    pub(crate) rejected: BTreeMap<Stage, Vec<Rejected>>,
    pub(crate) tally: Tally,
    /// Whether this node was ever among the cluster's nodes.
    saw_own_node: bool,
    /// `None` where nobody can follow.
    pub(crate) watchers: Option<Count>,
    /// `None` where nothing is counted.
    pub(crate) counters: Option<Counters>,
}

/// Reads what was counted. Never under the lock of the record: it takes a while.
#[derive(Clone)]
pub(crate) struct Counters(pub(crate) Arc<dyn Fn() -> Option<PortCountLookup> + Send + Sync>);

/// What was counted, by service port; `None` for one that is not programmed.
pub type PortCountLookup = Box<dyn Fn(&ServiceName, &str, Protocol) -> Option<PortCounts>>;

impl fmt::Debug for Counters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Counters")
    }
}

/// Asks how many follow.
pub(crate) struct Count(pub(crate) Box<dyn Fn() -> usize + Send + Sync>);

impl fmt::Debug for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0())
    }
}

/// A state that is in force.
#[derive(Debug)]
pub(crate) struct InForce {
    pub(crate) published: Arc<Published>,
    pub(crate) since: Moment,
    pub(crate) tables: Vec<TableFill>,
}

/// Something that failed and is tried again.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) doing: Step,
    pub(crate) error: String,
}

impl Record {
    pub(crate) fn new(node: Arc<str>, role: Role, started: Moment) -> Self {
        Self {
            node,
            role,
            started,
            sources: BTreeMap::new(),
            published: None,
            in_force: None,
            waiting: None,
            waiting_next: None,
            taken: None,
            failure: None,
            hooks: None,
            proven: None,
            look_error: None,
            lacking: None,
            canary: Vec::new(),
            sung: None,
            has_sung: false,
            memory: TableStats::default(),
            rejected: BTreeMap::new(),
            tally: Tally::default(),
            saw_own_node: false,
            watchers: None,
            counters: None,
        }
    }

    /// What leads sockets, if any are led; else what leads packets. The words are kube-proxy's where it has them.
    pub(crate) fn mode(&self) -> &'static str {
        // What leads sockets counts.
        let is_alone = self.role == Role::Backend && self.counters.is_none();
        if is_alone { "nftables" } else { "ebpf" }
    }

    /// A state was published; what of it differs from the one before. Nothing, if it was heard of before.
    pub(crate) fn published(&mut self, published: &Arc<Published>, now: Moment) -> Changes {
        if self.published.as_ref().is_some_and(|(it, _)| key(it) == key(published)) {
            return Changes::default();
        }
        let nothing = NodeState::default();
        let before = self.published.as_ref().map_or(&nothing, |(it, _)| &it.state);
        let changes = Changes::between(before, &published.state);
        if self.role == Role::Brain {
            self.tally.update(before, &published.state);
        }
        self.saw_own_node |= published.state.nodes.contains_key(&self.node);
        self.published = Some((Arc::clone(published), now));
        self.waiting.get_or_insert(now.instant);
        self.waiting_next.get_or_insert(now.instant);
        changes
    }

    /// A state was taken up; whether it had been before.
    pub(crate) fn taken(&mut self, published: &Published) -> bool {
        self.waiting_next = None;
        self.taken.replace(key(published)) == Some(key(published))
    }

    /// A state is in force; when the changes happened that it brought, as far as that is known.
    pub(crate) fn in_force(
        &mut self,
        published: &Arc<Published>,
        report: &ApplyReport,
        now: Moment,
    ) -> Vec<Duration> {
        let nothing = NodeState::default();
        let before = self.in_force.as_ref().map_or(&nothing, |it| &it.published.state);
        self.tally.update(before, &published.state);
        let triggers = published.state.diff(before).filter_map(|(_, before, now_)| {
            let trigger = now_?.trigger_time?;
            // The same time once more: another change of the Service brought it.
            (before.and_then(|it| it.trigger_time) != Some(trigger)).then_some(trigger)
        });
        // As kube-proxy has it: what happened before there was a proxy is not its delay.
        let durations = triggers.filter_map(|it| {
            let trigger = wall(it)?;
            (trigger >= self.started.wall).then(|| now.wall.duration_since(trigger).unwrap_or_default())
        });
        let durations = durations.collect();
        let before = self.in_force.as_ref().filter(|it| key(&it.published) == key(published));
        let since = before.map_or(now, |it| it.since);
        self.in_force =
            Some(InForce { published: Arc::clone(published), since, tables: report.tables.clone() });
        self.rejected.insert(Stage::Backend, report.rejected.clone());
        self.waiting = self.waiting_next;
        self.failure = None;
        durations
    }

    /// Whether it is this state that is in force.
    pub(crate) fn is_in_force(&self, published: &Published) -> bool {
        self.in_force.as_ref().is_some_and(|it| key(&it.published) == key(published))
    }

    pub(crate) fn failed(&mut self, doing: Step, error: &str) {
        self.failure = Some(Failure { doing, error: error.to_owned() });
    }

    pub(crate) fn looked(&mut self, hooks: Result<&AttachStatus, &str>, now: Instant) {
        let first = *self.proven.get_or_insert(now);
        match hooks {
            Ok(hooks) => {
                self.proven = Some(if hooks.is_complete() { now } else { first });
                // From now on they are tried, if there are any.
                if hooks.is_complete() && hooks.hooks.iter().any(|it| it.program.is_some()) {
                    self.sung.get_or_insert(now);
                }
                self.look_error = None;
                self.hooks = Some(hooks.clone());
            }
            Err(error) => self.look_error = Some(error.to_owned()),
        }
    }

    pub(crate) fn tried(&mut self, heard: &[ProbeResult], now: Instant) {
        let is_told = heard.iter().any(|it| !matches!(it.behavior, HookBehavior::Unknown(_)));
        self.has_sung |= is_told;
        if is_told || !self.has_sung {
            self.sung = Some(now);
        }
        self.canary = heard.to_vec();
    }

    /// Whether load balancers may send to this node (KEP-3836): it was never heard of, or it is there and stays.
    pub(crate) fn node_eligible(&self) -> bool {
        let nodes = self.published.as_ref().map(|(it, _)| &it.state.nodes);
        match nodes.and_then(|it| it.get(&self.node)) {
            Some(node) => !node.is_being_deleted,
            None => !self.saw_own_node,
        }
    }

    /// What is published and not in force yet.
    pub(crate) fn pending(&self) -> Changes {
        match (self.role, &self.published, &self.in_force) {
            (Role::Brain, _, _) | (_, None, _) => Changes::default(),
            (Role::Backend, Some((published, _)), None) => {
                Changes::between(&NodeState::default(), &published.state)
            }
            (Role::Backend, Some((published, _)), Some(in_force)) => {
                Changes::between(&in_force.published.state, &published.state)
            }
        }
    }

    /// For how long the oldest change waits that is not in force.
    pub(crate) fn waiting_for(&self, now: Instant) -> Option<Duration> {
        let since = if self.role == Role::Backend { self.waiting } else { None };
        since.map(|it| now.duration_since(it))
    }
}

fn key(published: &Published) -> (u64, u64) {
    (published.instance_id, published.rev)
}

fn wall(timestamp: Timestamp) -> Option<SystemTime> {
    let micros = u64::try_from(timestamp.as_micros()).ok()?;
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_micros(micros))
}

/// Seconds since 1970.
pub(crate) fn seconds(time: SystemTime) -> f64 {
    time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}
