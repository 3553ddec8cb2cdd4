//! The kernel objects, which the build script embeds into this binary.

use crate::error::Error;

static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/kernel.o"));
static TRACED: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/kernel-trace.o"));

/// The kernel object; an error if the binary was built without it.
pub(super) fn bytes() -> Result<&'static [u8], Error> {
    if OBJECT.is_empty() { Err(Error::NoKernelObject) } else { Ok(OBJECT) }
}

/// The kernel object with the traced variant of the programs; an error if the binary was built without it.
pub(super) fn traced() -> Result<&'static [u8], Error> {
    if TRACED.is_empty() { Err(Error::NoTracedPrograms) } else { Ok(TRACED) }
}
