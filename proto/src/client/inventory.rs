//! What the client has, as digests of what it received, for the extension `Resume`.
//!
//! Invariant: it describes the last complete state, which the caller has, and not what a broken stream sent after it.

use std::{
    collections::HashMap,
    hash::{BuildHasher as _, RandomState},
    sync::Arc,
};

use crate::{
    digest::{self, Buckets, Digest, KeptBuckets, MAX_BUCKETS},
    localv1::{Digests, Set},
};

/// The digests of all objects.
#[derive(Debug, Default)]
pub(super) struct Inventory {
    /// Of the last complete state.
    synced: Groups,
    /// With the operations since then.
    current: Groups,
    /// The groups that may differ; `None` if all may.
    touched: Option<Vec<(Set, String)>>,
    hasher: RandomState,
}

type Groups = HashMap<(Set, String), Arc<Vec<(u64, Digest)>>>;

impl Inventory {
    /// What the request of a new stream says; `None` if there is nothing yet.
    pub(super) fn message(&self) -> Option<Digests> {
        let count = self.synced.len().next_power_of_two().min(MAX_BUCKETS);
        let mut buckets = Buckets::new(count);
        for ((set, path), objects) in &self.synced {
            let mut objects: Vec<_> = objects.iter().map(|(_, it)| *it).collect();
            buckets.add(digest::position(*set, path), digest::all(&mut objects));
        }
        (!self.synced.is_empty()).then(|| Digests::of(&buckets.finish()))
    }

    pub(super) fn reset(&mut self) {
        self.current.clear();
        self.touched = None;
    }

    /// The groups in these buckets are as in the last complete state.
    pub(super) fn keep(&mut self, kept: &KeptBuckets) {
        let groups =
            self.synced.iter().filter(|((set, path), _)| kept.contains(digest::position(*set, path)));
        self.current.extend(groups.map(|(key, it)| (key.clone(), Arc::clone(it))));
    }

    pub(super) fn set(&mut self, set: Set, path: &str, bytes: &[u8]) {
        let digest = digest::object(set, path, bytes);
        let id = self.hasher.hash_one((i32::from(set), path));
        let objects = Arc::make_mut(self.group(set, path));
        match objects.binary_search_by_key(&id, |it| it.0) {
            Ok(at) => objects[at].1 = digest,
            Err(at) => objects.insert(at, (id, digest)),
        }
    }

    pub(super) fn delete(&mut self, set: Set, path: &str) {
        let id = self.hasher.hash_one((i32::from(set), path));
        let objects = Arc::make_mut(self.group(set, path));
        objects.retain(|it| it.0 != id);
        if objects.is_empty() {
            let (set, path) = digest::group_of(set, path);
            self.current.remove(&(set, path.to_owned()));
        }
    }

    /// The state is complete.
    pub(super) fn sync(&mut self) {
        match self.touched.replace(Vec::new()) {
            None => self.synced.clone_from(&self.current),
            Some(touched) => {
                for key in touched {
                    match self.current.get(&key) {
                        Some(it) => drop(self.synced.insert(key, Arc::clone(it))),
                        None => drop(self.synced.remove(&key)),
                    }
                }
            }
        }
    }

    fn group(&mut self, set: Set, path: &str) -> &mut Arc<Vec<(u64, Digest)>> {
        let (set, path) = digest::group_of(set, path);
        let key = (set, path.to_owned());
        if let Some(touched) = &mut self.touched {
            touched.push(key.clone());
        }
        self.current.entry(key).or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(inventory: &Inventory) -> Vec<u8> {
        inventory.message().map(|it| it.buckets).unwrap_or_default()
    }

    #[test]
    fn it_describes_the_last_complete_state() {
        let mut inventory = Inventory::default();
        inventory.reset();
        inventory.set(Set::ServicesSet, "ns/a", b"1");
        assert!(inventory.message().is_none());
        inventory.set(Set::EndpointsSet, "ns/a/p", b"2");
        inventory.set(Set::ServicesSet, "ns/b", b"3");
        inventory.sync();
        let first = message(&inventory);
        assert_eq!(first.len(), 2 * 16);
        // A change set that breaks off.
        inventory.set(Set::EndpointsSet, "ns/a/q", b"4");
        inventory.delete(Set::ServicesSet, "ns/b");
        assert_eq!(message(&inventory), first);
        // The next stream keeps everything.
        inventory.reset();
        inventory.keep(&KeptBuckets::parse(vec![3], 2).unwrap());
        inventory.sync();
        assert_eq!(message(&inventory), first);
        // A change and its reverse.
        inventory.set(Set::EndpointsSet, "ns/a/q", b"4");
        inventory.sync();
        assert_ne!(message(&inventory), first);
        inventory.delete(Set::EndpointsSet, "ns/a/q");
        inventory.sync();
        assert_eq!(message(&inventory), first);
        inventory.delete(Set::ServicesSet, "ns/b");
        inventory.delete(Set::EndpointsSet, "ns/a/p");
        inventory.delete(Set::ServicesSet, "ns/a");
        inventory.sync();
        assert!(inventory.message().is_none());
    }
}
