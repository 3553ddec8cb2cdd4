//! Whether a node is well: the rules behind `/healthz`, `/livez` and `/readyz`.
//!
//! The one rule: well means proven. Rules and bodies are kube-proxy's where it has them (its
//! `pkg/proxy/healthcheck/proxy_health.go`, 1.34 and later), and what it takes on trust is looked at here.

use std::{collections::BTreeMap, fmt::Write as _, time::Duration};

use datapath::{AttachStatus, HookBehavior};
use jiff::Timestamp;
use serde::Serialize;

use crate::{
    Role,
    record::{Moment, Record},
};

/// How long a change may wait to be applied, and how old the proof of the data plane may be, before a node counts as not
/// well. kube-proxy allows twice its sync period, which is 30 seconds by default.
pub const LATE: Duration = Duration::from_secs(60);

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
    /// What is wrong; kube-proxy has no such field.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    problems: Vec<String>,
}

/// The health of one address family.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct FamilyHealth {
    last_updated: Timestamp,
    healthy: bool,
}

impl Health {
    /// Whether this process does what it should (`/livez`).
    pub(crate) fn live(record: &Record, now: Moment) -> Self {
        Self::of(problems(record, now), record, now)
    }

    fn of(problems: Vec<String>, record: &Record, now: Moment) -> Self {
        let healthy = problems.is_empty();
        let current_time = timestamp(now);
        let in_force = record.in_force.as_ref().map(|it| timestamp(it.since));
        // One plane serves both families, and both are updated at once.
        let status = in_force.into_iter().flat_map(|last_updated| {
            ["IPv4", "IPv6"].map(|family| (family, FamilyHealth { last_updated, healthy }))
        });
        // As kube-proxy has it: while all is well, "last updated" is now, even if nothing had to change.
        let last_updated = if healthy { Some(current_time) } else { in_force };
        Self {
            last_updated: last_updated.unwrap_or(GO_ZERO),
            current_time,
            node_eligible: None,
            healthy,
            status: status.collect(),
            problems,
        }
    }

    /// Whether traffic from outside is served here. Where sockets alone are it is not, which no restart would mend.
    pub(crate) fn serves_outside(record: &Record, now: Moment) -> Self {
        let mut problems = problems(record, now);
        problems.extend(record.lacking.as_ref().map(ToString::to_string));
        problems.extend(changed_tables(record));
        Self::of(problems, record, now)
    }

    /// Whether traffic from outside should be sent to this node (`/healthz`).
    pub(crate) fn eligible(record: &Record, now: Moment) -> Self {
        Self { node_eligible: Some(record.node_eligible()), ..Self::serves_outside(record, now) }
    }

    /// What is wrong.
    pub(crate) fn into_problems(self) -> Vec<String> {
        self.problems
    }

    /// Whether the answer is 200, not 503.
    pub(crate) fn is_ok(&self) -> bool {
        self.healthy && self.node_eligible != Some(false)
    }
}

/// What is wrong with the data plane; nothing while it is being set up.
fn problems(record: &Record, now: Moment) -> Vec<String> {
    let mut problems = Vec::new();
    if let Some(waiting) = record.waiting_for(now.instant)
        && waiting >= LATE
    {
        let why = record.failure.as_ref();
        let why = why.map_or_else(String::new, |it| format!(": {} failed: {}", it.doing.name(), it.error));
        problems.push(format!("a change has waited for {} s to be in force{why}", waiting.as_secs()));
    }
    problems.extend(unproven(record, now));
    problems
}

/// Which tables of nftables somebody has changed, if some are.
fn changed_tables(record: &Record) -> Option<String> {
    let tables: Vec<_> = record.hooks.iter().flat_map(AttachStatus::missing_tables).collect();
    let says = || format!("not as they were written: {}; it is tried to put them right", tables.join(", "));
    (!tables.is_empty()).then(says)
}

/// Why the programs cannot be taken to be in effect.
fn unproven(record: &Record, now: Moment) -> Option<String> {
    let proven = record.proven?;
    if let Some(hooks) = &record.hooks
        && !hooks.is_complete()
    {
        let missing: Vec<_> = hooks.missing().map(|it| it.name).collect();
        let cgroup = hooks.cgroup.display();
        return Some(format!(
            "not in effect on {cgroup}: {}; it is tried to put them back",
            missing.join(", ")
        ));
    }
    let fails = record.canary.iter().filter(|it| matches!(it.behavior, HookBehavior::Fails(_)));
    let fails: Vec<_> = fails.map(ToString::to_string).collect();
    if !fails.is_empty() {
        return Some(format!("the canary says: {}", fails.join("; ")));
    }
    let age = now.instant.duration_since(proven);
    let why = record.look_error.as_deref().unwrap_or("the backend hangs");
    if age >= LATE {
        return Some(format!("the programs were last seen in effect {} s ago: {why}", age.as_secs()));
    }
    let silent = now.instant.duration_since(record.sung?);
    let why = record.canary.iter().find(|it| matches!(it.behavior, HookBehavior::Unknown(_)));
    let why = why.map_or_else(|| "it hangs".to_owned(), ToString::to_string);
    (silent >= LATE)
        .then(|| format!("the canary has not told for {} s whether the hooks act: {why}", silent.as_secs()))
}

/// What `/readyz` asks for, each by name: fine, or what is missing.
pub(crate) fn readiness(record: &Record, now: Moment) -> Vec<(String, Result<(), String>)> {
    let mut checks = Vec::new();
    for (name, source) in &record.sources {
        let error = source.error.as_ref().map_or_else(String::new, |it| format!(": {it}"));
        let synced = if source.synced { Ok(()) } else { Err(format!("not read to the end yet{error}")) };
        checks.push((format!("source-{name}"), synced));
    }
    if record.role == Role::Brain {
        let published = record.published.as_ref().map(drop);
        checks.push(("state".into(), published.ok_or_else(|| "none is decided yet".into())));
        return checks;
    }
    let why = record.failure.as_ref();
    let why = why.map_or_else(String::new, |it| format!(": {} failed: {}", it.doing.name(), it.error));
    let state = match (&record.published, &record.in_force) {
        (_, Some(_)) => Ok(()),
        (None, None) => Err("there is none yet".into()),
        (Some(_), None) => Err(format!("the first one is not in force yet{why}")),
    };
    checks.push(("state".into(), state));
    let programs = match &record.hooks {
        // What no restart would mend is no matter of liveness.
        Some(hooks) => {
            let wrong = unproven(record, now).or_else(|| hooks.unreached.clone());
            // Where there are no programs, the tables are all there is.
            let wrong = wrong.or_else(|| changed_tables(record).filter(|_| hooks.hooks.is_empty()));
            wrong.map_or(Ok(()), Err)
        }
        None => Err("not attached yet".into()),
    };
    checks.push(("programs".into(), programs));
    let late = record.waiting_for(now.instant).filter(|it| *it >= LATE);
    let late = late.map(|it| format!("one has waited for {} s to be in force{why}", it.as_secs()));
    checks.push(("changes".into(), late.map_or(Ok(()), Err)));
    checks
}

/// The body of `/readyz`, in the form that Kubernetes' own components use, and whether all is fine.
pub(crate) fn readyz(record: &Record, now: Moment) -> (bool, String) {
    let mut text = String::new();
    let mut ready = true;
    for (name, check) in readiness(record, now) {
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

/// The beginning of the year 1, which is what Go writes for "never".
const GO_ZERO: Timestamp = Timestamp::constant(-62_135_596_800, 0);

fn timestamp(moment: Moment) -> Timestamp {
    Timestamp::try_from(moment.wall).unwrap_or(Timestamp::UNIX_EPOCH)
}

#[cfg(test)]
mod tests;
