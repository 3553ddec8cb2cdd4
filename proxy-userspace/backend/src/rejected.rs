//! What a backend cannot serve, beside what it serves.

use std::fmt;

/// One item of a state that is not served, and why. Everything beside it is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rejected {
    /// The item: a Service, with its port or address where only that is rejected.
    pub item: String,
    /// Why, and what would help.
    pub reason: String,
}

impl fmt::Display for Rejected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.item, self.reason)
    }
}
