//! The frontends of a Service: whether it is served, and at which addresses and ports.

use std::net::IpAddr;

use ipnet::IpNet;
use model::{
    Family,
    conflicts::Claim,
    state::{Service, ServiceKind, TrafficPolicy},
};

use crate::Options;

/// A Service with its addresses, without endpoints and before conflicts are resolved; none if it is not served.
pub(crate) fn frontends(service: &Service, options: &Options) -> Option<Service> {
    if service.kind == ServiceKind::ExternalName
        || service.cluster_ips.is_empty()
        || service.proxy_name != options.service_proxy_name
    {
        return None;
    }
    // A family without a cluster IP has no frontends at all.
    let addresses = |from: &[IpAddr]| -> Vec<IpAddr> {
        by_family(from, |it| Family::of(*it)).filter(|it| has_family(service, Family::of(*it))).collect()
    };
    let load_balancer_ips = addresses(&service.load_balancer_ips);
    let has_load_balancer = |family| load_balancer_ips.iter().any(|it| Family::of(*it) == family);
    let range_family = |range: &IpNet| Family::of(range.addr());
    let source_ranges =
        by_family(&service.source_ranges, range_family).filter(|it| has_load_balancer(range_family(it)));
    let source_ranges = source_ranges.collect();
    let has_health_check =
        service.kind == ServiceKind::LoadBalancer && service.external_policy == TrafficPolicy::Local;
    Some(Service {
        name: service.name.clone(),
        created: None,
        kind: service.kind,
        proxy_name: None,
        cluster_ips: service.cluster_ips.clone(),
        external_ips: if options.external_ips { addresses(&service.external_ips) } else { Vec::new() },
        load_balancer_ips,
        ports: service.ports.clone(),
        internal_policy: service.internal_policy,
        external_policy: service.external_policy,
        affinity: service.affinity,
        load_balancing: service.load_balancing,
        source_ranges,
        health_check_node_port: service.health_check_node_port.filter(|_| has_health_check),
        metadata: service.metadata.clone(),
    })
}

/// The frontends that a Service claims; none if it is not served.
pub(crate) fn claim(service: &Service, options: &Options) -> Claim {
    frontends(service, options).map(|it| Claim::new(&it, service.created)).unwrap_or_default()
}

pub(crate) fn has_family(service: &Service, family: Family) -> bool {
    service.cluster_ips.iter().any(|it| Family::of(*it) == family)
}

/// The items of IPv4 and then those of IPv6, each in their own order: the order of the wire format.
fn by_family<T: Copy>(items: &[T], family: impl Fn(&T) -> Family) -> impl Iterator<Item = T> {
    Family::ALL
        .into_iter()
        .flat_map(move |it| items.iter().filter(|item| family(item) == it).copied().collect::<Vec<_>>())
}
