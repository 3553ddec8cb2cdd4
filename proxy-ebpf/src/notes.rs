//! What is noted of a decision while it is made, for the traced variant of the programs.
//!
//! Invariant: in the product nothing is noted, and the compiler removes what leads to it.

#[cfg(feature = "trace")]
use core::cell::Cell;

#[cfg(feature = "trace")]
use crate::ring::{STEPS, report_step};
use proxy_common::{
    affinity::AffinityEntry,
    tables::Frontend,
    trace::{
        AFFINITY, AFFINITY_KEPT, EJECTED_AVOIDED, EJECTED_TRIED, LEAST_CONNECTIONS, SLOW_START, STEP_AFFINITY,
    },
};

/// Whether this is the traced variant.
const IS_TRACED: bool = cfg!(feature = "trace");

/// The notes, bits such as [`AFFINITY`].
pub(crate) struct Notes {
    #[cfg(feature = "trace")]
    bits: Cell<u32>,
    /// Whether steps are reported: never those of datagrams, for which the stack has no room.
    #[cfg(feature = "trace")]
    has_steps: Cell<bool>,
    /// The cookie of the socket whose steps they are; 0 if they are not wanted.
    #[cfg(feature = "trace")]
    socket: Cell<u64>,
}

impl Notes {
    pub(crate) const NONE: Self = Self {
        #[cfg(feature = "trace")]
        bits: Cell::new(0),
        #[cfg(feature = "trace")]
        has_steps: Cell::new(false),
        #[cfg(feature = "trace")]
        socket: Cell::new(0),
    };

    /// The bits.
    #[inline(always)]
    pub(crate) fn get(&self) -> u32 {
        #[cfg(feature = "trace")]
        return self.bits.get();
        #[cfg(not(feature = "trace"))]
        0
    }

    /// Adds notes.
    #[inline(always)]
    pub(crate) fn set(&self, notes: u32) {
        #[cfg(feature = "trace")]
        self.bits.set(self.bits.get() | notes);
        #[cfg(not(feature = "trace"))]
        let _ = notes;
    }

    /// Reports further steps as those of this socket.
    #[cfg(feature = "trace")]
    #[inline(always)]
    pub(crate) fn report_steps_of(&self, socket: u64) {
        self.has_steps.set(true);
        self.socket.set(socket);
    }

    /// Reports a step, if that is wanted.
    #[inline(always)]
    pub(crate) fn step(&self, what: u64, a: u64, b: u64) {
        #[cfg(feature = "trace")]
        if self.has_steps.get() && STEPS.load() != 0 {
            report_step(self.socket.get(), what, a, b);
        }
        #[cfg(not(feature = "trace"))]
        let _ = (what, a, b);
    }

    /// Adds what [`Self::pack`] has packed.
    #[inline(always)]
    pub(crate) fn add_packed(&self, packed: u64) {
        if IS_TRACED {
            self.set((packed >> 32) as u32);
        }
    }

    /// A position with the notes in the upper half.
    #[inline(always)]
    pub(crate) fn pack(&self, position: u32) -> u64 {
        if IS_TRACED { u64::from(self.get()) << 32 | u64::from(position) } else { position.into() }
    }

    /// The Service has session affinity.
    #[inline(always)]
    pub(crate) fn on_affinity(&self, last: &AffinityEntry, entry: &AffinityEntry) {
        if !IS_TRACED {
            return;
        }
        let is_kept = last.used != 0 && last.backend == entry.backend;
        self.step(STEP_AFFINITY, last.used, entry.used);
        self.set(if is_kept { AFFINITY | AFFINITY_KEPT } else { AFFINITY });
    }

    /// A backend of this frontend is chosen.
    #[inline(always)]
    pub(crate) fn on_frontend(&self, frontend: &Frontend) {
        if IS_TRACED && frontend.options.least_connections() {
            self.set(LEAST_CONNECTIONS);
        }
        if IS_TRACED && frontend.options.slow_start() != 0 {
            self.set(SLOW_START);
        }
    }

    /// The backend that was chosen first is ejected, and another one is looked for.
    #[inline(always)]
    pub(crate) fn on_avoided(&self) {
        self.set(EJECTED_AVOIDED);
    }

    /// The backend was ejected.
    #[inline(always)]
    pub(crate) fn on_tried(&self) {
        self.set(EJECTED_TRIED);
    }
}
