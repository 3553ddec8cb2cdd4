//! Invariants of every node state, whatever its source.

use std::collections::BTreeSet;

use model::{
    Family, Protocol, Rejected,
    state::{NodeState, Scope, ServiceState, TrafficPolicy},
};

const FAMILIES: [Family; 2] = [Family::V4, Family::V6];
const SCOPES: [Scope; 3] = [Scope::Internal, Scope::External, Scope::Cluster];

/// Checks a state that the brain has computed.
pub fn state(state: &NodeState) {
    assert!(state.services.iter().is_sorted_by(|(a, _), (b, _)| a < b), "services are sorted by name");
    for (name, it) in &state.services {
        assert_eq!(*name, it.service.name, "the key of a service is its name");
        service_state(it);
        selection(it);
    }
}

/// Checks the state of a Service from any source.
pub fn service_state(state: &ServiceState) {
    let service = &*state.service;
    let name = &service.name;
    let families: BTreeSet<_> = service.cluster_ips.iter().map(|it| Family::of(*it)).collect();
    assert!(!families.is_empty(), "{name} has a cluster IP");
    assert_eq!(families.len(), service.cluster_ips.len(), "{name} has one cluster IP per family");
    let numbers: BTreeSet<_> = service.ports.iter().map(|it| (it.port, it.protocol)).collect();
    assert_eq!(numbers.len(), service.ports.len(), "the ports of {name} are distinct");
    assert!(state.endpoints.is_sorted_by(|a, b| a.key < b.key), "the endpoints of {name} are sorted");
    for it in &state.endpoints {
        let key = &it.key;
        assert!(it.v4.is_some() || it.v6.is_some(), "{name} {key:?} has an address");
        assert!(!it.ports.is_empty(), "{name} {key:?} has a port");
        assert!(it.ports.is_sorted_by(|a, b| a.index < b.index), "the ports of {name} {key:?} are sorted");
        for port in it.ports.iter() {
            assert!(!port.scopes.is_empty(), "each port of {name} {key:?} has a scope");
            assert!(
                usize::from(port.index) < service.ports.len(),
                "{name} {key:?} has only ports of the Service"
            );
        }
    }
    for targets in [&state.other_serving, &state.not_serving] {
        assert!(targets.is_sorted_by(|a, b| a < b), "the unselected targets of {name} are sorted");
    }
    let forwarded = &state.forwarded;
    assert!(
        forwarded.is_sorted_by(|a, b| (a.index, a.family) < (b.index, b.family)),
        "the forwarded ports of {name} are sorted"
    );
    for it in &**forwarded {
        assert!(usize::from(it.index) < service.ports.len(), "{name} forwards only ports of the Service");
        assert!(!it.nodes.is_empty(), "{name} forwards to a node");
        assert!(it.nodes.is_sorted_by(|a, b| a.node < b.node), "the nodes of {name} are sorted");
        assert!(it.nodes.iter().all(|it| it.endpoints > 0), "each node of {name} has an endpoint");
        assert!(it.targets.is_sorted_by(|a, b| a < b), "the targets of {name} are sorted");
        assert!(
            it.targets.iter().all(|to| Family::of(to.ip()) == it.family),
            "{name} has targets of a family"
        );
    }
}

/// Checks the rules of Services; another brain may have others.
fn selection(state: &ServiceState) {
    let service = &*state.service;
    let name = &service.name;
    let has = |family| service.cluster_ips.iter().any(|it| Family::of(*it) == family);
    let outside = || service.external_ips.iter().chain(&service.load_balancer_ips);
    assert!(
        outside().all(|it| has(Family::of(*it))),
        "{name} has external addresses only in the families of its cluster IPs"
    );
    for (index, port) in service.ports.iter().enumerate() {
        for family in FAMILIES {
            for scope in SCOPES {
                let targets: BTreeSet<_> = state.targets(index, family, scope).collect();
                if targets.is_empty() {
                    continue;
                }
                assert!(
                    *port.has_any_endpoint.of(family),
                    "{name} with targets in {family:?} has an endpoint there"
                );
                assert!(has(family), "{name} has no targets in {family:?}, in which it has no cluster IP");
            }
        }
    }
    for it in state.endpoints.iter().filter(|it| !it.local) {
        for port in it.ports.iter() {
            let is_internal_local = service.internal_policy == TrafficPolicy::Local && port.scopes.internal;
            let is_external_local = service.external_policy == TrafficPolicy::Local && port.scopes.external;
            assert!(
                !is_internal_local && !is_external_local,
                "{name} has the policy Local and the remote endpoint {:?}",
                it.key
            );
        }
    }
    for it in &*state.forwarded {
        let (index, family) = (usize::from(it.index), it.family);
        let port = &service.ports[index];
        assert!(service.has_external_ip(port, family), "{name} forwards only at external addresses");
        assert!(port.protocol != Protocol::Sctp, "{name} forwards no SCTP");
        assert_eq!(service.external_policy, TrafficPolicy::Cluster, "{name} forwards only under this policy");
        let count: u32 = it.nodes.iter().map(|it| it.endpoints).sum();
        let selected = state.targets(index, family, Scope::Cluster).count();
        assert_eq!(usize::try_from(count), Ok(selected), "{name} forwards to the nodes of its endpoints");
    }
    let others = state.other_serving.iter().map(|it| (it, true));
    for (it, serves) in others.chain(state.not_serving.iter().map(|it| (it, false))) {
        let index = usize::from(it.index);
        let port = service.ports.get(index).expect("an unselected target has a port of the Service");
        let is_listed = match serves {
            true => port.protocol != Protocol::Tcp || service.load_balancing.drain.is_some(),
            false => port.protocol == Protocol::Udp,
        };
        assert!(is_listed, "{name}: a port of {} has the unselected target {}", port.protocol, it.target);
        let family = Family::of(it.target.ip());
        let is_selected =
            SCOPES.iter().any(|scope| state.targets(index, family, *scope).any(|to| to == it.target));
        assert!(!is_selected, "{name}: {} is both selected and unselected", it.target);
    }
}

/// Checks rejected items: each has a name, and a reason of one line.
pub fn rejected(rejected: &[Rejected]) {
    for it in rejected {
        assert!(!it.item.is_empty() && !it.reason.is_empty(), "{it:?} has an item and a reason");
        line(&it.to_string());
    }
}

/// Checks a message for users.
pub fn line(text: &str) {
    assert!(!text.chars().any(char::is_control), "one line: {text:?}");
    assert!(text.len() < 2_000, "{} bytes: {}…", text.len(), text.chars().take(200).collect::<String>());
}
