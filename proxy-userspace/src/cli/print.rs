//! `print`: a node's state, without touching a kernel.

use std::io::Write as _;

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use model::facts::Facts;
use publish::{
    Published, Publisher,
    print::{Format, render},
};

use super::{
    flags::{self, Source},
    pipeline::{self, Pipeline},
};

/// Show what a node serves, without touching a kernel
///
/// Prints the node's full state whenever it changes: each Service with the endpoints that this node may use for it, as
/// a backend gets it. Two equal states print equal bytes, but for the number of the process (instanceId) and its count of
/// revisions (rev).
#[derive(Debug, Args)]
pub(super) struct Flags {
    #[command(flatten)]
    facts: flags::Facts,
    /// Print one state and end
    #[arg(long)]
    once: bool,
    /// How to print it
    #[arg(long, short, value_enum, default_value = "table", env = "KUBE_PROXY_EBPF_OUTPUT")]
    output: Output,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Output {
    /// A table for people
    Table,
    /// One object a line: the messages of the contract in proto3 JSON
    Json,
    /// The same in YAML, a document each
    Yaml,
}

impl From<Output> for Format {
    fn from(output: Output) -> Self {
        match output {
            Output::Table => Self::Table,
            Output::Json => Self::Json,
            Output::Yaml => Self::Yaml,
        }
    }
}

pub(super) fn main(flags: Flags) -> Result<()> {
    if flags.once {
        return once(&flags);
    }
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(follow(flags))
}

fn once(flags: &Flags) -> Result<()> {
    let node = flags.facts.node()?;
    let Source::File(path) = &flags.facts.source;
    let snapshot = source::file::read(path)?;
    for it in &snapshot.problems {
        tracing::warn!("{it}");
    }
    for it in &snapshot.rejected {
        tracing::warn!("{it}");
    }
    if *snapshot.facts == Facts::default() && !snapshot.problems.is_empty() {
        bail!("nothing in {} could be read; the warnings say why", path.display());
    }
    let mut brain = brain::Brain::new(pipeline::options(&flags.facts));
    brain.serve(&node);
    brain.update(snapshot.facts);
    brain.settle();
    for it in brain.rejected() {
        tracing::warn!("{it}");
    }
    let publisher = Publisher::new(node.as_str());
    publisher.publish(brain.state(&node).cloned().unwrap_or_default());
    publisher.current().map_or(Ok(()), |it| show(&it, flags.output))
}

async fn follow(flags: Flags) -> Result<()> {
    let pipeline = Pipeline::start(&flags.facts)?;
    let mut states = pipeline.subscribe();
    let print = async {
        while let Some(published) = states.next().await {
            show(&published, flags.output)?;
        }
        Ok(())
    };
    tokio::select! {
        result = print => result,
        () = pipeline.publish() => Ok(()),
        _ = tokio::signal::ctrl_c() => Ok(()),
    }
}

fn show(published: &Published, output: Output) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(render(published, output.into())?.as_bytes())?;
    Ok(stdout.flush()?)
}
