//! What the incremental brain shares. That it computes the same as the pure function, and reports exactly the nodes whose states
//! change, is tested with random histories, in `tests/properties.rs`.

use model::{
    Timestamp,
    cluster::{Object, ObjectName},
    state::{EndpointKey, ExternalForwarding, Pod, ServiceCidr, Services, SocketLb, TrafficPolicy},
};

use super::*;
use crate::Brain;

const NODES: [&str; 3] = ["n1", "n2", "n3"];

/// A brain that serves all nodes, and two Services: one with endpoints on n1 and n2, one with an endpoint on n2.
fn brain() -> Brain {
    let mut brain = Brain::new(Options::default());
    brain.cluster_mut().services.insert(service());
    brain.cluster_mut().set_slice(slice([pod(here("10.1.0.1"), "p"), pod(at("10.1.0.2"), "q")]));
    let api = ServiceName::new("ns", "api");
    brain.cluster_mut().services.insert(Service { name: api.clone(), ..service() });
    let slice = slice_named("api-1", Family::V4, vec![pod(at("10.1.0.3"), "r")]);
    brain.cluster_mut().set_slice(EndpointSlice { service: api, ..slice });
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

/// Whether two states share the endpoint of a pod.
fn share_endpoint(a: &ServiceState, b: &ServiceState, key: &str) -> bool {
    let of = |it: &ServiceState| {
        it.endpoints.iter().find(|it| it.key == EndpointKey::Pod(key.into())).cloned().unwrap()
    };
    Arc::ptr_eq(&of(a), &of(b))
}

#[test]
fn nodes_share_equal_services_and_endpoints() {
    let mut brain = brain();
    assert!(Arc::ptr_eq(of(&brain, "n1", "api"), of(&brain, "n3", "api")));
    let [near, far] = ["n1", "n3"].map(|it| of(&brain, it, "web"));
    assert_ne!(near, far);
    assert!(Arc::ptr_eq(&near.service, &far.service));
    assert!(!share_endpoint(near, far, "p") && share_endpoint(near, far, "q"));
    // What is new, too.
    brain.cluster_mut().set_slice(slice([pod(here("10.1.0.1"), "p"), pod(at("10.1.0.8"), "q")]));
    brain.recompute();
    let [near, far] = ["n1", "n3"].map(|it| of(&brain, it, "web"));
    assert!(!share_endpoint(near, far, "p") && share_endpoint(near, far, "q"));
}

#[test]
fn nodes_share_the_list_of_nodes_that_packets_are_forwarded_to() {
    let mut brain = brain();
    let mut service = Service { external_ips: vec!["192.0.2.1".parse().unwrap()], ..service() };
    service.load_balancing.external_forwarding = Some(ExternalForwarding::Dsr);
    brain.cluster_mut().services.insert(service);
    brain.start_serving("n4");
    // Of the whole Service, and of a change of an endpoint.
    for last in [2, 3] {
        brain.recompute();
        let forwarded = |node| of(&brain, node, "web").forwarded[0].clone();
        let [near, far, none] = ["n1", "n2", "n3"].map(forwarded);
        assert!(Arc::ptr_eq(&near.nodes, &none.nodes) && Arc::ptr_eq(&far.nodes, &none.nodes));
        assert!(none.nodes.iter().map(|it| (&*it.node, it.endpoints)).eq([("n1", 1), ("n2", 1)]));
        let target = |last| format!("10.1.0.{last}:8080").parse().unwrap();
        assert_eq!((&*near.targets, &*far.targets), (&[target(1)][..], &[target(last)][..]));
        assert!(none.targets.is_empty());
        assert!(services(&brain, "n3").ptr_eq(services(&brain, "n4")));
        brain.cluster_mut().set_slice(slice([pod(here("10.1.0.1"), "p"), pod(at("10.1.0.3"), "q")]));
    }
}

#[test]
fn the_trigger_time_alone_makes_no_new_state() {
    let mut brain = brain();
    let at_time = |micros, endpoints: &[Endpoint]| EndpointSlice {
        trigger_time: Some(Timestamp::from_micros(micros)),
        ..slice(endpoints)
    };
    let endpoints = [pod(here("10.1.0.1"), "p"), pod(at("10.1.0.2"), "q")];
    brain.cluster_mut().set_slice(at_time(1, &endpoints));
    assert!(brain.recompute().is_empty());
    assert_eq!(of(&brain, "n1", "web").trigger_time, None);
    brain.cluster_mut().set_slice(at_time(2, &endpoints[..1]));
    assert_eq!(brain.recompute().len(), 3);
    for node in NODES {
        assert_eq!(of(&brain, node, "web").trigger_time, Some(Timestamp::from_micros(2)));
    }
}

#[test]
fn nothing_is_local_at_a_node_that_no_endpoint_refers_to() {
    let mut brain = brain();
    brain.cluster_mut().services.insert(Service { internal_policy: TrafficPolicy::Local, ..service() });
    for name in [None, Some(""), Some("n2")] {
        let endpoint = Endpoint { node: name.map(Into::into), ..at("10.1.0.1") };
        brain.cluster_mut().set_slice(slice([endpoint]));
        brain.recompute();
        let mut targets = of(&brain, "n3", "web").targets(0, Family::V4, Scope::Internal);
        assert_eq!(targets.next(), None, "{name:?}");
    }
}

#[test]
fn a_new_node_shares_what_its_zone_has_and_what_all_zones_have_and_all_nodes_their_list() {
    let mut brain = brain();
    brain.cluster_mut().set_slice(slice([zones(at("10.1.0.1"), &["a"]), zones(at("10.1.0.2"), &["b"])]));
    NODES.iter().for_each(|it| drop(brain.cluster_mut().nodes.insert(node(it, Some("b")))));
    brain.cluster_mut().nodes.insert(node("n4", Some("b")));
    brain.cluster_mut().nodes.insert(node("n5", Some("a")));
    brain.recompute();
    brain.start_serving("n4");
    brain.recompute();
    assert!(services(&brain, "n4").ptr_eq(services(&brain, "n3")));
    let nodes = |name| &brain.state(name).unwrap().nodes;
    assert!(Arc::ptr_eq(nodes("n1"), nodes("n3")) && Arc::ptr_eq(nodes("n1"), brain.node_infos()));
    // No node is outside of the zones.
    brain.start_serving("n5");
    brain.recompute();
    assert_ne!(of(&brain, "n5", "web"), of(&brain, "n3", "web"));
    assert!(Arc::ptr_eq(of(&brain, "n5", "api"), of(&brain, "n3", "api")));
    // Without their Nodes both are outside.
    for it in ["n3", "n5"] {
        brain.cluster_mut().delete(&ObjectName::Node(it.into()));
        brain.recompute();
    }
    assert!(Arc::ptr_eq(of(&brain, "n5", "web"), of(&brain, "n3", "web")));
}

#[test]
fn the_services_of_a_zone_are_dropped_with_its_last_node() {
    let mut brain = brain();
    brain.cluster_mut().set_slice(slice([zones(at("10.1.0.1"), &["a"]), zones(at("10.1.0.2"), &["b"])]));
    brain.cluster_mut().nodes.insert(node("n3", Some("b")));
    brain.recompute();
    let of_zone = Arc::downgrade(of(&brain, "n3", "web"));
    assert!(of_zone.upgrade().is_some());
    brain.stop_serving("n3");
    brain.recompute();
    assert!(of_zone.upgrade().is_none());
}

#[test]
fn every_node_has_the_service_cidrs_and_the_pods() {
    let cidr = |range: &str| ServiceCidr { name: "c".into(), cidrs: vec![range.parse().unwrap()] };
    let pod = |uid: &str| Pod { name: "ns/p".into(), uid: uid.into(), socket_lb: SocketLb::Off };
    let check = |brain: &mut Brain, changed| {
        assert_eq!(brain.recompute().len(), changed);
        for node in brain.served_nodes() {
            let expect = crate::node_state(brain.cluster_state(), node, &Options::default());
            assert_eq!(brain.state(node), Some(&expect));
        }
    };
    for [object, other] in [
        ["10.96.0.0/16", "10.97.0.0/16"].map(|it| Object::ServiceCidr(cidr(it).into())),
        ["u", "v"].map(|it| Object::Pod(pod(it).into())),
    ] {
        let mut brain = brain();
        brain.cluster_mut().set(object.clone());
        check(&mut brain, NODES.len());
        brain.cluster_mut().set(object.clone());
        check(&mut brain, 0);
        brain.cluster_mut().set(other);
        check(&mut brain, NODES.len());
        brain.start_serving("n4");
        check(&mut brain, 1);
        let (name, mut cluster) = (object.name(), (**brain.cluster_state()).clone());
        cluster.set(object);
        brain.replace_cluster(cluster.clone().into());
        check(&mut brain, NODES.len() + 1);
        brain.cluster_mut().delete(&name);
        check(&mut brain, NODES.len() + 1);
        brain.replace_cluster(cluster.into());
        check(&mut brain, NODES.len() + 1);
    }
}

#[test]
fn a_change_does_not_wait_for_the_first_states_of_other_nodes() {
    let mut brain = brain();
    (0..100).for_each(|it| brain.start_serving(&format!("new-{it}")));
    brain.cluster_mut().set_slice(slice([at("10.1.0.9")]));
    let changed = brain.recompute_some(10);
    assert!(NODES.iter().all(|it| changed.contains(*it)));
    assert_eq!((changed.len(), brain.has_pending_nodes()), (NODES.len() + 10, true));
    let rest: usize = (0..9).map(|_| brain.recompute_some(10).len()).sum();
    assert_eq!((rest, brain.has_pending_nodes()), (90, false));
    // All were derived as if they had been the only ones.
    assert!((0..100).all(|it| services(&brain, &format!("new-{it}")).ptr_eq(services(&brain, "n3"))));
}
