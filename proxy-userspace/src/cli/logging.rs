//! The log: on standard error, so that standard output is the answer alone.

use clap::{ArgAction, Args, ValueEnum};
use tracing::Level;

#[derive(Debug, Args)]
#[command(next_help_heading = "Log")]
pub(super) struct Flags {
    /// How to write the log
    #[arg(long, value_enum, default_value = "text", env = "KUBE_PROXY_EBPF_LOG_FORMAT", global = true)]
    log_format: LogFormat,
    /// Say more; twice: everything
    #[arg(short, long = "verbose", action = ArgAction::Count, env = "KUBE_PROXY_EBPF_VERBOSE", global = true)]
    verbose: u8,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum LogFormat {
    /// Lines for people
    Text,
    /// One JSON object a line
    Json,
}

impl Flags {
    /// Begins to log.
    pub(super) fn start(&self) {
        let level = match self.verbose {
            0 => Level::INFO,
            1 => Level::DEBUG,
            _ => Level::TRACE,
        };
        let log =
            tracing_subscriber::fmt().with_max_level(level).with_writer(std::io::stderr).with_target(false);
        match self.log_format {
            LogFormat::Text => log.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr())).init(),
            LogFormat::Json => log.json().flatten_event(true).init(),
        }
    }
}
