//! `check`: whether this node can run the proxy, and whether it works.

mod node;

use std::{
    collections::BTreeSet,
    env,
    fmt::Write as _,
    fs,
    io::{self, IsTerminal as _, Write as _},
    net::{SocketAddr, TcpListener},
    path::Path,
};

use admin::{EjectedStatus, Listener, PageGroup, Status};
use anyhow::Result;
use clap::Args;
use datapath::{Checkup, Finding, Level};
use jiff::Timestamp;
use model::{escaped, state::ExternalForwarding};
use reconciler::Options;
use serde_json::json;

use super::{
    config,
    flags::{DatapathFlags, ForwardingFlag, PacketFlags, PodFlags, ReportFlags, STATUS_HINT},
    output::Output,
    status::origin,
};

/// Check whether this node can run the proxy, and whether it works
///
/// Checks the kernel, the pinned maps, the attached programs, the nftables tables, other service proxies on this node and
/// the ports, and queries the running process. Each line says ok, degraded or broken, the finding and the remedy. Changes
/// nothing. MEMORY_LIMIT, in bytes, is compared with what is served. The exit code is 1 if something is broken.
#[derive(Debug, Args)]
pub(super) struct Flags {
    #[command(flatten)]
    _config: config::ConfigFlag,
    /// Output format
    #[arg(long, short, default_value = "text")]
    output: Output,
    // Before those with a heading.
    #[command(flatten)]
    forwarding: ForwardingFlag,
    #[command(flatten)]
    datapath: DatapathFlags,
    #[command(flatten)]
    pods: PodFlags,
    #[command(flatten)]
    packets: PacketFlags,
    #[command(flatten)]
    reports: ReportFlags,
}

/// Prints the findings; returns whether nothing is broken.
pub(super) fn main(flags: Flags) -> Result<bool> {
    // The name of the node does not matter for checking.
    let sockets = flags.datapath.options("", Some(&flags.pods))?;
    let options = flags.packets.options(sockets)?;
    let groups = examine(&options, &flags.reports, flags.forwarding.external_forwarding);
    let [ok, degraded, broken] = counts(&groups);
    let mut stdout = io::stdout().lock();
    match flags.output {
        Output::Text => {
            stdout.write_all(text(&groups, io::stdout().is_terminal()).as_bytes())?;
        }
        Output::Json => {
            let findings = groups.iter().flat_map(|(group, findings)| {
                findings.iter().map(move |it| {
                    json!({
                        "group": group,
                        "subject": it.subject,
                        "level": it.level.name(),
                        "message": it.says,
                        "remedy": it.remedy,
                    })
                })
            });
            let findings: Vec<_> = findings.collect();
            let all = json!({ "ok": ok, "degraded": degraded, "broken": broken, "findings": findings });
            writeln!(stdout, "{}", escaped(&all.to_string()))?;
        }
    }
    stdout.flush()?;
    Ok(broken == 0)
}

/// What `check` prints.
pub(super) fn report(options: &Options, reports: &ReportFlags) -> String {
    // Of a Service that is forwarded the kernel knows.
    text(&examine(options, reports, ExternalForwarding::default()), false)
}

/// The environment variable with the memory limit of the container in bytes, which the manifests set.
const MEMORY_LIMIT: &str = "MEMORY_LIMIT";

type Groups = [(&'static str, Vec<Finding>); 4];

fn examine(options: &Options, reports: &ReportFlags, forwarding: ExternalForwarding) -> Groups {
    let Checkup { host, installation, conflicts, is_left_to_kube_proxy } = node::check(options, forwarding);
    [
        ("Host", host),
        ("Installation", installation),
        ("Conflicts", conflicts),
        ("Process", process(reports, is_left_to_kube_proxy)),
    ]
}

/// How many findings are ok, degraded and broken.
fn counts(groups: &Groups) -> [usize; 3] {
    [Level::Ok, Level::Degraded, Level::Broken]
        .map(|level| groups.iter().flat_map(|(_, it)| it).filter(|it| it.level == level).count())
}

/// Findings about the running process, and about the ports of one that is not running.
fn process(reports: &ReportFlags, is_left_to_kube_proxy: bool) -> Vec<Finding> {
    let mut findings = Vec::new();
    if let Some(socket) = reports.status.path() {
        let at = socket.display();
        match admin::query_status(socket) {
            // It owns the ports, or its log says that it does not.
            Ok(Listener::Proxy(status)) => return running(&status, socket),
            Ok(Listener::Foreign) => findings.push(Finding::degraded(
                "status socket",
                format!("{at}: what answers there is not this program"),
                "stop that process, or choose another --status-socket",
            )),
            Ok(Listener::None) => {}
            Err(error) => {
                let says = format!("{at}: {error}");
                findings.push(Finding::degraded("status socket", says, "run this command as root"));
            }
        }
    }
    if let Some(address) = reports.metrics_bind_address.0 {
        findings.push(port("metrics port", PageGroup::Metrics, address, is_left_to_kube_proxy));
    }
    if let Some(address) = reports.healthz_bind_address.0 {
        let page = format!("http://{address}/readyz");
        findings.push(match admin::query_readiness(address) {
            // Its status pages are at an unknown socket.
            Some(Ok(())) => {
                Finding::ok("health", format!("kube-proxy-ebpf answers at {page}; {STATUS_HINT}"))
            }
            Some(Err(missing)) => Finding::degraded("health", format!("{missing} ({page})"), STATUS_HINT),
            None => port("health port", PageGroup::Health, address, is_left_to_kube_proxy),
        });
    }
    findings
}

fn port(
    subject: &'static str,
    pages: PageGroup,
    address: SocketAddr,
    is_left_to_kube_proxy: bool,
) -> Finding {
    match TcpListener::bind(address) {
        Ok(_) => Finding::ok(subject, format!("{address} is free")),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse && is_left_to_kube_proxy => {
            Finding::ok(subject, format!("{address} is in use, as kube-proxy uses it"))
        }
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            let says = format!("{address} is in use: Services are served, but this page is not");
            let flag = pages.flag();
            let remedy = format!(
                "stop the process that listens there (`ss -ltnp` names it), or choose another {flag}"
            );
            Finding::degraded(subject, says, remedy)
        }
        Err(error) => {
            let says = format!("cannot listen on {address}: {error}");
            Finding::degraded(subject, says, format!("choose another {}", pages.flag()))
        }
    }
}

/// What both paths take at most, at a start and with the memory of the kernel, in bytes: measured from 10,000 Services of 10
/// endpoints to a million endpoints (`cargo xtask bench scale`).
fn needed_memory(services: usize, endpoints: usize) -> u64 {
    (70 << 20) + services as u64 * 6_800 + endpoints as u64 * 620
}

fn memory_limit() -> Option<u64> {
    let limit = env::var(MEMORY_LIMIT).or_else(|_| fs::read_to_string("/sys/fs/cgroup/memory.max"));
    limit.ok()?.trim().parse().ok()
}

/// Whether a limit is enough for what is served.
fn memory(services: usize, endpoints: usize, limit: Option<u64>) -> Option<Finding> {
    const MB: u64 = 1 << 20;
    let (limit, needed) = (limit?, needed_memory(services, endpoints));
    let says = format!(
        "a limit of {} MiB, and {} with {} take up to {} MiB, the kernel's included",
        limit / MB,
        model::counted(services, "Service"),
        model::counted(endpoints, "endpoint"),
        needed / MB
    );
    // A quarter is left to growth.
    let enough = needed + needed / 4;
    Some(match limit >= enough {
        true => Finding::ok("memory", says),
        false => Finding::degraded(
            "memory",
            says,
            format!(
                "raise resources.limits.memory to {} MiB, or a start may be killed",
                enough.div_ceil(64 * MB) * 64
            ),
        ),
    })
}

/// Findings from the status of a running process.
fn running(status: &Status, socket: &Path) -> Vec<Finding> {
    let Status { node, version, services, endpoints, .. } = status;
    let mut findings = Vec::new();
    if status.problems.is_empty() && status.active.is_none() && status.published.is_none() {
        let says = match &status.inherited {
            Some(it) => format!("the kernel serves {it} of the last state"),
            None => "nothing is known to be served".to_owned(),
        };
        findings.push(Finding::degraded(
            "health",
            format!("version {version} has received no state for node {node} since its start; {says}"),
            "the findings about its source say what it waits for",
        ));
    } else if status.problems.is_empty() {
        let says = format!(
            "version {version} serves {} with {} for node {node} (status: {})",
            model::counted(*services, "Service"),
            model::counted(*endpoints, "endpoint"),
            socket.display()
        );
        findings.push(Finding::ok("health", says));
    } else {
        let remedy = "its log has the details; a restart does not interrupt connections";
        findings.push(Finding::broken("health", status.problems.join("; "), remedy));
    }
    findings.extend(memory(*services, *endpoints, memory_limit()));
    for it in &status.sources {
        let (error, origin) = (it.error.as_deref(), origin(it, Timestamp::now()));
        findings.push(match (it.synced, error) {
            (true, None) => Finding::ok("source", format!("{}: synced{origin}", it.name)),
            (true, Some(error)) => Finding::degraded(
                "source",
                format!("{}: {error}{origin}", it.name),
                "correct it; the last valid state stays active",
            ),
            (false, error) => {
                let error = error.unwrap_or("no response yet");
                let says = format!("{}: not synced yet: {error}{origin}", it.name);
                Finding::degraded(
                    "source",
                    says,
                    "make sure that it is reachable; until then the last state in the kernel stays active",
                )
            }
        });
    }
    if !status.rejected.is_empty() {
        let first = status.rejected.iter().take(3).map(|it| format!("{}: {}", it.item, it.reason));
        let says = format!("{} rejected: {}", status.rejected.len(), first.collect::<Vec<_>>().join("; "));
        findings.push(Finding::degraded("items", says, "correct the objects; `status` lists all of them"));
    }
    findings.extend(ejected(&status.ejected));
    if let Some(it) = &status.trace {
        let says = format!("one runs {it}; it ends with its reader, and `trace --replace` takes its place");
        findings.push(Finding::ok("trace", says));
    }
    if !status.node_eligible {
        let says = "its Node object is missing, or about to be deleted; the health page answers 503, so that load balancers do not use it";
        findings.push(Finding::ok("node", says));
    }
    findings
}

/// How many Services with ejected endpoints are named.
const MAX_NAMED: usize = 3;

fn ejected(endpoints: &[EjectedStatus]) -> Option<Finding> {
    let services: BTreeSet<_> = endpoints.iter().map(|it| it.service.as_str()).collect();
    let addresses: BTreeSet<_> = endpoints.iter().map(|it| it.endpoint.as_str()).collect();
    let mut named = services.iter().take(MAX_NAMED).copied().collect::<Vec<_>>().join(", ");
    if let Some(more @ 1..) = services.len().checked_sub(MAX_NAMED) {
        named += &format!(" and {}", model::counted(more, "more Service"));
    }
    let says = format!(
        "connections from this node to {} of {named} fail: they are ejected, new ones avoid them for a time",
        model::counted(addresses.len(), "endpoint")
    );
    let remedy =
        "find out why they do not answer; `status` lists them, and each returns once a connection succeeds";
    (!endpoints.is_empty()).then(|| Finding::degraded("endpoints", says, remedy))
}

const MAX_WIDTH: usize = 110;

fn text(groups: &Groups, colors: bool) -> String {
    let [ok, degraded, broken] = counts(groups);
    let mut out = String::new();
    let width = groups.iter().flat_map(|(_, it)| it).map(|it| it.subject.len()).max().unwrap_or_default();
    let indent = 2 + 8 + 2 + width + 2;
    // Writing to a String cannot fail.
    for (group, findings) in groups.iter().filter(|(_, it)| !it.is_empty()) {
        let _ = writeln!(out, "{group}");
        for Finding { subject, level, says, remedy } in findings {
            let color = match level {
                Level::Ok => "32",
                Level::Degraded => "33",
                Level::Broken => "31;1",
            };
            let name = format!("{:<8}", level.name());
            let name = if colors { format!("\x1b[{color}m{name}\x1b[0m") } else { name };
            let _ = writeln!(out, "  {name}  {subject:<width$}  {}", wrapped(&escaped(says), indent));
            if let Some(remedy) = remedy {
                let _ = writeln!(out, "{:indent$}→ {}", "", wrapped(&escaped(remedy), indent + 2));
            }
        }
        out.push('\n');
    }
    let _ = writeln!(out, "{broken} broken, {degraded} degraded, {ok} ok");
    out
}

/// Wraps a text; all lines but the first are indented.
fn wrapped(text: &str, indent: usize) -> String {
    let mut out = String::new();
    let mut column = indent;
    for word in text.split_whitespace() {
        let length = word.chars().count();
        if column > indent {
            if column + 1 + length > MAX_WIDTH {
                let _ = write!(out, "\n{:indent$}", "");
                column = indent;
            } else {
                out.push(' ');
                column += 1;
            }
        }
        out.push_str(word);
        column += length;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_memory_limit_is_compared_with_what_is_served() {
        const SHIPPED: u64 = 512 << 20;
        let level = |services, endpoints, limit| memory(services, endpoints, limit).map(|it| it.level);
        assert_eq!(level(10_000, 100_000, Some(SHIPPED)), Some(Level::Ok));
        assert_eq!(level(10_000, 100_000, None), None);
        assert_eq!(level(0, 0, Some(64 << 20)), Some(Level::Degraded));
        let finding = memory(10_000, 1_000_000, Some(SHIPPED)).unwrap();
        assert_eq!(finding.level, Level::Degraded);
        assert_eq!(
            finding.says,
            "a limit of 512 MiB, and 10000 Services with 1000000 endpoints take up to 726 MiB, the kernel's included"
        );
        assert_eq!(
            finding.remedy.as_deref(),
            Some("raise resources.limits.memory to 960 MiB, or a start may be killed")
        );
    }
}
