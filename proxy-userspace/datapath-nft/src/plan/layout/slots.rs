//! The slots of a set of endpoints.
//!
//! Invariant: an endpoint that stays keeps its slot, unless it is beyond the new end.

use std::{collections::HashSet, net::SocketAddr, sync::Arc};

use model::state::TargetDiff;

/// The endpoints of a set by slot; the set itself while that is their order.
pub(crate) type Slots = Arc<[SocketAddr]>;

/// Changes a sorted set and its slots by a difference; `None` if it does not fit.
pub(super) fn change_set(set: &mut Arc<[SocketAddr]>, slots: &mut Slots, change: &TargetDiff) -> Option<()> {
    let (mut new_set, mut new_slots) = (set.to_vec(), slots.to_vec());
    for it in &change.removed {
        new_set.remove(new_set.binary_search(it).ok()?);
    }
    for it in &change.added {
        new_set.insert(new_set.binary_search(it).err()?, *it);
    }
    let removed = new_slots.iter().enumerate().filter(|(_, it)| change.removed.binary_search(it).is_ok());
    let mut free: Vec<_> = removed.map(|(slot, _)| slot).collect();
    for it in &change.added {
        match free.pop() {
            Some(slot) => new_slots[slot] = *it,
            None => new_slots.push(*it),
        }
    }
    for slot in free.into_iter().rev() {
        new_slots.swap_remove(slot);
    }
    *set = new_set.into();
    *slots = shared(new_slots, set);
    Some(())
}

/// Slots, or the set itself if that is their order.
fn shared(slots: Vec<SocketAddr>, set: &Arc<[SocketAddr]>) -> Slots {
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
    shared(slots.into_iter().filter_map(|it| it.or_else(|| others.next())).collect(), new)
}
