//! A part of the input that is not served.

use std::fmt;

/// One rejected part of an object; the rest of the object is served without it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rejected {
    /// The object and the field.
    pub item: String,
    /// Why it was rejected, with the value, and what would be accepted.
    pub reason: String,
}

impl fmt::Display for Rejected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.item, self.reason)
    }
}
