//! The cluster of `bench outside`: nodes behind a router, with a Service and a place where datagrams are lost.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener},
    path::Path,
};

use ::tests::{
    ingress_cluster::{IngressCluster, IngressNode},
    manifest::Service,
};
use anyhow::{Result, ensure};
use build_tools::command::status;

use crate::connect::timed_connect;

/// How many nodes have endpoints of the Service that is connected to.
pub(crate) const SERVING: usize = 3;
/// The port of its listeners.
pub(crate) const PORT: u16 = 9_090;
/// The networks of the Services' addresses.
pub(crate) const NETWORKS: [&str; 2] = ["203.0.113.0/24", "2001:db8::/64"];

/// Nodes with proxies, and one without, which drops the packets that are measured.
pub(crate) struct BenchCluster {
    pub(crate) cluster: IngressCluster,
    listeners: Vec<TcpListener>,
    pub(crate) address: SocketAddr,
    /// Where datagrams go that are to be lost.
    pub(crate) sink: SocketAddr,
}

impl BenchCluster {
    pub(crate) fn start(binary: &Path, forwarding: &str) -> Result<Self> {
        status("Starting", &format!("a cluster with external-forwarding: {forwarding}"));
        let mut cluster = IngressCluster::new(&format!("bench-{forwarding}"), SERVING as u8 + 1)?;
        let service = |name: &str, number: u8| {
            let cluster_ip = IpAddr::from([10, 96, 0, number]);
            Service::new(name, &[cluster_ip])
                .load_balancer_ips(&[IpAddr::from([203, 0, 113, number])])
                .annotation("kube-proxy-ebpf.io/external-forwarding", forwarding)
        };
        let mut web = service("web", 1).port("", "TCP", 80, PORT);
        for node in &cluster.nodes[..SERVING] {
            web = web.endpoint_on(&node.name(), &format!("pod-{}", node.name()), &[node.pod_addresses()[0]]);
        }
        let serving = &cluster.nodes[1];
        let lost = add_lost_address(serving)?;
        let sink = service("sink", 2).port("", "UDP", 9, 9).endpoint_on(&serving.name(), "sink", &[lost]);
        cluster.write(&[web, sink]);
        for node in 0..SERVING {
            cluster.start_binary(binary, node, &[]);
        }
        cluster.wait_until_applied();
        let address = SocketAddr::from(([203, 0, 113, 1], 80));
        let sink = SocketAddr::from(([203, 0, 113, 2], 9));
        let listen = |node: &IngressNode| {
            let listener = node.pods.run(|| TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT)))?;
            listener.set_nonblocking(true)?;
            anyhow::Ok(listener)
        };
        let listeners = cluster.nodes[..SERVING].iter().map(listen).collect::<Result<_>>()?;
        let bench = Self { cluster, listeners, address, sink };
        if forwarding == "dsr" {
            bench.wait_until_forwarded();
        }
        Ok(bench)
    }

    /// Waits until every node forwards to those with endpoints.
    pub(crate) fn wait_until_forwarded(&self) {
        self.cluster.wait_until_forwarded(self.address, &[(0, 1), (1, 1), (2, 1)]);
        self.cluster.wait_until_settled();
    }

    /// The time of a connect and a close, in nanoseconds.
    pub(crate) fn connect_and_close(&self, address: SocketAddr) -> Result<f64> {
        let took = timed_connect(address)?;
        let accepted = self.listeners.iter().map(|it| std::iter::from_fn(|| it.accept().ok()).count());
        ensure!(accepted.sum::<usize>() == 1, "no endpoint has accepted the connection");
        Ok(took)
    }
}

/// An address that a node sends to its pods, of which none has it: packets to it end there.
pub(crate) fn add_lost_address(node: &IngressNode) -> Result<IpAddr> {
    let IpAddr::V4(pod) = node.pod_addresses()[0] else { anyhow::bail!("IPv4 comes first") };
    let [a, b, c, _] = pod.octets();
    let lost = IpAddr::from([a, b, c, 200]);
    node.netns.ip(&["route", "add", &lost.to_string(), "via", &pod.to_string()])?;
    node.pods.set_sysctl("ipv4/ip_forward", "0")?;
    Ok(lost)
}
