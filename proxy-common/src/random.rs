//! Random numbers that cost little.

/// 32 bits that look random, from a number that is never used twice and a seed (the finalizer of SplitMix64; Steele, Lea and
/// Flood, 2014). Cheaper than the kernel's random numbers.
#[inline(always)]
pub const fn mix(number: u64, seed: u64) -> u32 {
    let mut z = number ^ seed;
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z >> 32) as u32
}

/// Scales 32 random bits to `0..count` by multiplication (no division in the kernel's hot path).
/// The bias is below `count / 2^32`.
#[inline(always)]
pub const fn scale(random: u32, count: u32) -> u32 {
    ((random as u64 * count as u64) >> 32) as u32
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// As when a program connects again and again: with every cookie or every n-th.
        #[test]
        fn numbers_in_a_row_are_mixed_evenly(begin: u32, step in 1u64..64, seed: u64, count in 2u32..20) {
            const EXPECTED: usize = 1000;
            let mut hits = vec![0_usize; count as usize];
            for n in 0..u64::from(count) * EXPECTED as u64 {
                hits[scale(mix(u64::from(begin) + n * step, seed), count) as usize] += 1;
            }
            // Six standard deviations.
            prop_assert!(hits.iter().all(|it| it.abs_diff(EXPECTED) < 190), "{hits:?}");
        }

        #[test]
        fn scaling_stays_in_range(random: u32, count in 1u32..) {
            prop_assert!(scale(random, count) < count);
        }

        #[test]
        fn scaling_reaches_every_slot(count in 1u32..1000) {
            let step = u32::MAX / count;
            let mut hit: Vec<u32> = (0..count).map(|n| scale(n * step + step / 2, count)).collect();
            hit.dedup();
            prop_assert_eq!(hit.len() as u32, count);
        }
    }
}
