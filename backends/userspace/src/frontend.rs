//! Frontends: where a Service is reached, and what becomes of a connection there.
//!
//! Invariant: pure.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use proxy_contract::{
    backend::{self, FrontendAddress, ServedPort},
    client::ServiceEndpoints,
    localv1::{Protocol, ServiceIPs},
};

use crate::{
    affinity::Affinity,
    listen_at::{ListenAt, loopback_of, unspecified},
};

/// What is listened at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Address {
    pub(crate) socket: SocketAddr,
    /// TCP or UDP.
    pub(crate) protocol: Protocol,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.socket, self.protocol.as_str_name())
    }
}

#[derive(Debug)]
pub(crate) struct Frontend {
    /// As `namespace/name`.
    pub(crate) service: Arc<str>,
    port: Arc<ServedPort>,
    /// Where the port is reached, by the position among its frontends.
    index: usize,
    affinity: Option<(Arc<Affinity>, Duration)>,
}

impl Frontend {
    /// Whether any connection is served.
    pub(crate) fn has_endpoints(&self) -> bool {
        let is_any = |is_inside| !self.port.endpoints(self.at().address, is_inside).is_empty();
        is_any(true) || is_any(false)
    }

    fn at(&self) -> &backend::Frontend {
        &self.port.frontends[self.index]
    }

    fn endpoints(&self, client: IpAddr, is_inside: bool) -> &[SocketAddr] {
        if self.at().sources.as_ref().is_some_and(|it| !it.iter().any(|it| it.contains(&client))) {
            return &[];
        }
        self.port.endpoints(self.at().address, is_inside)
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

    pub(crate) fn chosen(&self, client: IpAddr, endpoint: SocketAddr) {
        if let Some((affinity, timeout)) = &self.affinity {
            affinity.chosen(client, endpoint, *timeout);
        }
    }

    /// Whether a flow of a client may continue to this endpoint.
    pub(crate) fn may_continue(&self, client: IpAddr, is_inside: bool, endpoint: SocketAddr) -> bool {
        self.endpoints(client, is_inside).contains(&endpoint) || self.port.other_serving.contains(&endpoint)
    }
}

/// The frontends of a Service; `affinity` returns the clients of a port, which outlive a change of the Service.
pub(crate) fn frontends(
    name: &Arc<str>,
    service: &ServiceEndpoints,
    listen_at: ListenAt,
    mut affinity: impl FnMut(&ServedPort) -> Arc<Affinity>,
) -> Vec<(Address, Arc<Frontend>)> {
    let primary = service.service.ips.as_ref().and_then(primary);
    let mut found = Vec::new();
    // A stream of bytes cannot carry SCTP.
    let ports = backend::ports(service).into_iter().filter(|it| it.protocol != Protocol::Sctp);
    for port in ports.map(Arc::new) {
        let affinity = port.affinity.map(|it| (affinity(&port), it));
        for (index, at) in port.frontends.iter().enumerate() {
            let ip = match (listen_at, at.address) {
                (ListenAt::Services, it) => it.ip().unwrap_or_else(|| unspecified(port.family)),
                (ListenAt::Loopback, FrontendAddress::Cluster(it)) if Some(it) == primary => loopback_of(it),
                (ListenAt::Loopback, FrontendAddress::Node)
                    if primary.is_some_and(|it| backend::Family::of(it) == port.family) =>
                {
                    Ipv4Addr::LOCALHOST.into()
                }
                (ListenAt::Loopback, _) => continue,
            };
            let address = Address { socket: SocketAddr::new(ip, at.port), protocol: port.protocol };
            let frontend = Frontend {
                service: Arc::clone(name),
                port: Arc::clone(&port),
                index,
                affinity: affinity.clone(),
            };
            found.push((address, Arc::new(frontend)));
        }
    }
    found
}

/// The cluster IP that a Service has a loopback address for.
fn primary(ips: &ServiceIPs) -> Option<IpAddr> {
    let all = ips.cluster_ips.as_ref()?;
    let (first, second) = if ips.primary_v6 { (&all.v6, &all.v4) } else { (&all.v4, &all.v6) };
    first.first().or(second.first())?.parse().ok()
}
