//! `nodes`: who follows a brain, and what of it is active.

use std::{net::IpAddr, path::Path, time::Duration};

use anyhow::{Result, anyhow, bail};
use clap::Args;
use comfy_table::Table;
use proxy_contract::{client::Client, globalv1::NodeStatus, localv1::Revision};
use tokio::time::timeout;

use super::{
    flags::{DEFAULT_SOCKET, UpstreamFlags},
    output::{self, duration},
    runtime::block_on,
};

/// How long a brain may take to answer.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Show which nodes follow the brains, and what each has active
///
/// A line for each client of each brain in --target that follows a node: the newest revision of the node's state, the one
/// that is active there, for how long it is behind, and how long the last update took from the brain to its
/// acknowledgment. Agents acknowledge a state when the kernel has it, other clients with their next request. Exits with 1
/// if a node is behind for more than 5 seconds, or --has finds a node without the address. With mutual TLS, the
/// certificate must be in the brain's --tls-allow.
#[derive(Debug, Args)]
pub(super) struct Flags {
    #[command(flatten)]
    upstream: UpstreamFlags,
    /// Show only nodes that have not acknowledged their newest state
    #[arg(long)]
    behind: bool,
    /// Show whether an endpoint with this address is active on each node
    #[arg(long, value_name = "ADDRESS")]
    has: Option<IpAddr>,
}

/// For so long, an update is on its way.
const BEHIND_AFTER: u64 = 5_000;

pub(super) fn main(flags: Flags) -> Result<bool> {
    block_on(nodes(flags))
}

async fn nodes(flags: Flags) -> Result<bool> {
    let client: Client = flags.upstream.client("")?;
    let targets = client.targets().to_string();
    if targets == DEFAULT_SOCKET && targets.strip_prefix("unix://").is_some_and(|it| !Path::new(it).exists())
    {
        bail!(
            "no brain listens at {targets}: where each node runs `run`, `check` and `status` there say what is active; a \
             brain elsewhere is named by --target"
        );
    }
    let answer = timeout(TIMEOUT, client.nodes(flags.has)).await;
    let nodes = answer.map_err(|_| anyhow!("{}: no answer within {TIMEOUT:?}", client.targets()))??;
    let (text, is_good) = render(&nodes, flags.behind);
    output::print(&text)?;
    Ok(is_good)
}

/// The table with its summary, and whether all is well.
fn render(nodes: &[NodeStatus], only_behind: bool) -> (String, bool) {
    let has_address = nodes.iter().any(|it| it.has_address.is_some());
    let mut table = Table::new();
    let mut header = vec!["NODE", "NEWEST", "ACTIVE", "BEHIND", "LATENCY", "FOLLOWS FOR"];
    header.extend(has_address.then_some("HAS ADDRESS"));
    table.set_header(header);
    for it in nodes.iter().filter(|it| !only_behind || it.behind_ms.is_some()) {
        let revision = |it: Option<Revision>| it.map_or_else(|| "-".to_owned(), |it| it.rev.to_string());
        let latency = it.latency_ms.map_or_else(|| "-".to_owned(), |it| format!("{it} ms"));
        let behind = it.behind_ms.map_or_else(|| "-".to_owned(), |it| format!("{:.1} s", it as f64 / 1e3));
        let mut row = vec![
            it.name.clone(),
            revision(it.newest),
            revision(it.acknowledged),
            behind,
            latency,
            duration(it.connected_ms / 1_000),
        ];
        row.extend(it.has_address.map(|it| if it { "yes" } else { "no" }.to_owned()));
        table.add_row(row);
    }
    let behind = nodes.iter().filter(|it| it.behind_ms.is_some_and(|it| it >= BEHIND_AFTER)).count();
    let without = nodes.iter().filter(|it| it.has_address == Some(false)).count();
    let mut text = output::lines(&mut table);
    text.push_str(&format!("{}, {behind} behind for more than 5 s", model::counted(nodes.len(), "node")));
    if has_address {
        text.push_str(&format!(", {without} without the address"));
    }
    text.push('\n');
    (text, behind == 0 && without == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::tests::parse_flags;

    #[test]
    fn without_a_brain_the_commands_of_each_node_are_named() {
        let error = main(parse_flags(&[""; 0]).unwrap()).unwrap_err().to_string();
        assert!(error.contains("no brain listens at unix:///run/kube-proxy-ebpf/proxy.sock"), "{error}");
        assert!(error.contains("`check` and `status` there say what is active"), "{error}");
    }

    #[test]
    fn nodes_that_are_behind_or_lack_the_address_are_counted() {
        let revision = |rev| Some(Revision { instance_id: 7, rev });
        let node = |name: &str, in_force, behind_ms, has_address| NodeStatus {
            name: name.into(),
            newest: revision(9),
            acknowledged: revision(in_force),
            behind_ms,
            latency_ms: Some(12),
            connected_ms: 61_000,
            has_address,
        };
        let nodes = [node("n1", 9, None, Some(true)), node("n2", 8, Some(6_000), Some(false))];
        let (text, is_good) = render(&nodes, false);
        assert_eq!(
            text.lines().map(|it| it.split_whitespace().collect::<Vec<_>>().join(" ")).collect::<Vec<_>>(),
            [
                "NODE NEWEST ACTIVE BEHIND LATENCY FOLLOWS FOR HAS ADDRESS",
                "n1 9 9 - 12 ms 1 min 1 s yes",
                "n2 9 8 6.0 s 12 ms 1 min 1 s no",
                "2 nodes, 1 behind for more than 5 s, 1 without the address",
            ]
        );
        assert!(!is_good);
        assert_eq!(render(&nodes, true).0.lines().count(), 3);
        assert!(render(&nodes[..1], false).1 && render(&[], false).1);
    }
}
