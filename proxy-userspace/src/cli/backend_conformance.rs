//! `backend-conformance`: plays scenarios to a backend, and asks it where connections go.

use std::{ffi::OsString, fs, io::Write as _, path::PathBuf, time::Duration};

use anyhow::{Context as _, Result};
use backend_conformance::{Options, Report, Skips, names, run};
use clap::Args;

use super::output;

/// Play scenarios to a backend of any language, and ask it where connections go
///
/// A brain in this process serves the states of the scenarios to the backend, is killed and comes back, and changes the
/// state often and at scale; after each state the backend is asked where connections go. It changes nothing on this machine.
///
/// The command finds its brain in $KUBE_PROXY_EBPF_TARGET, its node in $NODE_NAME, the ranges whose sources are inside the
/// cluster in $KUBE_PROXY_EBPF_CLUSTER_CIDRS, and the addresses of its node in $KUBE_PROXY_EBPF_NODE_ADDRESSES. On standard
/// input it gets questions, as `lookup SRC DST PORT PROTO`, and answers each by one line: the endpoints as ADDRESS:PORT,
/// sorted, with blanks between; `refuse` or `drop`; or an empty line for what no Service has. The rules are those of
/// docs/contract.md.
#[derive(Debug, Args)]
pub(super) struct Flags {
    /// Ask the command by lines on its standard input and output
    #[arg(long, required_unless_present = "list")]
    lines: bool,
    /// The backend's command and its arguments, after `--`
    #[arg(value_name = "COMMAND", last = true, required_unless_present = "list")]
    command: Vec<OsString>,
    /// Only run cases whose names contain this
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// Skip the cases and features that this file lists, with reasons
    ///
    /// A line is `CASE: REASON` or `FEATURE: REASON`. A case may end in `*`; features are ipv6, udp, sctp and node-ports.
    #[arg(long, value_name = "FILE")]
    skip: Option<PathBuf>,
    /// Also write the results to this file, in the format of JUnit
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    /// How long the backend may take to apply a state, a reconnect included
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    timeout: u64,
    /// Print the names of the cases, and exit
    #[arg(long)]
    list: bool,
}

/// Whether no case has failed.
pub(super) fn main(flags: Flags) -> Result<bool> {
    if flags.list {
        output::print(&names().into_iter().map(|it| it + "\n").collect::<String>())?;
        return Ok(true);
    }
    let skips = match &flags.skip {
        Some(path) => {
            let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
            Skips::parse(&text).with_context(|| path.display().to_string())?
        }
        None => Skips::default(),
    };
    let options = Options {
        command: flags.command,
        timeout: Duration::from_secs(flags.timeout),
        filter: flags.filter,
        skips,
    };
    let report = run(&options, |it| {
        // The table has it again; a failure to show progress is none of the results.
        let _ = write!(std::io::stderr(), "{}", if it.is_failure() { 'F' } else { '.' });
    })?;
    eprintln!();
    output::print(&report.table())?;
    write_junit(flags.junit, &report)?;
    Ok(report.is_success())
}

fn write_junit(path: Option<PathBuf>, report: &Report) -> Result<()> {
    let Some(path) = path else { return Ok(()) };
    fs::write(&path, report.junit()).with_context(|| format!("cannot write {}", path.display()))
}
