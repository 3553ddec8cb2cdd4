//! Wrong usage that clap does not recognize.

use std::fmt;

use clap::error::ErrorKind;

/// An error about flags that are valid one by one, but not together.
pub(super) fn wrong_usage(message: impl fmt::Display) -> anyhow::Error {
    clap::Error::raw(ErrorKind::ArgumentConflict, format!("{message}\n")).into()
}
