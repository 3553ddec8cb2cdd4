//! The command line: flags, subcommands and wiring. The only place that knows all crates.
//!
//! Exit codes: 0 done, 1 failed, 64 wrong usage (`EX_USAGE` of sysexits(3)).

mod agent;
mod backend_conformance;
mod backend_process;
mod brain;
mod check;
mod cleanup;
mod config;
mod datapath;
mod dump;
mod empty_values;
mod events;
mod explain;
mod flags;
mod grpc_server;
mod kube_proxy;
mod log_queue;
mod logging;
mod nodes;
mod output;
mod print;
mod reader;
mod render;
mod run;
mod runtime;
mod status;
mod support_bundle;
mod top;
mod trace;

use std::{env, io, process::ExitCode};

use admin::{COMMIT, VERSION};
use clap::{Arg, CommandFactory as _, FromArgMatches as _, Parser, Subcommand};

use config::{CommandLine, ParseError};
use empty_values::without_empty_variable;

const WRONG_USAGE: u8 = 64;
/// The flags that belong to one call, and so have no environment variable.
const WITHOUT_VARIABLE: [&str; 13] = [
    "anonymize",
    "behind",
    "filter",
    "force",
    "has",
    "init-only",
    "kube-proxy",
    "limit",
    "once",
    "print-config",
    "sort",
    "wait-for-kube-proxy",
    "watch",
];

/// A Kubernetes service proxy with an eBPF data plane.
///
/// eBPF programs replace the destination of connect(2), and of UDP sends, to a Service with one of its endpoints; after
/// that the kernel talks to the endpoint directly. Traffic without a socket on this node is translated by nftables.
/// Updates are atomic, and the kernel keeps serving while this program is not running.
#[derive(Debug, Parser)]
#[command(version = format!("{VERSION} (commit {COMMIT})"), arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    log: logging::LogFlags,
}

#[derive(Debug, Subcommand)]
#[expect(clippy::large_enum_variant, reason = "there is one value")]
enum Command {
    Run(run::Flags),
    Brain(brain::Flags),
    Agent(agent::Flags),
    Print(print::Flags),
    Check(check::Flags),
    Status(status::Flags),
    Top(top::Flags),
    Dump(dump::Flags),
    Explain(explain::Flags),
    Nodes(nodes::Flags),
    Trace(trace::Flags),
    SupportBundle(support_bundle::Flags),
    Cleanup(cleanup::Flags),
    BackendConformance(backend_conformance::Flags),
    /// Probe the attached programs; `run` and `agent` start this inside the cgroup
    #[command(name = datapath_ebpf::probe::SUBCOMMAND, hide = true)]
    Canary,
    /// Wait for SIGTERM or SIGINT: the pod that cleans a node up must keep running
    #[command(hide = true)]
    Wait,
}

/// The command line. The environment variable of `--a-flag` is `KUBE_PROXY_EBPF_A_FLAG`, unless it names another one.
fn command() -> clap::Command {
    let with_variable = |flag: Arg| match flag.get_long() {
        Some(long) if flag.get_env().is_none() && !WITHOUT_VARIABLE.contains(&long) => {
            let variable = format!("KUBE_PROXY_EBPF_{}", long.to_uppercase().replace('-', "_"));
            flag.env(variable)
        }
        _ => flag,
    };
    let with_variable = |flag| without_empty_variable(with_variable(flag));
    let command = Cli::command().mut_args(with_variable).mut_subcommands(|it| {
        // The source of the process is not that of a question about it, nor its cgroup that of a trace, nor its datapath the
        // one that is asked.
        let is_own = |flag: &Arg| {
            (flag.get_long() == Some("source") && it.get_name() == "explain")
                || (flag.get_long() != Some("status-socket") && it.get_name() == "trace")
                || it.get_name() == "backend-conformance"
        };
        it.clone().mut_args(|flag| if is_own(&flag) { flag } else { with_variable(flag) })
    });
    INSPECTING.iter().fold(command, |command, name| with_flags_of_the_process(command, name))
}

/// The commands that inspect a process, or what it left in the kernel.
const INSPECTING: [&str; 5] = ["check", "status", "top", "dump", "support-bundle"];

/// Lets a subcommand accept the flags that `run` and `agent` are started with, so that one set of arguments fits all of them;
/// those that it does not need are ignored, and not shown in its help.
fn with_flags_of_the_process(command: clap::Command, name: &str) -> clap::Command {
    let of = |name: &str| command.find_subcommand(name).into_iter().flat_map(clap::Command::get_arguments);
    let mut ignored: Vec<Arg> = Vec::new();
    for it in of("run").chain(of("agent")) {
        // What belongs to one call is not configuration.
        let Some(long) = it.get_long().filter(|it| !WITHOUT_VARIABLE.contains(it)) else { continue };
        let is_same = |own: &Arg| own.get_id() == it.get_id() || own.get_long() == Some(long);
        if of(name).any(is_same) || ignored.iter().any(is_same) {
            continue;
        }
        let arg = Arg::new(it.get_id().clone()).long(long.to_owned()).hide(true);
        let aliases = it.get_all_aliases().unwrap_or_default().into_iter().map(ToOwned::to_owned);
        let arg = arg.aliases(aliases.collect::<Vec<_>>()).action(it.get_action().clone());
        let arg = arg.require_equals(it.is_require_equals_set());
        ignored.push(it.get_num_args().into_iter().fold(arg, Arg::num_args));
    }
    command.mut_subcommand(name, |it| it.args(ignored))
}

pub(crate) fn main() -> ExitCode {
    let parsed = CommandLine::parse(command(), env::args_os()).and_then(|line| {
        let cli = Cli::from_arg_matches(&line.matches)?;
        Ok((line, cli))
    });
    let (line, cli) = match parsed {
        Ok(parsed) => parsed,
        Err(ParseError::Usage(error)) => {
            // Help and version are such errors too.
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(WRONG_USAGE) } else { ExitCode::SUCCESS };
        }
        Err(ParseError::File(error)) => {
            eprintln!("error: {error}");
            return ExitCode::from(WRONG_USAGE);
        }
    };
    if let Some(text) = line.printed() {
        cli.log.init();
        line.remarks().for_each(|it| tracing::info!("{it}"));
        print!("{text}");
        return ExitCode::SUCCESS;
    }
    if !line.serves() {
        cli.log.init();
        return execute(cli, &line);
    }
    if let Err(error) = cli.log.init_queued() {
        eprintln!("error: the thread of the log cannot be started: {error}");
        return ExitCode::FAILURE;
    }
    tracing::info!(version = VERSION, commit = COMMIT, flags = line.changed_flags(), "starting");
    line.remarks().for_each(|it| tracing::info!("{it}"));
    let code = execute(cli, &line);
    logging::flush();
    code
}

fn execute(cli: Cli, line: &CommandLine) -> ExitCode {
    let done = |()| true;
    // The result is false if `check`, `status` or `explain` has printed a problem, or a case has failed.
    let result = match cli.command {
        Command::Run(flags) => run::main(flags, line.configuration()).map(done),
        Command::Brain(flags) => brain::main(flags, line.configuration()).map(done),
        Command::Agent(flags) => agent::main(flags, line.configuration()).map(done),
        Command::Print(flags) => print::main(flags).map(done),
        Command::Check(flags) => check::main(flags),
        Command::Status(flags) => status::main(flags),
        Command::Top(flags) => top::main(flags).map(done),
        Command::Dump(flags) => dump::main(&flags).map(done),
        Command::Explain(flags) => explain::main(flags),
        Command::Nodes(flags) => nodes::main(flags),
        Command::Trace(flags) => trace::main(&flags, cli.log.verbosity()).map(done),
        Command::SupportBundle(flags) => support_bundle::main(flags).map(done),
        Command::Cleanup(flags) => cleanup::main(&flags).map(done),
        Command::BackendConformance(flags) => backend_conformance::main(flags),
        Command::Wait => runtime::wait().map(done),
        Command::Canary => {
            datapath_ebpf::probe::child_main(io::stdin(), io::stdout()).map(done).map_err(Into::into)
        }
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        // `print | head` is not a failure.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) if error.is::<clap::Error>() => {
            eprint!("{error}");
            // The user may not know a flag whose value comes from the file.
            let text = error.to_string();
            let words = text.split(|it: char| !it.is_ascii_alphanumeric() && it != '-');
            for (flag, field) in line.origins().iter().filter(|(flag, _)| words.clone().any(|it| it == flag))
            {
                eprintln!("  {flag} is set by the file: {field}");
            }
            ExitCode::from(WRONG_USAGE)
        }
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|it| it.kind() == io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod reference;
#[cfg(test)]
mod shell_files;
#[cfg(test)]
mod tests;
