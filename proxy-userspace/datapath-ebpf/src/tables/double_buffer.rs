//! The double buffer: a change is written to the spare side, one store makes it the active one, and after a grace period
//! the retired side gets the same change.
//!
//! Invariant: nothing is written to a side that a program may still be reading.
//! The process may therefore die between any two steps: no program reads what was half written.

use datapath::{ApplyReport, TableFill};
use model::state::NodeState;
use proxy_common::counters::CounterIndex;

use crate::{
    error::Error,
    host::failpoint,
    tables::{
        counter_alloc::CounterAllocator,
        layout::Layout,
        map_updates::MapUpdates,
        node_addresses::NodeAddresses,
        store::{MapStore, Side, Table},
    },
};

/// What a side contains, compared with the layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SideState {
    /// The layout.
    Current,
    /// The layout before the last update.
    OneBehind,
    /// Unknown: it is rewritten before it is used.
    Unknown,
}

#[derive(Clone, Copy, Debug)]
struct SideInfo {
    state: SideState,
    /// The capacity of its maps, by table.
    capacity: [u32; Table::COUNT],
}

/// The maps, and what they should contain.
#[derive(Debug)]
pub(crate) struct DoubleBuffer<S> {
    pub(crate) store: S,
    /// What the maps should contain. What is set here applies to the next [`DoubleBuffer::apply`].
    pub(crate) layout: Layout,
    /// The last update, which the retired side does not have yet.
    last: MapUpdates,
    /// Whether the last update contains every entry, as that of a first state does.
    last_is_full: bool,
    sides: [SideInfo; 2],
    active: Side,
    /// Whether no program can be reading the spare side any more.
    grace_elapsed: bool,
}

impl<S: MapStore> DoubleBuffer<S> {
    /// Takes over the maps: the active side keeps serving, and is not written before another side is active.
    pub(crate) fn new(store: S) -> Result<Self, Error> {
        let active = store.active()?;
        let unknown = SideInfo { state: SideState::Unknown, capacity: [0; Table::COUNT] };
        Ok(Self {
            layout: Layout::new(CounterAllocator::restore(&store.counter_owners()?)),
            store,
            last: MapUpdates::default(),
            last_is_full: false,
            sides: [unknown; 2],
            active,
            // The instance before may have died right after a flip.
            grace_elapsed: false,
        })
    }

    /// Makes `state` the active generation, with node ports at `node_addresses`. Of the report, `services`, `tables` and
    /// `rejected` are left empty; the caller knows them.
    ///
    /// # Errors
    ///
    /// The active generation stays active; the next apply rewrites the spare side.
    pub(crate) fn apply(
        &mut self,
        state: &NodeState,
        node_addresses: &NodeAddresses,
    ) -> Result<ApplyReport, Error> {
        // The spare side may still lack the update before.
        self.finish_generation()?;
        let was_empty = self.layout.is_empty();
        let (updates, changed_services) = self.layout.update(state, node_addresses);
        let spare = self.active.other();
        if !updates.is_empty() {
            for side in &mut self.sides {
                side.state = match side.state {
                    SideState::Current => SideState::OneBehind,
                    SideState::OneBehind | SideState::Unknown => SideState::Unknown,
                };
            }
            self.last = updates;
            self.last_is_full = was_empty;
        }
        if self.state(self.active) == SideState::Current {
            return Ok(ApplyReport { changed_services, ..ApplyReport::default() });
        }
        let is_full = self.state(spare) == SideState::Unknown;
        self.flush_counter_owners()?;
        let entries = self.sync_side(spare)?;
        failpoint::point("filled-not-flipped");
        self.store.activate(spare)?;
        self.active = spare;
        self.grace_elapsed = false;
        failpoint::point("flipped-before-grace");
        if cfg!(feature = "fault-points") {
            // Immediately, so that only the grace period protects programs that are slowed down and still read that side.
            // If it fails, the next call reports the error.
            let _ = self.finish_generation();
        }
        Ok(ApplyReport { changed_services, entries, flipped: true, is_full, ..ApplyReport::default() })
    }

    /// Waits until no program reads the retired side any more, and updates it to the active generation.
    ///
    /// # Errors
    ///
    /// The active generation stays active; the retired side is rewritten before it is used.
    pub(crate) fn finish_generation(&mut self) -> Result<(), Error> {
        if !self.grace_elapsed {
            self.store.wait_grace_period()?;
            self.grace_elapsed = true;
        }
        // If the active side is not current, the next apply writes the spare one anyway.
        if self.state(self.active) == SideState::Current {
            self.sync_side(self.active.other())?;
            // Frees the memory: the update of a first state has every entry.
            self.last = MapUpdates::default();
            self.last_is_full = false;
        }
        Ok(())
    }

    /// Must be called when other programs were replaced: they may still be running, and read the maps they were loaded with.
    pub(crate) fn programs_changed(&mut self) {
        self.grace_elapsed = false;
    }

    /// Frees the counters of owners that were removed before the last call. Must be called only while no programs are
    /// attached but those that read these maps, and not more often than connections take to report to their counters.
    ///
    /// # Errors
    ///
    /// The counters get no new owner before the kernel's maps say that they are free.
    pub(crate) fn reclaim_counters(&mut self) -> Result<(), Error> {
        if self.grace_elapsed && self.sides.iter().all(|it| it.state == SideState::Current) {
            if self.layout.counters().has_idle() {
                let open = self.store.open_connections()?;
                let is_open = |it: CounterIndex| open.get(it as usize).is_some_and(|it| *it > 0);
                self.layout.counters().reclaim(is_open);
            }
            self.flush_counter_owners()?;
        }
        Ok(())
    }

    /// Writes the owners of counters, before a program increments them.
    fn flush_counter_owners(&mut self) -> Result<(), Error> {
        let counters = self.layout.counters();
        if !counters.pending().is_empty() {
            self.store.set_counter_owners(counters.pending())?;
            counters.flushed();
            failpoint::point("owned-not-filled");
        }
        Ok(())
    }

    /// How full each table of the active side is. (An array is replaced a little earlier, because its sets have room to grow.)
    pub(crate) fn fill(&self) -> impl Iterator<Item = TableFill> {
        let capacity = &self.sides[self.active.index()].capacity;
        Table::ALL.into_iter().map(|it| TableFill {
            name: it.name(),
            entries: self.layout.rows(it),
            capacity: capacity[it.index()],
        })
    }

    fn state(&self, side: Side) -> SideState {
        self.sides[side.index()].state
    }

    /// Makes a side, which no program reads, equal to the layout; returns how many entries were written.
    fn sync_side(&mut self, side: Side) -> Result<usize, Error> {
        let info = &mut self.sides[side.index()];
        let before = info.state;
        if before == SideState::Current {
            return Ok(0);
        }
        // If a step fails, the contents are unknown.
        info.state = SideState::Unknown;
        let mut entries = 0;
        self.store.set_prefilter(side, &self.layout.prefilter())?;
        let is_small = |it: &Table| self.layout.required_capacity(*it) > info.capacity[it.index()];
        let new: Vec<_> = Table::ALL
            .into_iter()
            .filter(|it| before == SideState::Unknown || is_small(it))
            .map(|it| (it, with_headroom(self.layout.required_capacity(it))))
            .collect();
        if !new.is_empty() {
            let grows = Table::ALL.iter().any(is_small);
            self.store.replace(side, &new)?;
            for (table, capacity) in &new {
                info.capacity[table.index()] = *capacity;
            }
            if grows {
                failpoint::point("mid-growth");
            }
        }
        for table in Table::ALL {
            let is_new = new.iter().any(|(it, _)| *it == table);
            let full = (is_new && !self.last_is_full).then(|| self.layout.full_table(table));
            let updates = full.as_ref().unwrap_or(&self.last).table(table);
            if !updates.deletes.is_empty() {
                self.store.delete(side, table, &updates.deletes)?;
            }
            if !updates.keys.is_empty() {
                self.store.put(side, table, &updates.keys, &updates.values)?;
            }
            entries += (updates.deletes.len() + updates.keys.len()) / table.entry().key;
        }
        info.state = SideState::Current;
        Ok(entries)
    }
}

/// The capacity of a new map: a quarter more than needed, so that growth is rare. Unused entries take memory, too, which the
/// kernel has to clear at once.
fn with_headroom(entries: u32) -> u32 {
    const MIN: u32 = 64;
    entries.saturating_add(entries / 4).max(MIN)
}

#[cfg(test)]
mod tests;
