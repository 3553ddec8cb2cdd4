//! What is, as numbers: read from the record at the moment somebody asks.

use std::{
    fmt,
    sync::{Arc, Mutex},
};

use datapath::{HookBehavior, PortCounts, TableStats, UdpNatStats};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
};
use tokio::time::Instant;

use crate::{
    Role, Stage,
    counted::Counted,
    lock,
    record::{Record, seconds},
    tally::Tally,
};

#[derive(Debug)]
pub(super) struct Gauges(pub(super) Arc<Mutex<Record>>);

impl Collector for Gauges {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let counted = Counted::read(&self.0);
        let record = lock(&self.0);
        let mut out = Out(&mut encoder);
        general(&record, &mut out)?;
        match record.role {
            Role::Backend => {
                kube_proxy(&record, &mut out)?;
                backend(&record, &mut out)?;
                drop(record);
                counters(counted.as_ref(), &mut out)
            }
            Role::Brain => Ok(()),
        }
    }
}

/// What every process has to say.
fn general(record: &Record, out: &mut Out<'_, '_>) -> fmt::Result {
    let now = Instant::now();
    out.family(
        "kube_proxy_ebpf_build_info",
        "1, with the version of the binary",
        "version",
        [(env!("CARGO_PKG_VERSION"), 1.0)],
    )?;
    let (rev, age) = record
        .published
        .as_ref()
        .map_or((0, 0.0), |(it, at)| (it.rev, now.duration_since(at.instant).as_secs_f64()));
    out.gauge("kube_proxy_ebpf_published_revision", "The newest revision of the node's state", rev as f64)?;
    out.gauge("kube_proxy_ebpf_state_age_seconds", "Time since the node's state changed", age)?;
    let Tally { services, endpoints, .. } = record.tally;
    out.gauge("kube_proxy_ebpf_services", "Services that are served", services as f64)?;
    out.gauge("kube_proxy_ebpf_endpoints", "Endpoints of all Services together", endpoints as f64)?;
    let rejected = |it: &Stage| (it.name(), record.rejected.get(it).map_or(0, Vec::len) as f64);
    out.family(
        "kube_proxy_ebpf_rejected_items",
        "Parts of objects that are refused, by who refuses them",
        "by",
        Stage::ALL.iter().map(rejected),
    )?;
    out.gauge(
        "kube_proxy_ebpf_node_eligible",
        "1 if load balancers may send to this node",
        f64::from(u8::from(record.node_eligible())),
    )?;
    out.family(
        "kube_proxy_ebpf_source_synced",
        "1 if everything was read from the source at least once",
        "source",
        record.sources.iter().map(|(name, it)| (&**name, f64::from(u8::from(it.synced)))),
    )?;
    out.family(
        "kube_proxy_ebpf_source_failing",
        "1 if something is wrong with the source now",
        "source",
        record.sources.iter().map(|(name, it)| (&**name, f64::from(u8::from(it.error.is_some())))),
    )?;
    let contacts = record.sources.iter().filter_map(|(name, it)| Some((&**name, seconds(it.last_contact?))));
    out.family(
        "kube_proxy_ebpf_source_last_contact_timestamp_seconds",
        "When the source was heard last, where that is known",
        "source",
        contacts,
    )?;
    match &record.watchers {
        Some(watchers) => out.gauge(
            "kube_proxy_ebpf_watchers",
            "Clients that follow the states of this process",
            (watchers.0)() as f64,
        ),
        None => Ok(()),
    }
}

/// What kube-proxy has to say, under its names.
fn kube_proxy(record: &Record, out: &mut Out<'_, '_>) -> fmt::Result {
    let in_force = record.in_force.as_ref().map_or(0.0, |it| seconds(it.since.wall));
    out.gauge(
        "kubeproxy_sync_proxy_rules_last_timestamp_seconds",
        "The last time proxy rules were successfully synced",
        in_force,
    )?;
    let queued = record.published.as_ref().map_or(0.0, |(_, at)| seconds(at.wall));
    out.gauge(
        "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds",
        "The last time a sync of proxy rules was queued",
        queued,
    )?;
    let pending = record.pending();
    out.gauge(
        "kubeproxy_sync_proxy_rules_endpoint_changes_pending",
        "Pending proxy rules Endpoint changes",
        pending.endpoints as f64,
    )?;
    out.gauge(
        "kubeproxy_sync_proxy_rules_service_changes_pending",
        "Pending proxy rules Service changes",
        pending.services as f64,
    )?;
    out.family(
        "kubeproxy_sync_proxy_rules_no_local_endpoints_total",
        "Number of services with a Local traffic policy and no endpoints",
        "traffic_policy",
        [
            ("internal", record.tally.no_local_internal as f64),
            ("external", record.tally.no_local_external as f64),
        ],
    )
}

/// What is in the kernel.
fn backend(record: &Record, out: &mut Out<'_, '_>) -> fmt::Result {
    let in_force = record.in_force.as_ref();
    out.gauge(
        "kube_proxy_ebpf_generation",
        "The revision of the node's state that is in force",
        in_force.map_or(0, |it| it.published.rev) as f64,
    )?;
    let waiting = record.waiting_for(Instant::now()).unwrap_or_default();
    out.gauge(
        "kube_proxy_ebpf_waiting_seconds",
        "For how long the oldest change waits that is not in force",
        waiting.as_secs_f64(),
    )?;
    let tables = || in_force.iter().flat_map(|it| &it.tables);
    out.family(
        "kube_proxy_ebpf_map_entries",
        "Entries of each table in the kernel",
        "table",
        tables().map(|it| (it.name, f64::from(it.entries))),
    )?;
    out.family(
        "kube_proxy_ebpf_map_capacity",
        "Entries that each table has room for before it is replaced by a larger one",
        "table",
        tables().map(|it| (it.name, f64::from(it.capacity))),
    )?;
    let hooks = || record.hooks.iter().flat_map(|it| &it.hooks);
    let tables = record.hooks.iter().flat_map(|it| &it.tables).copied();
    out.family(
        "kube_proxy_ebpf_program_in_effect",
        "1 if the kernel runs our program at the hook",
        "hook",
        hooks()
            .map(|it| (it.name, it.is_attached))
            .chain(tables)
            .map(|(name, it)| (name, f64::from(u8::from(it)))),
    )?;
    out.family(
        "kube_proxy_ebpf_foreign_programs",
        "Programs of others that the kernel runs at the hook",
        "hook",
        hooks().map(|it| (it.name, it.foreign.len() as f64)),
    )?;
    let tried = record.canary.iter().filter_map(|it| match it.behavior {
        HookBehavior::Ok => Some((it.hook, 1.0)),
        HookBehavior::Fails(_) => Some((it.hook, 0.0)),
        HookBehavior::Unknown(_) => None,
    });
    out.family(
        "kube_proxy_ebpf_canary",
        "1 if the hook acted when it was tried from inside, 0 if it did not",
        "hook",
        tried,
    )?;
    let TableStats { udp_nat, slot_overflows, affinity_inserts, affinity_capacity } = record.memory;
    let UdpNatStats { entries, capacity, refused } = udp_nat;
    out.gauge(
        "kube_proxy_ebpf_udp_memory_entries",
        "Entries that unconnected UDP sockets have beyond their own storage",
        entries as f64,
    )?;
    out.gauge(
        "kube_proxy_ebpf_udp_memory_capacity",
        "How many such entries there may be",
        f64::from(capacity),
    )?;
    out.counter(
        "kube_proxy_ebpf_udp_nat_refused",
        "Datagrams that were not sent for want of such an entry",
        refused as f64,
    )?;
    out.counter(
        "kube_proxy_ebpf_socket_slot_overflows",
        "Connects that found their socket slot taken, and made storage for the socket",
        slot_overflows as f64,
    )?;
    out.counter(
        "kube_proxy_ebpf_affinity_clients",
        "Clients of Services with session affinity that came to be remembered",
        affinity_inserts as f64,
    )?;
    out.gauge(
        "kube_proxy_ebpf_affinity_capacity",
        "How many such clients are remembered at once",
        f64::from(affinity_capacity),
    )
}

/// What was counted in the kernel, for each service port that has counted anything.
fn counters(counted: Option<&Counted>, out: &mut Out<'_, '_>) -> fmt::Result {
    let mut family = |name: &str, help: &str, value: fn(&PortCounts) -> u64| {
        let help = format!("{help}.");
        let mut family = out.0.encode_descriptor(name, &help, None, MetricType::Counter)?;
        for (port, counts) in counted.iter().flat_map(|it| it.ports()) {
            // Most Services are never asked for on most nodes.
            let value = value(&counts);
            if value == 0 {
                continue;
            }
            let protocol = port.protocol.to_string();
            let labels = [
                ("namespace", &*port.service.namespace),
                ("service", &*port.service.name),
                ("port", port.name),
                ("protocol", &protocol),
            ];
            ConstCounter::new(value).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    };
    family(
        "kube_proxy_ebpf_connections",
        "Connections and UDP associations that were led to an endpoint",
        |it| it.connections,
    )?;
    family("kube_proxy_ebpf_no_backend", "Connections that were refused for want of endpoints", |it| {
        it.no_backend
    })?;
    family(
        "kube_proxy_ebpf_denied",
        "Binds to a node port that were refused, and datagrams that found no memory",
        |it| it.denied,
    )
}

/// Writes gauges.
pub(super) struct Out<'a, 'b>(pub(super) &'a mut DescriptorEncoder<'b>);

impl Out<'_, '_> {
    pub(super) fn gauge(&mut self, name: &str, help: &str, value: f64) -> fmt::Result {
        let help = format!("{help}.");
        ConstGauge::new(value).encode(self.0.encode_descriptor(name, &help, None, MetricType::Gauge)?)
    }

    /// `name` without `_total`, which the format adds.
    fn counter(&mut self, name: &str, help: &str, value: f64) -> fmt::Result {
        let help = format!("{help}.");
        ConstCounter::new(value).encode(self.0.encode_descriptor(name, &help, None, MetricType::Counter)?)
    }

    /// One gauge for each value of a label.
    fn family<'c>(
        &mut self,
        name: &str,
        help: &str,
        label: &'static str,
        values: impl IntoIterator<Item = (&'c str, f64)>,
    ) -> fmt::Result {
        let help = format!("{help}.");
        let mut family = self.0.encode_descriptor(name, &help, None, MetricType::Gauge)?;
        for (value, number) in values {
            ConstGauge::new(number).encode(family.encode_family(&[(label, value)])?)?;
        }
        Ok(())
    }
}
