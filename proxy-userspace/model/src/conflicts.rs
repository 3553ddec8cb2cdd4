//! Conflicts: several Services that claim the same address and port, or the same node port.
//!
//! Each frontend has one owner. The others lose this frontend and keep everything else. The owner is, in this order:
//!
//! 1. the Service whose cluster IP it is: no Service takes over the cluster IP of another one by listing it as its own
//!    external IP (CVE-2020-8554), also while that one is not served;
//! 2. the older Service, by its creation timestamp; a Service without a timestamp counts as younger than any other;
//! 3. the first by namespace, then by name.
//!
//! When the owner goes away or gives up the frontend, the next one in this order becomes its owner.
//!
//! The brain resolves the conflicts of a cluster. A node state from another brain is resolved again when it is decoded,
//! without timestamps, because it has none. Datapaths therefore get a state without conflicts.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, mem,
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
};

use crate::{Effect, Protocol, Rejected, RejectedParts, ServiceName, Timestamp, state::Service};

/// An address and port of a Service, or a node port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FrontendKey {
    /// None for a node port.
    pub address: Option<IpAddr>,
    pub port: NonZeroU16,
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
    pub frontends: Vec<FrontendKey>,
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

    /// Only the claims to its own cluster IPs: those of a Service that is not served, which no other one may take over.
    #[must_use]
    pub fn of_cluster_ips(mut self) -> Self {
        let own = &self.cluster_ips;
        self.frontends.retain(|it| it.address.is_some_and(|ip| own.contains(&ip)));
        self
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
    /// The Services whose conflicts, and the frontends whose owners have changed since they were taken.
    changed: BTreeSet<ServiceName>,
    changed_frontends: BTreeSet<FrontendKey>,
}

impl FrontendOwners {
    /// The frontends that a Service claims and another one owns; none if there is no conflict.
    pub fn conflicting(&self, service: &ServiceName) -> Option<&BTreeSet<FrontendKey>> {
        self.conflicting.get(service)
    }

    /// The frontends that one Service loses, and why; of very many the first ones, and their number.
    pub fn rejected_of(&self, service: &ServiceName) -> Vec<Rejected> {
        let mut rejected = RejectedParts::of(format!("Service {service}"));
        for frontend in self.conflicting.get(service).into_iter().flatten() {
            if let Some(owner) = self.owner(*frontend) {
                let reason = || {
                    format!(
                        "it belongs to Service {owner} (by cluster IP, then age, then name); give one of them another"
                    )
                };
                rejected.push_with(frontend, reason, Effect::NotServed);
            }
        }
        rejected.into_list()
    }

    /// The Services for which [`rejected_of`](Self::rejected_of) may have changed since the last call.
    pub fn take_changed(&mut self) -> BTreeSet<ServiceName> {
        let mut changed = mem::take(&mut self.changed);
        for frontend in mem::take(&mut self.changed_frontends) {
            changed.extend(self.claimants(frontend).cloned());
        }
        changed
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
        let had_conflicts = self.conflicting.remove(name).is_some();
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
            // Without other claimants there is no Service to tell.
            if previous.is_some() && owner.is_some() {
                self.changed_frontends.insert(frontend);
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
        if had_conflicts || self.conflicting.contains_key(name) {
            self.changed.insert(name.clone());
        }
        self.changed.extend(affected.iter().cloned());
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

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, option, prelude::*};

    use super::*;
    use crate::{Rejections, state::ServicePort};

    const NAMES: [&str; 4] = ["a", "b", "c", "d"];
    const ADDRESSES: [&str; 3] = ["10.96.0.1", "10.96.0.2", "192.0.2.1"];

    fn number(port: u16) -> NonZeroU16 {
        NonZeroU16::new(port).expect("not zero")
    }

    fn name(index: usize) -> ServiceName {
        ServiceName::new("ns", NAMES[index])
    }

    fn address(index: usize) -> IpAddr {
        ADDRESSES[index].parse().expect("an address")
    }

    /// A Service with one cluster IP, an external IP of the same addresses, and ports, some of which have the node port.
    fn service(cluster_ip: usize, external_ip: usize, ports: &[(bool, bool, bool)]) -> Service {
        let port = |(is_udp, is_other, has_node_port): &(bool, bool, bool)| ServicePort {
            node_port: has_node_port.then(|| number(30_080)),
            ..ServicePort::new(
                if *is_udp { Protocol::Udp } else { Protocol::Tcp },
                number(if *is_other { 81 } else { 80 }),
            )
        };
        Service {
            cluster_ips: vec![address(cluster_ip)],
            external_ips: vec![address(external_ip)],
            ports: ports.iter().map(port).collect(),
            ..Service::new(ServiceName::default())
        }
    }

    /// The claims of each frontend in the order of precedence, as the documentation of this module has it.
    fn ranked(claims: &BTreeMap<ServiceName, Claim>) -> BTreeMap<FrontendKey, Vec<ServiceName>> {
        let mut all: BTreeMap<FrontendKey, Vec<_>> = BTreeMap::new();
        for (name, claim) in claims {
            for frontend in &claim.frontends {
                let is_own = frontend.address.is_some_and(|it| claim.cluster_ips.contains(&it));
                let created = claim.created.map_or(i64::MAX, Timestamp::as_micros);
                all.entry(*frontend).or_default().push((!is_own, created, name.clone()));
            }
        }
        let sorted = all.into_iter().map(|(key, mut claims)| {
            claims.sort();
            (key, claims.into_iter().map(|(.., name)| name).collect())
        });
        sorted.collect()
    }

    fn step() -> impl Strategy<Value = (usize, Option<(Service, Option<Timestamp>)>)> {
        let service = (0..3_usize, 0..3_usize, vec(any::<(bool, bool, bool)>(), 0..3))
            .prop_map(|(cluster_ip, external_ip, ports)| service(cluster_ip, external_ip, &ports));
        let created = option::of((0_i64..3).prop_map(Timestamp::from_micros));
        (0..NAMES.len(), option::of((service, created)))
    }

    proptest! {
        #[test]
        fn the_first_by_precedence_owns_a_frontend_whatever_was_before(steps in vec(step(), 0..20)) {
            let mut owners = FrontendOwners::default();
            let mut claims = BTreeMap::new();
            let mut rejections = Rejections::default();
            for (index, change) in steps {
                let before = ranked(&claims);
                let claim = change.map(|(service, created)| Claim::new(&service, created)).unwrap_or_default();
                claims.insert(name(index), claim.clone());
                let affected = owners.set(&name(index), claim);
                let after = ranked(&claims);

                let mut conflicting: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
                let mut rejected = Vec::new();
                for (frontend, claimants) in &after {
                    prop_assert!(owners.claimants(*frontend).eq(claimants));
                    for loser in &claimants[1..] {
                        conflicting.entry(loser.clone()).or_default().insert(*frontend);
                        rejected.push((format!("Service {loser}: {frontend}"), claimants[0].clone()));
                    }
                }
                prop_assert!(owners.owned().eq(after.iter().map(|(frontend, all)| (*frontend, &all[0]))));
                let mut found = Vec::new();
                for it in 0..NAMES.len() {
                    prop_assert_eq!(owners.conflicting(&name(it)), conflicting.get(&name(it)));
                    found.extend(owners.rejected_of(&name(it)));
                }
                for it in owners.take_changed() {
                    rejections.set(&it.to_string(), owners.rejected_of(&it));
                }
                prop_assert!(rejections.iter().eq(&found));
                rejected.sort();
                let mut items: Vec<_> = found.iter().map(|it| (&it.item, &it.reason)).collect();
                items.sort();
                prop_assert_eq!(items.len(), rejected.len());
                for ((item, reason), (expected, owner)) in items.into_iter().zip(&rejected) {
                    prop_assert_eq!(item, expected);
                    prop_assert!(reason.contains(&format!("it belongs to Service {owner} ")), "{reason}");
                }

                let owner = |all: &BTreeMap<FrontendKey, Vec<ServiceName>>, it| {
                    all.get(it).map(|it: &Vec<ServiceName>| it[0].clone())
                };
                let changed = before.keys().chain(after.keys()).filter(|it| owner(&before, it) != owner(&after, it));
                let mut expected: BTreeSet<_> =
                    changed.flat_map(|it| [owner(&before, it), owner(&after, it)]).flatten().collect();
                expected.remove(&name(index));
                prop_assert_eq!(affected, expected);
            }
        }
    }

    #[test]
    fn only_conflicting_frontends_are_removed() {
        let mut service = service(0, 2, &[(false, false, true), (true, false, true), (false, true, true)]);
        let key = |address: Option<usize>, port, protocol| FrontendKey {
            address: address.map(self::address),
            port: number(port),
            protocol,
        };
        let conflicting = BTreeSet::from([
            key(Some(2), 80, Protocol::Tcp),
            key(Some(0), 81, Protocol::Tcp),
            key(Some(2), 81, Protocol::Tcp),
            key(None, 30_080, Protocol::Udp),
        ]);
        for _ in 0..2 {
            remove_conflicting(&mut service, &conflicting);
            let found =
                service.ports.iter().map(|it| (it.conflicting_addresses.clone(), it.node_port.is_some()));
            let expect = [(vec![address(2)], true), (vec![], false), (vec![address(0), address(2)], true)];
            assert_eq!(found.collect::<Vec<_>>(), expect);
        }
        let rest = Claim::new(&service, None).frontends;
        assert!(rest.iter().all(|it| !conflicting.contains(it)) && rest.len() == 4, "{rest:?}");
    }
}
