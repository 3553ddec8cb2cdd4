//! Builders of manifests, which are written atomically: a new file is renamed over the old one.

use std::{
    collections::BTreeMap,
    fmt, fs, iter,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::Path,
    time::Instant,
};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

/// How many endpoints of a slice an API server accepts.
const MAX_SLICE: usize = 1000;

/// A Service together with its EndpointSlices, one per family unless they are very many.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct Service {
    pub name: String,
    pub namespace: String,
    /// Its cluster IPs, the primary one first.
    pub cluster_ips: Vec<IpAddr>,
    pub external_ips: Vec<IpAddr>,
    pub load_balancer_ips: Vec<IpAddr>,
    pub ports: Vec<Port>,
    pub endpoints: Vec<Endpoint>,
    /// Whether `externalTrafficPolicy` is Local.
    pub external_local: bool,
    /// Whether `internalTrafficPolicy` is Local.
    pub internal_local: bool,
    /// `loadBalancerSourceRanges`; none allows all sources.
    pub source_ranges: Vec<String>,
    pub health_check_node_port: Option<u16>,
    /// The timeout of its session affinity in seconds, if it has one.
    pub affinity: Option<u32>,
    pub annotations: BTreeMap<&'static str, String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// Its name; empty if it is the only one.
    pub name: String,
    /// `TCP` or `UDP`.
    pub protocol: &'static str,
    pub port: u16,
    /// The endpoints' port.
    pub target: u16,
    pub node_port: Option<u16>,
}

/// An endpoint: one pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    pub name: String,
    pub node: String,
    /// Its addresses, at most one of each family.
    pub addresses: Vec<IpAddr>,
    pub ready: bool,
    /// Whether it is serving and terminating.
    pub terminating: bool,
}

impl Service {
    /// A Service in the namespace `default`, without ports or endpoints.
    pub fn new(name: &str, cluster_ips: &[IpAddr]) -> Self {
        Self {
            name: name.to_owned(),
            namespace: "default".to_owned(),
            cluster_ips: cluster_ips.to_vec(),
            ..Self::default()
        }
    }

    pub fn external_ips(mut self, ips: &[IpAddr]) -> Self {
        self.external_ips = ips.to_vec();
        self
    }

    pub fn load_balancer_ips(mut self, ips: &[IpAddr]) -> Self {
        self.load_balancer_ips = ips.to_vec();
        self
    }

    pub fn port(mut self, name: &str, protocol: &'static str, port: u16, target: u16) -> Self {
        self.ports.push(Port { name: name.to_owned(), protocol, port, target, node_port: None });
        self
    }

    /// Adds the ports `tcp` and `udp` of one number.
    pub fn tcp_and_udp(self, port: u16, target: u16) -> Self {
        self.port("tcp", "TCP", port, target).port("udp", "UDP", port, target)
    }

    /// Sets the node port of all ports so far.
    pub fn node_ports(mut self, number: u16) -> Self {
        self.ports.iter_mut().for_each(|it| it.node_port = Some(number));
        self
    }

    /// Sets the node port of the port that was added last.
    pub fn node_port(mut self, number: u16) -> Self {
        self.ports.last_mut().expect("a port is added before its node port").node_port = Some(number);
        self
    }

    pub fn affinity(mut self, seconds: u32) -> Self {
        self.affinity = Some(seconds);
        self
    }

    /// Sets the annotation `kube-proxy-ebpf.io/drain`.
    pub fn drain(self, seconds: u32) -> Self {
        self.annotation("kube-proxy-ebpf.io/drain", &format!("{seconds}s"))
    }

    pub fn annotation(mut self, name: &'static str, value: &str) -> Self {
        self.annotations.insert(name, value.to_owned());
        self
    }

    pub fn external_local(mut self) -> Self {
        self.external_local = true;
        self
    }

    pub fn internal_local(mut self) -> Self {
        self.internal_local = true;
        self
    }

    pub fn source_ranges(mut self, ranges: &[&str]) -> Self {
        self.source_ranges = ranges.iter().map(|&it| it.to_owned()).collect();
        self
    }

    pub fn health_check_node_port(mut self, number: u16) -> Self {
        self.health_check_node_port = Some(number);
        self
    }

    /// Adds a ready endpoint on node `n1`.
    pub fn endpoint(self, name: &str, addresses: &[IpAddr]) -> Self {
        self.endpoint_on("n1", name, addresses)
    }

    /// Adds the ready endpoints `web-N` at [`endpoint`]`(N)`.
    pub fn endpoints(self, numbers: impl IntoIterator<Item = u8>) -> Self {
        numbers.into_iter().fold(self, |it, n| it.endpoint(&format!("web-{n}"), &endpoint(n)))
    }

    pub fn endpoint_on(mut self, node: &str, name: &str, addresses: &[IpAddr]) -> Self {
        self.endpoints.push(Endpoint {
            name: name.to_owned(),
            node: node.to_owned(),
            addresses: addresses.to_vec(),
            ready: true,
            terminating: false,
        });
        self
    }

    /// Makes all endpoints so far neither ready nor serving.
    pub fn not_ready(mut self) -> Self {
        for it in &mut self.endpoints {
            (it.ready, it.terminating) = (false, false);
        }
        self
    }

    /// Makes all endpoints so far serving and terminating.
    pub fn terminating(mut self) -> Self {
        for it in &mut self.endpoints {
            (it.ready, it.terminating) = (false, true);
        }
        self
    }

    /// Where each of its ports is reached, given the addresses at which node ports are.
    pub fn frontends(&self, node: [IpAddr; 2]) -> Vec<(SocketAddr, &Port)> {
        let own = [&self.cluster_ips, &self.load_balancer_ips, &self.external_ips].into_iter().flatten();
        let at_own = own.flat_map(|ip| self.ports.iter().map(|it| (SocketAddr::new(*ip, it.port), it)));
        let has_family = |ip: &IpAddr| self.cluster_ips.iter().any(|it| it.is_ipv4() == ip.is_ipv4());
        let at_node = node.into_iter().filter(has_family).flat_map(|ip| {
            self.ports.iter().filter_map(move |it| Some((SocketAddr::new(ip, it.node_port?), it)))
        });
        at_own.chain(at_node).collect()
    }

    /// The addresses of its ready endpoints, of the same family as a frontend.
    pub fn ready_endpoints(&self, frontend: IpAddr) -> impl Iterator<Item = IpAddr> {
        let addresses = self.endpoints.iter().filter(|it| it.ready).flat_map(|it| &it.addresses).copied();
        addresses.filter(move |it| it.is_ipv4() == frontend.is_ipv4())
    }

    pub fn service(&self) -> Value {
        let port = |it: &Port| {
            let Port { name, protocol, port, target, node_port } = it;
            json!({ "name": name, "protocol": protocol, "port": port, "targetPort": target, "nodePort": node_port })
        };
        let affinity = self.affinity.map(|it| json!({ "clientIP": { "timeoutSeconds": it } }));
        let policy = |is_local: bool| is_local.then_some("Local");
        json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": { "name": self.name, "namespace": self.namespace, "annotations": self.annotations },
            "spec": {
                "type": match () {
                    () if !self.load_balancer_ips.is_empty() => "LoadBalancer",
                    () if self.ports.iter().any(|it| it.node_port.is_some()) => "NodePort",
                    () => "ClusterIP",
                },
                "clusterIP": self.cluster_ips.first().map_or("None".to_owned(), ToString::to_string),
                "clusterIPs": self.cluster_ips,
                "ipFamilies": self.cluster_ips.iter().map(|&it| family(it)).collect::<Vec<_>>(),
                "ports": self.ports.iter().map(port).collect::<Vec<_>>(),
                "sessionAffinity": affinity.as_ref().map(|_| "ClientIP"),
                "sessionAffinityConfig": affinity,
                "externalTrafficPolicy": policy(self.external_local),
                "internalTrafficPolicy": policy(self.internal_local),
                "healthCheckNodePort": self.health_check_node_port,
                "loadBalancerSourceRanges": self.source_ranges,
                "externalIPs": self.external_ips,
            },
            "status": {
                "loadBalancer": {
                    "ingress": self.load_balancer_ips.iter().map(|it| json!({ "ip": it })).collect::<Vec<_>>(),
                },
            },
        })
    }

    /// The Service and its EndpointSlices.
    pub fn objects(&self) -> impl Iterator<Item = Value> {
        iter::once(self.service()).chain(self.slices())
    }

    /// The EndpointSlices alone: those of each family that has a cluster IP, also if they have no endpoint.
    pub fn slices(&self) -> impl Iterator<Item = Value> {
        let count = self.endpoints.len().div_ceil(MAX_SLICE).max(1);
        self.cluster_ips.iter().flat_map(move |ip| (0..count).map(move |n| self.slice(family(*ip), n)))
    }

    fn slice(&self, wanted: &str, number: usize) -> Value {
        let port = |it: &Port| json!({ "name": it.name, "port": it.target, "protocol": it.protocol });
        let endpoint = |it: &Endpoint| {
            let Endpoint { name, node, addresses, ready, terminating } = it;
            let address = addresses.iter().find(|it| family(**it) == wanted)?;
            let serving = *ready || *terminating;
            Some(json!({
                "addresses": [address],
                "conditions": { "ready": ready, "serving": serving, "terminating": terminating },
                "nodeName": node,
                "targetRef": { "kind": "Pod", "name": name, "namespace": self.namespace },
            }))
        };
        let endpoints = self.endpoints.iter().skip(number * MAX_SLICE).take(MAX_SLICE);
        let suffix = if number > 0 { format!("-{number}") } else { String::new() };
        json!({
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": format!("{}-{}{suffix}", self.name, wanted.to_lowercase()),
                "namespace": self.namespace,
                "labels": { "kubernetes.io/service-name": self.name },
            },
            "addressType": wanted,
            "ports": self.ports.iter().map(port).collect::<Vec<_>>(),
            "endpoints": endpoints.filter_map(endpoint).collect::<Vec<_>>(),
        })
    }
}

/// A stream of documents in JSON, which is YAML, too.
pub fn documents(objects: impl IntoIterator<Item = Value>) -> String {
    objects.into_iter().map(|it| format!("---\n{it:#}\n")).collect()
}

/// A list as `kubectl get -o json` prints it, which is parsed many times faster than YAML; without slices that have no endpoint.
pub fn list<'a>(services: impl IntoIterator<Item = &'a Service>) -> String {
    let objects = services.into_iter().flat_map(|it| {
        let slices = it.slices().filter(move |_| !it.endpoints.is_empty());
        iter::once(it.service()).chain(slices)
    });
    let items: Vec<_> = objects.map(|it| it.to_string()).collect();
    format!(r#"{{"apiVersion":"v1","kind":"List","items":[{}]}}"#, items.join(","))
}

impl fmt::Display for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&documents(self.objects()))
    }
}

/// The addresses of an endpoint. In a [`TestNode`](crate::TestNode)'s namespace the first is local.
pub const fn endpoint(n: u8) -> [IpAddr; 2] {
    [
        IpAddr::V4(Ipv4Addr::new(10, 244, 1, n)),
        IpAddr::V6(Ipv6Addr::new(0xfd00, 0x10, 0x244, 0, 0, 0, 1, n as u16)),
    ]
}

/// A Service whose cluster IP, 10.96.0.300, is no address.
pub fn invalid_service(namespace: &str, name: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: {namespace}}}\n\
         spec: {{clusterIP: 10.96.0.300, ports: [{{port: 80}}]}}\n"
    )
}

pub fn node(name: &str) -> String {
    format!("apiVersion: v1\nkind: Node\nmetadata:\n  name: {name}\n")
}

/// A Node with addresses of the type InternalIP.
pub fn node_with_addresses(name: &str, addresses: &[IpAddr]) -> String {
    let addresses: Vec<_> =
        addresses.iter().map(|it| format!("{{type: InternalIP, address: '{it}'}}")).collect();
    format!("{}status:\n  addresses: [{}]\n", node(name), addresses.join(", "))
}

/// Replaces a file so that a reader sees all of the old or all of the new text; returns the time just before.
pub fn write_atomically(file: &Path, text: &str) -> Result<Instant> {
    // The file source ignores files with this extension.
    let draft = file.with_extension("draft");
    fs::write(&draft, text).with_context(|| format!("cannot write {}", draft.display()))?;
    let before = Instant::now();
    fs::rename(&draft, file)
        .with_context(|| format!("cannot rename {} to {}", draft.display(), file.display()))?;
    Ok(before)
}

fn family(address: IpAddr) -> &'static str {
    if address.is_ipv4() { "IPv4" } else { "IPv6" }
}
