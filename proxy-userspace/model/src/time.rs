//! A moment, as objects of a cluster name it. Nothing here asks for the time.

/// Microseconds since the beginning of 1970, UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(i64);

impl Timestamp {
    /// The moment so many microseconds after the beginning of 1970.
    pub const fn from_micros(micros: i64) -> Self {
        Self(micros)
    }

    /// Microseconds since the beginning of 1970.
    pub const fn as_micros(self) -> i64 {
        self.0
    }
}
