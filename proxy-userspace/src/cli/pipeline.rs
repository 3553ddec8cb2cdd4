//! Source, brain and publisher, joined: facts in, revisions of nodes' states out.

use std::{collections::BTreeSet, sync::Arc};

use admin::{Admin, Stage};
use anyhow::Result;
use brain::{Brain, Options};
use proxy_contract::client::Client;
use publish::{
    NodeRegistry, Publisher, Subscription,
    cluster::{ClusterPublisher, ClusterSnapshot},
    grpc::{self, ServedData},
    node_registry,
};
use source::{
    Changes,
    api::ApiSource,
    file::FileSource,
    kube::{self, KubeSource, Timing},
};
use tokio::{
    task::spawn_blocking,
    time::{MissedTickBehavior, interval},
};

use super::{
    flags::{Facts, Source},
    news::{News, Running},
    own_node,
};

/// What runs while it is alive.
pub(super) struct Pipeline {
    /// The facts, as they come.
    source: Running,
    /// Who hears of the states.
    nodes: NodeRegistry,
    /// Who hears of the facts.
    cluster: ClusterPublisher,
    states: Subscription,
    node: String,
    /// Whether the node is to be served itself, and not only others.
    serves_own: bool,
    options: Options,
}

impl Pipeline {
    /// Starts the source. Must be called within a tokio runtime.
    pub(super) fn start(flags: &Facts) -> Result<Self> {
        let node = flags.node.name()?;
        let source = match &flags.source {
            Source::File(path) => Running::File(FileSource::start(path)?),
            Source::Api(target) => {
                let client = flags.source_tls.client(Client::new(target.clone(), node.as_str()))?;
                Running::Api(ApiSource::start(client))
            }
            Source::Kube => Running::Kube(KubeSource::start(&kube::Options {
                access: flags.api_server.access(),
                service_proxy_name: flags.selection.options().service_proxy_name,
                // Node ports are reached at every node's addresses.
                node: None,
                timing: Timing::default(),
            })?),
        };
        let options = flags.selection.options();
        let publisher = Publisher::new(node.as_str());
        let states = publisher.subscribe();
        let nodes = NodeRegistry::new(publisher);
        let cluster = ClusterPublisher::new(options.service_proxy_name.as_deref());
        Ok(Self { source, nodes, cluster, states, node, serves_own: true, options })
    }

    /// The node need not be one of the cluster's: whoever asks says which node is meant.
    pub(super) fn serve_others(&mut self) {
        self.serves_own = false;
    }

    /// The node.
    pub(super) fn node(&self) -> &str {
        &self.node
    }

    /// Follows the node's state.
    pub(super) fn subscribe(&self) -> Subscription {
        self.states.clone()
    }

    /// What is served to others: the node's state, or any node's, and the facts.
    pub(super) fn served(&self, any_node: bool) -> ServedData {
        let nodes: Arc<dyn grpc::NodeStates> = match any_node {
            true => Arc::new(self.nodes.requests()),
            false => Arc::new(grpc::SingleNode::new(self.node.as_str(), self.subscribe())),
        };
        ServedData { nodes, cluster: self.cluster.subscribe() }
    }

    /// Publishes the states of the node, and of those that are followed, whenever the facts change; never before the
    /// source is complete. How the source stands and what is refused is told to `admin`.
    pub(super) async fn publish(&self, admin: Option<&Admin>) {
        let mut brain = Brain::new(self.options.clone());
        brain.start_serving(&self.node);
        let mut said = BTreeSet::new();
        let mut source = self.source.news(admin);
        // Whether the facts are here, by now, and when they were looked at last.
        let (mut is_complete, mut was_complete) = (false, false);
        let mut look = interval(node_registry::IDLE_CHECK_INTERVAL);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                news = source.next(admin) => match news {
                    Some(News::Facts(facts)) => {
                        brain.replace_cluster(facts);
                        is_complete = true;
                    }
                    Some(News::Changes(changes)) => {
                        change(&mut brain, changes);
                        is_complete = true;
                    }
                    Some(News::State(state)) => {
                        self.cluster.publish(ClusterSnapshot::Unavailable);
                        self.nodes.clear().iter().for_each(|it| brain.stop_serving(it));
                        self.nodes.publish(&self.node, state);
                        is_complete = false;
                    }
                    None => return,
                },
                asked = self.nodes.requested() => asked.iter().for_each(|it| brain.start_serving(it)),
                () = self.cluster.watcher_joined() => {}
                _ = look.tick() => {
                    self.nodes.remove_idle().iter().for_each(|it| brain.stop_serving(it));
                    // What a start, or a burst of watchers, has needed.
                    spawn_blocking(backend::give_back_memory);
                    continue;
                }
            }
            let has_begun = is_complete && !was_complete;
            was_complete = is_complete;
            if !is_complete {
                continue;
            }
            let mut changed = brain.recompute();
            if has_begun {
                // What was published until now may be what another brain had decided.
                changed.extend(brain.served_nodes().cloned());
            }
            for node in changed {
                if let Some(state) = brain.state(&node) {
                    self.nodes.publish(&node, state.clone());
                }
            }
            self.nodes.set_cluster_nodes(brain.node_infos().clone());
            self.cluster.publish(if self.cluster.has_watchers() {
                ClusterSnapshot::State(Arc::clone(brain.cluster_state()))
            } else {
                // Facts that somebody holds have to be copied before they can change.
                ClusterSnapshot::Pending
            });
            // An API server knows all nodes; manifests, or another brain, may do without.
            let must_be = matches!(self.source, Running::Kube(_));
            let stranger = own_node::stranger(&self.node, brain.node_infos(), must_be);
            let stranger = stranger.filter(|_| self.serves_own);
            let rejected: BTreeSet<_> = brain.rejected().chain(stranger).collect();
            for it in rejected.difference(&said) {
                tracing::warn!("{it}");
            }
            if let Some(admin) = admin {
                admin.rejected(Stage::Brain, rejected.iter().cloned());
            }
            said = rejected;
        }
    }
}

/// Tells the brain what has changed.
fn change(brain: &mut Brain, changes: Changes) {
    for (name, service) in changes.services {
        match service {
            Some(service) => brain.set_service(service),
            None => brain.delete_service(&name),
        }
    }
    for (name, slice) in changes.slices {
        match slice {
            Some(slice) => brain.set_slice(slice),
            None => brain.delete_slice(&name),
        }
    }
    for (name, node) in changes.nodes {
        match node {
            Some(node) => brain.set_node(node),
            None => brain.delete_node(&name),
        }
    }
}
