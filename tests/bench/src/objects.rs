//! The objects of a synthetic cluster, for an API server.

use std::net::Ipv4Addr;

use serde_json::{Value, json};

pub(crate) const TARGET_PORT: u16 = 8080;

pub(crate) const CLUSTER_IPS: &str = "10.96.0.0/16";

/// The cluster IP of a Service; its port is 80.
pub(crate) fn cluster_ip(n: u32) -> Ipv4Addr {
    Ipv4Addr::new(10, 96, (n / 250) as u8, (1 + n % 250) as u8)
}

/// The address of an endpoint; there are 8 million, in 10.128.0.0/9.
pub(crate) fn address(id: u32) -> Ipv4Addr {
    Ipv4Addr::new(10, (128 + id / 62_500) as u8, (id / 250 % 250) as u8, (1 + id % 250) as u8)
}

pub(crate) fn service(n: u32) -> Value {
    let ip = cluster_ip(n);
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": format!("service-{n}"), "namespace": format!("namespace-{}", n % 100)},
        "spec": {
            "type": "ClusterIP", "clusterIP": ip, "clusterIPs": [ip], "ipFamilies": ["IPv4"],
            "ports": [{"name": "http", "protocol": "TCP", "port": 80, "targetPort": TARGET_PORT}],
        },
    })
}

/// The endpoint of a Service with this number, on a node.
pub(crate) fn endpoint(service: u32, number: u32, address: &str, node: u32) -> Value {
    json!({
        "addresses": [address],
        "conditions": {"ready": true, "serving": true, "terminating": false},
        "nodeName": format!("n{node}"), "zone": format!("zone-{}", node % 3),
        "targetRef": {"kind": "Pod", "namespace": "default", "name": format!("service-{service}-6d4cf56db6-{number:05}")},
    })
}

pub(crate) fn slice(service: u32, endpoints: Vec<Value>) -> Value {
    slice_of(service, 0, endpoints)
}

pub(crate) fn slice_of(service: u32, part: u32, endpoints: Vec<Value>) -> Value {
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {
            "name": format!("service-{service}-{part:05}"), "namespace": format!("namespace-{}", service % 100),
            "labels": {"kubernetes.io/service-name": format!("service-{service}")},
        },
        "addressType": "IPv4",
        "ports": [{"name": "http", "protocol": "TCP", "port": TARGET_PORT}],
        "endpoints": endpoints,
    })
}

/// The Service or the slice with so many ports instead of its first one; each has a number of its own.
pub(crate) fn with_ports(mut object: Value, list: &str, count: u32) -> Value {
    if count > 1
        && let Some(ports) = object.pointer_mut(list)
    {
        *ports = (0..count)
            .map(|it| match list {
                "/ports" => json!({"name": format!("p{it}"), "protocol": "TCP", "port": 20_000 + it}),
                _ => json!({"name": format!("p{it}"), "protocol": "TCP", "port": 1 + it, "targetPort": 20_000 + it}),
            })
            .collect();
    }
    object
}
