//! Counts what becomes of connections, in cells that outlast generations.
//!
//! The one rule: a cell is only ever added to.

use aya_ebpf::helpers::generated::bpf_get_smp_processor_id;
use proxy_common::{
    counters::{CONNECTIONS, Cell, REFUSALS, REJECTIONS, UNCOUNTED, chunk, place},
    decide::Led,
};

use crate::{
    atomic,
    maps::{COUNTERS, stripe_mask},
};

/// Counts a connection, or the first datagram to a backend; not what goes on with one.
#[inline(always)]
pub(crate) fn connection<Backend>(led: &Led<Backend>) {
    if led.cell != UNCOUNTED {
        count(led.port + CONNECTIONS);
        count(led.cell);
    }
}

/// Counts a connection that found no backend.
#[inline(always)]
pub(crate) fn refusal(port: Cell) {
    count(port + REFUSALS);
}

/// Counts what a service port was in the way of, or had no memory for.
#[inline(always)]
pub(crate) fn rejection(port: Cell) {
    count(port + REJECTIONS);
}

#[inline(always)]
fn count(cell: Cell) {
    // SAFETY: the helper takes nothing and touches nothing.
    let stripe = unsafe { bpf_get_smp_processor_id() } & stripe_mask();
    let Some(row) = COUNTERS.get(chunk(cell)).and_then(|it| it.get_ptr_mut(stripe)) else { return };
    // SAFETY: the place is within the row, and a row is never freed while its chunk is in the outer map.
    let cell = unsafe { row.cast::<u64>().add(place(cell)) };
    // Another CPU may share the stripe, and a program may be moved from one CPU to another.
    atomic::add(cell, 1);
}
