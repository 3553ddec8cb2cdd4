//! The status as a table. What cannot be read has a line with the error.

use std::{
    collections::HashSet,
    fmt::Write as _,
    io::{self, Write},
};

use datapath::{ActiveFrontend, PortCounts, PortId};
use datapath_ebpf::{Counts, ForwardSummary, check};

use super::{names::PortName, seen::Seen};

const HEADER: [&str; 7] = ["SERVICE", "PORT", "ADDRESS", "ENDPOINTS", "CONNECTIONS", "REFUSED", ""];
/// How many endpoints a row names.
const MAX_NAMED: usize = 3;

/// Writes the process and the kernel, then a row for each frontend, then the rejected items.
pub(super) fn write(seen: &mut Seen, out: &mut impl Write) -> io::Result<()> {
    let mut head = seen.process.summary();
    describe_kernel(seen, &mut head);
    writeln!(out, "{head}")?;
    frontends(seen, out)?;
    if let Some(error) = &seen.rows.error {
        writeln!(out, "\nmaps       cannot be read: {error}")?;
    }
    if let Some(status) = &seen.process.status
        && !status.rejected.is_empty()
    {
        writeln!(out, "\nREJECTED")?;
        for it in &status.rejected {
            writeln!(out, "{} ({}): {}", it.item, it.by, it.reason)?;
        }
    }
    Ok(())
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
    let _ = match &seen.forwarding {
        Ok(Some(it)) => writeln!(out, "forwarding {}", forwarding(it)),
        Ok(None) => Ok(()),
        Err(error) => writeln!(out, "forwarding cannot be read: {error}"),
    };
    let _ = writeln!(out, "kernel     {}", check::kernel().says);
}

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

/// What becomes of packets from outside, as in `2 frontends, to 3 nodes, by eth0`.
fn forwarding(it: &ForwardSummary) -> String {
    let (frontends, nodes) = (model::counted(it.frontends, "frontend"), model::counted(it.nodes, "node"));
    let more = |count: usize, says: &str| match count {
        0 => String::new(),
        count => format!("; {count} more {says}"),
    };
    let translated = more(it.translated, "translated (`check` says why)");
    let ended = more(it.ended, "for connections that exist alone (`check` says why)");
    let uplinks: Vec<_> = it.uplinks.iter().map(String::as_str).collect();
    match &uplinks[..] {
        [] => {
            format!("NOT at work, no interface has the programs: {frontends}, to {nodes}{translated}{ended}")
        }
        uplinks => format!("{frontends}, to {nodes}, by {}{translated}{ended}", uplinks.join(", ")),
    }
}

/// Reads the rows twice: first for the widths of the columns.
fn frontends(seen: &mut Seen, out: &mut impl Write) -> io::Result<()> {
    let (rows, counts) = (&mut seen.rows, seen.counts.as_ref().ok());
    let mut widths = HEADER.map(str::len);
    let mut counted = HashSet::new();
    rows.each(|_, name, it| {
        let cells = cells(name, &it, counts, &mut counted);
        widths.iter_mut().zip(cells).for_each(|(width, it)| *width = it.chars().count().max(*width));
        Ok(())
    })?;
    let mut write = |cells: [String; 7]| {
        let cells = cells.into_iter().zip(widths).map(|(it, width)| format!("{it:width$}"));
        writeln!(out, "{}", cells.collect::<Vec<_>>().join("  ").trim())
    };
    write(HEADER.map(Into::into))?;
    counted.clear();
    rows.each(|_, name, it| write(cells(name, &it, counts, &mut counted)))
}

fn cells(
    PortName { service, port }: &PortName,
    ActiveFrontend { frontend, backends, port: id }: &ActiveFrontend,
    counts: Option<&Counts>,
    counted: &mut HashSet<PortId>,
) -> [String; 7] {
    // Counters belong to the service port: they are shown with the first of its addresses.
    let (connections, no_backend) = match id.filter(|it| counted.insert(*it)).zip(counts) {
        Some((id, counts)) => {
            let PortCounts { connections, no_backend, .. } = counts.of(id);
            (connections.to_string(), no_backend.to_string())
        }
        None => Default::default(),
    };
    let mut named: Vec<_> = backends.iter().take(MAX_NAMED).map(ToString::to_string).collect();
    if backends.len() > MAX_NAMED {
        named.push("…".into());
    }
    if backends.is_empty() {
        named.push("refused".into());
    }
    let service = if service.is_empty() { "?" } else { service };
    let endpoints = backends.len().to_string();
    let (service, port, named) = (service.to_owned(), port.to_string(), named.join(" "));
    [service, port, frontend.clone(), endpoints, connections, no_backend, named]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_forwarded_is_told_from_what_is_not() {
        let says = |frontends, translated, uplinks: &[&str]| {
            let uplinks = uplinks.iter().map(|it| (*it).to_owned()).collect();
            forwarding(&ForwardSummary {
                frontends,
                nodes: 3,
                translated,
                uplinks,
                ..ForwardSummary::default()
            })
        };
        assert_eq!(says(2, 0, &["eth0", "eth1"]), "2 frontends, to 3 nodes, by eth0, eth1");
        assert_eq!(
            says(1, 1, &["eth0"]),
            "1 frontend, to 3 nodes, by eth0; 1 more translated (`check` says why)"
        );
        assert_eq!(says(1, 0, &[]), "NOT at work, no interface has the programs: 1 frontend, to 3 nodes");
        let uplinks = ["eth0".to_owned()].into();
        assert_eq!(
            forwarding(&ForwardSummary { nodes: 3, ended: 2, uplinks, ..ForwardSummary::default() }),
            "0 frontends, to 3 nodes, by eth0; 2 more for connections that exist alone (`check` says why)"
        );
    }
}
