//! Atomic addition to a word that other CPUs add to as well.
//!
//! Invariant: nothing here returns the previous value, which Linux 5.10 does not support.

/// Adds to `word` atomically.
///
/// The compiler offers no atomics for the BPF target. The instruction is as old as BPF itself.
#[inline(always)]
pub(crate) fn add(word: *mut u64, value: u64) {
    // SAFETY: the verifier checks that `word` points into a map's value, and is aligned.
    unsafe { core::arch::asm!("lock *(u64 *)({} + 0) += {}", in(reg) word, in(reg) value) }
}

/// The same for a word of 32 bits.
#[inline(always)]
pub(crate) fn add32(word: *mut u32, value: u32) {
    // SAFETY: as in `add`.
    unsafe { core::arch::asm!("lock *(u32 *)({} + 0) += {}", in(reg) word, in(reg) value) }
}
