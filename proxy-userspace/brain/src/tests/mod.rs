//! How a Service becomes the state of a node.

mod admission;
mod affected;
mod conflicts;
mod incremental;

use std::{num::NonZeroU16, sync::Arc};

use model::{
    Family, Protocol, ServiceName,
    cluster::{Conditions, Endpoint, EndpointSlice, Hints, Node, Service, SliceName, SlicePort},
    state::{self, Scope, ServicePort, ServiceState},
};

use crate::{NodeView, Options};

fn number(port: u16) -> NonZeroU16 {
    NonZeroU16::new(port).unwrap()
}

/// A Service with one port and a cluster IP of each family.
fn service() -> Service {
    Service {
        cluster_ips: vec!["10.96.0.1".parse().unwrap(), "fd00::1".parse().unwrap()],
        ports: vec![ServicePort::new(Protocol::Tcp, number(80))],
        ..Service::new(ServiceName::new("ns", "web"))
    }
}

fn slice_named(name: &str, family: Family, endpoints: Vec<Endpoint>) -> EndpointSlice {
    EndpointSlice {
        ports: vec![SlicePort { name: String::new(), protocol: Protocol::Tcp, port: number(8080) }],
        endpoints,
        ..EndpointSlice::new(
            SliceName { namespace: "ns".into(), name: name.into() },
            ServiceName::new("ns", "web"),
            family,
        )
    }
}

/// A slice of IPv4 endpoints with port 8080.
fn slice(endpoints: impl Into<Vec<Endpoint>>) -> EndpointSlice {
    slice_named("web-1", Family::V4, endpoints.into())
}

/// A ready endpoint on another node.
fn at(address: &str) -> Endpoint {
    Endpoint { node: Some("n2".into()), ..Endpoint::new(address.parse().unwrap()) }
}

/// A ready endpoint on this node.
fn here(address: &str) -> Endpoint {
    Endpoint { node: Some("n1".into()), ..at(address) }
}

fn unready(endpoint: Endpoint) -> Endpoint {
    Endpoint { conditions: Conditions { ready: false, serving: false, terminating: false }, ..endpoint }
}

/// Terminating, and still serving.
fn terminating(endpoint: Endpoint) -> Endpoint {
    Endpoint { conditions: Conditions { ready: false, serving: true, terminating: true }, ..endpoint }
}

fn zones(endpoint: Endpoint, zones: &[&str]) -> Endpoint {
    let zones = zones.iter().map(|it| Arc::from(*it)).collect();
    Endpoint { hints: Some(Arc::new(Hints { zones, ..Hints::default() })), ..endpoint }
}

fn nodes(endpoint: Endpoint, nodes: &[&str]) -> Endpoint {
    let nodes = nodes.iter().map(|it| Arc::from(*it)).collect();
    Endpoint { hints: Some(Arc::new(Hints { nodes, ..Hints::default() })), ..endpoint }
}

fn pod(endpoint: Endpoint, pod: &str) -> Endpoint {
    Endpoint { pod: Some(pod.into()), ..endpoint }
}

/// A Node without addresses.
fn node(name: &str, zone: Option<&str>) -> Node {
    Node { name: name.into(), zone: zone.map(Into::into), info: state::NodeInfo::default() }
}
