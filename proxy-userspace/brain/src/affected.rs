//! A Service of which some endpoints have changed: only those that the change can affect are derived again.
//!
//! Invariant: the result equals that of the whole derivation; where that is not sure, there is none.
//! The copies of an address and the addresses of a pod depend on each other, so they are derived together. The others keep
//! their results while one of them is ready, no hint names a node, and hints for zones are followed, or not, as before.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use model::{
    Family, PerFamily,
    cluster::{Endpoint, EndpointSlice, Service, SlicePort},
    state::{self, EndpointKey, Memo, PortTarget, ServiceState, TrafficPolicy},
};

use crate::{
    NodeView,
    candidates::{is_local, with_endpoints},
    select::{Others, Topology, matches_zone},
    service::trigger_time,
    slice_index::{Replaced, all_are_plain, has_zone_hints, hash, is_hinted, is_plain, may_contain_any},
};

/// The number of affected addresses up to which only they are derived again, however few endpoints there are.
const FEW_ADDRESSES: usize = 4;
/// In a large Service, one of this many endpoints may be affected.
const AFFECTED_ONE_IN: usize = 8;

/// The endpoints of a Service that a change can affect.
#[derive(Debug)]
pub(crate) struct Affected<'a> {
    /// All slices, as they are now.
    slices: &'a [&'a EndpointSlice],
    /// The slices with affected endpoints, without their other endpoints.
    now: Vec<EndpointSlice>,
    /// The addresses of affected endpoints, before and now.
    pub(crate) addresses: BTreeSet<IpAddr>,
    /// The pods of affected endpoints, before and now.
    pods: BTreeSet<&'a Arc<str>>,
    /// The endpoints that have changed, as they were and as they are.
    changed: BTreeSet<&'a Endpoint>,
    /// Whether any endpoint has a hint for a zone, before or now.
    has_zone_hints: bool,
}

impl<'a> Affected<'a> {
    /// Compares slices with what they were; `None` if all of their endpoints must be derived again.
    pub(crate) fn find(slices: &'a [&'a EndpointSlice], replaced: &'a Replaced) -> Option<Self> {
        let mut changed = BTreeSet::new();
        for (name, old) in replaced {
            let now = slices.iter().find(|it| it.name == *name)?;
            if (now.headless, now.family, &now.ports) != (old.headless, old.family, &old.ports) {
                return None;
            }
            let [old, now]: [BTreeSet<_>; 2] = [old, *now].map(|it| it.endpoints.iter().collect());
            changed.extend(old.symmetric_difference(&now).copied());
        }
        let max =
            FEW_ADDRESSES.max(slices.iter().map(|it| it.endpoints.len()).sum::<usize>() / AFFECTED_ONE_IN);
        let mut addresses: BTreeSet<_> = changed.iter().map(|it| it.address).collect();
        let mut pods: BTreeSet<_> = changed.iter().filter_map(|it| it.pod.as_ref()).collect();
        let with_some = loop {
            if addresses.len() > max {
                return None;
            }
            let before = (addresses.len(), pods.len());
            let hashes: Vec<_> = addresses.iter().map(hash).chain(pods.iter().map(hash)).collect();
            let with_some: Vec<_> =
                slices.iter().copied().filter(|it| may_contain_any(it, replaced, &hashes)).collect();
            for it in with_some.iter().flat_map(|it| &it.endpoints) {
                let pod = it.pod.as_ref();
                if addresses.contains(&it.address) || pod.is_some_and(|it| pods.contains(it)) {
                    addresses.insert(it.address);
                    pods.extend(pod);
                }
            }
            if before == (addresses.len(), pods.len()) {
                break with_some;
            }
        };
        let now = with_endpoints(with_some, |it| addresses.contains(&it.address));
        let is_plain = changed.iter().all(|it| is_plain(it));
        let has_zone_hints =
            slices.iter().any(|it| has_zone_hints(it, replaced)) || changed.iter().any(|it| is_hinted(it));
        let found = Self { slices, now, addresses, pods, changed, has_zone_hints };
        (is_plain && found.are_others_independent(replaced) && found.names_the_same_zones(replaced))
            .then_some(found)
    }

    /// The endpoints that the change does not affect, of the slices that are served.
    fn others(&self) -> impl Iterator<Item = (Family, &Endpoint)> {
        let served = self.slices.iter().filter(|it| !it.headless);
        let endpoints = served.flat_map(|slice| slice.endpoints.iter().map(|it| (slice.family, it)));
        endpoints.filter(|(_, it)| !self.addresses.contains(&it.address))
    }

    /// Whether the results of the others do not depend on the affected ones.
    fn are_others_independent(&self, replaced: &Replaced) -> bool {
        let mut ports: PerFamily<Option<&[SlicePort]>> = PerFamily::default();
        for slice in self.slices.iter().filter(|it| !it.headless) {
            let of_family = ports.of_mut(slice.family).get_or_insert(&slice.ports);
            if *of_family != slice.ports || !all_are_plain(slice, replaced) {
                return false;
            }
        }
        // All slices of a family have the same ports, so that an endpoint of the family serves all of them.
        let mut families = Family::ALL.into_iter().filter(|it| ports.of(*it).is_some());
        families.all(|family| self.others().any(|(of, it)| of == family && it.conditions.ready))
    }

    /// Whether hints name the same zones as before: states are kept for each zone that is named.
    fn names_the_same_zones(&self, replaced: &Replaced) -> bool {
        if self.changed.iter().all(|it| it.hints.is_none()) {
            return true;
        }
        fn zones<'b>(slices: impl Iterator<Item = &'b EndpointSlice>) -> BTreeSet<&'b Arc<str>> {
            slices.flat_map(|it| &it.endpoints).flat_map(Endpoint::zone_hints).collect()
        }
        let before = self.slices.iter().map(|now| replaced.get(&now.name).map_or(*now, AsRef::as_ref));
        zones(before) == zones(self.slices.iter().copied())
    }

    /// Which hints are followed at a node in one family, before and now; `None` if that may differ.
    pub(crate) fn topology_at(&self, family: Family, node: NodeView<'_>) -> Option<Topology> {
        let is_here = |it: &Endpoint| matches_zone(it, node);
        let of_family = |it: &&Endpoint| Family::of(it.address) == family && it.conditions.ready;
        let others = || self.others().map(|(_, it)| it).filter(of_family);
        let now = self.now.iter().flat_map(|it| &it.endpoints);
        let affected = || self.changed.iter().copied().chain(now.clone()).filter(of_family);
        if !self.has_zone_hints || !others().chain(affected()).any(is_hinted) {
            return Some(Topology::Unrestricted);
        }
        if !others().chain(affected()).all(is_hinted) {
            return None;
        }
        // Of several copies of an address any may count.
        let counts_here = |it: &&Endpoint| others().filter(|copy| copy.address == it.address).all(is_here);
        match others().any(is_here) {
            true => others().filter(|it| is_here(it)).any(|it| counts_here(&it)).then_some(Topology::Zone),
            false => (!affected().any(is_here)).then_some(Topology::Unrestricted),
        }
    }

    /// What the results of the affected ones need to know of the others at a node; `None` if the results of the others depend on
    /// the affected ones there.
    fn others_at(&self, service: &Service, node: NodeView<'_>) -> Option<PerFamily<Others>> {
        let others = |family| {
            let topology = Some(self.topology_at(family, node)?);
            Some(Others { has_ready: true, has_local_ready: false, topology })
        };
        let mut all = PerFamily { v4: others(Family::V4)?, v6: others(Family::V6)? };
        if [service.internal_policy, service.external_policy].contains(&TrafficPolicy::Local) {
            for family in Family::ALL {
                let others = || self.others().filter(|(of, _)| *of == family).map(|(_, it)| it);
                // Of several copies of an address any may count, also one on another node.
                let counts_here = |it: &Endpoint| {
                    others().filter(|copy| copy.address == it.address).all(|copy| is_local(copy, node))
                };
                let local = || others().filter(|it| is_local(it, node));
                let has_ready = local().any(|it| it.conditions.ready && counts_here(it));
                if !has_ready && local().next().is_some() {
                    return None;
                }
                all.of_mut(family).has_local_ready = has_ready;
            }
        }
        Some(all)
    }

    /// The state of the Service at a node, from the state there `before` and that of the affected endpoints now, which `derive`
    /// makes, without its forwarded ports. What is equal in `similar` is shared with it.
    pub(crate) fn state(
        &self,
        service: &Service,
        node: NodeView<'_>,
        before: &ServiceState,
        similar: Option<&ServiceState>,
        derive: impl FnOnce(&[EndpointSlice], PerFamily<Others>) -> Option<ServiceState>,
    ) -> Option<ServiceState> {
        let part = derive(&self.now, self.others_at(service, node)?)?;
        let mut endpoints = before.endpoints.clone();
        // Those without the name of a pod are the last ones.
        let unnamed = endpoints.partition_point(|it| matches!(it.key, EndpointKey::Pod(_)));
        let is_other = |it: &Arc<state::Endpoint>| {
            Family::ALL
                .iter()
                .filter_map(|family| it.address(*family))
                .all(|it| !self.addresses.contains(&it))
        };
        let others: Vec<_> = endpoints.drain(unnamed..).filter(is_other).collect();
        endpoints.extend(others);
        for pod in &self.pods {
            if let Ok(at) = position(&endpoints, &EndpointKey::Pod(Arc::clone(pod))) {
                endpoints.remove(at);
            }
        }
        for mut it in part.endpoints {
            if let Some(other) = before.endpoints.first().filter(|other| other.ports == it.ports) {
                Arc::make_mut(&mut it).ports = Arc::clone(&other.ports);
            }
            let equal = similar.into_iter().chain([before]).find_map(|state| {
                state.endpoints.get(position(&state.endpoints, &it.key).ok()?).filter(|other| **other == it)
            });
            let at = position(&endpoints, &it.key).unwrap_or_else(|at| at);
            endpoints.insert(at, equal.cloned().unwrap_or(it));
        }
        Some(ServiceState {
            service: Arc::clone(&before.service),
            endpoints,
            other_serving: self.targets(&before.other_serving, &part.other_serving),
            not_serving: self.targets(&before.not_serving, &part.not_serving),
            forwarded: Arc::default(),
            trigger_time: trigger_time(self.slices),
            memo: Memo::default(),
        })
    }

    /// The targets of the others before, and those of the affected ones now.
    fn targets(&self, before: &Arc<[PortTarget]>, now: &[PortTarget]) -> Arc<[PortTarget]> {
        let is_affected = |it: &PortTarget| self.addresses.contains(&it.target.ip());
        if now.is_empty() && !before.iter().any(is_affected) {
            return Arc::clone(before);
        }
        let mut all: Vec<_> = before.iter().filter(|it| !is_affected(it)).chain(now).copied().collect();
        all.sort_unstable();
        all.into()
    }
}

fn position(endpoints: &[Arc<state::Endpoint>], key: &EndpointKey) -> Result<usize, usize> {
    endpoints.binary_search_by(|it| it.key.cmp(key))
}
