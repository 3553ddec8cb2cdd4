//! Source, brain and publisher, joined: facts in, revisions of nodes' states out.

use std::{collections::BTreeSet, sync::Arc};

use anyhow::Result;
use brain::{Brain, Options};
use model::{facts::Facts as ClusterFacts, state::NodeState};
use proto::client::Client;
use publish::{
    AnyNode, Publisher, Subscription, any_node,
    cluster::{Cluster, Known},
    grpc::{self, Served},
};
use source::{
    Snapshots,
    api::{ApiSource, Said},
    file::FileSource,
};
use tokio::{
    sync::watch,
    time::{MissedTickBehavior, interval},
};

use super::flags::{Facts, Source};

/// What runs while it is alive.
pub(super) struct Pipeline {
    /// The facts, as they come.
    source: Running,
    /// Who hears of the states.
    nodes: AnyNode,
    /// Who hears of the facts.
    cluster: Cluster,
    states: Subscription,
    node: String,
    options: Options,
}

/// A source at work.
enum Running {
    File(FileSource),
    Api(ApiSource),
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
        };
        let options = flags.selection.options();
        let publisher = Publisher::new(node.as_str());
        let states = publisher.subscribe();
        let nodes = AnyNode::new(publisher);
        let cluster = Cluster::new(options.service_proxy_name.as_deref());
        Ok(Self { source, nodes, cluster, states, node, options })
    }

    /// Follows the node's state.
    pub(super) fn subscribe(&self) -> Subscription {
        self.states.clone()
    }

    /// What is served to others: the node's state, or any node's, and the facts.
    pub(super) fn served(&self, any_node: bool) -> Served {
        let nodes: Arc<dyn grpc::Nodes> = match any_node {
            true => Arc::new(self.nodes.asking()),
            false => Arc::new(grpc::OneNode::new(self.node.as_str(), self.subscribe())),
        };
        Served { nodes, cluster: self.cluster.subscribe() }
    }

    /// Publishes the states of the node, and of those that are followed, whenever the facts change; never before the
    /// source is complete.
    pub(super) async fn publish(&self) {
        let mut brain = Brain::new(self.options.clone());
        brain.serve(&self.node);
        let mut said = BTreeSet::new();
        let mut source = self.source.news();
        // Whether the facts are here, by now, and when they were looked at last.
        let (mut is_complete, mut was_complete) = (false, false);
        let mut look = interval(any_node::LOOK);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                news = source.next() => match news {
                    Some(News::Facts(facts)) => {
                        self.nodes.learn(Arc::clone(&facts));
                        self.cluster.publish(Known::Facts(Arc::clone(&facts)));
                        brain.update(facts);
                        is_complete = true;
                    }
                    Some(News::State(state)) => {
                        self.cluster.publish(Known::NoFacts);
                        self.nodes.publish(&self.node, state);
                        is_complete = false;
                    }
                    None => return,
                },
                asked = self.nodes.asked() => asked.iter().for_each(|it| brain.serve(it)),
                _ = look.tick() => {
                    self.nodes.look().iter().for_each(|it| brain.dismiss(it));
                    continue;
                }
            }
            let has_begun = is_complete && !was_complete;
            was_complete = is_complete;
            if !is_complete {
                continue;
            }
            let mut changed = brain.settle();
            if has_begun {
                // What was published until now may be what another brain had decided.
                changed.extend(brain.nodes().cloned());
            }
            for node in changed {
                if let Some(state) = brain.state(&node) {
                    self.nodes.publish(&node, state.clone());
                }
            }
            let rejected: BTreeSet<_> = brain.rejected().collect();
            for it in rejected.difference(&said) {
                tracing::warn!("{it}");
            }
            said = rejected;
        }
    }
}

/// What a source says that is new.
enum News {
    Facts(Arc<ClusterFacts>),
    /// The node's state is decided elsewhere.
    State(NodeState),
}

/// What a source says, as it comes: always the newest.
enum NewsOf {
    File(Snapshots),
    Api(watch::Receiver<Option<Said>>),
}

impl Running {
    fn news(&self) -> NewsOf {
        match self {
            Self::File(it) => NewsOf::File(first(it.snapshots())),
            Self::Api(it) => NewsOf::Api(first(it.said())),
        }
    }
}

/// What is there already is new as well.
fn first<T>(mut receiver: watch::Receiver<T>) -> watch::Receiver<T> {
    receiver.mark_changed();
    receiver
}

impl NewsOf {
    /// None if the source has ended. Nothing is lost if it is dropped while it waits.
    async fn next(&mut self) -> Option<News> {
        loop {
            let news = match self {
                Self::File(snapshots) => {
                    snapshots.changed().await.ok()?;
                    let snapshot = snapshots.borrow_and_update();
                    snapshot.as_ref().map(|it| News::Facts(Arc::clone(&it.facts)))
                }
                Self::Api(said) => {
                    said.changed().await.ok()?;
                    let said = said.borrow_and_update();
                    said.clone().map(|it| match it {
                        Said::Facts(facts) => News::Facts(facts),
                        Said::State(state) => News::State(state),
                    })
                }
            };
            if news.is_some() {
                return news;
            }
        }
    }
}
