//! Collects the reports of every part of the process, for the pages.

use std::{sync::Arc, time::Duration};

use datapath::{ApplyReport, AttachStatus, EjectedEndpoint, PacketAffinity, ProbeResult, TableStats};
use jiff::Timestamp;
use model::{Effect, Rejected, Rejections, ServiceName};
use parking_lot::{Mutex, MutexGuard};
use pipeline::{PublishSteps, Stage, SyncStatus};
use prometheus_client::registry::Registry;
use publish::{Published, Subscription};
use reconciler::{Observer, Step};
use tokio::{
    sync::{
        oneshot::{self, error::TryRecvError},
        watch,
    },
    time::Instant,
};

use crate::{
    http::HttpConnections,
    metrics::Metrics,
    pages::{RunningTrace, TraceStatus},
    state::{AdminState, Inherited, Moment, Readers, RejectedBy, Role, timeline::Timeline},
    ui::Ui,
};

/// The state and the metrics behind the pages. Clones share them.
#[derive(Clone)]
pub struct Admin {
    pub(crate) state: Arc<Mutex<AdminState>>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) connections: HttpConnections,
    pub(crate) ui: Ui,
    /// Instance and revision of the active state.
    active: watch::Sender<Option<(u64, u64)>>,
}

impl Admin {
    /// For the node with this name.
    pub fn new(node: impl Into<Arc<str>>, role: Role) -> Self {
        let state = Arc::new(Mutex::new(AdminState::new(node.into(), role)));
        let connections = HttpConnections::new();
        let metrics = Arc::new(Metrics::new(Arc::clone(&state), connections.clone()));
        Self { state, metrics, connections, ui: Ui::default(), active: watch::Sender::default() }
    }

    /// Replaces the items that this part of the process rejects.
    pub(crate) fn set_rejected(&self, by: RejectedBy, rejected: impl IntoIterator<Item = Rejected>) {
        self.state().rejected.insert(by, rejected.into_iter().collect());
    }

    /// Where the parts of the process register what they measure.
    pub fn registry(&self) -> MutexGuard<'_, Registry> {
        self.metrics.registry.lock()
    }

    /// Sets what the pages ask of other parts of the process. The state is locked meanwhile.
    pub fn set_readers(&self, set: impl FnOnce(&mut Readers)) {
        set(&mut self.state().readers);
    }

    /// Makes a node without a Node object ineligible for load balancers.
    pub fn require_node(&self) {
        self.state().requires_node = true;
    }

    /// Instance and revision of the active state, whenever it changes.
    pub fn active(&self) -> watch::Receiver<Option<(u64, u64)>> {
        self.active.subscribe()
    }

    /// Registers the one trace that runs.
    ///
    /// # Errors
    ///
    /// If there is another one.
    pub fn begin_trace(&self, filters: String) -> Result<TraceGuard, TraceStatus> {
        let mut state = self.state();
        if let Some(running) = &state.trace {
            return Err(running.status.clone());
        }
        let (replacing, replaced) = oneshot::channel();
        let status = TraceStatus { since: Timestamp::now(), filters };
        state.trace = Some(RunningTrace { status, replacing: Some(replacing) });
        Ok(TraceGuard { admin: self.clone(), replaced })
    }

    /// Asks the trace that runs to end.
    pub fn replace_trace(&self) {
        if let Some(running) = &mut self.state().trace {
            running.replacing = None;
        }
    }

    /// Records what each generation changes, and how long its steps take, from now on.
    pub fn enable_timeline(&self) {
        self.state().timeline.get_or_insert_with(Timeline::default);
    }

    /// Sets what the kernel serves before the first state is active, as `read` finds it; not read if there is one already.
    pub fn set_inherited(&self, read: impl FnOnce() -> Option<Inherited>) {
        if self.state().active.is_some() {
            return;
        }
        let inherited = read();
        let mut state = self.state();
        if state.active.is_none() {
            state.inherited = inherited;
        }
    }

    /// Whether there is a state, active or not.
    pub fn has_published(&self) -> bool {
        self.state().published.is_some()
    }

    /// The annotations of Services that are ignored now, and the Services that do not fit into their namespaces.
    pub fn problems_of_services(&self) -> Vec<Rejected> {
        // Copies share their objects: there can be very many, and the state is not locked meanwhile.
        let rejected: Vec<_> = self.state().rejected.values().cloned().collect();
        let is_of_service =
            |it: &&Rejected| matches!(it.effect, Effect::AnnotationIgnored(_) | Effect::OverLimit { .. });
        rejected.iter().flat_map(Rejections::iter).filter(is_of_service).cloned().collect()
    }

    pub fn ejected_endpoints(&self) -> Vec<EjectedEndpoint> {
        self.state().datapath.table_stats.ejected.clone()
    }

    pub fn served(&self) -> Option<Arc<Published>> {
        self.state().served()
    }

    pub fn serves(&self, service: &ServiceName) -> bool {
        self.state().served().is_some_and(|it| it.state.services.get(service).is_some())
    }

    /// Whether the first endpoint of a Service is on this node. This is true on one node, if all of them have the same endpoints.
    pub fn has_first_endpoint(&self, service: &ServiceName) -> bool {
        let state = self.state();
        state.served().is_some_and(|it| {
            let endpoints = it.state.services.get(service).into_iter().flat_map(|it| &it.endpoints);
            endpoints.min_by(|a, b| a.key.cmp(&b.key)).is_some_and(|it| it.local)
        })
    }

    /// Records the published states, until the publisher is dropped.
    pub async fn run(&self, mut states: Subscription) {
        while let Some(published) = states.next().await {
            let changes = self.state().on_published(&published, Moment::now());
            self.metrics.datapath.on_published(changes);
        }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, AdminState> {
        self.state.lock()
    }
}

/// The one trace that runs, until this is dropped.
pub struct TraceGuard {
    admin: Admin,
    replaced: oneshot::Receiver<()>,
}

impl TraceGuard {
    /// Whether the trace must end for another one.
    pub fn is_replaced(&mut self) -> bool {
        self.replaced.try_recv() == Err(TryRecvError::Closed)
    }

    /// Waits until the trace must end for another one. Cancel safe.
    pub async fn replaced(&mut self) {
        // Nothing is sent: the sender is dropped.
        let _ = (&mut self.replaced).await;
    }
}

impl Drop for TraceGuard {
    fn drop(&mut self) {
        self.admin.state().trace = None;
    }
}

impl pipeline::Observer for Admin {
    /// Readiness requires every source that was ever reported.
    fn source(&self, name: &str, status: SyncStatus) {
        self.state().sources.insert(name.to_owned(), status);
    }

    fn rejected(&self, stage: Stage, rejections: &Rejections) {
        let by = match stage {
            Stage::Source => RejectedBy::Source,
            Stage::Brain => RejectedBy::Brain,
        };
        self.state().rejected.insert(by, rejections.clone());
    }

    fn namespace_entries(&self, most: u64) {
        self.state().namespace_entries = most;
    }

    fn published(&self, steps: &PublishSteps) {
        if let Some(it) = &mut self.state().timeline {
            it.on_steps(steps);
        }
    }
}

impl Observer for Admin {
    fn on_dequeued(&self, published: &Arc<Published>) {
        let mut state = self.state();
        // The reconciler may dequeue a state before `run` has received it.
        let changes = state.on_published(published, Moment::now());
        let is_retry = state.on_dequeued(published);
        drop(state);
        self.metrics.datapath.on_published(changes);
        self.metrics.datapath.apply_retries.inc_by(u64::from(is_retry));
    }

    fn on_applied(&self, published: &Arc<Published>, report: &ApplyReport, took: Duration) {
        let mut state = self.state();
        // Applying the active state again counts only if it was translated differently, as after a change of the host's
        // addresses.
        let is_update = report.flipped || !state.is_active(published);
        let delays = state.on_applied(published, report, Moment::now());
        drop(state);
        self.active.send_replace(Some(published.revision()));
        if is_update {
            self.metrics.datapath.on_applied(report, took, &delays);
        }
    }

    fn on_failed(&self, step: Step, error: &str) {
        self.state().on_failed(step, error);
    }

    fn on_attach_checked(&self, status: Result<&AttachStatus, &str>) {
        self.state().datapath.on_attach_checked(status, Instant::now());
    }

    fn on_packet_path(&self, unavailable: Option<&Rejected>) {
        self.state().datapath.packet_path_error = unavailable.cloned();
    }

    fn on_upkeep(&self, affinity: Option<PacketAffinity>, has_kube_proxy_rules: bool) {
        let mut state = self.state();
        state.datapath.packet_affinity = affinity.unwrap_or_default();
        state.datapath.has_kube_proxy_rules = has_kube_proxy_rules;
    }

    fn on_probed(&self, results: &[ProbeResult]) {
        self.state().datapath.on_probed(results, Instant::now());
    }

    fn on_table_stats(&self, stats: TableStats) {
        self.state().datapath.table_stats = stats;
    }
}
