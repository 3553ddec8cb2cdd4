//! The Services of a node state: an ordered, persistent map.
//!
//! Invariant: copies share what did not change.
//! A copy costs one reference; a change copies the path to one leaf, a few hundred bytes at any size; a diff skips what
//! both maps share.
//!
//! It is hand-written because an [`Edit`] that is applied to many maps must leave them sharing the result, and because
//! the common persistent maps (`im`, `imbl`, `rpds`) are under the MPL-2.0, which `deny.toml` does not allow.

mod diff;
mod edit;
mod iter;
mod tree;

use std::{collections::BTreeMap, fmt, ops::Index, sync::Arc};

use crate::{ServiceName, state::ServiceState};

use self::tree::Tree;

pub use diff::Diff;
pub use edit::Edit;
pub use iter::Iter;

/// Services in the order of their names. The key of a Service is its own name.
#[derive(Clone, Default)]
pub struct Services(Tree);

impl Services {
    /// The number of Services.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether there is no Service.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// One Service.
    pub fn get(&self, name: &ServiceName) -> Option<&Arc<ServiceState>> {
        self.0.get(name)
    }

    /// Whether there is a Service of this name.
    pub fn contains_key(&self, name: &ServiceName) -> bool {
        self.get(name).is_some()
    }

    /// All Services with their names, in order.
    pub fn iter(&self) -> Iter<'_> {
        Iter::new(&self.0)
    }

    /// The names, in order.
    pub fn keys(&self) -> impl Iterator<Item = &ServiceName> {
        self.iter().map(|(name, _)| name)
    }

    /// The Services, in the order of their names.
    pub fn values(&self) -> impl Iterator<Item = &Arc<ServiceState>> {
        self.iter().map(|(_, state)| state)
    }

    /// Adds a Service, or replaces the one of the same name, which is returned.
    pub fn insert(&mut self, state: impl Into<Arc<ServiceState>>) -> Option<Arc<ServiceState>> {
        let state = state.into();
        let old = self.get(&state.service.name).cloned();
        self.apply(&mut Edit::set(state));
        old
    }

    /// Removes a Service and returns it.
    pub fn remove(&mut self, name: &ServiceName) -> Option<Arc<ServiceState>> {
        let old = self.get(name).cloned()?;
        self.apply(&mut Edit::delete(name.clone()));
        Some(old)
    }

    /// Applies a change; false if there is nothing to change.
    pub fn apply(&mut self, edit: &mut Edit) -> bool {
        edit.apply(&mut self.0)
    }

    /// The differences from `before`, in the order of the names; equal Services do not differ.
    ///
    /// If one map was made from the other, the cost is proportional to the difference.
    pub fn diff<'a>(&'a self, before: &'a Self) -> Diff<'a> {
        Diff::new(&before.0, &self.0)
    }

    /// Replaces the Services that are equal in `before` by the objects in `before`, so that both maps share them.
    pub fn reuse_equal(&mut self, before: &Self) {
        if self == before {
            *self = before.clone();
            return;
        }
        let copies = Diff::of_pointers(&before.0, &self.0);
        let equal = copies.filter_map(|(_, old, new)| old.filter(|old| new == Some(*old)));
        for state in equal.cloned().collect::<Vec<_>>() {
            self.apply(&mut Edit::replace(state));
        }
    }

    /// Whether both are the same map in memory: nothing was changed between them.
    pub fn ptr_eq(&self, other: &Self) -> bool {
        match (&self.0.root, &other.0.root) {
            (None, None) => true,
            (Some(a), Some(b)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }
}

impl PartialEq for Services {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && self.diff(other).next().is_none()
    }
}

impl Eq for Services {}

impl fmt::Debug for Services {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self).finish()
    }
}

impl Index<&ServiceName> for Services {
    type Output = Arc<ServiceState>;

    /// One Service; panics if there is none of this name.
    fn index(&self, name: &ServiceName) -> &Self::Output {
        self.get(name).expect("there is a Service of this name")
    }
}

impl<'a> IntoIterator for &'a Services {
    type Item = (&'a ServiceName, &'a Arc<ServiceState>);
    type IntoIter = Iter<'a>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl FromIterator<Arc<ServiceState>> for Services {
    /// Of several Services of the same name, the last one remains.
    fn from_iter<I: IntoIterator<Item = Arc<ServiceState>>>(states: I) -> Self {
        let mut states: Vec<_> = states.into_iter().collect();
        if !states.is_sorted_by(|a, b| a.service.name < b.service.name) {
            let by_name: BTreeMap<_, _> =
                states.into_iter().map(|state| (state.service.name.clone(), state)).collect();
            states = by_name.into_values().collect();
        }
        Self(Tree::build(&states))
    }
}

impl FromIterator<(ServiceName, Arc<ServiceState>)> for Services {
    /// The names must be those of the Services.
    fn from_iter<I: IntoIterator<Item = (ServiceName, Arc<ServiceState>)>>(states: I) -> Self {
        let state = |(name, state): (ServiceName, Arc<ServiceState>)| {
            debug_assert_eq!(name, state.service.name, "the key of a Service is its own name");
            state
        };
        states.into_iter().map(state).collect()
    }
}

#[cfg(test)]
mod tests;
