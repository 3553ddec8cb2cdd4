//! What a map can hold.

use std::fmt;

/// An object that has its key in it.
pub trait Keyed {
    /// The key.
    type Key: Ord + Clone + fmt::Debug;

    /// The key of this object.
    fn key(&self) -> &Self::Key;
}
