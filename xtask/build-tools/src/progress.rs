//! A progress line for tasks that take long: updated in place on a terminal, printed every few seconds to a log.

use std::{
    io::{self, IsTerminal as _, Write as _},
    time::{Duration, Instant},
};

/// How often a log gets a line.
const LOG_INTERVAL: Duration = Duration::from_secs(15);

/// The line, on standard error; removed when dropped.
#[derive(Debug)]
pub struct ProgressLine {
    is_terminal: bool,
    last_logged: Option<Instant>,
}

impl ProgressLine {
    /// Shows `text`; in a log only if the last line is older than [`LOG_INTERVAL`].
    pub fn show(&mut self, text: &str) {
        if self.is_terminal {
            let width = std::env::var("COLUMNS").ok().and_then(|it| it.parse().ok()).unwrap_or(100);
            let text: String = text.chars().take(width).collect();
            // Progress that cannot be shown is no failure.
            let _ = write!(io::stderr(), "\r\x1b[K{text}");
        } else if self.last_logged.is_none_or(|it| it.elapsed() > LOG_INTERVAL) {
            eprintln!("{text}");
            self.last_logged = Some(Instant::now());
        }
    }

    /// Removes the line, so that something else can be printed.
    pub fn clear(&self) {
        if self.is_terminal {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

impl Default for ProgressLine {
    fn default() -> Self {
        Self { is_terminal: io::stderr().is_terminal(), last_logged: None }
    }
}

impl Drop for ProgressLine {
    fn drop(&mut self) {
        self.clear();
    }
}
