//! An explanation as text: the verdict, the rules, and a line for each endpoint.

use std::fmt::Write as _;

use brain::{ClientKind, Explanation, Verdict};
use comfy_table::Table;

use crate::cli::output::lines;

/// The width of the names of rules.
const WIDTH: usize = 10;

pub(super) fn render(it: &Explanation) -> String {
    let mut out = format!("{}\n\n", verdict(it));
    let mut line = |name: &str, says: &str| {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "{name:WIDTH$} {says}");
    };
    line("from", &client(it));
    line("to", &format!("{}/{}", it.destination, it.protocol));
    it.rules.iter().for_each(|it| line(&it.rule, &it.says));
    if !it.endpoints.is_empty() {
        out.push('\n');
        out.push_str(&lines(&mut endpoints(it)));
    }
    out
}

fn verdict(it: &Explanation) -> String {
    let reason = &it.reason;
    match it.verdict {
        Verdict::Redirected => format!("REDIRECTED {reason}"),
        Verdict::Refused => format!("REFUSED: {reason}"),
        Verdict::Dropped => format!("DROPPED: {reason}"),
        Verdict::Untranslated => format!("NOT TRANSLATED: {reason}"),
    }
}

fn client(it: &Explanation) -> String {
    let client = &it.client;
    let addresses: Vec<_> = client.addresses.iter().map(ToString::to_string).collect();
    let addresses = addresses.join(", ");
    match (client.kind, &client.pod) {
        (ClientKind::Node, _) => format!("node {}", it.node),
        (ClientKind::Pod, Some(pod)) => format!("pod {pod} ({addresses}) on node {}", it.node),
        (ClientKind::Pod, None) => format!("a pod at {addresses} on node {}", it.node),
        (ClientKind::Outside, _) if addresses.is_empty() => {
            format!("outside the cluster, over node {}", it.node)
        }
        (ClientKind::Outside, _) => format!("{addresses}, outside the cluster, over node {}", it.node),
    }
}

fn endpoints(it: &Explanation) -> Table {
    let mut table = Table::new();
    table.set_header(["ENDPOINT", "USED", "REASON", "POD", "NODE"]);
    for endpoint in &it.endpoints {
        let used = if endpoint.used { "yes" } else { "no" };
        let or_none = |it: &Option<String>| it.clone().unwrap_or_else(|| "-".into());
        table.add_row([
            endpoint.endpoint.to_string(),
            used.into(),
            endpoint.reason.clone(),
            or_none(&endpoint.pod),
            or_none(&endpoint.node),
        ]);
    }
    table
}
