//! The names of nodes, each in memory once: thousands of endpoints have the same.
//!
//! Invariant: a name that no object has any more is dropped before the memory for the names grows.

use std::{
    collections::HashSet,
    sync::{Arc, LazyLock},
};

use parking_lot::Mutex;

static NAMES: LazyLock<Mutex<HashSet<Arc<str>>>> = LazyLock::new(Mutex::default);

/// A name of a node, in the memory that other objects with the same name use already.
pub(super) fn shared(name: Arc<str>) -> Arc<str> {
    let mut names = NAMES.lock();
    if let Some(known) = names.get(&name) {
        return Arc::clone(known);
    }
    if names.len() == names.capacity() {
        names.retain(|it| Arc::strong_count(it) > 1);
    }
    names.insert(Arc::clone(&name));
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_kept_once_while_an_object_has_it() {
        let [a, b] = [0, 1].map(|_| shared("a-node-of-this-test".into()));
        assert!(Arc::ptr_eq(&a, &b));
        drop(b);
        let count = |prefix: &str| {
            let names = NAMES.lock();
            names.iter().filter(|it| it.starts_with(prefix)).count()
        };
        for n in 0..1_000 {
            drop(shared(format!("gone-{n}").into()));
        }
        assert!(count("gone-") < 1_000, "those that are gone are dropped");
        assert_eq!(count("a-node-of-this-test"), 1);
    }
}
