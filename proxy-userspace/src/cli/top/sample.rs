//! Readings of the counters.
//!
//! Invariant: names are read again only when another generation is active, and endpoints only of one service port at a time.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    path::PathBuf,
    time::Instant,
};

use admin::History;
use anyhow::Result;
use datapath::{PortCounts, PortId};
use datapath_ebpf::{self as ebpf, ActiveFrontends, Counts, FrontendRow};

use crate::cli::{
    flags::ReportFlags,
    status::{PortName, Process},
};

/// How many rates a plot shows.
pub(super) const HISTORY: usize = 20;

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
    pub(super) endpoint_count: u32,
    pub(super) counts: PortCounts,
    /// The endpoints that some clients avoid.
    pub(super) ejected: BTreeSet<SocketAddr>,
}

/// The endpoints of a service port at all its addresses, in ascending order.
pub(super) struct Endpoints {
    pub(super) of: PortId,
    /// The time of the reading that their connections are of.
    pub(super) at: Instant,
    pub(super) all: Vec<Endpoint>,
}

pub(super) struct Endpoint {
    pub(super) address: SocketAddr,
    pub(super) connections: u64,
    pub(super) rates: History<HISTORY>,
}

/// Reads the counters below a pin folder.
pub(super) struct Reader {
    pin_dir: PathBuf,
    reports: ReportFlags,
    generation: Option<u32>,
    /// The service ports of that generation, without counts.
    ports: Vec<PortSample>,
    /// The last reading.
    counts: Counts,
    at: Instant,
}

impl Reader {
    pub(super) fn new(pin_dir: PathBuf, reports: ReportFlags) -> Self {
        let (counts, at) = (Counts::default(), Instant::now());
        Self { pin_dir, reports, generation: None, ports: Vec::new(), counts, at }
    }

    pub(super) fn read(&mut self) -> Result<Sample> {
        let generation = ebpf::generation(&self.pin_dir)?;
        if self.generation != Some(generation) {
            self.ports = self.ports()?;
            self.generation = Some(generation);
        }
        (self.counts, self.at) = (ebpf::counts(&self.pin_dir)?, Instant::now());
        // None if no process answers.
        let ejected = self.reports.status.status().map(|it| it.ejected).unwrap_or_default();
        let mut ports = self.ports.clone();
        for port in &mut ports {
            port.counts = self.counts.of(port.id);
            let PortName { service, port: name } = &port.name;
            let own = ejected.iter().filter(|it| it.service == **service && it.port == **name);
            port.ejected = own.filter_map(|it| it.endpoint.parse().ok()).collect();
        }
        Ok(Sample { at: self.at, generation, ports })
    }

    /// The endpoints of a service port, with their connections as of the last reading.
    pub(super) fn endpoints(&self, of: PortId) -> Result<Endpoints> {
        let mut frontends = ActiveFrontends::open(&self.pin_dir)?;
        let mut endpoints = BTreeSet::new();
        for it in frontends.filter_map(|it| (it.port == of).then_some(it.address))? {
            endpoints.extend(frontends.get(&it)?.into_iter().flat_map(|it| it.backends));
        }
        let endpoint = |address| {
            let connections = self.counts.to(of, address);
            Endpoint { address, connections, rates: History::default() }
        };
        Ok(Endpoints { of, at: self.at, all: endpoints.into_iter().map(endpoint).collect() })
    }

    fn ports(&self) -> Result<Vec<PortSample>> {
        let process = Process::query(&self.reports);
        let mut ports = BTreeMap::<PortId, PortSample>::new();
        let mut frontends = ActiveFrontends::open(&self.pin_dir)?.filter_map(Some)?;
        // The first one of a service port names it. Node ports are listed with the unspecified address.
        let named = |it: &FrontendRow| process.names.0.get(&it.address);
        frontends.sort_by_cached_key(|it| {
            let is_cluster_ip = named(it).is_some_and(|it| it.is_cluster_ip);
            (!is_cluster_ip, it.address.address.ip().is_unspecified(), it.address.to_string())
        });
        for it in frontends {
            ports.entry(it.port).or_insert_with(|| PortSample {
                id: it.port,
                name: named(&it).map(|it| it.port.clone()).unwrap_or_default(),
                address: it.address.to_string(),
                endpoint_count: it.backends,
                counts: PortCounts::default(),
                ejected: BTreeSet::new(),
            });
        }
        Ok(ports.into_values().collect())
    }
}
