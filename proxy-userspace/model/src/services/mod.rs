//! The Services of a node's state: an ordered map that is cheap to copy.
//!
//! The one rule: what is not changed is shared.
//! A copy costs one reference; a change copies the way to it, a few hundred bytes at any size; a difference is found
//! without a look at what two maps share.

mod diff;
mod edit;
mod iter;
mod tree;

use std::{collections::BTreeMap, fmt, ops::Index, sync::Arc};

use crate::{ServiceName, state::ServiceState};

use self::tree::Node;

pub use diff::Diff;
pub use edit::Edit;
pub use iter::Iter;

/// Services by name, in the order of their names. A Service is filed under the name that it bears.
#[derive(Clone, Default)]
pub struct Services {
    root: Option<Arc<Node>>,
    len: usize,
}

impl Services {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// One Service.
    pub fn get(&self, name: &ServiceName) -> Option<&Arc<ServiceState>> {
        self.root.as_ref()?.get(name)
    }

    /// Whether a Service is there.
    pub fn contains_key(&self, name: &ServiceName) -> bool {
        self.get(name).is_some()
    }

    /// All Services with their names, in order.
    pub fn iter(&self) -> Iter<'_> {
        Iter::new(self.root.as_ref(), self.len)
    }

    /// The names, in order.
    pub fn keys(&self) -> impl Iterator<Item = &ServiceName> {
        self.iter().map(|(name, _)| name)
    }

    /// The Services, in the order of their names.
    pub fn values(&self) -> impl Iterator<Item = &Arc<ServiceState>> {
        self.iter().map(|(_, state)| state)
    }

    /// Adds a Service, or puts it in the place of the one of the same name; returns that one.
    pub fn insert(&mut self, state: impl Into<Arc<ServiceState>>) -> Option<Arc<ServiceState>> {
        let state = state.into();
        let old = self.get(&state.service.name).cloned();
        Edit::set(state).apply(self);
        old
    }

    /// Takes a Service away and returns it.
    pub fn remove(&mut self, name: &ServiceName) -> Option<Arc<ServiceState>> {
        let old = self.get(name).cloned()?;
        Edit::delete(name.clone()).apply(self);
        Some(old)
    }

    /// What differs from `before`, in the order of the names: costs what differs, where one map came from the other.
    ///
    /// Services of the same value do not differ.
    pub fn diff<'a>(&'a self, before: &'a Self) -> Diff<'a> {
        Diff::new(before.root.as_ref(), self.root.as_ref())
    }

    /// Takes from `before` the Services that are of the same value here, so that both maps share them.
    pub fn reuse_equal(&mut self, before: &Self) {
        if self == before {
            *self = before.clone();
            return;
        }
        let copies = Diff::of_pointers(before.root.as_ref(), self.root.as_ref());
        let same = copies.filter_map(|(_, old, new)| old.filter(|old| new == Some(*old)));
        for state in same.cloned().collect::<Vec<_>>() {
            Edit::replace(state).apply(self);
        }
    }

    /// Whether both are one map in memory: nothing was ever changed between them.
    pub fn ptr_eq(&self, other: &Self) -> bool {
        match (&self.root, &other.root) {
            (None, None) => true,
            (Some(a), Some(b)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }
}

impl PartialEq for Services {
    fn eq(&self, other: &Self) -> bool {
        self.len == other.len && self.diff(other).next().is_none()
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

    /// One Service that is known to be there; panics if it is not.
    fn index(&self, name: &ServiceName) -> &Self::Output {
        self.get(name).expect("the service is there")
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
    /// Of two Services of one name, the last one counts.
    fn from_iter<I: IntoIterator<Item = Arc<ServiceState>>>(states: I) -> Self {
        let mut states: Vec<_> = states.into_iter().collect();
        if !states.is_sorted_by(|a, b| a.service.name < b.service.name) {
            let by_name: BTreeMap<_, _> =
                states.into_iter().map(|state| (state.service.name.clone(), state)).collect();
            states = by_name.into_values().collect();
        }
        Self { len: states.len(), root: tree::build(states) }
    }
}

impl FromIterator<(ServiceName, Arc<ServiceState>)> for Services {
    /// The names must be those of the Services.
    fn from_iter<I: IntoIterator<Item = (ServiceName, Arc<ServiceState>)>>(states: I) -> Self {
        let own = |(name, state): (ServiceName, Arc<ServiceState>)| {
            debug_assert_eq!(name, state.service.name, "a service is filed under the name it bears");
            state
        };
        states.into_iter().map(own).collect()
    }
}

impl From<BTreeMap<ServiceName, Arc<ServiceState>>> for Services {
    fn from(states: BTreeMap<ServiceName, Arc<ServiceState>>) -> Self {
        states.into_iter().collect()
    }
}

#[cfg(test)]
mod tests;
