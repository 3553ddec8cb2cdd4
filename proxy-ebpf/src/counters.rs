//! Counts connections and refused connections, in counters that outlast generations.
//!
//! Invariant: a counter is only ever added to.

use aya_ebpf::helpers::generated::bpf_get_smp_processor_id;
use proxy_common::{
    counters::{CONNECTIONS, CounterIndex, CounterStripe, NO_COUNTER, chunk_of, index_in_chunk},
    decide::Selection,
};

use crate::{atomic, config::STRIPE_MASK, maps::COUNTERS};

/// The row in which this CPU counts for a service port.
#[derive(Clone, Copy)]
pub(crate) struct Counter(*mut u64);

impl Counter {
    pub(crate) const NONE: Self = Self(core::ptr::null_mut());

    /// That of the service port with this first counter, which is prefetched into the cache.
    #[inline(always)]
    pub(crate) fn of(port_counter: CounterIndex) -> Self {
        let row = row(port_counter, stripe());
        if !row.is_null() {
            // SAFETY: as in `count`; volatile, or it would be optimized away.
            unsafe { row.add(index_in_chunk(port_counter)).read_volatile() };
        }
        Self(row)
    }

    /// Counts a connection, or the first datagram to a backend; not the further datagrams.
    #[inline(always)]
    pub(crate) fn connection(self, selection: &Selection) {
        let backend = selection.backend_counter;
        if backend == NO_COUNTER {
            return;
        }
        let port = selection.port_counter + CONNECTIONS;
        count(self.0, port);
        // They were allocated together, and are mostly in one chunk.
        let row = if chunk_of(backend) == chunk_of(port) { self.0 } else { row(backend, stripe()) };
        count(row, backend);
    }
}

/// Counts the same without a prefetched row, which may be null: one more state for the verifier to follow through
/// everything in between.
#[inline(always)]
pub(crate) fn connection(selection: &Selection) {
    if selection.backend_counter != NO_COUNTER {
        Counter::of(selection.port_counter).connection(selection);
    }
}

/// Increments a counter: of a system call that is not redirected that of the service port for the reason, such as
/// `port_counter` + [`NO_BACKEND`](proxy_common::counters::NO_BACKEND).
#[inline(always)]
pub(crate) fn increment(counter: CounterIndex) {
    count(row(counter, stripe()), counter);
}

/// Counts packets and their bytes, in two counters of which this is the first.
#[cfg(not(feature = "trace"))]
#[inline(always)]
pub(crate) fn packets(counter: CounterIndex, packets: u32, bytes: u32) {
    let row = row(counter, stripe());
    add(row, counter, packets.into());
    add(row, counter + 1, bytes.into());
}

/// The row of a chunk in which this CPU counts.
#[inline(always)]
fn stripe() -> u32 {
    // SAFETY: the helper takes nothing and touches nothing.
    unsafe { bpf_get_smp_processor_id() & STRIPE_MASK.load() }
}

/// A row of the chunk of a counter; null if there is none.
#[inline(always)]
fn row(counter: CounterIndex, number: u32) -> *mut u64 {
    let row = COUNTERS.get(chunk_of(counter)).and_then(|it| it.get_ptr_mut(number));
    row.map_or(core::ptr::null_mut(), <*mut CounterStripe>::cast)
}

/// The word of a counter in one of the rows after the stripes, by its number there.
#[inline(always)]
pub(crate) fn metadata(counter: CounterIndex, number: u32) -> Option<*mut u64> {
    let row = row(counter, STRIPE_MASK.load() + 1 + number);
    // SAFETY: the position is within the row.
    (!row.is_null()).then(|| unsafe { row.add(index_in_chunk(counter)) })
}

#[inline(always)]
fn count(row: *mut u64, counter: CounterIndex) {
    add(row, counter, 1);
}

#[inline(always)]
fn add(row: *mut u64, counter: CounterIndex, value: u64) {
    if !row.is_null() {
        // Another CPU may share the stripe, and a program may migrate from one CPU to another.
        // SAFETY: the position is within the row, and a row is never freed while its chunk is in the outer map.
        atomic::add(unsafe { row.add(index_in_chunk(counter)) }, value);
    }
}
