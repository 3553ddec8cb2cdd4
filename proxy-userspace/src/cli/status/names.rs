//! The names of frontends, as the running process reports them.
//!
//! Invariant: the page is parsed as it comes, and nothing of endpoints is kept.

use std::{
    collections::BTreeMap,
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
pub(in crate::cli) struct FrontendName {
    pub(in crate::cli) port: PortName,
    pub(in crate::cli) is_cluster_ip: bool,
}

/// The names of frontends by their addresses. Of two Services with the same address, the last one names it.
#[derive(Debug, Default)]
pub(in crate::cli) struct Names(pub(in crate::cli) BTreeMap<FrontendAddress, FrontendName>);

impl Names {
    /// Reads the page `/state`.
    pub(super) fn read(page: impl Read) -> serde_json::Result<Self> {
        #[derive(Deserialize)]
        struct State {
            #[serde(default)]
            items: Names,
        }
        serde_json::from_reader(page).map(|State { items }| items)
    }

    fn add(&mut self, service: &Service) {
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
            self.0.extend(addresses.chain(node_ports).map(|(ip, number, is_cluster_ip)| {
                let address = SocketAddr::new(ip, number.get());
                let address = FrontendAddress { address, protocol: port.protocol };
                (address, FrontendName { port: name.clone(), is_cluster_ip })
            }));
        }
    }
}

impl<'de> Deserialize<'de> for Names {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(Self::default())
    }
}

/// Each Service is forgotten before the next one is read.
impl<'de> Visitor<'de> for Names {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Services")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut items: A) -> Result<Self, A::Error> {
        #[derive(Deserialize)]
        struct Item {
            service: localv1::Service,
        }
        while let Some(Item { service }) = items.next_element()? {
            let state = wire::service_state(&service, [], &RequestedMetadata::default()).value;
            state.into_iter().for_each(|it| self.add(&it.service));
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
        let found: Vec<_> = names.0.iter().map(|(at, it)| (at.to_string(), it.is_cluster_ip)).collect();
        let expect = [
            ("0.0.0.0:30080/TCP", false),
            ("10.96.0.10:80/TCP", true),
            ("[::]:30080/TCP", false),
            ("[fd00::10]:80/TCP", true),
        ];
        assert_eq!(found, expect.map(|(it, is_cluster_ip)| (it.to_owned(), is_cluster_ip)));
        for FrontendName { port, .. } in names.0.values() {
            assert_eq!((&*port.service, &*port.port), ("default/web", "http"));
        }
    }
}
