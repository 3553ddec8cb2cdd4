//! The status as JSON.

use std::{
    collections::{BTreeSet, HashMap},
    net::SocketAddr,
};

use datapath::{ActiveFrontend, HookStatus, PortCounts, PortId};
use datapath_ebpf::check;
use serde_json::{Map, Value, json};

use super::{process::PortName, seen::Seen};

/// One object.
pub(super) fn render(seen: &Seen) -> Value {
    let frontends = seen.rows().into_iter().map(|(name, it)| {
        json!({
            "service": service(name.service),
            "port": name.port,
            "frontend": it.frontend,
            "endpoints": it.backends,
        })
    });
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
    json!({
        "process": seen.process.status,
        "kernel": check::kernel().says,
        "generation": seen.generation.as_ref().ok(),
        "programs": programs,
        "packets": match &seen.packets { Ok(it) | Err(it) => it },
        "errors": seen.errors(),
        "frontends": frontends.collect::<Vec<_>>(),
        "counters": counters(seen),
    })
}

/// The counters of each service port and of its endpoints.
fn counters(seen: &Seen) -> Vec<Value> {
    let Ok(counts) = &seen.counts else { return Vec::new() };
    let mut ports: Vec<(PortName, PortId, Vec<&ActiveFrontend>)> = Vec::new();
    let mut indices = HashMap::new();
    for (name, frontend) in seen.rows() {
        let Some(id) = frontend.port else { continue };
        let index = *indices.entry(id).or_insert(ports.len());
        if index == ports.len() {
            ports.push((name, id, Vec::new()));
        }
        ports[index].2.push(frontend);
    }
    let counters = ports.into_iter().map(|(name, port, frontends)| {
        let PortCounts { connections, no_backend, denied, left_to_packets } = counts.of(port);
        let backends: BTreeSet<_> = frontends.iter().flat_map(|it| &it.backends).collect();
        let endpoint = |it: &SocketAddr| json!({ "endpoint": it, "connections": counts.to(port, *it) });
        json!({
            "service": service(name.service),
            "port": name.port,
            "connections": connections,
            "noBackend": no_backend,
            "denied": denied,
            "leftToPackets": left_to_packets,
            "endpoints": backends.into_iter().map(endpoint).collect::<Vec<_>>(),
        })
    });
    counters.collect()
}

/// The name of a Service, `None` if it is unknown.
fn service(name: String) -> Option<String> {
    Some(name).filter(|it| !it.is_empty())
}
