//! `cargo xtask kill-matrix`: the proxy is killed, or a system call of its fails, at each step that changes something.

mod matrix;
mod step;
mod trace;

use std::{process::ExitCode, time::Instant};

use anyhow::{Context as _, Result, bail};
use build_tools::{
    build::build_for_tests,
    command::{exit_code, status},
};
use clap::{Parser, Subcommand, ValueEnum as _};
use comfy_table::{Table, presets::UTF8_FULL_CONDENSED};
use tests::{Sandbox, TestNode};

use crate::{
    matrix::{Interruption, Matrix, Outcome, Scenario},
    step::Step,
    trace::{Intervention, Trace},
};

/// Kill the proxy, or fail its system call, at each step that changes something, under load (as root).
///
/// Steps are system calls: of BPF, of netlink, on files. The proxy is killed before each (which is after the one before), and each
/// fails once with an error that the kernel might give. Afterwards no connect may have failed or seen a state that was replaced,
/// and the next start must complete what was interrupted. Prints each step with its outcomes.
#[derive(Parser)]
#[command(bin_name = "cargo xtask kill-matrix", max_term_width = 100, args_conflicts_with_subcommands = true)]
struct Arguments {
    #[command(subcommand)]
    tracer: Option<Tracer>,
    /// Only this scenario; can be given several times
    #[arg(long = "scenario", value_enum)]
    scenarios: Vec<Scenario>,
    /// Only every N-th step of a scenario
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    every: u16,
    /// Only this step
    #[arg(long, value_name = "N")]
    step: Option<usize>,
    /// Kill it right after each step, too, while its threads go on
    #[arg(long)]
    after: bool,
    /// Take the proxy from the last build of the tests
    #[arg(long)]
    no_build: bool,
}

#[derive(Subcommand)]
enum Tracer {
    /// Trace a program
    #[command(hide = true)]
    Trace(Trace),
    /// Be traced
    #[command(hide = true)]
    Traced {
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let traced = match &arguments.tracer {
        None => return exit_code(run(&arguments)),
        Some(Tracer::Trace(trace)) => trace.run(),
        Some(Tracer::Traced { command }) => trace::become_traced(command),
    };
    traced.unwrap_or_else(|error| exit_code(Err(error)))
}

fn run(arguments: &Arguments) -> Result<()> {
    if !cfg!(target_arch = "x86_64") {
        bail!(
            "the tracer knows the registers of x86-64 only, and this machine is {}",
            std::env::consts::ARCH
        );
    }
    if !arguments.no_build {
        build_for_tests()?;
    }
    let mut matrix = Matrix::new(TestNode::enter(Sandbox::new("kill-matrix")?)?);
    let scenarios = match arguments.scenarios.as_slice() {
        [] => Scenario::value_variants(),
        some => some,
    };
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED);
    let mut header = vec!["Scenario", "Step", "System call", "Killed before", "Failed"];
    header.extend(arguments.after.then_some("Killed after"));
    table.set_header(header);
    let mut problems = Vec::new();
    let begin = Instant::now();
    for scenario in scenarios {
        let name = scenario.to_possible_value().context("it has a name")?.get_name().to_owned();
        let (steps, _) = matrix.go_through(*scenario, None).context("uninterrupted")?;
        status("Scenario", &format!("{name}: {} steps", steps.len()));
        let every = usize::from(arguments.every);
        let chosen = (1..=steps.len()).filter(|it| match arguments.step {
            Some(step) => *it == step,
            // Not always the same ones of each scenario.
            None => (it + steps.len()).is_multiple_of(every),
        });
        for step in chosen {
            let mut interruptions =
                vec![Interruption::kill(step, Intervention::KillBefore), Interruption::failure(step)];
            let after = Interruption::kill(step, Intervention::KillAfter);
            interruptions.extend(arguments.after.then_some(after));
            let mut call = steps.get(step - 1).cloned();
            let mut outcomes = Vec::new();
            for interruption in interruptions {
                outcomes.push(match matrix.go_through(*scenario, Some(interruption)) {
                    Ok((found, outcome)) => {
                        // Threads take turns: the step may be another one.
                        call = found.get(step - 1).cloned().or(call.take());
                        text(interruption, outcome)
                    }
                    Err(error) => {
                        let what = format!("{name}, step {step}, {}: {error:#}", describe(interruption));
                        status("Failed", &what);
                        problems.push(what);
                        "FAILED".to_owned()
                    }
                });
            }
            let call = call.as_ref().map_or(String::new(), Step::to_string);
            table.add_row([name.clone(), step.to_string(), call].into_iter().chain(outcomes));
        }
    }
    println!("{table}");
    println!(
        "{} connects meanwhile, {} problems, {} s",
        matrix.connects,
        problems.len(),
        begin.elapsed().as_secs()
    );
    if !problems.is_empty() {
        bail!("{} interruptions had consequences", problems.len());
    }
    Ok(())
}

fn describe(interruption: Interruption) -> String {
    match interruption.intervention {
        Intervention::KillBefore => "killed before".to_owned(),
        Intervention::KillAfter => "killed after".to_owned(),
        Intervention::Fail => format!("failed with {:?}", interruption.errno),
    }
}

fn text(interruption: Interruption, outcome: Outcome) -> String {
    let outcome = match outcome {
        Outcome::Killed => "completed",
        Outcome::Ended => "ended, completed",
        Outcome::Reported => "reported",
        Outcome::WentOn => "went on",
        Outcome::NotReached => return "-".to_owned(),
    };
    match interruption.intervention {
        Intervention::Fail => format!("{:?}: {outcome}", interruption.errno),
        _ => outcome.to_owned(),
    }
}
