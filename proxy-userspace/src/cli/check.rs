//! `check`: can this node run it, and is it running right?

use std::{
    fmt::Write as _,
    io::{self, IsTerminal as _, Write as _},
    net::{SocketAddr, TcpListener},
};

use admin::{Asked, Status};
use anyhow::Result;
use clap::{Args, ValueEnum};
use datapath::{Checkup, Finding, Level};
use serde_json::json;

use super::{config, flags};

/// Say whether this node can run the proxy, and whether it runs right
///
/// Looks at the kernel, at what is pinned, in nftables and in effect, at who else leads Services here, and at the ports; asks the
/// process that runs, if one does. Each line says ok, degraded or broken, what that means, and what to do about it.
/// Nothing is changed. The exit code is 1 if something is broken.
#[derive(Debug, Args)]
pub(super) struct Flags {
    #[command(flatten)]
    _config: config::ConfigFlag,
    #[command(flatten)]
    datapath: flags::DatapathFlags,
    #[command(flatten)]
    packets: flags::PacketFlags,
    #[command(flatten)]
    reports: flags::ReportFlags,
    /// How to print it
    #[arg(long, short, value_enum, default_value = "text", env = "KUBE_PROXY_EBPF_OUTPUT")]
    output: Output,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Output {
    /// Lines for people
    #[value(alias = "table")]
    Text,
    /// One JSON object
    Json,
}

/// What to do where one of ours runs, and is not asked where its metrics are.
pub(super) const ELSEWHERE: &str = "it says more where its metrics are: give the --config or \
                                    --metrics-bind-address that it was started with";

/// Looks, tells, and says whether nothing is broken.
pub(super) fn main(flags: Flags) -> Result<bool> {
    // What is looked at does not depend on the name of the node.
    let options = flags.packets.options(flags.datapath.options("")?)?;
    let Checkup { host, installation, conflicts } = reconciler::check(&options);
    let groups = [
        ("Host", host),
        ("Installation", installation),
        ("Conflicts", conflicts),
        ("Process", process(&flags.reports)),
    ];
    let count = |level| groups.iter().flat_map(|(_, it)| it).filter(|it| it.level == level).count();
    let counts = [Level::Ok, Level::Degraded, Level::Broken].map(count);
    let mut stdout = io::stdout().lock();
    match flags.output {
        Output::Text => {
            stdout.write_all(text(&groups, counts, io::stdout().is_terminal()).as_bytes())?;
        }
        Output::Json => {
            let findings = groups.iter().flat_map(|(group, findings)| {
                findings.iter().map(move |it| {
                    json!({
                        "group": group,
                        "subject": it.subject,
                        "level": it.level.name(),
                        "says": it.says,
                        "remedy": it.remedy,
                    })
                })
            });
            let [ok, degraded, broken] = counts;
            let findings: Vec<_> = findings.collect();
            let all = json!({ "ok": ok, "degraded": degraded, "broken": broken, "findings": findings });
            writeln!(stdout, "{all}")?;
        }
    }
    stdout.flush()?;
    let [_, _, broken] = counts;
    Ok(broken == 0)
}

/// Whether the process tells how it is, and how it is.
fn process(reports: &flags::ReportFlags) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut ours = false;
    if let Some(address) = reports.metrics() {
        match admin::ask(address) {
            Asked::Ours(status) => {
                ours = true;
                findings.extend(running(&status, address));
            }
            Asked::Other => findings.push(in_use("metrics port", address, "metrics-bind-address")),
            Asked::Nobody => findings.push(port("metrics port", address, "metrics-bind-address")),
        }
    }
    if let Some(address) = reports.health()
        // If one of ours runs, the port is its own: it says in its log if it is not.
        && !ours
    {
        findings.push(match admin::is_ready(address) {
            Some(ready) => elsewhere(ready, address),
            None => port("health port", address, "healthz-bind-address"),
        });
    }
    findings
}

/// One of ours answers for its health, and tells the rest where it was not asked.
fn elsewhere(ready: Result<(), String>, address: SocketAddr) -> Finding {
    match ready {
        Ok(()) => {
            Finding::ok("health", format!("one of ours answers at http://{address}/readyz; {ELSEWHERE}"))
        }
        Err(missing) => {
            Finding::degraded("health", format!("{missing} (http://{address}/readyz)"), ELSEWHERE)
        }
    }
}

fn port(subject: &'static str, address: SocketAddr, flag: &str) -> Finding {
    match TcpListener::bind(address) {
        Ok(_) => Finding::ok(subject, format!("{address} is free")),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => in_use(subject, address, flag),
        Err(error) => {
            let says = format!("{address} cannot be listened at: {error}");
            Finding::degraded(subject, says, format!("choose another --{flag}"))
        }
    }
}

fn in_use(subject: &'static str, address: SocketAddr, flag: &str) -> Finding {
    Finding::degraded(
        subject,
        format!("{address} is in use: `run` serves Services all the same, and cannot be asked there"),
        format!(
            "end whoever listens there (`ss -ltnp` shows who; kube-proxy perhaps), or choose another --{flag}"
        ),
    )
}

/// What a running process says of itself.
fn running(status: &Status, address: SocketAddr) -> Vec<Finding> {
    let Status { node, version, services, endpoints, .. } = status;
    let mut findings = Vec::new();
    if status.problems.is_empty() {
        let says = format!(
            "version {version} serves {services} Services with {endpoints} endpoints for node {node} (http://{address}/status)"
        );
        findings.push(Finding::ok("health", says));
    } else {
        let remedy = "its log says more; a restart interrupts nothing";
        findings.push(Finding::broken("health", status.problems.join("; "), remedy));
    }
    for it in &status.sources {
        let error = it.error.as_deref();
        findings.push(match (it.synced, error) {
            (true, None) => Finding::ok("source", format!("{}: read to the end", it.name)),
            (true, Some(error)) => Finding::degraded(
                "source",
                format!("{}: {error}", it.name),
                "mend it; what was good before is still served",
            ),
            (false, error) => {
                let says =
                    format!("{}: not read to the end yet: {}", it.name, error.unwrap_or("nothing came yet"));
                Finding::degraded(
                    "source",
                    says,
                    "see that it can be reached; until then the kernel keeps what it has",
                )
            }
        });
    }
    if !status.rejected.is_empty() {
        let first = status.rejected.iter().take(3).map(|it| format!("{}: {}", it.item, it.reason));
        let says = format!("{} refused: {}", status.rejected.len(), first.collect::<Vec<_>>().join("; "));
        findings.push(Finding::degraded(
            "items",
            says,
            format!("mend the objects; http://{address}/status lists all"),
        ));
    }
    if !status.node_eligible {
        let says = "this node is about to go, and load balancers are told so";
        findings.push(Finding::ok("node", says));
    }
    findings
}

/// How wide a line may be.
const WIDTH: usize = 110;

fn text(groups: &[(&str, Vec<Finding>)], [ok, degraded, broken]: [usize; 3], colours: bool) -> String {
    let mut out = String::new();
    let width = groups.iter().flat_map(|(_, it)| it).map(|it| it.subject.len()).max().unwrap_or_default();
    let indent = 2 + 8 + 2 + width + 2;
    // Writing to a string cannot fail.
    for (group, findings) in groups.iter().filter(|(_, it)| !it.is_empty()) {
        let _ = writeln!(out, "{group}");
        for Finding { subject, level, says, remedy } in findings {
            let colour = match level {
                Level::Ok => "32",
                Level::Degraded => "33",
                Level::Broken => "31;1",
            };
            let name = format!("{:<8}", level.name());
            let name = if colours { format!("\x1b[{colour}m{name}\x1b[0m") } else { name };
            let _ = writeln!(out, "  {name}  {subject:<width$}  {}", wrapped(says, indent));
            if let Some(remedy) = remedy {
                let _ = writeln!(out, "{:indent$}→ {}", "", wrapped(remedy, indent + 2));
            }
        }
        out.push('\n');
    }
    let _ = writeln!(out, "{broken} broken, {degraded} degraded, {ok} ok");
    out
}

/// Breaks a text between words, all lines but the first indented.
fn wrapped(text: &str, indent: usize) -> String {
    let mut out = String::new();
    let mut column = indent;
    for word in text.split_whitespace() {
        let length = word.chars().count();
        if column > indent {
            if column + 1 + length > WIDTH {
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
