//! The manifests the demo shows: copied from the repository, read for what to expect, and edited.

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

/// The most endpoints the demo scales to.
pub(crate) const MOST: u8 = 4;

pub(crate) struct Manifests {
    folder: PathBuf,
    services: BTreeMap<String, Service>,
}

/// A Service and what its manifests say about it.
pub(crate) struct Service {
    pub(crate) name: String,
    pub(crate) transport: Transport,
    port: u16,
    cluster_ips: Vec<IpAddr>,
    /// Pod name and address, in the order of the slices.
    pub(crate) endpoints: Vec<(String, SocketAddr)>,
}

impl Service {
    /// Where it is reached, once per family.
    pub(crate) fn addresses(&self) -> Vec<SocketAddr> {
        self.cluster_ips.iter().map(|&ip| SocketAddr::new(ip, self.port)).collect()
    }

    /// The endpoints that serve one of its addresses.
    pub(crate) fn behind(&self, address: SocketAddr) -> Vec<&(String, SocketAddr)> {
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
        let mut documents = Vec::new();
        for entry in fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))? {
            let file = entry?.path();
            let text =
                fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
            let read: Vec<Document> = serde_saphyr::from_multiple(&text)
                .with_context(|| format!("cannot understand {}", file.display()))?;
            documents.extend(read);
            manifest::write_atomically(&to.join(file.file_name().context("a file has a name")?), &text)?;
        }
        Self::of(documents, to.to_owned())
    }

    fn of(documents: Vec<Document>, folder: PathBuf) -> Result<Self> {
        let (mut services, mut slices) = (BTreeMap::new(), Vec::new());
        for document in documents {
            match document {
                Document::Service { metadata: Metadata { name, .. }, spec } => {
                    let port = spec.ports.first().with_context(|| format!("Service {name} has no port"))?;
                    let transport = if port.protocol == "UDP" { Transport::Udp } else { Transport::Tcp };
                    let (port, cluster_ips) = (port.port, spec.cluster_ips);
                    let service =
                        Service { name: name.clone(), transport, port, cluster_ips, endpoints: vec![] };
                    services.insert(name, service);
                }
                Document::EndpointSlice { metadata, ports, endpoints } => {
                    slices.push((metadata, ports, endpoints));
                }
                Document::Node {} => {}
            }
        }
        for (metadata, ports, endpoints) in slices {
            let service = metadata.labels.get("kubernetes.io/service-name");
            let service = service.and_then(|it| services.get_mut(it));
            let service =
                service.with_context(|| format!("EndpointSlice {} has no Service", metadata.name))?;
            for (endpoint, port) in endpoints.iter().flat_map(|it| ports.iter().map(move |port| (it, port))) {
                for &ip in &endpoint.addresses {
                    let address = SocketAddr::new(ip, port.port);
                    service.endpoints.push((endpoint.target_ref.name.clone(), address));
                }
            }
        }
        Ok(Self { folder, services })
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(crate) fn services(&self) -> impl Iterator<Item = &Service> {
        self.services.values()
    }

    pub(crate) fn service(&self, name: &str) -> Result<&Service> {
        self.services.get(name).with_context(|| format!("deploy/demo has no Service named {name}"))
    }

    /// Every pod that serves something now or when `web` is as large as it gets, and where it listens.
    pub(crate) fn pods(&self) -> Result<BTreeMap<String, Vec<SocketAddr>>> {
        let mut pods: BTreeMap<String, Vec<SocketAddr>> = BTreeMap::new();
        let target = self.service("web")?.endpoints.first().context("Service web has no endpoint")?.1.port();
        let grown = scaled(MOST, target);
        let later = grown.endpoints.iter().flat_map(|it| {
            it.addresses.iter().map(move |&ip| (it.name.clone(), SocketAddr::new(ip, target)))
        });
        let now = self.services().flat_map(|it| it.endpoints.iter().cloned());
        for (name, address) in now.chain(later) {
            let addresses = pods.entry(name).or_default();
            if !addresses.contains(&address) {
                addresses.push(address);
            }
        }
        Ok(pods)
    }

    /// Writes the EndpointSlices of `web` again, with so many endpoints. Gives back when the file was replaced, and
    /// who may answer from then on.
    pub(crate) fn scale_web(&self, endpoints: u8) -> Result<(Instant, Vec<String>)> {
        let target = self.service("web")?.endpoints.first().context("Service web has no endpoint")?.1.port();
        let web = scaled(endpoints, target);
        let replaced = manifest::write_atomically(&self.folder.join("web-endpoints.yaml"), &web.slices())?;
        Ok((replaced, web.endpoints.into_iter().map(|it| it.name).collect()))
    }
}

/// `web` as in the repository's manifest, with the first so many pods.
fn scaled(endpoints: u8, target: u16) -> manifest::Service {
    let ips = [IpAddr::from(Ipv4Addr::UNSPECIFIED), IpAddr::from(Ipv6Addr::UNSPECIFIED)];
    let service = manifest::Service::new("web", &ips).port("http", "TCP", 80, target);
    (1..=endpoints).fold(service, |service, pod| {
        let v4 = Ipv4Addr::new(10, 244, 1, 10 + pod);
        let v6 = Ipv6Addr::new(0xfd00, 0x10, 0x244, 0, 0, 0, 0, 0x10 + u16::from(pod));
        service.endpoint(&format!("web-{pod}"), &[v4.into(), v6.into()])
    })
}

#[cfg(test)]
mod tests_of_manifests {
    use super::*;

    #[test]
    fn the_demo_scales_what_the_repository_shows() {
        let folder = std::env::temp_dir().join(format!("kpe-manifests-{}", std::process::id()));
        let manifests =
            Manifests::copy(&build_tools::command::workspace().join("deploy/demo"), &folder).unwrap();
        fs::remove_dir_all(&folder).unwrap();
        let mut written: Vec<_> = scaled(3, 8080)
            .endpoints
            .into_iter()
            .flat_map(|it| {
                it.addresses.into_iter().map(move |ip| (it.name.clone(), SocketAddr::new(ip, 8080)))
            })
            .collect();
        written.sort_by_key(|(_, address)| *address);
        assert_eq!(manifests.service("web").unwrap().endpoints, written);
        assert!(manifests.service("empty").unwrap().endpoints.is_empty());
        assert_eq!(manifests.pods().unwrap().len(), 6);
    }
}
