//! Health over time.

use std::sync::Arc;

use datapath::{ApplyReport, AttachStatus, HookBehavior, ProbeResult};
use model::{
    Rejected,
    state::{NodeInfo, NodeState},
};
use pipeline::{Observer as _, SyncStatus};
use publish::Publisher;
use reconciler::{Observer as _, Step};
use tokio::{task::JoinHandle, time::advance};

use super::*;
use crate::{
    admin::Admin,
    fixtures::{apply, attach_status, node, published, report, service},
};

const SECOND: Duration = Duration::from_secs(1);

fn live(admin: &Admin) -> Health {
    Health::live(&admin.state(), Moment::now())
}

fn eligible(admin: &Admin) -> Health {
    Health::eligible(&admin.state(), Moment::now())
}

fn ready(admin: &Admin) -> (bool, String) {
    readyz(&readiness(&admin.state(), Moment::now()))
}

/// The first problem; empty if the process is live.
fn problem(admin: &Admin) -> String {
    live(admin).problems.into_iter().next().unwrap_or_default()
}

fn probed(behavior: HookBehavior) -> [ProbeResult; 1] {
    [ProbeResult { hook: "connect4", behavior }]
}

fn body(health: &Health) -> serde_json::Value {
    serde_json::to_value(health).unwrap()
}

/// A process with an active state.
fn served() -> (Admin, Publisher) {
    let (admin, publisher) = node();
    apply(&admin, &publisher, [service("a", 1, None)]);
    admin.on_attach_checked(Ok(&attach_status(true)));
    (admin, publisher)
}

#[tokio::test(start_paused = true)]
async fn failed_probes_and_detached_programs_are_unhealthy_and_missed_processes_are_not_ready() {
    let (admin, _publisher) = served();
    for (behavior, is_healthy) in [
        (HookBehavior::Ok, true),
        (HookBehavior::Fails("not translated".into()), false),
        (HookBehavior::Unknown("no IPv4".into()), true),
    ] {
        admin.on_probed(&probed(behavior));
        assert_eq!(live(&admin).is_ok(), is_healthy);
        assert_eq!(ready(&admin).1.contains("[-]programs failed"), !is_healthy);
    }
    // At once.
    admin.on_attach_checked(Ok(&attach_status(false)));
    assert!(problem(&admin).contains("connect4"));
    admin.on_attach_checked(Ok(&attach_status(true)));
    assert!(live(&admin).is_ok());
    // A cgroup that misses processes.
    let nested = AttachStatus { unreached: Some("a nested cgroup".into()), ..attach_status(true) };
    admin.on_attach_checked(Ok(&nested));
    let (is_ready, response) = ready(&admin);
    assert!(!is_ready && response.contains("[-]programs failed: a nested cgroup"), "{response}");
    assert!(live(&admin).is_ok(), "a restart would not help");
    admin.on_attach_checked(Ok(&attach_status(true)));
    assert!(ready(&admin).0);
}

#[tokio::test(start_paused = true)]
async fn without_the_packet_path_a_node_is_live_and_not_eligible() {
    let (admin, _publisher) = served();
    let unavailable = Rejected::not_served("traffic", "no nftables");
    for unavailable in [Some(&unavailable), None] {
        admin.on_packet_path(unavailable);
        let health = eligible(&admin);
        assert_eq!(health.is_ok(), unavailable.is_none());
        assert_eq!(body(&health).to_string().contains("no nftables"), unavailable.is_some());
        assert!(live(&admin).is_ok() && ready(&admin).0);
    }
}

#[tokio::test(start_paused = true)]
async fn bodies_have_the_fields_of_kube_proxy_in_its_order() {
    let (admin, _publisher) = served();
    let text = serde_json::to_string(&eligible(&admin)).unwrap();
    let positions: Vec<_> = [
        "\"lastUpdated\":",
        "\"currentTime\":",
        "\"nodeEligible\":true",
        "\"healthy\":true",
        "\"status\":{\"IPv4\":{\"lastUpdated\":",
        "\"IPv6\":{",
    ]
    .iter()
    .map(|it| text.find(it).unwrap_or_else(|| panic!("{it} is not in {text}")))
    .collect();
    assert!(positions.is_sorted(), "{text}");
    let live = body(&live(&admin));
    assert_eq!(live.get("nodeEligible"), None);
    assert_eq!(live["lastUpdated"], live["currentTime"]);
    let time = live["currentTime"].as_str().unwrap();
    assert!(time.contains('T') && time.ends_with('Z'), "RFC 3339, UTC: {time}");
}

/// Whether load balancers may send to node n1 after its Node object was as in each of these states.
async fn eligibility(requires_node: bool, nodes: &[&[(&str, bool)]]) -> bool {
    let (admin, publisher) = served();
    if requires_node {
        admin.require_node();
    }
    for nodes in nodes {
        let info = |is_being_deleted| NodeInfo { is_being_deleted, ..NodeInfo::default() };
        let nodes = nodes.iter().map(|(name, is_being_deleted)| ((*name).into(), info(*is_being_deleted)));
        publisher.publish(NodeState { nodes: Arc::new(nodes.collect()), ..NodeState::default() });
        admin.on_dequeued(&publisher.current().unwrap());
        assert!(live(&admin).is_ok());
    }
    let health = eligible(&admin);
    assert_eq!(body(&health)["nodeEligible"], health.is_ok());
    health.is_ok()
}

#[tokio::test(start_paused = true)]
async fn a_node_that_never_existed_is_not_eligible_and_a_deleted_one_counts_as_it_was() {
    const THERE: &[(&str, bool)] = &[("n1", false)];
    const TAINTED: &[(&str, bool)] = &[("n1", true)];
    const OTHERS: &[(&str, bool)] = &[("n2", false)];
    for requires_node in [true, false] {
        assert!(eligibility(requires_node, &[OTHERS, THERE]).await);
        assert!(!eligibility(requires_node, &[OTHERS]).await);
        assert!(eligibility(requires_node, &[THERE, OTHERS, &[]]).await, "deleted");
        assert!(!eligibility(requires_node, &[THERE, TAINTED, &[]]).await, "deleted by the autoscaler");
    }
    // Only an API server is known to have the Nodes.
    assert!(!eligibility(true, &[&[]]).await);
    assert!(eligibility(false, &[&[]]).await);
}

#[tokio::test(start_paused = true)]
async fn a_change_that_is_pending_for_too_long_is_unhealthy_until_it_is_active() {
    let (admin, publisher) = served();
    let next = published(&publisher, [service("a", 2, None)]);
    admin.on_dequeued(&next);
    admin.on_failed(Step::Apply, "no room");
    advance(STALE_AFTER - SECOND).await;
    admin.on_attach_checked(Ok(&attach_status(true)));
    assert!(live(&admin).is_ok());
    advance(SECOND).await;
    let health = live(&admin);
    assert!(!health.is_ok());
    let json = body(&health);
    assert!(json["problems"][0].as_str().unwrap().contains("no room"), "{json}");
    assert_ne!(json["lastUpdated"], json["currentTime"]);
    assert_eq!(json["status"]["IPv6"]["healthy"], false);
    assert!(!eligible(&admin).is_ok());
    admin.on_dequeued(&next);
    admin.on_applied(&next, &report(), SECOND);
    admin.on_probed(&probed(HookBehavior::Ok));
    assert!(live(&admin).is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_node_is_healthy_during_the_setup_until_its_first_state_is_pending_for_too_long() {
    let (admin, publisher) = node();
    advance(STALE_AFTER * 10).await;
    let health = eligible(&admin);
    assert!(health.is_ok(), "{health:?}");
    assert_eq!(body(&health).get("status"), None);
    admin.on_dequeued(&published(&publisher, []));
    advance(STALE_AFTER).await;
    let health = live(&admin);
    assert!(!health.is_ok());
    assert_eq!(body(&health)["lastUpdated"], "0001-01-01T00:00:00Z", "Go's zero time");
}

/// Records what is published.
fn run(admin: &Admin, publisher: &Publisher) -> JoinHandle<()> {
    let (admin, states) = (admin.clone(), publisher.subscribe());
    tokio::spawn(async move { admin.run(states).await })
}

#[tokio::test(start_paused = true)]
async fn a_change_during_an_apply_is_pending_since_it_was_published() {
    let (admin, publisher) = served();
    let running = run(&admin, &publisher);
    let second = published(&publisher, [service("a", 2, None)]);
    tokio::task::yield_now().await;
    admin.on_dequeued(&second);
    advance(SECOND * 30).await;
    published(&publisher, [service("a", 3, None)]);
    tokio::task::yield_now().await;
    advance(SECOND * 5).await;
    let pending = || admin.state().pending_for(tokio::time::Instant::now());
    assert_eq!(pending(), Some(SECOND * 35));
    admin.on_applied(&second, &report(), SECOND * 35);
    assert_eq!(pending(), Some(SECOND * 5));
    running.abort();
}

/// Advances the time; attach checks still succeed.
async fn advance_attached(admin: &Admin, time: Duration) {
    advance(time).await;
    admin.on_attach_checked(Ok(&attach_status(true)));
}

#[tokio::test(start_paused = true)]
async fn a_prober_without_results_is_unhealthy() {
    let unknown = probed(HookBehavior::Unknown("no child".into()));
    let works = probed(HookBehavior::Ok);

    // It never reported.
    let (admin, _publisher) = served();
    advance_attached(&admin, STALE_AFTER - SECOND).await;
    assert_eq!(problem(&admin), "");
    advance_attached(&admin, SECOND).await;
    assert_eq!(problem(&admin), "the last conclusive probe was 60 s ago: the prober does not respond");
    assert!(ready(&admin).1.contains("[-]programs failed: the last conclusive probe"));

    // It hangs, and then reports that it cannot probe.
    admin.on_probed(&works);
    assert_eq!(problem(&admin), "");
    advance_attached(&admin, STALE_AFTER / 2).await;
    admin.on_probed(&unknown);
    advance_attached(&admin, STALE_AFTER / 2 - SECOND).await;
    assert_eq!(problem(&admin), "");
    advance_attached(&admin, SECOND).await;
    assert!(problem(&admin).contains("no child"), "{}", problem(&admin));
    admin.on_probed(&works);
    assert_eq!(problem(&admin), "");
}

#[tokio::test(start_paused = true)]
async fn where_hooks_can_never_be_probed_a_node_is_healthy_while_the_prober_reports() {
    let unknown = probed(HookBehavior::Unknown("no child".into()));
    let (admin, _publisher) = served();
    for _ in 0..10 {
        advance_attached(&admin, STALE_AFTER / 2).await;
        admin.on_probed(&unknown);
        assert!(live(&admin).is_ok());
    }
    advance_attached(&admin, STALE_AFTER).await;
    assert!(!live(&admin).is_ok(), "the prober no longer reports");
}

#[tokio::test(start_paused = true)]
async fn without_hooks_no_probe_is_expected() {
    let (admin, publisher) = node();
    apply(&admin, &publisher, []);
    let tables = AttachStatus { hooks: vec![], ..attach_status(true) };
    admin.on_attach_checked(Ok(&tables));
    advance(STALE_AFTER * 2).await;
    admin.on_attach_checked(Ok(&tables));
    assert!(live(&admin).is_ok());
}

#[tokio::test(start_paused = true)]
async fn applying_the_active_state_again_does_not_change_its_age() {
    let (admin, publisher) = served();
    let state = publisher.current().unwrap();
    let seen = |admin: &Admin| {
        let text = admin.metrics.text().unwrap();
        let syncs = text
            .lines()
            .find(|it| it.starts_with("kubeproxy_sync_proxy_rules_duration_seconds_count"))
            .unwrap();
        (admin.state().active.as_ref().unwrap().since.instant, syncs.to_owned())
    };
    let before = seen(&admin);
    advance(SECOND).await;
    admin.on_dequeued(&state);
    admin.on_applied(&state, &ApplyReport { flipped: false, ..report() }, SECOND);
    assert_eq!(seen(&admin), before);
    // With other addresses of the host it is translated differently.
    admin.on_applied(&state, &report(), SECOND);
    assert_eq!(seen(&admin).0, before.0);
    assert_ne!(seen(&admin).1, before.1);
    let next = published(&publisher, [service("a", 2, None)]);
    admin.on_applied(&next, &report(), SECOND);
    assert_ne!(seen(&admin).0, before.0);
}

#[tokio::test(start_paused = true)]
async fn an_attach_check_becomes_stale() {
    for has_error in [false, true] {
        let (admin, _publisher) = served();
        advance(STALE_AFTER - SECOND).await;
        if has_error {
            admin.on_attach_checked(Err("operation not permitted"));
        }
        assert!(live(&admin).is_ok());
        advance(SECOND).await;
        let reason = if has_error { "not permitted" } else { "the reconciler does not respond" };
        assert!(problem(&admin).contains(reason), "{}", problem(&admin));
    }
}

#[tokio::test(start_paused = true)]
async fn readiness_lists_the_failed_checks() {
    let (admin, publisher) = node();
    let text = || ready(&admin);
    admin.source("file", SyncStatus { error: Some("a.yaml: no such thing".into()), ..SyncStatus::default() });
    let (is_ready, response) = text();
    assert!(!is_ready);
    for it in [
        "[-]source-file failed: not synced yet: a.yaml",
        "[-]state failed",
        "[-]programs failed",
        "[+]changes ok",
    ] {
        assert!(response.contains(it), "{it} is not in {response}");
    }
    admin.source("file", SyncStatus { is_synced: true, ..SyncStatus::default() });
    let state = published(&publisher, []);
    admin.on_dequeued(&state);
    admin.on_failed(Step::Apply, "no room");
    assert!(text().1.contains("not active yet: apply failed: no room"));
    admin.on_applied(&state, &report(), SECOND);
    assert!(!text().0, "the programs are not attached");
    admin.on_attach_checked(Ok(&attach_status(true)));
    assert_eq!(
        text(),
        (true, "[+]source-file ok\n[+]state ok\n[+]programs ok\n[+]changes ok\nreadyz check passed\n".into())
    );
}

#[tokio::test(start_paused = true)]
async fn a_brain_is_ready_without_a_datapath() {
    let (admin, publisher) = (Admin::new("n1", Role::Brain), Publisher::new("n1"));
    assert!(!ready(&admin).0);
    publisher.publish(NodeState::default());
    let running = run(&admin, &publisher);
    tokio::task::yield_now().await;
    advance(STALE_AFTER * 2).await;
    assert!(ready(&admin).0);
    assert!(live(&admin).is_ok(), "its states are never pending");
    running.abort();
}
