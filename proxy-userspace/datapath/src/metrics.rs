//! The metrics of reports.

use std::{collections::BTreeMap, fmt};

use metrics::MetricWriter;

use crate::{
    attach_status::AttachStatus,
    probe_result::{HookBehavior, ProbeResult},
    report::{Ejections, OverflowStats, PacketAffinity, PeerCounts, PortCounts, TableFill, TableStats},
};

/// A value of a counter, with its label `way`; empty if the counter has no such label.
type Value = (&'static str, fn(&PortCounts) -> u64);

impl PortCounts {
    /// The names of the counters, and their values.
    pub const COUNTERS: [(&'static str, &'static [Value]); 7] = [
        ("kube_proxy_ebpf_connections_total", &[("", |it| it.connections)]),
        ("kube_proxy_ebpf_no_backend_total", &[("", |it| it.no_backend)]),
        ("kube_proxy_ebpf_denied_total", &[("", |it| it.denied)]),
        ("kube_proxy_ebpf_left_to_packets_total", &[("", |it| it.left_to_packets)]),
        ("kube_proxy_ebpf_external_connections_total", &[("", |it| it.external_connections)]),
        (
            "kube_proxy_ebpf_external_packets_total",
            &[
                ("sent", |it| it.forwarding.sent.packets),
                ("served", |it| it.forwarding.served.packets),
                ("received", |it| it.forwarding.received.packets),
                ("second", |it| it.forwarding.second_chances),
                ("dropped", |it| it.forwarding.dropped),
            ],
        ),
        (
            "kube_proxy_ebpf_external_bytes_total",
            &[
                ("sent", |it| it.forwarding.sent.bytes),
                ("served", |it| it.forwarding.served.bytes),
                ("received", |it| it.forwarding.received.bytes),
            ],
        ),
    ];
}

impl TableFill {
    pub fn write(tables: &[Self], out: &mut MetricWriter<'_, '_>) -> fmt::Result {
        out.gauges("map_entries", "table", tables.iter().map(|it| (it.name, it.entries.into())))?;
        out.gauges("map_capacity", "table", tables.iter().map(|it| (it.name, it.capacity.into())))
    }
}

impl AttachStatus {
    pub fn write(&self, out: &mut MetricWriter<'_, '_>) -> fmt::Result {
        let hooks = self.hooks.iter().map(|it| (it.name, it.is_attached));
        let attached = hooks.chain(self.tables.iter().copied());
        out.gauges("program_attached", "hook", attached.map(|(name, it)| (name, it.into())))?;
        out.gauges("foreign_programs", "hook", self.hooks.iter().map(|it| (it.name, it.foreign.len() as f64)))
    }
}

impl ProbeResult {
    /// Writes the metrics of the hooks that could be probed.
    pub fn write(results: &[Self], out: &mut MetricWriter<'_, '_>) -> fmt::Result {
        let probed = results.iter().filter_map(|it| match it.behavior {
            HookBehavior::Ok => Some((it.hook, 1.0)),
            HookBehavior::Fails(_) => Some((it.hook, 0.0)),
            HookBehavior::Unknown(_) => None,
        });
        out.gauges("probe_success", "hook", probed)
    }
}

impl TableStats {
    pub fn write(&self, out: &mut MetricWriter<'_, '_>) -> fmt::Result {
        let Self {
            overflow,
            refused: culprits,
            affinity_inserts,
            affinity_capacity,
            ejected,
            ejections,
            peers,
        } = self;
        let OverflowStats { entries, capacity, sockets, refused } = *overflow;
        out.gauge("socket_overflow_entries", entries as f64)?;
        out.gauge("socket_overflow_capacity", capacity.into())?;
        out.counter("socket_overflow_sockets", sockets as f64)?;
        out.counter("socket_refused", refused as f64)?;
        let mut by_cgroup = BTreeMap::<_, f64>::new();
        for it in culprits {
            *by_cgroup.entry(it.cgroup.as_deref().unwrap_or("removed")).or_default() += it.refused as f64;
        }
        out.gauges("socket_refused_by_cgroup", "cgroup", by_cgroup)?;
        out.counter("affinity_inserts", *affinity_inserts as f64)?;
        out.gauge("affinity_capacity", (*affinity_capacity).into())?;
        let mut by_port = BTreeMap::<_, f64>::new();
        for it in ejected {
            *by_port.entry((&it.service, &*it.port)).or_default() += 1.0;
        }
        let by_port = by_port.into_iter().map(|((service, port), count)| {
            ([("namespace", &*service.namespace), ("service", &*service.name), ("port", port)], count)
        });
        out.series("endpoint_ejected", by_port)?;
        let Ejections { timeouts, refusals } = *ejections;
        out.counters("ejections", "reason", [("timeout", timeouts), ("refused", refusals)])?;
        let PeerCounts { answering, silent, mute } = *peers;
        let peers = [("answering", answering), ("silent", silent), ("mute", mute)];
        out.gauges("external_peers", "state", peers.map(|(state, count)| (state, count as f64)))
    }
}

impl PacketAffinity {
    pub fn write(&self, out: &mut MetricWriter<'_, '_>) -> fmt::Result {
        let Self { clients, unanswered, capacity, full_service_ports } = *self;
        let entries = [("answered", clients as f64), ("unanswered", unanswered as f64)];
        out.gauges("packet_affinity_entries", "state", entries)?;
        out.gauge("packet_affinity_capacity", capacity.into())?;
        out.gauge("packet_affinity_full_service_ports", full_service_ports as f64)
    }
}
