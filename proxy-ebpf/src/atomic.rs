//! Adding to a word that other CPUs add to as well.
//!
//! The one rule: nothing here hands back what was there before, which Linux 5.10 cannot do.

/// Adds to `word` in one step, as every CPU sees it.
///
/// The compiler offers no atomics for this machine. The instruction is as old as BPF itself.
#[inline(always)]
pub(crate) fn add(word: *mut u64, value: u64) {
    // SAFETY: the verifier checks that `word` points into a map's value, and is aligned.
    unsafe { core::arch::asm!("lock *(u64 *)({} + 0) += {}", in(reg) word, in(reg) value) }
}
