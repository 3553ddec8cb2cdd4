//! Which positions of an array are whose: ranges whose sizes are powers of two, so that a set which grows moves seldom.
//!
//! The one rule: a range that is given back is found by the next one of its size; positions in use never overlap.

/// The positions of one array.
#[derive(Debug, Default)]
pub(super) struct Ranges {
    /// What lies from here on was never given out.
    end: u32,
    /// Where the free ranges begin, by the logarithm of their size.
    free: [Vec<u32>; u32::BITS as usize],
}

/// Some positions in a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Range {
    /// The first of them.
    pub(super) first: u32,
    /// How many, a power of two; or none.
    pub(super) room: u32,
}

impl Range {
    /// Whether it is the right place for so many entries: they fit in, and do not leave three quarters empty.
    pub(super) fn fits(self, entries: u32) -> bool {
        entries <= self.room && self.room / 4 <= entries
    }
}

impl Ranges {
    /// Gives a range out for so many entries.
    pub(super) fn take(&mut self, entries: u32) -> Range {
        if entries == 0 {
            return Range::default();
        }
        // There are far fewer than 2^31 backends: each is one of that many addresses in memory.
        let room = entries.next_power_of_two();
        let first = self.free[room.ilog2() as usize].pop().unwrap_or_else(|| {
            let first = self.end;
            self.end += room;
            first
        });
        Range { first, room }
    }

    /// Takes a range back.
    pub(super) fn give_back(&mut self, range: Range) {
        if range.room != 0 {
            self.free[range.room.ilog2() as usize].push(range.first);
        }
    }

    /// How many positions the array must have.
    pub(super) fn end(&self) -> u32 {
        self.end
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn ranges_in_use_never_overlap_and_are_used_again(
            history in proptest::collection::vec((any::<prop::sample::Index>(), 0u32..70), 1..200),
        ) {
            let mut ranges = Ranges::default();
            let mut used: Vec<(Range, u32)> = vec![Default::default(); 8];
            let mut most = 0;
            for (which, entries) in history {
                let it = which.get_mut(&mut used);
                if !it.0.fits(entries) {
                    ranges.give_back(it.0);
                    it.0 = ranges.take(entries);
                }
                it.1 = entries;
                prop_assert!(it.0.fits(entries));
                most = most.max(entries);
                let mut taken: Vec<_> = used.iter().map(|(it, _)| *it).filter(|it| it.room > 0).collect();
                taken.sort_by_key(|it| it.first);
                prop_assert!(taken.windows(2).all(|two| two[0].first + two[0].room <= two[1].first));
                prop_assert!(taken.last().is_none_or(|it| it.first + it.room <= ranges.end()));
            }
            // For eight sets, at most eight ranges of each size.
            prop_assert!(ranges.end() <= 8 * 2 * most.next_power_of_two());
        }
    }
}
