//! Texts for users that several commands print.

use std::{
    fmt,
    io::{self, ErrorKind, Write as _},
    path::Path,
};

use clap::ValueEnum;
use comfy_table::{Table, presets};
use model::escaped;

/// The output format of a command that prints one result.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum Output {
    /// Human-readable lines
    #[value(alias = "table")]
    Text,
    /// One JSON object
    Json,
}

/// How much of a long text is kept until it is written, in bytes.
const BUFFER: usize = 64 << 10;

/// Writes a long text as it is made. What the kernel, a process or a cluster's objects have contributed does not act on the
/// terminal.
pub(super) struct Escaped<W> {
    inner: W,
    text: Vec<u8>,
}

impl<W: io::Write> Escaped<W> {
    pub(super) fn new(inner: W) -> Self {
        Self { inner, text: Vec::new() }
    }

    /// Writes what is complete: a character may not be.
    fn drain(&mut self) -> io::Result<()> {
        let complete = match str::from_utf8(&self.text) {
            Err(error) if error.error_len().is_none() => error.valid_up_to(),
            _ => self.text.len(),
        };
        let text = String::from_utf8_lossy(&self.text[..complete]);
        self.inner.write_all(escaped(&text).as_bytes())?;
        self.text.drain(..complete);
        Ok(())
    }
}

impl<W: io::Write> io::Write for Escaped<W> {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        self.text.extend_from_slice(text);
        if self.text.len() >= BUFFER {
            self.drain()?;
        }
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.drain()?;
        self.inner.flush()
    }
}

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

/// Why the process at a socket cannot be asked; `absent` says what follows if there is none.
pub(super) fn unanswered(socket: &Path, error: &io::Error, absent: &str, remedy: &str) -> String {
    let at = socket.display();
    match error.kind() {
        ErrorKind::PermissionDenied => format!("{at}: {error}; run this as root, or {remedy}"),
        ErrorKind::NotFound | ErrorKind::ConnectionRefused => {
            format!("no process answers at {at}, {absent}: {remedy}")
        }
        _ => format!("{at}: {error}; {remedy}"),
    }
}

/// An error about flags that are valid one by one, but not together.
pub(super) fn wrong_usage(message: impl fmt::Display) -> anyhow::Error {
    clap::Error::raw(clap::error::ErrorKind::ArgumentConflict, format!("{message}\n")).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_character_in_two_pieces_is_escaped_as_one() {
        let mut written = Vec::new();
        let mut out = Escaped::new(&mut written);
        let text = "„ä\u{9b}“".repeat(BUFFER / 4);
        text.as_bytes().chunks(7).for_each(|it| out.write_all(it).unwrap());
        out.flush().unwrap();
        assert_eq!(String::from_utf8(written).unwrap(), escaped(&text));
    }
}
