//! The Node objects that differ between two states: compared and encoded once for all clients that go from one to the other.
//!
//! Invariant: a client among thousands holds none of them itself, and receives what it would alone.

use std::{collections::VecDeque, sync::Arc};

use model::{
    diff,
    state::{NodeInfo, NodeInfos},
};
use parking_lot::Mutex;
use prost::{Message as _, bytes::Bytes};
use proxy_contract::localv1::{OpItem, Set};

use super::change_set::{delete, set};

/// The number of kept comparisons: clients are at the newest nodes, at the previous ones, or have none yet.
const MAX_KEPT: usize = 4;

/// A Node that differs.
pub(crate) struct NodeChange {
    name: Arc<str>,
    /// The encoded Node; `None` if it was deleted.
    new: Option<Bytes>,
}

impl NodeChange {
    pub(crate) fn set(&self) -> Option<OpItem> {
        self.new.as_ref().map(|it| set(Set::NodesSet, self.name.to_string(), it.clone()))
    }

    pub(crate) fn delete(&self) -> Option<OpItem> {
        self.new.is_none().then(|| delete(Set::NodesSet, self.name.to_string()))
    }
}

/// The comparisons that were made last.
#[derive(Default)]
pub(crate) struct NodeChanges(Mutex<VecDeque<Comparison>>);

struct Comparison {
    old: NodeInfos,
    new: NodeInfos,
    changes: Arc<[NodeChange]>,
}

impl NodeChanges {
    /// The Nodes that differ, in ascending order of names; kept for others if it `is_shared`.
    pub(crate) fn between(&self, old: &NodeInfos, new: &NodeInfos, is_shared: bool) -> Arc<[NodeChange]> {
        let is_same = |a: &NodeInfos, b: &NodeInfos| Arc::ptr_eq(a, b) || (a.is_empty() && b.is_empty());
        if is_same(old, new) {
            return Arc::default();
        }
        if !is_shared {
            return compare(old, new);
        }
        // Held during the comparison: others wait for the one that they need, too.
        let mut kept = self.0.lock();
        if let Some(it) = kept.iter().find(|it| is_same(&it.old, old) && is_same(&it.new, new)) {
            return Arc::clone(&it.changes);
        }
        let changes = compare(old, new);
        kept.truncate(MAX_KEPT - 1);
        kept.push_front(Comparison {
            old: Arc::clone(old),
            new: Arc::clone(new),
            changes: Arc::clone(&changes),
        });
        changes
    }
}

fn compare(old: &NodeInfos, new: &NodeInfos) -> Arc<[NodeChange]> {
    let differing = diff::pairs(&**old, &**new).filter(|(_, old, new)| old != new);
    let encode = |name: &str, it: &NodeInfo| Bytes::from(wire::node(name, it).encode_to_vec());
    let changes = differing.filter_map(|(name, old, new)| {
        let encoded = new.map(|it| encode(name, it));
        // Not all that a node has is sent.
        let is_sent = encoded.is_none() || encoded != old.map(|it| encode(name, it));
        is_sent.then(|| NodeChange { name: Arc::clone(name), new: encoded })
    });
    changes.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(all: &[(&str, u8)]) -> NodeInfos {
        let info = |n: u8| NodeInfo { addresses: vec![[10, 0, 0, n].into()], ..NodeInfo::default() };
        Arc::new(all.iter().map(|(name, n)| (Arc::from(*name), info(*n))).collect())
    }

    #[test]
    fn clients_share_what_they_receive_alike() {
        let all = NodeChanges::default();
        let (old, new) = (nodes(&[("a", 1), ("b", 2), ("c", 3)]), nodes(&[("a", 1), ("b", 4), ("d", 5)]));
        let change = all.between(&old, &new, true);
        let sent: Vec<_> =
            change.iter().map(|it| (&*it.name, it.set().is_some(), it.delete().is_some())).collect();
        assert_eq!(sent, [("b", true, false), ("c", false, true), ("d", true, false)]);
        assert!(Arc::ptr_eq(&change, &all.between(&old, &new, true)));
        assert!(!Arc::ptr_eq(&change, &all.between(&old, &new, false)), "one alone keeps nothing");
        assert!(all.between(&new, &new, true).is_empty());
        // Of clients that have nothing yet, each has an empty map of its own.
        let first = all.between(&NodeInfos::default(), &new, true);
        assert_eq!(first.len(), 3);
        assert!(Arc::ptr_eq(&first, &all.between(&NodeInfos::default(), &new, true)));
    }

    #[test]
    fn the_number_of_kept_comparisons_is_bounded() {
        let all = NodeChanges::default();
        for n in 0..20 {
            all.between(&nodes(&[("a", n)]), &nodes(&[("a", n + 1)]), true);
        }
        assert_eq!(all.0.lock().len(), MAX_KEPT);
    }
}
