//! The incremental brain compared with the pure function.

use std::collections::BTreeMap;

use model::{
    Timestamp,
    cluster::Node,
    services::Services,
    state::{EndpointKey, NodeState},
};
use proptest::{collection::vec, option, prelude::*, sample::select};

use super::{
    properties::{some_service, some_slice},
    *,
};
use crate::{Brain, frontend_owners, node_state};

const NODES: [&str; 3] = ["n1", "n2", "n3"];

#[derive(Clone, Debug)]
enum Step {
    Service(Box<Service>),
    DeleteService(ServiceName),
    Slice(Box<EndpointSlice>),
    DeleteSlice(SliceName),
    Node(Node),
    DeleteNode(&'static str),
    StartServing(&'static str),
    StopServing(&'static str),
}

fn some_name() -> impl Strategy<Value = ServiceName> {
    select(vec!["web", "api"]).prop_map(|it| ServiceName::new("ns", it))
}

fn some_step() -> impl Strategy<Value = Step> {
    let service = (some_service(), some_name(), 0..9_u8, option::of(0..3_i64), 0..3_usize).prop_map(
        |(it, name, kind, age, families)| {
            let proxy_name = (kind == 0).then(|| "mesh".to_owned());
            let kind = (kind != 1).then_some(ServiceKind::ClusterIp);
            let created = age.map(Timestamp::from_micros);
            let cluster_ips = it.cluster_ips[..families].to_vec();
            Step::Service(Box::new(Service { name, proxy_name, kind, created, cluster_ips, ..it }))
        },
    );
    let slice = (some_slice(), some_name(), 0..9_u8).prop_map(|(it, service, headless)| {
        Step::Slice(Box::new(EndpointSlice { service, headless: headless == 0, ..it }))
    });
    let slice_name =
        (0..9).prop_map(|it| SliceName { namespace: "ns".into(), name: format!("web-{it}").into() });
    let name = || select(NODES.to_vec());
    let zone = option::of(select(vec!["a", "b"]));
    prop_oneof![
        3 => service,
        1 => some_name().prop_map(Step::DeleteService),
        6 => slice,
        2 => slice_name.prop_map(Step::DeleteSlice),
        2 => (name(), zone, any::<bool>()).prop_map(|(name, zone, is_being_deleted)| {
            let mut node = node(name, zone);
            node.info.is_being_deleted = is_being_deleted;
            Step::Node(node)
        }),
        1 => name().prop_map(Step::DeleteNode),
        1 => name().prop_map(Step::StartServing),
        1 => name().prop_map(Step::StopServing),
    ]
}

fn apply(brain: &mut Brain, step: &Step) {
    match step.clone() {
        Step::Service(it) => brain.set_service(*it),
        Step::DeleteService(name) => brain.delete_service(&name),
        Step::Slice(it) => brain.set_slice(*it),
        Step::DeleteSlice(name) => brain.delete_slice(&name),
        Step::Node(it) => brain.set_node(it),
        Step::DeleteNode(name) => brain.delete_node(name),
        Step::StartServing(name) => brain.start_serving(name),
        Step::StopServing(name) => brain.stop_serving(name),
    }
}

fn states(brain: &Brain) -> BTreeMap<Arc<str>, NodeState> {
    brain.served_nodes().filter_map(|it| Some((Arc::clone(it), brain.state(it)?.clone()))).collect()
}

/// Recomputes, and checks that the states equal those of the pure function and that unchanged states stay the same
/// object.
fn recompute(brain: &mut Brain) -> Result<(), TestCaseError> {
    let before = states(brain);
    let changed = brain.recompute();
    let after = states(brain);
    for (name, state) in &after {
        prop_assert_eq!(state, &node_state(brain.cluster_state(), name, &Options::default()));
        let old = before.get(name);
        prop_assert_eq!(changed.contains(name), old != Some(state), "{}", name);
        prop_assert!(old.is_none_or(|old| old != state || old.services.ptr_eq(&state.services)));
    }
    prop_assert!(changed.iter().all(|it| after.contains_key(it)));
    let expect: Vec<_> = frontend_owners(brain.cluster_state(), &Options::default()).rejected().collect();
    prop_assert_eq!(brain.rejected().collect::<Vec<_>>(), expect);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn the_incremental_state_equals_the_pure_one(steps in vec((some_step(), any::<bool>()), 1..40)) {
        let mut brain = Brain::new(Options::default());
        brain.start_serving("n1");
        brain.start_serving("n2");
        for (step, recomputes) in &steps {
            apply(&mut brain, step);
            if *recomputes {
                recompute(&mut brain)?;
            }
        }
        recompute(&mut brain)?;
    }

    #[test]
    fn snapshots_and_single_changes_give_the_same_state(steps in vec((some_step(), any::<bool>()), 1..40)) {
        let [mut single, mut whole] = [0, 1].map(|_| Brain::new(Options::default()));
        for (step, recomputes) in &steps {
            apply(&mut single, step);
            if let Step::StartServing(_) | Step::StopServing(_) = step {
                apply(&mut whole, step);
            }
            if *recomputes {
                recompute(&mut single)?;
                whole.replace_cluster(Arc::clone(single.cluster_state()));
                recompute(&mut whole)?;
                prop_assert_eq!(states(&single), states(&whole));
            }
        }
    }
}

/// A brain that serves all nodes, and two Services: one with endpoints on n1 and n2, one with an endpoint on n2.
fn brain() -> Brain {
    let mut brain = Brain::new(Options::default());
    brain.set_service(service());
    brain.set_slice(slice([pod(here("10.1.0.1"), "p"), pod(at("10.1.0.2"), "q")]));
    let api = ServiceName::new("ns", "api");
    brain.set_service(Service { name: api.clone(), ..service() });
    let slice = slice_named("api-1", Family::V4, vec![pod(at("10.1.0.3"), "r")]);
    brain.set_slice(EndpointSlice { service: api, ..slice });
    NODES.iter().for_each(|it| brain.start_serving(it));
    brain.recompute();
    brain
}

fn services<'a>(brain: &'a Brain, node: &str) -> &'a Services {
    &brain.state(node).unwrap().services
}

fn of<'a>(brain: &'a Brain, node: &str, service: &str) -> &'a Arc<ServiceState> {
    services(brain, node).get(&ServiceName::new("ns", service)).unwrap()
}

#[test]
fn nodes_share_equal_services_and_endpoints() {
    let brain = brain();
    assert!(Arc::ptr_eq(of(&brain, "n1", "api"), of(&brain, "n3", "api")));
    let [near, far] = ["n1", "n3"].map(|it| of(&brain, it, "web"));
    assert_ne!(near, far);
    assert!(Arc::ptr_eq(&near.service, &far.service));
    let shared = |key: &str| {
        let of = |it: &ServiceState| {
            it.endpoints.iter().find(|it| it.key == EndpointKey::Pod(key.into())).cloned().unwrap()
        };
        Arc::ptr_eq(&of(near), &of(far))
    };
    assert_eq!((shared("p"), shared("q")), (false, true));
}

#[test]
fn nodes_with_a_shared_state_share_it_after_a_change() {
    let mut brain = brain();
    brain.start_serving("n4");
    assert_eq!(brain.recompute().len(), 1);
    assert!(services(&brain, "n3").ptr_eq(services(&brain, "n4")));
    brain.set_slice(slice([at("10.1.0.9")]));
    brain.recompute();
    assert!(services(&brain, "n3").ptr_eq(services(&brain, "n4")));
}

#[test]
fn a_change_that_affects_no_node_changes_no_state() {
    let mut brain = brain();
    brain.set_slice(slice([pod(here("10.1.0.1"), "p"), pod(at("10.1.0.2"), "q"), unready(at("10.1.0.4"))]));
    brain.set_node(node("n1", Some("a")));
    brain.set_node(Node { zone: Some("b".into()), ..node("n9", None) });
    brain.recompute();
    brain.set_node(node("n9", None));
    assert!(brain.recompute().is_empty());
}

#[test]
fn every_state_contains_every_node() {
    let mut brain = brain();
    let elsewhere =
        state::NodeInfo { addresses: vec!["192.0.2.9".parse().unwrap()], ..state::NodeInfo::default() };
    brain.set_node(Node { info: elsewhere.clone(), ..node("elsewhere", None) });
    assert_eq!(brain.recompute().len(), 3);
    let nodes = |brain: &Brain, name| brain.state(name).unwrap().nodes.clone();
    assert_eq!(nodes(&brain, "n1").get("elsewhere"), Some(&elsewhere));
    assert!(nodes(&brain, "n1").ptr_eq(&nodes(&brain, "n3")));
    brain.delete_node("elsewhere");
    assert_eq!(brain.recompute().len(), 3);
    assert_eq!(nodes(&brain, "n2").get("elsewhere"), None);
}

#[test]
fn the_trigger_time_alone_makes_no_new_state() {
    let mut brain = brain();
    let at_time = |micros, endpoints: &[Endpoint]| EndpointSlice {
        trigger_time: Some(Timestamp::from_micros(micros)),
        ..slice(endpoints)
    };
    let endpoints = [pod(here("10.1.0.1"), "p"), pod(at("10.1.0.2"), "q")];
    brain.set_slice(at_time(1, &endpoints));
    assert!(brain.recompute().is_empty());
    assert_eq!(of(&brain, "n1", "web").trigger_time, None);
    brain.set_slice(at_time(2, &endpoints[..1]));
    assert_eq!(brain.recompute().len(), 3);
    for node in NODES {
        assert_eq!(of(&brain, node, "web").trigger_time, Some(Timestamp::from_micros(2)));
    }
}

#[test]
fn only_affected_nodes_get_a_new_state() {
    let mut brain = brain();
    // Only one endpoint has a hint, so hints are ignored: no state changes.
    brain.set_slice(slice([pod(nodes(here("10.1.0.1"), &["n2"]), "p"), pod(at("10.1.0.2"), "q")]));
    assert!(brain.recompute().is_empty());
    // Now all endpoints have hints: n2 and n3 use their own endpoint, n1 has no hint.
    brain.set_slice(slice([
        pod(nodes(here("10.1.0.1"), &["n2"]), "p"),
        pod(nodes(at("10.1.0.2"), &["n3"]), "q"),
    ]));
    let changed: Vec<_> = brain.recompute().into_iter().collect();
    assert_eq!(changed, ["n2".into(), "n3".into()]);
}

#[test]
fn zone_hints_apply_once_the_zone_of_the_node_is_known() {
    let mut brain = brain();
    brain.set_slice(slice([zones(at("10.1.0.1"), &["a"]), zones(at("10.1.0.2"), &["b"])]));
    brain.set_node(node("n3", None));
    assert_eq!(brain.recompute().len(), 3);
    brain.set_node(node("n3", Some("b")));
    assert_eq!(brain.recompute().into_iter().collect::<Vec<_>>(), ["n3".into()]);
    assert_eq!(targets(of(&brain, "n3", "web"), 0, Scope::Internal), "2");
    brain.delete_node("n3");
    brain.recompute();
    assert!(Arc::ptr_eq(of(&brain, "n3", "web"), of(&brain, "n1", "web")));
}
