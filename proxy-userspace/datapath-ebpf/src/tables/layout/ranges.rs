//! Allocates ranges of array positions whose sizes are powers of two, so that a growing set rarely moves.
//!
//! Invariant: allocated ranges never overlap, and a released range is reused for the next one of its size.

#[derive(Debug, Default)]
pub(super) struct RangeAllocator {
    /// The first position that was never allocated.
    end: u32,
    /// The first positions of the free ranges, by the logarithm of their size.
    free: [Vec<u32>; u32::BITS as usize],
}

/// Consecutive positions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) first: u32,
    /// How many positions it has, a power of two; or 0.
    pub(super) size: u32,
}

impl Range {
    /// Whether it suits so many entries: they fit, and at most three quarters stay empty.
    pub(super) fn fits(self, entries: u32) -> bool {
        entries <= self.size && self.size / 4 <= entries
    }
}

impl RangeAllocator {
    pub(super) fn allocate(&mut self, entries: u32) -> Range {
        if entries == 0 {
            return Range::default();
        }
        // No overflow: there are far fewer than 2^31 backends in memory.
        let size = entries.next_power_of_two();
        let first = self.free[size.ilog2() as usize].pop().unwrap_or_else(|| {
            let first = self.end;
            self.end += size;
            first
        });
        Range { first, size }
    }

    pub(super) fn release(&mut self, range: Range) {
        if range.size != 0 {
            self.free[range.size.ilog2() as usize].push(range.first);
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

    #[test]
    fn a_range_suits_as_many_entries_as_fill_a_quarter_of_it() {
        let range = |size| Range { first: 3, size };
        let fitting = |size| (0..20).filter(|it| range(size).fits(*it)).collect::<Vec<_>>();
        assert_eq!((fitting(0), fitting(1), fitting(8)), (vec![0], vec![0, 1], (2..=8).collect()));
    }

    proptest! {
        #[test]
        fn allocated_ranges_never_overlap_and_released_ones_are_reused(
            history in proptest::collection::vec((any::<prop::sample::Index>(), 0u32..70), 1..200),
        ) {
            let mut ranges = RangeAllocator::default();
            let mut used: Vec<(Range, u32)> = vec![Default::default(); 8];
            let mut most = 0;
            for (which, entries) in history {
                let it = which.get_mut(&mut used);
                if !it.0.fits(entries) {
                    ranges.release(it.0);
                    it.0 = ranges.allocate(entries);
                }
                it.1 = entries;
                prop_assert!(it.0.fits(entries));
                most = most.max(entries);
                let mut taken: Vec<_> = used.iter().map(|(it, _)| *it).filter(|it| it.size > 0).collect();
                taken.sort_by_key(|it| it.first);
                prop_assert!(taken.windows(2).all(|two| two[0].first + two[0].size <= two[1].first));
                prop_assert!(taken.last().is_none_or(|it| it.first + it.size <= ranges.end()));
            }
            // For eight sets, at most eight ranges of each size.
            prop_assert!(ranges.end() <= 8 * 2 * most.next_power_of_two());
        }
    }
}
