//! The demo's manifests: copied from the repository, read for the expected endpoints, and edited.

use std::{
    collections::BTreeMap,
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::{Context as _, Result};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tests::{Transport, deploy, manifest};

pub(crate) const MAX_ENDPOINTS: u8 = 4;

pub(crate) struct Manifests {
    pub(crate) folder: PathBuf,
    services: BTreeMap<String, DemoService>,
}

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

    pub(crate) fn endpoints_of(&self, address: SocketAddr) -> Vec<&(String, SocketAddr)> {
        self.endpoints.iter().filter(|(_, it)| it.is_ipv4() == address.is_ipv4()).collect()
    }
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
            documents.extend(deploy::documents(&text).with_context(|| file.display().to_string())?);
            manifest::write_atomically(&to.join(file.file_name().context("a file has a name")?), &text)?;
        }
        Ok(Self { folder: to.to_owned(), services: services(&documents)? })
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

    /// Writes the EndpointSlices of `web`; returns when the file was replaced, and the names of the endpoints.
    pub(crate) fn scale_web(&self, endpoints: u8) -> Result<(Instant, Vec<String>)> {
        let web = scaled_web(endpoints, self.web_target()?);
        let replaced = manifest::write_atomically(
            &self.folder.join("web-endpoints.yaml"),
            &manifest::documents(web.slices()),
        )?;
        Ok((replaced, web.endpoints.into_iter().map(|it| it.name).collect()))
    }
}

fn services(documents: &[Value]) -> Result<BTreeMap<String, DemoService>> {
    let of_kind = |kind| documents.iter().filter(move |it| it["kind"] == kind);
    let mut services = BTreeMap::new();
    for service in of_kind("Service") {
        let name: String = field(service, "/metadata/name")?;
        let is_udp = field::<String>(service, "/spec/ports/0/protocol")? == "UDP";
        let service = DemoService {
            name: name.clone(),
            transport: if is_udp { Transport::Udp } else { Transport::Tcp },
            port: field(service, "/spec/ports/0/port")?,
            cluster_ips: field(service, "/spec/clusterIPs")?,
            endpoints: Vec::new(),
        };
        services.insert(name, service);
    }
    for slice in of_kind("EndpointSlice") {
        let name: String = field(slice, "/metadata/labels/kubernetes.io~1service-name")?;
        let service = services.get_mut(&name).with_context(|| format!("there is no Service {name}"))?;
        let port: u16 = field(slice, "/ports/0/port")?;
        for endpoint in slice["endpoints"].as_array().into_iter().flatten() {
            let pod: String = field(endpoint, "/targetRef/name")?;
            let addresses: Vec<IpAddr> = field(endpoint, "/addresses")?;
            service.endpoints.extend(addresses.iter().map(|&ip| (pod.clone(), SocketAddr::new(ip, port))));
        }
    }
    Ok(services)
}

fn field<T: DeserializeOwned>(object: &Value, pointer: &str) -> Result<T> {
    let value = object.pointer(pointer).with_context(|| format!("no {pointer} in {object}"))?;
    T::deserialize(value).with_context(|| format!("{pointer} in {object}"))
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
