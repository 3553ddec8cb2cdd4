//! `backend-conformance`: plays scenarios to a backend, and asks it where connections go.

use std::{
    env,
    ffi::OsString,
    fs,
    io::{self, Write as _},
    path::{Path, PathBuf},
    process,
    time::Duration,
};

use anyhow::{Context as _, Result};
use backend_conformance::{CLUSTER_CIDRS, Interface, NODE, RunOptions, Skips, names, run};
use clap::{ArgGroup, Args, ValueEnum};

use super::output;

/// Play scenarios to a backend of any language, and ask it where connections go
///
/// A brain in this process serves the states of the scenarios to the backend, is killed and comes back, and changes the
/// state often and at scale; after each state the backend is asked where connections go. It changes nothing on this machine
/// that outlives it.
///
/// With --packets, --listeners, or --backend for this program's own backends, the backend runs in a network namespace of its own, where
/// packets from pods and from outside are sent to it; what leaves the node says where they go. That needs root, and `ip`.
///
/// The command finds its brain in $KUBE_PROXY_EBPF_TARGET, its node in $NODE_NAME, the ranges whose sources are inside the
/// cluster in $KUBE_PROXY_EBPF_CLUSTER_CIDRS, and the addresses of its node in $KUBE_PROXY_EBPF_NODE_ADDRESSES. With
/// --lines it gets on standard input questions, as `lookup SRC DST PORT PROTO`, and answers each by one line: the endpoints as ADDRESS:PORT,
/// sorted, with blanks between; `refuse` or `drop`; or an empty line for what no Service has. The rules are those of
/// docs/contract.md.
///
/// Standard error gets a line for each case when it ends, with the wrong answers of a failed one, and one when a case waits
/// long; standard output gets the names of the failed cases and the totals.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("asked").args(["lines", "packets_of", "listeners_of", "own_backend", "list"]).required(true))]
pub(super) struct Flags {
    /// Ask the command by lines on its standard input and output
    #[arg(long, requires = "command")]
    lines: bool,
    /// Ask the command by packets in a network namespace of its own: for a backend that programs the kernel
    #[arg(id = "packets_of", long = "packets", requires = "command")]
    packets: bool,
    /// Ask the command by connections to what it listens at, in a network namespace whose addresses are those of the Services: for
    /// a backend of sockets, whose brain is at a TCP port there
    #[arg(id = "listeners_of", long = "listeners", requires = "command")]
    listeners: bool,
    /// Ask a backend of this program: by packets, and with `ebpf` by sockets for what pods do
    #[arg(id = "own_backend", long = "backend", conflicts_with = "command")]
    backend: Option<OwnBackend>,
    /// The backend's command and its arguments, after `--`
    #[arg(value_name = "COMMAND", last = true)]
    command: Vec<OsString>,
    /// Append what a backend of --packets, --listeners or --backend logs to this file [default: discarded]
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// Only run cases whose names contain this
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// Skip the cases and features that this file lists, with reasons
    ///
    /// A line is `CASE: REASON` or `FEATURE: REASON`. A case may end in `*`; features are ipv6, udp, sctp and node-ports.
    #[arg(long, value_name = "FILE")]
    skip: Option<PathBuf>,
    /// Run all cases, even if 10 in a row fail
    #[arg(long)]
    keep_going: bool,
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

/// The backends of `agent`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum OwnBackend {
    /// eBPF for sockets, nftables for packets
    Ebpf,
    /// nftables for everything
    Nft,
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
    let (command, interface) = match flags.backend {
        None if flags.packets => (flags.command, Interface::Packets),
        None if flags.listeners => (flags.command, Interface::Listeners),
        None => (flags.command, Interface::Lines),
        Some(backend) => own(backend)?,
    };
    let _pins = matches!(interface, Interface::Sockets { .. }).then(|| Pins);
    let options = RunOptions {
        command,
        interface,
        log: flags.log,
        timeout: Duration::from_secs(flags.timeout),
        filter: flags.filter,
        skips,
        keep_going: flags.keep_going,
    };
    let report = run(&options, &|it| {
        // One write, since the backend may log there. A failure to show progress is not one of the backend.
        let _ = io::stderr().write_all(format!("{}\n", model::escaped(it)).as_bytes());
    })?;
    output::print(&report.summary())?;
    if let Some(path) = flags.junit {
        fs::write(&path, report.junit()).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(report.is_success())
}

/// The command of a backend of this program, and how it is asked.
fn own(backend: OwnBackend) -> Result<(Vec<OsString>, Interface)> {
    let program = env::current_exe().context("cannot find this program")?;
    // No page: several may run at a time.
    let pages =
        ["--status-socket=", "--metrics-bind-address=", "--healthz-bind-address=", "--probe-bind-address="];
    let node = ["--node-name", NODE, "--cluster-cidr", CLUSTER_CIDRS];
    let mut command = vec![program.into(), "agent".into()];
    command.extend(node.into_iter().chain(pages).map(OsString::from));
    let mut add = |words: &[&str]| command.extend(words.iter().map(OsString::from));
    // The limits of connection tracking are those of the machine.
    let untouched = ["--conntrack-max-per-core", "0", "--conntrack-min", "0"];
    let interface = match backend {
        OwnBackend::Nft => {
            add(&["--backend", "nft"]);
            add(&untouched);
            Interface::Packets
        }
        OwnBackend::Ebpf => {
            let cgroup = datapath_ebpf::find_cgroup2()?.join(own_folder());
            add(&["--backend", "ebpf", "--packets", "nft"]);
            add(&untouched);
            command.extend(["--cgroup".into(), cgroup.clone().into(), "--pin-dir".into(), pin_dir().into()]);
            Interface::Sockets { cgroup }
        }
    };
    Ok((command, interface))
}

fn own_folder() -> String {
    format!("kube-proxy-ebpf-conformance-{}", process::id())
}

fn pin_dir() -> PathBuf {
    Path::new("/sys/fs/bpf").join(own_folder())
}

/// Removes what the eBPF backend has left, when dropped.
struct Pins;

impl Drop for Pins {
    fn drop(&mut self) {
        if let Err(error) = datapath_ebpf::cleanup(&pin_dir()) {
            tracing::warn!("{} is left: {error}", pin_dir().display());
        }
    }
}
