//! The addresses at which Services are reached beside their cluster IPs: node ports, external and load balancer IPs. An endpoint
//! in the host's network may have one of them.

use std::{
    collections::{BTreeSet, HashSet},
    net::{IpAddr, SocketAddr},
};

use datapath::FrontendAddress;
use model::Protocol;

use super::table_state::ServiceLayout;
use crate::tables::{allowed_backends::as_node_port, node_addresses::NodeAddresses};

/// All entry points; a node port is at the unspecified address.
#[derive(Debug, Default)]
pub(super) struct EntryPoints(HashSet<FrontendAddress>);

/// What came or went.
#[derive(Debug, Default)]
pub(super) struct Moved {
    ips: BTreeSet<IpAddr>,
    node_ports: BTreeSet<u16>,
}

impl EntryPoints {
    /// Takes over which of them Services have given up and taken, and the addresses at which node ports are served, before and
    /// now.
    pub(super) fn update(
        &mut self,
        given_up: &BTreeSet<FrontendAddress>,
        taken: &BTreeSet<FrontendAddress>,
        before: &NodeAddresses,
        now: &NodeAddresses,
    ) -> Moved {
        let mut moved = Moved::default();
        for it in given_up.symmetric_difference(taken) {
            if taken.contains(it) {
                self.0.insert(*it)
            } else {
                self.0.remove(it)
            };
            match it.address.ip() {
                ip if ip.is_unspecified() => moved.node_ports.insert(it.address.port()),
                ip => moved.ips.insert(ip),
            };
        }
        if before != now {
            // Those of other nodes come and go with each of them.
            let differs = |ip: &&IpAddr| is_local(before, ip) != is_local(now, ip);
            moved.ips.extend(before.keys().chain(now.keys()).filter(differs));
        }
        moved
    }

    /// Whether packets to this address are translated.
    pub(super) fn contain(
        &self,
        address: SocketAddr,
        protocol: Protocol,
        node_addresses: &NodeAddresses,
    ) -> bool {
        let contain = |address| self.0.contains(&FrontendAddress { address, protocol });
        contain(address) || (is_local(node_addresses, &address.ip()) && contain(as_node_port(address)))
    }
}

impl Moved {
    pub(super) fn is_empty(&self) -> bool {
        self.ips.is_empty() && self.node_ports.is_empty()
    }

    /// Whether a backend of a Service may have such an address.
    pub(super) fn concern(&self, service: &ServiceLayout, node_addresses: &NodeAddresses) -> bool {
        let is_concerned = |it: SocketAddr| {
            self.ips.contains(&it.ip())
                || (self.node_ports.contains(&it.port()) && is_local(node_addresses, &it.ip()))
        };
        service.sets.iter().flat_map(|it| &it.slots).any(|it| is_concerned(it.backend()))
    }
}

fn is_local(node_addresses: &NodeAddresses, ip: &IpAddr) -> bool {
    node_addresses.get(ip).is_some_and(|it| it.is_local())
}
