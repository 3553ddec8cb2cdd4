//! The objects of all files.
//!
//! Invariant: of several definitions of an object the one in the last file counts, by the names of the files. An object that
//! stays equal stays the same object in memory, and is no change.

use std::{
    collections::{BTreeSet, HashMap, hash_map::Entry},
    fmt,
    path::Path,
    sync::Arc,
};

use model::{ServiceName, cluster::SliceName};

use super::{
    contents::{Contents, Part},
    parse::Object,
};
use crate::ClusterChanges;

/// The identity of an object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum ObjectName {
    Service(ServiceName),
    EndpointSlice(SliceName),
    Node(Arc<str>),
    ServiceCidr(Arc<str>),
    Pod(Arc<str>),
}

impl ObjectName {
    pub(super) fn of(object: &Object) -> Self {
        match object {
            Object::Service(it) => Self::Service(it.name.clone()),
            Object::EndpointSlice(it) => Self::EndpointSlice(it.name.clone()),
            Object::Node(it) => Self::Node(Arc::clone(&it.name)),
            Object::ServiceCidr(it) => Self::ServiceCidr(Arc::clone(&it.name)),
            Object::Pod(it) => Self::Pod(Arc::clone(&it.name)),
        }
    }
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Service(it) => write!(f, "Service {it}"),
            Self::EndpointSlice(it) => write!(f, "EndpointSlice {it}"),
            Self::Node(it) => write!(f, "Node {it}"),
            Self::ServiceCidr(it) => write!(f, "ServiceCIDR {it}"),
            Self::Pod(it) => write!(f, "Pod {it}"),
        }
    }
}

/// The objects of all files.
#[derive(Debug, Default)]
pub(super) struct Objects {
    /// The files that define an object, in the order of their names, and how.
    definitions: HashMap<ObjectName, Vec<(Arc<Path>, Object)>>,
    /// The objects that more than one file defines.
    ambiguous: BTreeSet<ObjectName>,
}

impl Objects {
    /// Replaces the content of a file; returns whether it defines an object twice, as `had_duplicates` says of `before`.
    pub(super) fn replace(
        &mut self,
        file: &Arc<Path>,
        before: &Contents,
        after: &Contents,
        had_duplicates: bool,
        changes: &mut ClusterChanges,
    ) -> bool {
        let [old, new] = before.differing(after);
        let mut outdated = last_of_each(old).0;
        let (mut objects, mut has_duplicates) = last_of_each(new);
        let is_defined = |name: &ObjectName| {
            self.definitions.get(name).is_some_and(|it| it.iter().any(|(it, _)| it == file))
        };
        if had_duplicates
            || has_duplicates
            || objects.keys().any(|it| !outdated.contains_key(it) && is_defined(it))
        {
            // Their order in the whole file counts.
            outdated = last_of_each(before.parts()).0;
            (objects, has_duplicates) = last_of_each(after.parts());
        }
        for (name, object) in objects {
            if outdated.remove(&name) != Some(object) {
                self.set(file, name, Some(object), changes);
            }
        }
        for name in outdated.into_keys() {
            self.set(file, name, None, changes);
        }
        has_duplicates
    }

    /// The objects that more than one file defines, with these files.
    pub(super) fn ambiguous(&self) -> impl Iterator<Item = (&ObjectName, impl Iterator<Item = &Arc<Path>>)> {
        self.ambiguous
            .iter()
            .filter_map(|it| Some((it, self.definitions.get(it)?.iter().map(|(file, _)| file))))
    }

    /// Sets or removes the definition of an object in a file.
    fn set(
        &mut self,
        file: &Arc<Path>,
        name: ObjectName,
        object: Option<&Object>,
        changes: &mut ClusterChanges,
    ) {
        // Most objects are defined once.
        let mut entry = match self.definitions.entry(name) {
            Entry::Occupied(it) => it,
            Entry::Vacant(it) => it.insert_entry(Vec::with_capacity(1)),
        };
        let definitions = entry.get_mut();
        let before = definitions.last().map(|(_, it)| it.clone());
        let at = definitions.partition_point(|(it, _)| it < file);
        if definitions.get(at).is_some_and(|(it, _)| it == file) {
            definitions.remove(at);
        }
        if let Some(object) = object {
            definitions.insert(at, (Arc::clone(file), object.clone()));
        }
        let after = entry.get().last().map(|(_, it)| it);
        if before.as_ref() != after {
            record(entry.key(), after, changes);
        }
        if entry.get().len() > 1 {
            self.ambiguous.insert(entry.key().clone());
        } else {
            self.ambiguous.remove(entry.key());
        }
        if entry.get().is_empty() {
            entry.remove();
        }
    }
}

/// The objects of some parts by name, of several the last one; and whether there are several.
fn last_of_each(parts: &[Part]) -> (HashMap<ObjectName, &Object>, bool) {
    let mut count = 0;
    let objects = parts.iter().flat_map(Part::objects).inspect(|_| count += 1);
    let objects: HashMap<_, _> = objects.map(|(_, it)| (ObjectName::of(it), it)).collect();
    let has_several = objects.len() < count;
    (objects, has_several)
}

/// Records what an object has become, `None` if it does not exist any more.
fn record(name: &ObjectName, object: Option<&Object>, changes: &mut ClusterChanges) {
    let ClusterChanges { services, slices, nodes, service_cidrs, pods } = changes;
    match (object, name) {
        (Some(Object::Service(it)), _) => drop(services.insert(it.name.clone(), Some(Arc::clone(it)))),
        (Some(Object::EndpointSlice(it)), _) => drop(slices.insert(it.name.clone(), Some(Arc::clone(it)))),
        (Some(Object::Node(it)), _) => drop(nodes.insert(Arc::clone(&it.name), Some(Arc::clone(it)))),
        (Some(Object::ServiceCidr(it)), _) => {
            service_cidrs.insert(Arc::clone(&it.name), Some(Arc::clone(it)));
        }
        (Some(Object::Pod(it)), _) => drop(pods.insert(Arc::clone(&it.name), Some(Arc::clone(it)))),
        (None, ObjectName::Service(name)) => drop(services.insert(name.clone(), None)),
        (None, ObjectName::EndpointSlice(name)) => drop(slices.insert(name.clone(), None)),
        (None, ObjectName::Node(name)) => drop(nodes.insert(Arc::clone(name), None)),
        (None, ObjectName::ServiceCidr(name)) => drop(service_cidrs.insert(Arc::clone(name), None)),
        (None, ObjectName::Pod(name)) => drop(pods.insert(Arc::clone(name), None)),
    }
}
