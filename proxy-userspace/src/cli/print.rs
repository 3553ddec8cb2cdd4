//! `print`: the state of a node, without touching the kernel.

use std::{
    io::{self, Write as _},
    sync::Arc,
};

use anyhow::{Result, bail};
use clap::Args;
use model::RequestedMetadata;
use pipeline::{Config, Pipeline};
use proxy_contract::{Targets, client::Client};
use publish::{Published, Subscription, upstream::Upstream};

use super::{
    flags::{ClientTlsFlags, MetadataFlags, SourceArg, SourceOptions, source},
    output::{self, Escaped},
    reader,
    render::{Format, parts, render_changes},
    runtime::{block_on, trim_memory},
};

/// Print the state of a node, without touching the kernel
///
/// Prints the full state whenever it changes: every Service with the endpoints that this node may use, as a datapath
/// receives it. Equal states print equal bytes, except for the process number (instanceId) and the revision (rev).
///
/// The state is computed from --source, or received from another brain with --target, with all labels and annotations that it
/// hands out. A brain that is unreachable is waited for.
#[derive(Debug, Args)]
pub(super) struct Flags {
    /// Where Services and their endpoints come from: kube (an API server), file:PATH (a manifest or a folder of
    /// manifests) or api:TARGET (the cluster state of another brain)
    #[arg(
        long,
        value_name = "kube|file:PATH|api:TARGET",
        value_parser = source,
        required_unless_present = "target"
    )]
    source: Option<SourceArg>,
    #[command(flatten)]
    options: SourceOptions,
    #[command(flatten)]
    metadata: MetadataFlags,
    /// Receive the state from this brain instead: unix:///path, tcp://host:port or host:port; of several, with commas
    /// between, from any one
    #[arg(long, value_name = "ADDRESS")]
    target: Option<Targets>,
    #[command(flatten)]
    tls: ClientTlsFlags,
    /// Print one state and exit
    #[arg(long)]
    once: bool,
    /// After the first state, print only added, removed and changed services, ports and endpoints
    ///
    /// As json and yaml, every change is one line or document, from the first state on: `change` is added, changed or
    /// removed, `kind` is service, port or endpoint, `before` and `after` are the messages.
    #[arg(long, conflicts_with = "once")]
    watch: bool,
    /// Output format
    #[arg(long, short, default_value = "table")]
    output: Format,
}

pub(super) fn main(flags: Flags) -> Result<()> {
    if !flags.once {
        reader::watch()?;
    }
    match (&flags.target, &flags.source) {
        (Some(target), _) => block_on(follow_brain(target.clone(), &flags)),
        (None, Some(SourceArg::File(path))) if flags.once => {
            let options = &flags.options;
            let node = options.node.name()?;
            let requested = flags.metadata.requested();
            let published = pipeline::read_manifests(path, &node, requested, options.selection.options())?;
            show(&published, flags.output)
        }
        (None, Some(source)) => block_on(follow_source(source, &flags)),
        (None, None) => bail!("nothing to print: give --source or --target"),
    }
}

async fn follow_source(source: &SourceArg, flags: &Flags) -> Result<()> {
    let config = flags.options.config(source, false)?;
    let pipeline = Pipeline::start(Config { service_metadata: flags.metadata.requested(), ..config })?;
    tokio::select! {
        result = print(pipeline.subscribe(), flags) => result,
        () = pipeline.run(&()) => Ok(()),
        () = trim_memory() => Ok(()),
        _ = tokio::signal::ctrl_c() => Ok(()),
    }
}

async fn follow_brain(target: Targets, flags: &Flags) -> Result<()> {
    let node = flags.options.node.name()?;
    let client = flags.tls.client(Client::new(target, node.as_str()))?;
    // As the brain sends them.
    let upstream = Upstream::new(client, node.as_str()).with_metadata(RequestedMetadata::everything());
    tokio::select! {
        result = print(upstream.subscribe(), flags) => result,
        () = upstream.run() => Ok(()),
        _ = tokio::signal::ctrl_c() => Ok(()),
    }
}

/// Prints every state, or the changes between them; with `--once`, one state.
async fn print(mut states: Subscription, flags: &Flags) -> Result<()> {
    let mut previous: Option<Arc<Published>> = None;
    while let Some(published) = states.next().await {
        if flags.watch {
            output::print(&render_changes(previous.as_deref(), &published, flags.output)?)?;
            previous = Some(published);
            continue;
        }
        show(&published, flags.output)?;
        if flags.once {
            break;
        }
    }
    Ok(())
}

fn show(published: &Published, output: Format) -> Result<()> {
    let mut out = Escaped::new(io::stdout().lock());
    for part in parts(published, output) {
        out.write_all(part?.as_bytes())?;
    }
    Ok(out.flush()?)
}
