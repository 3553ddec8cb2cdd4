//! Source, brain and publisher, joined: facts in, revisions of one node's state out.

use std::sync::Arc;

use anyhow::Result;
use brain::Options;
use publish::{Publisher, Subscription};
use source::{Snapshot, Snapshots, file::FileSource};

use super::flags::{Facts, Selection, Source};

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
        let mut snapshots: Snapshots = self.source.snapshots();
        snapshots.mark_changed();
        while snapshots.changed().await.is_ok() {
            let snapshot: Option<Arc<Snapshot>> = snapshots.borrow_and_update().clone();
            if let Some(snapshot) = snapshot {
                self.publisher.publish(brain::node_state(&snapshot.facts, &self.node, &self.options));
            }
        }
    }
}

impl Selection {
    /// The same for the brain.
    pub(super) fn options(&self) -> Options {
        Options { service_proxy_name: self.service_proxy_name.clone(), ..Options::default() }
    }
}
