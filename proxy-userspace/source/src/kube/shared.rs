//! What the reflectors and the reader of the source share.

use std::{mem, net::IpAddr, time::Duration};

use parking_lot::Mutex;

use model::{Rejections, cluster::ClusterChanges};
use tokio::{
    sync::Notify,
    time::{Instant, sleep_until, timeout_at},
};

use super::{
    apiserver_service::ApiServerService,
    outage::Outage,
    resource::{RESOURCES, Resource},
    store::Store,
    watch_error::WatchError,
};
use crate::{RejectionLog, kube_types::Kind};

/// The number of required resources, which come first.
const REQUIRED: usize = 3;
/// The index of the server itself, whose status follows those of all resources.
pub(super) const SERVER: usize = REQUIRED + OPTIONAL;
/// The number of optional resources, which follow.
const OPTIONAL: usize = 2;

const _: () = {
    let mut index = 0;
    while index < RESOURCES.len() {
        assert!(RESOURCES[index].kind as usize == index, "resources are in the order of their kinds");
        assert!(RESOURCES[index].consequence.is_none() == (index < REQUIRED), "required ones come first");
        index += 1;
    }
};

/// How long the first state waits for the optional resources: a packet path whose ranges change loses its clients with session
/// affinity, and sockets of pods that are left to packets should stay so.
const OPTIONAL_TIMEOUT: Duration = Duration::from_secs(1);

/// How long an API server that could be reached again counts as starting.
const STARTING: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(super) struct Shared {
    state: Mutex<State>,
    changed: Notify,
    /// Notified when the server responds to a request for a resource whose requests have failed.
    returned: Notify,
    pub(super) server: String,
    /// Its IP address; `None` if it is configured by name.
    address: Option<IpAddr>,
}

#[derive(Debug, Default)]
struct State {
    /// Changes that the reader has not taken yet.
    changes: ClusterChanges,
    resources: [ResourceStatus; SERVER + 1],
    /// When the server last answered a request or sent changed objects.
    active_at: Option<Instant>,
    /// When the required resources were listed.
    synced_at: Option<Instant>,
    /// Whether the server does not have or permit each optional resource, or it is not asked for.
    is_missing: [bool; OPTIONAL],
    api_server: ApiServerService,
    /// While a resource cannot be followed.
    outage: Option<Outage>,
    /// When the server could not be reached the last time.
    unreachable_at: Option<Instant>,
    rejections: Rejections,
    rejection_log: RejectionLog,
    /// Whether they have changed since they were taken.
    is_rejected_new: bool,
    /// Whether the reader has taken the whole cluster state once.
    is_complete: bool,
}

/// The status of the watch of one resource: how old the known state is, and the current error.
#[derive(Clone, Debug, Default)]
pub struct ResourceStatus {
    /// The resource, as in the API's paths: `services`, `endpointslices`, `nodes`.
    pub resource: &'static str,
    /// Whether all objects have been listed at least once.
    pub is_synced: bool,
    /// When the server last responded, be it only that nothing has changed.
    pub last_contact: Option<Instant>,
    pub error: Option<String>,
    pub objects: usize,
}

impl ResourceStatus {
    fn new(resource: &'static str) -> Self {
        Self { resource, ..Self::default() }
    }

    /// The time since the last contact, which is the maximum age of the known state; `None` before the first list.
    pub fn age(&self) -> Option<Duration> {
        self.last_contact.filter(|_| self.is_synced).map(|it| it.elapsed())
    }

    fn contact(&mut self) {
        self.last_contact = Some(Instant::now());
    }
}

impl State {
    fn required(&self) -> &[ResourceStatus; REQUIRED] {
        self.resources.first_chunk().expect("the required resources come first")
    }

    fn is_synced(&self) -> bool {
        self.required().iter().all(|it| it.is_synced)
    }

    /// From when on the server counts as idle.
    fn idle_at(&self, limit: Duration) -> Instant {
        match self.active_at {
            Some(_) if self.resources[SERVER].error.is_some() => Instant::now(),
            // Reflectors retry their requests.
            Some(it) if self.required().iter().all(|it| it.error.is_none()) => it + limit,
            _ => Instant::now() + limit,
        }
    }

    /// Until when the first state waits for the optional resources.
    fn deadline(&self) -> Option<Instant> {
        let mut optional = self.resources[REQUIRED..SERVER].iter().zip(self.is_missing);
        let is_known = self.is_complete || optional.all(|(it, is_missing)| is_missing || it.is_synced);
        self.synced_at.filter(|_| !is_known).map(|it| it + OPTIONAL_TIMEOUT)
    }

    /// The maximum age of the last state; `None` before the first one.
    fn age(&self) -> Option<Duration> {
        let ages: Option<Vec<_>> = self.required().iter().map(ResourceStatus::age).collect();
        ages?.into_iter().max()
    }

    /// The changes for the reader, if there are any.
    fn next(&mut self) -> Option<ClusterChanges> {
        if self.deadline().is_some_and(|it| Instant::now() < it) {
            return None;
        }
        if !self.is_synced() || (self.is_complete && self.changes.is_empty()) {
            return None;
        }
        if !self.is_complete {
            self.is_complete = true;
            let [services, slices, nodes] = self.required().each_ref().map(|it| it.objects);
            tracing::info!(services, slices, nodes, "all resources of the API server have been listed");
        }
        Some(mem::take(&mut self.changes))
    }
}

impl Shared {
    pub(super) fn new(server: &http::Uri) -> Self {
        let address = server.host().and_then(|it| it.trim_matches(['[', ']']).parse().ok());
        let [services, slices, nodes, service_cidrs, pods] = RESOURCES.each_ref().map(|it| it.plural);
        let resources = [services, slices, nodes, service_cidrs, pods, "server"];
        let state = State { resources: resources.map(ResourceStatus::new), ..State::default() };
        let server = server.to_string().trim_end_matches('/').to_owned();
        Self { state: Mutex::new(state), changed: Notify::new(), returned: Notify::new(), server, address }
    }

    /// The status of Services, EndpointSlices and Nodes.
    pub(super) fn resources(&self) -> [ResourceStatus; REQUIRED] {
        let state = self.state.lock();
        state.required().clone().map(|it| {
            // A watch is no better than the server behind it.
            let error = it.error.clone().or_else(|| state.resources[SERVER].error.clone());
            ResourceStatus { error, ..it }
        })
    }

    /// Waits for changes; the first ones are the whole cluster state.
    pub(super) async fn next(&self) -> ClusterChanges {
        loop {
            let changed = self.changed.notified();
            let deadline = {
                let mut state = self.state.lock();
                if let Some(changes) = state.next() {
                    return changes;
                }
                state.deadline()
            };
            match deadline {
                // Either way there may be something now.
                Some(deadline) => drop(timeout_at(deadline, changed).await),
                None => changed.await,
            }
        }
    }

    /// The rejected parts of all objects, if they have changed since the last call.
    pub(super) fn take_rejected(&self) -> Option<Rejections> {
        let mut state = self.state.lock();
        let state = &mut *state;
        // What was left out of the log is counted there later.
        state.rejection_log.remind();
        mem::take(&mut state.is_rejected_new).then(|| state.rejections.clone())
    }

    /// The server has accepted a request.
    pub(super) fn contact(&self, resource: usize) {
        let mut state = self.state.lock();
        state.active_at = Some(Instant::now());
        let status = &mut state.resources[resource];
        status.contact();
        if status.error.is_some() {
            self.returned.notify_waiters();
        }
    }

    /// A request has failed; the next one is at `next`.
    pub(super) fn failed(&self, resource: usize, error: &WatchError, next: Instant) {
        let mut state = self.state.lock();
        if error.kind.is_unreachable() {
            state.unreachable_at = Some(Instant::now());
        }
        state.resources[resource].error = Some(error.text.clone());
        let age = state.age();
        let outage = state.outage.get_or_insert_with(Outage::new);
        if outage.failed(error) {
            outage.log(&self.server, age, next);
        }
    }

    /// The server does not have or permit an optional resource, or it is not asked for: the first state need not wait for it.
    pub(super) fn missing(&self, resource: usize) {
        self.state.lock().is_missing[resource - REQUIRED] = true;
        self.changed.notify_one();
    }

    /// A resource is followed: its list is complete, or its watch has begun.
    pub(super) fn followed(&self, resource: usize) {
        let mut state = self.state.lock();
        state.resources[resource].error = None;
        if state.resources.iter().all(|it| it.error.is_none())
            && let Some(outage) = state.outage.take()
        {
            let outage_seconds = outage.since.elapsed().as_secs();
            tracing::info!(server = self.server, outage_seconds, "following the API server again");
        }
    }

    /// Whether errors of the server are to be expected because it starts: it could not be reached just now, or has
    /// accepted the same request before this outage.
    pub(super) fn is_starting(&self, resource: usize) -> bool {
        let state = self.state.lock();
        let is_recent = |it: Instant| it.elapsed() < STARTING;
        let is_new =
            state.resources[resource].is_synced && state.outage.as_ref().is_none_or(|it| is_recent(it.since));
        is_new || state.unreachable_at.is_some_and(is_recent)
    }

    /// Waits until a request is due; if it may be early, until the server responds to another one.
    pub(super) async fn wait(&self, until: Instant, may_be_early: bool) {
        let returned = self.returned.notified();
        tokio::pin!(returned);
        loop {
            let line = self.state.lock().outage.as_ref().map_or(until, Outage::next_line);
            tokio::select! {
                () = sleep_until(until) => return,
                () = &mut returned, if may_be_early => return,
                () = sleep_until(line) => {
                    let mut state = self.state.lock();
                    let age = state.age();
                    if let Some(outage) = state.outage.as_mut().filter(|it| it.is_due()) {
                        outage.log(&self.server, age, until);
                    }
                }
            }
        }
    }

    /// Waits until the server has been idle for this long; at once if it has not answered the last time.
    pub(super) async fn idle(&self, limit: Duration) {
        loop {
            let at = self.state.lock().idle_at(limit);
            if at <= Instant::now() {
                return;
            }
            sleep_until(at).await;
        }
    }

    /// Takes the changes of a resource over from its reflector's store.
    pub(super) fn publish(&self, resource: &Resource, store: &mut Store) {
        let mut changes = store.take_changes();
        let mut state = self.state.lock();
        let state = &mut *state;
        let status = &mut state.resources[resource.index()];
        status.contact();
        status.objects = store.objects.len();
        status.is_synced = store.is_synced;
        store.take_rejected(&mut state.rejections);
        state.is_rejected_new |= state.rejection_log.update(&state.rejections);
        if state.synced_at.is_none() && state.is_synced() {
            state.synced_at = Some(Instant::now());
        }
        match resource.kind {
            Kind::Service => state.api_server.services(&mut changes, self.address),
            Kind::EndpointSlice => state.api_server.slices(&mut changes),
            Kind::Node | Kind::ServiceCidr | Kind::Pod => {}
        }
        if !changes.is_empty() {
            state.active_at = Some(Instant::now());
            state.changes.extend(changes);
        }
        // The first list may be empty.
        if !state.changes.is_empty() || !state.is_complete {
            self.changed.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use model::cluster::{Object, ObjectName};
    use tokio::time::timeout;

    use super::*;
    use crate::kube_types::{self, objects::Node};

    const LIMIT: Duration = Duration::from_secs(40);

    fn node_changed(store: &mut Store) {
        let zone = fastrand::u64(..);
        let text = format!(
            r#"{{"metadata": {{"name": "n1", "labels": {{"topology.kubernetes.io/zone": "{zone}"}}}}}}"#
        );
        let node: Node = serde_json::from_str(&text).unwrap();
        store.set(ObjectName::Node("n1".into()), kube_types::node(&node).of_kind(Object::Node));
    }

    #[tokio::test(start_paused = true)]
    async fn answers_and_changed_objects_postpone_the_check_of_the_server() {
        let shared = Shared::new(&http::Uri::from_static("https://192.0.2.1"));
        let is_idle = async || timeout(LIMIT - Duration::from_secs(1), shared.idle(LIMIT)).await.is_ok();
        let mut store = Store::default();
        let node = &RESOURCES[Kind::Node as usize];
        shared.contact(node.index());
        assert!(!is_idle().await);
        shared.contact(Kind::Service as usize);
        assert!(!is_idle().await);
        node_changed(&mut store);
        shared.publish(node, &mut store);
        assert!(!is_idle().await);
        // As at a bookmark.
        shared.publish(node, &mut store);
        assert!(is_idle().await);
    }
}
