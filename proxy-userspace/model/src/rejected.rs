//! What is not served, beside what is.

use std::fmt;

/// Something that was refused, alone: what it is part of goes on without it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rejected {
    /// What was refused: the object and the field.
    pub item: String,
    /// Why, with the value, and what would do.
    pub reason: String,
}

impl fmt::Display for Rejected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.item, self.reason)
    }
}
