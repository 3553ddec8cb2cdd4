//! `status`: what is programmed right now, Service by Service.
//!
//! The one rule: what is shown as programmed was read from the kernel. The process that runs only adds the names.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    fmt::Write as _,
    io::{self, IsTerminal as _, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    thread,
    time::Duration,
};

use admin::{Asked, Status};
use anyhow::Result;
use backend::{
    ebpf::{self, Counts, Hooks, Led, Options, PortCounts, PortId, check},
    nft,
};
use clap::{Args, ValueEnum};
use comfy_table::{Table, presets};
use jiff::Timestamp;
use proto::localv1;
use serde::Deserialize;
use serde_json::json;

use super::{check::ELSEWHERE, config, flags};

/// How often `--watch` looks again.
const AGAIN: Duration = Duration::from_secs(2);
const HEADER: [&str; 7] = ["SERVICE", "PORT", "ADDRESS", "ENDPOINTS", "CONNECTIONS", "REFUSED", ""];
/// How many endpoints a row names.
const MOST_NAMED: usize = 3;

/// Show what is programmed right now, Service by Service
///
/// What is programmed is read from the kernel; the process that runs is asked for the names, the age of the state, and
/// what it refuses. Where none runs, the kernel's part is shown alone. What cannot be read is named, beside what can, and
/// the exit code is 1.
#[derive(Debug, Args)]
pub(super) struct Flags {
    #[command(flatten)]
    _config: config::Given,
    #[command(flatten)]
    data_plane: flags::DataPlane,
    #[command(flatten)]
    reports: flags::Reports,
    /// Show it again every two seconds
    #[arg(long)]
    watch: bool,
    /// How to print it
    #[arg(long, short, value_enum, default_value = "table", env = "KUBE_PROXY_EBPF_OUTPUT")]
    output: Output,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Output {
    /// A table for people
    Table,
    /// One JSON object
    Json,
}

/// Looks, tells, and says whether all could be read.
pub(super) fn main(flags: Flags) -> Result<bool> {
    // What is looked at does not depend on the name of the node.
    let options = flags.data_plane.options("")?;
    loop {
        // What the process says comes first: what is in the kernel is then as new, or newer.
        let process = Process::ask(&flags.reports);
        let seen = Seen::look(&options, process)?;
        let text = match flags.output {
            Output::Table => seen.table(),
            Output::Json => format!("{}\n", seen.json()),
        };
        let mut stdout = io::stdout().lock();
        if flags.watch && io::stdout().is_terminal() {
            // To the top, and away with what was there.
            stdout.write_all(b"\x1b[H\x1b[2J")?;
        }
        stdout.write_all(text.as_bytes())?;
        stdout.flush()?;
        if !flags.watch {
            return Ok(seen.errors().is_empty());
        }
        thread::sleep(AGAIN);
    }
}

/// What was seen at one time. What could not be read is a text that says why.
struct Seen {
    led: Vec<Led>,
    /// How many generations the programs have led by; none where there are no maps of theirs.
    generation: Result<Option<u32>, String>,
    counts: Result<Counts, String>,
    hooks: Result<Hooks, String>,
    packets: Result<String, String>,
    process: Process,
}

impl Seen {
    /// Looks at sockets and at packets; the latter lead where nobody leads sockets.
    ///
    /// # Errors
    ///
    /// If it is known that nothing is in force.
    fn look(options: &Options, process: Process) -> Result<Self> {
        let pins = &options.pin_dir;
        let led = ebpf::led(pins).and_then(|led| Ok((led, ebpf::generation(pins)?)));
        let (led, generation) = match led {
            Ok((led, generation)) => (led, Ok(Some(generation))),
            Err(error) => {
                // If these cannot be read, that is what is said of packets.
                let packets = nft::led();
                match error {
                    ebpf::Error::Nothing(_) if packets.as_ref().is_ok_and(Vec::is_empty) => {
                        return Err(error.into());
                    }
                    ebpf::Error::Nothing(_) => (packets.unwrap_or_default(), Ok(None)),
                    error => (packets.unwrap_or_default(), Err(said(error))),
                }
            }
        };
        let packets = match nft::check(matches!(generation, Ok(Some(_)))) {
            Ok(finding) => Ok(finding.says),
            // That is a fact, and no failure to see.
            Err(error) if error.is_for_want_of_nftables() => Ok(said(error)),
            Err(error) => Err(said(error)),
        };
        Ok(Self {
            led,
            generation,
            // Packets are not counted by Service.
            counts: ebpf::counts(pins).map_err(said),
            hooks: ebpf::look_at(options.cgroup.as_deref(), pins).map_err(said),
            packets,
            process,
        })
    }
}

/// An error with what has caused it.
fn said(error: impl Into<anyhow::Error>) -> String {
    format!("{:#}", error.into())
}

/// What the process says that runs.
#[derive(Default)]
struct Process {
    status: Option<Box<Status>>,
    /// Where it answers for its health, if it was not asked where it says more.
    elsewhere: Option<SocketAddr>,
    /// Service and port by frontend.
    names: HashMap<String, Name>,
}

#[derive(Clone, Debug, Default)]
struct Name {
    service: String,
    port: String,
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
    fn ask(reports: &flags::Reports) -> Self {
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
        let own =
            ips.iter().filter(|it| !port.lost.contains(it)).map(|ip| SocketAddr::new(*ip, port.port.get()));
        let node_port = port.node_port.into_iter();
        let node_ports = node_port.flat_map(move |it| any.map(|ip| SocketAddr::new(ip, it.get())));
        own.chain(node_ports).map(move |it| (format!("{it}/{}", port.protocol), name.clone()))
    });
    frontends.collect()
}

impl Seen {
    /// With their names, in the order of these.
    fn rows(&self) -> Vec<(Name, &Led)> {
        let name = |it: &Led| self.process.names.get(&it.frontend).cloned().unwrap_or_default();
        let mut rows: Vec<_> = self.led.iter().map(|it| (name(it), it)).collect();
        rows.sort_by(|(a, _), (b, _)| (&a.service, &a.port).cmp(&(&b.service, &b.port)));
        rows
    }

    /// Whether there are no programs to be in effect: then nothing is pinned either.
    fn are_packets_alone(&self) -> bool {
        let is_pinned = |it: &Hooks| it.hooks.iter().any(|it| it.program.is_some());
        self.generation == Ok(None) && self.packets.is_ok() && !self.hooks.as_ref().is_ok_and(is_pinned)
    }

    /// What could not be read.
    fn errors(&self) -> Vec<&String> {
        let hooks = self.hooks.as_ref().err().filter(|_| !self.are_packets_alone());
        let maps = [self.generation.as_ref().err(), self.counts.as_ref().err()];
        maps.into_iter().chain([hooks, self.packets.as_ref().err()]).flatten().collect()
    }

    fn table(&self) -> String {
        // Writing to a string cannot fail.
        let mut out = String::new();
        match (&self.process.status, self.process.elsewhere) {
            (Some(status), _) => describe(&mut out, status),
            (None, Some(address)) => {
                let _ =
                    writeln!(out, "process    one of ours answers at http://{address}/readyz; {ELSEWHERE}");
            }
            (None, None) => out.push_str(
                "process    none answers: names and age are not known; the kernel serves what it has\n",
            ),
        }
        let programs = match &self.hooks {
            _ if self.are_packets_alone() => "none: packets alone".to_owned(),
            Ok(hooks) => {
                let missing: Vec<_> = hooks.missing().map(|it| it.name).collect();
                let cgroup = hooks.cgroup.display();
                let unreached = hooks.unreached.as_ref().map(|it| format!("; {it}")).unwrap_or_default();
                match missing.is_empty() {
                    true => format!("in effect at all {} hooks of {cgroup}{unreached}", hooks.hooks.len()),
                    false => format!("NOT in effect on {cgroup}: {}{unreached}", missing.join(", ")),
                }
            }
            Err(error) => format!("cannot be looked at: {error}"),
        };
        let _ = match &self.generation {
            Ok(Some(generation)) => writeln!(out, "maps       generation {generation} in force"),
            Ok(None) => Ok(()),
            Err(error) => writeln!(out, "maps       cannot be read: {error}"),
        };
        if let Err(error) = &self.counts {
            let _ = writeln!(out, "counters   cannot be read: {error}");
        }
        let _ = writeln!(out, "programs   {programs}");
        let (Ok(packets) | Err(packets)) = &self.packets;
        let _ = writeln!(out, "packets    {packets}");
        let _ = writeln!(out, "kernel     {}\n", check::kernel().says);
        let mut table = Table::new();
        table.load_preset(presets::NOTHING).set_header(HEADER);
        let mut told = HashSet::new();
        for (Name { service, port }, led) in self.rows() {
            let Led { frontend, backends, port: id, .. } = led;
            // They are the service port's: with the first of its addresses they are told.
            let (connections, refusals) = match id.filter(|it| told.insert(*it)) {
                Some(id) if let Ok(counts) = &self.counts => {
                    let PortCounts { connections, refusals, .. } = counts.of(id);
                    (connections.to_string(), refusals.to_string())
                }
                _ => Default::default(),
            };
            let named = backends.iter().take(MOST_NAMED).map(ToString::to_string);
            let mut named: Vec<_> = named.collect();
            if backends.len() > MOST_NAMED {
                named.push("…".into());
            }
            if backends.is_empty() {
                named.push("refused".into());
            }
            let service = if service.is_empty() { "?".into() } else { service };
            let endpoints = backends.len().to_string();
            table.add_row([
                service,
                port,
                frontend.clone(),
                endpoints,
                connections,
                refusals,
                named.join(" "),
            ]);
        }
        for line in table.lines() {
            let _ = writeln!(out, "{}", line.trim());
        }
        if let Some(status) = &self.process.status
            && !status.rejected.is_empty()
        {
            out.push_str("\nREJECTED\n");
            for it in &status.rejected {
                let _ = writeln!(out, "{} ({}): {}", it.item, it.by, it.reason);
            }
        }
        out
    }

    /// What each service port has counted, and each of its endpoints.
    fn counted(&self) -> Vec<serde_json::Value> {
        let Ok(counts) = &self.counts else { return Vec::new() };
        let mut ports: Vec<(Name, PortId, Vec<&Led>)> = Vec::new();
        let mut places = HashMap::new();
        for (name, led) in self.rows() {
            let Some(id) = led.port else { continue };
            let place = *places.entry(id).or_insert(ports.len());
            if place == ports.len() {
                ports.push((name, id, Vec::new()));
            }
            ports[place].2.push(led);
        }
        let counted = ports.into_iter().map(|(name, port, leds)| {
            let PortCounts { connections, refusals, rejections } = counts.of(port);
            let backends: BTreeSet<_> = leds.iter().flat_map(|it| &it.backends).collect();
            let endpoint = |it: &SocketAddr| json!({ "endpoint": it, "connections": counts.to(port, *it) });
            json!({
                "service": known(name.service),
                "port": name.port,
                "connections": connections,
                "refusals": refusals,
                "rejections": rejections,
                "endpoints": backends.into_iter().map(endpoint).collect::<Vec<_>>(),
            })
        });
        counted.collect()
    }

    fn json(&self) -> serde_json::Value {
        let frontends = self.rows().into_iter().map(|(name, it)| {
            json!({ "service": known(name.service), "port": name.port, "frontend": it.frontend, "endpoints": it.backends })
        });
        let programs = match &self.hooks {
            _ if self.are_packets_alone() => json!({}),
            Ok(hooks) => {
                let hook = |it: &ebpf::Hook| (it.name.to_owned(), json!(it.in_effect));
                json!({
                    "cgroup": hooks.cgroup,
                    "inEffect": hooks.hooks.iter().map(hook).collect::<serde_json::Map<_, _>>(),
                })
            }
            Err(error) => json!({ "error": error }),
        };
        json!({
            "process": self.process.status,
            "kernel": check::kernel().says,
            "generation": self.generation.as_ref().ok(),
            "programs": programs,
            "packets": match &self.packets { Ok(it) | Err(it) => it },
            "errors": self.errors(),
            "frontends": frontends.collect::<Vec<_>>(),
            "counted": self.counted(),
        })
    }
}

/// The name of a Service, if it is known.
fn known(service: String) -> Option<String> {
    Some(service).filter(|it| !it.is_empty())
}

/// What the process says of itself.
fn describe(out: &mut String, status: &Status) {
    let now = Timestamp::now();
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
                          "lost":{"v4":["192.0.2.1"]}}]}"#,
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
