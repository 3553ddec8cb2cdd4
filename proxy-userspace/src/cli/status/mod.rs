//! `status`: what is programmed in the kernel, Service by Service.
//!
//! Invariant: what is shown as programmed has been read from the kernel. The running process only adds the names.

mod json;
mod process;
mod seen;
mod table;

use std::{
    io::{self, IsTerminal as _, Write as _},
    thread,
    time::Duration,
};

use anyhow::Result;
use clap::{Args, ValueEnum};
use datapath_ebpf::Options;

use self::seen::Seen;

pub(super) use self::process::{PortName, Process, origin};
use super::{
    config,
    flags::{DatapathFlags, ReportFlags},
    output, reader,
};

/// How often `--watch` reads again.
const WATCH_INTERVAL: Duration = Duration::from_secs(2);

/// Show what is programmed in the kernel, Service by Service
///
/// Reads the kernel; the running process adds the names of Services, the age of the state and the rejected objects.
/// Without a running process, only the kernel's data is shown. What cannot be read is named, and the exit code is 1.
#[derive(Debug, Args)]
pub(super) struct Flags {
    #[command(flatten)]
    _config: config::ConfigFlag,
    /// Refresh every 2 s
    #[arg(long)]
    watch: bool,
    /// Output format
    #[arg(long, short, default_value = "table")]
    output: Output,
    #[command(flatten)]
    datapath: DatapathFlags,
    #[command(flatten)]
    reports: ReportFlags,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Output {
    /// A table
    Table,
    /// One JSON object
    Json,
}

/// What `status` prints: as a table and as JSON.
///
/// # Errors
///
/// If nothing is programmed.
pub(super) fn report(options: &Options, reports: &ReportFlags) -> Result<(String, String)> {
    let seen = Seen::read(options, Process::query(reports))?;
    Ok((table::render(&seen), format!("{}\n", json::render(&seen))))
}

/// Prints the status; returns whether everything could be read.
pub(super) fn main(flags: Flags) -> Result<bool> {
    // The name of the node does not matter for reading.
    let options = flags.datapath.options("")?;
    if flags.watch {
        reader::watch()?;
    }
    loop {
        // The process is queried first: the kernel's state is then at least as new.
        let process = Process::query(&flags.reports);
        let seen = Seen::read(&options, process)?;
        let text = match flags.output {
            Output::Table => table::render(&seen),
            Output::Json => format!("{}\n", json::render(&seen)),
        };
        if flags.watch && io::stdout().is_terminal() {
            // Clear the screen.
            io::stdout().write_all(b"\x1b[H\x1b[2J")?;
        }
        output::print(&text)?;
        if !flags.watch {
            return Ok(seen.errors().is_empty());
        }
        thread::sleep(WATCH_INTERVAL);
    }
}
