//! Metrics that are read from the state at each scrape.

use std::{fmt, sync::Arc};

use datapath::{AttachStatus, ProbeResult, TableFill};
use metrics::{MetricWriter, by_family, ip_family};
use model::{Family, Rejections};
use parking_lot::Mutex;
use prometheus_client::{collector::Collector, encoding::DescriptorEncoder};
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
        if state.role == Role::Brain {
            return Ok(());
        }
        kube_proxy(
            &state,
            &mut MetricWriter { prefix: "kubeproxy_sync_proxy_rules_", encoder: &mut encoder },
        )?;
        datapath(&state, &mut MetricWriter::own(&mut encoder))
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
    out.gauge("node_eligible", state.is_node_eligible().into())?;
    let sources = || state.sources.iter().map(|(name, it)| (&**name, it));
    out.gauges("source_synced", "source", sources().map(|(name, it)| (name, it.is_synced.into())))?;
    out.gauges("source_failing", "source", sources().map(|(name, it)| (name, it.error.is_some().into())))?;
    let contacts = sources().filter_map(|(name, it)| Some((name, seconds(it.last_contact?))));
    out.gauges("source_last_contact_timestamp_seconds", "source", contacts)
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

/// Of what is active in the kernel, and of what was reported of it.
fn datapath(state: &AdminState, out: &mut MetricWriter<'_, '_>) -> fmt::Result {
    let active = state.active.as_ref();
    out.gauge("active_revision", active.map_or(0, |it| it.published.rev) as f64)?;
    let pending = state.pending_for(Instant::now()).unwrap_or_default();
    out.gauge("pending_change_age_seconds", pending.as_secs_f64())?;
    TableFill::write(active.map(|it| &*it.tables).unwrap_or_default(), out)?;
    let it = &state.datapath;
    it.attach_status.as_ref().unwrap_or(&AttachStatus::default()).write(out)?;
    ProbeResult::write(&it.probe_results, out)?;
    out.gauge("probe_age_seconds", it.last_probe.map_or(0.0, |it| it.elapsed().as_secs_f64()))?;
    it.table_stats.write(out)?;
    out.gauge("packet_path_failing", it.packet_path_error.is_some().into())?;
    it.packet_affinity.write(out)?;
    out.gauge("kube_proxy_rules", it.has_kube_proxy_rules.into())
}
