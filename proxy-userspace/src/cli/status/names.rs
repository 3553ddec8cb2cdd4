//! The names of frontends, as the running process reports them.
//!
//! Invariant: the page is parsed as it comes, and nothing of endpoints is kept.

use std::{
    fmt,
    io::Read,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
};

use datapath::FrontendAddress;
use model::{RequestedMetadata, state::Service};
use proxy_contract::localv1;
use serde::{
    Deserialize, Deserializer,
    de::{SeqAccess, Visitor},
};

/// The name of a service port; empty if it is unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::cli) struct PortName {
    pub(in crate::cli) service: Arc<str>,
    pub(in crate::cli) port: Arc<str>,
}

#[derive(Clone, Debug)]
pub(in crate::cli) struct NamedFrontend {
    pub(in crate::cli) name: PortName,
    pub(in crate::cli) address: FrontendAddress,
    /// Whether it is at a cluster IP.
    pub(in crate::cli) is_cluster_ip: bool,
}

/// Frontends with their names, in the order of their addresses.
#[derive(Debug, Default)]
pub(in crate::cli) struct Names(Vec<NamedFrontend>);

impl Names {
    /// Reads the page `/state`.
    pub(super) fn read(page: impl Read) -> serde_json::Result<Self> {
        let State { items: Frontends(mut frontends) } = serde_json::from_reader(page)?;
        // Of two Services with the same address, the last one names it.
        frontends.reverse();
        frontends.sort_by_key(|it| it.address);
        frontends.dedup_by_key(|it| it.address);
        Ok(Self(frontends))
    }

    /// The frontend at an address, if it has a name.
    pub(in crate::cli) fn get(&self, address: &FrontendAddress) -> Option<&NamedFrontend> {
        self.0.binary_search_by_key(address, |it| it.address).ok().map(|it| &self.0[it])
    }

    /// The frontends in the order of their names.
    pub(super) fn into_sorted(mut self) -> Vec<NamedFrontend> {
        let text = |it: &NamedFrontend| it.address.to_string();
        self.0.sort_by(|a, b| a.name.cmp(&b.name).then_with(|| text(a).cmp(&text(b))));
        self.0
    }
}

fn add_frontends(service: &Service, frontends: &mut Vec<NamedFrontend>) {
    let others = service.external_ips.iter().chain(&service.load_balancer_ips);
    // A node port is listed with the unspecified address of each family.
    let any: [IpAddr; 2] = [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()];
    let service_name: Arc<str> = service.name.to_string().into();
    for port in &service.ports {
        let name = PortName { service: Arc::clone(&service_name), port: port.name.as_str().into() };
        // At a conflicting address, another Service is served.
        let is_own = |it: &&IpAddr| !port.conflicting_addresses.contains(it);
        let addresses = service.cluster_ips.iter().filter(is_own).map(|it| (*it, port.port, true));
        let addresses = addresses.chain(others.clone().filter(is_own).map(|it| (*it, port.port, false)));
        let node_ports = port.node_port.into_iter().flat_map(|port| any.map(|it| (it, port, false)));
        frontends.extend(addresses.chain(node_ports).map(|(ip, number, is_cluster_ip)| {
            let address = SocketAddr::new(ip, number.get());
            let address = FrontendAddress { address, protocol: port.protocol };
            NamedFrontend { name: name.clone(), address, is_cluster_ip }
        }));
    }
}

/// The page `/state`.
#[derive(Deserialize)]
struct State {
    #[serde(default)]
    items: Frontends,
}

/// The frontends of its Services, of which each is forgotten before the next one is read.
#[derive(Default)]
struct Frontends(Vec<NamedFrontend>);

#[derive(Deserialize)]
struct Item {
    service: localv1::Service,
}

impl<'de> Deserialize<'de> for Frontends {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(Self::default())
    }
}

impl<'de> Visitor<'de> for Frontends {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Services")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut items: A) -> Result<Self, A::Error> {
        while let Some(Item { service }) = items.next_element()? {
            let state = wire::service_state(&service, [], &RequestedMetadata::default()).value;
            state.into_iter().for_each(|it| add_frontends(&it.service, &mut self.0));
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_is_named_at_each_of_its_own_addresses() {
        let state = r#"{"instanceId":"1","items":[{"service":
               {"namespace":"default","name":"web","type":"NodePort",
                "ips":{"clusterIps":{"v4":["10.96.0.10"],"v6":["fd00::10"]},"externalIps":{"v4":["192.0.2.1"]}},
                "ports":[{"name":"http","protocol":"TCP","port":80,"nodePort":30080,"targetPort":8080,
                          "conflictingAddresses":{"v4":["192.0.2.1"]}}]},
                "endpoints":[{"ips":{"v4":["10.1.0.1"]}}]}],"nodes":[{"name":"n1"}]}"#;
        let names = Names::read(state.as_bytes()).unwrap();
        let found: Vec<_> = names.0.iter().map(|it| (it.address.to_string(), it.is_cluster_ip)).collect();
        let expect = [
            ("0.0.0.0:30080/TCP", false),
            ("10.96.0.10:80/TCP", true),
            ("[::]:30080/TCP", false),
            ("[fd00::10]:80/TCP", true),
        ];
        assert_eq!(found, expect.map(|(it, is_cluster_ip)| (it.to_owned(), is_cluster_ip)));
        let web = names.get(&names.0[1].address).unwrap();
        assert_eq!((&*web.name.service, &*web.name.port), ("default/web", "http"));
    }
}
