//! The kernel object inside this binary, put there by the build script.

use crate::error::Error;

static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/kernel.o"));

/// The object; an error if the binary was built without.
pub(super) fn bytes() -> Result<&'static [u8], Error> {
    if OBJECT.is_empty() { Err(Error::NoKernelObject) } else { Ok(OBJECT) }
}
