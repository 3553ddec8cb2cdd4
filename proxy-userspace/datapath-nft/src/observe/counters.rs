//! The counters of connections from outside, by frontend.
//!
//! Invariant: what is replaced begins anew at zero: a table of another layout, and a frontend whose endpoints were gone.

use std::{collections::HashMap, net::SocketAddr};

use datapath::{FrontendAddress, unspecified};
use model::{
    Family,
    state::{Service, ServicePort},
};

use crate::{
    apply::snapshot::{each_element, frontend_of, retried},
    encode::{
        elements::Element,
        schema::{Bytes, Parts},
        tables::FAMILIES,
    },
    error::Error,
    plan::endpoint_selector::MatchKey,
};
use netlink::{
    Netfilter, find,
    uapi::{NFTA_COUNTER_PACKETS, NFTA_EXPR_DATA, NFTA_SET_ELEM_EXPR},
};
use nix::errno::Errno;

/// How many connections and UDP flows to each frontend were translated, except zeros.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExternalConnections(HashMap<FrontendAddress, u64>);

impl ExternalConnections {
    /// Reads the counters; none if there are no tables.
    ///
    /// # Errors
    ///
    /// If the kernel refuses to list them.
    pub fn read() -> Result<Self, Error> {
        let mut netfilter = Netfilter::open().map_err(Error::Open)?;
        retried(|| {
            let mut all = HashMap::new();
            for (family, by) in FAMILIES.into_iter().flat_map(|it| MatchKey::ALL.map(|by| (it, by))) {
                let map = by.counted();
                let listed = each_element(&mut netfilter, family, (map, 0), |key, attributes| {
                    let element = Element::new(family, map, Bytes(key.into()));
                    let frontend = frontend_of(&element, &mut Parts::of(&element.key, family));
                    if let Some((frontend, count @ 1..)) = frontend.zip(packets(attributes)) {
                        all.insert(frontend, count);
                    }
                });
                match listed {
                    Ok(()) | Err(Errno::ENOENT) => {}
                    Err(errno) => return Err(Error::Read { what: "counters", errno }),
                }
            }
            Ok(Self(all))
        })
    }

    /// Those of a service port, at all of its addresses that are reachable from outside.
    pub fn of(&self, service: &Service, port: &ServicePort) -> u64 {
        if self.0.is_empty() {
            return 0;
        }
        let ips = service.external_ips.iter().chain(&service.load_balancer_ips);
        let addresses = ips.map(|it| SocketAddr::new(*it, port.port.get()));
        let node_ports = port
            .node_port
            .into_iter()
            .flat_map(|port| Family::ALL.map(|it| SocketAddr::new(unspecified(it), port.get())));
        let count = |address| self.0.get(&FrontendAddress { address, protocol: port.protocol });
        addresses.chain(node_ports).filter_map(count).sum()
    }
}

/// The packets that an element has counted: the first of each connection.
fn packets(element: &[u8]) -> Option<u64> {
    let data = find(find(element, NFTA_SET_ELEM_EXPR)?, NFTA_EXPR_DATA)?;
    find(data, NFTA_COUNTER_PACKETS)?.try_into().ok().map(u64::from_be_bytes)
}
