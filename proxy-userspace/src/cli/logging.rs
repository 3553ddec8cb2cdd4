//! The log, on standard error; standard output is left to the commands' results.

use std::io::{IsTerminal as _, stderr};

use clap::{ArgAction, Args, ValueEnum};
use tracing::Level;

#[derive(Debug, Args)]
#[command(next_help_heading = "Logging")]
pub(super) struct LogFlags {
    /// Format of the log
    #[arg(long, default_value = "text", global = true)]
    log_format: LogFormat,
    /// Log at level debug; given twice: trace
    #[arg(short, long = "verbose", action = ArgAction::Count, global = true)]
    verbose: u8,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum LogFormat {
    /// Human-readable lines
    Text,
    /// One JSON object per line
    Json,
}

impl LogFlags {
    /// Installs the logger.
    pub(super) fn init(&self) {
        let level = match self.verbose {
            0 => Level::INFO,
            1 => Level::DEBUG,
            _ => Level::TRACE,
        };
        let log = tracing_subscriber::fmt().with_max_level(level).with_writer(stderr).with_target(false);
        match self.log_format {
            LogFormat::Text => log.with_ansi(stderr().is_terminal()).init(),
            LogFormat::Json => log.json().flatten_event(true).init(),
        }
    }
}
