//! What is noted of a decision while it is made, for builds that report or log it.
//!
//! Invariant: in the product nothing is noted, and the compiler removes what leads to it.

#[cfg(feature = "log")]
use core::cell::Cell;

use aya_ebpf::programs::SockAddrContext;
use proxy_common::{
    affinity::AffinityEntry,
    tables::Frontend,
    trace::{AFFINITY, AFFINITY_KEPT, EJECTED_AVOIDED, EJECTED_TRIED, LEAST_CONNECTIONS, SLOW_START},
};

use crate::log;

const IS_NOTED: bool = cfg!(feature = "log");

/// The notes, bits such as [`AFFINITY`].
pub(crate) struct Notes {
    #[cfg(feature = "log")]
    bits: Cell<u32>,
}

impl Notes {
    pub(crate) const NONE: Self = Self {
        #[cfg(feature = "log")]
        bits: Cell::new(0),
    };

    #[inline(always)]
    pub(crate) fn get(&self) -> u32 {
        #[cfg(feature = "log")]
        return self.bits.get();
        #[cfg(not(feature = "log"))]
        0
    }

    #[inline(always)]
    pub(crate) fn set(&self, notes: u32) {
        #[cfg(feature = "log")]
        self.bits.set(self.bits.get() | notes);
        #[cfg(not(feature = "log"))]
        let _ = notes;
    }

    /// Adds what [`Self::pack`] has packed.
    #[inline(always)]
    pub(crate) fn add_packed(&self, packed: u64) {
        if IS_NOTED {
            self.set((packed >> 32) as u32);
        }
    }

    /// A position with the notes in the upper half.
    #[inline(always)]
    pub(crate) fn pack(&self, position: u32) -> u64 {
        if IS_NOTED { u64::from(self.get()) << 32 | u64::from(position) } else { position.into() }
    }

    #[inline(always)]
    pub(crate) fn on_affinity(&self, ctx: &SockAddrContext, last: &AffinityEntry, entry: &AffinityEntry) {
        log::affinity(ctx, last.used != 0, entry.used.saturating_sub(last.used) / 1_000_000);
        if !IS_NOTED {
            return;
        }
        let is_kept = last.used != 0 && last.backend == entry.backend;
        self.set(if is_kept { AFFINITY | AFFINITY_KEPT } else { AFFINITY });
    }

    #[inline(always)]
    pub(crate) fn on_frontend(&self, frontend: &Frontend) {
        if IS_NOTED && frontend.options.least_connections() {
            self.set(LEAST_CONNECTIONS);
        }
        if IS_NOTED && frontend.options.slow_start() != 0 {
            self.set(SLOW_START);
        }
    }

    #[inline(always)]
    pub(crate) fn on_avoided(&self) {
        self.set(EJECTED_AVOIDED);
    }

    #[inline(always)]
    pub(crate) fn on_tried(&self) {
        self.set(EJECTED_TRIED);
    }
}
