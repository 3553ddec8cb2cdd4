//! Manifests, written the way a careful person edits them: a new file, moved over the old one.

use std::{
    fmt::{self, Write as _},
    fs,
    net::IpAddr,
    path::Path,
    time::Instant,
};

use anyhow::{Context as _, Result};

/// A Service together with its EndpointSlices, one per family.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Service {
    /// Its name.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
    /// Its cluster IPs, the primary one first.
    pub cluster_ips: Vec<IpAddr>,
    /// Its external IPs.
    pub external_ips: Vec<IpAddr>,
    /// The addresses of its load balancer.
    pub load_balancer_ips: Vec<IpAddr>,
    /// Its ports.
    pub ports: Vec<Port>,
    /// What serves it.
    pub endpoints: Vec<Endpoint>,
    /// Whether its external traffic policy is Local.
    pub external_local: bool,
    /// Whether its internal traffic policy is Local.
    pub internal_local: bool,
    /// The sources that may use the load balancer; all, if none is named.
    pub source_ranges: Vec<String>,
    /// Where the health of its endpoints on a node is told.
    pub health_check_node_port: Option<u16>,
    /// The time-out of its session affinity in seconds, if it has one.
    pub affinity: Option<u32>,
}

/// A port of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// Its name; empty if it is the only one.
    pub name: String,
    /// `TCP` or `UDP`.
    pub protocol: &'static str,
    /// The Service's port.
    pub port: u16,
    /// The endpoints' port.
    pub target: u16,
    /// The port at the nodes' addresses.
    pub node_port: Option<u16>,
}

/// An endpoint: one pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// The pod's name.
    pub name: String,
    /// Its node.
    pub node: String,
    /// Its addresses, at most one of each family.
    pub addresses: Vec<IpAddr>,
    /// Whether it takes traffic.
    pub ready: bool,
    /// Whether it is about to go, and still serves.
    pub leaving: bool,
}

impl Service {
    /// A Service in the namespace `default`, without ports or endpoints.
    #[must_use]
    pub fn new(name: &str, cluster_ips: &[IpAddr]) -> Self {
        Self {
            name: name.to_owned(),
            namespace: "default".to_owned(),
            cluster_ips: cluster_ips.to_vec(),
            ..Self::default()
        }
    }

    /// With external IPs.
    #[must_use]
    pub fn external_ips(mut self, ips: &[IpAddr]) -> Self {
        self.external_ips = ips.to_vec();
        self
    }

    /// With a load balancer that has these addresses.
    #[must_use]
    pub fn load_balancer_ips(mut self, ips: &[IpAddr]) -> Self {
        self.load_balancer_ips = ips.to_vec();
        self
    }

    /// With another port.
    #[must_use]
    pub fn port(mut self, name: &str, protocol: &'static str, port: u16, target: u16) -> Self {
        self.ports.push(Port { name: name.to_owned(), protocol, port, target, node_port: None });
        self
    }

    /// With a node port for the port that was added last.
    ///
    /// # Panics
    ///
    /// If there is none.
    #[must_use]
    pub fn node_port(mut self, number: u16) -> Self {
        self.ports.last_mut().expect("a port comes before its node port").node_port = Some(number);
        self
    }

    /// With session affinity by client.
    #[must_use]
    pub fn affinity(mut self, seconds: u32) -> Self {
        self.affinity = Some(seconds);
        self
    }

    /// With the external traffic policy Local.
    #[must_use]
    pub fn external_local(mut self) -> Self {
        self.external_local = true;
        self
    }

    /// With the internal traffic policy Local.
    #[must_use]
    pub fn internal_local(mut self) -> Self {
        self.internal_local = true;
        self
    }

    /// With ranges of sources that may use the load balancer.
    #[must_use]
    pub fn source_ranges(mut self, ranges: &[&str]) -> Self {
        self.source_ranges = ranges.iter().map(|&it| it.to_owned()).collect();
        self
    }

    /// With a port at which the health of its endpoints on a node is told.
    #[must_use]
    pub fn health_check_node_port(mut self, number: u16) -> Self {
        self.health_check_node_port = Some(number);
        self
    }

    /// With another endpoint, ready, on node `n1`.
    #[must_use]
    pub fn endpoint(self, name: &str, addresses: &[IpAddr]) -> Self {
        self.endpoint_on("n1", name, addresses)
    }

    /// With another endpoint, ready, on a node.
    #[must_use]
    pub fn endpoint_on(mut self, node: &str, name: &str, addresses: &[IpAddr]) -> Self {
        let (name, node) = (name.to_owned(), node.to_owned());
        self.endpoints.push(Endpoint {
            name,
            node,
            addresses: addresses.to_vec(),
            ready: true,
            leaving: false,
        });
        self
    }

    /// All endpoints so far are about to go, and still serve.
    #[must_use]
    pub fn leaving(mut self) -> Self {
        for it in &mut self.endpoints {
            (it.ready, it.leaving) = (false, true);
        }
        self
    }

    /// The Service alone.
    #[must_use]
    pub fn service(&self) -> String {
        let ips: Vec<_> = self.cluster_ips.iter().map(|it| format!("'{it}'")).collect();
        let families: Vec<_> = self.cluster_ips.iter().map(|&it| family(it)).collect();
        let mut text = format!(
            "apiVersion: v1\nkind: Service\nmetadata:\n  name: {}\n  namespace: {}\nspec:\n  type: {}\n  \
             clusterIP: {}\n  clusterIPs: [{}]\n  ipFamilies: [{}]\n  ports:\n",
            self.name,
            self.namespace,
            match () {
                () if !self.load_balancer_ips.is_empty() => "LoadBalancer",
                () if self.ports.iter().any(|it| it.node_port.is_some()) => "NodePort",
                () => "ClusterIP",
            },
            ips.first().map_or("None", String::as_str),
            ips.join(", "),
            families.join(", "),
        );
        for port in &self.ports {
            write(&mut text, format_args!("  - port: {}\n    targetPort: {}\n", port.port, port.target));
            write(&mut text, format_args!("    protocol: {}\n", port.protocol));
            if let Some(number) = port.node_port {
                write(&mut text, format_args!("    nodePort: {number}\n"));
            }
            if !port.name.is_empty() {
                write(&mut text, format_args!("    name: {}\n", port.name));
            }
        }
        if let Some(seconds) = self.affinity {
            write(&mut text, format_args!("  sessionAffinity: ClientIP\n  sessionAffinityConfig:\n"));
            write(&mut text, format_args!("    clientIP: {{timeoutSeconds: {seconds}}}\n"));
        }
        if self.external_local {
            text.push_str("  externalTrafficPolicy: Local\n");
        }
        if self.internal_local {
            text.push_str("  internalTrafficPolicy: Local\n");
        }
        if let Some(number) = self.health_check_node_port {
            write(&mut text, format_args!("  healthCheckNodePort: {number}\n"));
        }
        if !self.source_ranges.is_empty() {
            let ranges: Vec<_> = self.source_ranges.iter().map(|it| format!("'{it}'")).collect();
            write(&mut text, format_args!("  loadBalancerSourceRanges: [{}]\n", ranges.join(", ")));
        }
        if !self.external_ips.is_empty() {
            text.push_str("  externalIPs:\n");
            for ip in &self.external_ips {
                write(&mut text, format_args!("  - '{ip}'\n"));
            }
        }
        if !self.load_balancer_ips.is_empty() {
            text.push_str("status:\n  loadBalancer:\n    ingress:\n");
            for ip in &self.load_balancer_ips {
                write(&mut text, format_args!("    - ip: '{ip}'\n"));
            }
        }
        text
    }

    /// The EndpointSlices alone: one for each family that has a cluster IP.
    #[must_use]
    pub fn slices(&self) -> String {
        let documents: Vec<_> = self.cluster_ips.iter().map(|ip| self.slice(family(*ip))).collect();
        documents.join("---\n")
    }

    fn slice(&self, wanted: &str) -> String {
        let mut text = format!(
            "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata:\n  name: {0}-{1}\n  namespace: {2}\n  \
             labels:\n    kubernetes.io/service-name: {0}\naddressType: {wanted}\nports:\n",
            self.name,
            wanted.to_lowercase(),
            self.namespace,
        );
        for port in &self.ports {
            let Port { name, protocol, target, .. } = port;
            write(&mut text, format_args!("- name: '{name}'\n  port: {target}\n  protocol: {protocol}\n"));
        }
        let members: Vec<_> = self
            .endpoints
            .iter()
            .filter_map(|it| Some((it, it.addresses.iter().find(|address| family(**address) == wanted)?)))
            .collect();
        text.push_str(if members.is_empty() { "endpoints: []\n" } else { "endpoints:\n" });
        for (endpoint, address) in members {
            let Endpoint { name, node, ready, leaving, .. } = endpoint;
            let leaving = if *leaving { ", serving: true, terminating: true" } else { "" };
            write(
                &mut text,
                format_args!("- addresses: ['{address}']\n  conditions: {{ready: {ready}{leaving}}}\n"),
            );
            write(&mut text, format_args!("  nodeName: {node}\n  targetRef: {{kind: Pod, name: {name}, "));
            write(&mut text, format_args!("namespace: {}}}\n", self.namespace));
        }
        text
    }
}

impl fmt::Display for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}---\n{}", self.service(), self.slices())
    }
}

/// A Node.
#[must_use]
pub fn node(name: &str) -> String {
    format!("apiVersion: v1\nkind: Node\nmetadata:\n  name: {name}\n")
}

/// A Node with addresses of the type InternalIP.
#[must_use]
pub fn node_with_addresses(name: &str, addresses: &[IpAddr]) -> String {
    let addresses: Vec<_> =
        addresses.iter().map(|it| format!("{{type: InternalIP, address: '{it}'}}")).collect();
    format!("{}status:\n  addresses: [{}]\n", node(name), addresses.join(", "))
}

/// Writes a file so that a reader sees all of the old or all of the new, and gives back when it became the new.
///
/// # Errors
///
/// If the folder cannot be written to.
pub fn write_atomically(file: &Path, text: &str) -> Result<Instant> {
    // A reader of manifests passes over files of other kinds.
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

fn write(text: &mut String, arguments: fmt::Arguments<'_>) {
    text.write_fmt(arguments).expect("a String takes whatever is written");
}
