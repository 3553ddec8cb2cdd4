//! Writes what changes, row by row, and keeps count of the rows: which set has which id and place, and which backend
//! which slot.
//!
//! The one rule: who stays where it was costs nothing.

use std::{collections::HashMap, net::SocketAddr};

use model::{Family, state::PerFamily};
use proxy_common::{counters::CounterIndex, tables::Frontend as Row};

use super::{
    Known, Places,
    ranges::{Range, Ranges},
    rows::{
        backend_table, clear_backend, delete_frontend, delete_member, delete_place, frontend_table,
        member_table, put_backend, put_frontend, put_member, put_place,
    },
};
use crate::{
    compile::{FrontendAddress, ServiceImage, SetImage},
    counter_alloc::{Counters, Owner},
    map_updates::Changes,
    store::Table,
};

/// Gathers changes and keeps count of the rows.
pub(super) struct Writer<'a> {
    pub(super) changes: Changes,
    pub(super) ids: &'a mut Ids,
    pub(super) ranges: &'a mut PerFamily<Ranges>,
    pub(super) counters: &'a mut Counters,
    pub(super) rows: &'a mut [u32; Table::COUNT],
}

impl Writer<'_> {
    /// Brings a Service from its old sets to its new ones. A set belongs to the first frontend that uses it, and keeps
    /// its id while that frontend is there.
    pub(super) fn relay(&mut self, old: Known, image: ServiceImage) -> Known {
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
        // What is left over goes first, so that a new set may take its id.
        for mut set in old_sets.into_iter().flatten() {
            for it in &set.slots {
                self.go(&set, *it);
            }
            self.leave(&mut set);
            self.ids.free.push(set.id);
        }
        let sets = new_sets.into_iter().map(|(kept, image)| {
            let mut set = kept.unwrap_or_else(|| Set {
                id: self.ids.take(),
                range: Range::default(),
                service: image.service,
                family: image.family,
                is_listed: image.is_listed,
                slots: Vec::new(),
            });
            self.fill(&mut set, &image.backends);
            set
        });
        Known { sets: sets.collect(), frontends: image.frontends }
    }

    /// Brings a set from its old backends to these, which are sorted: who stays keeps its slot, who comes takes the slot of one that goes,
    /// and the last ones close the gaps that are left.
    fn fill(&mut self, set: &mut Set, backends: &[SocketAddr]) {
        let mut old: Vec<_> = set.slots.iter().map(|it| it.backend).collect();
        old.sort_unstable();
        let mut coming = backends.iter().filter(|it| old.binary_search(it).is_err());
        let goes = |it: &Slot| backends.binary_search(&it.backend).is_err();
        let mut slots = Vec::with_capacity(backends.len().max(set.slots.len()));
        slots.extend_from_slice(&set.slots);
        let mut gaps = Vec::new();
        for (slot, it) in slots.iter_mut().enumerate().filter(|(_, it)| goes(it)) {
            self.go(set, *it);
            match coming.next() {
                Some(next) => *it = self.come(set, *next),
                None => gaps.push(slot),
            }
        }
        for slot in gaps.into_iter().rev() {
            slots.swap_remove(slot);
        }
        for backend in coming {
            slots.push(self.come(set, *backend));
        }
        if !set.range.fits(count_of(&slots)) {
            self.leave(set);
            set.range = self.ranges.of_mut(set.family).take(count_of(&slots));
        }
        // A slot is written or cleared once, whatever moved through it on the way.
        let mut before = set.slots.iter();
        for (position, it) in (set.range.first..).zip(&slots) {
            if before.next() != Some(it) {
                put_backend(&mut self.changes, position, it.backend, it.cell);
            }
        }
        for (position, _) in (set.range.first + count_of(&slots)..).zip(before) {
            clear_backend(&mut self.changes, set.family, position);
        }
        let rows = &mut self.rows[backend_table(set.family).index()];
        *rows = *rows + count_of(&slots) - count_of(&set.slots);
        set.slots = slots;
    }

    /// Clears a set's place and gives it back; it has none then, and no slots.
    fn leave(&mut self, set: &mut Set) {
        for (position, _) in (set.range.first..).zip(&set.slots) {
            clear_backend(&mut self.changes, set.family, position);
        }
        self.rows[backend_table(set.family).index()] -= count_of(&set.slots);
        self.ranges.of_mut(set.family).give_back(std::mem::take(&mut set.range));
        set.slots.clear();
    }

    /// A backend comes into a set: it is counted, and listed.
    fn come(&mut self, set: &Set, backend: SocketAddr) -> Slot {
        let cell = self.counters.take_backend(set.owner(backend));
        if set.is_listed {
            self.rows[member_table(set.family).index()] += 1;
            put_member(&mut self.changes, set.id, backend, cell);
        }
        Slot { backend, cell }
    }

    /// A backend goes out of a set.
    fn go(&mut self, set: &Set, it: Slot) {
        self.counters.give_back(set.owner(it.backend));
        if set.is_listed {
            self.rows[member_table(set.family).index()] -= 1;
            delete_member(&mut self.changes, set.id, it.backend);
        }
    }

    pub(super) fn places(&mut self, old: &Places, new: &Places) {
        for address in old.keys().filter(|it| !new.contains_key(it)) {
            self.rows[Table::NodeAddrs.index()] -= 1;
            delete_place(&mut self.changes, *address);
        }
        for (address, place) in new {
            match old.get(address) {
                Some(before) if before == place => continue,
                Some(_) => {}
                None => self.rows[Table::NodeAddrs.index()] += 1,
            }
            put_place(&mut self.changes, *address, *place);
        }
    }

    pub(super) fn frontend(&mut self, address: FrontendAddress, old: Option<Row>, new: Option<Row>) {
        let table = frontend_table(address);
        match (old, new) {
            (None, None) => {}
            (Some(old), Some(new)) if old == new => {}
            (old, Some(row)) => {
                if old.is_none() {
                    self.rows[table.index()] += 1;
                }
                put_frontend(&mut self.changes, address, &row);
            }
            (Some(_), None) => {
                self.rows[table.index()] -= 1;
                delete_frontend(&mut self.changes, address);
            }
        }
    }
}

/// A set with its id, and where it is.
#[derive(Debug)]
pub(super) struct Set {
    pub(super) id: u32,
    /// The positions of its slots, in order.
    pub(super) range: Range,
    /// The service port whose set it is.
    service: u64,
    pub(super) family: Family,
    /// Whether its backends are listed as members.
    pub(super) is_listed: bool,
    pub(super) slots: Vec<Slot>,
}

/// A backend, and where its connections are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    pub(super) backend: SocketAddr,
    pub(super) cell: CounterIndex,
}

impl Set {
    /// Whether it can become what `image` says by a change of its backends alone.
    fn is_like(&self, image: &SetImage) -> bool {
        (self.service, self.family, self.is_listed) == (image.service, image.family, image.is_listed)
    }

    fn owner(&self, backend: SocketAddr) -> Owner {
        Owner::backend(self.service, backend)
    }
}

/// Ids of sets, used again when they are free.
#[derive(Debug, Default)]
pub(super) struct Ids {
    next: u32,
    free: Vec<u32>,
}

impl Ids {
    fn take(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            self.next += 1;
            self.next
        })
    }
}

/// How many slots there are.
pub(super) fn count_of(slots: &[Slot]) -> u32 {
    // There are far fewer than 2^32 backends: each is one of that many addresses in memory.
    u32::try_from(slots.len()).expect("fewer than 2^32 backends in memory")
}
