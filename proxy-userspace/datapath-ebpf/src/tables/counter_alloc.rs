//! Allocates counters to service ports and their backends.
//!
//! Invariant: a counter has one owner until no program can increment it any more. Only [`CounterAllocator::reclaim`] frees
//! counters, and its caller knows when that is.

use std::{
    collections::hash_map::Entry,
    hash::Hasher as _,
    net::{IpAddr, SocketAddr},
};

use nohash_hasher::{IntMap, IsEnabled};
use proxy_common::counters::{COUNTERS_PER_PORT, CounterIndex, MAX_CHUNKS, NO_COUNTER, chunk_of};
use twox_hash::XxHash64;

/// The owner of counters: a service port or one of its backends, as a hash. Never 0, which stands for no owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct CounterOwner(pub(crate) u64);

impl IsEnabled for CounterOwner {}

/// The parts of [`ForwardCounters`](proxy_common::counters::ForwardCounters).
#[derive(Clone, Copy, Debug)]
pub(crate) enum ForwardPart {
    Arrived,
    Forwarded,
}

impl CounterOwner {
    /// The service port of this id ([`proxy_common::tables::Frontend::service_port`]).
    pub(crate) fn port(port_id: u64) -> Self {
        Self(port_id.max(1))
    }

    /// The packets of a service port that are forwarded: its first or its second part.
    pub(crate) fn forwarded(port_id: u64, part: ForwardPart) -> Self {
        let mut hash = XxHash64::with_seed(port_id);
        hash.write_u8(part as u8);
        Self(hash.finish().max(1))
    }

    pub(crate) fn backend(port_id: u64, backend: SocketAddr) -> Self {
        let mut hash = XxHash64::with_seed(port_id);
        match backend.ip() {
            IpAddr::V4(ip) => hash.write(&ip.octets()),
            IpAddr::V6(ip) => hash.write(&ip.octets()),
        }
        hash.write(&backend.port().to_be_bytes());
        Self(hash.finish().max(1))
    }
}

#[derive(Debug, Default)]
pub(crate) struct CounterAllocator {
    allocations: IntMap<CounterOwner, Allocation>,
    /// Owners that no table entry referred to at some time.
    idle: Vec<CounterOwner>,
    reclaims: u32,
    /// Backends that were removed from a set, or whose counter was freed, and their counters.
    removed: Vec<(CounterOwner, CounterIndex)>,
    free_singles: Vec<CounterIndex>,
    /// Free blocks of [`COUNTERS_PER_PORT`], by their first counter.
    free_blocks: Vec<CounterIndex>,
    /// The first counter that was never allocated.
    next: CounterIndex,
    /// Counters and their new owners that are not written to the kernel yet, 0 for none; of one counter the last one counts.
    pending: Vec<(CounterIndex, u64)>,
}

#[derive(Clone, Copy, Debug)]
struct Allocation {
    first: CounterIndex,
    /// Whether it is a block of [`COUNTERS_PER_PORT`].
    is_block: bool,
    /// How many table entries refer to it.
    uses: u32,
    /// If none: since which call of [`CounterAllocator::reclaim`].
    idle_since: u32,
    /// Whether it was reported as removed since it was used last.
    is_removed: bool,
}

impl CounterAllocator {
    /// Restores the allocations of an earlier instance from the owner of each counter of all chunks, in order.
    ///
    /// The second [`CounterAllocator::reclaim`] frees those that were not acquired before.
    pub(crate) fn restore(owners: &[u64]) -> Self {
        let mut it =
            Self { next: CounterIndex::try_from(owners.len()).unwrap_or(NO_COUNTER), ..Self::default() };
        let blocks = owners.chunks_exact(COUNTERS_PER_PORT as usize);
        for (block, first) in blocks.zip((0..).step_by(COUNTERS_PER_PORT as usize)) {
            match *block {
                [0, 0, 0, 0] => it.free_blocks.push(first),
                // A backend has one counter only.
                [owner, ..] if block.iter().all(|it| *it == owner) => it.adopt(owner, first, true),
                _ => {
                    for (owner, counter) in block.iter().zip(first..) {
                        match *owner {
                            0 => it.free_singles.push(counter),
                            owner => it.adopt(owner, counter, false),
                        }
                    }
                }
            }
        }
        // The lowest ones are allocated first.
        it.free_blocks.reverse();
        it.free_singles.reverse();
        it
    }

    fn adopt(&mut self, owner: u64, first: CounterIndex, is_block: bool) {
        let owner = CounterOwner(owner);
        if let Some(duplicate) = self
            .allocations
            .insert(owner, Allocation { first, is_block, uses: 0, idle_since: 0, is_removed: false })
        {
            // The earlier instance died between writes to two chunks.
            self.free(owner, duplicate);
        }
        self.idle.push(owner);
    }

    /// Reserves memory for so many more owners, so that inserting them does not rehash again and again.
    pub(crate) fn reserve(&mut self, owners: usize) {
        self.allocations.reserve(owners);
    }

    /// The first counter of a service port.
    pub(crate) fn acquire_port(&mut self, owner: CounterOwner) -> CounterIndex {
        self.acquire(owner, true)
    }

    pub(crate) fn acquire_backend(&mut self, owner: CounterOwner) -> CounterIndex {
        self.acquire(owner, false)
    }

    fn acquire(&mut self, owner: CounterOwner, is_block: bool) -> CounterIndex {
        if let Entry::Occupied(mut entry) = self.allocations.entry(owner) {
            let allocation = entry.get_mut();
            if allocation.is_block == is_block {
                allocation.uses += 1;
                let first = allocation.first;
                if std::mem::take(&mut allocation.is_removed) {
                    // It is back.
                    self.pending.push((first, owner.0));
                }
                return first;
            }
            // A partly written block: the earlier instance died before a table entry referred to it.
            let partial = entry.remove();
            self.free(owner, partial);
        }
        let found = if is_block { self.take_block() } else { self.take_single() };
        let Some(first) = found else { return NO_COUNTER };
        let allocation = Allocation { first, is_block, uses: 1, idle_since: 0, is_removed: false };
        self.allocations.insert(owner, allocation);
        self.assign(allocation, owner.0);
        first
    }

    /// A table entry that referred to the owner's counters was removed.
    pub(crate) fn release(&mut self, owner: CounterOwner) {
        if let Some(allocation) = self.allocations.get_mut(&owner) {
            allocation.uses = allocation.uses.saturating_sub(1);
            if allocation.uses == 0 {
                allocation.idle_since = self.reclaims;
                self.idle.push(owner);
                if !allocation.is_block {
                    self.removed.push((owner, allocation.first));
                }
            }
        }
    }

    /// The first counter of an owner.
    pub(crate) fn counter_of(&self, owner: CounterOwner) -> CounterIndex {
        self.allocations.get(&owner).map_or(NO_COUNTER, |it| it.first)
    }

    /// Whether the next call of [`CounterAllocator::reclaim`] may free counters.
    pub(crate) fn has_idle(&self) -> bool {
        !self.idle.is_empty()
    }

    /// Frees the counters of owners that no table entry has referred to since the call before, but for those that
    /// connections are counted by (`is_open`). Must be called only when no running or future program can find an entry of
    /// theirs; and so rarely that connections of the time before the last call have reported to their counters.
    pub(crate) fn reclaim(&mut self, is_open: impl Fn(CounterIndex) -> bool) {
        self.reclaims += 1;
        for owner in std::mem::take(&mut self.idle) {
            let Entry::Occupied(allocation) = self.allocations.entry(owner) else { continue };
            let &Allocation { first, uses, idle_since, is_block, .. } = allocation.get();
            if uses == 0 && self.reclaims - idle_since >= 2 && (is_block || !is_open(first)) {
                let unused = allocation.remove();
                self.free(owner, unused);
            } else if uses == 0 {
                self.idle.push(owner);
            }
        }
    }

    /// The counters of backends that are in no set any more, or were freed, since the last call.
    pub(crate) fn take_removed(&mut self) -> Vec<CounterIndex> {
        let mut removed = std::mem::take(&mut self.removed);
        removed.retain(|(owner, first)| match self.allocations.get_mut(owner) {
            Some(it) if it.first == *first => {
                it.is_removed |= it.uses == 0;
                it.uses == 0
            }
            _ => true,
        });
        removed.into_iter().map(|(_, it)| it).collect()
    }

    /// Counters whose new owners must be written to the kernel, in ascending order; of one counter the newest owner is last.
    pub(crate) fn pending(&mut self) -> &[(CounterIndex, u64)] {
        self.pending.sort_by_key(|(counter, _)| *counter);
        &self.pending
    }

    /// The pending owners were written.
    pub(crate) fn flushed(&mut self) {
        // Frees the memory, of which a first state takes a lot.
        self.pending = Vec::new();
    }

    fn free(&mut self, owner: CounterOwner, allocation: Allocation) {
        self.assign(allocation, 0);
        let free = if allocation.is_block { &mut self.free_blocks } else { &mut self.free_singles };
        free.push(allocation.first);
        if !allocation.is_block {
            self.removed.push((owner, allocation.first));
        }
    }

    fn assign(&mut self, Allocation { first, is_block, .. }: Allocation, owner: u64) {
        let count = if is_block { COUNTERS_PER_PORT } else { 1 };
        self.pending.extend((first..first + count).map(|it| (it, owner)));
    }

    fn take_block(&mut self) -> Option<CounterIndex> {
        self.free_blocks.pop().or_else(|| {
            let first = self.next;
            (chunk_of(first) < MAX_CHUNKS).then(|| {
                self.next += COUNTERS_PER_PORT;
                first
            })
        })
    }

    fn take_single(&mut self) -> Option<CounterIndex> {
        if self.free_singles.is_empty() {
            let first = self.take_block()?;
            self.free_singles.extend((first..first + COUNTERS_PER_PORT).rev());
        }
        self.free_singles.pop()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    const PORT: CounterOwner = CounterOwner(100);

    fn backend(n: u64) -> CounterOwner {
        CounterOwner(200 + n)
    }

    /// Reclaims what is unused by now.
    fn reclaim(counters: &mut CounterAllocator) {
        counters.reclaim(|_| false);
        counters.reclaim(|_| false);
    }

    /// Writes the pending owners, as the maps in the kernel would hold them.
    fn flush(owners: &mut Vec<u64>, counters: &mut CounterAllocator) {
        for (counter, owner) in counters.pending() {
            let index = *counter as usize;
            owners.resize(owners.len().max(index + 1).next_multiple_of(8), 0);
            owners[index] = *owner;
        }
        counters.flushed();
    }

    #[test]
    fn an_owner_keeps_its_counters_through_a_restart() {
        let (mut counters, mut owners) = (CounterAllocator::default(), Vec::new());
        let port = counters.acquire_port(PORT);
        let singles: Vec<_> = (0..6).map(|n| counters.acquire_backend(backend(n))).collect();
        flush(&mut owners, &mut counters);
        let mut counters = CounterAllocator::restore(&owners);
        assert_eq!(counters.acquire_port(PORT), port);
        assert_eq!((0..6).map(|n| counters.acquire_backend(backend(n))).collect::<Vec<_>>(), singles);
        reclaim(&mut counters);
        assert!(counters.pending().is_empty());
    }

    #[test]
    fn counters_that_are_not_acquired_after_a_restart_are_reused() {
        let (mut counters, mut owners) = (CounterAllocator::default(), Vec::new());
        let port = counters.acquire_port(PORT);
        let single = counters.acquire_backend(backend(0));
        flush(&mut owners, &mut counters);
        let mut counters = CounterAllocator::restore(&owners);
        // Programs may still increment those of the old owners.
        assert_ne!(counters.acquire_port(CounterOwner(1)), port);
        assert_ne!(counters.acquire_backend(backend(1)), single);
        reclaim(&mut counters);
        assert_eq!(counters.acquire_port(CounterOwner(2)), port);
        assert_eq!(counters.acquire_backend(backend(2)), single);
        flush(&mut owners, &mut counters);
        assert!(!owners.contains(&PORT.0) && !owners.contains(&backend(0).0));
    }

    #[test]
    fn a_port_whose_block_was_partly_written_gets_a_block_of_its_own() {
        for written in 1..COUNTERS_PER_PORT as usize {
            let mut owners = vec![0; 2 * COUNTERS_PER_PORT as usize];
            owners[..written].fill(PORT.0);
            let mut counters = CounterAllocator::restore(&owners);
            let port = counters.acquire_port(PORT);
            flush(&mut owners, &mut counters);
            let (port, count) = (port as usize, COUNTERS_PER_PORT as usize);
            assert!(owners[port..port + count].iter().all(|it| *it == PORT.0));
            assert_eq!(
                owners.iter().filter(|it| **it == PORT.0).count(),
                count,
                "none of the old ones stays"
            );
            let others: HashSet<_> = (0..20).map(|n| counters.acquire_backend(backend(n)) as usize).collect();
            assert!(others.is_disjoint(&(port..port + count).collect()));
        }
    }

    /// Connections that began before may still report to it.
    #[test]
    fn a_counter_is_not_handed_on_at_once() {
        let mut counters = CounterAllocator::default();
        let counter = counters.acquire_backend(backend(0));
        counters.release(backend(0));
        assert_eq!(counters.take_removed(), [counter]);
        counters.reclaim(|_| false);
        assert_ne!(counters.acquire_backend(backend(1)), counter);
        // It comes and goes.
        assert_eq!(counters.acquire_backend(backend(0)), counter);
        assert!(counters.take_removed().is_empty());
        counters.release(backend(0));
        counters.reclaim(|_| false);
        assert_ne!(counters.acquire_backend(backend(1)), counter);
        counters.take_removed();
        counters.reclaim(|_| false);
        assert_eq!(counters.take_removed(), [counter], "again, for what was reported meanwhile");
        assert_eq!(counters.acquire_backend(backend(2)), counter);
    }

    #[test]
    fn a_backend_that_is_back_is_written_again_and_keeps_its_counter() {
        let mut counters = CounterAllocator::default();
        let counter = counters.acquire_backend(backend(0));
        counters.flushed();
        // From one set of its Service to another, in one change.
        counters.release(backend(0));
        counters.acquire_backend(backend(0));
        counters.take_removed();
        assert!(counters.pending().is_empty());
        counters.release(backend(0));
        counters.take_removed();
        assert_eq!(counters.acquire_backend(backend(0)), counter);
        assert_eq!(counters.pending(), [(counter, backend(0).0)]);
    }

    #[test]
    fn a_counter_is_kept_while_connections_are_open() {
        let mut counters = CounterAllocator::default();
        let counter = counters.acquire_backend(backend(0));
        counters.release(backend(0));
        for _ in 0..5 {
            counters.reclaim(|it| it == counter);
        }
        assert_eq!(counters.counter_of(backend(0)), counter);
        counters.reclaim(|_| false);
        assert_eq!(counters.counter_of(backend(0)), NO_COUNTER);
    }

    #[test]
    fn an_owner_loses_its_counters_with_its_last_entry() {
        let mut counters = CounterAllocator::default();
        let counter = counters.acquire_backend(backend(0));
        assert_eq!(counters.acquire_backend(backend(0)), counter, "the same for every entry");
        counters.release(backend(0));
        reclaim(&mut counters);
        assert_eq!(counters.counter_of(backend(0)), counter);
        counters.release(backend(0));
        assert_eq!(counters.acquire_backend(backend(0)), counter, "acquired again before it was reclaimed");
        counters.release(backend(0));
        reclaim(&mut counters);
        assert_eq!(counters.counter_of(backend(0)), NO_COUNTER);
    }
}
