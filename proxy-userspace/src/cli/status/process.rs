//! The running process: its status, and the names of the frontends.

use std::{fmt::Write as _, net::SocketAddr};

use admin::{EjectedStatus, Listener, SourceStatus, Status};
use jiff::Timestamp;

use super::names::Names;
use crate::cli::{
    flags::{ReportFlags, STATUS_HINT},
    output,
};

#[derive(Default)]
pub(in crate::cli) struct Process {
    pub(in crate::cli) status: Option<Box<Status>>,
    /// Address of its health pages, if it does not answer at the socket of the status pages.
    pub(super) health_only: Option<SocketAddr>,
    /// Why that socket cannot be used.
    pub(super) denied: Option<String>,
    pub(in crate::cli) names: Names,
}

impl Process {
    /// Queries the process that serves its pages at these addresses.
    pub(in crate::cli) fn query(reports: &ReportFlags) -> Self {
        let asked = reports.status.path().map(|it| (it, admin::query_status(it)));
        let (socket, status) = match asked {
            Some((socket, Ok(Listener::Proxy(status)))) => (socket, status),
            other => {
                let health_only =
                    reports.healthz_bind_address.0.filter(|it| admin::query_readiness(*it).is_some());
                let denied =
                    other.and_then(|(socket, it)| Some(format!("{}: {}", socket.display(), it.err()?)));
                return Self { health_only, denied, ..Self::default() };
            }
        };
        let names = admin::get(socket, "/state").ok().and_then(|it| Names::read(it).ok());
        Self { status: Some(status), names: names.unwrap_or_default(), ..Self::default() }
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

fn age(now: Timestamp, since: Timestamp) -> String {
    output::duration(now.as_second().saturating_sub(since.as_second()).max(0).unsigned_abs())
}

#[cfg(test)]
mod tests {
    use super::*;

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
