//! The counters of connections from outside, by service port.
//!
//! Invariant: a counter ends with its service port, and begins anew with a table that is written anew.

use std::collections::HashMap;

use model::{
    Family,
    state::{Service, ServicePort},
};

use crate::{apply::snapshot::walk_counters, error::Error, plan::compile::counter_name};
use netlink::{
    Netfilter, find,
    uapi::{NFTA_COUNTER_PACKETS, NFTA_OBJ_DATA},
};
use nix::errno::Errno;

/// How many connections and UDP flows from outside were translated, by counter; except zeros.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExternalConnections(HashMap<String, u64>);

impl ExternalConnections {
    /// Reads the counters; none if there are no tables.
    pub fn read() -> Result<Self, Error> {
        let mut netfilter = Netfilter::open().map_err(Error::Open)?;
        let mut all: HashMap<String, u64> = HashMap::new();
        for family in Family::ALL {
            let listed = walk_counters(&mut netfilter, family, |name, counter| {
                if let Some(count @ 1..) = packets(counter) {
                    *all.entry(name).or_default() += count;
                }
            });
            match listed {
                // Something else in nftables changed meanwhile; those that were listed are valid.
                Ok(()) | Err(Errno::EINTR) => {}
                Err(errno) => return Err(Error::Read { what: "counters", errno }),
            }
        }
        Ok(Self(all))
    }

    /// How many connections and UDP flows of a service port were translated.
    pub fn of(&self, service: &Service, port: &ServicePort) -> u64 {
        if self.0.is_empty() {
            return 0;
        }
        counter_name(&service.name, port).and_then(|it| self.0.get(&it)).copied().unwrap_or_default()
    }
}

/// What a counter has seen: the first packet of each connection.
fn packets(counter: &[u8]) -> Option<u64> {
    let packets = find(find(counter, NFTA_OBJ_DATA)?, NFTA_COUNTER_PACKETS)?;
    packets.try_into().ok().map(u64::from_be_bytes)
}
