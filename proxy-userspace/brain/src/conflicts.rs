//! Which Service answers where, when two of them say so.
//!
//! The one rule: the older one wins, and nothing else of the other is lost.
//! But whose cluster IP it is comes before all others: naming it an external IP of one's own does not take it away
//! (CVE-2020-8554).
//! Age is the creation time; who has none is younger than who has one, and of two alike the first by name counts.
//! When the winner goes, the other one answers.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt,
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
};

use model::{
    Protocol, ServiceName, Timestamp,
    cluster::{self, ClusterState, Rejected},
};

use crate::{
    Options,
    service::{is_served, served_addresses},
};

/// Where a port of a Service answers: at one of its addresses, or at the nodes' addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Frontend {
    /// None for a node port.
    pub(crate) address: Option<IpAddr>,
    pub(crate) port: NonZeroU16,
    pub(crate) protocol: Protocol,
}

impl fmt::Display for Frontend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.address {
            Some(address) => write!(f, "{}/{}", SocketAddr::new(address, self.port.get()), self.protocol),
            None => write!(f, "node port {}/{}", self.port, self.protocol),
        }
    }
}

/// The frontends that a Service does not get.
pub(crate) type Lost = BTreeSet<Frontend>;

/// Who wants which frontend.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    services: BTreeMap<ServiceName, Claim>,
    /// The first one has it.
    claimants: HashMap<Frontend, BTreeSet<Rank>>,
    lost: BTreeMap<ServiceName, Lost>,
}

/// What one Service wants.
#[derive(Debug, Default, PartialEq, Eq)]
struct Claim {
    created: Option<Timestamp>,
    cluster_ips: Vec<IpAddr>,
    /// In ascending order, each once.
    frontends: Vec<Frontend>,
}

/// The least one wins: whose cluster IP it is, then the older; false comes before true.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    is_foreign: bool,
    is_undated: bool,
    created: Option<Timestamp>,
    name: ServiceName,
}

impl Claim {
    fn rank(&self, name: &ServiceName, frontend: Frontend) -> Rank {
        let is_own = frontend.address.is_some_and(|it| self.cluster_ips.contains(&it));
        Rank {
            is_foreign: !is_own,
            is_undated: self.created.is_none(),
            created: self.created,
            name: name.clone(),
        }
    }
}

impl Claims {
    /// The claims of all Services.
    pub(crate) fn of(facts: &ClusterState, options: &Options) -> Self {
        let mut claims = Self::default();
        for (name, service) in facts.services() {
            claims.set(name, Some(service), options);
        }
        claims
    }

    /// What a Service does not get.
    pub(crate) fn lost(&self, name: &ServiceName) -> Option<&Lost> {
        self.lost.get(name)
    }

    /// What all Services do not get, and why.
    pub(crate) fn rejected(&self) -> impl Iterator<Item = Rejected> {
        let lost = self.lost.iter().flat_map(|(name, lost)| lost.iter().map(move |it| (name, it)));
        lost.filter_map(|(name, frontend)| {
            let winner = &self.claimants.get(frontend)?.first()?.name;
            Some(Rejected {
                item: format!("Service {name}: {frontend}"),
                reason: format!(
                    "Service {winner} has it (its cluster IP, or the older one, or the first by name); give one of them another"
                ),
            })
        })
    }

    /// Takes what a Service wants by now, none if it is gone, and returns the others that win or lose by it.
    pub(crate) fn set(
        &mut self,
        name: &ServiceName,
        service: Option<&cluster::Service>,
        options: &Options,
    ) -> BTreeSet<ServiceName> {
        let claim = service.map(|it| Claim {
            created: it.created,
            cluster_ips: it.cluster_ips.clone(),
            frontends: frontends(it, options),
        });
        let claim = claim.unwrap_or_default();
        let mut touched = BTreeSet::new();
        if self.services.get(name).map_or(claim == Claim::default(), |it| *it == claim) {
            return touched;
        }
        let before = self.services.remove(name).unwrap_or_default();
        let all: BTreeSet<_> = before.frontends.iter().chain(&claim.frontends).copied().collect();
        self.lost.remove(name);
        for frontend in all {
            let claimants = self.claimants.entry(frontend).or_default();
            let winner = |it: &BTreeSet<Rank>| it.first().map(|it| it.name.clone());
            let was = winner(claimants);
            claimants.remove(&before.rank(name, frontend));
            let is_wanted = claim.frontends.binary_search(&frontend).is_ok();
            if is_wanted {
                claimants.insert(claim.rank(name, frontend));
            }
            let is = winner(claimants);
            if claimants.is_empty() {
                self.claimants.remove(&frontend);
            }
            if is_wanted && is.as_ref() != Some(name) {
                self.lost.entry(name.clone()).or_default().insert(frontend);
            }
            if was == is {
                continue;
            }
            if let Some(loser) = was.filter(|it| it != name) {
                self.lost.entry(loser.clone()).or_default().insert(frontend);
                touched.insert(loser);
            }
            if let Some(winner) = is.filter(|it| it != name) {
                self.forgive(&winner, frontend);
                touched.insert(winner);
            }
        }
        if !claim.frontends.is_empty() {
            self.services.insert(name.clone(), claim);
        }
        touched
    }

    fn forgive(&mut self, name: &ServiceName, frontend: Frontend) {
        let Some(lost) = self.lost.get_mut(name) else { return };
        lost.remove(&frontend);
        if lost.is_empty() {
            self.lost.remove(name);
        }
    }
}

/// Where a Service would answer.
fn frontends(service: &cluster::Service, options: &Options) -> Vec<Frontend> {
    let mut found = Vec::new();
    if !is_served(service, options) {
        return found;
    }
    let addresses: Vec<_> = served_addresses(service, options).map(Some).collect();
    for it in &service.ports {
        let frontend = |address, port| Frontend { address, port, protocol: it.protocol };
        found.extend(addresses.iter().map(|address| frontend(*address, it.port)));
        found.extend(it.node_port.map(|port| frontend(None, port)));
    }
    found.sort_unstable();
    found.dedup();
    found.shrink_to_fit();
    found
}
