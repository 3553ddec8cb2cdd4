//! What the process that runs says: of itself, and how the frontends are called.

use std::{
    collections::HashMap,
    fmt::Write as _,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use admin::{Asked, Status};
use jiff::Timestamp;
use proxy_contract::localv1;
use serde::Deserialize;

use crate::cli::{check::ELSEWHERE, flags};

/// What the process says that runs.
#[derive(Default)]
pub(super) struct Process {
    pub(super) status: Option<Box<Status>>,
    /// Where it answers for its health, if it was not asked where it says more.
    pub(super) elsewhere: Option<SocketAddr>,
    /// Service and port by frontend.
    pub(super) names: HashMap<String, Name>,
}

/// How a frontend is called; empty if that is not known.
#[derive(Clone, Debug, Default)]
pub(super) struct Name {
    pub(super) service: String,
    pub(super) port: String,
}

/// The page `/state`, as far as it is read.
#[derive(Deserialize)]
struct State {
    items: Vec<Item>,
}

#[derive(Deserialize)]
struct Item {
    service: localv1::Service,
}

impl Process {
    /// Asks whoever answers where `reports` are served.
    pub(super) fn ask(reports: &flags::ReportFlags) -> Self {
        let asked = reports.metrics().map(|it| (it, admin::ask(it)));
        let Some((address, Asked::Ours(status))) = asked else {
            let elsewhere = reports.health().filter(|it| admin::is_ready(*it).is_some());
            return Self { elsewhere, ..Self::default() };
        };
        let state = admin::get(address, "/state").ok();
        let state = state.and_then(|it| serde_json::from_str::<State>(&it).ok());
        let names = state.into_iter().flat_map(|it| it.items).flat_map(|it| names(&it.service)).collect();
        Self { status: Some(status), elsewhere: None, names }
    }

    /// What it says of itself, in lines.
    pub(super) fn told(&self) -> String {
        match (&self.status, self.elsewhere) {
            (Some(status), _) => describe(status, Timestamp::now()),
            (None, Some(address)) => {
                format!("process    one of ours answers at http://{address}/readyz; {ELSEWHERE}\n")
            }
            (None, None) => {
                "process    none answers: names and age are not known; the kernel serves what it has\n".into()
            }
        }
    }
}

/// The frontends of a Service.
fn names(service: &localv1::Service) -> Vec<(String, Name)> {
    let Some(state) = wire::service_state(service, []).value else { return Vec::new() };
    let service = &state.service;
    let ips: Vec<IpAddr> = service
        .cluster_ips
        .iter()
        .chain(&service.external_ips)
        .chain(&service.load_balancer_ips)
        .copied()
        .collect();
    // A node port stands under the unspecified address of each family.
    let any: [IpAddr; 2] = [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()];
    let frontends = service.ports.iter().flat_map(|port| {
        let name = Name { service: service.name.to_string(), port: port.name.clone() };
        // Where another Service answers, the name is that one's.
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

/// What a process says of itself at this moment, in lines.
fn describe(status: &Status, now: Timestamp) -> String {
    // Writing to a string cannot fail.
    let mut out = String::new();
    let Status { node, version, services, endpoints, .. } = status;
    let health = if status.problems.is_empty() { "healthy".to_owned() } else { status.problems.join("; ") };
    let runs = age(now, status.started);
    let _ = writeln!(out, "process    node {node}: {health}; version {version}, running for {runs}");
    let _ = match &status.in_force {
        Some(it) => writeln!(
            out,
            "state      revision {} in force for {}: {services} Services, {endpoints} endpoints",
            it.rev,
            age(now, it.since)
        ),
        None => writeln!(out, "state      none of this process is in force yet"),
    };
    if let Some(waiting) = status.waiting_seconds {
        let _ =
            writeln!(out, "waiting    a change, for {waiting:.1} s{}", because(status.failure.as_deref()));
    }
    for it in &status.sources {
        let stands = match (it.synced, &it.error) {
            (true, None) => "read to the end".to_owned(),
            (true, Some(error)) => error.clone(),
            (false, error) => format!("not read to the end yet{}", because(error.as_deref())),
        };
        let _ = writeln!(out, "source     {}: {stands}", it.name);
    }
    out
}

fn because(reason: Option<&str>) -> String {
    reason.map_or_else(String::new, |it| format!(": {it}"))
}

/// The time between two moments, in the two largest units that matter.
fn age(now: Timestamp, since: Timestamp) -> String {
    let seconds = now.as_second().saturating_sub(since.as_second()).max(0);
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        3600..86400 => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
        _ => format!("{} d {} h", seconds / 86400, seconds / 3600 % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_is_named_at_every_address_that_is_its_own() {
        let service: localv1::Service = serde_json::from_str(
            r#"{"namespace":"default","name":"web","type":"NodePort",
                "ips":{"clusterIps":{"v4":["10.96.0.10"],"v6":["fd00::10"]},"externalIps":{"v4":["192.0.2.1"]}},
                "ports":[{"name":"http","protocol":"TCP","port":80,"nodePort":30080,"targetPort":8080,
                          "conflictingAddresses":{"v4":["192.0.2.1"]}}]}"#,
        )
        .unwrap();
        let mut frontends: Vec<_> = names(&service).into_iter().map(|(it, _)| it).collect();
        frontends.sort_unstable();
        assert_eq!(
            frontends,
            ["0.0.0.0:30080/TCP", "10.96.0.10:80/TCP", "[::]:30080/TCP", "[fd00::10]:80/TCP"]
        );
    }

    #[test]
    fn ages_are_told_in_two_units() {
        let now = Timestamp::constant(1_000_000, 0);
        let since = |seconds: i64| age(now, Timestamp::constant(1_000_000 - seconds, 0));
        assert_eq!(since(0), "0 s");
        assert_eq!(since(61), "1 min 1 s");
        assert_eq!(since(7_260), "2 h 1 min");
        assert_eq!(since(100_000), "1 d 3 h");
        assert_eq!(since(-5), "0 s", "a clock that was set back");
    }
}
