//! The process metrics of every Prometheus client, under their usual names; read from proc(5).

use std::{fmt, fs};

use metrics::MetricWriter;
use nix::{
    sys::resource::{Resource, getrlimit},
    unistd::{SysconfVar, sysconf},
};
use prometheus_client::{collector::Collector, encoding::DescriptorEncoder};

#[derive(Debug)]
pub(super) struct Process;

/// The fields that are read from `/proc/self/stat`.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Stat {
    /// In clock ticks, user and system together.
    cpu: f64,
    threads: f64,
    /// In clock ticks since boot.
    started: f64,
    /// In bytes.
    virtual_memory: f64,
    /// In pages.
    resident: f64,
}

impl Stat {
    fn parse(text: &str) -> Option<Self> {
        // The second field is a name with arbitrary characters; the third follows the last parenthesis.
        let rest = text.rsplit_once(')')?.1;
        let fields: Vec<f64> = rest.split_whitespace().skip(1).map_while(|it| it.parse().ok()).collect();
        // `fields` starts at field 4 of proc_pid_stat(5).
        let field = |number: usize| fields.get(number - 4).copied();
        Some(Self {
            cpu: field(14)? + field(15)?,
            threads: field(20)?,
            started: field(22)?,
            virtual_memory: field(23)?,
            resident: field(24)?,
        })
    }
}

impl Collector for Process {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let mut out = MetricWriter { prefix: "process_", encoder: &mut encoder };
        let stat = fs::read_to_string("/proc/self/stat").ok().and_then(|it| Stat::parse(&it));
        if let (Some(stat), Some(tick), Some(page)) =
            (stat, conf(SysconfVar::CLK_TCK), conf(SysconfVar::PAGE_SIZE))
        {
            out.counter("cpu_seconds", stat.cpu / tick)?;
            out.gauge("resident_memory_bytes", stat.resident * page)?;
            out.gauge("virtual_memory_bytes", stat.virtual_memory)?;
            out.gauge("threads", stat.threads)?;
            if let Some(boot) = boot_time() {
                out.gauge("start_time_seconds", boot + stat.started / tick)?;
            }
        }
        if let Ok(open) = fs::read_dir("/proc/self/fd") {
            // Without that of the folder itself.
            out.gauge("open_fds", open.count().saturating_sub(1) as f64)?;
        }
        if let Ok((soft, _)) = getrlimit(Resource::RLIMIT_NOFILE) {
            out.gauge("max_fds", soft as f64)?;
        }
        if let Ok((soft, _)) = getrlimit(Resource::RLIMIT_AS) {
            out.gauge("virtual_memory_max_bytes", soft as f64)?;
        }
        let netstat = fs::read_to_string("/proc/self/net/netstat").unwrap_or_default();
        let octets = |field| ip_octets(&netstat, field);
        if let (Some(received), Some(sent)) = (octets("InOctets"), octets("OutOctets")) {
            out.counter("network_receive_bytes", received)?;
            out.counter("network_transmit_bytes", sent)?;
        }
        Ok(())
    }
}

fn conf(name: SysconfVar) -> Option<f64> {
    sysconf(name).ok().flatten().map(|it| it as f64)
}

/// A field of the lines `IpExt` of proc_pid_net(5) `netstat`, of which the first has the names: it counts the network namespace,
/// as in the Prometheus client for Go.
fn ip_octets(netstat: &str, field: &str) -> Option<f64> {
    let mut lines = netstat.lines().filter_map(|it| it.strip_prefix("IpExt: "));
    let (names, values) = (lines.next()?, lines.next()?);
    let mut fields = names.split(' ').zip(values.split(' '));
    fields.find(|(name, _)| *name == field)?.1.parse().ok()
}

/// In seconds since 1970.
fn boot_time() -> Option<f64> {
    let stat = fs::read_to_string("/proc/stat").ok()?;
    stat.lines().find_map(|it| it.strip_prefix("btime "))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_of_the_network_namespace_are_found_by_name() {
        let text = "TcpExt: A B\nTcpExt: 1 2\nIpExt: InNoRoutes InOctets OutOctets\nIpExt: 0 70 80\n";
        assert_eq!((ip_octets(text, "InOctets"), ip_octets(text, "OutOctets")), (Some(70.0), Some(80.0)));
        assert_eq!(ip_octets(text, "InMcastOctets"), None);
    }

    #[test]
    fn a_name_with_spaces_and_parentheses_does_not_move_the_fields() {
        let text =
            "7 (a) b (c) S 1 7 7 0 -1 4194560 1 2 3 4 50 25 6 7 20 0 3 0 900 4096 11 18446744073709551615";
        let expect = Stat { cpu: 75.0, threads: 3.0, started: 900.0, virtual_memory: 4096.0, resident: 11.0 };
        assert_eq!(Stat::parse(text), Some(expect));
    }
}
