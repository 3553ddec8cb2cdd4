//! The two-sided protocol: a change is written into the spare side, one store makes it the active one, and after a
//! grace period the retired side catches up.
//!
//! The one rule: nothing is written to a side that a program may still be reading.
//! It follows that the process may die between any two steps: whatever it was doing was done to the side nobody reads.

use model::state::NodeState;

use crate::{
    counter_alloc::Counters,
    error::Error,
    failpoint,
    layout::{Layout, Places, Update},
    map_updates::Changes,
    store::{Side, Store, Table},
};
use model::Rejected;

/// How a side stands to the layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// It holds what the layout says.
    Equal,
    /// It holds what the layout said before the last update.
    OneBehind,
    /// What it holds is not known: it is written anew before it is used.
    Unknown,
}

/// One side, as far as we know it.
#[derive(Clone, Copy, Debug)]
struct Known {
    standing: Standing,
    /// How many entries its maps hold, by table.
    capacity: [u32; Table::COUNT],
}

/// A data plane: the maps, and what should be in them.
#[derive(Debug)]
pub(super) struct Plane<S> {
    store: S,
    layout: Layout,
    /// The last update, which the retired side has yet to see.
    last: Changes,
    /// Whether that is all there is, as of a first state.
    last_is_whole: bool,
    sides: [Known; 2],
    active: Side,
    /// Whether no program can be reading the spare side any more.
    quiet: bool,
}

/// What an apply did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Applied {
    /// How many Services were new, changed or gone.
    pub services: usize,
    /// How many entries were written to the side that is active now; 0 if nothing had to change.
    pub entries: usize,
    /// Whether the active side is another one than before.
    pub flipped: bool,
    /// Whether the side was written anew, rather than brought up by the difference.
    pub whole: bool,
}

impl<S: Store> Plane<S> {
    /// Takes over whatever the maps hold: the active side goes on serving, and is not touched before another one is.
    pub(super) fn new(store: S) -> Result<Self, Error> {
        let active = store.active()?;
        let unknown = Known { standing: Standing::Unknown, capacity: [0; Table::COUNT] };
        Ok(Self {
            layout: Layout::new(Counters::take_over(&store.owners()?)),
            store,
            last: Changes::default(),
            last_is_whole: false,
            sides: [unknown; 2],
            active,
            // Whoever was here before may have died right after a flip.
            quiet: false,
        })
    }

    /// Makes `state` what every program sees from now on, with node ports at the addresses in `places`.
    ///
    /// # Errors
    ///
    /// The generation that was active goes on serving; the next apply writes the spare side anew.
    pub(super) fn apply(&mut self, state: &NodeState, places: &Places) -> Result<Applied, Error> {
        // Ready the spare side for the difference: it may still lack the one before.
        self.settle()?;
        let begins = self.layout.is_empty();
        let Update { changes, services } = self.layout.update(state, places);
        let spare = self.active.other();
        if !changes.is_empty() {
            for side in Side::BOTH {
                let standing = &mut self.sides[side.index()].standing;
                *standing = match *standing {
                    Standing::Equal => Standing::OneBehind,
                    Standing::OneBehind | Standing::Unknown => Standing::Unknown,
                };
            }
            self.last = changes;
            self.last_is_whole = begins;
        }
        if self.sides[self.active.index()].standing == Standing::Equal {
            return Ok(Applied { services, ..Applied::default() });
        }
        let whole = self.sides[spare.index()].standing == Standing::Unknown;
        self.tell_owners()?;
        let entries = self.bring_up(spare)?;
        failpoint::point("filled-not-flipped");
        self.store.activate(spare)?;
        self.active = spare;
        self.quiet = false;
        failpoint::point("flipped-before-grace");
        if cfg!(feature = "fault-points") {
            // At once, so that nothing but the grace period keeps it from what a program that lingers still reads.
            // Where it fails, the next one says why.
            let _ = self.settle();
        }
        Ok(Applied { services, entries, flipped: true, whole })
    }

    /// Waits until nobody reads the retired side any more, and brings it to where the active one is.
    ///
    /// # Errors
    ///
    /// The active generation goes on serving; the retired side is written anew before it is used.
    pub(super) fn settle(&mut self) -> Result<(), Error> {
        if !self.quiet {
            self.store.grace()?;
            self.quiet = true;
        }
        // As long as the active side itself is not known to be right, the next apply writes the spare one anyway.
        if self.sides[self.active.index()].standing == Standing::Equal {
            self.bring_up(self.active.other())?;
            // Of a first state, it is everything.
            self.last = Changes::default();
            self.last_is_whole = false;
        }
        Ok(())
    }

    /// To be called when other programs were in effect until now: one that began before may still read what it led by.
    pub(super) fn programs_changed(&mut self) {
        self.quiet = false;
    }

    /// Takes the counters of those who are gone back, so that others can have them.
    /// To be called when no other programs are in effect than those that read these maps.
    ///
    /// # Errors
    ///
    /// They are not given to anybody before that is known to the kernel's side.
    pub(super) fn reclaim_counters(&mut self) -> Result<(), Error> {
        if self.quiet && self.sides.iter().all(|it| it.standing == Standing::Equal) {
            self.layout.counters().reclaim();
            self.tell_owners()?;
        }
        Ok(())
    }

    /// Has the cells know their owners, before a program counts there.
    fn tell_owners(&mut self) -> Result<(), Error> {
        let counters = self.layout.counters();
        if !counters.news().is_empty() {
            self.store.own(counters.news())?;
            counters.told();
            failpoint::point("owned-not-filled");
        }
        Ok(())
    }

    /// What is not served, and why.
    pub(super) fn rejected(&self) -> Vec<Rejected> {
        self.layout.rejected()
    }

    /// How many Services are laid out.
    pub(super) fn services(&self) -> usize {
        self.layout.services()
    }

    /// How full each table of the active side is: entries, and room for them. (An array is full a little earlier, as its
    /// sets keep room to grow.)
    pub(super) fn fill(&self) -> impl Iterator<Item = (Table, u32, u32)> {
        let known = &self.sides[self.active.index()];
        Table::ALL.into_iter().map(|it| (it, self.layout.rows(it), known.capacity[it.index()]))
    }

    /// Makes a side equal to the layout; returns how many entries were written. Nobody reads that side.
    fn bring_up(&mut self, side: Side) -> Result<usize, Error> {
        let known = &mut self.sides[side.index()];
        let before = known.standing;
        if before == Standing::Equal {
            return Ok(0);
        }
        // Until it is done, it is not known what is there.
        known.standing = Standing::Unknown;
        let mut entries = 0;
        self.store.set_prefilter(side, &self.layout.prefilter())?;
        let is_small = |it: &Table| self.layout.need(*it) > known.capacity[it.index()];
        let new: Vec<_> = Table::ALL
            .into_iter()
            .filter(|it| before == Standing::Unknown || is_small(it))
            .map(|it| (it, roomy(self.layout.need(it))))
            .collect();
        if !new.is_empty() {
            let grows = Table::ALL.iter().any(is_small);
            self.store.replace(side, &new)?;
            for (table, capacity) in &new {
                known.capacity[table.index()] = *capacity;
            }
            if grows {
                failpoint::point("mid-growth");
            }
        }
        for table in Table::ALL {
            let is_new = new.iter().any(|(it, _)| *it == table);
            let whole;
            let changes = if is_new && !self.last_is_whole {
                whole = self.layout.whole(table);
                whole.table(table)
            } else {
                self.last.table(table)
            };
            if !changes.deletes.is_empty() {
                self.store.delete(side, table, &changes.deletes)?;
            }
            if !changes.keys.is_empty() {
                self.store.put(side, table, &changes.keys, &changes.values)?;
            }
            entries += (changes.deletes.len() + changes.keys.len()) / table.key_size();
        }
        known.standing = Standing::Equal;
        Ok(entries)
    }
}

/// How many entries to make room for, so that growth is rare: a quarter more than needed. Each takes memory, used or not,
/// which the kernel has to clear at once.
fn roomy(entries: u32) -> u32 {
    const LEAST: u32 = 64;
    entries.saturating_add(entries / 4).max(LEAST)
}

#[cfg(test)]
mod at_scale;
#[cfg(test)]
mod tests;
