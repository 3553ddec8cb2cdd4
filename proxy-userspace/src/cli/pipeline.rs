//! Source, brain and publisher, joined: facts in, revisions of nodes' states out.

use std::{collections::BTreeSet, sync::Arc};

use anyhow::Result;
use brain::{Brain, Options};
use publish::{AnyNode, Publisher, Subscription, any_node, grpc};
use source::{Snapshot, Snapshots, file::FileSource};
use tokio::time::{MissedTickBehavior, interval};

use super::flags::{Facts, Source};

/// What runs while it is alive.
pub(super) struct Pipeline {
    /// The facts, as they come.
    source: FileSource,
    /// Who hears of the states.
    nodes: AnyNode,
    states: Subscription,
    node: String,
    options: Options,
}

impl Pipeline {
    /// Starts the source. Must be called within a tokio runtime.
    pub(super) fn start(flags: &Facts) -> Result<Self> {
        let node = flags.node.name()?;
        let Source::File(path) = &flags.source;
        let source = FileSource::start(path)?;
        let publisher = Publisher::new(node.as_str());
        let states = publisher.subscribe();
        let nodes = AnyNode::new(publisher);
        Ok(Self { source, nodes, states, node, options: flags.selection.options() })
    }

    /// Follows the node's state.
    pub(super) fn subscribe(&self) -> Subscription {
        self.states.clone()
    }

    /// What is served to others: the node's state, or any node's.
    pub(super) fn served(&self, any_node: bool) -> Arc<dyn grpc::Nodes> {
        if any_node {
            return Arc::new(self.nodes.asking());
        }
        Arc::new(grpc::OneNode::new(self.node.as_str(), self.subscribe()))
    }

    /// Publishes the states of the node, and of those that are followed, whenever the facts change; never before the
    /// source is complete.
    pub(super) async fn publish(&self) {
        let mut brain = Brain::new(self.options.clone());
        brain.serve(&self.node);
        let mut said = BTreeSet::new();
        let mut snapshots: Snapshots = self.source.snapshots();
        snapshots.mark_changed();
        let mut is_complete = false;
        let mut look = interval(any_node::LOOK);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                changed = snapshots.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    let snapshot: Option<Arc<Snapshot>> = snapshots.borrow_and_update().clone();
                    let Some(snapshot) = snapshot else { continue };
                    self.nodes.learn(Arc::clone(&snapshot.facts));
                    brain.update(Arc::clone(&snapshot.facts));
                    is_complete = true;
                }
                asked = self.nodes.asked() => asked.iter().for_each(|it| brain.serve(it)),
                _ = look.tick() => {
                    self.nodes.look().iter().for_each(|it| brain.dismiss(it));
                    continue;
                }
            }
            if !is_complete {
                continue;
            }
            for node in brain.settle() {
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
