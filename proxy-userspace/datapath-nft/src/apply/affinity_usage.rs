//! How many clients have session affinity, and which service ports have as many as one may.
//!
//! Invariant: a client that has shown that it got an answer may still be one of very many of a single sender, so they are counted,
//! too. The kernel could only count those of all Services together.

use std::collections::{HashMap, HashSet};

use datapath::PacketAffinity;
use model::Family;
use nix::errno::Errno;

use crate::{
    apply::{snapshot::each_element, transaction::commit},
    encode::{
        elements::{Element, Value},
        schema::{Bytes, Field, Map, length},
        tables::{AFFINITY_SIZE, elements},
    },
    error::Error,
};
use netlink::{Netfilter, uapi::NFT_MSG_NEWSETELEM};

/// How many clients of a service port are kept: a sixteenth of the capacity. Between two counts there can be some more.
const MAX_CLIENTS: usize = AFFINITY_SIZE as usize / 16;
/// How long a service port stays in [`Map::AffinityFull`] without another count.
const FULL_SECONDS: u32 = 60;

/// Counts the clients of the tables of these families, and lets service ports with too many get no more for a while.
pub(crate) fn count_clients(
    netfilter: &mut Netfilter,
    families: impl IntoIterator<Item = Family>,
) -> Result<PacketAffinity, Error> {
    let mut usage = PacketAffinity { capacity: AFFINITY_SIZE, ..PacketAffinity::default() };
    let mut messages = Vec::new();
    let expiring = Value::Expiring(FULL_SECONDS);
    for family in families {
        // The client comes first in a key.
        let client = length(&[Field::Address], family);
        let mut clients: HashMap<Bytes, usize> = HashMap::new();
        count(netfilter, family, Map::Affinity, |key| {
            *clients.entry(Bytes(key[client.min(key.len())..].into())).or_default() += 1;
        })?;
        usage.clients += clients.values().sum::<usize>();
        count(netfilter, family, Map::AffinityUnanswered, |_| usage.unanswered += 1)?;
        let mut known = HashSet::new();
        count(netfilter, family, Map::AffinityFull, |key| {
            known.insert(key.to_vec());
        })?;
        let full = clients.into_iter().filter(|(_, count)| *count >= MAX_CLIENTS).map(|(port, _)| port);
        let full: Vec<_> = full.map(|it| Element::new(family, Map::AffinityFull, it)).collect();
        usage.full_service_ports += full.len();
        let new = full.iter().filter(|it| !known.contains(&*it.key.0)).map(|it| (it, &expiring));
        messages.extend(elements(NFT_MSG_NEWSETELEM, family, new));
    }
    commit(netfilter, messages)?;
    Ok(usage)
}

fn count(
    netfilter: &mut Netfilter,
    family: Family,
    map: Map,
    mut each: impl FnMut(&[u8]),
) -> Result<(), Error> {
    match each_element(netfilter, family, (map, 0), |key, _| each(key)) {
        // It changes all the time; what was listed is enough to count.
        Ok(()) | Err(Errno::EINTR) => Ok(()),
        // The table was deleted, and will be restored.
        Err(Errno::ENOENT) => Ok(()),
        Err(errno) => Err(Error::Read { what: "clients with session affinity", errno }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        apply::transaction::DesiredTable,
        in_netns::in_netns,
        plan::{
            config::{Config, Host},
            rules::TableConfig,
        },
    };

    #[test]
    fn a_service_port_may_have_so_many_clients_and_others_have_theirs() {
        in_netns(|| {
            let family = Family::V4;
            let config_ = TableConfig::new(family, &Config::default(), &Host::default());
            let table = DesiredTable { elements: config_.elements(), config_, is_owned: false };
            let mut netfilter = Netfilter::open().unwrap();
            commit(&mut netfilter, table.replace(std::iter::empty())).unwrap();
            let service_port = |n: u32| Bytes::new().number(0x8000_0001 | n << 16);
            // Some more than the most: while the kernel grows its table, a listing may name an element twice in another's place.
            let clients = (0..MAX_CLIENTS as u32 + 1_000).map(|it| (it, 1)).chain([(1, 2)]);
            let clients: Vec<_> = clients
                .map(|(client, n)| Bytes([&client.to_be_bytes()[..], &service_port(n).0].concat().into()))
                .map(|key| Element::new(family, Map::Affinity, key))
                .collect();
            let member = Value::Data(Bytes::new().number(0x8001_0003));
            let clients = clients.iter().map(|it| (it, &member));
            let clients = elements(NFT_MSG_NEWSETELEM, family, clients);
            commit(&mut netfilter, clients).unwrap();

            let usage = count_clients(&mut netfilter, [family]).unwrap();
            let expected = PacketAffinity {
                clients: MAX_CLIENTS + 1_001,
                unanswered: 0,
                capacity: AFFINITY_SIZE,
                full_service_ports: 1,
            };
            assert_eq!(usage, expected);
            let mut full = Vec::new();
            count(&mut netfilter, family, Map::AffinityFull, |key| full.push(Bytes(key.into()))).unwrap();
            assert_eq!(full, [service_port(1)]);
            // It stays until it expires.
            assert_eq!(count_clients(&mut netfilter, [family]).unwrap(), expected);
        });
    }
}
