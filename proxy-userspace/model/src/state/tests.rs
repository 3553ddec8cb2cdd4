//! What can be read from a state, and what states share.

use std::{num::NonZeroU16, sync::Arc};

use super::*;
use crate::{Family, Protocol, ServiceName, Timestamp};

fn number(port: u16) -> NonZeroU16 {
    NonZeroU16::new(port).unwrap()
}

fn endpoint(key: &str, v4: Option<&str>, v6: Option<&str>, ports: &[(u16, u16, Scopes)]) -> Endpoint {
    let port = |(index, port, scopes): &(u16, u16, Scopes)| EndpointPort {
        index: *index,
        port: number(*port),
        scopes: *scopes,
    };
    Endpoint {
        v4: v4.map(|it| it.parse().unwrap()),
        v6: v6.map(|it| it.parse().unwrap()),
        ports: ports.iter().map(port).collect(),
        ..Endpoint::new(EndpointKey::Pod(key.into()))
    }
}

const INTERNAL: Scopes = Scopes { internal: true, external: false, cluster: false };
const OUTSIDE: Scopes = Scopes { internal: false, external: true, cluster: true };

/// A Service with two ports and three endpoints.
fn state() -> ServiceState {
    let mut service = Service::new(ServiceName::new("ns", "web"));
    service.ports = [80, 81].map(|it| ServicePort::new(Protocol::Tcp, number(it))).into();
    let endpoints = [
        endpoint("a", Some("10.1.0.1"), Some("fd00::1"), &[(0, 8080, INTERNAL), (1, 8081, OUTSIDE)]),
        endpoint("b", Some("10.1.0.2"), None, &[(1, 8082, OUTSIDE)]),
        endpoint("c", None, Some("fd00::3"), &[(0, 8083, INTERNAL)]),
    ];
    ServiceState::new(service, endpoints)
}

#[test]
fn targets_are_those_of_a_port_a_family_and_a_scope() {
    let state = state();
    let of =
        |port, family, scope| state.targets(port, family, scope).map(|it| it.to_string()).collect::<Vec<_>>();
    assert_eq!(of(0, Family::V4, Scope::Internal), ["10.1.0.1:8080"]);
    assert_eq!(of(0, Family::V6, Scope::Internal), ["[fd00::1]:8080", "[fd00::3]:8083"]);
    for scope in [Scope::External, Scope::Cluster] {
        assert_eq!(of(1, Family::V4, scope), ["10.1.0.1:8081", "10.1.0.2:8082"]);
        assert_eq!(of(0, Family::V4, scope), [""; 0]);
    }
    assert_eq!(of(1, Family::V4, Scope::Internal), [""; 0]);
    assert_eq!(of(2, Family::V4, Scope::Internal), [""; 0]);
    assert!(Scopes::default().is_empty() && !INTERNAL.is_empty() && !OUTSIDE.is_empty());
}

#[test]
fn states_are_equal_whatever_led_to_them() {
    let same = ServiceState { trigger_time: Some(Timestamp::from_micros(1)), ..state() };
    assert_eq!(state(), same);
    let other = PortTarget { index: 0, target: "10.1.0.9:1".parse().unwrap() };
    for different in [
        ServiceState { other_serving: Arc::new([other]), ..state() },
        ServiceState { not_serving: Arc::new([other]), ..state() },
        ServiceState { endpoints: state().endpoints[1..].to_vec(), ..state() },
        ServiceState { service: Service::new(ServiceName::new("ns", "web")).into(), ..state() },
    ] {
        assert_ne!(state(), different);
    }
}

#[test]
fn what_is_equal_is_shared_and_the_rest_stays() {
    let before = state();
    let mut after = state();
    Arc::make_mut(&mut after.endpoints[1]).local = true;
    after.endpoints.insert(1, endpoint("aa", Some("10.1.0.9"), None, &[(0, 1, INTERNAL)]).into());
    let expect = after.clone();
    after.reuse_equal(&before);
    assert_eq!(after, expect);
    assert!(Arc::ptr_eq(&after.service, &before.service));
    assert!(Arc::ptr_eq(&after.other_serving, &before.other_serving));
    assert!(Arc::ptr_eq(&after.not_serving, &before.not_serving));
    let is_shared = |it: &&Arc<Endpoint>| before.endpoints.iter().any(|old| Arc::ptr_eq(old, it));
    let shared: Vec<_> = after.endpoints.iter().filter(is_shared).map(|it| &it.key).collect();
    assert_eq!(shared, [&before.endpoints[0].key, &before.endpoints[2].key]);

    let mut other = ServiceState {
        service: Service::new(ServiceName::new("ns", "other")).into(),
        other_serving: Arc::new([PortTarget { index: 0, target: "10.1.0.9:1".parse().unwrap() }]),
        ..state()
    };
    let expect = other.clone();
    other.reuse_equal(&before);
    assert_eq!(other, expect);
}

/// A node state with one node, one ServiceCIDR and one pod.
fn node_state(address: &str, range: &str) -> NodeState {
    let info = NodeInfo { addresses: vec![address.parse().unwrap()], ..NodeInfo::default() };
    let cidr = ServiceCidr { name: "c".into(), cidrs: vec![range.parse().unwrap()] };
    let pod = Pod { name: "ns/p".into(), uid: address.into(), socket_lb: SocketLb::Off };
    NodeState {
        services: [Arc::new(state())].into_iter().collect(),
        nodes: Arc::new([("n".into(), info)].into()),
        service_cidrs: Arc::new([("c".into(), Arc::new(cidr))].into()),
        pods: Arc::new([("ns/p".into(), Arc::new(pod))].into()),
    }
}

#[test]
fn node_states_share_what_is_equal() {
    let before = node_state("10.0.0.1", "10.96.0.0/12");
    let mut same = node_state("10.0.0.1", "10.96.0.0/12");
    assert!(!Arc::ptr_eq(&same.nodes, &before.nodes));
    same.reuse_equal(&before);
    assert!(Arc::ptr_eq(&same.nodes, &before.nodes) && same.services.ptr_eq(&before.services));
    assert!(Arc::ptr_eq(&same.service_cidrs, &before.service_cidrs));
    assert!(Arc::ptr_eq(&same.pods, &before.pods));
    assert_eq!(same.diff(&before).count(), 0);

    let mut other = node_state("10.0.0.2", "10.97.0.0/16");
    other.services.remove(&ServiceName::new("ns", "web"));
    let expect = other.clone();
    other.reuse_equal(&before);
    assert_eq!(other, expect);
    assert_eq!(other.nodes.keys().map(|it| &**it).collect::<Vec<_>>(), ["n"]);
    assert_eq!(other.diff(&before).count(), 1);
    Arc::make_mut(&mut other.nodes).clear();
    assert_eq!((other.nodes.len(), expect.nodes.len()), (0, 1), "a copy is not changed");
}

#[test]
fn a_memo_is_derived_once_and_is_no_part_of_the_state() {
    let state = state();
    assert!(state.memo.is_empty());
    assert_eq!(state.memo.get_or_init(|| 7_u8), Some(&7));
    assert_eq!(state.memo.get_or_init(|| 8_u8), Some(&7));
    assert_eq!(state.memo.get_or_init(|| "another type"), None);
    assert!(!state.memo.is_empty() && Memo::clone(&state.memo).is_empty());
}
