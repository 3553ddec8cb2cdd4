//! A key-value store that computes the difference between two states.
//!
//! A difference is between two finished states; intermediate values do not appear in it.

use std::collections::{BTreeMap, BTreeSet};

/// Keys and values, written in batches.
///
/// A batch consists of the calls of `set` and `delete` until [`done`](Self::done); after that, [`created`](Self::created),
/// [`updated`](Self::updated) and [`deleted`](Self::deleted) return the difference to the previous batch.
/// A batch either changes the existing entries, at the cost of those that it touches, or replaces them all, after
/// [`reset`](Self::reset): `done` deletes the entries that were not set again.
///
/// ```
/// use proxy_contract::DiffStore;
///
/// let mut rules = DiffStore::new();
/// rules.set("10.96.0.1:443", "10.0.0.1:6443");
/// rules.set("10.96.0.10:53", "10.1.0.7:53");
/// rules.done();
/// assert_eq!(rules.created().count(), 2);
///
/// rules.reset();
/// rules.set("10.96.0.10:53", "10.1.0.8:53");
/// rules.done();
/// assert_eq!(rules.updated().collect::<Vec<_>>(), [(&"10.96.0.10:53", &"10.1.0.8:53")]);
/// assert_eq!(rules.deleted().collect::<Vec<_>>(), [(&"10.96.0.1:443", &"10.0.0.1:6443")]);
/// ```
#[derive(Clone, Debug)]
pub struct DiffStore<K, V> {
    entries: BTreeMap<K, V>,
    /// The entries that this batch has touched, as they were before it.
    before: BTreeMap<K, Option<V>>,
    created: BTreeSet<K>,
    updated: BTreeSet<K>,
    deleted: BTreeMap<K, V>,
}

impl<K, V> Default for DiffStore<K, V> {
    fn default() -> Self {
        Self {
            entries: BTreeMap::new(),
            before: BTreeMap::new(),
            created: BTreeSet::new(),
            updated: BTreeSet::new(),
            deleted: BTreeMap::new(),
        }
    }
}

impl<K: Ord + Clone, V: PartialEq> DiffStore<K, V> {
    /// An empty store.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets a value.
    pub fn set(&mut self, key: K, value: V) {
        let old = self.entries.insert(key.clone(), value);
        self.before.entry(key).or_insert(old);
    }

    /// Deletes a value, if it exists.
    pub fn delete(&mut self, key: &K) {
        if let Some((key, old)) = self.entries.remove_entry(key) {
            self.before.entry(key).or_insert(Some(old));
        }
    }

    /// Sets a value, or deletes it if there is none.
    #[cfg(feature = "client")]
    pub(crate) fn put(&mut self, key: K, value: Option<V>) {
        match value {
            Some(value) => self.set(key, value),
            None => self.delete(&key),
        }
    }

    /// The current value.
    pub fn get(&self, key: &K) -> Option<&V> {
        self.entries.get(key)
    }

    #[cfg(feature = "client")]
    pub(crate) fn get_mut(&mut self, key: &K) -> Option<&mut V>
    where
        V: Clone,
    {
        let value = self.entries.get_mut(key)?;
        self.before.entry(key.clone()).or_insert_with(|| Some(value.clone()));
        Some(value)
    }

    /// All current entries, in ascending order of keys.
    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.entries.iter()
    }

    /// Starts to replace all entries: `done` deletes those that were not set again.
    pub fn reset(&mut self) {
        for (key, old) in std::mem::take(&mut self.entries) {
            self.before.entry(key).or_insert(Some(old));
        }
    }

    /// After a reset: sets the entries of the previous batch again that `is_kept` names.
    #[cfg(feature = "client")]
    pub(crate) fn keep(&mut self, is_kept: impl Fn(&K) -> bool) {
        let entries = &mut self.entries;
        self.before.retain(|key, old| {
            let kept = old.take_if(|_| is_kept(key));
            let is_kept = kept.is_some();
            entries.extend(kept.map(|it| (key.clone(), it)));
            !is_kept
        });
    }

    /// Ends the batch. Its difference to the previous one can be read until the next call.
    pub fn done(&mut self) {
        self.created.clear();
        self.updated.clear();
        self.deleted.clear();
        for (key, before) in std::mem::take(&mut self.before) {
            match (before, self.entries.get_mut(&key)) {
                // An equal value stays the same object.
                (Some(before), Some(now)) if before == *now => *now = before,
                (Some(_), Some(_)) => drop(self.updated.insert(key)),
                (None, Some(_)) => drop(self.created.insert(key)),
                (Some(before), None) => drop(self.deleted.insert(key, before)),
                (None, None) => {}
            }
        }
    }

    /// The entries that the last batch added, in ascending order of keys, with their current values.
    pub fn created(&self) -> impl DoubleEndedIterator<Item = (&K, &V)> {
        self.values(&self.created)
    }

    /// The entries that the last batch changed, in ascending order of keys, with their current values.
    pub fn updated(&self) -> impl DoubleEndedIterator<Item = (&K, &V)> {
        self.values(&self.updated)
    }

    /// The entries that the last batch deleted, in ascending order of keys, with their former values.
    pub fn deleted(&self) -> impl DoubleEndedIterator<Item = (&K, &V)> {
        self.deleted.iter()
    }

    fn values<'a>(&'a self, keys: &'a BTreeSet<K>) -> impl DoubleEndedIterator<Item = (&'a K, &'a V)> {
        keys.iter().filter_map(|key| self.entries.get_key_value(key))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        Set(u8, u8),
        Delete(u8),
        Reset,
        Keep(u8),
        Done,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            6 => (0_u8..8, 0_u8..3).prop_map(|(key, value)| Step::Set(key, value)),
            2 => (0_u8..8).prop_map(Step::Delete),
            1 => Just(Step::Reset),
            1 => any::<u8>().prop_map(Step::Keep),
            2 => Just(Step::Done),
        ]
    }

    proptest! {
        #[test]
        fn the_difference_is_that_of_two_maps(steps in proptest::collection::vec(step(), 0..60)) {
            let mut store = DiffStore::new();
            let (mut before, mut now) = (BTreeMap::new(), BTreeMap::new());
            for step in steps {
                match step {
                    Step::Set(key, value) => {
                        store.set(key, value);
                        now.insert(key, value);
                    }
                    Step::Delete(key) => {
                        store.delete(&key);
                        now.remove(&key);
                    }
                    Step::Reset => {
                        store.reset();
                        now.clear();
                    }
                    Step::Keep(keys) => {
                        let is_kept = |key: &u8| keys & (1 << key) != 0;
                        store.keep(is_kept);
                        now.extend(before.iter().filter(|(key, _)| is_kept(key)));
                    }
                    Step::Done => {
                        store.done();
                        let is_other = |key: &u8, value: &u8| before.get(key).is_some_and(|it| it != value);
                        let created = now.iter().filter(|(key, _)| !before.contains_key(*key));
                        let updated = now.iter().filter(|(key, value)| is_other(key, value));
                        let deleted = before.iter().filter(|(key, _)| !now.contains_key(*key));
                        prop_assert!(store.created().eq(created) && store.updated().eq(updated));
                        prop_assert!(store.deleted().eq(deleted));
                        before = now.clone();
                    }
                }
                prop_assert!(store.iter().eq(now.iter()));
                for key in 0..8 {
                    prop_assert_eq!(store.get(&key), now.get(&key));
                }
            }
        }
    }
}
