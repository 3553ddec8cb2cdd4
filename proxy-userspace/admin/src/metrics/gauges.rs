//! Metrics that are read from the state at each scrape.

use std::{collections::BTreeMap, fmt, sync::Arc};

use parking_lot::Mutex;

use datapath::{Ejections, HookBehavior, OverflowStats, PacketAffinity, PeerCounts, TableStats};
use grpc_server::ClientStats;
use metrics::{MetricWriter, by_family, ip_family};
use model::{Family, Rejections};
use prometheus_client::{collector::Collector, encoding::DescriptorEncoder};
use publish::followers::FollowerStats;
use tokio::time::Instant;

use crate::{
    COMMIT, VERSION,
    state::totals::Totals,
    state::{AdminState, RejectedBy, Role, seconds},
};

#[derive(Debug)]
pub(super) struct Gauges(pub(super) Arc<Mutex<AdminState>>);

impl Collector for Gauges {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let state = self.0.lock();
        general(&state, &mut MetricWriter::own(&mut encoder))?;
        servers(&state, &mut MetricWriter::own(&mut encoder))?;
        if state.role == Role::Brain {
            return Ok(());
        }
        kube_proxy(
            &state,
            &mut MetricWriter { prefix: "kubeproxy_sync_proxy_rules_", encoder: &mut encoder },
        )?;
        let mut out = MetricWriter::own(&mut encoder);
        datapath(&state, &mut out)?;
        table_stats(&state.datapath.table_stats, &mut out)?;
        packets(&state, &mut out)
    }
}

/// Of every process.
fn general(state: &AdminState, out: &mut MetricWriter<'_, '_>) -> fmt::Result {
    out.series("build_info", [([("version", VERSION), ("commit", COMMIT)], 1.0)])?;
    let published = state.published.as_ref();
    out.gauge("published_revision", published.map_or(0, |(it, _)| it.rev) as f64)?;
    let age = published.map(|(_, at)| at.instant.elapsed()).unwrap_or_default();
    out.gauge("state_age_seconds", age.as_secs_f64())?;
    out.gauge("services", state.totals.services as f64)?;
    out.gauge("endpoints", state.totals.endpoints as f64)?;
    let rejected = |it: &RejectedBy| (it.name(), state.rejected.get(it).map_or(0, Rejections::len) as f64);
    out.gauges("rejected_items", "by", RejectedBy::ALL.iter().map(rejected))?;
    out.gauge("namespace_entries", state.namespace_entries as f64)?;
    out.gauge("node_eligible", flag(state.is_node_eligible()))?;
    let sources = || state.sources.iter().map(|(name, it)| (&**name, it));
    out.gauges("source_synced", "source", sources().map(|(name, it)| (name, flag(it.is_synced))))?;
    out.gauges("source_failing", "source", sources().map(|(name, it)| (name, flag(it.error.is_some()))))?;
    let contacts = sources().filter_map(|(name, it)| Some((name, seconds(it.last_contact?))));
    out.gauges("source_last_contact_timestamp_seconds", "source", contacts)
}

/// Of a process that other nodes or programs watch.
fn servers(state: &AdminState, out: &mut MetricWriter<'_, '_>) -> fmt::Result {
    let Some(watchers) = &state.readers.watchers else { return Ok(()) };
    out.gauge("watchers", (watchers.0)() as f64)?;
    if let Some(stats) = &state.readers.follower_stats {
        let FollowerStats { followers, behind, longest_behind, longest_latency } = (stats.0)();
        out.gauge("followers", followers as f64)?;
        out.gauge("followers_behind", behind as f64)?;
        out.gauge("followers_behind_seconds", longest_behind.as_secs_f64())?;
        out.gauge("followers_latency_seconds", longest_latency.as_secs_f64())?;
    }
    let Some(client_stats) = &state.readers.client_stats else { return Ok(()) };
    let ClientStats { open, handshakes, refused_in_all, refused_of_peer, closed_handshakes } =
        (client_stats.0)();
    out.gauge("grpc_connections", open as f64)?;
    out.gauge("grpc_handshakes", handshakes as f64)?;
    let refused = [("all", refused_in_all), ("peer", refused_of_peer), ("handshakes", closed_handshakes)];
    out.counters("grpc_connections_refused", "limit", refused)
}

/// kube-proxy's metrics, under its names.
fn kube_proxy(state: &AdminState, out: &mut MetricWriter<'_, '_>) -> fmt::Result {
    let both = |value: f64| by_family().map(move |it| (it, value));
    let active = state.active.as_ref().map_or(0.0, |it| seconds(it.since.wall));
    out.series("last_timestamp_seconds", both(active))?;
    let queued = state.published.as_ref().map_or(0.0, |(_, at)| seconds(at.wall));
    out.series("last_queued_timestamp_seconds", both(queued))?;
    let pending = state.pending_changes();
    out.gauge("endpoint_changes_pending", pending.endpoints as f64)?;
    out.gauge("service_changes_pending", pending.services as f64)?;
    let Totals { no_local_internal, no_local_external, .. } = &state.totals;
    let policies = [("internal", no_local_internal), ("external", no_local_external)];
    let by_policy = policies.iter().flat_map(|(policy, count)| {
        Family::ALL.map(|it| {
            let [family] = ip_family(it);
            ([family, ("traffic_policy", *policy)], *count.of(it) as f64)
        })
    });
    out.series("no_local_endpoints_total", by_policy)
}

/// Of what is active in the kernel, and of its programs.
fn datapath(state: &AdminState, out: &mut MetricWriter<'_, '_>) -> fmt::Result {
    let active = state.active.as_ref();
    out.gauge("active_revision", active.map_or(0, |it| it.published.rev) as f64)?;
    let pending = state.pending_for(Instant::now()).unwrap_or_default();
    out.gauge("pending_change_age_seconds", pending.as_secs_f64())?;
    let tables = || active.iter().flat_map(|it| &it.tables);
    out.gauges("map_entries", "table", tables().map(|it| (it.name, it.entries.into())))?;
    out.gauges("map_capacity", "table", tables().map(|it| (it.name, it.capacity.into())))?;
    let hooks = || state.datapath.attach_status.iter().flat_map(|it| &it.hooks);
    let attached = hooks().map(|it| (it.name, it.is_attached));
    let attached = attached.chain(state.datapath.attach_status.iter().flat_map(|it| &it.tables).copied());
    out.gauges("program_attached", "hook", attached.map(|(name, it)| (name, flag(it))))?;
    out.gauges("foreign_programs", "hook", hooks().map(|it| (it.name, it.foreign.len() as f64)))?;
    let probed = state.datapath.probe_results.iter().filter_map(|it| match it.behavior {
        HookBehavior::Ok => Some((it.hook, 1.0)),
        HookBehavior::Fails(_) => Some((it.hook, 0.0)),
        HookBehavior::Unknown(_) => None,
    });
    out.gauges("probe_success", "hook", probed)?;
    out.gauge("probe_age_seconds", state.datapath.last_probe.map_or(0.0, |it| it.elapsed().as_secs_f64()))
}

fn table_stats(stats: &TableStats, out: &mut MetricWriter<'_, '_>) -> fmt::Result {
    let TableStats {
        overflow,
        refused: culprits,
        affinity_inserts,
        affinity_capacity,
        ejected,
        ejections,
        peers,
    } = stats;
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

/// The metrics of the packet path.
fn packets(state: &AdminState, out: &mut MetricWriter<'_, '_>) -> fmt::Result {
    out.gauge("packet_path_failing", flag(state.datapath.packet_path_error.is_some()))?;
    let PacketAffinity { clients, unanswered, capacity, full_service_ports } = state.datapath.packet_affinity;
    let entries = [("answered", clients as f64), ("unanswered", unanswered as f64)];
    out.gauges("packet_affinity_entries", "state", entries)?;
    out.gauge("packet_affinity_capacity", capacity.into())?;
    out.gauge("packet_affinity_full_service_ports", full_service_ports as f64)?;
    out.gauge("kube_proxy_rules", flag(state.datapath.has_kube_proxy_rules))
}

fn flag(is_set: bool) -> f64 {
    u8::from(is_set).into()
}
