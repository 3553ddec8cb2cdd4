//! The objects of all files.
//!
//! Invariant: of several definitions of an object the one in the last file counts, by the names of the files. An object that
//! stays equal stays the same object in memory, and is no change.

use std::{
    collections::{BTreeSet, HashMap, hash_map::Entry},
    path::Path,
    sync::Arc,
};

use model::cluster::{ClusterChanges, Object, ObjectName};

use super::parse::ParsedManifest;

#[derive(Debug, Default)]
pub(super) struct Objects {
    /// The files that define an object, in the order of their names, and how.
    definitions: HashMap<ObjectName, Vec<(Arc<Path>, Object)>>,
    /// The objects that more than one file defines.
    ambiguous: BTreeSet<ObjectName>,
}

impl Objects {
    /// Replaces the content of a file; returns whether it defines an object twice.
    pub(super) fn replace(
        &mut self,
        file: &Arc<Path>,
        before: &ParsedManifest,
        after: &mut ParsedManifest,
        changes: &mut ClusterChanges,
    ) -> bool {
        let mut outdated = by_name(before);
        for (_, object) in &mut after.objects {
            if let Some(same) = outdated.get(&object.name()).filter(|it| **it == object) {
                *object = (*same).clone();
            }
        }
        let objects = by_name(after);
        let has_duplicates = objects.len() < after.objects.len();
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
            changes.insert(entry.key().clone(), after.cloned());
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

/// The objects of a file by name, of several the last one.
fn by_name(parsed: &ParsedManifest) -> HashMap<ObjectName, &Object> {
    parsed.objects.iter().map(|(_, it)| (it.name(), it)).collect()
}
