//! The slots of a set of endpoints.
//!
//! Invariant: an endpoint that stays keeps its slot, unless it is beyond the new end.

use std::{collections::HashSet, net::SocketAddr, sync::Arc};

use model::state::TargetDiff;

/// The endpoints of a set by slot; the set itself while that is their order.
pub(crate) type Slots = Arc<[SocketAddr]>;

/// Changes a sorted set and its slots by a difference; `None` if it does not fit. `scratch` is memory for the changes: a Service
/// can have thousands of sets.
pub(super) fn change_set(
    set: &mut Arc<[SocketAddr]>,
    slots: &mut Slots,
    change: &TargetDiff,
    scratch: &mut Vec<SocketAddr>,
) -> Option<()> {
    scratch.clear();
    scratch.extend_from_slice(set);
    for it in &change.removed {
        scratch.remove(scratch.binary_search(it).ok()?);
    }
    for it in &change.added {
        scratch.insert(scratch.binary_search(it).err()?, *it);
    }
    *set = Arc::from(&**scratch);
    let removed = slots.iter().enumerate().filter(|(_, it)| change.removed.binary_search(it).is_ok());
    let mut free: Vec<_> = removed.map(|(slot, _)| slot).collect();
    scratch.clear();
    scratch.extend_from_slice(slots);
    for it in &change.added {
        match free.pop() {
            Some(slot) => scratch[slot] = *it,
            None => scratch.push(*it),
        }
    }
    for slot in free.into_iter().rev() {
        scratch.swap_remove(slot);
    }
    *slots = shared(scratch, set);
    Some(())
}

/// Slots, or the set itself if that is their order.
fn shared(slots: &[SocketAddr], set: &Arc<[SocketAddr]>) -> Slots {
    if *slots == **set { Arc::clone(set) } else { slots.into() }
}

/// An endpoint that stays keeps its slot; a new one, or one beyond the new end, gets a free one.
pub(super) fn place(old: &[SocketAddr], new: &Arc<[SocketAddr]>) -> Slots {
    let desired: HashSet<_> = new.iter().collect();
    let mut placed = HashSet::new();
    let mut stays = |it: &SocketAddr| (desired.contains(it) && placed.insert(*it)).then_some(*it);
    let mut slots: Vec<_> = old.iter().take(new.len()).map(&mut stays).collect();
    slots.resize(new.len(), None);
    let mut others = new.iter().filter(|it| !placed.contains(it)).copied();
    let slots: Vec<_> = slots.into_iter().filter_map(|it| it.or_else(|| others.next())).collect();
    shared(&slots, new)
}
