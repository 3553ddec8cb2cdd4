//! Encodes Services and endpoints, and their paths in the sets of `localv1`.

use std::{collections::BTreeSet, net::IpAddr, num::NonZeroU16};

use model::{
    Family, Protocol, ServiceMetadata, ServiceName, Timestamp,
    state::{
        Endpoint, EndpointKey, PortTarget, Scopes, Service, ServicePort, ServiceState, TargetPort,
        TrafficPolicy,
    },
};
use proxy_contract::localv1::{self, Extension};

use crate::{extensions::Extensions, forwarding, load_balancing};

/// Encodes a Service, with all fields that KPNG's backends require.
pub fn service(service: &Service) -> localv1::Service {
    let affinity = service.affinity.map(|it| {
        let timeout_seconds = i32::try_from(it.timeout_seconds.get()).unwrap_or(i32::MAX);
        localv1::service::SessionAffinity::ClientIp(localv1::ClientIpAffinity { timeout_seconds })
    });
    let ServiceMetadata { labels, annotations } = service.metadata.as_deref().cloned().unwrap_or_default();
    localv1::Service {
        namespace: service.name.namespace.to_string(),
        name: service.name.name.to_string(),
        r#type: service.kind.to_string(),
        ip_filters: ip_filters(service),
        ips: Some(localv1::ServiceIPs {
            cluster_ips: Some(localv1::IpSet::of(&service.cluster_ips)),
            external_ips: Some(localv1::IpSet::of(&service.external_ips)),
            headless: false,
            load_balancer_ips: Some(localv1::IpSet::of(&service.load_balancer_ips)),
            primary_v6: service.cluster_ips.first().is_some_and(IpAddr::is_ipv6),
        }),
        ports: service.ports.iter().map(port).collect(),
        external_traffic_to_local: service.external_policy == TrafficPolicy::Local,
        labels,
        annotations,
        session_affinity: affinity,
        internal_traffic_to_local: service.internal_policy == TrafficPolicy::Local,
        health_check_node_port: service.health_check_node_port.map_or(0, |it| it.get().into()),
        load_balancing: load_balancing::encode(service.load_balancing),
        ..localv1::Service::default()
    }
}

/// The ports of a Service with a named target, by position, and the number of that target where all endpoints that this node
/// may use agree on it: backends that do not look at the ports of each endpoint need it.
pub fn named_targets(state: &ServiceState) -> Vec<(usize, Option<NonZeroU16>)> {
    let number = |index: usize| {
        let ports = state.endpoints.iter().flat_map(|it| it.ports.iter());
        let mut numbers = ports.filter(|it| usize::from(it.index) == index).map(|it| it.port);
        let first = numbers.next()?;
        numbers.all(|it| it == first).then_some(first)
    };
    let ports = state.service.ports.iter().enumerate();
    let named = ports.filter(|(_, it)| matches!(it.target_port, TargetPort::Name(_)));
    named.map(|(index, _)| (index, number(index))).collect()
}

/// Encodes a Service, with what depends on its endpoints, and the extensions.
pub fn service_with_extensions(state: &ServiceState, extensions: Extensions) -> localv1::Service {
    let mut message = service(&state.service);
    for (index, number) in named_targets(state) {
        message.ports[index].target_port = number.map_or(0, |it| it.get().into());
    }
    if extensions.has(Extension::TriggerTimes) {
        message.trigger_time = state.trigger_time.map(Timestamp::as_micros);
    }
    if extensions.has(Extension::OtherServing) {
        let mut list = |targets: &[PortTarget], of: fn(&mut localv1::PortMapping) -> &mut Vec<String>| {
            for it in targets {
                if let Some(port) = message.ports.get_mut(usize::from(it.index)) {
                    of(port).push(it.target.to_string());
                }
            }
        };
        list(&state.other_serving, |it| &mut it.other_serving);
        list(&state.not_serving, |it| &mut it.not_serving);
    }
    if extensions.has(Extension::Forwarding) {
        forwarding::encode(&state.forwarded, &mut message.ports);
    }
    if !extensions.has(Extension::ConflictingAddresses) {
        leave_out_conflicting(&mut message);
    }
    message
}

/// Leaves out the addresses that the Service lost to another one on any port: a client that knows nothing of conflicts would
/// serve them for every port, and so redirect the other Service's traffic (CVE-2020-8554).
fn leave_out_conflicting(message: &mut localv1::Service) {
    let taken = message.ports.iter_mut().filter_map(|it| it.conflicting_addresses.take());
    let lost: BTreeSet<_> = taken.flat_map(|it| it.v4.into_iter().chain(it.v6)).collect();
    if lost.is_empty() {
        return;
    }
    let ips = message.ips.iter_mut();
    let sets = ips.flat_map(|it| [&mut it.cluster_ips, &mut it.external_ips, &mut it.load_balancer_ips]);
    for set in sets.chain(message.ip_filters.iter_mut().map(|it| &mut it.target_ips)).flatten() {
        set.v4.retain(|it| !lost.contains(it));
        set.v6.retain(|it| !lost.contains(it));
    }
    leave_out_untargeted(&mut message.ip_filters);
}

/// Leaves out filters without targets, which could be taken for those of all addresses.
pub(crate) fn leave_out_untargeted(filters: &mut Vec<localv1::IpFilter>) {
    let has_targets = |it: &localv1::IpSet| !it.v4.is_empty() || !it.v6.is_empty();
    filters.retain(|it| it.target_ips.as_ref().is_some_and(has_targets));
}

/// One filter per family that has a source range; the other family is open.
fn ip_filters(service: &Service) -> Vec<localv1::IpFilter> {
    let filter = |family| {
        let ranges = service.source_ranges.iter().filter(|it| Family::of(it.addr()) == family);
        let source_ranges: Vec<_> = ranges.map(ToString::to_string).collect();
        let targets = service.load_balancer_ips.iter().filter(|it| Family::of(**it) == family);
        let target_ips = localv1::IpSet::of(targets);
        let is_needed = !source_ranges.is_empty();
        is_needed.then_some(localv1::IpFilter { target_ips: Some(target_ips), source_ranges })
    };
    Family::ALL.into_iter().filter_map(filter).collect()
}

fn port(port: &ServicePort) -> localv1::PortMapping {
    let (target_port, target_port_name) = match &port.target_port {
        TargetPort::Number(number) => (number.get().into(), String::new()),
        TargetPort::Name(name) => (0, name.clone()),
    };
    localv1::PortMapping {
        name: port.name.clone(),
        protocol: protocol(port.protocol).into(),
        port: port.port.get().into(),
        node_port: port.node_port.map_or(0, |it| it.get().into()),
        target_port,
        target_port_name,
        has_any_endpoint: Some(localv1::FamilyFlags {
            v4: port.has_any_endpoint.v4,
            v6: port.has_any_endpoint.v6,
        }),
        conflicting_addresses: (!port.conflicting_addresses.is_empty())
            .then(|| localv1::IpSet::of(&port.conflicting_addresses)),
        ..localv1::PortMapping::default()
    }
}

pub(crate) fn protocol(protocol: Protocol) -> localv1::Protocol {
    match protocol {
        Protocol::Tcp => localv1::Protocol::Tcp,
        Protocol::Udp => localv1::Protocol::Udp,
        Protocol::Sctp => localv1::Protocol::Sctp,
    }
}

/// Encodes an endpoint of `service`; its path contains its key.
pub fn endpoint(service: &Service, endpoint: &Endpoint) -> localv1::Endpoint {
    let all = endpoint.ports.iter().fold(Scopes::default(), |all, it| Scopes {
        internal: all.internal || it.scopes.internal,
        external: all.external || it.scopes.external,
        cluster: all.cluster || it.scopes.cluster,
    });
    let differ = endpoint.ports.iter().any(|it| it.scopes != all);
    let ports = endpoint.ports.iter().map(|it| localv1::PortName {
        name: service
            .ports
            .get(usize::from(it.index))
            .map_or("", |it| look_up_name(&it.name, &it.target_port))
            .to_owned(),
        port: it.port.get().into(),
        scopes: differ.then(|| scopes(it.scopes)),
        index: Some(it.index.into()),
        ..localv1::PortName::default()
    });
    localv1::Endpoint {
        hostname: endpoint.hostname.to_string(),
        ips: Some(localv1::IpSet::of(Family::ALL.into_iter().filter_map(|it| endpoint.address(it)))),
        local: endpoint.local,
        serving_terminating: endpoint.serving_terminating,
        port_overrides: ports.collect(),
        scopes: Some(scopes(all)),
        pod_name: match &endpoint.key {
            EndpointKey::Pod(name) => name.to_string(),
            EndpointKey::Anonymous(_) => String::new(),
        },
    }
}

/// The path of a Service in the services set.
pub fn service_path(name: &ServiceName) -> String {
    name.to_string()
}

/// The path of an endpoint in the endpoints set.
pub fn endpoint_path(service: &ServiceName, endpoint: &Endpoint) -> String {
    format!("{service}/{}", endpoint_key(endpoint))
}

/// The last part of the path of an endpoint.
pub fn endpoint_key(endpoint: &Endpoint) -> &str {
    match &endpoint.key {
        EndpointKey::Pod(key) | EndpointKey::Anonymous(key) => key,
    }
}

/// The name by which KPNG finds a service port among the ports of an endpoint.
pub(crate) fn look_up_name<'a>(name: &'a str, target_port: &'a TargetPort) -> &'a str {
    match target_port {
        TargetPort::Name(target) if name.is_empty() => target,
        _ => name,
    }
}

fn scopes(scopes: Scopes) -> localv1::EndpointScopes {
    localv1::EndpointScopes {
        internal: scopes.internal,
        external: scopes.external,
        cluster: Some(scopes.cluster),
    }
}

#[cfg(test)]
mod tests;
