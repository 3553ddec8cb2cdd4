//! `print`: a node's state, without touching a kernel.

use std::{io::Write as _, path::Path, sync::Arc};

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use model::cluster::ClusterState;
use proxy_contract::{Target, client::Client};
use publish::{
    Published, Publisher, Subscription,
    print::{Format, render, render_changes},
    upstream::Upstream,
};

use super::{
    block_on,
    flags::{self, Facts as FactsFlags, Source, source},
    own_node,
    pipeline::Pipeline,
    tls,
};

/// Show what a node serves, without touching a kernel
///
/// Prints the node's full state whenever it changes: each Service with the endpoints that this node may use for it, as
/// a backend gets it. Two equal states print equal bytes, but for the number of the process (instanceId) and its count of
/// revisions (rev).
///
/// The state is decided here, from --source, or comes from a brain in another process, with --target. A brain that is
/// away is waited for.
#[derive(Debug, Args)]
pub(super) struct Flags {
    /// Where Services and their endpoints come from: file:PATH, a manifest or a folder of manifests; kube, an API server;
    /// or api:TARGET, another brain, whose facts are followed while all is decided here
    #[arg(
        long,
        value_name = "kube|file:PATH|api:TARGET",
        env = "KUBE_PROXY_EBPF_SOURCE",
        value_parser = source,
        required_unless_present = "target"
    )]
    source: Option<Source>,
    #[command(flatten)]
    api_server: flags::ApiServer,
    #[command(flatten)]
    source_tls: tls::SourceFlags,
    /// The brain to ask instead: unix:///path, tcp://host:port or host:port
    #[arg(long, value_name = "ADDRESS", env = "KUBE_PROXY_EBPF_TARGET")]
    target: Option<Target>,
    #[command(flatten)]
    tls: tls::ClientFlags,
    #[command(flatten)]
    node: flags::Node,
    #[command(flatten)]
    selection: flags::Selection,
    /// Begin with what is not this revision of --instance-id: wait for what comes after it
    #[arg(long, value_name = "NUMBER", requires_all = ["target", "instance_id"])]
    rev: Option<u64>,
    /// The process of the brain that --rev is counted by; `print --target --once` says which
    #[arg(long, value_name = "NUMBER", requires_all = ["target", "rev"])]
    instance_id: Option<u64>,
    /// Print one state and end
    #[arg(long)]
    once: bool,
    /// After the first state, print only what changes: the services, ports and endpoints that come, go or differ
    ///
    /// As json and yaml it is a line or a document for each of them, from the first state on: `change` says added,
    /// changed or removed, `kind` says service, port or endpoint, `before` and `after` are the messages.
    #[arg(long, conflicts_with = "once")]
    watch: bool,
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
    match (&flags.target, &flags.source) {
        (Some(target), _) => block_on(follow_brain(target.clone(), &flags)),
        (None, Some(Source::File(path))) if flags.once => once(path, &flags),
        (None, Some(source)) => block_on(follow_source(source.clone(), &flags)),
        (None, None) => bail!("there is nothing to print: give --source or --target"),
    }
}

fn once(path: &Path, flags: &Flags) -> Result<()> {
    let node = flags.node.name()?;
    let snapshot = source::file::read(path)?;
    for it in &snapshot.problems {
        tracing::warn!("{it}");
    }
    for it in &snapshot.rejected {
        tracing::warn!("{it}");
    }
    if *snapshot.facts == ClusterState::default() && !snapshot.problems.is_empty() {
        bail!("nothing in {} could be read; the warnings say why", path.display());
    }
    let mut brain = brain::Brain::new(flags.selection.options());
    brain.start_serving(&node);
    brain.replace_cluster(snapshot.facts);
    brain.recompute();
    for it in brain.rejected().chain(own_node::stranger(&node, brain.node_infos(), false)) {
        tracing::warn!("{it}");
    }
    let publisher = Publisher::new(node.as_str());
    publisher.publish(brain.state(&node).cloned().unwrap_or_default());
    publisher.current().map_or(Ok(()), |it| show(&it, flags.output))
}

async fn follow_source(source: Source, flags: &Flags) -> Result<()> {
    let facts = FactsFlags {
        source,
        api_server: flags.api_server.clone(),
        source_tls: flags.source_tls.clone(),
        node: flags.node.clone(),
        selection: flags.selection.clone(),
    };
    let pipeline = Pipeline::start(&facts)?;
    tokio::select! {
        result = print(pipeline.subscribe(), flags) => result.map(drop),
        () = pipeline.publish(None) => Ok(()),
        _ = tokio::signal::ctrl_c() => Ok(()),
    }
}

async fn follow_brain(target: Target, flags: &Flags) -> Result<()> {
    let node = flags.node.name()?;
    let mut upstream =
        Upstream::new(flags.tls.client(Client::new(target.clone(), node.as_str()))?, node.as_str());
    if let (Some(instance_id), Some(rev)) = (flags.instance_id, flags.rev) {
        upstream = upstream.resume_from(instance_id, rev);
    }
    let printed = tokio::select! {
        result = print(upstream.subscribe(), flags) => result?,
        () = upstream.run() => None,
        _ = tokio::signal::ctrl_c() => None,
    };
    if let Some(Published { instance_id, rev, .. }) = printed.as_deref() {
        tracing::info!(
            "what comes after it: print --target {target} --node-name {node} --instance-id {instance_id} --rev {rev}{}",
            flags.tls.words()
        );
    }
    Ok(())
}

/// Prints every state, or what each changes; or one, and returns it.
async fn print(mut states: Subscription, flags: &Flags) -> Result<Option<Arc<Published>>> {
    let mut before: Option<Arc<Published>> = None;
    while let Some(published) = states.next().await {
        if flags.watch {
            write(&render_changes(before.as_deref(), &published, flags.output.into())?)?;
            before = Some(published);
            continue;
        }
        show(&published, flags.output)?;
        if flags.once {
            return Ok(Some(published));
        }
    }
    Ok(None)
}

fn show(published: &Published, output: Output) -> Result<()> {
    write(&render(published, output.into())?)
}

fn write(text: &str) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    Ok(stdout.flush()?)
}
