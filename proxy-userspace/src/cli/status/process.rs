//! The running process: its status, and the names of the frontends.

use std::{
    collections::{HashMap, HashSet},
    fmt::Write as _,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use admin::{EjectedStatus, Listener, SourceStatus, Status};
use jiff::Timestamp;
use model::{
    RequestedMetadata,
    state::{Service, ServicePort},
};
use proxy_contract::localv1;
use serde::Deserialize;

use crate::cli::{
    flags::{ReportFlags, STATUS_HINT},
    output,
};

/// What the running process reports.
#[derive(Default)]
pub(in crate::cli) struct Process {
    pub(super) status: Option<Box<Status>>,
    /// Address of its health pages, if it does not answer at the socket of the status pages.
    pub(super) health_only: Option<SocketAddr>,
    /// Why that socket cannot be used.
    pub(super) denied: Option<String>,
    /// Service and port by frontend.
    pub(in crate::cli) names: HashMap<String, PortName>,
    /// The frontends at cluster IPs.
    pub(in crate::cli) cluster_ips: HashSet<String>,
}

/// The name of a service port; empty if it is unknown.
#[derive(Clone, Debug, Default)]
pub(in crate::cli) struct PortName {
    pub(in crate::cli) service: String,
    pub(in crate::cli) port: String,
}

/// The page `/state`, as far as it is needed.
#[derive(Deserialize)]
struct State {
    items: Vec<Item>,
}

#[derive(Deserialize)]
struct Item {
    service: localv1::Service,
}

impl Process {
    /// Queries the process that serves its pages at these addresses.
    pub(in crate::cli) fn query(reports: &ReportFlags) -> Self {
        let asked = reports.status().map(|it| (it, admin::query_status(it)));
        let (socket, status) = match asked {
            Some((socket, Ok(Listener::Proxy(status)))) => (socket, status),
            other => {
                let health_only = reports.health().filter(|it| admin::query_readiness(*it).is_some());
                let denied =
                    other.and_then(|(socket, it)| Some(format!("{}: {}", socket.display(), it.err()?)));
                return Self { health_only, denied, ..Self::default() };
            }
        };
        let state = admin::get(socket, "/state").ok();
        let state = state.and_then(|it| serde_json::from_str::<State>(&it).ok());
        let mut process = Self { status: Some(status), ..Self::default() };
        for Item { service } in state.into_iter().flat_map(|it| it.items) {
            let Some(state) = wire::service_state(&service, [], &RequestedMetadata::default()).value else {
                continue;
            };
            process.names.extend(names(&state.service));
            process.cluster_ips.extend(cluster_ips(&state.service));
        }
        process
    }

    /// The status of the process in lines.
    pub(super) fn summary(&self) -> String {
        match (&self.status, &self.denied, self.health_only) {
            (Some(status), ..) => describe(status, Timestamp::now()),
            (None, Some(error), _) => format!("process    {error}: names and age are unknown\n"),
            (None, None, Some(address)) => {
                format!("process    kube-proxy-ebpf answers at http://{address}/readyz; {STATUS_HINT}\n")
            }
            (None, None, None) => {
                "process    none answers: names and age are unknown; the kernel keeps serving the last state\n".into()
            }
        }
    }
}

/// The frontends of a Service at its cluster IPs.
fn cluster_ips(service: &Service) -> impl Iterator<Item = String> {
    let at = |ip: &IpAddr, port: &ServicePort| {
        format!("{}/{}", SocketAddr::new(*ip, port.port.get()), port.protocol)
    };
    service.cluster_ips.iter().flat_map(move |ip| service.ports.iter().map(move |port| at(ip, port)))
}

/// The frontends of a Service, and their names.
fn names(service: &Service) -> Vec<(String, PortName)> {
    let ips: Vec<IpAddr> = service
        .cluster_ips
        .iter()
        .chain(&service.external_ips)
        .chain(&service.load_balancer_ips)
        .copied()
        .collect();
    // A node port is listed with the unspecified address of each family.
    let any: [IpAddr; 2] = [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()];
    let frontends = service.ports.iter().flat_map(|port| {
        let name = PortName { service: service.name.to_string(), port: port.name.clone() };
        // At a conflicting address, another Service is served.
        let own = ips
            .iter()
            .filter(|it| !port.conflicting_addresses.contains(it))
            .map(|ip| SocketAddr::new(*ip, port.port.get()));
        let node_port = port.node_port.into_iter();
        let node_ports = node_port.flat_map(move |it| any.map(|ip| SocketAddr::new(ip, it.get())));
        own.chain(node_ports).map(move |it| (format!("{it}/{}", port.protocol), name.clone()))
    });
    frontends.collect()
}

/// The status of a process in lines.
fn describe(status: &Status, now: Timestamp) -> String {
    // Writing to a string cannot fail.
    let mut out = String::new();
    let Status { node, version, services, endpoints, .. } = status;
    let has_state = status.active.is_some() || status.published.is_some();
    let health = match (status.problems.is_empty(), has_state) {
        (false, _) => status.problems.join("; "),
        (true, true) => "healthy".to_owned(),
        (true, false) => "has received no state since its start".to_owned(),
    };
    let uptime = age(now, status.started);
    let _ = writeln!(out, "process    node {node}: {health}; version {version}, running for {uptime}");
    let _ = match &status.active {
        Some(it) => writeln!(
            out,
            "state      revision {} active for {}: {}, {}",
            it.rev,
            age(now, it.since),
            model::counted(*services, "Service"),
            model::counted(*endpoints, "endpoint")
        ),
        None => {
            let serves = status.inherited.as_ref();
            let serves =
                serves.map_or_else(String::new, |it| format!("; the kernel serves {it} of the last state"));
            writeln!(out, "state      no revision of this process is active yet{serves}")
        }
    };
    if let Some(pending) = status.pending_seconds {
        let _ = writeln!(
            out,
            "pending    a change, for {pending:.1} s{}",
            reason_suffix(status.failure.as_deref())
        );
    }
    for it in &status.sources {
        let state = match (it.synced, &it.error) {
            (true, None) => "synced".to_owned(),
            (true, Some(error)) => error.clone(),
            (false, error) => format!("not synced yet{}", reason_suffix(error.as_deref())),
        };
        let _ = writeln!(out, "source     {}: {state}{}", it.name, origin(it, now));
    }
    if let Some(it) = &status.trace {
        let _ = writeln!(out, "trace      runs {it}");
    }
    for EjectedStatus { service, port, endpoint, clients, node } in &status.ejected {
        let port = if port.is_empty() { String::new() } else { format!(" port {port}") };
        let clients = model::counted(*clients, "client");
        let node = if *node { ", the node among them" } else { "" };
        let _ = writeln!(
            out,
            "ejected    {endpoint} of {service}{port} for {clients}{node}: connections to it fail"
        );
    }
    out
}

/// Where a source is, and when it was heard from.
pub(in crate::cli) fn origin(source: &SourceStatus, now: Timestamp) -> String {
    let address = source.address.clone();
    let contact = source.last_contact.map(|it| format!("last contact {} ago", age(now, it)));
    let parts: Vec<_> = address.into_iter().chain(contact).collect();
    if parts.is_empty() { String::new() } else { format!(" ({})", parts.join(", ")) }
}

fn reason_suffix(reason: Option<&str>) -> String {
    reason.map_or_else(String::new, |it| format!(": {it}"))
}

/// The time since a moment.
fn age(now: Timestamp, since: Timestamp) -> String {
    output::duration(now.as_second().saturating_sub(since.as_second()).max(0).unsigned_abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_is_named_at_each_of_its_own_addresses() {
        let service: localv1::Service = serde_json::from_str(
            r#"{"namespace":"default","name":"web","type":"NodePort",
                "ips":{"clusterIps":{"v4":["10.96.0.10"],"v6":["fd00::10"]},"externalIps":{"v4":["192.0.2.1"]}},
                "ports":[{"name":"http","protocol":"TCP","port":80,"nodePort":30080,"targetPort":8080,
                          "conflictingAddresses":{"v4":["192.0.2.1"]}}]}"#,
        )
        .unwrap();
        let service = wire::service_state(&service, [], &RequestedMetadata::default()).value.unwrap().service;
        let mut frontends: Vec<_> = names(&service).into_iter().map(|(it, _)| it).collect();
        frontends.sort_unstable();
        assert_eq!(
            frontends,
            ["0.0.0.0:30080/TCP", "10.96.0.10:80/TCP", "[::]:30080/TCP", "[fd00::10]:80/TCP"]
        );
        let cluster_ips: Vec<_> = cluster_ips(&service).collect();
        assert_eq!(cluster_ips, ["10.96.0.10:80/TCP", "[fd00::10]:80/TCP"]);
    }

    #[test]
    fn ages_have_two_units() {
        let now = Timestamp::constant(1_000_000, 0);
        let since = |seconds: i64| age(now, Timestamp::constant(1_000_000 - seconds, 0));
        assert_eq!(since(0), "0 s");
        assert_eq!(since(61), "1 min 1 s");
        assert_eq!(since(7_260), "2 h 1 min");
        assert_eq!(since(100_000), "1 d 3 h");
        assert_eq!(since(-5), "0 s", "a clock that was set back");
    }
}
