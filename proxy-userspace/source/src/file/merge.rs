//! From the objects of many files to one snapshot.
//!
//! The one rule: the order of the files' names decides, and what did not change stays the same object in memory.

use std::{collections::BTreeMap, path::Path, sync::Arc};

use model::cluster::{ClusterState, Rejected};

use super::parse::{Object, ParsedManifest, Position};
use crate::Snapshot;

/// Puts the files together, in the order given; of an object that is there twice the last one counts.
pub(super) fn merge<'a>(
    files: impl IntoIterator<Item = (&'a Path, &'a ParsedManifest)>,
    before: &ClusterState,
) -> Snapshot {
    let mut facts = ClusterState::default();
    let mut rejected = Vec::new();
    let mut problems = Vec::new();
    let mut places: BTreeMap<String, (&Path, Position)> = BTreeMap::new();
    for (path, parsed) in files {
        for (at, object) in &parsed.objects {
            let name = add(&mut facts, object, before);
            if let Some((first, first_at)) = places.insert(name.clone(), (path, *at)) {
                problems.push(format!(
                    "{}: {at}: {name} is also in {}, {first_at}; this one counts, remove the other",
                    path.display(),
                    first.display(),
                ));
            }
        }
        problems.extend(parsed.ignored.iter().map(|(at, what)| {
            format!(
                "{}: {at}: {what} is ignored; only v1 Service, v1 Node, discovery.k8s.io/v1 EndpointSlice and \
                 lists of them are read",
                path.display()
            )
        }));
        if parsed.documents == 0 {
            let reason = "there is nothing in it; write a `kind: List` with `items: []` to mean nothing";
            rejected.push(Rejected { item: path.display().to_string(), reason: reason.into() });
        }
        rejected.extend(parsed.rejected.iter().map(|it| Rejected {
            item: format!("{}: {}", path.display(), it.item),
            reason: it.reason.clone(),
        }));
    }
    Snapshot { facts: Arc::new(facts), rejected, problems }
}

/// Adds an object and says what it is called.
fn add(facts: &mut ClusterState, object: &Object, before: &ClusterState) -> String {
    match object {
        Object::Service(it) => {
            facts.set_service(same_as(before.service(&it.name), it));
            format!("Service {}", it.name)
        }
        Object::EndpointSlice(it) => {
            facts.set_slice(same_as(before.slice(&it.name), it));
            format!("EndpointSlice {}", it.name)
        }
        Object::Node(it) => {
            facts.set_node(same_as(before.node(&it.name), it));
            format!("Node {}", it.name)
        }
    }
}

/// The old object if it says the same as the new one.
fn same_as<T: PartialEq>(before: Option<&Arc<T>>, now: &Arc<T>) -> Arc<T> {
    Arc::clone(before.filter(|before| **before == *now).unwrap_or(now))
}
