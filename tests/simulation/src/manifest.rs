//! Objects of the cluster as an API server has them.

use std::net::IpAddr;

use model::{
    Family, Timestamp,
    cluster::{Endpoint, EndpointSlice, Node, Object, Service},
    state::{Algorithm, LoadBalancing, ServiceCidr, ServicePort, TargetPort, TrafficPolicy},
};
use serde_json::{Map, Value, json};

pub(crate) fn manifest(object: &Object) -> Value {
    match object {
        Object::Service(it) => service(it),
        Object::EndpointSlice(it) => slice(it),
        Object::Node(it) => node(it),
        Object::ServiceCidr(it) => service_cidr(it),
        Object::Pod(_) => unreachable!("no random change is of this kind"),
    }
}

fn service(it: &Service) -> Value {
    let labels = it.proxy_name.as_ref().map(|name| json!({"service.kubernetes.io/service-proxy-name": name}));
    let mut spec = json!({
        "type": it.kind.to_string(),
        "clusterIPs": it.cluster_ips, "externalIPs": it.external_ips,
        "ports": it.ports.iter().map(service_port).collect::<Vec<_>>(),
        "internalTrafficPolicy": policy(it.internal_policy), "externalTrafficPolicy": policy(it.external_policy),
        "loadBalancerSourceRanges": it.source_ranges.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "healthCheckNodePort": it.health_check_node_port.map_or(0, Into::into),
    });
    if let Some(first) = it.cluster_ips.first() {
        spec["clusterIP"] = json!(first);
    }
    if let Some(affinity) = it.affinity {
        spec["sessionAffinity"] = json!("ClientIP");
        spec["sessionAffinityConfig"] = json!({"clientIP": {"timeoutSeconds": affinity.timeout_seconds}});
    }
    let ingress: Vec<_> = it.load_balancer_ips.iter().map(|ip| json!({"ip": ip})).collect();
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {
            "name": &*it.name.name, "namespace": &*it.name.namespace, "labels": labels,
            "creationTimestamp": it.created.map(time), "annotations": annotations(&it.load_balancing),
        },
        "spec": spec, "status": {"loadBalancer": {"ingress": ingress}},
    })
}

fn annotations(it: &LoadBalancing) -> Value {
    let health = it.passive_health;
    let items = [
        health.enabled.map(|it| if it { "on" } else { "off" }.to_owned()),
        health.failures.map(|it| format!("failures={it}")),
        health.max_ejected_percent.map(|it| format!("max-ejected={it}%")),
    ];
    let seconds = |it: u32| format!("{it}s");
    let algorithm = (it.algorithm == Algorithm::LeastConnections).then(|| "least-connections".to_owned());
    let all = [
        ("load-balancing", algorithm),
        (
            "passive-health",
            Some(items.into_iter().flatten().collect::<Vec<_>>().join(",")).filter(|it| !it.is_empty()),
        ),
        ("slow-start", it.slow_start.map(|it| seconds(u16::from(it).into()))),
        ("drain", it.drain.map(|it| seconds(it.into()))),
        ("udp", it.udp_to_packets.then(|| "packets".to_owned())),
        ("external-forwarding", it.external_forwarding.map(|it| format!("{it:?}").to_lowercase())),
    ];
    let all =
        all.into_iter().filter_map(|(name, it)| Some((format!("kube-proxy-ebpf.io/{name}"), it?.into())));
    Value::Object(all.collect::<Map<_, _>>())
}

fn service_port(it: &ServicePort) -> Value {
    json!({
        "name": it.name, "protocol": it.protocol.to_string(), "port": it.port,
        "nodePort": it.node_port.map_or(0, Into::into),
        "targetPort": match &it.target_port {
            TargetPort::Number(it) => json!(it),
            TargetPort::Name(it) => json!(it),
        },
    })
}

fn slice(it: &EndpointSlice) -> Value {
    let mut labels = json!({"kubernetes.io/service-name": &*it.service.name});
    if it.headless {
        labels["service.kubernetes.io/headless"] = json!("");
    }
    let ports = it
        .ports
        .iter()
        .map(|it| json!({"name": it.name, "protocol": it.protocol.to_string(), "port": it.port}));
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {
            "name": &*it.name.name, "namespace": &*it.name.namespace, "labels": labels,
            "annotations": {"endpoints.kubernetes.io/last-change-trigger-time": it.trigger_time.map(time)},
        },
        "addressType": match it.family {
            Family::V4 => "IPv4",
            Family::V6 => "IPv6",
        },
        "ports": ports.collect::<Vec<_>>(),
        "endpoints": it.endpoints.iter().map(endpoint).collect::<Vec<_>>(),
    })
}

fn endpoint(it: &Endpoint) -> Value {
    let names =
        |names: &[std::sync::Arc<str>]| names.iter().map(|it| json!({"name": &**it})).collect::<Vec<_>>();
    json!({
        "addresses": [it.address],
        "conditions": {
            "ready": it.conditions.ready, "serving": it.conditions.serving, "terminating": it.conditions.terminating,
        },
        "nodeName": it.node.as_deref(), "hostname": Some(&it.hostname).filter(|it| !it.is_empty()),
        "targetRef": it.pod.as_deref().map(|name| json!({"kind": "Pod", "name": name})),
        "hints": {"forNodes": names(it.node_hints()), "forZones": names(it.zone_hints())},
    })
}

fn node(it: &Node) -> Value {
    let address = |it: &IpAddr| json!({"type": "InternalIP", "address": it});
    let taint = json!({"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"});
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": &*it.name, "labels": {"topology.kubernetes.io/zone": it.zone.as_deref()}},
        "spec": {
            "podCIDRs": it.info.pod_cidrs.iter().map(ToString::to_string).collect::<Vec<_>>(),
            "taints": it.info.is_being_deleted.then_some(taint).into_iter().collect::<Vec<_>>(),
        },
        "status": {"addresses": it.info.addresses.iter().map(address).collect::<Vec<_>>()},
    })
}

fn service_cidr(it: &ServiceCidr) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR", "metadata": {"name": &*it.name},
        "spec": {"cidrs": it.cidrs.iter().map(ToString::to_string).collect::<Vec<_>>()},
    })
}

fn policy(it: TrafficPolicy) -> &'static str {
    match it {
        TrafficPolicy::Cluster => "Cluster",
        TrafficPolicy::Local => "Local",
    }
}

/// Times are within a second after 1970.
fn time(it: Timestamp) -> String {
    format!("1970-01-01T00:00:00.{:06}Z", it.as_micros())
}
