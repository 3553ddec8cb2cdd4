//! What lines of log are made of, see [`crate::log`].

use aya_ebpf::{btf_maps::Array, macros::btf_map};
use proxy_common::trace::{LINES_PAUSED, LINES_SAID};

use crate::atomic;

/// How many lines were said, lost ones included; and not zero while they are not written.
#[btf_map]
static LINES: Array<u64, 2> = Array::new();

/// Names by number, all of one length: the verifier would follow each length.
type Names = [[u8; 8]; 8];

pub(crate) static VERDICTS: Names = [
    *b"        ",
    *b"passed  ",
    *b"excluded",
    *b"packets ",
    *b"redirect",
    *b"refused ",
    *b"no room ",
    *b"        ",
];
pub(crate) static SCOPES: Names = [
    *b"none    ",
    *b"local   ",
    *b"remote  ",
    *b"loopback",
    *b"device  ",
    *b"        ",
    *b"        ",
    *b"        ",
];

#[inline(always)]
pub(crate) fn name(names: &'static Names, number: u64) -> &'static str {
    // SAFETY: it is ASCII.
    unsafe { core::str::from_utf8_unchecked(&names[number as usize % names.len()]) }
}

/// Whether the reader has more lines than it can keep.
#[inline(always)]
pub(crate) fn is_paused() -> bool {
    // SAFETY: a slot of an array is never freed; volatile, as user space writes to it.
    LINES.get_ptr(LINES_PAUSED).is_some_and(|it| unsafe { it.read_volatile() } != 0)
}

/// Counts a line, after it was written: a reader then never counts one as lost that is still to come.
#[inline(always)]
pub(crate) fn count() {
    if let Some(said) = LINES.get_ptr_mut(LINES_SAID) {
        atomic::add(said, 1);
    }
}
