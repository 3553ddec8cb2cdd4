//! The command line: flags, commands, and the wiring of the rooms. The only place that knows them all.
//!
//! Exit codes: 0 done, 1 failed, 64 wrong usage (`EX_USAGE` of sysexits(3)).

mod agent;
mod brain;
mod check;
mod cleanup;
mod config;
mod dump;
mod events;
mod flags;
mod logging;
mod news;
mod own_node;
mod packets;
mod pipeline;
mod plane;
mod print;
mod run;
mod serving;
mod signals;
mod status;
mod tls;

use std::{fmt, io, process::ExitCode, time::Duration};

use clap::{Parser, Subcommand, error::ErrorKind};

use config::{CommandLine, Wrong};

const WRONG_USAGE: u8 = 64;
/// How long a command that has ended waits for what it still does in other threads.
const STOP: Duration = Duration::from_secs(2);

/// A Kubernetes service proxy with an eBPF data plane.
///
/// It turns Services into translations at socket level: connect(2) to a Service's address goes to one of its endpoints,
/// and from then on the kernel talks to the endpoint directly. An update takes effect for all sockets at one moment, and
/// what is in the kernel goes on serving while this program is away.
#[derive(Debug, Parser)]
#[command(version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    logging: logging::Flags,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(run::Flags),
    Brain(brain::Flags),
    Agent(agent::Flags),
    Print(print::Flags),
    Check(check::Flags),
    Status(status::Flags),
    Dump(dump::Flags),
    Cleanup(cleanup::Flags),
    /// Try the hooks and say whether they act; what `run` and `agent` start inside the cgroup
    #[command(name = backend::CANARY, hide = true)]
    Canary,
}

/// Parses the command line, does what it says, and reports how it went.
pub(crate) fn main() -> ExitCode {
    let line = match CommandLine::parse(std::env::args_os()) {
        Ok(line) => line,
        Err(Wrong::Usage(error)) => {
            // The error is help or the version where that was asked for.
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(WRONG_USAGE) } else { ExitCode::SUCCESS };
        }
        Err(Wrong::File(error)) => {
            eprintln!("error: {error}");
            return ExitCode::from(WRONG_USAGE);
        }
    };
    line.cli.logging.start();
    for it in line.remarks() {
        tracing::info!("{it}");
    }
    if let Some(text) = line.printed() {
        print!("{text}");
        return ExitCode::SUCCESS;
    }
    let origins = line.origins();
    let cli = line.cli;
    let result = match cli.command {
        Command::Run(flags) => run::main(flags),
        Command::Brain(flags) => brain::main(&flags),
        Command::Agent(flags) => agent::main(flags),
        Command::Print(flags) => print::main(flags),
        Command::Check(flags) => match check::main(flags) {
            Ok(true) => Ok(()),
            // It has said what is broken.
            Ok(false) => return ExitCode::FAILURE,
            Err(error) => Err(error),
        },
        Command::Status(flags) => match status::main(flags) {
            Ok(true) => Ok(()),
            // It has said what cannot be read.
            Ok(false) => return ExitCode::FAILURE,
            Err(error) => Err(error),
        },
        Command::Dump(flags) => dump::main(&flags),
        Command::Cleanup(flags) => cleanup::main(&flags),
        Command::Canary => backend::obey_as_canary(io::stdin(), io::stdout()).map_err(Into::into),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // `print | head` is not a failure.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) if error.is::<clap::Error>() => {
            eprint!("{error}");
            // Whoever has not written a flag does not know it.
            let text = error.to_string();
            let words = text.split(|it: char| !it.is_ascii_alphanumeric() && it != '-');
            for (flag, field) in origins.iter().filter(|(flag, _)| words.clone().any(|it| it == flag)) {
                eprintln!("  {flag} is what the file says: {field}");
            }
            ExitCode::from(WRONG_USAGE)
        }
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Flags that make sense one by one, and none together.
fn wrong_usage(message: impl fmt::Display) -> anyhow::Error {
    clap::Error::raw(ErrorKind::ArgumentConflict, format!("{message}\n")).into()
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|it| it.kind() == io::ErrorKind::BrokenPipe)
}

/// Runs a command to its end.
fn block_on(command: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    // One thread is enough: what takes long waits in the kernel, in a thread of its own.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let result = runtime.block_on(command);
    // Whatever is still under way there may be broken off at any moment.
    runtime.shutdown_timeout(STOP);
    result
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn each_flag_has_an_environment_variable_but_for_what_one_call_alone_can_mean() {
        let mut command = Cli::command();
        command.build();
        let flags = command.get_subcommands().filter(|it| it.get_name() != "help").flat_map(|it| {
            let without =
                it.get_arguments().filter(|it| it.get_env().is_none()).filter_map(clap::Arg::get_long);
            without.filter(|it| !matches!(*it, "help" | "version"))
        });
        let flags: std::collections::BTreeSet<_> = flags.collect();
        let named: Vec<_> = flags.iter().map(|it| format!("`--{it}`")).collect();
        let said = format!("Each flag has an environment variable, but for {}", named.join(", "));
        assert!(include_str!("../../../README.md").contains(&said), "the README does not say: {said}");
    }
}
