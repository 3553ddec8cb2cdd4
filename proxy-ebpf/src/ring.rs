//! The ring buffer that the traced variant of the programs reports to.
//!
//! Invariant: what finds no room is counted; no reader is woken.

use aya_ebpf::{
    bindings::BPF_RB_NO_WAKEUP,
    btf_maps::{Array, RingBuf},
    helpers::generated::bpf_ringbuf_output,
    macros::btf_map,
};
use proxy_common::trace::{Event, RING_BYTES};

use crate::atomic;

#[btf_map]
pub(crate) static EVENTS: RingBuf<Event, RING_BYTES> = RingBuf::new();
/// How many events found no room.
#[btf_map]
static LOST: Array<u64, 1> = Array::new();

/// Copies an event into the ring buffer.
#[inline(always)]
pub(crate) fn output(event: *mut Event) {
    // SAFETY: both are valid, and the size is that of an event.
    let result = unsafe {
        bpf_ringbuf_output(
            (&raw const EVENTS).cast_mut().cast(),
            event.cast(),
            size_of::<Event>() as u64,
            u64::from(BPF_RB_NO_WAKEUP),
        )
    };
    if result < 0 {
        count_lost();
    }
}

/// Counts an event that found no room.
#[inline(always)]
pub(crate) fn count_lost() {
    if let Some(lost) = LOST.get_ptr_mut(0) {
        atomic::add(lost, 1);
    }
}
