//! Who counts where: hands out the cells that programs count in, by name.
//!
//! The one rule: a cell has one owner until no program can add to it any more. It is taken back only by
//! [`Counters::reclaim`], which is told when.

use std::{
    collections::{HashMap, HashSet, hash_map::Entry},
    hash::{BuildHasherDefault, Hasher},
    net::{IpAddr, SocketAddr},
};

use proxy_common::counters::{COUNTERS_PER_PORT, CounterIndex, MAX_CHUNKS, NO_COUNTER, chunk_of};
use twox_hash::XxHash64;

/// Whose a counter is: a service port, or a backend of one. Never 0, which stands for nobody.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Owner(pub(super) u64);

impl Owner {
    /// The service port of that identity ([`proxy_common::tables::Frontend::service`]).
    pub(super) fn port(service: u64) -> Self {
        Self(service.max(1))
    }

    /// A backend of it.
    pub(super) fn backend(service: u64, backend: SocketAddr) -> Self {
        let mut hash = XxHash64::with_seed(service);
        match backend.ip() {
            IpAddr::V4(ip) => hash.write(&ip.octets()),
            IpAddr::V6(ip) => hash.write(&ip.octets()),
        }
        hash.write(&backend.port().to_be_bytes());
        Self(hash.finish().max(1))
    }
}

/// Finds an owner by its number, which is a hash already.
type ByItself = BuildHasherDefault<Itself>;

#[derive(Debug, Default)]
struct Itself(u64);

impl Hasher for Itself {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write_u64(&mut self, it: u64) {
        self.0 = it;
    }

    fn write(&mut self, bytes: &[u8]) {
        // An owner is one number; whatever else comes is found all the same.
        self.0 = bytes.iter().fold(self.0, |hash, it| hash.rotate_left(8) ^ u64::from(*it));
    }
}

/// Which cells there are, and whose they are.
#[derive(Debug, Default)]
pub(super) struct Counters {
    known: HashMap<Owner, Known, ByItself>,
    /// Owners that nothing in the tables leads to any more.
    idle: HashSet<Owner, ByItself>,
    /// Single cells without an owner.
    cells: Vec<CounterIndex>,
    /// Runs of [`COUNTERS_PER_PORT`] without an owner, by their first cell.
    runs: Vec<CounterIndex>,
    /// The first cell that nobody ever had.
    next: CounterIndex,
    /// What the kernel has yet to be told: cells and their new owners, 0 for nobody; of a cell the last one counts.
    news: Vec<(CounterIndex, u64)>,
}

#[derive(Clone, Copy, Debug)]
struct Known {
    /// The first of its cells.
    cell: CounterIndex,
    /// Whether it has [`COUNTERS_PER_PORT`] of them.
    is_port: bool,
    /// How many rows of the tables lead there.
    uses: u32,
}

impl Counters {
    /// Takes over what an earlier instance handed out: the owner of each cell of all chunks, in order.
    ///
    /// Whatever nobody asks for before the first [`Counters::reclaim`] is taken back.
    pub(super) fn take_over(owners: &[u64]) -> Self {
        let mut it =
            Self { next: CounterIndex::try_from(owners.len()).unwrap_or(NO_COUNTER), ..Self::default() };
        for (run, first) in
            owners.chunks_exact(COUNTERS_PER_PORT as usize).zip((0..).step_by(COUNTERS_PER_PORT as usize))
        {
            match *run {
                [0, 0, 0, 0] => it.runs.push(first),
                // A backend has no more than one cell.
                [owner, ..] if run.iter().all(|it| *it == owner) => it.adopt(owner, first, true),
                _ => {
                    for (owner, cell) in run.iter().zip(first..) {
                        match *owner {
                            0 => it.cells.push(cell),
                            owner => it.adopt(owner, cell, false),
                        }
                    }
                }
            }
        }
        // The first ones come first.
        it.runs.reverse();
        it.cells.reverse();
        it
    }

    fn adopt(&mut self, owner: u64, cell: CounterIndex, is_port: bool) {
        let owner = Owner(owner);
        let known = Known { cell, is_port, uses: 0 };
        if let Some(twice) = self.known.insert(owner, known) {
            // Whoever was here before died between two chunks: the other one is nobody's.
            self.free(twice);
        }
        self.idle.insert(owner);
    }

    /// Makes ready for so many further owners, who then come without the others being moved again and again.
    pub(super) fn reserve(&mut self, owners: usize) {
        self.known.reserve(owners);
    }

    /// The cells of a service port, by the first one.
    pub(super) fn take_port(&mut self, owner: Owner) -> CounterIndex {
        self.take(owner, true)
    }

    /// The cell of a backend.
    pub(super) fn take_backend(&mut self, owner: Owner) -> CounterIndex {
        self.take(owner, false)
    }

    fn take(&mut self, owner: Owner, is_port: bool) -> CounterIndex {
        if let Entry::Occupied(mut known) = self.known.entry(owner) {
            if known.get().is_port == is_port {
                known.get_mut().uses += 1;
                if known.get().uses == 1 {
                    self.idle.remove(&owner);
                }
                return known.get().cell;
            }
            // A run that was told of by half: whoever did it died before a row led there.
            let half = known.remove();
            self.idle.remove(&owner);
            self.free(half);
        }
        let found = if is_port { self.run() } else { self.cell() };
        let Some(cell) = found else { return NO_COUNTER };
        self.known.insert(owner, Known { cell, is_port, uses: 1 });
        self.tell(cell, is_port, owner.0);
        cell
    }

    /// A row that led to the owner's cells is gone.
    pub(super) fn give_back(&mut self, owner: Owner) {
        if let Some(known) = self.known.get_mut(&owner) {
            known.uses = known.uses.saturating_sub(1);
            if known.uses == 0 {
                self.idle.insert(owner);
            }
        }
    }

    /// The first cell of an owner that has one.
    pub(super) fn cell_of(&self, owner: Owner) -> CounterIndex {
        self.known.get(&owner).map_or(NO_COUNTER, |it| it.cell)
    }

    /// Takes back the cells of those whom nothing leads to any more. To be called when no program that is running, or
    /// will, can find a row of theirs.
    pub(super) fn reclaim(&mut self) {
        for owner in std::mem::take(&mut self.idle) {
            if let Some(known) = self.known.remove(&owner) {
                self.free(known);
            }
        }
    }

    /// Cells whose owners have changed, in order, and of a cell that is there twice the newest last; the kernel's side has to
    /// learn of it.
    pub(super) fn news(&mut self) -> &[(CounterIndex, u64)] {
        self.news.sort_by_key(|(cell, _)| *cell);
        &self.news
    }

    /// The kernel's side has learnt it.
    pub(super) fn told(&mut self) {
        // Of a first state, it is a great deal.
        self.news = Vec::new();
    }

    fn free(&mut self, known: Known) {
        self.tell(known.cell, known.is_port, 0);
        if known.is_port { &mut self.runs } else { &mut self.cells }.push(known.cell);
    }

    fn tell(&mut self, first: CounterIndex, is_port: bool, owner: u64) {
        let count = if is_port { COUNTERS_PER_PORT } else { 1 };
        self.news.extend((first..first + count).map(|it| (it, owner)));
    }

    fn run(&mut self) -> Option<CounterIndex> {
        if let Some(first) = self.runs.pop() {
            return Some(first);
        }
        let first = self.next;
        if chunk_of(first) >= MAX_CHUNKS {
            return None;
        }
        self.next += COUNTERS_PER_PORT;
        Some(first)
    }

    fn cell(&mut self) -> Option<CounterIndex> {
        if self.cells.is_empty() {
            let first = self.run()?;
            self.cells.extend((first..first + COUNTERS_PER_PORT).rev());
        }
        self.cells.pop()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PORT: Owner = Owner(100);

    fn backend(n: u64) -> Owner {
        Owner(200 + n)
    }

    /// What the kernel's side holds after it has learnt everything.
    fn learn(owners: &mut Vec<u64>, counters: &mut Counters) {
        for (cell, owner) in counters.news() {
            let cell = *cell as usize;
            owners.resize(owners.len().max(cell + 1).next_multiple_of(8), 0);
            owners[cell] = *owner;
        }
        counters.told();
    }

    #[test]
    fn an_owner_keeps_its_cells_through_a_restart() {
        let (mut counters, mut owners) = (Counters::default(), Vec::new());
        let port = counters.take_port(PORT);
        let cells: Vec<_> = (0..6).map(|n| counters.take_backend(backend(n))).collect();
        learn(&mut owners, &mut counters);
        let mut counters = Counters::take_over(&owners);
        assert_eq!(counters.take_port(PORT), port);
        assert_eq!((0..6).map(|n| counters.take_backend(backend(n))).collect::<Vec<_>>(), cells);
        counters.reclaim();
        assert!(counters.news().is_empty());
    }

    #[test]
    fn whoever_is_not_asked_for_after_a_restart_gives_its_cells_to_others() {
        let (mut counters, mut owners) = (Counters::default(), Vec::new());
        let port = counters.take_port(PORT);
        let cell = counters.take_backend(backend(0));
        learn(&mut owners, &mut counters);
        let mut counters = Counters::take_over(&owners);
        // Programs may still count for them.
        assert_ne!(counters.take_port(Owner(1)), port);
        assert_ne!(counters.take_backend(backend(1)), cell);
        counters.reclaim();
        assert_eq!(counters.take_port(Owner(2)), port);
        assert_eq!(counters.take_backend(backend(2)), cell);
        learn(&mut owners, &mut counters);
        assert!(!owners.contains(&PORT.0) && !owners.contains(&backend(0).0));
    }

    #[test]
    fn a_port_that_was_told_of_by_half_gets_cells_of_its_own() {
        for told in 1..COUNTERS_PER_PORT as usize {
            let mut owners = vec![0; 2 * COUNTERS_PER_PORT as usize];
            owners[..told].fill(PORT.0);
            let mut counters = Counters::take_over(&owners);
            let port = counters.take_port(PORT);
            learn(&mut owners, &mut counters);
            let (port, cells) = (port as usize, COUNTERS_PER_PORT as usize);
            assert!(owners[port..port + cells].iter().all(|it| *it == PORT.0));
            assert_eq!(owners.iter().filter(|it| **it == PORT.0).count(), cells, "nothing is left over");
            let others: HashSet<_> = (0..20).map(|n| counters.take_backend(backend(n)) as usize).collect();
            assert!(others.is_disjoint(&(port..port + cells).collect()));
        }
    }

    #[test]
    fn no_two_owners_share_a_cell() {
        let mut counters = Counters::default();
        let mut seen = HashSet::new();
        for n in 1..=100 {
            let port = counters.take_port(Owner(n));
            assert_eq!(port % COUNTERS_PER_PORT, 0, "all of them are in one chunk");
            assert!((port..port + COUNTERS_PER_PORT).all(|it| seen.insert(it)));
            assert!((0..n).all(|it| seen.insert(counters.take_backend(Owner(1000 * n + it)))));
        }
    }

    #[test]
    fn an_owner_goes_when_its_last_row_does() {
        let mut counters = Counters::default();
        let cell = counters.take_backend(backend(0));
        assert_eq!(counters.take_backend(backend(0)), cell, "the same for every row");
        counters.give_back(backend(0));
        counters.reclaim();
        assert_eq!(counters.cell_of(backend(0)), cell);
        counters.give_back(backend(0));
        assert_eq!(counters.take_backend(backend(0)), cell, "it came back in time");
        counters.give_back(backend(0));
        counters.reclaim();
        assert_eq!(counters.cell_of(backend(0)), NO_COUNTER);
    }
}
