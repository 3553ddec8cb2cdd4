//! `status`: what is programmed right now, Service by Service.
//!
//! The one rule: what is shown as programmed was read from the kernel. The process that runs only adds the names.

mod json;
mod process;
mod table;

use std::{
    io::{self, IsTerminal as _, Write as _},
    thread,
    time::Duration,
};

use anyhow::Result;
use clap::{Args, ValueEnum};
use datapath::{ActiveFrontend, AttachStatus};
use datapath_ebpf::{self as ebpf, Counts, Options};
use datapath_nft as nft;

use self::process::{Name, Process};
use super::{config, flags};

/// How often `--watch` looks again.
const AGAIN: Duration = Duration::from_secs(2);

/// Show what is programmed right now, Service by Service
///
/// What is programmed is read from the kernel; the process that runs is asked for the names, the age of the state, and
/// what it refuses. Where none runs, the kernel's part is shown alone. What cannot be read is named, beside what can, and
/// the exit code is 1.
#[derive(Debug, Args)]
pub(super) struct Flags {
    #[command(flatten)]
    _config: config::ConfigFlag,
    #[command(flatten)]
    datapath: flags::DatapathFlags,
    #[command(flatten)]
    reports: flags::ReportFlags,
    /// Show it again every two seconds
    #[arg(long)]
    watch: bool,
    /// How to print it
    #[arg(long, short, value_enum, default_value = "table", env = "KUBE_PROXY_EBPF_OUTPUT")]
    output: Output,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Output {
    /// A table for people
    Table,
    /// One JSON object
    Json,
}

/// Looks, tells, and says whether all could be read.
pub(super) fn main(flags: Flags) -> Result<bool> {
    // What is looked at does not depend on the name of the node.
    let options = flags.datapath.options("")?;
    loop {
        // What the process says comes first: what is in the kernel is then as new, or newer.
        let process = Process::ask(&flags.reports);
        let seen = Seen::look(&options, process)?;
        let text = match flags.output {
            Output::Table => seen.table(),
            Output::Json => format!("{}\n", seen.json()),
        };
        let mut stdout = io::stdout().lock();
        if flags.watch && io::stdout().is_terminal() {
            // To the top, and away with what was there.
            stdout.write_all(b"\x1b[H\x1b[2J")?;
        }
        stdout.write_all(text.as_bytes())?;
        stdout.flush()?;
        if !flags.watch {
            return Ok(seen.errors().is_empty());
        }
        thread::sleep(AGAIN);
    }
}

/// What was seen at one time. What could not be read is a text that says why.
struct Seen {
    led: Vec<ActiveFrontend>,
    /// How many generations the programs have led by; none where there are no maps of theirs.
    generation: Result<Option<u32>, String>,
    counts: Result<Counts, String>,
    hooks: Result<AttachStatus, String>,
    packets: Result<String, String>,
    process: Process,
}

impl Seen {
    /// Looks at sockets and at packets; the latter lead where nobody leads sockets.
    ///
    /// # Errors
    ///
    /// If it is known that nothing is in force.
    fn look(options: &Options, process: Process) -> Result<Self> {
        let pins = &options.pin_dir;
        let led = ebpf::active_frontends(pins).and_then(|led| Ok((led, ebpf::generation(pins)?)));
        let (led, generation) = match led {
            Ok((led, generation)) => (led, Ok(Some(generation))),
            Err(error) => {
                // If these cannot be read, that is what is said of packets.
                let packets = nft::active_frontends();
                match error {
                    ebpf::Error::Nothing(_) if packets.as_ref().is_ok_and(Vec::is_empty) => {
                        return Err(error.into());
                    }
                    ebpf::Error::Nothing(_) => (packets.unwrap_or_default(), Ok(None)),
                    error => (packets.unwrap_or_default(), Err(said(error))),
                }
            }
        };
        let packets = match nft::check::tables(matches!(generation, Ok(Some(_)))) {
            Ok(finding) => Ok(finding.says),
            // That is a fact, and no failure to see.
            Err(error) if error.is_for_want_of_nftables() => Ok(said(error)),
            Err(error) => Err(said(error)),
        };
        Ok(Self {
            led,
            generation,
            // Packets are not counted by Service.
            counts: ebpf::counts(pins).map_err(said),
            hooks: ebpf::query_at(options.cgroup.as_deref(), pins).map_err(said),
            packets,
            process,
        })
    }

    /// With their names, in the order of these.
    fn rows(&self) -> Vec<(Name, &ActiveFrontend)> {
        let name = |it: &ActiveFrontend| self.process.names.get(&it.frontend).cloned().unwrap_or_default();
        let mut rows: Vec<_> = self.led.iter().map(|it| (name(it), it)).collect();
        rows.sort_by(|(a, _), (b, _)| (&a.service, &a.port).cmp(&(&b.service, &b.port)));
        rows
    }

    /// Whether there are no programs to be in effect: then nothing is pinned either.
    fn are_packets_alone(&self) -> bool {
        let is_pinned = |it: &AttachStatus| it.hooks.iter().any(|it| it.program.is_some());
        self.generation == Ok(None) && self.packets.is_ok() && !self.hooks.as_ref().is_ok_and(is_pinned)
    }

    /// What could not be read.
    fn errors(&self) -> Vec<&String> {
        let hooks = self.hooks.as_ref().err().filter(|_| !self.are_packets_alone());
        let maps = [self.generation.as_ref().err(), self.counts.as_ref().err()];
        maps.into_iter().chain([hooks, self.packets.as_ref().err()]).flatten().collect()
    }
}

/// An error with what has caused it.
fn said(error: impl Into<anyhow::Error>) -> String {
    format!("{:#}", error.into())
}
