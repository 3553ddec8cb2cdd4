//! `v1 Service` to a fact.

use std::{
    collections::BTreeSet,
    net::IpAddr,
    num::{NonZeroU16, NonZeroU32},
};

use ipnet::IpNet;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use model::{
    Family, ServiceName,
    cluster::{self, ServicePort},
    state::{ClientIpAffinity, ServiceKind, TargetPort, TrafficPolicy},
};

use super::{
    Converted, label_of, names_of,
    objects::{self, LoadBalancerIngress, ServiceSpec},
    timestamp,
    validation::{Validator, shown},
};

/// Seconds that a client keeps its endpoint if the Service says nothing else: three hours.
const DEFAULT_AFFINITY_SECONDS: NonZeroU32 = NonZeroU32::new(10_800).expect("it is not zero");
/// The most that Kubernetes allows: a day.
const LONGEST_AFFINITY_SECONDS: i32 = 86_400;

const POLICIES: &[(&str, TrafficPolicy)] =
    &[("Cluster", TrafficPolicy::Cluster), ("Local", TrafficPolicy::Local)];
const KINDS: &[(&str, Option<ServiceKind>)] = &[
    ("ClusterIP", Some(ServiceKind::ClusterIp)),
    ("NodePort", Some(ServiceKind::NodePort)),
    ("LoadBalancer", Some(ServiceKind::LoadBalancer)),
    ("ExternalName", None),
];

/// Reads a Service.
pub fn service(service: &objects::Service) -> Converted<cluster::Service> {
    let mut refuse = Validator::new(label_of("Service", &service.metadata));
    let object = read(service, &mut refuse);
    if object.as_ref().is_some_and(|it| it.kind.is_some()) {
        refuse_if_incomplete(service, &mut refuse);
    }
    Converted { object, rejected: refuse.into_rejected() }
}

/// Says what a Service lacks without which it leads nowhere. No API server hands out such a one.
fn refuse_if_incomplete(service: &objects::Service, refuse: &mut Validator) {
    let nothing = ServiceSpec::default();
    let spec = service.spec.as_ref().unwrap_or(&nothing);
    let labels = service.metadata.labels.as_ref();
    let mut addresses = spec.cluster_ips.iter().flatten().chain(&spec.cluster_ip).filter(|it| !it.is_empty());
    // Who is to serve one with a label for a proxy is not known here.
    if addresses.clone().any(|it| it == "None")
        || labels.is_some_and(|it| it.headless.is_some() || it.service_proxy_name.is_some())
    {
        return;
    }
    if addresses.next().is_none() {
        let reason = "there is none, and without one nothing of the Service is served, not even its node ports; \
                      write one, as a cluster's API server does, or None if it is headless";
        refuse.push("spec.clusterIP", reason);
    } else if spec.ports.iter().flatten().next().is_none() {
        refuse.push("spec.ports", "there are none, and so nothing of the Service is served; write one");
    }
}

fn read(service: &objects::Service, refuse: &mut Validator) -> Option<cluster::Service> {
    let meta = &service.metadata;
    let (namespace, name) = names_of(meta, refuse)?;
    let nothing = ServiceSpec::default();
    let spec = service.spec.as_ref().unwrap_or(&nothing);
    let ingress = service.status.as_ref().and_then(|it| it.load_balancer.as_ref());
    let ingress = ingress.and_then(|it| it.ingress.as_deref()).unwrap_or_default();
    Some(cluster::Service {
        name: ServiceName { namespace, name },
        created: meta.creation_timestamp.as_ref().map(|it| timestamp(it.0)),
        kind: refuse.word("spec.type", spec.type_.as_deref(), KINDS),
        proxy_name: meta.labels.as_ref().and_then(|it| it.service_proxy_name.clone()),
        cluster_ips: cluster_ips(spec, refuse),
        external_ips: external_ips(spec, refuse),
        load_balancer_ips: load_balancer_ips(ingress, refuse),
        ports: ports(spec, refuse),
        internal_policy: refuse.word(
            "spec.internalTrafficPolicy",
            spec.internal_traffic_policy.as_deref(),
            POLICIES,
        ),
        external_policy: refuse.word(
            "spec.externalTrafficPolicy",
            spec.external_traffic_policy.as_deref(),
            POLICIES,
        ),
        affinity: affinity(spec, refuse),
        source_ranges: source_ranges(spec, refuse),
        health_check_node_port: node_port("spec.healthCheckNodePort", spec.health_check_node_port, refuse),
    })
}

/// `clusterIPs`, or `clusterIP` where a manifest made by hand has nothing else; `None` and nothing mean headless.
fn cluster_ips(spec: &ServiceSpec, refuse: &mut Validator) -> Vec<IpAddr> {
    let many = spec.cluster_ips.as_deref().unwrap_or_default();
    let texts = if many.is_empty() { spec.cluster_ip.as_slice() } else { many };
    let field = |index| {
        if many.is_empty() { "spec.clusterIP".to_owned() } else { format!("spec.clusterIPs[{index}]") }
    };
    let mut found: Vec<IpAddr> = Vec::new();
    for (index, text) in texts.iter().enumerate().filter(|(_, it)| !matches!(it.as_str(), "" | "None")) {
        let Some(address) = refuse.address(field(index), text) else { continue };
        if found.iter().any(|it| Family::of(*it) == Family::of(address)) {
            refuse
                .push(field(index), format!("{} is the second of its family; keep one of each", shown(text)));
        } else {
            found.push(address);
        }
    }
    found
}

fn external_ips(spec: &ServiceSpec, refuse: &mut Validator) -> Vec<IpAddr> {
    let texts = spec.external_ips.iter().flatten().enumerate();
    unique(texts.filter_map(|(index, it)| refuse.address(format_args!("spec.externalIPs[{index}]"), it)))
}

/// Only what the nodes answer for: a load balancer of mode `Proxy` sends to node ports itself (KEP-1860).
fn load_balancer_ips(ingress: &[LoadBalancerIngress], refuse: &mut Validator) -> Vec<IpAddr> {
    let mut found = Vec::new();
    for (index, it) in ingress.iter().enumerate() {
        let field = format!("status.loadBalancer.ingress[{index}]");
        let modes = &[("VIP", true), ("Proxy", false)];
        let ours = refuse.word(&format!("{field}.ipMode"), it.ip_mode.as_deref(), modes);
        let text = it.ip.as_deref().filter(|it| ours && !it.is_empty());
        found.extend(text.and_then(|it| refuse.address(format_args!("{field}.ip"), it)));
    }
    unique(found)
}

fn source_ranges(spec: &ServiceSpec, refuse: &mut Validator) -> Vec<IpNet> {
    let texts = spec.load_balancer_source_ranges.iter().flatten().enumerate();
    unique(
        texts.filter_map(|(index, it)| {
            refuse.range(format_args!("spec.loadBalancerSourceRanges[{index}]"), it)
        }),
    )
}

fn ports(spec: &ServiceSpec, refuse: &mut Validator) -> Vec<ServicePort> {
    let mut taken = BTreeSet::new();
    let mut found = Vec::new();
    for (index, it) in spec.ports.iter().flatten().enumerate() {
        let field = format!("spec.ports[{index}]");
        let Some(port) = refuse.port(format_args!("{field}.port"), it.port.unwrap_or(0)) else { continue };
        let Some(protocol) = refuse.protocol(format_args!("{field}.protocol"), it.protocol.as_deref()) else {
            continue;
        };
        if !taken.insert((port, protocol)) {
            refuse.push(field, format!("{port}/{protocol} is there twice; keep one"));
            continue;
        }
        found.push(ServicePort {
            name: it.name.clone().unwrap_or_default(),
            protocol,
            port,
            node_port: node_port(&format!("{field}.nodePort"), it.node_port, refuse),
            target_port: target_port(&field, port, it.target_port.as_ref(), refuse),
        });
    }
    found
}

/// The target as the manifest names it, or the port itself: the slices know better than a wrong number.
fn target_port(
    field: &str,
    port: NonZeroU16,
    target: Option<&IntOrString>,
    refuse: &mut Validator,
) -> TargetPort {
    match target {
        None | Some(IntOrString::Int(0)) => TargetPort::Number(port),
        Some(IntOrString::Int(number)) => {
            TargetPort::Number(refuse.port(format_args!("{field}.targetPort"), *number).unwrap_or(port))
        }
        Some(IntOrString::String(name)) if name.is_empty() => TargetPort::Number(port),
        Some(IntOrString::String(name)) => TargetPort::Name(name.clone()),
    }
}

/// A port of the node; 0 and nothing mean that there is none.
fn node_port(field: &str, number: Option<i32>, refuse: &mut Validator) -> Option<NonZeroU16> {
    number.filter(|it| *it != 0).and_then(|it| refuse.port(field, it))
}

fn affinity(spec: &ServiceSpec, refuse: &mut Validator) -> Option<ClientIpAffinity> {
    let modes = &[("None", false), ("ClientIP", true)];
    if !refuse.word("spec.sessionAffinity", spec.session_affinity.as_deref(), modes) {
        return None;
    }
    let config = spec.session_affinity_config.as_ref().and_then(|it| it.client_ip.as_ref());
    let timeout_seconds = match config.and_then(|it| it.timeout_seconds) {
        None => DEFAULT_AFFINITY_SECONDS,
        Some(seconds) => match u32::try_from(seconds).ok().and_then(NonZeroU32::new) {
            Some(good) if seconds <= LONGEST_AFFINITY_SECONDS => good,
            _ => {
                let reason = format!(
                    "{seconds} is not a time-out, {DEFAULT_AFFINITY_SECONDS} is used; write a number from 1 to \
                     {LONGEST_AFFINITY_SECONDS}"
                );
                refuse.push("spec.sessionAffinityConfig.clientIP.timeoutSeconds", reason);
                DEFAULT_AFFINITY_SECONDS
            }
        },
    };
    Some(ClientIpAffinity { timeout_seconds })
}

/// The items without repetitions, in the order of their first appearance.
fn unique<T: Ord + Clone>(items: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut seen = BTreeSet::new();
    items.into_iter().filter(|it| seen.insert(it.clone())).collect()
}
