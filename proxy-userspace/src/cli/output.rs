//! Texts for users that several commands print.

use std::fmt;

use clap::error::ErrorKind;
use comfy_table::{Table, presets};

/// The rows of a table, without lines between them.
pub(super) fn lines(table: &mut Table) -> String {
    let lines = table.load_preset(presets::NOTHING).lines();
    lines.map(|it| format!("{}\n", it.trim())).collect()
}

/// An error about flags that are valid one by one, but not together.
pub(super) fn wrong_usage(message: impl fmt::Display) -> anyhow::Error {
    clap::Error::raw(ErrorKind::ArgumentConflict, format!("{message}\n")).into()
}
