//! Readings of the counters.
//!
//! Invariant: names and endpoints are read again only when another generation is active.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    path::PathBuf,
    time::Instant,
};

use admin::{EjectedStatus, Listener};
use anyhow::Result;
use datapath::{ActiveFrontend, PortCounts, PortId};
use datapath_ebpf as ebpf;

use crate::cli::{
    flags::ReportFlags,
    status::{PortName, Process},
};

/// One reading.
pub(super) struct Sample {
    pub(super) at: Instant,
    /// The number of the active generation.
    pub(super) generation: u32,
    pub(super) ports: Vec<PortSample>,
}

/// A service port in a reading.
#[derive(Clone)]
pub(super) struct PortSample {
    pub(super) id: PortId,
    /// Empty if no process knows it.
    pub(super) name: PortName,
    /// Its cluster IP if that is known, else one of its addresses, as in `10.96.0.10:80/TCP`.
    pub(super) address: String,
    /// How many endpoints are used at that address.
    pub(super) endpoint_count: usize,
    pub(super) counts: PortCounts,
    /// Its endpoints at all addresses, each with its connections.
    pub(super) endpoints: Vec<(SocketAddr, u64)>,
    /// The endpoints that some clients avoid.
    pub(super) ejected: BTreeSet<SocketAddr>,
}

/// Reads the counters below a pin folder.
pub(super) struct Reader {
    pin_dir: PathBuf,
    reports: ReportFlags,
    generation: Option<u32>,
    /// The service ports of that generation, without counts.
    ports: Vec<PortSample>,
}

impl Reader {
    pub(super) fn new(pin_dir: PathBuf, reports: ReportFlags) -> Self {
        Self { pin_dir, reports, generation: None, ports: Vec::new() }
    }

    pub(super) fn read(&mut self) -> Result<Sample> {
        let generation = ebpf::generation(&self.pin_dir)?;
        if self.generation != Some(generation) {
            self.ports = self.ports()?;
            self.generation = Some(generation);
        }
        let counts = ebpf::counts(&self.pin_dir)?;
        let ejected = self.ejected();
        let mut ports = self.ports.clone();
        for port in &mut ports {
            port.counts = counts.of(port.id);
            for (endpoint, connections) in &mut port.endpoints {
                *connections = counts.to(port.id, *endpoint);
            }
            let PortName { service, port: name } = &port.name;
            let own = ejected.iter().filter(|it| it.service == **service && it.port == **name);
            port.ejected = own.filter_map(|it| it.endpoint.parse().ok()).collect();
        }
        Ok(Sample { at: Instant::now(), generation, ports })
    }

    fn ports(&self) -> Result<Vec<PortSample>> {
        let process = Process::query(&self.reports);
        let mut ports = BTreeMap::<PortId, PortSample>::new();
        let mut frontends = ebpf::active_frontends(&self.pin_dir)?;
        // The first one of a service port names it. Node ports are listed with the unspecified address.
        let is_node_port =
            |it: &ActiveFrontend| it.frontend.starts_with("0.0.0.0:") || it.frontend.starts_with("[::]:");
        let named = |it: &ActiveFrontend| process.names.get(&it.frontend.parse().ok()?);
        let rank = |it: &ActiveFrontend| (!named(it).is_some_and(|it| it.is_cluster_ip), is_node_port(it));
        frontends.sort_by_key(rank);
        for frontend in frontends {
            let Some(id) = frontend.port else { continue };
            let name = named(&frontend).map(|it| it.name.clone()).unwrap_or_default();
            let port = ports.entry(id).or_insert_with(|| PortSample {
                id,
                name,
                address: frontend.frontend,
                endpoint_count: frontend.backends.len(),
                counts: PortCounts::default(),
                endpoints: Vec::new(),
                ejected: BTreeSet::new(),
            });
            port.endpoints.extend(frontend.backends.into_iter().map(|it| (it, 0)));
        }
        for it in ports.values_mut() {
            it.endpoints.sort_unstable();
            it.endpoints.dedup();
        }
        Ok(ports.into_values().collect())
    }

    /// The ejected endpoints; none if no process answers.
    fn ejected(&self) -> Vec<EjectedStatus> {
        match self.reports.status().map(admin::query_status) {
            Some(Ok(Listener::Proxy(status))) => status.ejected,
            _ => Vec::new(),
        }
    }
}
