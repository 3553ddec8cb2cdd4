//! The rules of health, over time.

use std::sync::Arc;

use datapath::{ApplyReport, AttachStatus, HookBehavior, ProbeResult};
use model::{
    Rejected,
    state::{NodeInfo, NodeState},
};
use publish::Publisher;
use reconciler::{Observer as _, Step};
use tokio::time::advance;

use super::*;
use crate::{
    Admin, Source,
    sample::{hooks, published, report, service},
};

const SECOND: Duration = Duration::from_secs(1);

fn live(admin: &Admin) -> Health {
    Health::live(&admin.record(), Moment::now())
}

fn eligible(admin: &Admin) -> Health {
    Health::eligible(&admin.record(), Moment::now())
}

fn body(health: &Health) -> serde_json::Value {
    serde_json::to_value(health).unwrap()
}

/// One with a state in force.
fn served() -> (Admin, Publisher) {
    let (admin, publisher) = (Admin::new("n1", Role::Backend), Publisher::new("n1"));
    let state = published(&publisher, [service("a", 1, None)]);
    admin.on_dequeued(&state);
    admin.on_applied(&state, &report(), SECOND);
    admin.on_attach_checked(Ok(&hooks(true)));
    (admin, publisher)
}

#[tokio::test(start_paused = true)]
async fn a_hook_that_does_not_act_is_not_well() {
    let (admin, _publisher) = served();
    let heard = |answer| [ProbeResult { hook: "connect4", behavior: answer }];
    for (answer, is_well) in [
        (HookBehavior::Ok, true),
        (HookBehavior::Fails("it went past".into()), false),
        (HookBehavior::Unknown("no IPv4".into()), true),
    ] {
        admin.on_probed(&heard(answer));
        assert_eq!(live(&admin).is_ok(), is_well);
        assert_eq!(readyz(&admin.record(), Moment::now()).1.contains("[-]programs failed"), !is_well);
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_that_serves_sockets_alone_lives_and_gets_nothing_from_outside() {
    let (admin, _publisher) = served();
    let lacking = Rejected { item: "traffic".into(), reason: "no nftables".into() };
    for lacking in [Some(&lacking), None] {
        admin.on_packet_path(lacking);
        let health = eligible(&admin);
        assert_eq!(health.is_ok(), lacking.is_none());
        assert_eq!(body(&health).to_string().contains("no nftables"), lacking.is_some());
        assert!(live(&admin).is_ok() && readyz(&admin.record(), Moment::now()).0);
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

#[tokio::test(start_paused = true)]
async fn a_node_is_well_while_it_is_being_set_up() {
    let admin = Admin::new("n1", Role::Backend);
    advance(LATE * 10).await;
    let health = eligible(&admin);
    assert!(health.is_ok(), "{health:?}");
    assert_eq!(body(&health).get("status"), None);
}

#[tokio::test(start_paused = true)]
async fn a_change_that_waits_too_long_makes_a_node_unwell_until_it_is_in_force() {
    let (admin, publisher) = served();
    let next = published(&publisher, [service("a", 2, None)]);
    admin.on_dequeued(&next);
    admin.on_failed(Step::Apply, "no room");
    advance(LATE - SECOND).await;
    admin.on_attach_checked(Ok(&hooks(true)));
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
    admin.on_probed(&[ProbeResult { hook: "connect4", behavior: HookBehavior::Ok }]);
    assert!(live(&admin).is_ok());
}

#[tokio::test(start_paused = true)]
async fn the_first_state_must_not_wait_too_long_either() {
    let (admin, publisher) = (Admin::new("n1", Role::Backend), Publisher::new("n1"));
    admin.on_dequeued(&published(&publisher, []));
    advance(LATE).await;
    let health = live(&admin);
    assert!(!health.is_ok());
    assert_eq!(body(&health)["lastUpdated"], "0001-01-01T00:00:00Z", "what Go writes for never");
}

#[tokio::test(start_paused = true)]
async fn a_change_that_came_during_another_waits_since_it_came() {
    let (admin, publisher) = served();
    let follow = |admin: &Admin| {
        let admin = admin.clone();
        let states = publisher.subscribe();
        tokio::spawn(async move { admin.follow(states).await })
    };
    let following = follow(&admin);
    let second = published(&publisher, [service("a", 2, None)]);
    tokio::task::yield_now().await;
    admin.on_dequeued(&second);
    advance(SECOND * 30).await;
    published(&publisher, [service("a", 3, None)]);
    tokio::task::yield_now().await;
    advance(SECOND * 5).await;
    let waiting = || admin.record().waiting_for(tokio::time::Instant::now());
    assert_eq!(waiting(), Some(SECOND * 35));
    admin.on_applied(&second, &report(), SECOND * 35);
    assert_eq!(waiting(), Some(SECOND * 5));
    following.abort();
}

#[tokio::test(start_paused = true)]
async fn programs_that_were_taken_off_make_a_node_unwell_at_once() {
    let (admin, _publisher) = served();
    admin.on_attach_checked(Ok(&hooks(false)));
    let health = live(&admin);
    assert!(!health.is_ok());
    assert!(body(&health)["problems"][0].as_str().unwrap().contains("connect4"));
    admin.on_attach_checked(Ok(&hooks(true)));
    assert!(live(&admin).is_ok());
}

/// Time passes, and the kernel goes on saying that all programs are in effect.
async fn pass(admin: &Admin, time: Duration) {
    advance(time).await;
    admin.on_attach_checked(Ok(&hooks(true)));
}

#[tokio::test(start_paused = true)]
async fn a_canary_that_falls_silent_is_not_well() {
    let untold = [ProbeResult { hook: "connect4", behavior: HookBehavior::Unknown("no child".into()) }];
    let acts = [ProbeResult { hook: "connect4", behavior: HookBehavior::Ok }];
    let problem = |admin: &Admin| body(&live(admin))["problems"][0].as_str().unwrap_or_default().to_owned();

    // It was never heard of.
    let (admin, _publisher) = served();
    pass(&admin, LATE - SECOND).await;
    assert_eq!(problem(&admin), "");
    pass(&admin, SECOND).await;
    assert!(
        problem(&admin).contains("the canary has not told for 60 s") && problem(&admin).contains("hangs")
    );
    assert!(readyz(&admin.record(), Moment::now()).1.contains("[-]programs failed: the canary"));

    // It hangs, and then cannot sing.
    admin.on_probed(&acts);
    assert_eq!(problem(&admin), "");
    pass(&admin, LATE / 2).await;
    admin.on_probed(&untold);
    pass(&admin, LATE / 2 - SECOND).await;
    assert_eq!(problem(&admin), "");
    pass(&admin, SECOND).await;
    assert!(problem(&admin).contains("no child"), "{}", problem(&admin));
    admin.on_probed(&acts);
    assert_eq!(problem(&admin), "");
}

#[tokio::test(start_paused = true)]
async fn where_hooks_can_never_be_tried_a_node_is_well_while_that_is_said() {
    let untold = [ProbeResult { hook: "connect4", behavior: HookBehavior::Unknown("no child".into()) }];
    let (admin, _publisher) = served();
    for _ in 0..10 {
        pass(&admin, LATE / 2).await;
        admin.on_probed(&untold);
        assert!(live(&admin).is_ok());
    }
    pass(&admin, LATE).await;
    assert!(!live(&admin).is_ok(), "nothing is said any more");
}

#[tokio::test(start_paused = true)]
async fn without_hooks_no_canary_is_waited_for() {
    let (admin, publisher) = (Admin::new("n1", Role::Backend), Publisher::new("n1"));
    let state = published(&publisher, []);
    admin.on_dequeued(&state);
    admin.on_applied(&state, &report(), SECOND);
    let tables = AttachStatus { hooks: vec![], ..hooks(true) };
    admin.on_attach_checked(Ok(&tables));
    advance(LATE * 2).await;
    admin.on_attach_checked(Ok(&tables));
    assert!(live(&admin).is_ok());
}

#[tokio::test(start_paused = true)]
async fn the_same_state_once_more_is_as_old_as_before() {
    let (admin, publisher) = served();
    let state = publisher.current().unwrap();
    let seen = |admin: &Admin| {
        let text = admin.metrics.text().unwrap();
        let syncs = text
            .lines()
            .find(|it| it.starts_with("kubeproxy_sync_proxy_rules_duration_seconds_count"))
            .unwrap();
        (admin.record().in_force.as_ref().unwrap().since.instant, syncs.to_owned())
    };
    let before = seen(&admin);
    advance(SECOND).await;
    admin.on_dequeued(&state);
    admin.on_applied(&state, &ApplyReport { flipped: false, ..report() }, SECOND);
    assert_eq!(seen(&admin), before);
    // At other addresses of the host it leads elsewhere.
    admin.on_applied(&state, &report(), SECOND);
    assert_eq!(seen(&admin).0, before.0);
    assert_ne!(seen(&admin).1, before.1);
    let next = published(&publisher, [service("a", 2, None)]);
    admin.on_applied(&next, &report(), SECOND);
    assert_ne!(seen(&admin).0, before.0);
}

#[tokio::test(start_paused = true)]
async fn a_cgroup_that_leaves_processes_out_is_not_ready_and_alive() {
    let (admin, _publisher) = served();
    let nested = AttachStatus { unreached: Some("a nested cgroup".into()), ..hooks(true) };
    admin.on_attach_checked(Ok(&nested));
    let (ready, says) = readyz(&admin.record(), Moment::now());
    assert!(!ready && says.contains("[-]programs failed: a nested cgroup"), "{says}");
    assert!(live(&admin).is_ok(), "no restart would mend it");
    admin.on_attach_checked(Ok(&hooks(true)));
    assert!(readyz(&admin.record(), Moment::now()).0);
}

#[tokio::test(start_paused = true)]
async fn a_proof_grows_old() {
    for looks in [false, true] {
        let (admin, _publisher) = served();
        advance(LATE - SECOND).await;
        if looks {
            admin.on_attach_checked(Err("operation not permitted"));
        }
        assert!(live(&admin).is_ok());
        advance(SECOND).await;
        let health = live(&admin);
        assert!(!health.is_ok());
        let why = if looks { "not permitted" } else { "hangs" };
        assert!(body(&health)["problems"][0].as_str().unwrap().contains(why), "{health:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_that_leaves_or_is_gone_is_not_eligible_and_still_alive() {
    let (admin, publisher) = served();
    let publish = |nodes: &[(&str, bool)]| {
        let node = |leaving: &bool| NodeInfo { is_being_deleted: *leaving, ..NodeInfo::default() };
        let nodes = nodes.iter().map(|(name, leaving)| (Arc::from(*name), node(leaving))).collect();
        publisher.publish(NodeState { nodes, ..NodeState::default() });
        admin.on_dequeued(&publisher.current().unwrap());
        assert!(live(&admin).is_ok());
        eligible(&admin).is_ok()
    };
    // It is served though nobody knows it.
    assert!(publish(&[("n2", true)]));
    assert!(publish(&[("n1", false), ("n2", true)]));
    assert!(!publish(&[("n1", true)]));
    assert!(publish(&[("n1", false)]));
    assert!(!publish(&[("n2", false)]));
}

#[tokio::test(start_paused = true)]
async fn readiness_names_what_is_missing() {
    let (admin, publisher) = (Admin::new("n1", Role::Backend), Publisher::new("n1"));
    let text = || readyz(&admin.record(), Moment::now());
    admin.source("file", Source { error: Some("a.yaml: no such thing".into()), ..Source::default() });
    let (ready, says) = text();
    assert!(!ready);
    for it in [
        "[-]source-file failed: not read to the end yet: a.yaml",
        "[-]state failed",
        "[-]programs failed",
        "[+]changes ok",
    ] {
        assert!(says.contains(it), "{it} is not in {says}");
    }
    admin.source("file", Source { synced: true, ..Source::default() });
    let state = published(&publisher, []);
    admin.on_dequeued(&state);
    admin.on_failed(Step::Apply, "no room");
    assert!(text().1.contains("not in force yet: apply failed: no room"));
    admin.on_applied(&state, &report(), SECOND);
    assert!(!text().0, "the programs are not attached");
    admin.on_attach_checked(Ok(&hooks(true)));
    assert_eq!(
        text(),
        (true, "[+]source-file ok\n[+]state ok\n[+]programs ok\n[+]changes ok\nreadyz check passed\n".into())
    );
}

#[tokio::test(start_paused = true)]
async fn who_only_decides_needs_no_kernel_to_be_ready() {
    let (admin, publisher) = (Admin::new("n1", Role::Brain), Publisher::new("n1"));
    assert!(!readyz(&admin.record(), Moment::now()).0);
    publisher.publish(NodeState::default());
    let following = tokio::spawn({
        let (admin, states) = (admin.clone(), publisher.subscribe());
        async move { admin.follow(states).await }
    });
    tokio::task::yield_now().await;
    advance(LATE * 2).await;
    assert!(readyz(&admin.record(), Moment::now()).0);
    assert!(live(&admin).is_ok(), "what is decided is not waited for");
    following.abort();
}
