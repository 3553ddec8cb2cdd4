//! Builders of manifests, which are written atomically: a new file is renamed over the old one.

use std::{
    fmt::{self, Write as _},
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
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
    /// Its endpoints.
    pub endpoints: Vec<Endpoint>,
    /// Whether `externalTrafficPolicy` is Local.
    pub external_local: bool,
    /// Whether `internalTrafficPolicy` is Local.
    pub internal_local: bool,
    /// `loadBalancerSourceRanges`; none allows all sources.
    pub source_ranges: Vec<String>,
    /// `healthCheckNodePort`.
    pub health_check_node_port: Option<u16>,
    /// The timeout of its session affinity in seconds, if it has one.
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
    /// The node port.
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
    /// Whether it is ready.
    pub ready: bool,
    /// Whether it is serving and terminating.
    pub terminating: bool,
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

    /// Sets its external IPs.
    #[must_use]
    pub fn external_ips(mut self, ips: &[IpAddr]) -> Self {
        self.external_ips = ips.to_vec();
        self
    }

    /// Sets the addresses of its load balancer.
    #[must_use]
    pub fn load_balancer_ips(mut self, ips: &[IpAddr]) -> Self {
        self.load_balancer_ips = ips.to_vec();
        self
    }

    /// Adds a port.
    #[must_use]
    pub fn port(mut self, name: &str, protocol: &'static str, port: u16, target: u16) -> Self {
        self.ports.push(Port { name: name.to_owned(), protocol, port, target, node_port: None });
        self
    }

    /// Sets the node port of the port that was added last.
    ///
    /// # Panics
    ///
    /// If there is none.
    #[must_use]
    pub fn node_port(mut self, number: u16) -> Self {
        self.ports.last_mut().expect("a port is added before its node port").node_port = Some(number);
        self
    }

    /// Sets the session affinity ClientIP.
    #[must_use]
    pub fn affinity(mut self, seconds: u32) -> Self {
        self.affinity = Some(seconds);
        self
    }

    /// Sets `externalTrafficPolicy: Local`.
    #[must_use]
    pub fn external_local(mut self) -> Self {
        self.external_local = true;
        self
    }

    /// Sets `internalTrafficPolicy: Local`.
    #[must_use]
    pub fn internal_local(mut self) -> Self {
        self.internal_local = true;
        self
    }

    /// Sets `loadBalancerSourceRanges`.
    #[must_use]
    pub fn source_ranges(mut self, ranges: &[&str]) -> Self {
        self.source_ranges = ranges.iter().map(|&it| it.to_owned()).collect();
        self
    }

    /// Sets `healthCheckNodePort`.
    #[must_use]
    pub fn health_check_node_port(mut self, number: u16) -> Self {
        self.health_check_node_port = Some(number);
        self
    }

    /// Adds a ready endpoint on node `n1`.
    #[must_use]
    pub fn endpoint(self, name: &str, addresses: &[IpAddr]) -> Self {
        self.endpoint_on("n1", name, addresses)
    }

    /// Adds the ready endpoints `web-N` at [`endpoint`]`(N)`.
    #[must_use]
    pub fn endpoints(self, numbers: impl IntoIterator<Item = u8>) -> Self {
        numbers.into_iter().fold(self, |it, n| it.endpoint(&format!("web-{n}"), &endpoint(n)))
    }

    /// Adds a ready endpoint on a node.
    #[must_use]
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

    /// Makes all endpoints so far serving and terminating.
    #[must_use]
    pub fn terminating(mut self) -> Self {
        for it in &mut self.endpoints {
            (it.ready, it.terminating) = (false, true);
        }
        self
    }

    /// The manifest of the Service alone.
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
        let mut add = |line: fmt::Arguments<'_>| write(&mut text, line);
        for port in &self.ports {
            add(format_args!("  - port: {}\n    targetPort: {}\n", port.port, port.target));
            add(format_args!("    protocol: {}\n", port.protocol));
            if let Some(number) = port.node_port {
                add(format_args!("    nodePort: {number}\n"));
            }
            if !port.name.is_empty() {
                add(format_args!("    name: {}\n", port.name));
            }
        }
        if let Some(seconds) = self.affinity {
            add(format_args!("  sessionAffinity: ClientIP\n  sessionAffinityConfig:\n"));
            add(format_args!("    clientIP: {{timeoutSeconds: {seconds}}}\n"));
        }
        if self.external_local {
            add(format_args!("  externalTrafficPolicy: Local\n"));
        }
        if self.internal_local {
            add(format_args!("  internalTrafficPolicy: Local\n"));
        }
        if let Some(number) = self.health_check_node_port {
            add(format_args!("  healthCheckNodePort: {number}\n"));
        }
        if !self.source_ranges.is_empty() {
            let ranges: Vec<_> = self.source_ranges.iter().map(|it| format!("'{it}'")).collect();
            add(format_args!("  loadBalancerSourceRanges: [{}]\n", ranges.join(", ")));
        }
        if !self.external_ips.is_empty() {
            let ips: Vec<_> = self.external_ips.iter().map(|it| format!("'{it}'")).collect();
            add(format_args!("  externalIPs: [{}]\n", ips.join(", ")));
        }
        if !self.load_balancer_ips.is_empty() {
            let ips: Vec<_> = self.load_balancer_ips.iter().map(|it| format!("{{ip: '{it}'}}")).collect();
            add(format_args!("status:\n  loadBalancer:\n    ingress: [{}]\n", ips.join(", ")));
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
            let Endpoint { name, node, ready, terminating, .. } = endpoint;
            let terminating = if *terminating { ", serving: true, terminating: true" } else { "" };
            write(
                &mut text,
                format_args!("- addresses: ['{address}']\n  conditions: {{ready: {ready}{terminating}}}\n"),
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

/// The addresses of an endpoint. In a [`TestNode`](crate::TestNode)'s namespace the first is local.
#[must_use]
pub const fn endpoint(n: u8) -> [IpAddr; 2] {
    [
        IpAddr::V4(Ipv4Addr::new(10, 244, 1, n)),
        IpAddr::V6(Ipv6Addr::new(0xfd00, 0x10, 0x244, 0, 0, 0, 1, n as u16)),
    ]
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

/// Replaces a file so that a reader sees all of the old or all of the new text; returns the time just before.
///
/// # Errors
///
/// If the folder is not writable.
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

fn write(text: &mut String, arguments: fmt::Arguments<'_>) {
    text.write_fmt(arguments).expect("a String accepts all text");
}
