//! One state from manifests, without following them.

use std::{path::Path, sync::Arc};

use brain::Brain;
use model::RequestedMetadata;
use publish::{Published, Publisher};
use source::{
    RejectionLog,
    file::{FileReport, FileUpdate},
    log_rejected,
};

use crate::{config::Error, node_check::unknown_node};

/// Reads the manifests at `path` once and derives the state of `node`. Problems and rejected items are logged.
pub fn read_manifests(
    path: &Path,
    node: &str,
    service_metadata: RequestedMetadata,
    options: brain::Options,
) -> Result<Arc<Published>, Error> {
    let FileUpdate { changes, report } = source::file::read(path, service_metadata)?;
    let FileReport { problems, rejected } = report.unwrap_or_default();
    for it in problems.iter().chain(&rejected) {
        log_rejected(it);
    }
    if changes.is_empty() && !problems.is_empty() {
        return Err(Error::NoManifest(path.to_owned()));
    }
    let mut brain = Brain::new(options);
    brain.start_serving(node);
    brain.cluster_mut().apply(changes);
    brain.recompute();
    let mut rejections = brain.rejections().clone();
    rejections.set(node, unknown_node(node, brain.node_infos(), false).into_iter().collect());
    RejectionLog::default().update(&rejections);
    let publisher = Publisher::new(node);
    publisher.publish(brain.state(node).cloned().unwrap_or_default());
    Ok(publisher.current().expect("a state has just been published"))
}
