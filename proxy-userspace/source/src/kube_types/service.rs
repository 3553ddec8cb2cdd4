//! Converts `v1 Service`.

use std::{
    collections::BTreeSet,
    net::IpAddr,
    num::{NonZeroU16, NonZeroU32},
};

use ipnet::IpNet;
use k8s_openapi::{api::core::v1::LoadBalancerIngress, apimachinery::pkg::util::intstr::IntOrString};
use model::{
    Family, NameForm, ServiceName,
    address::AddressUse,
    cluster,
    state::{ClientIpAffinity, ServiceKind, ServicePort, TargetPort, TrafficPolicy},
};

use super::{
    MAX_PORTS,
    conversion::{Converted, names_of, timestamp, validator},
    load_balancing::load_balancing,
    objects::{self, ServiceSpec},
    validation::{Validator, quoted},
};

const PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";

/// The default timeout of session affinity in Kubernetes: three hours.
const DEFAULT_AFFINITY_SECONDS: NonZeroU32 = NonZeroU32::new(10_800).expect("10800 is not zero");
/// The limit in Kubernetes: a day.
const MAX_AFFINITY_SECONDS: i32 = 86_400;

const POLICIES: &[(&str, TrafficPolicy)] =
    &[("Cluster", TrafficPolicy::Cluster), ("Local", TrafficPolicy::Local)];
const KINDS: &[(&str, ServiceKind)] = &[
    ("ClusterIP", ServiceKind::ClusterIp),
    ("NodePort", ServiceKind::NodePort),
    ("LoadBalancer", ServiceKind::LoadBalancer),
    ("ExternalName", ServiceKind::ExternalName),
];

/// Converts a Service, without its labels and annotations.
pub fn service(service: &objects::Service) -> Converted<cluster::Service> {
    let mut validator = validator("Service", &service.metadata);
    let object = convert(service, &mut validator);
    if object.as_ref().is_some_and(|it| it.kind != ServiceKind::ExternalName) {
        reject_if_incomplete(service, &mut validator);
    }
    Converted { object, rejected: validator.into_rejected() }
}

/// Rejects a Service without addresses or ports, which cannot be served. An API server completes or rejects such a Service.
fn reject_if_incomplete(service: &objects::Service, validator: &mut Validator) {
    let nothing = ServiceSpec::default();
    let spec = service.spec.as_ref().unwrap_or(&nothing);
    let labels = service.metadata.labels.as_ref();
    let mut addresses = spec.cluster_ips.iter().flatten().chain(&spec.cluster_ip).filter(|it| !it.is_empty());
    // Services with a label for another proxy may be incomplete.
    if addresses.clone().any(|it| it == "None")
        || labels.is_some_and(|it| it.headless.is_some() || it.service_proxy_name.is_some())
    {
        return;
    }
    if addresses.next().is_none() {
        let reason = "the cluster IP is missing, and without one the Service is not served, not even its node ports; set it as \
                      an API server does, or to None for a headless Service";
        validator.reject("spec.clusterIP", reason);
    } else if spec.ports.iter().flatten().next().is_none() {
        validator.reject("spec.ports", "the Service has no ports, so it is not served; add one");
    }
}

fn convert(service: &objects::Service, validator: &mut Validator) -> Option<cluster::Service> {
    let meta = &service.metadata;
    let (namespace, name) = names_of(meta, NameForm::DnsLabel, validator)?;
    let name = ServiceName { namespace, name };
    let proxy_name = meta.labels.as_ref().and_then(|it| it.service_proxy_name.as_deref());
    if let Some(proxy) = proxy_name.filter(|it| !it.is_empty()) {
        validator.name(format_args!("metadata.labels[{PROXY_NAME}]"), proxy, NameForm::LabelValue)?;
    }
    let annotations = meta.annotations.as_ref();
    let load_balancing = annotations.map(|it| load_balancing(&name, &it.ours, validator)).unwrap_or_default();
    let nothing = ServiceSpec::default();
    let spec = service.spec.as_ref().unwrap_or(&nothing);
    let ingress = service.status.as_ref().and_then(|it| it.load_balancer.as_ref());
    let ingress = ingress.and_then(|it| it.ingress.as_deref()).unwrap_or_default();
    let (mut load_balancer_ips, mut external_ips) =
        (load_balancer_ips(ingress, validator), external_ips(spec, validator));
    let source_ranges = source_ranges(spec, [&mut load_balancer_ips, &mut external_ips], validator);
    Some(cluster::Service {
        name,
        created: meta.creation_timestamp.as_ref().map(|it| timestamp(it.0)),
        kind: validator.one_of("spec.type", spec.type_.as_deref(), KINDS),
        proxy_name: proxy_name.map(str::to_owned),
        cluster_ips: cluster_ips(spec, validator),
        external_ips,
        load_balancer_ips,
        ports: ports(spec, validator),
        internal_policy: validator.one_of(
            "spec.internalTrafficPolicy",
            spec.internal_traffic_policy.as_deref(),
            POLICIES,
        ),
        external_policy: validator.one_of(
            "spec.externalTrafficPolicy",
            spec.external_traffic_policy.as_deref(),
            POLICIES,
        ),
        affinity: affinity(spec, validator),
        load_balancing,
        source_ranges,
        health_check_node_port: node_port("spec.healthCheckNodePort", spec.health_check_node_port, validator),
        metadata: None,
    })
}

/// `clusterIPs`, or `clusterIP` where a hand-written manifest has only that; `None` or an empty value means headless.
fn cluster_ips(spec: &ServiceSpec, validator: &mut Validator) -> Vec<IpAddr> {
    let many = spec.cluster_ips.as_deref().unwrap_or_default();
    let texts = if many.is_empty() { spec.cluster_ip.as_slice() } else { many };
    let field = |index| {
        if many.is_empty() { "spec.clusterIP".to_owned() } else { format!("spec.clusterIPs[{index}]") }
    };
    let mut found: Vec<IpAddr> = Vec::new();
    for (index, text) in texts.iter().enumerate().filter(|(_, it)| !matches!(it.as_str(), "" | "None")) {
        let Some(address) = validator.address(field(index), text, AddressUse::Assigned) else { continue };
        if found.iter().any(|it| Family::of(*it) == Family::of(address)) {
            validator.reject(
                field(index),
                format!("{} is the second address of its family; keep one per family", quoted(text)),
            );
        } else {
            found.push(address);
        }
    }
    // It is kept for long, and there are many.
    found.shrink_to_fit();
    found
}

fn external_ips(spec: &ServiceSpec, validator: &mut Validator) -> Vec<IpAddr> {
    let texts = spec.external_ips.iter().flatten().enumerate();
    unique(texts.filter_map(|(index, it)| {
        validator.address(format_args!("spec.externalIPs[{index}]"), it, AddressUse::Endpoint)
    }))
}

/// The addresses of mode `VIP`; a load balancer of mode `Proxy` sends to node ports itself (KEP-1860).
fn load_balancer_ips(ingress: &[LoadBalancerIngress], validator: &mut Validator) -> Vec<IpAddr> {
    let mut found = Vec::new();
    for (index, it) in ingress.iter().enumerate() {
        let field = format!("status.loadBalancer.ingress[{index}]");
        let is_vip = match it.ip_mode.as_deref() {
            None | Some("VIP") => true,
            Some("Proxy") => false,
            // A mode of a later version: nodes do not serve what a load balancer may not send to them.
            Some(other) => {
                let reason = "is unknown, and the address is left to the load balancer; use VIP or Proxy";
                validator.reject(format_args!("{field}.ipMode"), format!("{} {reason}", quoted(other)));
                false
            }
        };
        let text = it.ip.as_deref().filter(|it| is_vip && !it.is_empty());
        found.extend(
            text.and_then(|it| validator.address(format_args!("{field}.ip"), it, AddressUse::Endpoint)),
        );
    }
    unique(found)
}

/// The source ranges. A family of which none can be read is not open, but has no load balancer IPs.
fn source_ranges(
    spec: &ServiceSpec,
    [load_balancer_ips, external_ips]: [&mut Vec<IpAddr>; 2],
    validator: &mut Validator,
) -> Vec<IpNet> {
    const FIELD: &str = "spec.loadBalancerSourceRanges";
    let texts = spec.load_balancer_source_ranges.iter().flatten().enumerate();
    let all: Vec<_> = texts.map(|(index, it)| validator.cidr(format_args!("{FIELD}[{index}]"), it)).collect();
    let ranges = unique(all.iter().copied().flatten());
    if all.contains(&None) {
        let is_closed = |ip: &mut IpAddr| !ranges.iter().any(|it| Family::of(it.addr()) == Family::of(*ip));
        let closed: Vec<_> = load_balancer_ips.extract_if(.., is_closed).collect();
        if !closed.is_empty() {
            external_ips.retain(|it| !closed.contains(it));
            let closed: Vec<_> = closed.iter().map(ToString::to_string).collect();
            let reason = "no range of their family can be read, and they would be open to everyone; correct the ranges";
            validator.reject(
                FIELD,
                format!("the load balancer IPs {} are not served: {reason}", closed.join(", ")),
            );
        }
    }
    ranges
}

fn ports(spec: &ServiceSpec, validator: &mut Validator) -> Vec<ServicePort> {
    let mut seen = BTreeSet::new();
    let mut found = Vec::new();
    for (index, it) in validator.limited("spec.ports", spec.ports.as_deref(), MAX_PORTS).iter().enumerate() {
        let field = format!("spec.ports[{index}]");
        let Some(port) = validator.port(format_args!("{field}.port"), it.port) else { continue };
        let Some(protocol) = validator.protocol(format_args!("{field}.protocol"), it.protocol.as_deref())
        else {
            continue;
        };
        let name = it.name.as_deref().unwrap_or_default();
        if !name.is_empty()
            && validator.name(format_args!("{field}.name"), name, NameForm::DnsLabel).is_none()
        {
            continue;
        }
        if !seen.insert((port, protocol)) {
            validator.reject(field, format!("{port}/{protocol} is listed twice; keep one"));
            continue;
        }
        found.push(ServicePort {
            name: name.to_owned(),
            node_port: node_port(&format!("{field}.nodePort"), it.node_port, validator),
            target_port: target_port(&field, port, it.target_port.as_ref(), validator),
            ..ServicePort::new(protocol, port)
        });
    }
    found.shrink_to_fit();
    found
}

/// The target port; the port itself if the number or name is invalid: the slices have the actual target.
fn target_port(
    field: &str,
    port: NonZeroU16,
    target: Option<&IntOrString>,
    validator: &mut Validator,
) -> TargetPort {
    match target {
        None | Some(IntOrString::Int(0)) => TargetPort::Number(port),
        Some(IntOrString::Int(number)) => {
            TargetPort::Number(validator.port(format_args!("{field}.targetPort"), *number).unwrap_or(port))
        }
        Some(IntOrString::String(name)) => {
            let field = format_args!("{field}.targetPort");
            let name = validator.optional_name(field, Some(name), NameForm::PortName);
            name.map_or(TargetPort::Number(port), |it| TargetPort::Name(it.as_ref().to_owned()))
        }
    }
}

/// A node port; 0 means none.
fn node_port(field: &str, number: Option<i32>, validator: &mut Validator) -> Option<NonZeroU16> {
    number.filter(|it| *it != 0).and_then(|it| validator.port(field, it))
}

fn affinity(spec: &ServiceSpec, validator: &mut Validator) -> Option<ClientIpAffinity> {
    let modes = &[("None", false), ("ClientIP", true)];
    if !validator.one_of("spec.sessionAffinity", spec.session_affinity.as_deref(), modes) {
        return None;
    }
    let config = spec.session_affinity_config.as_ref().and_then(|it| it.client_ip.as_ref());
    let timeout_seconds = match config.and_then(|it| it.timeout_seconds) {
        None => DEFAULT_AFFINITY_SECONDS,
        Some(seconds) => match u32::try_from(seconds).ok().and_then(NonZeroU32::new) {
            Some(valid) if seconds <= MAX_AFFINITY_SECONDS => valid,
            _ => {
                let reason = format!(
                    "{seconds} is not a timeout, {DEFAULT_AFFINITY_SECONDS} is used; use a number from 1 to \
                     {MAX_AFFINITY_SECONDS}"
                );
                validator.report("spec.sessionAffinityConfig.clientIP.timeoutSeconds", reason);
                DEFAULT_AFFINITY_SECONDS
            }
        },
    };
    Some(ClientIpAffinity { timeout_seconds })
}

/// The items without duplicates, in the order of their first appearance.
fn unique<T: Ord + Clone>(items: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut seen = BTreeSet::new();
    items.into_iter().filter(|it| seen.insert(it.clone())).collect()
}
