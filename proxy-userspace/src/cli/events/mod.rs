//! Kubernetes Events: health-check node ports that cannot be bound, and what is wrong with Services.
//!
//! Posted only with `--source kube`, by a task of its own; the log, the status and the metrics report the same with every
//! source.
//! May know: what is reported to `admin`, and the words and the rate of Events. Of the kernel it knows the reports alone; the API
//! server is known by the recorder of `source`.

mod services;

use std::{collections::BTreeMap, time::Duration};

use admin::{Admin, BindFailure};
use model::{Effect, ServiceName};
use pipeline::Pipeline;
use source::kube::{EventRecorder, ServiceEvent};
use tokio::{
    select,
    sync::mpsc,
    time::{Instant, MissedTickBehavior, interval},
};

use self::services::{Problems, ServiceEvents};

/// How many ports may wait to be reported; more are dropped.
const EVENT_QUEUE_DEPTH: usize = 64;
/// How often the problems of Services are looked at, as often as ejections are read.
const POLL_INTERVAL: Duration = Duration::from_secs(5);

/// Posts Events if the source is an API server: about the problems that `admin` knows, and about the ports that are sent. What
/// every node knows is posted if this is the brain of all nodes, or by the node with the first endpoint.
/// Must be called within a tokio runtime.
pub(super) fn start(
    admin: &Admin,
    pipeline: &Pipeline,
    is_of_all_nodes: bool,
) -> Option<mpsc::Sender<BindFailure>> {
    let recorder = pipeline.event_recorder()?;
    let (sender, failed) = mpsc::channel(EVENT_QUEUE_DEPTH);
    tokio::spawn(post(admin.clone(), is_of_all_nodes, recorder, failed, pipeline.node.clone()));
    Some(sender)
}

async fn post(
    admin: Admin,
    is_of_all_nodes: bool,
    mut recorder: EventRecorder,
    mut failed: mpsc::Receiver<BindFailure>,
    node: String,
) {
    let mut service_events = ServiceEvents::new(node.clone(), Instant::now());
    let mut poll = interval(POLL_INTERVAL);
    poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        select! {
            Some(it) = failed.recv() => recorder.post(unbound_port(&node, it)).await,
            now = poll.tick() => {
                let problems = problems(&admin, &node, is_of_all_nodes);
                for event in service_events.update(problems, |it| admin.serves(it), now) {
                    recorder.post(event).await;
                }
            }
        }
    }
}

/// Reason and note as kube-proxy writes them (`pkg/proxy/healthcheck/service_health.go`).
fn unbound_port(node: &str, BindFailure { service, port, reason }: BindFailure) -> ServiceEvent {
    ServiceEvent {
        note: format!("node {node} failed to start healthcheck \"{service}\" on port {port}: {reason}"),
        service,
        is_warning: true,
        reason: "FailedToStartServiceHealthcheck",
        action: "Listen",
        is_of_cluster: false,
    }
}

/// The problems that there are now, and that this process posts.
fn problems(admin: &Admin, node: &str, is_of_all_nodes: bool) -> BTreeMap<ServiceName, Problems> {
    let mut problems = BTreeMap::<_, Problems>::new();
    for it in admin.problems_of_services() {
        match &it.effect {
            Effect::AnnotationIgnored(service) if is_of_all_nodes || admin.has_first_endpoint(service) => {
                problems.entry(service.clone()).or_default().annotations.insert(it.to_string());
            }
            Effect::OverLimit { service, node: first }
                if is_of_all_nodes || first.as_deref() == Some(node) =>
            {
                problems.entry(service.clone()).or_default().over_limit = Some(it.reason.clone());
            }
            _ => {}
        }
    }
    for it in admin.ejected_endpoints() {
        let port = if it.port.is_empty() { String::new() } else { format!(" (port {})", it.port) };
        problems.entry(it.service).or_default().ejected.insert(format!("{}{port}", it.endpoint));
    }
    problems
}
