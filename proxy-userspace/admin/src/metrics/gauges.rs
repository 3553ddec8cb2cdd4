//! Metrics that are read from the state at each scrape.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex},
};

use datapath::{Ejections, HookBehavior, OverflowStats, PacketAffinity, TableStats};
use model::Rejections;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
};
use publish::{followers::FollowerStats, grpc::ClientStats};
use tokio::time::Instant;

use super::by_family::{FAMILIES, IP_FAMILY};
use crate::{
    COMMIT, VERSION,
    http_connections::HttpConnections,
    state::{AdminState, RejectedBy, Role, lock, seconds},
    totals::Totals,
};

#[derive(Debug)]
pub(super) struct Gauges {
    pub(super) state: Arc<Mutex<AdminState>>,
    pub(super) connections: HttpConnections,
}

impl Collector for Gauges {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let state = lock(&self.state);
        let mut out = MetricWriter { prefix: "kube_proxy_ebpf_", encoder: &mut encoder };
        general(&state, &mut out)?;
        http(&self.connections, &mut out)?;
        if state.role == Role::Brain {
            return Ok(());
        }
        kube_proxy(
            &state,
            &mut MetricWriter { prefix: "kubeproxy_sync_proxy_rules_", encoder: &mut encoder },
        )?;
        let mut out = MetricWriter { prefix: "kube_proxy_ebpf_", encoder: &mut encoder };
        backend(&state, &mut out)
    }
}

/// Of every process.
fn general(state: &AdminState, out: &mut MetricWriter<'_, '_>) -> fmt::Result {
    let now = Instant::now();
    out.write(
        "build_info",
        "1, with the version and the commit of the binary",
        MetricType::Gauge,
        |mut family| {
            ConstGauge::new(1.0).encode(family.encode_family(&[("version", VERSION), ("commit", COMMIT)])?)
        },
    )?;
    let (rev, age) = state
        .published
        .as_ref()
        .map_or((0, 0.0), |(it, at)| (it.rev, now.duration_since(at.instant).as_secs_f64()));
    out.gauge("published_revision", "Newest revision of the node's state", rev as f64)?;
    out.gauge("state_age_seconds", "Time since the last change of the node's state", age)?;
    let Totals { services, endpoints, .. } = state.totals;
    out.gauge("services", "Services that are served", services as f64)?;
    out.gauge("endpoints", "Endpoints of all Services", endpoints as f64)?;
    let rejected = |it: &RejectedBy| (it.name(), state.rejected.get(it).map_or(0, Rejections::len) as f64);
    out.family(
        "rejected_items",
        "Rejected parts of objects, by the part of the process that rejects them",
        "by",
        RejectedBy::ALL.iter().map(rejected),
    )?;
    out.gauge(
        "namespace_entries",
        "Entries of the namespace with most, those that are not served included, see --max-namespace-entries",
        state.namespace_entries as f64,
    )?;
    out.gauge(
        "node_eligible",
        "1 if load balancers may send to this node, else 0",
        flag(state.is_node_eligible()),
    )?;
    out.family(
        "source_synced",
        "1 if the source was read completely at least once, else 0",
        "source",
        state.sources.iter().map(|(name, it)| (&**name, flag(it.is_synced))),
    )?;
    out.family(
        "source_failing",
        "1 if the source has an error now, else 0",
        "source",
        state.sources.iter().map(|(name, it)| (&**name, flag(it.error.is_some()))),
    )?;
    let contacts = state.sources.iter().filter_map(|(name, it)| Some((&**name, seconds(it.last_contact?))));
    out.family(
        "source_last_contact_timestamp_seconds",
        "Time of the last contact with the source, if it is known",
        "source",
        contacts,
    )?;
    let Some(watchers) = &state.watchers else { return Ok(()) };
    out.gauge("watchers", "Clients that watch the states of this process", (watchers.0)() as f64)?;
    if let Some(stats) = &state.follower_stats {
        let FollowerStats { followers, behind, longest_behind, longest_latency } = (stats.0)();
        out.gauge("followers", "Clients that follow the state of a node", followers as f64)?;
        out.gauge(
            "followers_behind",
            "Clients that have not acknowledged the newest state of their node for 5 seconds",
            behind as f64,
        )?;
        out.gauge(
            "followers_behind_seconds",
            "The longest time for which a client has not acknowledged the newest state of its node",
            longest_behind.as_secs_f64(),
        )?;
        out.gauge(
            "followers_latency_seconds",
            "The longest time that a client has taken from the last state to its acknowledgement",
            longest_latency.as_secs_f64(),
        )?;
    }
    let Some(client_stats) = &state.client_stats else { return Ok(()) };
    let ClientStats { open, handshakes, refused_in_all, refused_of_peer, closed_handshakes } =
        (client_stats.0)();
    out.gauge("grpc_connections", "Open connections of gRPC clients", open as f64)?;
    out.gauge("grpc_handshakes", "Pending TLS handshakes of gRPC clients", handshakes as f64)?;
    out.counters(
        "grpc_connections_refused",
        "gRPC clients that were refused, because there were too many",
        "limit",
        [("all", refused_in_all), ("peer", refused_of_peer), ("handshakes", closed_handshakes)],
    )
}

/// Of the pages.
fn http(connections: &HttpConnections, out: &mut MetricWriter<'_, '_>) -> fmt::Result {
    let groups = connections.groups();
    out.family(
        "http_connections",
        "Open connections to the pages",
        "pages",
        groups.map(|(name, it)| (name, it.count() as f64)),
    )?;
    out.counters(
        "http_connections_closed",
        "Connections to the pages that were closed for newer ones, because there were too many",
        "pages",
        groups.map(|(name, it)| (name, it.closed())),
    )
}

/// kube-proxy's metrics, under its names.
fn kube_proxy(state: &AdminState, out: &mut MetricWriter<'_, '_>) -> fmt::Result {
    let active = state.active.as_ref().map_or(0.0, |it| seconds(it.since.wall));
    let both = |value: f64| FAMILIES.map(|(_, name)| (name, value));
    out.family(
        "last_timestamp_seconds",
        "The last time proxy rules were successfully synced",
        IP_FAMILY,
        both(active),
    )?;
    let queued = state.published.as_ref().map_or(0.0, |(_, at)| seconds(at.wall));
    out.family(
        "last_queued_timestamp_seconds",
        "The last time a sync of proxy rules was queued",
        IP_FAMILY,
        both(queued),
    )?;
    let pending = state.pending_changes();
    out.gauge("endpoint_changes_pending", "Pending proxy rules Endpoint changes", pending.endpoints as f64)?;
    out.gauge("service_changes_pending", "Pending proxy rules Service changes", pending.services as f64)?;
    let Totals { no_local_internal, no_local_external, .. } = &state.totals;
    let policies = [("internal", no_local_internal), ("external", no_local_external)];
    out.write(
        "no_local_endpoints_total",
        "Number of services with a Local traffic policy and no endpoints",
        MetricType::Gauge,
        |mut out| {
            policies.iter().flat_map(|it| FAMILIES.map(|family| (it, family))).try_for_each(
                |((policy, count), (family, name))| {
                    let labels = [(IP_FAMILY, name), ("traffic_policy", *policy)];
                    ConstGauge::new(*count.of(family) as f64).encode(out.encode_family(&labels)?)
                },
            )
        },
    )
}

/// Of the datapath.
fn backend(state: &AdminState, out: &mut MetricWriter<'_, '_>) -> fmt::Result {
    let active = state.active.as_ref();
    out.gauge(
        "active_revision",
        "Active revision of the node's state",
        active.map_or(0, |it| it.published.rev) as f64,
    )?;
    let pending = state.pending_for(Instant::now()).unwrap_or_default();
    out.gauge(
        "pending_change_age_seconds",
        "Age of the oldest change that is not active yet, else 0",
        pending.as_secs_f64(),
    )?;
    let tables = || active.iter().flat_map(|it| &it.tables);
    out.family(
        "map_entries",
        "Entries of each table in the kernel",
        "table",
        tables().map(|it| (it.name, f64::from(it.entries))),
    )?;
    out.family(
        "map_capacity",
        "Capacity of each table before it is replaced by a larger one",
        "table",
        tables().map(|it| (it.name, f64::from(it.capacity))),
    )?;
    let hooks = || state.attach_status.iter().flat_map(|it| &it.hooks);
    let tables = state.attach_status.iter().flat_map(|it| &it.tables).copied();
    out.family(
        "program_attached",
        "1 if the kernel runs our program at the hook, else 0",
        "hook",
        hooks().map(|it| (it.name, it.is_attached)).chain(tables).map(|(name, it)| (name, flag(it))),
    )?;
    out.family(
        "foreign_programs",
        "Foreign programs that the kernel runs at the hook",
        "hook",
        hooks().map(|it| (it.name, it.foreign.len() as f64)),
    )?;
    let probed = state.probe_results.iter().filter_map(|it| match it.behavior {
        HookBehavior::Ok => Some((it.hook, 1.0)),
        HookBehavior::Fails(_) => Some((it.hook, 0.0)),
        HookBehavior::Unknown(_) => None,
    });
    out.family("probe_success", "1 if the last probe of the hook was translated, else 0", "hook", probed)?;
    out.gauge(
        "probe_age_seconds",
        "Time since the last conclusive probe; 0 while none is expected",
        state.last_probe.map_or(0.0, |it| it.elapsed().as_secs_f64()),
    )?;
    out.gauge(
        "packet_path_failing",
        "1 if the packet path is unavailable or behind the state, else 0",
        flag(state.packet_path_error.is_some()),
    )?;
    let TableStats { overflow, refused: culprits, affinity_inserts, affinity_capacity, ejected, ejections } =
        &state.table_stats;
    let OverflowStats { entries, capacity, sockets, refused } = *overflow;
    out.gauge("socket_overflow_entries", "Entries of the socket overflow table", entries as f64)?;
    out.gauge("socket_overflow_capacity", "Capacity of the socket overflow table", f64::from(capacity))?;
    out.counter(
        "socket_overflow_sockets",
        "Sockets whose translations did not fit into their slot",
        sockets as f64,
    )?;
    out.counter(
        "socket_refused",
        "Calls for whose translation there was no room, in the table or in the share of their network namespace",
        refused as f64,
    )?;
    let mut by_cgroup = BTreeMap::<_, f64>::new();
    for it in culprits {
        *by_cgroup.entry(it.cgroup.as_deref().unwrap_or("removed")).or_default() += it.refused as f64;
    }
    out.family(
        "socket_refused_by_cgroup",
        "Calls without room for their translation in the network namespaces that were refused most, by the cgroup that was refused last",
        "cgroup",
        by_cgroup,
    )?;
    out.counter(
        "affinity_inserts",
        "Clients that were inserted into the session affinity table",
        *affinity_inserts as f64,
    )?;
    out.gauge("affinity_capacity", "Capacity of the session affinity table", f64::from(*affinity_capacity))?;
    let mut by_port = BTreeMap::<_, f64>::new();
    for it in ejected {
        *by_port.entry((&it.service, &*it.port)).or_default() += 1.0;
    }
    out.write(
        "endpoint_ejected",
        "Endpoints that some clients avoid because their connections to them failed",
        MetricType::Gauge,
        |mut out| {
            by_port.into_iter().try_for_each(|((service, port), count)| {
                let labels =
                    [("namespace", &*service.namespace), ("service", &*service.name), ("port", port)];
                ConstGauge::new(count).encode(out.encode_family(&labels)?)
            })
        },
    )?;
    let Ejections { timeouts, refusals } = *ejections;
    out.counters(
        "ejections",
        "Ejections of an endpoint for a client, by what the last of its connections met",
        "reason",
        [("timeout", timeouts), ("refused", refusals)],
    )?;
    let PacketAffinity { clients, unanswered, capacity, full_service_ports } = state.packet_affinity;
    out.family(
        "packet_affinity_entries",
        "Clients with session affinity on the packet path, by whether they were answered",
        "state",
        [("answered", clients as f64), ("unanswered", unanswered as f64)],
    )?;
    out.gauge(
        "packet_affinity_capacity",
        "Clients with session affinity that the packet path has room for, per state and IP family",
        f64::from(capacity),
    )?;
    out.gauge(
        "packet_affinity_full_service_ports",
        "Service ports with so many clients that new ones get no session affinity on the packet path",
        full_service_ports as f64,
    )?;
    out.gauge(
        "kube_proxy_rules",
        "Whether kube-proxy has rules in nftables, or in iptables over nftables, beside those of the packet path",
        f64::from(u8::from(state.has_kube_proxy_rules)),
    )
}

fn flag(is_set: bool) -> f64 {
    f64::from(u8::from(is_set))
}

/// Writes metrics whose names have a common prefix; appends the full stop of each help text.
pub(super) struct MetricWriter<'a, 'b> {
    pub(super) prefix: &'static str,
    pub(super) encoder: &'a mut DescriptorEncoder<'b>,
}

impl MetricWriter<'_, '_> {
    fn write(
        &mut self,
        name: &str,
        help: &str,
        kind: MetricType,
        write: impl FnOnce(MetricEncoder<'_>) -> fmt::Result,
    ) -> fmt::Result {
        let (name, help) = (format!("{}{name}", self.prefix), format!("{help}."));
        write(self.encoder.encode_descriptor(&name, &help, None, kind)?)
    }

    pub(super) fn gauge(&mut self, name: &str, help: &str, value: f64) -> fmt::Result {
        self.write(name, help, MetricType::Gauge, |it| ConstGauge::new(value).encode(it))
    }

    /// `name` without `_total`, which the encoder appends.
    pub(super) fn counter(&mut self, name: &str, help: &str, value: f64) -> fmt::Result {
        self.write(name, help, MetricType::Counter, |it| ConstCounter::new(value).encode(it))
    }

    /// One counter for each value of a label; `name` without `_total`.
    pub(super) fn counters<'c>(
        &mut self,
        name: &str,
        help: &str,
        label: &'static str,
        values: impl IntoIterator<Item = (&'c str, u64)>,
    ) -> fmt::Result {
        self.write(name, help, MetricType::Counter, |mut family| {
            values.into_iter().try_for_each(|(value, number)| {
                ConstCounter::new(number).encode(family.encode_family(&[(label, value)])?)
            })
        })
    }

    /// One gauge for each value of a label.
    fn family<'c>(
        &mut self,
        name: &str,
        help: &str,
        label: &'static str,
        values: impl IntoIterator<Item = (&'c str, f64)>,
    ) -> fmt::Result {
        self.write(name, help, MetricType::Gauge, |mut family| {
            values.into_iter().try_for_each(|(value, number)| {
                ConstGauge::new(number).encode(family.encode_family(&[(label, value)])?)
            })
        })
    }
}
