//! Elements of maps and sets, and differences between many of them.

use std::collections::BTreeMap;

use model::Family;

use crate::encode::{
    expressions::Verdict,
    schema::{Bytes, Map, Parts},
};

/// A key in a map or a set of one table.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Element {
    /// The family of the table.
    pub(crate) family: Family,
    pub(crate) map: Map,
    /// Which list of source ranges, if the map has a set for each; otherwise 0.
    pub(crate) list: u32,
    pub(crate) key: Bytes,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Value {
    /// None: it is an element of a set.
    None,
    /// It ends a range: this key and the following ones are not in the set, until the next range begins.
    RangeEnd,
    /// None, and after so many seconds the kernel deletes it.
    Expiring(u32),
    Data(Bytes),
    Verdict(Verdict),
    /// The name of a counter.
    Counter(Bytes),
}

pub(crate) type Elements = BTreeMap<Element, Value>;

/// A difference between elements. Deletions come first; an element whose data changes is in both.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Changes {
    pub(crate) delete: Elements,
    pub(crate) add: Elements,
}

impl Changes {
    pub(crate) fn between(before: &Elements, after: &Elements) -> Self {
        let mut changes = Self::default();
        for (element, value) in before {
            if after.get(element) != Some(value) {
                changes.delete.insert(element.clone(), value.clone());
            }
        }
        for (element, value) in after {
            if before.get(element) != Some(value) {
                changes.add.insert(element.clone(), value.clone());
            }
        }
        changes
    }

    pub(crate) fn add(&mut self, element: Element, value: Value) {
        if self.delete.get(&element) == Some(&value) {
            self.delete.remove(&element);
        } else {
            self.add.insert(element, value);
        }
    }

    pub(crate) fn delete(&mut self, element: Element, value: Value) {
        if self.add.get(&element) == Some(&value) {
            self.add.remove(&element);
        } else {
            self.delete.insert(element, value);
        }
    }

    /// Deletes and adds what other changes do.
    pub(crate) fn extend(&mut self, Self { delete, add }: Self) {
        delete.into_iter().for_each(|(element, value)| self.delete(element, value));
        add.into_iter().for_each(|(element, value)| self.add(element, value));
    }

    /// Takes out the changes of one family.
    pub(crate) fn take(&mut self, family: Family) -> Self {
        let take = |all: &mut Elements| all.extract_if(.., |it, _| it.family == family).collect();
        Self { delete: take(&mut self.delete), add: take(&mut self.add) }
    }

    pub(crate) fn len(&self) -> usize {
        self.delete.len() + self.add.len()
    }
}

impl Element {
    /// An element of a map of which the table has exactly one.
    pub(crate) fn new(family: Family, map: Map, key: Bytes) -> Self {
        Self { family, map, list: 0, key }
    }

    pub(crate) fn parts(&self) -> Parts<'_> {
        Parts::of(&self.key, self.family)
    }
}
