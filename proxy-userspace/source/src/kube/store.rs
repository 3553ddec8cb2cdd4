//! The known objects of one resource, and their changes.
//!
//! Invariant: an object whose relevant fields are unchanged stays the same object in memory and is not a change.

use std::{
    collections::{HashMap, HashSet},
    mem,
};

use model::{
    Rejected, Rejections,
    cluster::{ClusterChanges, Object, ObjectName},
};

use crate::kube_types::Converted;

#[derive(Default)]
pub(super) struct Store {
    pub(super) objects: HashMap<ObjectName, Object>,
    /// While a list is read: the objects that it has not contained so far.
    unlisted: Option<HashSet<ObjectName>>,
    /// Whether a list has been read to its end.
    pub(super) is_synced: bool,
    changes: ClusterChanges,
    /// The objects of which parts are rejected.
    rejected: HashSet<ObjectName>,
    /// The rejected parts of objects that have changed since they were taken.
    changed_rejections: HashMap<ObjectName, Vec<Rejected>>,
}

impl Store {
    /// Hands over what was rejected, and what is not any more, since the last call.
    pub(super) fn take_rejected(&mut self, all: &mut Rejections) {
        for (name, parts) in self.changed_rejections.drain() {
            all.set(&name.to_string(), parts);
        }
    }

    /// Begins a list; an unfinished one is abandoned.
    pub(super) fn begin_list(&mut self) {
        self.unlisted = Some(self.objects.keys().cloned().collect());
    }

    /// Completes the list: objects that it did not contain are deleted.
    pub(super) fn end_list(&mut self) {
        for name in self.unlisted.take().unwrap_or_default() {
            self.delete(&name);
        }
        self.is_synced = true;
    }

    pub(super) fn set(&mut self, name: ObjectName, converted: Converted<Object>) {
        if let Some(unlisted) = &mut self.unlisted {
            unlisted.remove(&name);
        }
        self.set_rejected(&name, converted.rejected);
        match converted.object {
            Some(object) if self.objects.get(&name) == Some(&object) => {}
            Some(object) => {
                self.objects.insert(name.clone(), object.clone());
                self.changes.insert(name, Some(object));
            }
            // No longer of interest, such as a slice that has lost its label.
            None => self.remove(&name),
        }
    }

    /// Keeps the last version of an object that cannot be decoded.
    pub(super) fn keep(&mut self, name: &ObjectName, rejected: Rejected) {
        if let Some(unlisted) = &mut self.unlisted {
            unlisted.remove(name);
        }
        self.set_rejected(name, vec![rejected]);
    }

    pub(super) fn delete(&mut self, name: &ObjectName) {
        self.set_rejected(name, Vec::new());
        self.remove(name);
    }

    /// The changes since the last call; none while a list is being read.
    pub(super) fn take_changes(&mut self) -> ClusterChanges {
        if self.unlisted.is_some() { ClusterChanges::new() } else { mem::take(&mut self.changes) }
    }

    fn remove(&mut self, name: &ObjectName) {
        if self.objects.remove(name).is_some() {
            self.changes.insert(name.clone(), None);
        }
    }

    fn set_rejected(&mut self, name: &ObjectName, parts: Vec<Rejected>) {
        let was_rejected = match parts.is_empty() {
            true => self.rejected.remove(name),
            false => !self.rejected.insert(name.clone()),
        };
        if was_rejected || !parts.is_empty() {
            self.changed_rejections.insert(name.clone(), parts);
        }
    }
}
