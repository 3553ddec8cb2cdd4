//! The pipeline: follows a source, lets the brain recompute, publishes what has changed.

use std::{collections::BTreeSet, mem, sync::Arc};

use brain::Brain;
use grpc_server::ServedData;
use model::state::NodeState;
use prometheus_client::registry::Registry;
use publish::{
    NodeRegistry, NodeStates, Publisher, SingleNode, Subscription,
    cluster::{ClusterPublisher, ClusterSnapshot},
    node_registry,
};
use source::{RejectionLog, api::Update, kube::EventRecorder};
use tokio::{
    task::yield_now,
    time::{Instant, MissedTickBehavior, interval},
};

use crate::{
    config::{Config, Error, SourceConfig},
    explain::{Explainer, served},
    node_check::NodeChecks,
    observer::{Observer, PublishSteps, Stage},
    source_updates::{RunningSource, SourceUpdate},
};

/// How many nodes get their first state at a time, before the source and everything else has a turn.
const MAX_PENDING_NODES: usize = 16;

/// The number of changed nodes from which on their states are sent before the next change is computed.
const FLUSH_THRESHOLD: usize = 16;

/// A source, a brain and publishers. The source stops when this is dropped.
#[derive(Debug)]
pub struct Pipeline {
    source: RunningSource,
    nodes: NodeRegistry,
    cluster: ClusterPublisher,
    /// The cluster state for this process; it may lack the Nodes of others.
    own_cluster: ClusterPublisher,
    states: Subscription,
    pub node: String,
    checks_node: bool,
    /// Whether the source knows all Nodes. The state of a cluster without them is not served.
    has_all_nodes: bool,
    options: brain::Options,
}

impl Pipeline {
    /// Starts the source. Must be called within a tokio runtime.
    pub fn start(config: Config) -> Result<Self, Error> {
        let Config { node, source, checks_node, service_metadata, brain: options } = config;
        let has_all_nodes = !matches!(source, SourceConfig::Kube { all_nodes: false, .. });
        let source =
            RunningSource::start(source, &node, options.service_proxy_name.clone(), service_metadata)?;
        let publisher = Publisher::new(node.as_str());
        let states = publisher.subscribe();
        let cluster_publisher = || ClusterPublisher::new(options.service_proxy_name.as_deref());
        Ok(Self {
            source,
            nodes: NodeRegistry::new(publisher),
            cluster: cluster_publisher(),
            own_cluster: cluster_publisher(),
            states,
            node,
            checks_node,
            has_all_nodes,
            options,
        })
    }

    /// Whether this node should have a Node object: an API server lists it, manifests and other brains may not.
    pub fn requires_node(&self) -> bool {
        self.checks_node && matches!(self.source, RunningSource::Kube { .. })
    }

    pub fn register(&self, registry: &mut Registry) {
        if let RunningSource::Kube { source, .. } = &self.source {
            source.requests.register(registry);
        }
    }

    /// Posts Events of this node; `None` if the source is no API server.
    pub fn event_recorder(&self) -> Option<EventRecorder> {
        let RunningSource::Kube { source, .. } = &self.source else { return None };
        Some(source.event_recorder(&self.node))
    }

    pub fn subscribe(&self) -> Subscription {
        self.states.clone()
    }

    /// What a gRPC server serves: the state of this node or of any node, the cluster state, and explanations.
    pub fn served(&self, any_node: bool) -> ServedData {
        let nodes: Arc<dyn NodeStates> = match any_node {
            true => Arc::new(self.nodes.requests()),
            false => Arc::new(SingleNode::new(self.node.as_str(), self.subscribe())),
        };
        let own_cluster = self.own_cluster.subscribe();
        ServedData {
            nodes,
            cluster: self.cluster.subscribe(),
            followers: Default::default(),
            explainer: Some(served(own_cluster, self.options.clone(), self.node.clone(), any_node)),
        }
    }

    /// Explains connections of this node by the cluster state.
    pub fn explainer(&self) -> Explainer {
        let (cluster, options) = (self.own_cluster.subscribe(), self.options.clone());
        Explainer::Own { cluster, options, node: self.node.clone() }
    }

    /// Publishes the states of this node and of the requested nodes whenever they change, until the source ends.
    pub async fn run(&self, observer: &impl Observer) {
        let mut brain = Brain::new(self.options.clone());
        brain.start_serving(&self.node);
        let (mut log, mut checks) = (RejectionLog::default(), NodeChecks::default());
        let mut updates = self.source.updates(observer);
        // Whether the cluster state is known.
        let mut is_complete = false;
        let mut idle_check = interval(node_registry::IDLE_CHECK_INTERVAL);
        idle_check.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let update = tokio::select! {
                update = updates.next(observer) => update,
                requested = self.nodes.requested() => {
                    requested.iter().for_each(|it| brain.start_serving(it));
                    continue;
                }
                _ = idle_check.tick() => {
                    self.nodes.remove_idle().iter().for_each(|it| brain.stop_serving(it));
                    log.remind();
                    continue;
                }
                // After everything else that is ready: no change waits for the first states of others.
                () = yield_now(), if is_complete && brain.has_pending_nodes() => {
                    let began = Instant::now();
                    let changed = brain.recompute_some(MAX_PENDING_NODES);
                    self.publish(&brain, changed, (began, Instant::now()), observer);
                    continue;
                }
            };
            let received = Instant::now();
            match update {
                Some(SourceUpdate::Api(Update::Cluster(cluster))) => brain.replace_cluster(cluster),
                Some(SourceUpdate::Changes(changes)) => brain.cluster_mut().apply(changes),
                Some(SourceUpdate::Api(Update::Node(state))) => {
                    is_complete = false;
                    self.publish_node(&mut brain, state, observer);
                    continue;
                }
                None => return,
            }
            let became_complete = !mem::replace(&mut is_complete, true);
            let mut changed = brain.recompute_some(MAX_PENDING_NODES);
            let computed = Instant::now();
            if became_complete {
                // What was published so far may be the state that another brain computed.
                changed.extend(brain.served_nodes().cloned());
            }
            let is_flushed = changed.len() > FLUSH_THRESHOLD;
            self.publish(&brain, changed, (received, computed), observer);
            self.publish_cluster(&brain);
            observer.namespace_entries(brain.most_namespace_entries());
            let mut rejections = brain.rejections().clone();
            if self.checks_node {
                let rejected = checks.rejected(&self.node, brain.node_infos(), self.requires_node());
                rejections.set(&self.node, rejected);
            }
            if log.update(&rejections) {
                observer.rejected(Stage::Brain, &rejections);
            }
            if is_flushed {
                flush_clients().await;
            }
        }
    }

    /// Publishes the state of this node that another brain has computed; there is no cluster state then.
    fn publish_node(&self, brain: &mut Brain, state: NodeState, observer: &impl Observer) {
        let received = Instant::now();
        self.cluster.publish(ClusterSnapshot::Unavailable);
        self.own_cluster.publish(ClusterSnapshot::Unavailable);
        self.nodes.clear().iter().for_each(|it| brain.stop_serving(it));
        self.publish_own(state, (received, received), observer);
    }

    fn publish_cluster(&self, brain: &Brain) {
        self.nodes.set_cluster_nodes(Arc::clone(brain.node_infos()));
        let snapshot = ClusterSnapshot::State(Arc::clone(brain.cluster_state()));
        self.own_cluster.publish(snapshot.clone());
        self.cluster.publish(if self.has_all_nodes { snapshot } else { ClusterSnapshot::Unavailable });
    }

    /// Publishes the states of nodes; of this node, reports when they were received and computed.
    fn publish(
        &self,
        brain: &Brain,
        nodes: BTreeSet<Arc<str>>,
        computing: (Instant, Instant),
        observer: &impl Observer,
    ) {
        for node in nodes {
            let Some(state) = brain.state(&node).cloned() else { continue };
            if *node == *self.node {
                self.publish_own(state, computing, observer);
            } else {
                self.nodes.publish(&node, state);
            }
        }
    }

    fn publish_own(
        &self,
        state: NodeState,
        (received, computed): (Instant, Instant),
        observer: &impl Observer,
    ) {
        if let Some((instance_id, rev)) = self.nodes.publish(&self.node, state) {
            let published = Instant::now();
            tracing::debug!(node = self.node, revision = rev, took = ?published - received, "published a state");
            observer.published(&PublishSteps { instance_id, rev, received, computed, published });
        }
    }
}

/// Lets all tasks that are ready run, once each for the session, the response and the connection of a client, through which
/// a state passes. What changes meanwhile is computed and sent at once, instead of one by one to thousands of clients.
async fn flush_clients() {
    for _ in 0..3 {
        // A new task is the last in the queue. It does not fail.
        let _ = tokio::spawn(async {}).await;
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, sync::Mutex, thread, time::Duration};

    use api_server::{ApiServer, Settings};
    use grpc_server::Listener;
    use model::state::NodeState;
    use proxy_contract::{Target, client::Client};
    use publish::{
        SingleNode,
        cluster::{ClusterPublisher, ClusterSnapshot},
    };
    use serde_json::{Value, json};
    use source::kube::{ClientConfig, WatchedPods};
    use tokio::{sync::mpsc, task::JoinSet};

    use super::*;
    use crate::SyncStatus;

    #[derive(Default)]
    struct Recorder {
        sources: Mutex<Vec<(String, SyncStatus)>>,
        rejected: Mutex<Vec<String>>,
        published: Mutex<Vec<PublishSteps>>,
    }

    impl Observer for Recorder {
        fn source(&self, name: &str, status: SyncStatus) {
            self.sources.lock().unwrap().push((name.into(), status));
        }

        fn rejected(&self, _: Stage, rejections: &model::Rejections) {
            self.rejected.lock().unwrap().extend(rejections.iter().map(ToString::to_string));
        }

        fn namespace_entries(&self, _: u64) {}

        fn published(&self, steps: &PublishSteps) {
            self.published.lock().unwrap().push(*steps);
        }
    }

    /// A pipeline that serves the node n1.
    fn start(source: SourceConfig) -> Pipeline {
        let (service_metadata, brain) = Default::default();
        Pipeline::start(Config { node: "n1".into(), source, checks_node: true, service_metadata, brain })
            .unwrap()
    }

    const WEB: &str = "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}\n\
                       ---\napiVersion: v1\nkind: Node\nmetadata: {name: n2}\n";

    #[tokio::test]
    async fn a_manifest_becomes_a_published_state_and_a_missing_node_object_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("web.yaml");
        fs::write(&path, WEB).unwrap();
        let pipeline = start(SourceConfig::File(path));
        let recorder = Recorder::default();
        let mut states = pipeline.subscribe();
        let published = tokio::select! {
            published = states.next() => published.unwrap(),
            () = pipeline.run(&recorder) => panic!("the source has ended"),
        };
        assert_eq!(published.state.services.len(), 1);
        let steps = recorder.published.lock().unwrap()[0];
        assert_eq!((steps.instance_id, steps.rev), published.revision());
        assert!(steps.received <= steps.computed && steps.computed <= steps.published);
        let sources = recorder.sources.lock().unwrap();
        let synced: Vec<_> = sources.iter().map(|(name, it)| (name.as_str(), it.is_synced)).collect();
        assert_eq!(synced, [("file", false), ("file", true)]);
        let rejected = recorder.rejected.lock().unwrap();
        assert!(rejected.iter().any(|it| it.contains("(found n2)")), "{rejected:?}");
    }

    #[tokio::test]
    async fn an_outage_of_the_brain_that_is_followed_is_reported_until_it_is_back() {
        let folder = tempfile::tempdir().unwrap();
        let target = Target::Unix(folder.path().join("brain.sock"));
        let served = Publisher::new("n1");
        served.publish(NodeState::default());
        let brain = async || {
            let cluster = ClusterPublisher::new(None);
            cluster.publish(ClusterSnapshot::State(Arc::default()));
            let served = ServedData {
                nodes: Arc::new(SingleNode::new("n1", served.subscribe())),
                cluster: cluster.subscribe(),
                followers: Default::default(),
                explainer: None,
            };
            let listener = Listener::bind(&target).await.unwrap();
            let serve = async move {
                grpc_server::serve(listener, served, async {}, std::future::pending()).await.unwrap();
                drop(cluster);
            };
            JoinSet::from_iter([serve])
        };
        let pipeline = start(SourceConfig::Api(Client::new(target.clone().into(), "n1")));
        let recorder = Recorder::default();
        let reported = async |is_so: fn(&SyncStatus) -> bool| {
            let is_last =
                || recorder.sources.lock().unwrap().last().filter(|(_, it)| is_so(it)).cloned().is_some();
            let wait = async {
                while !is_last() {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            tokio::time::timeout(Duration::from_secs(120), wait).await.expect("it is reported");
        };
        let check = async {
            let is_ok = |it: &SyncStatus| it.is_synced && it.error.is_none() && it.last_contact.is_some();
            reported(|it| !it.is_synced && it.error.is_some()).await;
            let mut first = brain().await;
            reported(is_ok).await;
            first.shutdown().await;
            reported(|it| it.is_synced && it.error.is_some()).await;
            let _second = brain().await;
            reported(is_ok).await;
        };
        tokio::select! {
            () = pipeline.run(&recorder) => panic!("the source has ended"),
            () = check => {}
        }
        let address = target.to_string();
        let sources = recorder.sources.lock().unwrap();
        assert!(sources.iter().all(|(name, it)| name == "api" && it.address.as_ref() == Some(&address)));
    }

    #[tokio::test]
    async fn a_state_has_passed_session_response_and_connection_before_the_next_change_is_computed() {
        let clients: Vec<_> = std::iter::repeat_with(|| {
            let (state, mut receiver) = mpsc::unbounded_channel();
            for _ in 0..3 {
                let (sender, next) = mpsc::unbounded_channel();
                let mut from = mem::replace(&mut receiver, next);
                tokio::spawn(async move { from.recv().await.map(|it| sender.send(it)) });
            }
            (state, receiver)
        })
        .take(1_000)
        .collect();
        // All of their tasks wait.
        flush_clients().await;
        clients.iter().for_each(|(state, _)| state.send(()).unwrap());
        flush_clients().await;
        assert!(clients.into_iter().all(|(_, mut sent)| sent.try_recv().is_ok()));
    }

    fn service(number: usize) -> Value {
        json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": format!("web-{number}"), "namespace": "default"},
            "spec": {"clusterIP": format!("10.96.0.{number}"), "ports": [{"port": 80}]},
        })
    }

    #[tokio::test]
    async fn what_changes_while_clients_are_served_is_published_together() {
        let server = ApiServer::start(Settings::default()).unwrap();
        server.set(service(1));
        let pipeline = start(SourceConfig::Kube {
            client_config: ClientConfig { server: Some(server.url()), ..ClientConfig::default() },
            all_nodes: true,
            pods: WatchedPods::None,
            own_thread: true,
        });
        let recorder = Recorder::default();
        let mut states = pipeline.subscribe();
        let receive = async {
            while states.next().await.unwrap().state.services.len() != 1 {}
            let before = recorder.published.lock().unwrap().len();
            (2..=100).for_each(|it| server.set(service(it)));
            // This thread is busy, as while thousands of clients are sent a change.
            while !has_listed(&pipeline, 100) {
                thread::sleep(Duration::from_millis(10));
            }
            while states.next().await.unwrap().state.services.len() != 100 {}
            recorder.published.lock().unwrap().len() - before
        };
        let published = tokio::select! {
            published = receive => published,
            () = pipeline.run(&recorder) => panic!("the source has ended"),
        };
        assert_eq!(published, 1, "99 changes are published together");
    }

    /// Whether the source knows so many Services, of which the pipeline may know less.
    fn has_listed(pipeline: &Pipeline, services: usize) -> bool {
        let RunningSource::Kube { source, .. } = &pipeline.source else { return false };
        source.resources()[0].objects == services
    }
}
