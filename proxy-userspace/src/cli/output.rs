//! Texts for users that several commands print.

use std::{
    fmt,
    io::{self, Write as _},
};

use clap::error::ErrorKind;
use comfy_table::{Table, presets};
use model::escaped;

/// Prints a result. What the kernel, a process or a cluster's objects have contributed does not act on the terminal.
pub(super) fn print(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(escaped(text).as_bytes())?;
    stdout.flush()
}

/// The rows of a table, without lines between them.
pub(super) fn lines(table: &mut Table) -> String {
    let lines = table.load_preset(presets::NOTHING).lines();
    lines.map(|it| format!("{}\n", it.trim())).collect()
}

/// A number of seconds in its two largest units.
pub(super) fn duration(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        3600..86400 => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
        _ => format!("{} d {} h", seconds / 86400, seconds / 3600 % 24),
    }
}

/// An error about flags that are valid one by one, but not together.
pub(super) fn wrong_usage(message: impl fmt::Display) -> anyhow::Error {
    clap::Error::raw(ErrorKind::ArgumentConflict, format!("{message}\n")).into()
}
