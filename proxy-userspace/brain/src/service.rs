//! One Service: whether it is served, at which addresses, and by whom.

use std::{collections::BTreeSet, net::IpAddr};

use model::{
    Family, Protocol, Timestamp,
    cluster::{self, EndpointSlice},
    state::{OtherServing, PerFamily, Service, ServiceKind, ServicePort, ServiceState, TrafficPolicy},
};

use crate::{
    NodeView, Options,
    conflicts::{Frontend, Lost},
    endpoints, select,
};

const FAMILIES: [Family; 2] = [Family::V4, Family::V6];

/// The state of one Service on one node, from the slices that name it; none if it is not served.
///
/// The order of the slices and of what is in them does not matter.
pub fn service_state<'a>(
    service: &cluster::Service,
    slices: impl IntoIterator<Item = &'a EndpointSlice>,
    node: NodeView<'_>,
    options: &Options,
) -> Option<ServiceState> {
    resolved_state(service, slices, node, options, None)
}

/// The state of a Service that does not get all that it wants.
pub(crate) fn resolved_state<'a>(
    service: &cluster::Service,
    slices: impl IntoIterator<Item = &'a EndpointSlice>,
    node: NodeView<'_>,
    options: &Options,
    lost: Option<&Lost>,
) -> Option<ServiceState> {
    let kind = service.kind.filter(|_| is_served(service, options))?;
    let mut state = frontends(service, kind, options);
    if let Some(lost) = lost {
        take_away(&mut state, lost);
    }
    let slices: Vec<_> = slices.into_iter().filter(|slice| !slice.headless).collect();

    let (mut served, mut other_serving) = (Vec::new(), Vec::new());
    for (index, port) in service.ports.iter().enumerate() {
        let Ok(index) = u16::try_from(index) else { break };
        for family in FAMILIES.into_iter().filter(|it| has_family(service, *it)) {
            let candidates = endpoints::candidates(&slices, port, family);
            let question = select::Question {
                internal: service.internal_policy,
                external: service.external_policy,
                from_outside: reachable_from_outside(&state, &state.ports[usize::from(index)], family),
                node,
            };
            let answer = select::select(&candidates, &question);
            *state.ports[usize::from(index)].has_any_endpoint.of_mut(family) = answer.has_any_endpoint;
            for (candidate, scopes) in candidates.iter().zip(answer.scopes) {
                if !scopes.is_empty() {
                    served.push(endpoints::Served::new(candidate, index, scopes, node));
                } else if port.protocol != Protocol::Tcp && select::serves(candidate.endpoint) {
                    other_serving.push(OtherServing { index, target: candidate.place() });
                }
            }
        }
    }
    other_serving.sort_unstable();
    Some(ServiceState {
        other_serving: other_serving.into(),
        trigger_time: trigger_time(&slices),
        ..ServiceState::new(state, endpoints::assemble(served))
    })
}

/// The Service with its addresses, its ports not yet known to be usable.
fn frontends(service: &cluster::Service, kind: ServiceKind, options: &Options) -> Service {
    // Without a cluster IP in a family there is no frontend in that family.
    let addresses = |from: &[IpAddr]| -> Vec<IpAddr> {
        by_family(from, |it| Family::of(*it)).filter(|it| has_family(service, Family::of(*it))).collect()
    };
    let load_balancer_ips = addresses(&service.load_balancer_ips);
    let guarded = |family| load_balancer_ips.iter().any(|it| Family::of(*it) == family);
    let range_family = |range: &ipnet::IpNet| Family::of(range.addr());
    let source_ranges =
        by_family(&service.source_ranges, range_family).filter(|it| guarded(range_family(it))).collect();
    let has_health_check =
        kind == ServiceKind::LoadBalancer && service.external_policy == TrafficPolicy::Local;
    let ports = service.ports.iter().map(|port| ServicePort {
        name: port.name.clone(),
        protocol: port.protocol,
        port: port.port,
        node_port: port.node_port,
        conflicting_addresses: Vec::new(),
        target_port: port.target_port.clone(),
        has_any_endpoint: PerFamily::default(),
    });
    Service {
        name: service.name.clone(),
        kind,
        cluster_ips: service.cluster_ips.clone(),
        external_ips: if options.external_ips { addresses(&service.external_ips) } else { Vec::new() },
        source_ranges,
        load_balancer_ips,
        ports: ports.collect(),
        internal_policy: service.internal_policy,
        external_policy: service.external_policy,
        affinity: service.affinity,
        health_check_node_port: service.health_check_node_port.filter(|_| has_health_check),
    }
}

/// The items of IPv4 and then those of IPv6, each in their own order: how they travel, too.
fn by_family<T: Copy>(items: &[T], family: impl Fn(&T) -> Family) -> impl Iterator<Item = T> {
    FAMILIES
        .into_iter()
        .flat_map(move |it| items.iter().filter(|item| family(item) == it).copied().collect::<Vec<_>>())
}

fn has_family(service: &cluster::Service, family: Family) -> bool {
    service.cluster_ips.iter().any(|it| Family::of(*it) == family)
}

/// Whether a port has a node port, an external IP or a load balancer IP in this family.
fn reachable_from_outside(state: &Service, port: &ServicePort, family: Family) -> bool {
    let mut addresses = state.external_ips.iter().chain(&state.load_balancer_ips);
    port.node_port.is_some()
        || addresses.any(|it| Family::of(*it) == family && !port.conflicting_addresses.contains(it))
}

/// When the last change of the slices happened.
pub(crate) fn trigger_time(slices: &[&EndpointSlice]) -> Option<Timestamp> {
    slices.iter().filter(|it| !it.headless).filter_map(|it| it.trigger_time).max()
}

/// Whether a Service is served at all, by us.
pub(crate) fn is_served(service: &cluster::Service, options: &Options) -> bool {
    service.kind.is_some()
        && !service.cluster_ips.is_empty()
        && service.proxy_name == options.service_proxy_name
}

/// The addresses of a Service, each perhaps more than once.
pub(crate) fn served_addresses(
    service: &cluster::Service,
    options: &Options,
) -> impl Iterator<Item = IpAddr> {
    let external_ips = if options.external_ips { service.external_ips.as_slice() } else { &[] };
    let from_outside = external_ips.iter().chain(&service.load_balancer_ips).copied();
    // Without a cluster IP in a family there is no frontend in that family.
    let from_outside = from_outside.filter(|it| has_family(service, Family::of(*it)));
    service.cluster_ips.iter().copied().chain(from_outside)
}

/// Takes away where another Service answers.
fn take_away(service: &mut Service, lost: &Lost) {
    for port in &mut service.ports {
        let is_lost = |address, port, protocol| lost.contains(&Frontend { address, port, protocol });
        let protocol = port.protocol;
        port.node_port = port.node_port.filter(|it| !is_lost(None, *it, protocol));
        let addresses =
            service.cluster_ips.iter().chain(&service.external_ips).chain(&service.load_balancer_ips);
        let addresses: BTreeSet<_> =
            addresses.filter(|it| is_lost(Some(**it), port.port, protocol)).collect();
        port.conflicting_addresses = addresses.into_iter().copied().collect();
    }
}
