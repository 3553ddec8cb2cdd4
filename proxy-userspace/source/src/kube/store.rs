//! EventType the server has said of one kind, and what of it is news.
//!
//! The one rule: an object that says the same as before stays the very same object, and is no news.

use std::{
    collections::{HashMap, HashSet},
    mem,
    sync::Arc,
};

use model::cluster::Rejected;

use super::kind::{Changed, Kind};
use crate::kube_types::Converted;

/// The objects of a kind.
pub(super) struct Store<K: Kind + ?Sized> {
    objects: HashMap<K::Name, Arc<K::Fact>>,
    /// The objects that the list which is being read has not named so far.
    unlisted: Option<HashSet<K::Name>>,
    /// Whether a list has been read to its end.
    is_synced: bool,
    news: Changed<K>,
    /// EventType was refused of the objects that are not right.
    rejected: HashMap<K::Name, Vec<Rejected>>,
}

impl<K: Kind> Store<K> {
    pub(super) fn new() -> Self {
        Self {
            objects: HashMap::new(),
            unlisted: None,
            is_synced: false,
            news: HashMap::new(),
            rejected: HashMap::new(),
        }
    }

    /// How many objects there are.
    pub(super) fn len(&self) -> usize {
        self.objects.len()
    }

    /// How many parts of them are refused.
    pub(super) fn refusals(&self) -> usize {
        self.rejected.values().map(Vec::len).sum()
    }

    /// A list begins; one that began before has come to nothing.
    pub(super) fn list_begins(&mut self) {
        self.unlisted = Some(self.objects.keys().cloned().collect());
    }

    /// The list is complete: what it did not name is gone.
    pub(super) fn list_ends(&mut self) {
        for name in self.unlisted.take().unwrap_or_default() {
            self.delete(&name);
        }
        self.is_synced = true;
    }

    /// Whether a list has been read to its end.
    pub(super) fn is_synced(&self) -> bool {
        self.is_synced
    }

    /// The server says that an object is so.
    pub(super) fn set(&mut self, name: K::Name, converted: Converted<K::Fact>) {
        if let Some(unlisted) = &mut self.unlisted {
            unlisted.remove(&name);
        }
        self.refused(&name, converted.rejected);
        match converted.object {
            Some(object) if self.objects.get(&name).is_some_and(|before| **before == object) => {}
            Some(object) => {
                let object = Arc::new(object);
                self.objects.insert(name.clone(), Arc::clone(&object));
                self.news.insert(name, Some(object));
            }
            // Nothing that is read any more, as a slice that has lost its label.
            None => self.remove(&name),
        }
    }

    /// An object cannot be read: it stays what it was.
    pub(super) fn keep(&mut self, name: &K::Name, rejected: Rejected) {
        if let Some(unlisted) = &mut self.unlisted {
            unlisted.remove(name);
        }
        self.refused(name, vec![rejected]);
    }

    /// The server says that an object is gone.
    pub(super) fn delete(&mut self, name: &K::Name) {
        self.rejected.remove(name);
        self.remove(name);
    }

    /// EventType is news since the last time; nothing while a list is being read.
    pub(super) fn take_news(&mut self) -> Changed<K> {
        if self.unlisted.is_some() { HashMap::new() } else { mem::take(&mut self.news) }
    }

    fn remove(&mut self, name: &K::Name) {
        if self.objects.remove(name).is_some() {
            self.news.insert(name.clone(), None);
        }
    }

    /// Complains about what is new.
    fn refused(&mut self, name: &K::Name, rejected: Vec<Rejected>) {
        let before = match rejected.is_empty() {
            true => self.rejected.remove(name),
            false => self.rejected.insert(name.clone(), rejected.clone()),
        };
        for it in rejected {
            if before.as_ref().is_none_or(|before| !before.contains(&it)) {
                tracing::warn!("{it}");
            }
        }
    }
}
