//! A synthetic cluster, and the resource usage of a process; the benchmark of the gRPC server uses them, too.
//!
//! Invariant: every change affects every node.

use std::{net::Ipv4Addr, num::NonZeroU16, sync::Arc, time::Duration};

use model::{
    Family, Protocol, ServiceName,
    cluster::{ClusterState, Endpoint, EndpointSlice, Node, Service, SliceName, SlicePort},
    state::{ServicePort, TargetPort},
};
use nix::time::{ClockId, clock_gettime};

const HTTP: NonZeroU16 = NonZeroU16::new(80).expect("it is not zero");
const TARGET: NonZeroU16 = NonZeroU16::new(8080).expect("it is not zero");

/// The size of a synthetic cluster.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SyntheticCluster {
    pub(crate) services: u32,
    pub(crate) endpoints: u32,
    pub(crate) nodes: u32,
}

impl SyntheticCluster {
    pub(crate) fn initial(self) -> ClusterState {
        let mut cluster = ClusterState::default();
        for index in 0..self.services {
            cluster.services.insert(service(index));
            cluster.set_slice(self.slice(index, 0));
        }
        for index in 0..self.nodes {
            let zone = format!("zone-{}", index % 3);
            cluster.nodes.insert(Node {
                name: node_name(index).into(),
                zone: Some(zone.into()),
                info: model::state::NodeInfo::default(),
            });
        }
        cluster
    }

    /// A slice with one changed endpoint; each change is of another Service.
    pub(crate) fn change(self, change: u32) -> Result<EndpointSlice, std::num::TryFromIntError> {
        let index = u64::from(change) * 7919 % u64::from(self.services);
        Ok(self.slice(u32::try_from(index)?, change))
    }

    /// The slice of a Service; `change` determines the pod of its first endpoint.
    fn slice(self, index: u32, change: u32) -> EndpointSlice {
        let name = service_name(index);
        let endpoints = (0..self.endpoints).map(|it| {
            let (pod, address) = match (it, change) {
                (0, 1..) => (format!("{}-new-{change}", name.name), 0x0b00_0000 + change),
                _ => (format!("{}-{it}", name.name), 0x0a00_0000 + index * self.endpoints + it),
            };
            // The pods of a Service, and of successive Services, run on different nodes.
            let node = (index.wrapping_mul(7) + it * (self.nodes / self.endpoints).max(1)) % self.nodes;
            endpoint(Ipv4Addr::from(address), &pod, &node_name(node))
        });
        EndpointSlice {
            ports: vec![SlicePort { name: "http".into(), protocol: Protocol::Tcp, port: TARGET }],
            endpoints: endpoints.collect(),
            ..EndpointSlice::new(
                SliceName {
                    namespace: Arc::clone(&name.namespace),
                    name: format!("{}-slice", name.name).into(),
                },
                name.clone(),
                Family::V4,
            )
        }
    }
}

pub(crate) fn node_name(index: u32) -> String {
    format!("node-{index:04}")
}

fn service_name(index: u32) -> ServiceName {
    ServiceName::new(format!("namespace-{}", index % 50), format!("service-{index:05}"))
}

fn service(index: u32) -> Service {
    Service {
        cluster_ips: vec![Ipv4Addr::from(0x0a60_0000 + index).into()],
        ports: vec![ServicePort {
            name: "http".into(),
            target_port: TargetPort::Number(TARGET),
            ..ServicePort::new(Protocol::Tcp, HTTP)
        }],
        ..Service::new(service_name(index))
    }
}

fn endpoint(address: Ipv4Addr, pod: &str, node: &str) -> Endpoint {
    Endpoint { node: Some(node.into()), pod: Some(pod.into()), ..Endpoint::new(address.into()) }
}

/// The CPU time of this process.
pub(crate) fn cpu() -> Result<Duration, nix::Error> {
    clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).map(Duration::from)
}

/// The resident memory of this process in kB.
pub(crate) fn resident() -> Result<u64, Box<dyn std::error::Error>> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line =
        status.lines().find_map(|it| it.strip_prefix("VmRSS:")).ok_or("no VmRSS in /proc/self/status")?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}
