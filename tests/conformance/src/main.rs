//! `cargo xtask conformance`: the end-to-end tests of Kubernetes in a kind cluster without kube-proxy.
//! Invariant: the whole run is a list of commands, made before the first of them runs; `--dry-run` prints it.

mod options;
mod plan;
mod skips;

use std::{
    fs,
    process::{Command, ExitCode},
};

use anyhow::{Context as _, Result, bail};
use build_tools::{
    command::{exit_code, status, workspace},
    container::{self, ContainerTool},
};
use clap::Parser as _;

use crate::{
    options::Options,
    plan::{Plan, Step},
};

fn main() -> ExitCode {
    exit_code(run(&Options::parse()))
}

fn run(options: &Options) -> Result<()> {
    regex::Regex::new(&options.focus).with_context(|| format!("--focus {:?}", options.focus))?;
    let skips = skips::parse(&fs::read_to_string(workspace().join(skips::FILE)).context(skips::FILE)?)?;
    let plan = Plan::new(options, container_tool(options)?, &skips, &container::revision())?;
    if options.dry_run {
        print!("{}", plan.script());
        return Ok(());
    }
    perform(&plan, options.keep)
}

fn container_tool(options: &Options) -> Result<ContainerTool> {
    let tool = match options.container_tool {
        Some(tool) => tool,
        // A dry run needs no tool that works.
        None if options.dry_run => {
            let found = ContainerTool::find().ok().filter(|it| it.runs_kind());
            return Ok(found.unwrap_or(ContainerTool::Docker));
        }
        None => ContainerTool::find()?,
    };
    if !tool.runs_kind() {
        bail!("kind cannot run nodes with {}", tool.program());
    }
    Ok(tool)
}

fn perform(plan: &Plan, keep: bool) -> Result<()> {
    for step in &plan.prepare {
        run_step(step)?;
    }
    // From here on there may be a cluster.
    let result = plan.cluster.iter().chain(&plan.test).try_for_each(run_step);
    if result.is_err() {
        status("Collecting", &format!("logs and state of the nodes, in {}", plan::FOLDER));
        for step in &plan.evidence {
            // As much as possible.
            if let Err(error) = run_step(step) {
                status("Warning", &format!("{error:#}"));
            }
        }
    }
    if keep {
        status("Kept", &format!("the cluster; its kubeconfig is {}", plan::KUBECONFIG));
        return result;
    }
    let removed = plan.end.iter().try_for_each(run_step);
    result.and(removed)
}

fn run_step(step: &Step) -> Result<()> {
    status("Running", &step.purpose);
    let exit = Command::new("sh")
        .args(["-eu", "-c", &step.command])
        .current_dir(workspace())
        .status()
        .context("cannot start a shell")?;
    if !exit.success() {
        bail!("{} failed ({exit}): {}", step.purpose, step.command.lines().next().unwrap_or_default());
    }
    Ok(())
}
