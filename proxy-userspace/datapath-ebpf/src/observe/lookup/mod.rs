//! What the kernel has for one destination: the active frontend, and what it has stored for one client.
//!
//! May know: the maps, but not what they should have, which the brain explains.

pub(crate) mod forwarding;

use std::{
    io,
    net::{IpAddr, SocketAddr},
    path::Path,
    time::Duration,
};

use datapath::{ActiveFrontend, FrontendAddress};
use netlink::{host_addresses, netns};
use proxy_common::{
    affinity::{AffinityClient, AffinityEntry, AffinityKey},
    health::{FailureKey, FailureRecord, client, key_parts},
    tables::NodeAddrScope,
};

use crate::{
    error::Error,
    host::{clock, raw_bpf},
    maps::{pins::Pins, record_map::RecordMap},
    observe::active_frontends::{ActiveFrontends, Entry},
    tables::allowed_backends::as_node_port,
};

/// What the kernel has for a destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lookup {
    /// The number of the active generation.
    pub generation: u32,
    /// The frontend; none if connections are not redirected.
    pub frontend: Option<ActiveFrontend>,
    /// Whether the port is a node port, which this node may serve at other addresses only.
    pub has_node_port: bool,
    /// The backends that are ejected, in ascending order.
    pub ejected: Vec<EjectedBackend>,
    /// The backend that the client keeps by session affinity, and for how long if it does not connect again.
    pub affinity: Option<(SocketAddr, Duration)>,
}

/// A backend that is ejected for some clients.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct EjectedBackend {
    pub backend: SocketAddr,
    /// For how many of the clients that were asked about.
    pub clients: usize,
    /// For how long, at most.
    pub remaining: Duration,
    /// How many connections to it were not answered in time since its last success, over all of these clients.
    pub timeouts: u32,
    /// How many were refused since then.
    pub refusals: u32,
    /// How often it was ejected since then, at most for one of them.
    pub ejections: u16,
}

/// Reads what a connection to a destination meets in the active generation. `netns` is the cookie of the client's network
/// namespace; if it is unknown, ejections are those of all clients.
///
/// # Errors
///
/// As for [`dump`](crate::observe::dump); if what is stored for clients cannot be read.
pub fn lookup(pin_dir: &Path, destination: &FrontendAddress, netns: Option<u64>) -> Result<Lookup, Error> {
    let node_port = FrontendAddress { address: as_node_port(destination.address), ..*destination };
    let (generation, (has_node_port, frontend)) = ActiveFrontends::open(pin_dir)?.read(|maps| {
        let node_port = maps.entry(&node_port)?;
        let has_node_port = node_port.is_some();
        // As `proxy_common::decide` finds it: that of the address, or else that of the node port.
        let frontend = match (maps.entry(destination)?, maps.node_address(destination.address.ip())?) {
            (Some(own), _) => Some(own),
            (None, None) => None,
            (None, Some(scope)) => node_port
                .filter(|it| scope != NodeAddrScope::REMOTE || !it.row.options.local_addresses_only()),
        };
        Ok((has_node_port, frontend))
    })?;
    let Some(frontend) = frontend else {
        return Ok(Lookup { generation, frontend: None, has_node_port, ejected: Vec::new(), affinity: None });
    };
    let (pins, now) = (Pins::new(pin_dir), clock::now()?);
    let affinity = netns.map(|it| affinity(&pins, &frontend, it, now)).transpose()?.flatten();
    Ok(Lookup {
        generation,
        ejected: ejected(&pins, &frontend, netns, now)?,
        // Only a member of the set is kept.
        affinity: affinity.filter(|(backend, _)| frontend.backends.iter().any(|(it, _)| it == backend)),
        frontend: Some(frontend.into()),
        has_node_port,
    })
}

/// The backends of a frontend that are ejected now.
fn ejected(
    pins: &Pins,
    frontend: &Entry,
    netns: Option<u64>,
    now: Duration,
) -> Result<Vec<EjectedBackend>, Error> {
    let records = RecordMap::<FailureKey, FailureRecord>::open(&pins.health().join("failures"))?.read()?;
    let ejected = frontend.backends.iter().filter_map(|&(backend, counter)| {
        let own = records.iter().filter(|(key, _)| {
            let (of, record) = key_parts(*key);
            record == counter && netns.is_none_or(|it| of == client(it))
        });
        let own: Vec<_> = own.map(|(_, it)| it).filter(|it| Duration::from_nanos(it.until) > now).collect();
        let longest = own.iter().map(|it| it.until).max()?;
        Some(EjectedBackend {
            backend,
            clients: own.len(),
            remaining: Duration::from_nanos(longest).saturating_sub(now),
            timeouts: own.iter().map(|it| u32::from(it.timeouts)).sum(),
            refusals: own.iter().map(|it| u32::from(it.refusals)).sum(),
            ejections: own.iter().map(|it| it.ejections).max()?,
        })
    });
    let mut ejected: Vec<_> = ejected.collect();
    ejected.sort_unstable();
    Ok(ejected)
}

/// The backend that a client was given last, unless that has expired.
fn affinity(
    pins: &Pins,
    Entry { address, row, .. }: &Entry,
    netns: u64,
    now: Duration,
) -> Result<Option<(SocketAddr, Duration)>, Error> {
    if row.affinity_timeout == 0 {
        return Ok(None);
    }
    let version = if address.address.is_ipv4() { 4 } else { 6 };
    let own = AffinityKey::new(AffinityClient::Namespace(netns), row.service_port, version);
    let entries = RecordMap::<AffinityKey, AffinityEntry>::open(&pins.affinity().join("affinity"))?;
    Ok(entries.get(&own)?.and_then(|it| {
        let end = Duration::from_nanos(it.used) + Duration::from_secs(row.affinity_timeout.into());
        let remaining = end.checked_sub(now).filter(|it| !it.is_zero())?;
        Some((it.backend.into(), remaining))
    }))
}

/// The cookie of a client's network namespace: that of a pod's address, or this one. `None` if no namespace that may be
/// entered has the address.
///
/// # Errors
///
/// If the kernel has no cookies of namespaces (before Linux 5.14), or namespaces cannot be listed.
pub fn client_namespace(pod: Option<&[IpAddr]>) -> io::Result<Option<u64>> {
    let Some(addresses) = pod else { return raw_bpf::netns_cookie().map(Some) };
    let mut found = None;
    netns::for_each_other(|| {
        let is_pod = || host_addresses::read().is_ok_and(|own| addresses.iter().any(|it| own.contains(it)));
        if found.is_none() && is_pod() {
            found = Some(raw_bpf::netns_cookie());
        }
    })?;
    found.transpose()
}
