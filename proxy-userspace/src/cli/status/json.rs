//! The status as JSON, written as it is read.

use std::{
    collections::{BTreeSet, HashMap},
    io::{self, Write},
    mem,
};

use datapath::{ActiveFrontend, HookStatus, PortCounts, PortId};
use datapath_ebpf::check;
use serde_json::{Map, Value, json, to_writer};

use super::seen::Seen;

/// Writes one object, on a line. What cannot be read meanwhile is among the errors, which come last.
pub(super) fn write(seen: &mut Seen, out: &mut impl Write) -> io::Result<()> {
    let programs = match &seen.hooks {
        _ if seen.is_nftables_only() => json!({}),
        Ok(hooks) => {
            let attached = |it: &HookStatus| (it.name.to_owned(), json!(it.is_attached));
            json!({
                "cgroup": hooks.cgroup,
                "attached": hooks.hooks.iter().map(attached).collect::<Map<_, _>>(),
            })
        }
        Err(error) => json!({ "error": error }),
    };
    let (Ok(packets) | Err(packets)) = &seen.packets;
    write!(out, r#"{{"process":"#)?;
    to_writer(&mut *out, &seen.process.status)?;
    let fields: [(_, Value); 5] = [
        ("kernel", check::kernel().says.into()),
        ("generation", seen.generation.as_ref().ok().copied().flatten().into()),
        ("programs", programs),
        ("packets", packets.as_str().into()),
        ("forwarding", json!(seen.forwarding.as_ref().ok())),
    ];
    for (name, value) in fields {
        write!(out, r#","{name}":{value}"#)?;
    }
    write!(out, r#","frontends":["#)?;
    let counted = frontends(seen, out)?;
    write!(out, r#"],"counters":["#)?;
    counters(seen, &counted, out)?;
    writeln!(out, r#"],"errors":{}}}"#, json!(seen.errors()))
}

/// The rows that are counted: the first row of the service port, its id, and the row, in order.
type Counted = Vec<(usize, PortId, usize)>;

fn frontends(seen: &mut Seen, out: &mut impl Write) -> io::Result<Counted> {
    let (mut first_rows, mut counted, mut separator) = (HashMap::new(), Vec::new(), "");
    seen.rows.each(|row, name, ActiveFrontend { frontend, backends, port }| {
        counted.extend(port.map(|it| (*first_rows.entry(it).or_insert(row), it, row)));
        // There may be very many endpoints.
        write!(out, r#"{}{{"endpoints":"#, mem::replace(&mut separator, ","))?;
        to_writer(&mut *out, &backends)?;
        let (frontend, port, service) = (json!(frontend), json!(&*name.port), json!(service(&name.service)));
        write!(out, r#","frontend":{frontend},"port":{port},"service":{service}}}"#)
    })?;
    counted.sort_unstable();
    Ok(counted)
}

/// The counters of each service port and of its endpoints.
fn counters(seen: &mut Seen, counted: &Counted, out: &mut impl Write) -> io::Result<()> {
    let (rows, Ok(counts)) = (&mut seen.rows, &seen.counts) else { return Ok(()) };
    let mut separator = "";
    for group in counted.chunk_by(|(a, ..), (b, ..)| a == b) {
        let (mut endpoints, mut found) = (BTreeSet::new(), None);
        for (_, port, row) in group {
            if let Some((name, frontend)) = rows.get(*row) {
                endpoints.extend(frontend.backends);
                found.get_or_insert_with(|| (name.clone(), *port));
            }
        }
        let Some((name, port)) = found else { continue };
        let PortCounts { connections, no_backend, denied, left_to_packets, .. } = counts.of(port);
        let before = mem::replace(&mut separator, ",");
        write!(out, r#"{before}{{"connections":{connections},"denied":{denied},"endpoints":["#)?;
        let mut separator = "";
        for endpoint in endpoints {
            let row = json!({ "connections": counts.to(port, endpoint), "endpoint": endpoint });
            write!(out, "{}{row}", mem::replace(&mut separator, ","))?;
        }
        let (port, service) = (json!(&*name.port), json!(service(&name.service)));
        write!(
            out,
            r#"],"leftToPackets":{left_to_packets},"noBackend":{no_backend},"port":{port},"service":{service}}}"#
        )?;
    }
    Ok(())
}

/// The name of a Service, `None` if it is unknown.
fn service(name: &str) -> Option<&str> {
    Some(name).filter(|it| !it.is_empty())
}
