//! Arbitrary bytes as a list of an API server.

use crate::api_watch::{check, with_reflectors};

/// A list has the same objects however it arrives. The first two bytes are the kind of its objects and the size of a fragment.
pub fn target(bytes: &[u8]) {
    let [kind, size, body @ ..] = bytes else { return };
    with_reflectors(|it| check(&it.list(*kind, usize::from(*size) + 1, body)));
}
