//! `status`: what is programmed in the kernel, Service by Service.
//!
//! Invariant: what is shown as programmed has been read from the kernel. The running process only adds the names.

mod json;
mod names;
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

pub(super) use self::{
    names::PortName,
    process::{Process, origin},
    seen::Seen,
};
use super::{
    config,
    flags::{DatapathFlags, ReportFlags},
    output::Escaped,
    reader,
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
pub(super) enum Output {
    /// A table
    Table,
    /// One JSON object
    Json,
}

/// Writes what `status` prints; the frontends are read now.
pub(super) fn write(seen: &mut Seen, format: Output, mut out: &mut dyn io::Write) -> io::Result<()> {
    match format {
        Output::Table => table::write(seen, &mut out),
        Output::Json => json::write(seen, &mut out),
    }
}

/// Prints the status; returns whether everything could be read.
pub(super) fn main(flags: Flags) -> Result<bool> {
    // The name of the node does not matter for reading.
    let options = flags.datapath.options("", None)?;
    if flags.watch {
        reader::watch()?;
    }
    loop {
        let mut seen = Seen::read(&options, &flags.reports)?;
        if flags.watch && io::stdout().is_terminal() {
            // Clear the screen.
            io::stdout().write_all(b"\x1b[H\x1b[2J")?;
        }
        let mut out = Escaped::new(io::stdout().lock());
        write(&mut seen, flags.output, &mut out)?;
        out.flush()?;
        if !flags.watch {
            return Ok(seen.errors().is_empty());
        }
        thread::sleep(WATCH_INTERVAL);
    }
}
