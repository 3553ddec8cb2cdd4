//! Whether explanations say what the brain has decided.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use brain::{Explanation, Options, Query, Verdict, explain};
use model::{
    Family, Protocol,
    cluster::ClusterState,
    state::{NodeState, Scope, ServiceState},
};

use crate::invariants;

/// A client, and whether it is outside the cluster.
const CLIENTS: [(&[&str], bool); 3] =
    [(&["node"], false), (&["pod", "10.9.0.1"], false), (&["outside"], true)];

/// Checks the explanations for each kind of client to each frontend in a state, and to addresses of none; returns their number.
pub fn check(cluster: &ClusterState, options: &Options, node: &str, state: &NodeState) -> usize {
    let explained = |client: &[&str], to: SocketAddr, protocol: Protocol| {
        let to = format!("{to}/{protocol}");
        let query = Query::parse(&[client, &[&*to]].concat()).unwrap_or_else(|error| panic!("{error}"));
        let explanation = explain(cluster, options, node, &query).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(format!("{}/{}", explanation.destination, explanation.protocol), to);
        lines(&explanation);
        explanation
    };
    let mut count = 0;
    let mut node_ports = BTreeSet::new();
    for (name, service) in &state.services {
        for (index, port) in service.service.ports.iter().enumerate() {
            for ip in service.service.addresses() {
                for (client, is_outside) in CLIENTS {
                    let to = SocketAddr::new(ip, port.port.get());
                    let explanation = explained(client, to, port.protocol);
                    if port.conflicting_addresses.contains(&ip) {
                        assert_ne!(explanation.service, Some(name.to_string()), "{to} is not of {name}");
                    } else {
                        let is_cluster_ip = service.service.cluster_ips.contains(&ip);
                        check_endpoints(&explanation, service, index, scope(is_cluster_ip, is_outside));
                    }
                    count += 1;
                }
            }
            let Some(number) = port.node_port.filter(|it| node_ports.insert((*it, port.protocol))) else {
                continue;
            };
            let own = state.nodes.get(node).map(|it| it.addresses.clone()).unwrap_or_default();
            let loopback = [IpAddr::from(Ipv4Addr::LOCALHOST), Ipv6Addr::LOCALHOST.into()];
            for ip in own.into_iter().chain(loopback) {
                let has_family =
                    service.service.cluster_ips.iter().any(|it| Family::of(*it) == Family::of(ip));
                for (client, is_outside) in CLIENTS {
                    let explanation = explained(client, SocketAddr::new(ip, number.get()), port.protocol);
                    let has_loopback = client == ["node"] && port.protocol != Protocol::Sctp;
                    if has_family && (has_loopback || !ip.is_loopback()) {
                        check_endpoints(&explanation, service, index, scope(false, is_outside));
                    } else {
                        assert_eq!(explanation.verdict, Verdict::Untranslated, "{explanation:?}");
                    }
                    count += 1;
                }
            }
        }
    }
    for port in [81, 30_002] {
        let elsewhere = explained(&["node"], (Ipv4Addr::new(10, 1, 0, 1), port).into(), Protocol::Tcp);
        assert!(elsewhere.service.is_none() && elsewhere.endpoints.is_empty(), "{elsewhere:?}");
    }
    count
}

fn scope(is_cluster_ip: bool, is_outside: bool) -> Scope {
    match (is_cluster_ip, is_outside) {
        (true, _) => Scope::Internal,
        (false, true) => Scope::External,
        (false, false) => Scope::Cluster,
    }
}

/// The endpoints that are used are those of the state, and the verdict follows from them.
fn check_endpoints(explanation: &Explanation, state: &ServiceState, index: usize, scope: Scope) {
    let port = &state.service.ports[index];
    assert_eq!(explanation.service, Some(state.service.name.to_string()), "{explanation:?}");
    assert_eq!(explanation.port.as_ref(), Some(&port.name), "{explanation:?}");
    let family = Family::of(explanation.destination.ip());
    let used = explanation.endpoints.iter().filter(|it| it.used);
    let (used, expected): (BTreeSet<_>, BTreeSet<_>) =
        (used.map(|it| it.endpoint).collect(), state.targets(index, family, scope).collect());
    assert_eq!(used, expected, "{explanation:?}");
    let is_denied = explanation.reason.starts_with("loadBalancerSourceRanges");
    let has_any = *port.has_any_endpoint.of(family);
    match explanation.verdict {
        Verdict::Redirected => assert!(!used.is_empty(), "{explanation:?}"),
        Verdict::Refused => assert!(used.is_empty(), "{explanation:?}"),
        Verdict::Dropped => assert!(is_denied || used.is_empty() && has_any, "{explanation:?}"),
        Verdict::Untranslated => panic!("{explanation:?}"),
    }
}

fn lines(explanation: &Explanation) {
    assert!(!explanation.reason.is_empty(), "{explanation:?}");
    invariants::line(&explanation.reason);
    explanation.rules.iter().for_each(|it| invariants::line(&it.says));
    explanation.endpoints.iter().for_each(|it| invariants::line(&it.reason));
}
