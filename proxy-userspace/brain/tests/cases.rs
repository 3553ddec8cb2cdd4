//! Runs the worked examples in `tests/cases`, and compares everything that they expect.

#![expect(clippy::unwrap_used, reason = "a test")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Debug,
    net::IpAddr,
    path::{Path, PathBuf},
};

use brain::Options;
use model::{
    Family,
    cluster::ClusterState,
    state::{NodeState, Scope, ServiceState, TrafficPolicy},
};
use serde::Deserialize;
use serde_json::{Value, json};
use source::file::{ManifestFormat, Object, parse};

/// The number of examples, so that none is skipped unnoticed.
const CASES: usize = 57;

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Case {
    name: String,
    #[serde(rename = "about")]
    _about: String,
    node: String,
    service_proxy_name: Option<String>,
    manifests: Vec<Value>,
    expect: BTreeMap<String, ExpectedService>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct ExpectedService {
    #[serde(rename = "clusterIPs")]
    cluster_ips: Vec<String>,
    #[serde(default, rename = "externalIPs")]
    external_ips: Vec<String>,
    #[serde(default, rename = "loadBalancerIPs")]
    load_balancer_ips: Vec<String>,
    health_check_node_port: Option<u16>,
    session_affinity_seconds: Option<u32>,
    #[serde(default)]
    source_ranges: BTreeMap<String, Vec<String>>,
    #[serde(default)]
    same_endpoint: Vec<Vec<String>>,
    ports: BTreeMap<String, ExpectedPort>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct ExpectedPort {
    node_port: Option<u16>,
    cluster: Set,
    local: Set,
    internal: Vec<String>,
    external: Option<Vec<String>>,
    short_circuit: Option<Vec<String>>,
    usable: bool,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Set {
    Unused(String),
    Of(Vec<String>),
}

#[test]
fn worked_examples() {
    let mut count = 0;
    let mut failures = Vec::new();
    for file in files() {
        let text = std::fs::read(&file).unwrap();
        for case in serde_saphyr::read::<_, Case>(&mut text.as_slice()) {
            let case = case.unwrap_or_else(|error| panic!("{}: {error}", file.display()));
            count += 1;
            failures.extend(check(&case).into_iter().map(|it| format!("{}: {it}", case.name)));
        }
    }
    assert!(failures.is_empty(), "{} differences:\n{}", failures.len(), failures.join("\n"));
    assert_eq!(count, CASES);
}

fn files() -> BTreeSet<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/cases");
    let files = std::fs::read_dir(folder).unwrap().map(|it| it.unwrap().path());
    files.filter(|it| it.extension().is_some_and(|it| it == "yaml")).collect()
}

fn cluster_state(manifests: &[Value]) -> ClusterState {
    let list = json!({"apiVersion": "v1", "kind": "List", "items": manifests});
    let parsed = parse("case", list.to_string().as_bytes(), ManifestFormat::Json).unwrap();
    let mut cluster = ClusterState::default();
    for (_, object) in parsed.objects {
        match object {
            Object::Service(it) => drop(cluster.set_service(it)),
            Object::EndpointSlice(it) => drop(cluster.set_slice(it)),
            Object::Node(it) => drop(cluster.set_node(it)),
        }
    }
    cluster
}

fn check(case: &Case) -> Vec<String> {
    let options = Options { service_proxy_name: case.service_proxy_name.clone(), ..Options::default() };
    let state = brain::node_state(&cluster_state(&case.manifests), &case.node, &options);
    let mut differences = Differences::default();
    let names: Vec<_> = state.services.keys().map(ToString::to_string).collect();
    differences.compare("services", names, case.expect.keys().cloned().collect());
    for (name, state) in &state.services {
        assert_eq!(*name, state.service.name);
        if let Some(expect) = case.expect.get(&name.to_string()) {
            check_service(state, expect, &mut differences);
        }
    }
    check_invariants(&state, &mut differences);
    differences.0
}

#[derive(Default)]
struct Differences(Vec<String>);

impl Differences {
    #[expect(clippy::needless_pass_by_value, reason = "most values are made for the call")]
    fn compare<T: Debug + PartialEq>(&mut self, what: &str, found: T, expect: T) {
        if found != expect {
            self.0.push(format!("{what}: found {found:?}, expected {expect:?}"));
        }
    }
}

fn texts<T: ToString>(items: &[T]) -> Vec<String> {
    items.iter().map(ToString::to_string).collect()
}

fn sorted<T: Ord>(items: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut items: Vec<_> = items.into_iter().collect();
    items.sort();
    items
}

fn check_service(state: &ServiceState, expect: &ExpectedService, differences: &mut Differences) {
    let service = &state.service;
    differences.compare("clusterIPs", texts(&service.cluster_ips), expect.cluster_ips.clone());
    differences.compare("externalIPs", texts(&service.external_ips), expect.external_ips.clone());
    differences.compare(
        "loadBalancerIPs",
        texts(&service.load_balancer_ips),
        expect.load_balancer_ips.clone(),
    );
    let health = service.health_check_node_port.map(std::num::NonZero::get);
    differences.compare("healthCheckNodePort", health, expect.health_check_node_port);
    let seconds = service.affinity.map(|it| it.timeout_seconds.get());
    differences.compare("sessionAffinitySeconds", seconds, expect.session_affinity_seconds);

    let ranges = service.load_balancer_ips.iter().map(|ip| {
        let same_family = service.source_ranges.iter().filter(|it| Family::of(it.addr()) == Family::of(*ip));
        (ip.to_string(), same_family.map(ToString::to_string).collect::<Vec<_>>())
    });
    let ranges: BTreeMap<_, _> = ranges.filter(|(_, it)| !it.is_empty()).collect();
    differences.compare("sourceRanges", ranges, expect.source_ranges.clone());

    let pairs = state.endpoints.iter().filter_map(|it| Some(vec![it.v4?.to_string(), it.v6?.to_string()]));
    differences.compare("sameEndpoint", sorted(pairs), sorted(expect.same_endpoint.clone()));

    let name = |index: usize| format!("{}/{}", service.ports[index].port, service.ports[index].protocol);
    let names = (0..service.ports.len()).map(name);
    differences.compare("ports", sorted(names), expect.ports.keys().cloned().collect());
    for index in 0..service.ports.len() {
        if let Some(expect) = expect.ports.get(&name(index)) {
            check_port(state, index, expect, &name(index), differences);
        }
    }
}

fn check_port(
    state: &ServiceState,
    index: usize,
    expect: &ExpectedPort,
    name: &str,
    differences: &mut Differences,
) {
    let (service, port) = (&state.service, &state.service.ports[index]);
    differences.compare(
        &format!("{name} nodePort"),
        port.node_port.map(std::num::NonZero::get),
        expect.node_port,
    );

    let set = |scope| {
        let targets = [Family::V4, Family::V6].map(|family| state.targets(index, family, scope));
        sorted(targets.into_iter().flatten().map(|it| it.to_string()))
    };
    let (internal, external, short) = (set(Scope::Internal), set(Scope::External), set(Scope::Cluster));
    differences.compare(&format!("{name} internal"), internal.clone(), sorted(expect.internal.clone()));
    let outside =
        port.node_port.is_some() || !service.external_ips.is_empty() || !service.load_balancer_ips.is_empty();
    let if_outside = |set: &Vec<String>| outside.then(|| set.clone());
    differences.compare(
        &format!("{name} external"),
        if_outside(&external),
        expect.external.clone().map(sorted),
    );
    differences.compare(
        &format!("{name} shortCircuit"),
        if_outside(&short),
        expect.short_circuit.clone().map(sorted),
    );
    if !outside {
        differences.compare(&format!("{name} scopes from outside"), (external.len(), short.len()), (0, 0));
    }

    let usable = [Family::V4, Family::V6].iter().any(|it| *port.has_any_endpoint.of(*it));
    differences.compare(&format!("{name} usable"), usable, expect.usable);

    // The Cluster and Local sets, derived from the scopes.
    let internal_local = service.internal_policy == TrafficPolicy::Local;
    let external_local = service.external_policy == TrafficPolicy::Local && outside;
    let cluster = if internal_local { outside.then_some(&short) } else { Some(&internal) };
    let local = if internal_local { Some(&internal) } else { external_local.then_some(&external) };
    for (what, found, expect) in [("cluster", cluster, &expect.cluster), ("local", local, &expect.local)] {
        let expect = match expect {
            Set::Unused(word) => {
                assert_eq!(word, "unused");
                None
            }
            Set::Of(set) => Some(sorted(set.clone())),
        };
        differences.compare(&format!("{name} {what}"), found.cloned(), expect);
    }
}

/// Invariants of every state: unique keys in order, ports in order, no endpoint without a scope, no address of a family
/// without a cluster IP.
fn check_invariants(state: &NodeState, differences: &mut Differences) {
    for service in state.services.values() {
        let keys: Vec<_> = service.endpoints.iter().map(|it| it.key.clone()).collect();
        differences.compare(
            "keys",
            keys.clone(),
            keys.into_iter().collect::<BTreeSet<_>>().into_iter().collect(),
        );
        for endpoint in &service.endpoints {
            assert!(endpoint.v4.is_some() || endpoint.v6.is_some());
            assert!(endpoint.ports.iter().all(|it| !it.scopes.is_empty()));
            assert!(endpoint.ports.is_sorted_by_key(|it| it.index) && !endpoint.ports.is_empty());
            let families: BTreeSet<_> = service.service.cluster_ips.iter().copied().map(Family::of).collect();
            let address = [endpoint.v4.map(IpAddr::V4), endpoint.v6.map(IpAddr::V6)];
            assert!(address.into_iter().flatten().all(|it| families.contains(&Family::of(it))));
        }
    }
}
