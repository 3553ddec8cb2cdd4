//! The status as a table. What cannot be read has a line with the error.

use std::{collections::HashSet, fmt::Write as _};

use comfy_table::Table;
use datapath::{ActiveFrontend, PortCounts};
use datapath_ebpf::check;

use super::{process::PortName, seen::Seen};
use crate::cli::output::lines;

const HEADER: [&str; 7] = ["SERVICE", "PORT", "ADDRESS", "ENDPOINTS", "CONNECTIONS", "REFUSED", ""];
/// How many endpoints a row names.
const MAX_NAMED: usize = 3;

/// The process and the kernel, then a row for each frontend, then the rejected items.
pub(super) fn render(seen: &Seen) -> String {
    let mut out = seen.process.summary();
    describe_kernel(seen, &mut out);
    out.push('\n');
    out.push_str(&lines(&mut frontends(seen)));
    if let Some(status) = &seen.process.status
        && !status.rejected.is_empty()
    {
        out.push_str("\nREJECTED\n");
        for it in &status.rejected {
            let _ = writeln!(out, "{} ({}): {}", it.item, it.by, it.reason);
        }
    }
    out
}

fn describe_kernel(seen: &Seen, out: &mut String) {
    let _ = match &seen.generation {
        Ok(Some(generation)) => writeln!(out, "maps       generation {generation} active"),
        Ok(None) => Ok(()),
        Err(error) => writeln!(out, "maps       cannot be read: {error}"),
    };
    if let Err(error) = &seen.counts {
        let _ = writeln!(out, "counters   cannot be read: {error}");
    }
    let (Ok(packets) | Err(packets)) = &seen.packets;
    let _ = writeln!(out, "programs   {}", programs(seen));
    let _ = writeln!(out, "packets    {packets}");
    let _ = writeln!(out, "kernel     {}", check::kernel().says);
}

/// Where the programs are attached.
fn programs(seen: &Seen) -> String {
    if seen.is_nftables_only() {
        return "none: nftables only".into();
    }
    let hooks = match &seen.hooks {
        Ok(hooks) => hooks,
        Err(error) => return format!("cannot be read: {error}"),
    };
    let missing: Vec<_> = hooks.missing().map(|it| it.name).collect();
    let cgroup = hooks.cgroup.display();
    let unreached = hooks.unreached.as_ref().map(|it| format!("; {it}")).unwrap_or_default();
    if missing.is_empty() {
        format!("attached at all {} hooks of {cgroup}{unreached}", hooks.hooks.len())
    } else if missing.len() == hooks.hooks.len() {
        // Another cgroup may have them.
        format!(
            "none is attached to {cgroup}: Services are not served there; give the --cgroup that `run` was started with, if \
             it is another one{unreached}"
        )
    } else {
        format!("NOT attached at {cgroup}: {}{unreached}", missing.join(", "))
    }
}

fn frontends(seen: &Seen) -> Table {
    let mut table = Table::new();
    table.set_header(HEADER);
    let mut counted = HashSet::new();
    for (PortName { service, port }, frontend) in seen.rows() {
        let ActiveFrontend { frontend, backends, port: id, .. } = frontend;
        // Counters belong to the service port: they are shown with the first of its addresses.
        let (connections, no_backend) = match id.filter(|it| counted.insert(*it)) {
            Some(id) if let Ok(counts) = &seen.counts => {
                let PortCounts { connections, no_backend, .. } = counts.of(id);
                (connections.to_string(), no_backend.to_string())
            }
            _ => Default::default(),
        };
        let mut named: Vec<_> = backends.iter().take(MAX_NAMED).map(ToString::to_string).collect();
        if backends.len() > MAX_NAMED {
            named.push("…".into());
        }
        if backends.is_empty() {
            named.push("refused".into());
        }
        let service = if service.is_empty() { "?".into() } else { service };
        let endpoints = backends.len().to_string();
        table.add_row([service, port, frontend.clone(), endpoints, connections, no_backend, named.join(" ")]);
    }
    table
}
