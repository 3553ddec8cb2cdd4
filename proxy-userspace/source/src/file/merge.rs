//! Merges the objects of many files into one snapshot.
//!
//! Invariant: files are merged in the order of their names, and an unchanged object stays the same object in memory.

use std::{collections::BTreeMap, path::Path, sync::Arc};

use model::{Rejected, cluster::ClusterState};

use super::{
    documents::Position,
    parse::{Object, ParsedManifest},
};
use crate::snapshot::Snapshot;

/// Merges the files in the given order; the last of several definitions of an object wins.
pub(super) fn merge<'a>(
    files: impl IntoIterator<Item = (&'a Path, &'a ParsedManifest)>,
    previous: &ClusterState,
) -> Snapshot {
    let mut cluster = ClusterState::default();
    let mut rejected = Vec::new();
    let mut problems = Vec::new();
    let mut positions: BTreeMap<String, (&Path, Position)> = BTreeMap::new();
    for (path, parsed) in files {
        for (at, object) in &parsed.objects {
            let name = add(&mut cluster, object, previous);
            if let Some((first, first_at)) = positions.insert(name.clone(), (path, *at)) {
                problems.push(format!(
                    "{}: {at}: {name} is also defined in {}, {first_at}; this definition is used, remove the other",
                    path.display(),
                    first.display(),
                ));
            }
        }
        problems.extend(parsed.ignored.iter().map(|(at, kind)| {
            format!(
                "{}: {at}: {kind} is ignored; supported are v1 Service, v1 Node, discovery.k8s.io/v1 EndpointSlice and \
                 lists of them",
                path.display()
            )
        }));
        if parsed.documents == 0 {
            let reason = "the file is empty; write a `kind: List` with `items: []` if that is intended";
            rejected.push(Rejected { item: path.display().to_string(), reason: reason.into() });
        }
        rejected.extend(parsed.rejected.iter().map(|it| Rejected {
            item: format!("{}: {}", path.display(), it.item),
            reason: it.reason.clone(),
        }));
    }
    Snapshot { cluster: Arc::new(cluster), rejected, problems }
}

/// Adds an object and returns its kind and name.
fn add(cluster: &mut ClusterState, object: &Object, previous: &ClusterState) -> String {
    match object {
        Object::Service(it) => {
            cluster.set_service(reuse(previous.service(&it.name), it));
            format!("Service {}", it.name)
        }
        Object::EndpointSlice(it) => {
            cluster.set_slice(reuse(previous.slice(&it.name), it));
            format!("EndpointSlice {}", it.name)
        }
        Object::Node(it) => {
            cluster.set_node(reuse(previous.node(&it.name), it));
            format!("Node {}", it.name)
        }
    }
}

/// The previous object if it equals the new one.
fn reuse<T: PartialEq>(previous: Option<&Arc<T>>, new: &Arc<T>) -> Arc<T> {
    Arc::clone(previous.filter(|previous| **previous == *new).unwrap_or(new))
}
