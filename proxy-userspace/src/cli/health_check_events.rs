//! Kubernetes Events for health-check node ports that cannot be bound.
//!
//! Posted only with `--source kube`; the log and the metrics report the same with every source.

use admin::{BindFailure, HealthChecks};
use source::kube::{EventRecorder, WarningEvent};
use tokio::sync::mpsc;

use super::flags::{SourceArg, SourceFlags};

/// How many events may wait to be posted; more are dropped.
const EVENT_QUEUE_DEPTH: usize = 64;

/// Posts an Event for each port that the health checks cannot bind. Must be called within a tokio runtime.
pub(super) fn post(checks: HealthChecks, flags: &SourceFlags, node: &str) -> HealthChecks {
    let SourceArg::Kube = flags.source else { return checks };
    let mut recorder = EventRecorder::new(flags.options.client_config(), node);
    let (sender, mut failed) = mpsc::channel(EVENT_QUEUE_DEPTH);
    let node = node.to_owned();
    // The task ends with the health checks, which hold the sender.
    tokio::spawn(async move {
        while let Some(it) = failed.recv().await {
            recorder.post(warning(&node, it)).await;
        }
    });
    checks.report_failures(sender)
}

/// Reason and note as kube-proxy writes them (`pkg/proxy/healthcheck/service_health.go`).
fn warning(node: &str, BindFailure { service, port, reason }: BindFailure) -> WarningEvent {
    let note = format!("node {node} failed to start healthcheck \"{service}\" on port {port}: {reason}");
    WarningEvent { service, reason: "FailedToStartServiceHealthcheck", action: "Listen", note }
}
