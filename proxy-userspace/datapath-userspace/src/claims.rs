//! Which Services want an address. At loopback addresses two may want the same one: the first by name has it.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, btree_map::Entry},
    sync::Arc,
};

use datapath::FrontendAddress;
use model::{Protocol, Rejected, ServiceName, state::ServiceState};

use crate::{
    affinity::Affinity,
    frontend::{Frontend, frontends},
    options::ListenAt,
};

/// The frontends of all Services.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    by_address: BTreeMap<FrontendAddress, BTreeMap<ServiceName, Arc<Frontend>>>,
    /// Those that more than one Service wants.
    contested: BTreeSet<FrontendAddress>,
    affinity: HashMap<ServiceName, HashMap<(String, Protocol), Arc<Affinity>>>,
}

impl Claims {
    /// Replaces the frontends of a Service; returns the addresses that have changed.
    pub(crate) fn replace(
        &mut self,
        name: &ServiceName,
        old: Option<&Arc<ServiceState>>,
        new: Option<&Arc<ServiceState>>,
        listen_at: ListenAt,
    ) -> BTreeSet<FrontendAddress> {
        let mut touched = BTreeSet::new();
        for (address, _) in old.into_iter().flat_map(|it| frontends(it, listen_at, |_| Arc::default())) {
            if let Entry::Occupied(mut claims) = self.by_address.entry(address) {
                claims.get_mut().remove(name);
                if claims.get().is_empty() {
                    claims.remove();
                }
            }
            touched.insert(address);
        }
        let mut former = self.affinity.remove(name).unwrap_or_default();
        let mut kept = HashMap::new();
        if let Some(new) = new {
            let affinity = |port: usize| {
                let port = &new.service.ports[port];
                let key = (port.name.clone(), port.protocol);
                let clients = former.remove(&key).unwrap_or_default();
                Arc::clone(kept.entry(key).or_insert(clients))
            };
            for (address, frontend) in frontends(new, listen_at, affinity) {
                self.by_address.entry(address).or_default().insert(name.clone(), frontend);
                touched.insert(address);
            }
        }
        if !kept.is_empty() {
            self.affinity.insert(name.clone(), kept);
        }
        for it in &touched {
            if self.by_address.get(it).is_some_and(|claims| claims.len() > 1) {
                self.contested.insert(*it);
            } else {
                self.contested.remove(it);
            }
        }
        touched
    }

    /// What is served at an address.
    pub(crate) fn winner(&self, address: &FrontendAddress) -> Option<Arc<Frontend>> {
        self.by_address.get(address)?.values().next().cloned()
    }

    /// The frontends that another Service has.
    pub(crate) fn rejected(&self) -> impl Iterator<Item = Rejected> {
        self.contested.iter().filter_map(|it| Some((it, self.by_address.get(it)?))).flat_map(
            |(address, claims)| {
                let winner = claims.keys().next().map(ToString::to_string).unwrap_or_default();
                let reason =
                    format!("{winner} has {address}, too: both addresses end in the same three bytes");
                claims
                    .keys()
                    .skip(1)
                    .map(move |it| Rejected::not_served(format!("Service {it}"), reason.clone()))
            },
        )
    }
}
