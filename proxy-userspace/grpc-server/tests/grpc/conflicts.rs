//! A client that knows no extensions, as KPNG's, is never given the address of another Service (CVE-2020-8554).

use std::collections::BTreeMap;

use model::state::{NodeState, Service};
use proxy_contract::{
    localnetv1::NextFilter,
    localv1::{self, Extension, IpSet},
};

use crate::{common::Brain, long_poll::poll, peer::NodePeer};

/// The frontends that a client without extensions serves for a Service: all addresses with all ports, and node ports.
fn frontends(service: &localv1::Service) -> Vec<String> {
    let ips = service.ips.as_ref().unwrap();
    let sets = [&ips.cluster_ips, &ips.external_ips, &ips.load_balancer_ips].into_iter().flatten();
    let addresses: Vec<_> = sets.flat_map(IpSet::iter).collect();
    let mut found = Vec::new();
    for port in &service.ports {
        assert_eq!(port.conflicting_addresses, None);
        let protocol = port.protocol().as_str_name();
        found.extend(addresses.iter().map(|it| format!("{it} {}/{protocol}", port.port)));
        if port.node_port != 0 {
            found.push(format!("node port {}/{protocol}", port.node_port));
        }
    }
    found
}

/// Panics if two Services have the same frontend, or a Service one that it lost.
fn check<'a>(name: &str, state: &NodeState, messages: impl Iterator<Item = &'a localv1::Service>) -> usize {
    let mut owners = BTreeMap::new();
    let mut conflicts = 0;
    for message in messages {
        let path = format!("{}/{}", message.namespace, message.name);
        let found = frontends(message);
        for it in &found {
            let other = owners.insert(it.clone(), path.clone()).filter(|it| *it != path);
            assert_eq!(other, None, "{name}: {it} is that of {path}, too");
        }
        for filter in &message.ip_filters {
            assert!(filter.target_ips.as_ref().unwrap().iter().next().is_some(), "{name}: {path}");
        }
        let own = state.services.values().find(|it| it.service.name.to_string() == path).unwrap();
        for (ip, port) in lost(&own.service) {
            assert!(!found.contains(&format!("{ip} {port}")), "{name}: {path} lost {ip} {port}");
            conflicts += 1;
        }
    }
    conflicts
}

/// The addresses that a Service lost, each with the port and protocol.
fn lost(service: &Service) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for port in &service.ports {
        let of = |ip: &std::net::IpAddr| (ip.to_string(), format!("{}/{}", port.port, port.protocol));
        found.extend(port.conflicting_addresses.iter().map(of));
    }
    found
}

#[tokio::test]
async fn a_client_without_extensions_is_never_given_the_address_of_another_service() {
    let mut conflicts = 0;
    for scenario in scenarios::all().iter().filter(|it| it.name.starts_with("changes/")) {
        let (folder, brain) = Brain::new().await;
        let mut rev = brain.publisher.publish(scenario.node_state(&scenario.steps[0]));
        let mut plain = NodePeer::start(&folder, "").await;
        let requested = [i32::from(Extension::ConflictingAddresses)];
        let (mut knowing, extensions) = NodePeer::with_extensions(&folder, &requested).await;
        assert_eq!(extensions, requested);
        for (index, step) in scenario.steps.iter().enumerate() {
            let state = scenario.node_state(step);
            if index > 0 {
                let before = rev;
                rev = brain.publisher.publish(state.clone());
                if rev == before {
                    continue;
                }
                plain.ask("").await;
                knowing.ask("n1").await;
            }
            plain.change_set().await;
            knowing.change_set().await;
            let name = format!("{}, step {index}", scenario.name);
            conflicts += check(&name, &state, plain.services.values());
            for it in state.services.values() {
                let message = &knowing.services[&it.service.name.to_string()];
                let sent = message.ports.iter().filter_map(|it| it.conflicting_addresses.as_ref());
                assert_eq!(sent.flat_map(IpSet::iter).count(), lost(&it.service).len(), "{name}");
            }
            let items = poll(&folder, NextFilter::default()).await;
            check(&name, &state, items.iter().filter_map(|it| it.endpoints.as_ref()?.service.as_ref()));
        }
    }
    assert!(conflicts >= 2, "only {conflicts} conflicts were seen");
}
