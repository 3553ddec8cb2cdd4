//! Whether the packet path translates what is left to it.

use crate::maps::PACKET_PATH;

#[inline(always)]
pub(crate) fn serves() -> bool {
    // SAFETY: a slot of an array is never freed; volatile, so that it is one load.
    PACKET_PATH.get_ptr(0).is_some_and(|it| unsafe { it.read_volatile() } != 0)
}
