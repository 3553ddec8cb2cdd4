//! An answer as text: the verdict, the rules, the kernel, and a line for each endpoint.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
    slice,
};

use brain::{ClientKind, Explanation, Verdict};
use comfy_table::Table;

use super::{
    answer::Answer,
    forwarding,
    kernel::{Ejected, Kernel, Packets},
};
use crate::cli::output::{duration, lines};

/// The width of the names of rules.
const WIDTH: usize = 10;

pub(super) fn render(answer: &Answer) -> String {
    let verdict = match (&answer.explanation, &answer.unexplained) {
        (Some(it), _) => verdict(it),
        (None, reason) => format!("UNKNOWN: {}", reason.as_deref().unwrap_or_default()),
    };
    let mut out = format!("{verdict}\n");
    // Writing to a string cannot fail.
    for it in &answer.differences {
        let _ = writeln!(out, "BUT {it}");
    }
    for it in &answer.problems {
        let _ = writeln!(out, "PROBLEM {it}");
    }
    out.push('\n');
    // The first line has the name.
    let mut say = |mut name: &str, lines: &[String]| {
        for it in lines {
            let _ = writeln!(out, "{name:WIDTH$} {it}");
            name = "";
        }
    };
    if let Some(it) = &answer.explanation {
        say("from", &[client(it, answer.client_port)]);
        say("to", &[format!("{}/{}", it.destination, it.protocol)]);
        it.rules.iter().for_each(|it| say(&it.rule, slice::from_ref(&it.says)));
    }
    if let Some(kernel) = &answer.kernel {
        let since = answer.active_seconds.map_or_else(String::new, |it| format!(", for {}", duration(it)));
        say("kernel", &describe(kernel, &since, answer.explanation.is_none()));
        let unforwarded = answer.explanation.as_ref().and_then(forwarding::unforwarded);
        let forwarded = match &kernel.forwarding {
            Some(it) => it.describe(),
            None => unforwarded.filter(|_| kernel.errors.is_empty()).into_iter().map(Into::into).collect(),
        };
        say("forwarded", &forwarded);
    }
    if let Some(it) = answer.explanation.as_ref().filter(|it| !it.endpoints.is_empty()) {
        out.push('\n');
        out.push_str(&lines(&mut endpoints(it, answer.kernel.as_ref())));
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

fn client(it: &Explanation, port: Option<NonZeroU16>) -> String {
    let client = &it.client;
    let address = |ip: &IpAddr| match port {
        Some(port) => SocketAddr::new(*ip, port.get()).to_string(),
        None => ip.to_string(),
    };
    let addresses: Vec<_> = client.addresses.iter().map(address).collect();
    let addresses = addresses.join(", ");
    match (client.kind, &client.pod) {
        (ClientKind::Node, Some(pod)) => format!("pod {pod} in the network of node {}", it.node),
        (ClientKind::Node, None) => format!("node {}", it.node),
        (ClientKind::Pod, Some(pod)) => format!("pod {pod} ({addresses}) on node {}", it.node),
        (ClientKind::Pod, None) => {
            format!("a pod at {addresses}, if it is one of node {}: no endpoint has this address", it.node)
        }
        (ClientKind::Outside, _) if addresses.is_empty() => {
            format!("outside the cluster, over node {}", it.node)
        }
        (ClientKind::Outside, _) => format!("{addresses}, outside the cluster, over node {}", it.node),
    }
}

/// What each datapath has, and since when; with the names of the endpoints if there is no table of them.
fn describe(kernel: &Kernel, since: &str, names_endpoints: bool) -> Vec<String> {
    let endpoints = |it: &BTreeSet<SocketAddr>| match it.len() {
        0 => "refused".to_owned(),
        _ if names_endpoints => it.iter().map(ToString::to_string).collect::<Vec<_>>().join(" "),
        number => model::counted(number, "endpoint"),
    };
    let none = || "not translated".to_owned();
    let sockets = kernel.generation.map(|generation| {
        let says = kernel.sockets.as_ref().map_or_else(none, endpoints);
        format!("eBPF, generation {generation}{since}: {says}")
    });
    let packets = match &kernel.packets {
        Some(Packets::Endpoints(it)) => endpoints(it),
        Some(Packets::Refused) => "refused".into(),
        Some(Packets::Dropped) => "dropped".into(),
        None => none(),
    };
    let packets = kernel.has_tables.then(|| format!("nftables: {packets}"));
    let unknown = (!kernel.is_client_known && !kernel.ejected.is_empty()).then(|| {
        "the network namespace of the client is unknown: ejections are those of all clients".to_owned()
    });
    let errors = kernel.errors.iter().map(|it| format!("cannot be read: {it}"));
    let says: Vec<_> = sockets.into_iter().chain(packets).chain(unknown).chain(errors).collect();
    if says.is_empty() { vec!["nothing is programmed".into()] } else { says }
}

fn endpoints(it: &Explanation, kernel: Option<&Kernel>) -> Table {
    let mut table = Table::new();
    table.set_header(["ENDPOINT", "USED", "REASON", "POD", "NODE"]);
    for it in &it.endpoints {
        let ejected =
            kernel.and_then(|kernel| kernel.ejected.iter().find(|ejected| ejected.endpoint == it.endpoint));
        let kept =
            kernel.and_then(|kernel| kernel.affinity.as_ref().filter(|kept| kept.endpoint == it.endpoint));
        let used = match (it.used, ejected) {
            (true, Some(Ejected { clients: None, .. })) => "ejected",
            (true, _) => "yes",
            (false, _) => "no",
        };
        let mut reason = it.reason.clone();
        let _ = match ejected {
            Some(it @ Ejected { clients: None, seconds, .. }) => {
                write!(reason, "; ejected for {} more: {}", duration(*seconds), it.cause())
            }
            Some(it @ Ejected { clients: Some(clients), .. }) => {
                write!(reason, "; ejected for {}: {}", model::counted(*clients, "client"), it.cause())
            }
            None => Ok(()),
        };
        if let Some(it) = kept {
            let _ = write!(reason, "; this client keeps it for {}", duration(it.seconds));
        }
        let or_none = |it: &Option<String>| it.clone().unwrap_or_else(|| "-".into());
        table.add_row([it.endpoint.to_string(), used.into(), reason, or_none(&it.pod), or_none(&it.node)]);
    }
    table
}
