//! `explain`: where a connection goes, and why.
//!
//! The rules come from the process that knows the cluster, or from a source; what is in the kernel is read there.
//! May know: both sides, `explain` of `pipeline` and the lookups of the datapaths; only here are they compared.

mod answer;
mod forwarding;
mod kernel;
mod server;
mod text;

use std::net::SocketAddr;

use admin::EjectedStatus;
use anyhow::{Error, Result, bail};
use brain::{ClientKind, Explanation, Query};
use clap::Args;
use jiff::Timestamp;
use model::Protocol;
use pipeline::{Config, Pipeline};

use self::{
    answer::Answer,
    forwarding::Forwarding,
    kernel::{Asked, Kernel},
};
use super::{
    flags::{PinFlags, SourceArg, SourceOptions, StatusSocketFlag, source},
    output::{self, Output},
    runtime::block_on,
};

pub(super) use self::server::{serve, serve_with_kernel};

/// Explain where a connection goes, and why
///
/// Applies the rules in their order: which Service and port, which policy, and why each endpoint is used or not. The process
/// that serves this node is asked, and what the kernel has is compared with its answer; the exit code is 1 where they
/// differ. With --source, only the objects there are read, and neither the process nor the kernel.
///
/// FROM is `node` (a program on this node), `pod NAMESPACE/NAME`, `pod ADDRESS`, `outside`, `outside ADDRESS` or `outside
/// ADDRESS:PORT`. TO is ADDRESS:PORT or NAME.NAMESPACE:PORT, where PORT is a number or a name, with /tcp, /udp or /sctp
/// behind it where that is not clear. Where packets are forwarded whole, the client's address and port tell which node serves
/// it.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  kube-proxy-ebpf explain node 10.96.0.10:80/tcp
  kube-proxy-ebpf explain pod default/client web.default:http
  kube-proxy-ebpf explain outside 198.51.100.7 203.0.113.7:30080
  kube-proxy-ebpf explain outside 198.51.100.7:40000 203.0.113.1:80/tcp
  kube-proxy-ebpf explain --source file:manifests --node-name worker-1 node web.default:http")]
pub(super) struct Flags {
    /// Who connects, and where to
    #[arg(value_name = "FROM TO", required = true)]
    words: Vec<String>,
    #[command(flatten)]
    status: StatusSocketFlag,
    #[command(flatten)]
    pins: PinFlags,
    /// Explain by these objects instead: kube (an API server), file:PATH (a manifest or a folder of manifests) or api:TARGET
    /// (the cluster state of another brain)
    #[arg(long, value_name = "kube|file:PATH|api:TARGET", value_parser = source)]
    source: Option<SourceArg>,
    #[command(flatten)]
    options: SourceOptions,
    /// Output format
    #[arg(long, short, default_value = "text")]
    output: Output,
}

/// Prints an explanation; returns whether everything is known, and the kernel has what the brain says.
pub(super) fn main(flags: Flags) -> Result<bool> {
    let query = Query::parse(&flags.words).map_err(output::wrong_usage)?;
    let answer = match &flags.source {
        Some(source) => {
            let explanation = Some(block_on(by_source(source, &flags.options, &flags.words))?);
            Answer { explanation, client_port: query.client_port(), ..Answer::default() }
        }
        None => by_process(&flags, &query)?,
    };
    output::print(&match flags.output {
        Output::Text => text::render(&answer),
        Output::Json => format!("{}\n", serde_json::to_string(&answer)?),
    })?;
    Ok(answer.is_complete())
}

/// Explains by the objects of a source, as soon as it has been read completely.
async fn by_source(source: &SourceArg, options: &SourceOptions, words: &[String]) -> Result<Explanation> {
    // The addresses of all Nodes are part of the explanation.
    let pipeline = Pipeline::start(Config { checks_node: false, ..options.config(source, true)? })?;
    let explainer = pipeline.explainer();
    tokio::select! {
        explanation = explainer.explain(words) => Ok(explanation?),
        () = pipeline.run(&()) => bail!("the source has stopped; the log names the reason"),
    }
}

/// What the process and the kernel say; only the kernel if no process can be asked and the destination is an address.
fn by_process(flags: &Flags, query: &Query) -> Result<Answer> {
    match ask(flags) {
        Ok(Ok(explanation)) => {
            let protocol = explanation.protocol.parse().map_err(Error::msg)?;
            let (client, destination) = (&explanation.client, (explanation.destination, protocol));
            let asked = Asked::Client(client.kind, &client.addresses);
            let kernel = read_kernel(flags, query, destination, asked);
            let mut answer = Answer { client_port: query.client_port(), ..Answer::default() };
            let ejected = add_status(&mut answer, flags);
            let of_node =
                ejected.iter().filter(|it| it.node && Some(&it.service) == explanation.service.as_ref());
            let avoided = of_node.filter_map(|it| it.endpoint.parse().ok()).collect();
            answer.add(explanation, kernel, &avoided);
            Ok(answer)
        }
        Ok(Err(error)) => bail!("{error}"),
        Err(unexplained) => {
            let Some(destination) = query.address() else { bail!("{unexplained}") };
            let (kind, addresses) = query.client();
            let kernel = read_kernel(flags, query, destination, Asked::Client(kind, &addresses));
            Ok(Answer { unexplained: Some(unexplained), kernel: Some(kernel), ..Answer::default() })
        }
    }
}

/// What the kernel has for the connection that is asked about.
fn read_kernel(
    flags: &Flags,
    query: &Query,
    destination: (SocketAddr, Protocol),
    asked: Asked<'_>,
) -> Kernel {
    let pin_dir = &flags.pins.pin_dir;
    let mut kernel = Kernel::read(Some(pin_dir), destination, asked);
    if matches!(asked, Asked::Client(ClientKind::Outside, _)) {
        let names = flags.status.path().map(forwarding::node_names).unwrap_or_default();
        kernel.add_forwarding(Forwarding::read(pin_dir, destination, query, &names));
    }
    kernel
}

/// Asks the process that serves this node; the outer error says why it cannot be asked.
fn ask(flags: &Flags) -> Result<Result<Explanation, String>, String> {
    const REMEDY: &str =
        "give the --status-socket of `run` or of the brain, or explain manifests with --source file:PATH";
    let Some(socket) = flags.status.path() else {
        return Err(format!("--status-socket is disabled: {REMEDY}"));
    };
    let answer = admin::query_explanation(socket, &flags.words)
        .map_err(|error| output::unanswered(socket, &error, "so that the reasons are unknown", REMEDY))?;
    match answer {
        Ok(answer) => serde_json::from_str(&answer).map(Ok).map_err(|error| {
            let at = socket.display();
            format!("{at}: the process has another version than this command: {error}")
        }),
        Err(error) => Ok(Err(error)),
    }
}

/// Adds what the process reports of itself, and returns the endpoints that are ejected.
fn add_status(answer: &mut Answer, flags: &Flags) -> Vec<EjectedStatus> {
    let Some(status) = flags.status.status() else { return Vec::new() };
    let since = status.active.map(|it| Timestamp::now().as_second().saturating_sub(it.since.as_second()));
    answer.active_seconds = since.and_then(|it| u64::try_from(it).ok());
    let pending = status.pending_seconds.map(|it| format!("a change has been pending for {it:.1} s"));
    answer.problems = status.problems.into_iter().chain(pending).chain(status.failure).collect();
    status.ejected
}
