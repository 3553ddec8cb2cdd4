//! What was seen, for programs.

use std::{
    collections::{BTreeSet, HashMap},
    net::SocketAddr,
};

use datapath::{ActiveFrontend, HookStatus, PortCounts, PortId};
use datapath_ebpf::check;
use serde_json::json;

use super::{Name, Seen};

impl Seen {
    /// One object.
    pub(super) fn json(&self) -> serde_json::Value {
        let frontends = self.rows().into_iter().map(|(name, it)| {
            json!({ "service": known(name.service), "port": name.port, "frontend": it.frontend, "endpoints": it.backends })
        });
        let programs = match &self.hooks {
            _ if self.are_packets_alone() => json!({}),
            Ok(hooks) => {
                let hook = |it: &HookStatus| (it.name.to_owned(), json!(it.is_attached));
                json!({
                    "cgroup": hooks.cgroup,
                    "inEffect": hooks.hooks.iter().map(hook).collect::<serde_json::Map<_, _>>(),
                })
            }
            Err(error) => json!({ "error": error }),
        };
        json!({
            "process": self.process.status,
            "kernel": check::kernel().says,
            "generation": self.generation.as_ref().ok(),
            "programs": programs,
            "packets": match &self.packets { Ok(it) | Err(it) => it },
            "errors": self.errors(),
            "frontends": frontends.collect::<Vec<_>>(),
            "counted": self.counted(),
        })
    }

    /// What each service port has counted, and each of its endpoints.
    fn counted(&self) -> Vec<serde_json::Value> {
        let Ok(counts) = &self.counts else { return Vec::new() };
        let mut ports: Vec<(Name, PortId, Vec<&ActiveFrontend>)> = Vec::new();
        let mut places = HashMap::new();
        for (name, led) in self.rows() {
            let Some(id) = led.port else { continue };
            let place = *places.entry(id).or_insert(ports.len());
            if place == ports.len() {
                ports.push((name, id, Vec::new()));
            }
            ports[place].2.push(led);
        }
        let counted = ports.into_iter().map(|(name, port, leds)| {
            let PortCounts { connections, no_backend, denied } = counts.of(port);
            let backends: BTreeSet<_> = leds.iter().flat_map(|it| &it.backends).collect();
            let endpoint = |it: &SocketAddr| json!({ "endpoint": it, "connections": counts.to(port, *it) });
            json!({
                "service": known(name.service),
                "port": name.port,
                "connections": connections,
                "noBackend": no_backend,
                "denied": denied,
                "endpoints": backends.into_iter().map(endpoint).collect::<Vec<_>>(),
            })
        });
        counted.collect()
    }
}

/// The name of a Service, if it is known.
fn known(service: String) -> Option<String> {
    Some(service).filter(|it| !it.is_empty())
}
