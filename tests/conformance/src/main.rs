//! `cargo xtask conformance`: upstream's end-to-end tests in a cluster of kind, without kube-proxy.
//! The one rule: the whole run is a list of command lines, made before the first of them runs; `--dry-run` prints it.

mod plan;
mod skips;

use std::{
    fs,
    process::{Command, ExitCode},
};

use anyhow::{Context as _, Result, bail};
use build_tools::{
    command::{status, workspace},
    container::{self, ContainerTool as Tool},
};
use clap::{Parser, ValueEnum};

use plan::{Plan, Step};

/// Run upstream's end-to-end tests in a cluster of kind without kube-proxy (hours; needs docker and the Internet).
///
/// Makes a cluster of three nodes, builds the image and brings it there, deploys the overlay `kind`, runs the
/// conformance tests and those of the network, and removes the cluster. What is left out, and why, is in
/// deploy/conformance/skip.yaml. If something fails, logs and each node's `dump` are in target/conformance.
#[derive(Clone, Debug, Parser)]
#[command(bin_name = "cargo xtask conformance", max_term_width = 100)]
pub(crate) struct Options {
    /// The cluster's address families
    #[arg(long, value_enum, default_value = "ipv4")]
    ip_family: IpFamily,
    /// Only print what would be done, as the commands one would type
    #[arg(long)]
    dry_run: bool,
    /// Leave the cluster up at the end
    #[arg(long)]
    keep: bool,
    /// Only tests whose names match this regular expression (RE2)
    #[arg(long, value_name = "REGEX", default_value = r"\[Conformance\]|\[sig-network\]")]
    focus: String,
    /// How many tests run at a time; those that are serial run alone, at the end
    #[arg(long, value_name = "NUMBER", default_value = "8")]
    parallel: u16,
    /// What the cluster is called
    #[arg(long, value_name = "NAME", default_value = "kube-proxy-ebpf")]
    name: String,
    /// What builds the image and runs the nodes [default: the first that works of docker, podman and nerdctl]
    #[arg(long, value_enum)]
    container_tool: Option<Tool>,
}

/// The address families of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum IpFamily {
    Ipv4,
    Ipv6,
    Dual,
}

impl IpFamily {
    const ALL: [Self; 3] = [Self::Ipv4, Self::Ipv6, Self::Dual];

    /// As kind and the skip list call it.
    fn name(self) -> &'static str {
        match self {
            Self::Ipv4 => "ipv4",
            Self::Ipv6 => "ipv6",
            Self::Dual => "dual",
        }
    }
}

fn main() -> ExitCode {
    match conformance(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\nerror: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the tests, or prints how.
fn conformance(options: &Options) -> Result<()> {
    regex::Regex::new(&options.focus).with_context(|| format!("--focus {:?}", options.focus))?;
    let skips = skips::read(&fs::read_to_string(workspace().join(skips::FILE)).context(skips::FILE)?)?;
    let tool = match options.container_tool {
        Some(tool) if !tool.runs_kind() => bail!("kind cannot run nodes with {}", tool.program()),
        Some(tool) => tool,
        // What is only printed needs no tool that works.
        None if options.dry_run => Tool::find().ok().filter(|it| it.runs_kind()).unwrap_or(Tool::Docker),
        None => Tool::find().and_then(|it| {
            if it.runs_kind() {
                Ok(it)
            } else {
                bail!("only {} works here, which kind cannot use", it.program())
            }
        })?,
    };
    let revision = container::revision();
    let plan = Plan::new(options, tool, &skips, &revision)?;
    if options.dry_run {
        print!("{}", plan.script());
        return Ok(());
    }
    perform(&plan, options.keep)
}

fn perform(plan: &Plan, keep: bool) -> Result<()> {
    for step in &plan.prepare {
        step.run()?;
    }
    // From here on there may be a cluster.
    let result = plan.cluster.iter().chain(&plan.test).try_for_each(Step::run);
    if result.is_err() {
        status("Gathering", &format!("what the nodes know, in {}", plan::FOLDER));
        for step in &plan.evidence {
            // As much as can be had.
            if let Err(error) = step.run() {
                status("Warning", &format!("{error:#}"));
            }
        }
    }
    if keep {
        status("Kept", &format!("the cluster; its kubeconfig is {}", plan::KUBECONFIG));
        return result;
    }
    let removed = plan.end.iter().try_for_each(Step::run);
    result.and(removed)
}

impl Step {
    fn run(&self) -> Result<()> {
        status("Running", self.what());
        let status = Command::new("sh")
            .args(["-eu", "-c", &self.command()])
            .current_dir(workspace())
            .status()
            .context("cannot start a shell")?;
        if !status.success() {
            bail!("{} failed ({status}): {}", self.what(), self.command().lines().next().unwrap_or_default());
        }
        Ok(())
    }
}
