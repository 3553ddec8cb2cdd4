//! Every scenario against the brain: the Services that it serves, as `tests/scenarios/README.md` describes them.

use std::net::{IpAddr, SocketAddr};

use fuzz::{explanations, invariants};
use model::{
    Family,
    state::{Algorithm, ExternalForwarding, LoadBalancing, Scope, ServiceState, TrafficPolicy},
};
use serde_json::{Map, Value, json};

const FAMILIES: [Family; 2] = [Family::V4, Family::V6];

#[test]
fn each_leads_to_the_expected_state() {
    let mut count = 0;
    for scenario in scenarios::all() {
        for step in &scenario.steps {
            let Some(mut expected) = step.expect.clone() else { continue };
            sort_sets(&mut expected);
            let state = scenario.node_state(step);
            let mut found = Value::Object(state.services.values().map(|it| description(it)).collect());
            sort_sets(&mut found);
            assert_eq!(found, expected, "{} ({}): found {found:#}", scenario.name, step.about);
            invariants::state(&state);
            count += 1;
        }
    }
    assert!(count >= 57, "no scenario is skipped unnoticed: {count}");
}

#[test]
fn each_is_explained_as_it_is_decided() {
    let mut count = 0;
    for scenario in scenarios::all() {
        for step in &scenario.steps {
            let state = scenario.node_state(step);
            count += explanations::check(&step.cluster(), &scenario.options(), &scenario.node, &state);
        }
    }
    assert!(count > 300, "{count} explanations");
}

/// Sorts all lists but those of a Service's addresses, whose order matters.
fn sort_sets(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.iter_mut().filter(|(name, _)| !name.ends_with("IPs")).for_each(|it| sort_sets(it.1));
        }
        Value::Array(items) => items.sort_by_key(ToString::to_string),
        _ => {}
    }
}

fn texts<T: ToString>(items: impl IntoIterator<Item = T>) -> Value {
    items.into_iter().map(|it| it.to_string()).collect()
}

fn without_empty(fields: Value) -> Value {
    let is_empty = |it: &Value| match it {
        Value::Null => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    };
    let Value::Object(fields) = fields else { return fields };
    fields.into_iter().filter(|(_, it)| !is_empty(it)).collect()
}

fn description(state: &ServiceState) -> (String, Value) {
    let service = &state.service;
    let source_ranges = service.load_balancer_ips.iter().filter_map(|ip| {
        let ranges = service.source_ranges.iter().filter(|it| Family::of(it.addr()) == Family::of(*ip));
        let ranges = texts(ranges);
        (ranges != json!([])).then(|| (ip.to_string(), ranges))
    });
    let pairs = state.endpoints.iter().filter_map(|it| Some(texts([IpAddr::from(it.v4?), it.v6?.into()])));
    let ports = (0..service.ports.len()).map(|index| {
        let port = &service.ports[index];
        (format!("{}/{}", port.port, port.protocol), port_description(state, index))
    });
    let description = without_empty(json!({
        "clusterIPs": texts(&service.cluster_ips),
        "externalIPs": texts(&service.external_ips),
        "loadBalancerIPs": texts(&service.load_balancer_ips),
        "healthCheckNodePort": service.health_check_node_port,
        "sessionAffinitySeconds": service.affinity.map(|it| it.timeout_seconds),
        "loadBalancing": load_balancing(service.load_balancing),
        "sourceRanges": source_ranges.collect::<Map<_, _>>(),
        "sameEndpoint": pairs.collect::<Value>(),
        "ports": ports.collect::<Map<_, _>>(),
    }));
    (service.name.to_string(), description)
}

fn load_balancing(it: LoadBalancing) -> Value {
    let health = it.passive_health;
    without_empty(json!({
        "leastConnections": (it.algorithm == Algorithm::LeastConnections).then_some(true),
        "passiveHealth": health.enabled,
        "failures": health.failures,
        "maxEjectedPercent": health.max_ejected_percent,
        "slowStartSeconds": it.slow_start,
        "drainSeconds": it.drain,
        "udpToPackets": it.udp_to_packets.then_some(true),
        "dsr": it.external_forwarding.map(|it| it == ExternalForwarding::Dsr),
    }))
}

fn port_description(state: &ServiceState, index: usize) -> Value {
    let (service, port) = (&state.service, &state.service.ports[index]);
    let targets = |scope| -> Vec<SocketAddr> {
        FAMILIES.into_iter().flat_map(|family| state.targets(index, family, scope)).collect()
    };
    let (internal, external, short_circuit) =
        (targets(Scope::Internal), targets(Scope::External), targets(Scope::Cluster));
    let is_external =
        port.node_port.is_some() || !service.external_ips.is_empty() || !service.load_balancer_ips.is_empty();
    assert!(is_external || external.len() + short_circuit.len() == 0, "{}", service.name);

    // The Cluster and Local sets, derived from the scopes.
    let internal_local = service.internal_policy == TrafficPolicy::Local;
    let external_local = service.external_policy == TrafficPolicy::Local && is_external;
    let cluster = if internal_local { is_external.then_some(&short_circuit) } else { Some(&internal) };
    let local = if internal_local { Some(&internal) } else { external_local.then_some(&external) };
    let set = |it: Option<&Vec<_>>| it.map_or_else(|| json!("unused"), texts);
    let mut description = json!({
        "cluster": set(cluster),
        "local": set(local),
        "internal": texts(&internal),
        "usable": FAMILIES.iter().any(|it| *port.has_any_endpoint.of(*it)),
    });
    if let Some(number) = port.node_port {
        description["nodePort"] = json!(number);
    }
    if is_external {
        description["external"] = texts(&external);
        description["shortCircuit"] = texts(&short_circuit);
    }
    description
}
