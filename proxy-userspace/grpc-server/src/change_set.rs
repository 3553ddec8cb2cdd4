//! A change set: the operations that lead from one state to another.
//!
//! Invariant: an endpoint never exists without its Service.
//! The operations are encoded one by one, when they are sent: a slow client costs no more than both states and a few words
//! per change.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use model::{
    diff,
    state::{Pod, ServiceCidr},
};
use prost::{Message as _, bytes::Bytes};
use proxy_contract::localv1::{OpItem, Ref, Set, Value, op_item::Op};

pub(crate) trait Diff: Send + 'static {
    /// The number of changes that may have operations of a kind.
    fn len(&self, kind: Kind) -> usize;

    /// Appends the operations of a phase for the change at `index`; `out` is empty.
    fn operations(&self, phase: Phase, index: usize, out: &mut VecDeque<OpItem>);
}

/// The kinds of objects, each of which is set and deleted together.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    ServiceCidrs,
    Pods,
    Nodes,
    Services,
    Endpoints,
}

/// One pass over the changes: sets in their order, deletes in the opposite order.
#[derive(Clone, Copy)]
pub(crate) enum Phase {
    Set(Kind),
    Delete(Kind),
}

const PHASES: [Phase; 10] = [
    Phase::Set(Kind::ServiceCidrs),
    Phase::Set(Kind::Pods),
    Phase::Set(Kind::Nodes),
    Phase::Set(Kind::Services),
    Phase::Set(Kind::Endpoints),
    Phase::Delete(Kind::Endpoints),
    Phase::Delete(Kind::Services),
    Phase::Delete(Kind::Nodes),
    Phase::Delete(Kind::Pods),
    Phase::Delete(Kind::ServiceCidrs),
];

pub(crate) struct ChangeSet<D> {
    pub(crate) diff: D,
    phase: usize,
    /// The number of changes that this phase has passed.
    position: usize,
    ready: VecDeque<OpItem>,
}

impl<D: Diff> ChangeSet<D> {
    pub(crate) fn new(diff: D) -> Self {
        Self { diff, phase: 0, position: 0, ready: VecDeque::new() }
    }

    /// Puts an operation before the others.
    pub(crate) fn begin_with(&mut self, item: OpItem) {
        self.ready.push_front(item);
    }
}

impl<D: Diff> Iterator for ChangeSet<D> {
    type Item = OpItem;

    fn next(&mut self) -> Option<OpItem> {
        loop {
            if let Some(item) = self.ready.pop_front() {
                return Some(item);
            }
            let phase = *PHASES.get(self.phase)?;
            let (Phase::Set(kind) | Phase::Delete(kind)) = phase;
            let len = self.diff.len(kind);
            if self.position == len {
                (self.phase, self.position) = (self.phase + 1, 0);
                continue;
            }
            let index = match phase {
                Phase::Set(_) => self.position,
                Phase::Delete(_) => len - 1 - self.position,
            };
            self.position += 1;
            self.diff.operations(phase, index, &mut self.ready);
        }
    }
}

/// A value of a set.
pub(crate) trait Encode {
    const SET: Set;

    fn encode(&self) -> Vec<u8>;
}

/// A value before and after, at a path.
pub(crate) struct Change<T> {
    pub(crate) path: String,
    pub(crate) old: Option<T>,
    pub(crate) new: Option<T>,
}

impl<T: Encode> Change<T> {
    pub(crate) fn set(&self) -> Option<OpItem> {
        let new = self.new.as_ref()?.encode();
        let is_same = self.old.as_ref().is_some_and(|it| it.encode() == new);
        (!is_same).then(|| set(T::SET, self.path.clone(), new))
    }

    pub(crate) fn delete(&self) -> Option<OpItem> {
        (self.old.is_some() && self.new.is_none()).then(|| delete(T::SET, self.path.clone()))
    }
}

impl Encode for Arc<ServiceCidr> {
    const SET: Set = Set::ServiceCidrsSet;

    fn encode(&self) -> Vec<u8> {
        wire::service_cidr(self).encode_to_vec()
    }
}

/// The ServiceCIDRs or pods that differ, if the client receives them, each at the path that `path` makes of its name.
pub(crate) fn differing<T: PartialEq>(
    is_received: bool,
    old: &BTreeMap<Arc<str>, Arc<T>>,
    new: &BTreeMap<Arc<str>, Arc<T>>,
    path: impl Fn(&str) -> String,
) -> Vec<Change<Arc<T>>> {
    if !is_received {
        return Vec::new();
    }
    let change = |(name, old, new): (&Arc<str>, Option<&Arc<_>>, Option<&Arc<_>>)| Change {
        path: path(name),
        old: old.cloned(),
        new: new.cloned(),
    };
    diff::differing(old, new).map(change).collect()
}

impl Encode for Arc<Pod> {
    const SET: Set = Set::PodsSet;

    fn encode(&self) -> Vec<u8> {
        wire::pod(self).encode_to_vec()
    }
}

pub(crate) fn set(set: Set, path: String, bytes: impl Into<Bytes>) -> OpItem {
    OpItem { op: Some(Op::Set(Value { r#ref: Some(Ref { set: set.into(), path }), bytes: bytes.into() })) }
}

pub(crate) fn delete(set: Set, path: String) -> OpItem {
    OpItem { op: Some(Op::Delete(Ref { set: set.into(), path })) }
}
