//! The clients that follow nodes, and the states that are active there.
//!
//! Invariant: a request acknowledges what was sent before it, unless the client says otherwise.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use metrics::MetricWriter;
use parking_lot::Mutex;
use prometheus_client::{collector::Collector, encoding::DescriptorEncoder};
use tokio::time::Instant;

use crate::publisher::{Published, Subscription};

/// A client that has not acknowledged the newest state for so long is behind.
const BEHIND_AFTER: Duration = Duration::from_secs(5);

/// The clients that follow states of nodes. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Followers(Arc<FollowerTable>);

#[derive(Debug, Default)]
struct FollowerTable {
    next_id: AtomicU64,
    all: Mutex<BTreeMap<u64, FollowingClient>>,
}

#[derive(Clone, Debug)]
struct FollowingClient {
    states: Subscription,
    node: Arc<str>,
    since: Instant,
    sent: Option<Sent>,
    acknowledged: Option<Arc<Published>>,
    /// From its publication, or the client's arrival, to its acknowledgment.
    latency: Option<Duration>,
}

/// The last state that was sent, if it is not acknowledged yet.
#[derive(Clone, Debug)]
struct Sent {
    /// Instance and revision, as the client knows them.
    revision: (u64, u64),
    /// When it was published, or the client came.
    at: Instant,
    /// The newest state that is the same for the client.
    state: Arc<Published>,
}

#[derive(Clone, Debug)]
pub struct FollowerStatus {
    pub node: Arc<str>,
    /// The time since the client began to follow the node.
    pub connected: Duration,
    pub newest: Option<Arc<Published>>,
    /// The last state that it has acknowledged.
    pub acknowledged: Option<Arc<Published>>,
    /// For how long it has not acknowledged the newest state; `None` if it has.
    pub behind: Option<Duration>,
    /// The time from the publication of the last acknowledged state, or the client's arrival, to its acknowledgment.
    pub latency: Option<Duration>,
}

/// The entry of a client in [`Followers`], until it is dropped.
#[derive(Debug)]
pub struct Following {
    followers: Followers,
    id: u64,
}

impl Followers {
    pub fn add(&self, node: Arc<str>, states: Subscription) -> Following {
        let id = self.0.next_id.fetch_add(1, Ordering::Relaxed);
        let since = Instant::now();
        let follower = FollowingClient { states, node, since, sent: None, acknowledged: None, latency: None };
        self.0.all.lock().insert(id, follower);
        Following { followers: self.clone(), id }
    }

    /// All clients, in the order of their nodes.
    pub fn statuses(&self) -> Vec<FollowerStatus> {
        let mut statuses: Vec<_> = self.0.all.lock().values().map(FollowingClient::status).collect();
        statuses.sort_by(|a, b| a.node.cmp(&b.node));
        statuses
    }
}

impl Collector for Followers {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let (mut followers, mut behind) = (0_u32, 0_u32);
        let (mut longest_behind, mut longest_latency) = (Duration::ZERO, Duration::ZERO);
        for it in self.0.all.lock().values().map(FollowingClient::status) {
            let delay = it.behind.unwrap_or_default();
            followers += 1;
            behind += u32::from(delay >= BEHIND_AFTER);
            longest_behind = longest_behind.max(delay);
            longest_latency = longest_latency.max(it.latency.unwrap_or_default());
        }
        let mut out = MetricWriter::own(&mut encoder);
        out.gauge("followers", followers.into())?;
        out.gauge("followers_behind", behind.into())?;
        out.gauge("followers_behind_seconds", longest_behind.as_secs_f64())?;
        out.gauge("followers_latency_seconds", longest_latency.as_secs_f64())
    }
}

impl Following {
    /// Records that a state was sent completely.
    pub fn sent(&self, state: &Arc<Published>) {
        let (revision, state) = (state.revision(), Arc::clone(state));
        // A client that has just come has not waited for what is older than itself.
        self.change(|it| it.sent = Some(Sent { revision, at: state.at.max(it.since), state }));
    }

    /// Records that a state is the same for the client as the last one that was sent.
    pub fn unchanged(&self, state: &Arc<Published>) {
        let state = Arc::clone(state);
        self.change(|it| match &mut it.sent {
            Some(sent) => sent.state = state,
            None => it.acknowledged = Some(state),
        });
    }

    /// Records that the state that was sent is active; with a revision, only if it is that of the state.
    pub fn acknowledged(&self, revision: Option<(u64, u64)>) {
        self.change(|it| {
            let is_meant = |sent: &mut Sent| revision.is_none_or(|it| it == sent.revision);
            if let Some(Sent { state, at, .. }) = it.sent.take_if(is_meant) {
                it.latency = Some(at.elapsed());
                it.acknowledged = Some(state);
            }
        });
    }

    fn change(&self, change: impl FnOnce(&mut FollowingClient)) {
        self.followers.0.all.lock().get_mut(&self.id).map(change);
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        self.followers.0.all.lock().remove(&self.id);
    }
}

impl FollowingClient {
    fn status(&self) -> FollowerStatus {
        let newest = self.states.current();
        let acknowledged = self.acknowledged.as_deref().map(Published::revision);
        let missing = newest.as_ref().filter(|it| acknowledged != Some(it.revision()));
        // A client that has just come does not lack what is older than itself.
        let behind = missing.map(|it| it.at.max(self.since).elapsed());
        FollowerStatus {
            node: Arc::clone(newest.as_ref().map_or(&self.node, |it| &it.node)),
            connected: self.since.elapsed(),
            behind,
            newest,
            acknowledged: self.acknowledged.clone(),
            latency: self.latency,
        }
    }
}
