//! `cargo xtask conformance`: the end-to-end tests of Kubernetes in a kind cluster without kube-proxy.
//! Invariant: the whole run is a shell script, made before any of it runs; `--dry-run` prints it.

mod options;
mod script;
mod skips;

use std::{
    fs,
    process::{Command, ExitCode},
};

use anyhow::{Context as _, Result, bail};
use build_tools::{
    command::{exit_code, workspace},
    container::{self, ContainerTool},
};
use clap::Parser as _;

use crate::options::Options;

fn main() -> ExitCode {
    exit_code(run(&Options::parse()))
}

fn run(options: &Options) -> Result<()> {
    regex::Regex::new(&options.focus).with_context(|| format!("--focus {:?}", options.focus))?;
    let skips = skips::parse(&fs::read_to_string(workspace().join(skips::FILE)).context(skips::FILE)?)?;
    let tool = match options.container_tool {
        Some(tool) => tool,
        // A dry run needs no tool that works.
        None if options.dry_run => ContainerTool::find().unwrap_or(ContainerTool::Docker),
        None => ContainerTool::find()?,
    };
    let script = script::script(options, tool, &skips, &container::revision())?;
    if options.dry_run {
        print!("{script}");
        return Ok(());
    }
    let shell = Command::new("sh").args(["-c", &script]).current_dir(workspace()).status();
    let exit = shell.context("cannot start a shell")?;
    if !exit.success() {
        bail!("the run failed ({exit}), see above");
    }
    Ok(())
}
