//! Which Services want an address. At loopback addresses two may want the same one: the first by name has it.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, btree_map::Entry},
    sync::Arc,
};

use proxy_contract::{
    backend::{NotServed, ServedPort},
    client::ServiceEndpoints,
    localv1::Protocol,
};

use crate::{
    affinity::Affinity,
    frontend::{Address, Frontend, frontends},
    listen_at::ListenAt,
};

#[derive(Debug, Default)]
pub(crate) struct Claims {
    by_address: BTreeMap<Address, BTreeMap<Arc<str>, Arc<Frontend>>>,
    by_service: HashMap<Arc<str>, Claimed>,
}

/// What a Service wants, and the clients of its ports.
#[derive(Debug, Default)]
struct Claimed {
    addresses: Vec<Address>,
    affinity: HashMap<(String, Protocol), Arc<Affinity>>,
}

impl Claims {
    /// Replaces the frontends of a Service; returns the addresses that may have changed.
    pub(crate) fn replace(
        &mut self,
        name: &Arc<str>,
        new: Option<&ServiceEndpoints>,
        listen_at: ListenAt,
    ) -> BTreeSet<Address> {
        let mut former = self.by_service.remove(name).unwrap_or_default();
        let mut touched = BTreeSet::new();
        for address in former.addresses {
            if let Entry::Occupied(mut claims) = self.by_address.entry(address) {
                claims.get_mut().remove(name);
                if claims.get().is_empty() {
                    claims.remove();
                }
            }
            touched.insert(address);
        }
        if let Some(new) = new {
            let mut claimed = Claimed::default();
            let affinity = |port: &ServedPort| {
                let key = (port.name.clone(), port.protocol);
                let clients = former.affinity.remove(&key).unwrap_or_default();
                Arc::clone(claimed.affinity.entry(key).or_insert(clients))
            };
            for (address, frontend) in frontends(name, new, listen_at, affinity) {
                self.by_address.entry(address).or_default().insert(Arc::clone(name), frontend);
                claimed.addresses.push(address);
                touched.insert(address);
            }
            self.by_service.insert(Arc::clone(name), claimed);
        }
        touched
    }

    pub(crate) fn services(&self) -> impl Iterator<Item = &Arc<str>> {
        self.by_service.keys()
    }

    pub(crate) fn winner(&self, address: &Address) -> Option<Arc<Frontend>> {
        self.by_address.get(address)?.values().next().cloned()
    }

    /// The frontends that another Service has.
    pub(crate) fn not_served(&self) -> impl Iterator<Item = NotServed> {
        let contested = self.by_address.iter().filter(|(_, claims)| claims.len() > 1);
        contested.flat_map(|(address, claims)| {
            let winner = claims.keys().next().map(ToString::to_string).unwrap_or_default();
            let reason = format!("{winner} has {address}, too: both addresses end in the same three bytes");
            claims.keys().skip(1).map(move |it| NotServed { service: Arc::clone(it), reason: reason.clone() })
        })
    }
}
