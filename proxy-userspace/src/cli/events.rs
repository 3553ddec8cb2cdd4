//! Health-check node ports that cannot be had, as events beside their Services.
//!
//! The one rule: only who has an API server posts events; the log and the metrics say the same to everybody.

use admin::{FailedCheck, HealthChecks};
use source::kube::{Events, Warning};
use tokio::sync::mpsc;

use super::flags::{Facts, Source};

/// How many events may wait; more than that are not posted.
const ROOM: usize = 64;

/// Lets the health checks post an event for each port that cannot be had. Must be called within a tokio runtime.
pub(super) fn post(checks: HealthChecks, facts: &Facts, node: &str) -> HealthChecks {
    let Source::Kube = facts.source else { return checks };
    let mut events = Events::new(facts.api_server.access(), node);
    let (to, mut failed) = mpsc::channel(ROOM);
    let node = node.to_owned();
    // It ends with the health checks.
    tokio::spawn(async move {
        while let Some(it) = failed.recv().await {
            events.post(warning(&node, it)).await;
        }
    });
    checks.tell_of_failures(to)
}

/// In kube-proxy's words (its `pkg/proxy/healthcheck/service_health.go`).
fn warning(node: &str, FailedCheck { service, port, reason }: FailedCheck) -> Warning {
    let note = format!("node {node} failed to start healthcheck \"{service}\" on port {port}: {reason}");
    Warning { service, reason: "FailedToStartServiceHealthcheck", action: "Listen", note }
}
