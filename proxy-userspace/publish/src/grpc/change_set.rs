//! A change set: the operations that lead from one state to another.
//!
//! The operations are encoded one by one, when they are sent: a slow client costs no more than both states and a few words
//! per change.

use std::collections::VecDeque;

use proxy_contract::localv1::{OpItem, Ref, Set, Value, op_item::Op};

/// The difference between two states.
pub(super) trait Diff: Send + 'static {
    /// What is set and deleted together.
    type Kind: Copy;
    /// The order of the operations.
    const PHASES: &'static [Phase<Self::Kind>];

    /// Called at the start of each phase, so that the changes can be sorted for it in ascending order of paths.
    fn sort_for(&mut self, _: Phase<Self::Kind>) {}

    /// The number of changes that may have operations of a kind.
    fn len(&self, kind: Self::Kind) -> usize;

    /// Appends the operations that a phase has for the change at `index`; `out` is empty.
    fn operations(&self, phase: Phase<Self::Kind>, index: usize, out: &mut VecDeque<OpItem>);
}

/// One pass over the changes: sets in ascending order, deletes in descending order of paths.
#[derive(Clone, Copy)]
pub(super) enum Phase<K> {
    Set(K),
    Delete(K),
}

/// The operations of a difference.
pub(super) struct ChangeSet<D> {
    diff: D,
    phase: usize,
    /// How many changes this phase has passed.
    position: usize,
    ready: VecDeque<OpItem>,
}

impl<D: Diff> ChangeSet<D> {
    pub(super) fn new(diff: D) -> Self {
        Self { diff, phase: 0, position: 0, ready: VecDeque::new() }
    }
}

impl<D: Diff> Iterator for ChangeSet<D> {
    type Item = OpItem;

    fn next(&mut self) -> Option<OpItem> {
        loop {
            if let Some(item) = self.ready.pop_front() {
                return Some(item);
            }
            let phase = *D::PHASES.get(self.phase)?;
            let (Phase::Set(kind) | Phase::Delete(kind)) = phase;
            let len = self.diff.len(kind);
            if self.position == len {
                (self.phase, self.position) = (self.phase + 1, 0);
                continue;
            }
            if self.position == 0 {
                self.diff.sort_for(phase);
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
pub(super) trait Encode {
    const SET: Set;

    /// The message at a path; `None` if the value is not sent.
    fn encode(&self, path: &str) -> Option<Vec<u8>>;
}

/// A value before and after, at a path.
pub(super) struct Change<T> {
    pub(super) path: String,
    pub(super) old: Option<T>,
    pub(super) new: Option<T>,
}

impl<T: Encode> Change<T> {
    pub(super) fn set(&self) -> Option<OpItem> {
        let encode = |it: &Option<T>| it.as_ref()?.encode(&self.path);
        let new = encode(&self.new)?;
        (encode(&self.old).as_ref() != Some(&new)).then(|| set(T::SET, self.path.clone(), new))
    }

    pub(super) fn delete(&self) -> Option<OpItem> {
        let was_sent = self.old.as_ref()?.encode(&self.path).is_some();
        (was_sent && self.new.is_none()).then(|| delete(T::SET, self.path.clone()))
    }
}

pub(super) fn set(set: Set, path: String, bytes: Vec<u8>) -> OpItem {
    OpItem { op: Some(Op::Set(Value { r#ref: Some(Ref { set: set.into(), path }), bytes })) }
}

pub(super) fn delete(set: Set, path: String) -> OpItem {
    OpItem { op: Some(Op::Delete(Ref { set: set.into(), path })) }
}
