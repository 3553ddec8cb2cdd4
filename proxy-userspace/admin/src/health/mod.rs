//! The health of a node: the rules of `/healthz`, `/livez` and `/readyz`, and the node ports at which load balancers query it.
//!
//! Invariant: healthy means verified, by attach checks and probes, and is judged from the state alone. Rules and bodies are kube-proxy's
//! where it has them (its `pkg/proxy/healthcheck/proxy_health.go`, 1.34 and later).

mod node_ports;

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    time::{Duration, SystemTime},
};

use datapath::{AttachStatus, HookBehavior};
use jiff::Timestamp;
use serde::Serialize;

pub use self::node_ports::{BindFailure, HealthChecks};
use crate::state::{AdminState, Moment, Role};

/// Maximum age of a pending change, and of the last successful attach check and probe, of a healthy node. kube-proxy allows
/// twice its sync period, which is 30 seconds by default.
pub const STALE_AFTER: Duration = Duration::from_secs(60);

/// Until the first state, as the log says it.
pub(crate) const NO_STATE: &str = "no state received yet";

/// The body of `/healthz` and `/livez`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Health {
    last_updated: Timestamp,
    current_time: Timestamp,
    #[serde(skip_serializing_if = "Option::is_none")]
    node_eligible: Option<bool>,
    healthy: bool,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    status: BTreeMap<&'static str, FamilyHealth>,
    /// The reasons of `healthy: false`; kube-proxy has no such field.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) problems: Vec<String>,
}

#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct FamilyHealth {
    last_updated: Timestamp,
    healthy: bool,
}

impl Health {
    /// Whether the process works (`/livez`).
    pub(crate) fn live(state: &AdminState, now: Moment) -> Self {
        Self::of(problems(state, now), state, now)
    }

    fn of(problems: Vec<String>, state: &AdminState, now: Moment) -> Self {
        let healthy = problems.is_empty();
        let current_time = timestamp(now.wall);
        let active_since = state.active.as_ref().map(|it| timestamp(it.since.wall));
        // Both families are updated together.
        let status = active_since.into_iter().flat_map(|last_updated| {
            ["IPv4", "IPv6"].map(|family| (family, FamilyHealth { last_updated, healthy }))
        });
        // As in kube-proxy: the current time while the node is healthy, even without any change.
        let last_updated = if healthy { Some(current_time) } else { active_since };
        Self {
            last_updated: last_updated.unwrap_or(GO_ZERO_TIME),
            current_time,
            node_eligible: None,
            healthy,
            status: status.collect(),
            problems,
        }
    }

    /// Whether traffic from outside is served, too. With the socket path alone it is not, and a restart would not help.
    pub(crate) fn external(state: &AdminState, now: Moment) -> Self {
        let mut problems = problems(state, now);
        problems.extend(state.datapath.packet_path_error.as_ref().map(ToString::to_string));
        problems.extend(changed_tables(state));
        Self::of(problems, state, now)
    }

    /// Whether load balancers should send traffic to this node (`/healthz`).
    pub(crate) fn eligible(state: &AdminState, now: Moment) -> Self {
        Self { node_eligible: Some(state.is_node_eligible()), ..Self::external(state, now) }
    }

    /// Whether the status is 200, not 503.
    pub(crate) fn is_ok(&self) -> bool {
        self.healthy && self.node_eligible != Some(false)
    }
}

/// The problems of the datapath; none while it is being set up.
fn problems(state: &AdminState, now: Moment) -> Vec<String> {
    stale_change(state, now).into_iter().chain(unverified(state, now)).collect()
}

/// The change that has been pending for too long, with the reason.
fn stale_change(state: &AdminState, now: Moment) -> Option<String> {
    let age = state.pending_for(now.instant).filter(|it| *it >= STALE_AFTER)?;
    Some(format!("a change has been pending for {} s{}", age.as_secs(), failure_suffix(state)))
}

fn failure_suffix(state: &AdminState) -> String {
    let failure = state.failure.as_ref();
    failure.map_or_else(String::new, |it| format!(": {} failed: {}", it.step.name(), it.error))
}

/// The nftables tables that another program has changed.
fn changed_tables(state: &AdminState) -> Option<String> {
    let tables: Vec<_> = state.datapath.attach_status.iter().flat_map(AttachStatus::missing_tables).collect();
    let message = || format!("changed by another program: {}; restoring them", tables.join(", "));
    (!tables.is_empty()).then(message)
}

/// Why the programs cannot be assumed to be attached and to work.
fn unverified(state: &AdminState, now: Moment) -> Option<String> {
    let last_attached = state.datapath.last_attached?;
    if let Some(status) = &state.datapath.attach_status
        && !status.is_complete()
    {
        let missing: Vec<_> = status.missing().map(|it| it.name).collect();
        let cgroup = status.cgroup.display();
        return Some(format!("not attached to {cgroup}: {}; attaching them again", missing.join(", ")));
    }
    let failed =
        state.datapath.probe_results.iter().filter(|it| matches!(it.behavior, HookBehavior::Fails(_)));
    let failed: Vec<_> = failed.map(ToString::to_string).collect();
    if !failed.is_empty() {
        return Some(format!("probe failed: {}", failed.join("; ")));
    }
    let age = now.instant.duration_since(last_attached);
    if age >= STALE_AFTER {
        let reason =
            state.datapath.attach_check_error.as_deref().unwrap_or("the reconciler does not respond");
        return Some(format!("the last successful attach check was {} s ago: {reason}", age.as_secs()));
    }
    let age = now.instant.duration_since(state.datapath.last_probe?);
    let unknown =
        state.datapath.probe_results.iter().find(|it| matches!(it.behavior, HookBehavior::Unknown(_)));
    let reason = unknown.map_or_else(|| "the prober does not respond".to_owned(), ToString::to_string);
    (age >= STALE_AFTER).then(|| format!("the last conclusive probe was {} s ago: {reason}", age.as_secs()))
}

/// Why there is no state, and what serves meanwhile.
fn no_state(state: &AdminState) -> String {
    match &state.inherited {
        Some(it) => format!("{NO_STATE}; the kernel serves {} of the last state", it.serves),
        None => NO_STATE.into(),
    }
}

/// The checks of `/readyz` by name, each with its result.
pub(crate) fn readiness(state: &AdminState, now: Moment) -> Vec<(String, Result<(), String>)> {
    let mut checks = Vec::new();
    for (name, source) in &state.sources {
        let error = source.error.as_ref().map_or_else(String::new, |it| format!(": {it}"));
        let synced = if source.is_synced { Ok(()) } else { Err(format!("not synced yet{error}")) };
        checks.push((format!("source-{name}"), synced));
    }
    if state.role == Role::Brain {
        let published = state.published.as_ref().map(drop);
        checks.push(("state".into(), published.ok_or_else(|| NO_STATE.into())));
        return checks;
    }
    let active = match (&state.published, &state.active) {
        (_, Some(_)) => Ok(()),
        (None, None) => Err(no_state(state)),
        (Some(_), None) => Err(format!("the first state is not active yet{}", failure_suffix(state))),
    };
    checks.push(("state".into(), active));
    let programs = match &state.datapath.attach_status {
        Some(status) => {
            // A restart would not make more sockets reachable, so `/livez` ignores them.
            let problem = unverified(state, now).or_else(|| status.unreached.clone());
            // Without programs, the tables are the whole datapath.
            let problem = problem.or_else(|| changed_tables(state).filter(|_| status.hooks.is_empty()));
            problem.map_or(Ok(()), Err)
        }
        None => match &state.inherited {
            Some(it) => it.programs.clone(),
            None => Err("not attached yet".into()),
        },
    };
    checks.push(("programs".into(), programs));
    checks.push(("changes".into(), stale_change(state, now).map_or(Ok(()), Err)));
    checks
}

/// The body of `/readyz`, in the format of Kubernetes' own components, and whether all checks passed.
pub(crate) fn readyz(checks: &[(String, Result<(), String>)]) -> (bool, String) {
    let mut text = String::new();
    let mut ready = true;
    for (name, check) in checks {
        // Writing to a string cannot fail.
        let _ = match check {
            Ok(()) => writeln!(text, "[+]{name} ok"),
            Err(reason) => {
                ready = false;
                writeln!(text, "[-]{name} failed: {reason}")
            }
        };
    }
    text.push_str(if ready { "readyz check passed\n" } else { "readyz check failed\n" });
    (ready, text)
}

/// Go's zero time, 0001-01-01T00:00:00Z, which kube-proxy writes for "never".
const GO_ZERO_TIME: Timestamp = Timestamp::constant(-62_135_596_800, 0);

pub(crate) fn timestamp(time: SystemTime) -> Timestamp {
    Timestamp::try_from(time).unwrap_or(Timestamp::UNIX_EPOCH)
}

#[cfg(test)]
mod tests;
