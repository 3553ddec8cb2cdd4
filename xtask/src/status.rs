//! One line that says what is going on, while something takes long.
//! The one rule: a terminal sees it change in place, a log sees a line now and then.

use std::{
    io::{self, IsTerminal as _, Write as _},
    time::{Duration, Instant},
};

/// How often a log gets a line.
const PACE: Duration = Duration::from_secs(15);

/// The line, on standard error; gone when dropped.
pub(crate) struct Status {
    is_terminal: bool,
    written: Option<Instant>,
}

impl Status {
    /// An empty line.
    pub(crate) fn new() -> Self {
        Self { is_terminal: io::stderr().is_terminal(), written: None }
    }

    /// Shows this now, or, in a log, if the last line is a while ago.
    pub(crate) fn show(&mut self, text: &str) {
        if self.is_terminal {
            let width = std::env::var("COLUMNS").ok().and_then(|it| it.parse().ok()).unwrap_or(100);
            let text: String = text.chars().take(width).collect();
            // There is nobody to tell if this fails.
            let _ = write!(io::stderr(), "\r\x1b[K{text}");
        } else if self.written.is_none_or(|it| it.elapsed() > PACE) {
            eprintln!("{text}");
            self.written = Some(Instant::now());
        }
    }

    /// Takes the line away, so that something else can be printed.
    pub(crate) fn clear(&self) {
        if self.is_terminal {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

impl Drop for Status {
    fn drop(&mut self) {
        self.clear();
    }
}
