//! The demo's manifests: copied from the repository, read for the expected endpoints, and edited.

use std::{
    collections::BTreeMap,
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::{Context as _, Result};
use serde::Deserialize;
use tests::{Transport, manifest};

/// The largest number of endpoints that the demo scales to.
pub(crate) const MAX_ENDPOINTS: u8 = 4;

pub(crate) struct Manifests {
    folder: PathBuf,
    services: BTreeMap<String, DemoService>,
}

/// A Service with its endpoints.
pub(crate) struct DemoService {
    pub(crate) name: String,
    pub(crate) transport: Transport,
    port: u16,
    cluster_ips: Vec<IpAddr>,
    /// Pod name and address, in the order of the slices.
    pub(crate) endpoints: Vec<(String, SocketAddr)>,
}

impl DemoService {
    /// Its addresses, one per family.
    pub(crate) fn addresses(&self) -> Vec<SocketAddr> {
        self.cluster_ips.iter().map(|&ip| SocketAddr::new(ip, self.port)).collect()
    }

    /// The endpoints of one of its addresses.
    pub(crate) fn endpoints_of(&self, address: SocketAddr) -> Vec<&(String, SocketAddr)> {
        self.endpoints.iter().filter(|(_, it)| it.is_ipv4() == address.is_ipv4()).collect()
    }
}

#[derive(Deserialize)]
#[serde(tag = "kind", rename_all_fields = "camelCase")]
enum Document {
    Service { metadata: Metadata, spec: Spec },
    EndpointSlice { metadata: Metadata, ports: Vec<Port>, endpoints: Vec<Endpoint> },
    Node {},
}

#[derive(Deserialize)]
struct Metadata {
    name: String,
    #[serde(default)]
    labels: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct Spec {
    #[serde(rename = "clusterIPs")]
    cluster_ips: Vec<IpAddr>,
    ports: Vec<Port>,
}

#[derive(Deserialize)]
struct Port {
    protocol: String,
    port: u16,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Endpoint {
    addresses: Vec<IpAddr>,
    target_ref: Metadata,
}

impl Manifests {
    /// Copies a folder of manifests and reads them.
    pub(crate) fn copy(from: &Path, to: &Path) -> Result<Self> {
        fs::create_dir_all(to).with_context(|| format!("cannot create {}", to.display()))?;
        let mut documents: Vec<Document> = Vec::new();
        for entry in fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))? {
            let file = entry?.path();
            let text =
                fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
            documents.extend::<Vec<_>>(
                serde_saphyr::from_multiple(&text)
                    .with_context(|| format!("cannot parse {}", file.display()))?,
            );
            manifest::write_atomically(&to.join(file.file_name().context("a file has a name")?), &text)?;
        }
        Ok(Self { folder: to.to_owned(), services: services(documents)? })
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(crate) fn services(&self) -> impl Iterator<Item = &DemoService> {
        self.services.values()
    }

    /// The Service that the demo scales.
    pub(crate) fn web(&self) -> Result<&DemoService> {
        self.services.get("web").context("deploy/demo has no Service named web")
    }

    fn web_target(&self) -> Result<u16> {
        Ok(self.web()?.endpoints.first().context("Service web has no endpoint")?.1.port())
    }

    /// Every pod with its addresses, including those that `web` has only at its largest.
    pub(crate) fn pods(&self) -> Result<BTreeMap<String, Vec<SocketAddr>>> {
        let mut pods: BTreeMap<String, Vec<SocketAddr>> = BTreeMap::new();
        let scaled = addresses(&scaled_web(MAX_ENDPOINTS, self.web_target()?));
        for (name, address) in self.services().flat_map(|it| it.endpoints.iter().cloned()).chain(scaled) {
            let addresses = pods.entry(name).or_default();
            if !addresses.contains(&address) {
                addresses.push(address);
            }
        }
        Ok(pods)
    }

    /// Writes the EndpointSlices of `web` with a number of endpoints. Returns when the file was replaced, and the names
    /// of the endpoints.
    pub(crate) fn scale_web(&self, endpoints: u8) -> Result<(Instant, Vec<String>)> {
        let web = scaled_web(endpoints, self.web_target()?);
        let replaced = manifest::write_atomically(&self.folder.join("web-endpoints.yaml"), &web.slices())?;
        Ok((replaced, web.endpoints.into_iter().map(|it| it.name).collect()))
    }
}

fn services(documents: Vec<Document>) -> Result<BTreeMap<String, DemoService>> {
    let (mut services, mut slices) = (BTreeMap::new(), Vec::new());
    for document in documents {
        match document {
            Document::Service { metadata: Metadata { name, .. }, spec: Spec { cluster_ips, ports } } => {
                let Port { protocol, port } =
                    ports.first().with_context(|| format!("Service {name} has no port"))?;
                let transport = if protocol == "UDP" { Transport::Udp } else { Transport::Tcp };
                let service = DemoService {
                    name: name.clone(),
                    transport,
                    port: *port,
                    cluster_ips,
                    endpoints: vec![],
                };
                services.insert(name, service);
            }
            Document::EndpointSlice { metadata, ports, endpoints } => {
                slices.push((metadata, ports, endpoints));
            }
            Document::Node {} => {}
        }
    }
    for (Metadata { name, labels }, ports, endpoints) in slices {
        let service = labels.get("kubernetes.io/service-name").and_then(|it| services.get_mut(it));
        let service = service.with_context(|| format!("EndpointSlice {name} has no Service"))?;
        for (endpoint, port) in endpoints.iter().flat_map(|it| ports.iter().map(move |port| (it, port))) {
            for &ip in &endpoint.addresses {
                let address = SocketAddr::new(ip, port.port);
                service.endpoints.push((endpoint.target_ref.name.clone(), address));
            }
        }
    }
    Ok(services)
}

/// `web` as in the repository's manifest, with the first `endpoints` pods.
fn scaled_web(endpoints: u8, target: u16) -> manifest::Service {
    let ips = [IpAddr::from(Ipv4Addr::UNSPECIFIED), IpAddr::from(Ipv6Addr::UNSPECIFIED)];
    let service = manifest::Service::new("web", &ips).port("http", "TCP", 80, target);
    (1..=endpoints).fold(service, |service, pod| {
        let v4 = Ipv4Addr::new(10, 244, 1, 10 + pod);
        let v6 = Ipv6Addr::new(0xfd00, 0x10, 0x244, 0, 0, 0, 0, 0x10 + u16::from(pod));
        service.endpoint(&format!("web-{pod}"), &[v4.into(), v6.into()])
    })
}

/// Each endpoint's name with each of its addresses.
fn addresses(service: &manifest::Service) -> Vec<(String, SocketAddr)> {
    let target = service.ports[0].target;
    let address = |name: &str, ip| (name.to_owned(), SocketAddr::new(ip, target));
    let endpoints = service.endpoints.iter();
    endpoints.flat_map(|it| it.addresses.iter().map(|&ip| address(&it.name, ip))).collect()
}

#[cfg(test)]
mod tests_of_manifests {
    use super::*;

    #[test]
    fn the_demo_scales_the_service_of_the_repository() {
        let folder = std::env::temp_dir().join(format!("kpe-manifests-{}", std::process::id()));
        let manifests =
            Manifests::copy(&build_tools::command::workspace().join("deploy/demo"), &folder).unwrap();
        fs::remove_dir_all(&folder).unwrap();
        let mut written = addresses(&scaled_web(3, 8080));
        written.sort_by_key(|(_, address)| *address);
        assert_eq!(manifests.web().unwrap().endpoints, written);
        assert!(manifests.services["empty"].endpoints.is_empty());
        assert_eq!(manifests.pods().unwrap().len(), 6);
    }
}
