//! States that `states.yaml` describes.

#![expect(clippy::unwrap_used, reason = "a test")]

mod cluster;

use std::collections::BTreeMap;

use brain::{Options, node_state};
use model::{
    Family, ServiceName,
    state::{Endpoint, EndpointKey, ExternalForwarding, ForwardedPort, PortTarget, Scope, ServiceState},
};
use serde::Deserialize;
use serde_json::Value;

use self::cluster::Cluster;

/// A cluster, and the state of ns/web on n1: what is `None` is not checked.
#[derive(Deserialize)]
struct Case {
    name: String,
    #[serde(flatten)]
    cluster: Cluster,
    #[serde(default)]
    without_external_ips: bool,
    #[serde(default)]
    with_dsr: bool,
    selected: Vec<String>,
    external: Option<Vec<String>>,
    other_serving: Option<Vec<String>>,
    not_serving: Option<Vec<String>>,
    external_ips: Option<String>,
    load_balancer_ips: Option<String>,
    source_ranges: Option<String>,
    forwarded: Option<Vec<String>>,
    usable: Option<String>,
    key: Option<String>,
    #[serde(flatten)]
    unknown: BTreeMap<String, Value>,
}

fn texts<T: ToString>(items: impl IntoIterator<Item = T>) -> Vec<String> {
    items.into_iter().map(|it| it.to_string()).collect()
}

fn endpoint(it: &Endpoint) -> String {
    let key = match &it.key {
        EndpointKey::Pod(pod) => pod.to_string(),
        EndpointKey::Anonymous(_) => "@".to_owned(),
    };
    let marks = [(it.local, "local"), (it.serving_terminating, "fallback")];
    let marks = marks.into_iter().filter(|it| it.0).map(|it| it.1.to_owned());
    let ports = it.ports.iter().map(|it| format!("{}:{}", it.index, it.port));
    let addresses = texts(it.v4).into_iter().chain(texts(it.v6));
    [key].into_iter().chain(addresses).chain(marks).chain(ports).collect::<Vec<_>>().join(" ")
}

fn forwarded(it: &ForwardedPort) -> String {
    let nodes: Vec<_> = it.nodes.iter().map(|it| format!("{}={}", it.node, it.endpoints)).collect();
    let targets = texts(it.targets.iter());
    format!("{} {} {}: {}", it.index, it.family, nodes.join(" "), targets.join(" ")).trim_end().to_owned()
}

fn check(case: &Case, state: &ServiceState) {
    let service = &state.service;
    let has_any = service.ports[0].has_any_endpoint;
    let usable: String =
        [(has_any.v4, "v4"), (has_any.v6, "v6")].iter().filter(|it| it.0).map(|it| it.1).collect();
    let key = state.endpoints.iter().find_map(|it| match &it.key {
        EndpointKey::Anonymous(key) => Some(key.to_string()),
        EndpointKey::Pod(_) => None,
    });
    let unselected = |it: &[PortTarget]| texts(it.iter().map(|it| format!("{} {}", it.index, it.target)));
    let external = Family::ALL.into_iter().flat_map(|it| state.targets(0, it, Scope::External));
    assert_eq!(
        state.endpoints.iter().map(|it| endpoint(it)).collect::<Vec<_>>(),
        case.selected,
        "{}",
        case.name
    );
    for (expect, found) in [
        (&case.external, texts(external)),
        (&case.other_serving, unselected(&state.other_serving)),
        (&case.not_serving, unselected(&state.not_serving)),
        (&case.forwarded, state.forwarded.iter().map(forwarded).collect()),
    ] {
        assert!(expect.as_ref().is_none_or(|it| *it == found), "{}: {found:?}", case.name);
    }
    for (expect, found) in [
        (&case.external_ips, texts(&service.external_ips).join(" ")),
        (&case.load_balancer_ips, texts(&service.load_balancer_ips).join(" ")),
        (&case.source_ranges, texts(&service.source_ranges).join(" ")),
        (&case.usable, usable),
        (&case.key, key.unwrap_or_default()),
    ] {
        assert!(expect.as_ref().is_none_or(|it| *it == found), "{}: {found:?}", case.name);
    }
}

#[test]
fn each_state_is_as_its_case_says() {
    let mut text = include_bytes!("states.yaml").as_slice();
    let cases: Vec<Case> = serde_saphyr::read(&mut text).map(Result::unwrap).collect();
    assert_eq!(cases.len(), 36, "no case is skipped unnoticed");
    for case in cases {
        assert!(case.unknown.is_empty(), "{}: {:?}", case.name, case.unknown);
        let external_forwarding =
            if case.with_dsr { ExternalForwarding::Dsr } else { ExternalForwarding::Nat };
        let external_ips = !case.without_external_ips;
        let options = Options { external_ips, external_forwarding, ..Options::default() };
        let state = node_state(&case.cluster.state(), "n1", &options);
        check(&case, &state.services[&ServiceName::new("ns", "web")]);
    }
}
