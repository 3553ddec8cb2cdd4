//! One state from manifests, without following them.

use std::{path::Path, sync::Arc};

use brain::Brain;
use model::cluster::ClusterState;
use publish::{Published, Publisher};

use crate::{config::Error, node_check::unknown_node};

/// Reads the manifests at `path` once and derives the state of `node`. Problems and rejected items are logged.
pub fn read_manifests(path: &Path, node: &str, options: brain::Options) -> Result<Arc<Published>, Error> {
    let snapshot = source::file::read(path)?;
    for it in &snapshot.problems {
        tracing::warn!("{it}");
    }
    for it in &snapshot.rejected {
        tracing::warn!("not served: {it}");
    }
    if *snapshot.cluster == ClusterState::default() && !snapshot.problems.is_empty() {
        return Err(Error::NoManifest(path.to_owned()));
    }
    let mut brain = Brain::new(options);
    brain.start_serving(node);
    brain.replace_cluster(snapshot.cluster);
    brain.recompute();
    for it in brain.rejected().chain(unknown_node(node, brain.node_infos(), false)) {
        tracing::warn!("{it}");
    }
    let publisher = Publisher::new(node);
    publisher.publish(brain.state(node).cloned().unwrap_or_default());
    Ok(publisher.current().expect("a state has just been published"))
}
