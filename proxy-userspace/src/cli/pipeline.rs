//! Source, brain and publisher, joined: facts in, revisions of one node's state out.

use std::{collections::BTreeSet, sync::Arc};

use anyhow::Result;
use brain::{Brain, Options};
use model::facts::Rejected;
use publish::{Publisher, Subscription};
use source::{
    Changes, Snapshots,
    file::FileSource,
    kube::{self, KubeSource, Timing},
};

use super::flags::{Facts, Selection, Source};

/// What runs while it is alive.
pub(super) struct Pipeline {
    /// The facts, as they come.
    source: Running,
    /// Who hears of the states.
    publisher: Publisher,
    node: String,
    options: Options,
}

/// A source at work.
enum Running {
    File(FileSource),
    Kube(KubeSource),
}

impl Pipeline {
    /// Starts the source. Must be called within a tokio runtime.
    pub(super) fn start(flags: &Facts) -> Result<Self> {
        let node = flags.node.name()?;
        let source = match &flags.source {
            Source::File(path) => Running::File(FileSource::start(path)?),
            Source::Kube => Running::Kube(KubeSource::start(&kube::Options {
                access: flags.api_server.access(),
                service_proxy_name: flags.selection.options().service_proxy_name,
                node: Some(node.clone()),
                timing: Timing::default(),
            })?),
        };
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
        match &self.source {
            Running::File(source) => {
                let mut snapshots: Snapshots = source.snapshots();
                snapshots.mark_changed();
                while snapshots.changed().await.is_ok() {
                    let snapshot = snapshots.borrow_and_update().clone();
                    let Some(snapshot) = snapshot else { continue };
                    brain.update(Arc::clone(&snapshot.facts));
                    self.settle(&mut brain, &mut said);
                }
            }
            Running::Kube(source) => {
                while let Some(changes) = source.next().await {
                    change(&mut brain, changes);
                    self.settle(&mut brain, &mut said);
                }
            }
        }
    }

    /// Publishes what the changes so far have made of the node's state.
    fn settle(&self, brain: &mut Brain, said: &mut BTreeSet<Rejected>) {
        if brain.settle().contains(self.node.as_str())
            && let Some(state) = brain.state(&self.node)
        {
            self.publisher.publish(state.clone());
        }
        let rejected: BTreeSet<_> = brain.rejected().collect();
        for it in rejected.difference(said) {
            tracing::warn!("{it}");
        }
        *said = rejected;
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

impl Selection {
    /// The same for the brain.
    pub(super) fn options(&self) -> Options {
        // An environment variable that is there but empty says nothing.
        let service_proxy_name = self.service_proxy_name.clone().filter(|it| !it.is_empty());
        Options { service_proxy_name, ..Options::default() }
    }
}
