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

use admin::Status;
use anyhow::Result;
use clap::{Args, ValueEnum};
use datapath_ebpf::Options;

use self::seen::Seen;

pub(super) use self::{
    names::PortName,
    process::{Process, origin},
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

/// What `status` prints.
pub(super) struct Report(Seen);

impl Report {
    /// Reads the process and the kernel; the frontends are read when they are written.
    ///
    /// # Errors
    ///
    /// If nothing is programmed.
    pub(super) fn read(options: &Options, reports: &ReportFlags) -> Result<Self> {
        // The process is queried first: the kernel's state is then at least as new.
        Ok(Self(Seen::read(options, Process::query(reports))?))
    }

    /// The Services that have frontends, as in `default/web`.
    pub(super) fn services(&self) -> impl Iterator<Item = &str> {
        self.0.rows.services()
    }

    /// The status of the process, if one answers.
    pub(super) fn process(&self) -> Option<&Status> {
        self.0.process.status.as_deref()
    }

    pub(super) fn write(&mut self, format: Output, mut out: &mut dyn io::Write) -> io::Result<()> {
        match format {
            Output::Table => table::write(&mut self.0, &mut out),
            Output::Json => json::write(&mut self.0, &mut out),
        }
    }
}

/// Prints the status; returns whether everything could be read.
pub(super) fn main(flags: Flags) -> Result<bool> {
    // The name of the node does not matter for reading.
    let options = flags.datapath.options("")?;
    if flags.watch {
        reader::watch()?;
    }
    loop {
        let mut report = Report::read(&options, &flags.reports)?;
        if flags.watch && io::stdout().is_terminal() {
            // Clear the screen.
            io::stdout().write_all(b"\x1b[H\x1b[2J")?;
        }
        let mut out = Escaped::new(io::stdout().lock());
        report.write(flags.output, &mut out)?;
        out.flush()?;
        if !flags.watch {
            return Ok(report.0.errors().is_empty());
        }
        thread::sleep(WATCH_INTERVAL);
    }
}
