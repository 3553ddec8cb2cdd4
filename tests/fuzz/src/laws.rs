//! What holds for every state that a node is given, wherever it comes from.

use std::collections::BTreeSet;

use model::{
    Family, Protocol, Rejected,
    state::{NodeState, Scope, ServiceState, TrafficPolicy},
};

const FAMILIES: [Family; 2] = [Family::V4, Family::V6];
const SCOPES: [Scope; 3] = [Scope::Internal, Scope::External, Scope::Cluster];

/// A state as the brain makes it.
pub fn state(state: &NodeState) {
    assert!(state.services.iter().is_sorted_by(|(a, _), (b, _)| a < b), "services are sorted by name");
    for (name, it) in &state.services {
        assert_eq!(*name, it.service.name, "a service is filed under its name");
        service_state(it);
        decided(it);
    }
}

/// The state of a Service, whoever has said it.
pub fn service_state(state: &ServiceState) {
    let service = &*state.service;
    let name = &service.name;
    let families: BTreeSet<_> = service.cluster_ips.iter().map(|it| Family::of(*it)).collect();
    assert!(!families.is_empty(), "{name} has a cluster IP");
    assert_eq!(families.len(), service.cluster_ips.len(), "{name} has one cluster IP of a family");
    let numbers: BTreeSet<_> = service.ports.iter().map(|it| (it.port, it.protocol)).collect();
    assert_eq!(numbers.len(), service.ports.len(), "the ports of {name} are different ones");
    assert!(state.endpoints.is_sorted_by(|a, b| a.key < b.key), "the endpoints of {name} are sorted");
    for it in &state.endpoints {
        let key = &it.key;
        assert!(it.v4.is_some() || it.v6.is_some(), "{name} {key:?} has an address");
        assert!(!it.ports.is_empty(), "{name} {key:?} serves something");
        assert!(it.ports.is_sorted_by(|a, b| a.index < b.index), "the ports of {name} {key:?} are sorted");
        for port in &it.ports {
            assert!(!port.scopes.is_empty(), "{name} {key:?} serves each of its ports for something");
            assert!(
                usize::from(port.index) < service.ports.len(),
                "{name} {key:?} serves a port that is there"
            );
        }
    }
    assert!(state.other_serving.is_sorted_by(|a, b| a < b), "what else serves {name} is sorted");
}

/// What the rules of Services say of it; another brain may have others.
fn decided(state: &ServiceState) {
    let service = &*state.service;
    let name = &service.name;
    let has = |family| service.cluster_ips.iter().any(|it| Family::of(*it) == family);
    let outside = || service.external_ips.iter().chain(&service.load_balancer_ips);
    assert!(outside().all(|it| has(Family::of(*it))), "{name} is served in the families of its cluster IPs");
    for (index, port) in service.ports.iter().enumerate() {
        for family in FAMILIES {
            for scope in SCOPES {
                let targets: BTreeSet<_> = state.targets(index, family, scope).collect();
                if targets.is_empty() {
                    continue;
                }
                assert!(*port.has_any_endpoint.of(family), "what {name} leads to in {family:?} is usable");
                assert!(has(family), "{name} leads nowhere in {family:?}, of which it has no cluster IP");
            }
        }
    }
    for it in state.endpoints.iter().filter(|it| !it.local) {
        for port in &it.ports {
            let keeps_in = service.internal_policy == TrafficPolicy::Local && port.scopes.internal;
            let keeps_out = service.external_policy == TrafficPolicy::Local && port.scopes.external;
            assert!(
                !keeps_in && !keeps_out,
                "{name} sends what is Local to {:?}, which is elsewhere",
                it.key
            );
        }
    }
    for it in state.other_serving.iter() {
        let index = usize::from(it.index);
        let port = service.ports.get(index).expect("what else serves a port serves one that is there");
        assert_ne!(port.protocol, Protocol::Tcp, "{name}: only flows without connections are left alone");
        let family = Family::of(it.target.ip());
        let is_chosen =
            SCOPES.iter().any(|scope| state.targets(index, family, *scope).any(|to| to == it.target));
        assert!(!is_chosen, "{name}: {} is chosen, and then it is not", it.target);
    }
}

/// Parts that were refused: each is named, and its reason is one line that a person can read.
pub fn rejected(rejected: &[Rejected]) {
    for it in rejected {
        assert!(!it.item.is_empty() && !it.reason.is_empty(), "{it:?} says what and why");
        line(&it.to_string());
    }
}

/// A message for people.
pub fn line(text: &str) {
    assert!(!text.chars().any(char::is_control), "one line: {text:?}");
    assert!(text.len() < 2_000, "{} bytes: {}…", text.len(), text.chars().take(200).collect::<String>());
}
