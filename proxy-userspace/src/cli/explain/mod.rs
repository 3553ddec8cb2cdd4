//! `explain`: where a connection goes, and why.

mod text;

use anyhow::{Result, bail};
use brain::{Explanation, Query};
use clap::{Args, ValueEnum};
use pipeline::Pipeline;

use super::{
    flags::{SourceArg, SourceOptions, source},
    output,
    runtime::block_on,
};

/// Explain where a connection goes, and why
///
/// Applies the rules in their order: which Service and port, which policy, and why each endpoint is used or not.
///
/// FROM is `node` (a program on this node), `pod NAMESPACE/NAME`, `pod ADDRESS`, `outside` or `outside ADDRESS`. TO is
/// ADDRESS:PORT or NAME.NAMESPACE:PORT, where PORT is a number or a name, with /tcp, /udp or /sctp behind it where that is
/// not clear.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  kube-proxy-ebpf explain node 10.96.0.10:80/tcp
  kube-proxy-ebpf explain pod default/client web.default:http
  kube-proxy-ebpf explain outside 198.51.100.7 203.0.113.7:30080
  kube-proxy-ebpf explain --source file:manifests --node-name worker-1 node web.default:http")]
pub(super) struct Flags {
    /// Who connects, and where to
    #[arg(value_name = "FROM TO", required = true)]
    words: Vec<String>,
    /// Explain by these objects: kube (an API server), file:PATH (a manifest or a folder of manifests) or api:TARGET (the
    /// cluster state of another brain)
    #[arg(long, value_name = "kube|file:PATH|api:TARGET", value_parser = source)]
    source: SourceArg,
    #[command(flatten)]
    options: SourceOptions,
    /// Output format
    #[arg(long, short, default_value = "text")]
    output: Output,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Output {
    /// Text
    Text,
    /// One JSON object
    Json,
}

pub(super) fn main(flags: Flags) -> Result<()> {
    let query = Query::parse(&flags.words).map_err(output::wrong_usage)?;
    let explanation = block_on(by_source(&flags.source, &flags.options, &query))?;
    Ok(output::print(&match flags.output {
        Output::Text => text::render(&explanation),
        Output::Json => format!("{}\n", serde_json::to_string(&explanation)?),
    })?)
}

/// Explains by the objects of a source, as soon as it has been read completely.
async fn by_source(source: &SourceArg, options: &SourceOptions, query: &Query) -> Result<Explanation> {
    // The addresses of all Nodes are part of the explanation.
    let pipeline = Pipeline::start(options.config(source, true)?)?.without_node_check();
    let explainer = pipeline.explainer();
    tokio::select! {
        explanation = explainer.explain(pipeline.node(), query) => Ok(explanation?),
        () = pipeline.run(&()) => bail!("the source has stopped; the log names the reason"),
    }
}
