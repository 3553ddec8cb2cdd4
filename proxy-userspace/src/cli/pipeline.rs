//! Source, brain and publisher, joined: facts in, revisions of one node's state out.

use std::{collections::BTreeSet, sync::Arc};

use anyhow::Result;
use brain::{Brain, Options};
use publish::{Publisher, Subscription};
use source::{Snapshot, Snapshots, file::FileSource};

use super::flags::{Facts, Source};

/// What runs while it is alive.
pub(super) struct Pipeline {
    /// The facts, as they come.
    source: FileSource,
    /// Who hears of the states.
    publisher: Publisher,
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
        Ok(Self { source, publisher, node, options: flags.selection.options() })
    }

    /// The node.
    pub(super) fn node(&self) -> &str {
        &self.node
    }

    /// Follows the node's state.
    pub(super) fn subscribe(&self) -> Subscription {
        self.publisher.subscribe()
    }

    /// Publishes the node's state whenever the facts change; never before the source is complete.
    pub(super) async fn publish(&self) {
        let mut brain = Brain::new(self.options.clone());
        brain.serve(&self.node);
        let mut said = BTreeSet::new();
        let mut snapshots: Snapshots = self.source.snapshots();
        snapshots.mark_changed();
        while snapshots.changed().await.is_ok() {
            let snapshot: Option<Arc<Snapshot>> = snapshots.borrow_and_update().clone();
            let Some(snapshot) = snapshot else { continue };
            brain.update(Arc::clone(&snapshot.facts));
            if brain.settle().contains(self.node.as_str())
                && let Some(state) = brain.state(&self.node)
            {
                self.publisher.publish(state.clone());
            }
            let rejected: BTreeSet<_> = brain.rejected().collect();
            for it in rejected.difference(&said) {
                tracing::warn!("{it}");
            }
            said = rejected;
        }
    }
}
