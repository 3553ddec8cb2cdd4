//! The known objects of one resource, and their changes.
//!
//! Invariant: an object whose relevant fields are unchanged stays the same object in memory and is not a change.

use std::{
    collections::{HashMap, HashSet},
    mem,
    sync::Arc,
};

use model::{Rejected, Rejections};

use super::resource::{ChangesOf, Resource};
use crate::kube_types::Converted;

/// The objects of a resource.
pub(super) struct Store<R: Resource> {
    objects: HashMap<R::Name, Arc<R::Value>>,
    /// While a list is read: the objects that it has not contained so far.
    unlisted: Option<HashSet<R::Name>>,
    /// Whether a list has been read to its end.
    is_synced: bool,
    changes: ChangesOf<R>,
    /// The objects of which parts are rejected.
    rejected: HashSet<R::Name>,
    /// The rejected parts of objects that have changed since they were taken.
    changed_rejections: HashMap<R::Name, Vec<Rejected>>,
}

impl<R: Resource> Store<R> {
    pub(super) fn new() -> Self {
        Self {
            objects: HashMap::new(),
            unlisted: None,
            is_synced: false,
            changes: HashMap::new(),
            rejected: HashSet::new(),
            changed_rejections: HashMap::new(),
        }
    }

    /// The number of objects.
    pub(super) fn len(&self) -> usize {
        self.objects.len()
    }

    /// Hands over what was rejected, and what is not any more, since the last call.
    pub(super) fn take_rejected(&mut self, all: &mut Rejections) {
        for (name, parts) in self.changed_rejections.drain() {
            all.set(&format!("{} {name}", R::KIND), parts);
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

    /// Whether a list has been read to its end.
    pub(super) fn is_synced(&self) -> bool {
        self.is_synced
    }

    /// Adds or replaces an object.
    pub(super) fn set(&mut self, name: R::Name, converted: Converted<R::Value>) {
        if let Some(unlisted) = &mut self.unlisted {
            unlisted.remove(&name);
        }
        self.set_rejected(&name, converted.rejected);
        match converted.object {
            Some(object) if self.objects.get(&name).is_some_and(|previous| **previous == object) => {}
            Some(object) => {
                let object = Arc::new(object);
                self.objects.insert(name.clone(), Arc::clone(&object));
                self.changes.insert(name, Some(object));
            }
            // No longer of interest, such as a slice that has lost its label.
            None => self.remove(&name),
        }
    }

    /// Keeps the last version of an object that cannot be decoded.
    pub(super) fn keep(&mut self, name: &R::Name, rejected: Rejected) {
        if let Some(unlisted) = &mut self.unlisted {
            unlisted.remove(name);
        }
        self.set_rejected(name, vec![rejected]);
    }

    /// Deletes an object.
    pub(super) fn delete(&mut self, name: &R::Name) {
        self.set_rejected(name, Vec::new());
        self.remove(name);
    }

    /// The changes since the last call; none while a list is being read.
    pub(super) fn take_changes(&mut self) -> ChangesOf<R> {
        if self.unlisted.is_some() { HashMap::new() } else { mem::take(&mut self.changes) }
    }

    fn remove(&mut self, name: &R::Name) {
        if self.objects.remove(name).is_some() {
            self.changes.insert(name.clone(), None);
        }
    }

    /// Replaces the rejected parts of an object.
    fn set_rejected(&mut self, name: &R::Name, parts: Vec<Rejected>) {
        let was_rejected = match parts.is_empty() {
            true => self.rejected.remove(name),
            false => !self.rejected.insert(name.clone()),
        };
        if was_rejected || !parts.is_empty() {
            self.changed_rejections.insert(name.clone(), parts);
        }
    }
}
