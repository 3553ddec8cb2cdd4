//! The ring buffer that the traced variant of the programs reports to.
//!
//! Invariant: what finds no room is counted; no reader is woken.

use aya_ebpf::{
    Global,
    bindings::BPF_RB_NO_WAKEUP,
    btf_maps::{Array, RingBuf},
    helpers::generated::bpf_ringbuf_output,
    macros::btf_map,
};
use proxy_common::trace::{Event, RING_BYTES, Step};

use crate::atomic;

/// Events and steps.
#[btf_map]
pub(crate) static EVENTS: RingBuf<Event, RING_BYTES> = RingBuf::new();
/// How many found no room.
#[btf_map]
static LOST: Array<u64, 1> = Array::new();

/// Not zero if the steps of decisions are reported.
#[unsafe(no_mangle)]
pub(crate) static STEPS: Global<u64> = Global::new(0);

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

/// Counts what found no room.
#[inline(always)]
pub(crate) fn count_lost() {
    if let Some(lost) = LOST.get_ptr_mut(0) {
        atomic::add(lost, 1);
    }
}

/// Reports a step of a decision, unless the socket is 0. Not inlined, so that the verifier follows its paths once, see
/// `side::choose`.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn report_step(socket: u64, what: u64, a: u64, b: u64) -> u64 {
    if socket == 0 {
        return 0;
    }
    let Some(mut entry) = EVENTS.reserve_untyped::<Step>(0) else {
        count_lost();
        return 0;
    };
    let step = entry.as_mut_ptr();
    // SAFETY: the verifier checks that there is room.
    unsafe {
        (*step).socket = socket;
        (*step).a = a;
        (*step).b = b;
        (*step).what = what;
    }
    entry.submit(u64::from(BPF_RB_NO_WAKEUP));
    0
}
