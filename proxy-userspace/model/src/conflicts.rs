//! Conflicts: several Services that claim the same address and port, or the same node port.
//!
//! Each frontend has one owner. The others lose this frontend and keep everything else. The owner is, in this order:
//!
//! 1. the Service whose cluster IP it is: no Service takes over the cluster IP of another one by listing it as its own
//!    external IP (CVE-2020-8554);
//! 2. the older Service, by its creation timestamp; a Service without a timestamp counts as younger than any other;
//! 3. the first by namespace, then by name.
//!
//! When the owner goes away or gives up the frontend, the next one in this order becomes its owner.
//!
//! The brain resolves the conflicts of a cluster. A node state from another brain is resolved again when it is decoded,
//! without timestamps, because it has none. Datapaths therefore get a state without conflicts.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
};

use crate::{Protocol, Rejected, ServiceName, Timestamp, state::Service};

/// An address and port of a Service, or a node port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FrontendKey {
    /// None for a node port.
    pub address: Option<IpAddr>,
    /// The port.
    pub port: NonZeroU16,
    /// The transport protocol.
    pub protocol: Protocol,
}

impl fmt::Display for FrontendKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.address {
            Some(address) => write!(f, "{}/{}", SocketAddr::new(address, self.port.get()), self.protocol),
            None => write!(f, "node port {}/{}", self.port, self.protocol),
        }
    }
}

/// The frontends that one Service claims, and what its precedence depends on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claim {
    created: Option<Timestamp>,
    cluster_ips: Vec<IpAddr>,
    /// In ascending order, each once.
    frontends: Vec<FrontendKey>,
}

impl Claim {
    /// The frontends of a Service, without those that it has already lost.
    pub fn new(service: &Service, created: Option<Timestamp>) -> Self {
        let mut frontends = Vec::new();
        for port in &service.ports {
            let key = |address, number| FrontendKey { address, port: number, protocol: port.protocol };
            let own = service.addresses().filter(|it| !port.conflicting_addresses.contains(it));
            frontends.extend(own.map(|it| key(Some(it), port.port)));
            frontends.extend(port.node_port.map(|it| key(None, it)));
        }
        frontends.sort_unstable();
        frontends.dedup();
        frontends.shrink_to_fit();
        Self { created, cluster_ips: service.cluster_ips.clone(), frontends }
    }

    fn precedence(&self, service: &ServiceName, frontend: FrontendKey) -> Precedence {
        Precedence {
            is_not_cluster_ip: !frontend.address.is_some_and(|it| self.cluster_ips.contains(&it)),
            is_undated: self.created.is_none(),
            created: self.created,
            service: service.clone(),
        }
    }
}

/// The rank of a claim; the least one owns the frontend. No claim comes before the default.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Precedence {
    is_not_cluster_ip: bool,
    is_undated: bool,
    created: Option<Timestamp>,
    service: ServiceName,
}

/// Which Service owns which frontend; kept up to date as Services change.
#[derive(Debug, Default)]
pub struct FrontendOwners {
    claims: BTreeMap<ServiceName, Claim>,
    /// All claims. The first one of each frontend is that of its owner.
    ranked: BTreeSet<(FrontendKey, Precedence)>,
    conflicting: BTreeMap<ServiceName, BTreeSet<FrontendKey>>,
}

impl FrontendOwners {
    /// The frontends that a Service claims and another one owns; none if there is no conflict.
    pub fn conflicting(&self, service: &ServiceName) -> Option<&BTreeSet<FrontendKey>> {
        self.conflicting.get(service)
    }

    /// The frontends that one Service loses, and why.
    pub fn rejected_of(&self, service: &ServiceName) -> impl Iterator<Item = Rejected> {
        let conflicting = self.conflicting.get_key_value(service);
        conflicting.into_iter().flat_map(|(service, keys)| self.rejections(service, keys))
    }

    /// The frontends that all Services lose, and why.
    pub fn rejected(&self) -> impl Iterator<Item = Rejected> {
        self.conflicting.iter().flat_map(|(service, keys)| self.rejections(service, keys))
    }

    fn rejections<'a>(
        &'a self,
        service: &'a ServiceName,
        keys: &'a BTreeSet<FrontendKey>,
    ) -> impl Iterator<Item = Rejected> {
        keys.iter().filter_map(move |frontend| {
            let owner = self.owner(*frontend)?;
            Some(Rejected::not_served(format!("Service {service}: {frontend}"), format!(
                    "it belongs to Service {owner} (by cluster IP, then age, then name); give one of them another"
                )))
        })
    }

    /// The Services that claim a frontend: its owner, then those that lose it.
    pub fn claimants(&self, frontend: FrontendKey) -> impl Iterator<Item = &ServiceName> {
        let ranked = self.ranked.range((frontend, Precedence::default())..);
        ranked.take_while(move |(it, _)| *it == frontend).map(|(_, precedence)| &precedence.service)
    }

    /// The frontends that any Service claims, each with its owner, in ascending order.
    pub fn owned(&self) -> impl Iterator<Item = (FrontendKey, &ServiceName)> {
        let mut last = None;
        let first = self.ranked.iter().filter(move |(it, _)| last.replace(*it) != Some(*it));
        first.map(|(it, precedence)| (*it, &precedence.service))
    }

    fn owner(&self, frontend: FrontendKey) -> Option<&ServiceName> {
        self.claimants(frontend).next()
    }

    /// Sets the claim of a Service; the default claim removes it. Returns the other Services that gain or lose a
    /// frontend.
    ///
    /// The cost is O(log n) per frontend of this Service.
    pub fn set(&mut self, name: &ServiceName, claim: Claim) -> BTreeSet<ServiceName> {
        let mut affected = BTreeSet::new();
        if self.claims.get(name).map_or(claim.frontends.is_empty(), |it| *it == claim) {
            return affected;
        }
        let before = self.claims.remove(name).unwrap_or_default();
        self.conflicting.remove(name);
        let all: BTreeSet<_> = before.frontends.iter().chain(&claim.frontends).copied().collect();
        for frontend in all {
            let previous = self.owner(frontend).cloned();
            self.ranked.remove(&(frontend, before.precedence(name, frontend)));
            let is_claimed = claim.frontends.binary_search(&frontend).is_ok();
            if is_claimed {
                self.ranked.insert((frontend, claim.precedence(name, frontend)));
            }
            let owner = self.owner(frontend).cloned();
            if is_claimed && owner.as_ref() != Some(name) {
                self.conflicting.entry(name.clone()).or_default().insert(frontend);
            }
            if previous == owner {
                continue;
            }
            if let Some(loser) = previous.filter(|it| it != name) {
                self.conflicting.entry(loser.clone()).or_default().insert(frontend);
                affected.insert(loser);
            }
            if let Some(winner) = owner.filter(|it| it != name) {
                if let Some(keys) = self.conflicting.get_mut(&winner) {
                    keys.remove(&frontend);
                    if keys.is_empty() {
                        self.conflicting.remove(&winner);
                    }
                }
                affected.insert(winner);
            }
        }
        if !claim.frontends.is_empty() {
            self.claims.insert(name.clone(), claim);
        }
        affected
    }
}

/// Removes from a Service the frontends that another Service owns.
pub fn remove_conflicting(service: &mut Service, conflicting: &BTreeSet<FrontendKey>) {
    let addresses: Vec<_> = service.addresses().collect();
    for port in &mut service.ports {
        let protocol = port.protocol;
        let is_lost = |address, port| conflicting.contains(&FrontendKey { address, port, protocol });
        port.node_port = port.node_port.filter(|it| !is_lost(None, *it));
        let lost = addresses.iter().copied().filter(|it| is_lost(Some(*it), port.port));
        port.conflicting_addresses.extend(lost);
        port.conflicting_addresses.sort_unstable();
        port.conflicting_addresses.dedup();
    }
}
