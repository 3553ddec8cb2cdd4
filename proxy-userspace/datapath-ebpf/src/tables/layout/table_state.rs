//! What is allocated in the tables: ids and ranges of sets, positions of backends, and counters. Writes updates entry by entry.
//!
//! Invariant: what keeps its place costs nothing.

use std::{
    collections::HashMap,
    iter,
    net::{IpAddr, SocketAddr},
};

use datapath::FrontendAddress;
use model::{
    Family,
    diff::pairs,
    state::{EndpointDiff, PerFamily, TargetDiff},
};
use proxy_common::{counters::CounterIndex, tables::Frontend as Row};

use super::{
    ranges::{Range, RangeAllocator},
    rows::{
        backend_table, frontend_table, member_table, set_backend, set_frontend, set_member, set_node_address,
    },
};
use crate::tables::{
    compile::{Frontend, ServiceImage, SetImage},
    counter_alloc::{CounterAllocator, CounterOwner},
    map_updates::MapUpdates,
    node_addresses::NodeAddresses,
    store::Table,
};

/// What is allocated in the tables, and the updates of the change in progress.
#[derive(Debug, Default)]
pub(super) struct TableState {
    pub(super) updates: MapUpdates,
    /// The ids of sets.
    ids: RangeAllocator,
    pub(super) ranges: PerFamily<RangeAllocator>,
    pub(super) counters: CounterAllocator,
    pub(super) rows: [u32; Table::COUNT],
}

impl TableState {
    /// Replaces the sets of a Service. A set belongs to the first frontend that uses it, and keeps its id while that
    /// frontend exists.
    pub(super) fn update_service(&mut self, old: ServiceLayout, image: ServiceImage) -> ServiceLayout {
        let old_at: HashMap<FrontendAddress, usize> =
            old.frontends.iter().map(|it| (it.address, it.set)).collect();
        let mut old_sets: Vec<_> = old.sets.into_iter().map(Some).collect();
        let mut new_sets: Vec<(Option<Set>, SetImage)> =
            image.sets.into_iter().map(|it| (None, it)).collect();
        for it in &image.frontends {
            if let Some((kept @ None, image)) = new_sets.get_mut(it.set) {
                let old = old_at.get(&it.address).and_then(|at| old_sets.get_mut(*at));
                *kept = old.and_then(|it| it.take_if(|it| it.is_like(image)));
            }
        }
        // Unused sets are removed first, so that new ones can reuse their ids.
        for mut set in old_sets.into_iter().flatten() {
            self.change_set(&mut set, |_| true, iter::empty());
            self.ranges.of_mut(set.family).release(set.range);
            self.ids.release(Range { first: set.id, size: 1 });
        }
        let sets = new_sets.into_iter().map(|(kept, image)| {
            let mut set = kept.unwrap_or_else(|| Set {
                id: self.ids.allocate(1).first,
                range: Range::default(),
                port_id: image.port_id,
                family: image.family,
                has_members: image.has_members,
                is_unique: image.is_unique,
                slots: Vec::new(),
            });
            set.is_unique = image.is_unique;
            self.update_set(&mut set, &image.backends);
            set
        });
        let (mut sets, mut frontends): (Vec<_>, _) = (sets.collect(), image.frontends);
        // They are kept for long, and there are many.
        sets.shrink_to_fit();
        frontends.shrink_to_fit();
        ServiceLayout { sets, frontends, packets_only: image.packets_only }
    }

    /// Replaces the endpoints of a Service that differ, and nothing else, and returns the new backends of each set; `None` if
    /// the sets do not tell how, and then they are unchanged.
    pub(super) fn update_endpoints(
        &mut self,
        service: &mut ServiceLayout,
        diff: &EndpointDiff<'_>,
    ) -> Option<Vec<Vec<SocketAddr>>> {
        let mut changes = vec![None; service.sets.len()];
        for it in &service.frontends {
            let (set, change) = (service.sets.get(it.set)?, changes.get_mut(it.set)?);
            let new = diff.targets(it.port, set.family, it.scope());
            match change {
                None => *change = Some(new),
                // Frontends whose backends differ cannot share the set any more.
                Some(of_others) if *of_others != new => return None,
                Some(_) => {}
            }
        }
        let changes: Vec<TargetDiff> = changes.into_iter().collect::<Option<_>>()?;
        if !service.sets.iter().zip(&changes).all(|(set, change)| set.is_decided_by(change)) {
            return None;
        }
        let change = |(set, TargetDiff { removed, added }): (&mut Set, TargetDiff)| {
            self.change_set(set, |it| removed.binary_search(it).is_ok(), added.iter().copied());
            added
        };
        Some(service.sets.iter_mut().zip(changes).map(change).collect())
    }

    /// Replaces the backends of a set by these, which are sorted.
    fn update_set(&mut self, set: &mut Set, backends: &[SocketAddr]) {
        let mut old: Vec<_> = set.slots.iter().map(Slot::backend).collect();
        old.sort_unstable();
        let new = backends.iter().copied().filter(|it| old.binary_search(it).is_err());
        self.change_set(set, |it| backends.binary_search(it).is_err(), new);
    }

    /// Replaces backends of a set: one that stays keeps its slot, a new one takes the slot of a removed one, and the last ones
    /// fill the remaining gaps.
    fn change_set(
        &mut self,
        set: &mut Set,
        is_removed: impl Fn(&SocketAddr) -> bool,
        mut new: impl Iterator<Item = SocketAddr>,
    ) {
        let before = count_of(&set.slots);
        let (mut changed, mut gaps) = (Vec::new(), Vec::new());
        for position in 0..set.slots.len() {
            let it = set.slots[position];
            if is_removed(&it.backend()) {
                self.remove(set, it);
                match new.next() {
                    Some(next) => set.slots[position] = self.add(set, next),
                    None => gaps.push(position),
                }
                changed.push(position);
            }
        }
        for position in gaps.into_iter().rev() {
            set.slots.swap_remove(position);
        }
        for next in new {
            changed.push(set.slots.len());
            let it = self.add(set, next);
            set.slots.push(it);
        }
        set.slots.shrink_to_fit();
        let now = count_of(&set.slots);
        if set.range.fits(now) {
            self.clear(set, now..before);
        } else {
            self.clear(set, 0..before);
            let ranges = self.ranges.of_mut(set.family);
            ranges.release(set.range);
            set.range = ranges.allocate(now);
            changed = (0..set.slots.len()).collect();
        }
        for position in changed {
            // What moved from the end into a gap is written there; the end itself is cleared.
            if let Some(it) = set.slots.get(position) {
                let (position, entry) = (set.range.first + position as u32, (it.backend(), it.counter));
                set_backend(&mut self.updates, set.family, position, Some(entry));
            }
        }
        let rows = &mut self.rows[backend_table(set.family).index()];
        *rows = *rows + now - before;
    }

    fn clear(&mut self, set: &Set, positions: std::ops::Range<u32>) {
        for it in positions {
            set_backend(&mut self.updates, set.family, set.range.first + it, None);
        }
    }

    /// Adds a backend to a set: its counter, and its entry in the members table.
    fn add(&mut self, set: &Set, backend: SocketAddr) -> Slot {
        let counter = self.counters.acquire_backend(set.owner(backend));
        if set.has_members {
            self.rows[member_table(set.family).index()] += 1;
            set_member(&mut self.updates, set.id, backend, Some(counter));
        }
        Slot::new(backend, counter)
    }

    fn remove(&mut self, set: &Set, it: Slot) {
        self.counters.release(set.owner(it.backend()));
        if set.has_members {
            self.rows[member_table(set.family).index()] -= 1;
            set_member(&mut self.updates, set.id, it.backend(), None);
        }
    }

    pub(super) fn update_node_addresses(&mut self, old: &NodeAddresses, new: &NodeAddresses) {
        for (address, _, now) in pairs(&**old, &**new).filter(|(_, before, now)| before != now) {
            set_node_address(&mut self.updates, *address, now);
        }
        self.rows[Table::NodeAddrs.index()] = new.len() as u32;
    }

    pub(super) fn update_frontend(&mut self, address: FrontendAddress, old: Option<Row>, new: Option<Row>) {
        if old != new {
            let rows = &mut self.rows[frontend_table(address).index()];
            *rows = *rows + u32::from(new.is_some()) - u32::from(old.is_some());
            set_frontend(&mut self.updates, address, new.as_ref());
        }
    }
}

/// A Service in the tables.
#[derive(Debug, Default)]
pub(super) struct ServiceLayout {
    pub(super) frontends: Vec<Frontend>,
    pub(super) sets: Vec<Set>,
    packets_only: Vec<FrontendAddress>,
}

impl ServiceLayout {
    /// The addresses at which packets are translated beside its cluster IPs.
    pub(super) fn entry_points(&self) -> impl Iterator<Item = FrontendAddress> {
        let external = self.frontends.iter().filter(|it| it.options.is_external());
        external.map(|it| it.address).chain(self.packets_only.iter().copied())
    }

    pub(super) fn backends(&self, frontend: &Frontend) -> impl Iterator<Item = SocketAddr> {
        self.sets.get(frontend.set).into_iter().flat_map(|it| &it.slots).map(Slot::backend)
    }
}

/// A backend set in the tables.
#[derive(Debug)]
pub(super) struct Set {
    pub(super) id: u32,
    /// The positions of its slots, in order.
    pub(super) range: Range,
    port_id: u64,
    pub(super) family: Family,
    /// Whether its backends are in the members table.
    pub(super) has_members: bool,
    /// Whether no two endpoints of its Service have the same backend.
    is_unique: bool,
    pub(super) slots: Vec<Slot>,
}

/// A backend of a set, and the counter of its connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    // There can be a million, and a SocketAddr has 32 bytes.
    ip: IpAddr,
    port: u16,
    pub(super) counter: CounterIndex,
}

impl Slot {
    fn new(backend: SocketAddr, counter: CounterIndex) -> Self {
        Self { ip: backend.ip(), port: backend.port(), counter }
    }

    pub(super) fn backend(&self) -> SocketAddr {
        SocketAddr::new(self.ip, self.port)
    }
}

impl Set {
    /// Whether it differs from `image` in nothing but the backends.
    fn is_like(&self, image: &SetImage) -> bool {
        (self.port_id, self.family, self.has_members) == (image.port_id, image.family, image.has_members)
    }

    /// Whether this difference of endpoints decides its backends alone: none of them has two endpoints, before or now.
    fn is_decided_by(&self, TargetDiff { added, .. }: &TargetDiff) -> bool {
        let is_added = |it: &Slot| added.binary_search(&it.backend()).is_ok();
        self.is_unique && (added.is_empty() || !self.slots.iter().any(is_added))
    }

    fn owner(&self, backend: SocketAddr) -> CounterOwner {
        CounterOwner::backend(self.port_id, backend)
    }
}

pub(super) fn count_of(slots: &[Slot]) -> u32 {
    u32::try_from(slots.len()).expect("fewer than 2^32 backends in memory")
}
