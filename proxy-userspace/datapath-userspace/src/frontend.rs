//! Frontends: where a Service is reached, and what becomes of a connection there.
//!
//! Invariant: pure. The rules are those of docs/contract.md.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use datapath::{FrontendAddress, unspecified};
use ipnet::IpNet;
use model::{
    Family, Protocol, ServiceName,
    state::{Scope, Service, ServiceState},
};
use tokio::time::Instant;

use crate::{
    affinity::Affinity,
    options::{ListenAt, loopback_of},
};

/// Where a Service is reached, and by which endpoints.
#[derive(Debug)]
pub(crate) struct Frontend {
    pub(crate) service: ServiceName,
    /// For traffic from inside the cluster.
    inside: Vec<SocketAddr>,
    /// For other traffic.
    outside: Vec<SocketAddr>,
    /// Endpoints that keep the flows they have.
    other_serving: BTreeSet<SocketAddr>,
    /// Sources that may use it; all if empty.
    allowed: Vec<IpNet>,
    affinity: Option<(Arc<Affinity>, Duration)>,
}

impl Frontend {
    /// Whether any connection is served.
    pub(crate) fn has_endpoints(&self) -> bool {
        !self.inside.is_empty() || !self.outside.is_empty()
    }

    fn endpoints(&self, client: IpAddr, is_inside: bool) -> &[SocketAddr] {
        if !self.allowed.is_empty() && !self.allowed.iter().any(|it| it.contains(&client)) {
            return &[];
        }
        if is_inside { &self.inside } else { &self.outside }
    }

    /// The endpoints for a new connection of a client, in the order in which they are tried.
    pub(crate) fn candidates(&self, client: IpAddr, is_inside: bool) -> Vec<SocketAddr> {
        let mut endpoints = self.endpoints(client, is_inside).to_vec();
        fastrand::shuffle(&mut endpoints);
        if let Some((affinity, timeout)) = &self.affinity
            && let Some(last) = affinity.endpoint(client, *timeout)
            && let Some(position) = endpoints.iter().position(|it| *it == last)
        {
            endpoints.swap(0, position);
        }
        endpoints
    }

    /// Notes the endpoint of a client's newest connection.
    pub(crate) fn chosen(&self, client: IpAddr, endpoint: SocketAddr) {
        if let Some((affinity, timeout)) = &self.affinity {
            affinity.chosen(client, endpoint, *timeout, Instant::now());
        }
    }

    /// Whether a flow of a client may continue to this endpoint.
    pub(crate) fn may_continue(&self, client: IpAddr, is_inside: bool, endpoint: SocketAddr) -> bool {
        self.endpoints(client, is_inside).contains(&endpoint) || self.other_serving.contains(&endpoint)
    }
}

/// The frontends of a Service; `affinity` returns the clients of a port, which outlive a change of the Service.
pub(crate) fn frontends(
    state: &ServiceState,
    listen_at: ListenAt,
    mut affinity: impl FnMut(usize) -> Arc<Affinity>,
) -> Vec<(FrontendAddress, Arc<Frontend>)> {
    let service = &state.service;
    let mut found = Vec::new();
    for (index, port) in service.ports.iter().enumerate() {
        // A stream of bytes cannot carry SCTP.
        if port.protocol == Protocol::Sctp {
            continue;
        }
        let timeout = service.affinity.map(|it| Duration::from_secs(it.timeout_seconds.get().into()));
        let affinity = timeout.map(|it| (affinity(index), it));
        let mut add = |ip, number, family, scopes: (Scope, Scope), allowed: Vec<IpNet>| {
            let targets = |scope| state.targets(index, family, scope).collect();
            let other_serving = state.other_serving.iter().filter(|it| usize::from(it.index) == index);
            let frontend = Frontend {
                service: service.name.clone(),
                inside: targets(scopes.0),
                outside: targets(scopes.1),
                other_serving: other_serving.map(|it| it.target).collect(),
                allowed,
                affinity: affinity.clone(),
            };
            let address = SocketAddr::new(ip, number);
            found.push((FrontendAddress { address, protocol: port.protocol }, Arc::new(frontend)));
        };
        let internal = (Scope::Internal, Scope::Internal);
        let external = (Scope::Cluster, Scope::External);
        let is_own = |it: &IpAddr| !port.conflicting_addresses.contains(it);
        let number = port.port.get();
        match (listen_at, service.cluster_ips.first()) {
            (ListenAt::Loopback, Some(&primary)) => {
                if is_own(&primary) {
                    add(loopback_of(primary), number, Family::of(primary), internal, Vec::new());
                }
                if let Some(it) = port.node_port {
                    add(Ipv4Addr::LOCALHOST.into(), it.get(), Family::of(primary), external, Vec::new());
                }
            }
            (ListenAt::Loopback, None) => {}
            (ListenAt::Services, _) => {
                let mut seen = BTreeSet::new();
                for &ip in service.cluster_ips.iter().filter(|it| is_own(it)) {
                    seen.insert(ip);
                    add(ip, number, Family::of(ip), internal, Vec::new());
                    if let Some(it) = port.node_port {
                        let family = Family::of(ip);
                        add(unspecified(family), it.get(), family, external, Vec::new());
                    }
                }
                // An address that is both is restricted as a load balancer IP.
                for &ip in
                    service.load_balancer_ips.iter().chain(&service.external_ips).filter(|it| is_own(it))
                {
                    if seen.insert(ip) {
                        let is_restricted = service.load_balancer_ips.contains(&ip);
                        let allowed = if is_restricted { source_ranges(service, ip) } else { Vec::new() };
                        add(ip, number, Family::of(ip), external, allowed);
                    }
                }
            }
        }
    }
    found
}

/// The source ranges of the family of an address.
fn source_ranges(service: &Service, ip: IpAddr) -> Vec<IpNet> {
    let is_of_family = |it: &&IpNet| Family::of(it.addr()) == Family::of(ip);
    service.source_ranges.iter().filter(is_of_family).copied().collect()
}
