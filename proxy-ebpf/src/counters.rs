//! Counts what becomes of connections, in cells that outlast generations.
//!
//! The one rule: a cell is only ever added to.

use aya_ebpf::helpers::generated::bpf_get_smp_processor_id;
use proxy_common::{
    counters::{CONNECTIONS, Cell, REFUSALS, REJECTIONS, Row, UNCOUNTED, chunk, place},
    decide::Led,
};

use crate::{
    atomic,
    maps::{COUNTERS, stripe_mask},
};

/// Where this CPU counts for a service port.
#[derive(Clone, Copy)]
pub(crate) struct Counter(*mut u64);

impl Counter {
    /// Of nobody.
    pub(crate) const NONE: Self = Self(core::ptr::null_mut());

    /// That of a service port, by its first cell, which comes into the cache from here on.
    #[inline(always)]
    pub(crate) fn of(port: Cell) -> Self {
        let row = row(port, stripe());
        if !row.is_null() {
            // SAFETY: as in `count`; volatile, or it would be left out.
            unsafe { row.add(place(port)).read_volatile() };
        }
        Self(row)
    }

    /// Counts a connection, or the first datagram to a backend; not what goes on with one.
    #[inline(always)]
    pub(crate) fn connection<Backend>(self, led: &Led<Backend>) {
        if led.cell == UNCOUNTED {
            return;
        }
        let port = led.port + CONNECTIONS;
        count(self.0, port);
        // They were handed out together, and are mostly in one chunk.
        let row = if chunk(led.cell) == chunk(port) { self.0 } else { row(led.cell, stripe()) };
        count(row, led.cell);
    }
}

/// Counts the same where the verifier has enough to follow: a row that may not be there is one case more for all that
/// comes after it.
#[inline(always)]
pub(crate) fn connection<Backend>(led: &Led<Backend>) {
    if led.cell != UNCOUNTED {
        Counter::of(led.port).connection(led);
    }
}

/// Counts a connection that found no backend.
#[inline(always)]
pub(crate) fn refusal(port: Cell) {
    let cell = port + REFUSALS;
    count(row(cell, stripe()), cell);
}

/// Counts what a service port was in the way of, or had no memory for.
#[inline(always)]
pub(crate) fn rejection(port: Cell) {
    let cell = port + REJECTIONS;
    count(row(cell, stripe()), cell);
}

/// In which row of a chunk this CPU counts.
#[inline(always)]
fn stripe() -> u32 {
    // SAFETY: the helper takes nothing and touches nothing.
    unsafe { bpf_get_smp_processor_id() & stripe_mask() }
}

/// The row with a cell; null if there is none.
#[inline(always)]
fn row(cell: Cell, stripe: u32) -> *mut u64 {
    let row = COUNTERS.get(chunk(cell)).and_then(|it| it.get_ptr_mut(stripe));
    row.map_or(core::ptr::null_mut(), <*mut Row>::cast)
}

/// Adds to a cell of a row.
#[inline(always)]
fn count(row: *mut u64, cell: Cell) {
    if !row.is_null() {
        // Another CPU may share the stripe, and a program may be moved from one CPU to another.
        // SAFETY: the place is within the row, and a row is never freed while its chunk is in the outer map.
        atomic::add(unsafe { row.add(place(cell)) }, 1);
    }
}
