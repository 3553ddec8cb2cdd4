//! Turns a state into elements: assigns slots to endpoints, and computes the difference to the previous state.
//!
//! Invariant: a change costs what it touches.
//! An unchanged Service is not visited, and the slot of a removed endpoint goes to a new one or to the last one.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    net::SocketAddr,
};

use model::{Family, Rejected, ServiceName, state::NodeState, state::Scope};

use crate::{
    compile::{Action, Frontend, PortImage, ServiceImage, compile, set_number},
    elements::{Changes, Element, Elements, Value},
    endpoint_selector::{DROP, MatchKey, REFUSE, SET_SHIFT, Selector},
    schema::{Bytes, Map},
};
use datapath::{FrontendAddress, FrontendKind};

/// The endpoints of a set by slot.
pub(super) type Slots = Vec<SocketAddr>;

/// Slots that exist in the kernel, by service port and set.
pub(super) type PreviousSlots = HashMap<(FrontendAddress, u32), Slots>;

/// The desired contents of the tables, apart from the constant part.
#[derive(Debug, Default)]
pub(super) struct Layout {
    state: NodeState,
    node: Vec<std::net::IpAddr>,
    services: HashMap<ServiceName, PlacedService>,
    /// The Services that claim a frontend, and its kind for each; the first one gets it.
    claimants: HashMap<FrontendAddress, BTreeSet<(FrontendKind, ServiceName)>>,
    /// The frontends that several Services claim.
    conflicting: BTreeSet<FrontendAddress>,
    /// What is not served, by Service.
    rejected: BTreeMap<ServiceName, Vec<Rejected>>,
    /// The reference counts of elements that Services share.
    shared: HashMap<Element, usize>,
    /// The reference counts of selectors.
    selectors: HashMap<(Family, Selector), usize>,
}

/// A Service with its slots.
#[derive(Clone, Debug, Default)]
struct PlacedService {
    image: ServiceImage,
    /// The slots of each set of each port.
    slots: Vec<Vec<Slots>>,
    /// Which frontends of each port it has won.
    own: Vec<Vec<bool>>,
}

/// The difference that an update makes.
#[derive(Debug, Default)]
pub(super) struct Update {
    /// How the elements change.
    pub(super) changes: Changes,
    /// Selectors that are needed from now on.
    pub(super) new_selectors: BTreeSet<(Family, Selector)>,
    /// Selectors that are no longer needed.
    pub(super) old_selectors: BTreeSet<(Family, Selector)>,
    /// The Services that are new, changed or gone.
    pub(super) services: Vec<Changed>,
}

/// A Service that is new, changed or gone.
#[derive(Debug)]
pub(super) struct Changed {
    /// What it was; nothing if it is new.
    pub(super) before: ServiceImage,
    /// What it is; nothing if it is gone.
    pub(super) after: ServiceImage,
}

impl Layout {
    /// Takes the state of the node, and the node's own addresses, and returns how the tables change.
    /// An endpoint of a port that was not known takes the slot that the hints say.
    pub(super) fn update(
        &mut self,
        state: &NodeState,
        node: &[std::net::IpAddr],
        previous: &mut PreviousSlots,
    ) -> Update {
        let mut before = std::mem::replace(&mut self.state, state.clone());
        if self.node != node {
            // Which sources may come depends on it: all Services are looked at again.
            self.node = node.to_vec();
            before = NodeState::default();
        }
        let mut changed: Vec<_> = state.diff(&before).map(|(name, _, now)| (name.clone(), now)).collect();
        if before.services.is_empty() {
            let gone = self.services.keys().filter(|it| !state.services.contains_key(it));
            changed.extend(gone.map(|it| (it.clone(), None)).collect::<Vec<_>>());
        }
        let mut update = Update::default();
        // The frontends that were added or removed, and their previous owners.
        let mut affected = BTreeMap::new();
        let mut old = HashMap::new();
        for (name, now) in &changed {
            let known = self.services.remove(name).unwrap_or_default();
            for it in frontends(&known.image) {
                if let Some(claimants) = self.claimants.get_mut(&it.address) {
                    affected.entry(it.address).or_insert_with(|| first(claimants).cloned());
                    claimants.remove(&(it.kind, name.clone()));
                }
            }
            let mut image = now.map(|it| compile(it, &self.node)).unwrap_or_default();
            let rejected = std::mem::take(&mut image.rejected);
            if rejected.is_empty() {
                self.rejected.remove(name);
            } else {
                self.rejected.insert(name.clone(), rejected);
            }
            for it in frontends(&image) {
                let claimants = self.claimants.entry(it.address).or_default();
                affected.entry(it.address).or_insert_with(|| first(claimants).cloned());
                claimants.insert((it.kind, name.clone()));
            }
            let (before, after) = (known.image.clone(), image.clone());
            update.services.push(Changed { before, after });
            if now.is_some() {
                let slots = image.ports.iter().map(|it| known.place(it, previous)).collect();
                self.services.insert(name.clone(), PlacedService { image, slots, own: Vec::new() });
            }
            old.insert(name.clone(), known);
        }
        // Other Services that lose or gain a frontend by this.
        for (address, former) in affected {
            let Some(claimants) = self.claimants.get(&address) else { continue };
            if claimants.len() > 1 {
                self.conflicting.insert(address);
            } else {
                self.conflicting.remove(&address);
            }
            for name in former.iter().chain(first(claimants)) {
                if !old.contains_key(name)
                    && let Some(known) = self.services.get(name)
                {
                    old.insert(name.clone(), known.clone());
                }
            }
            if claimants.is_empty() {
                self.claimants.remove(&address);
            }
        }
        for (name, before) in old {
            let mut after = self.services.remove(&name);
            if let Some(after) = &mut after {
                after.own = self.won_frontends(&name, &after.image);
            }
            self.replace(&before, after.as_ref(), &mut update);
            if let Some(after) = after {
                self.services.insert(name, after);
            }
        }
        update
    }

    /// Which frontends of its ports a Service has won. A port that lost its identity has none.
    fn won_frontends(&self, name: &ServiceName, image: &ServiceImage) -> Vec<Vec<bool>> {
        let is_own = |address: &FrontendAddress| {
            self.claimants.get(address).and_then(first).is_some_and(|owner| owner == name)
        };
        let own = |port: &PortImage| {
            let all = is_own(&port.identity);
            port.frontends.iter().map(|it| all && is_own(&it.address)).collect()
        };
        image.ports.iter().map(own).collect()
    }

    /// Adds the difference of one Service to the update.
    fn replace(&mut self, before: &PlacedService, after: Option<&PlacedService>, update: &mut Update) {
        let old = before.elements();
        let new = after.map(PlacedService::elements).unwrap_or_default();
        let own = Changes::between(&old, &new);
        for (element, value) in own.delete {
            update.changes.delete(element, value);
        }
        for (element, value) in own.add {
            update.changes.add(element, value);
        }
        let nothing = PlacedService::default();
        let after = after.unwrap_or(&nothing);
        // Additions are counted before removals, so that what stays is not touched.
        for element in after.shared() {
            let count = self.shared.entry(element.clone()).or_default();
            *count += 1;
            if *count == 1 {
                update.changes.add(element, Value::None);
            }
        }
        for element in before.shared() {
            if let Some(count) = self.shared.get_mut(&element) {
                *count -= 1;
                if *count == 0 {
                    self.shared.remove(&element);
                    update.changes.delete(element, Value::None);
                }
            }
        }
        for selector in after.selectors() {
            let count = self.selectors.entry(selector).or_default();
            *count += 1;
            if *count == 1 && !update.old_selectors.remove(&selector) {
                update.new_selectors.insert(selector);
            }
        }
        for selector in before.selectors() {
            if let Some(count) = self.selectors.get_mut(&selector) {
                *count -= 1;
                if *count == 0 {
                    self.selectors.remove(&selector);
                    if !update.new_selectors.remove(&selector) {
                        update.old_selectors.insert(selector);
                    }
                }
            }
        }
    }

    /// Every element.
    pub(super) fn elements(&self) -> Elements {
        let mut elements: Elements = self.services.values().flat_map(PlacedService::elements).collect();
        elements.extend(self.shared.keys().map(|it| (it.clone(), Value::None)));
        elements
    }

    /// The Service that has an address, and its port there.
    pub(super) fn owner(&self, address: &FrontendAddress) -> Option<(&ServiceName, &PortImage)> {
        let name = first(self.claimants.get(address)?)?;
        let PlacedService { image, own, .. } = self.services.get(name)?;
        let mut ports = image.ports.iter().zip(own);
        let is_it = |port: &PortImage, own: &[bool]| {
            port.frontends.iter().zip(own).any(|(it, own)| *own && it.address == *address)
        };
        ports.find_map(|(port, own)| is_it(port, own).then_some((name, port)))
    }

    /// Every selector.
    pub(super) fn selectors(&self) -> BTreeSet<(Family, Selector)> {
        self.selectors.keys().copied().collect()
    }

    /// How many Services there are.
    pub(super) fn services(&self) -> usize {
        self.services.len()
    }

    /// What is not served, and why.
    pub(super) fn rejected(&self) -> Vec<Rejected> {
        let own = self.rejected.values().flatten().cloned();
        let conflicting = self.conflicting.iter().filter_map(|address| self.claimants.get_key_value(address));
        let lost = conflicting.filter_map(|(address, claimants)| {
            let mut all = claimants.iter();
            let (kind, winner) = all.next()?;
            Some(all.map(move |(lost, loser)| Rejected {
                item: format!("{loser} {lost} {address}"),
                reason: format!("already used as {kind} by {winner}; change one of them"),
            }))
        });
        own.chain(lost.flatten()).collect()
    }
}

/// The Service that gets a frontend.
fn first(claimants: &BTreeSet<(FrontendKind, ServiceName)>) -> Option<&ServiceName> {
    claimants.first().map(|(_, name)| name)
}

fn frontends(image: &ServiceImage) -> impl Iterator<Item = &Frontend> {
    image.ports.iter().flat_map(|it| &it.frontends)
}

/// The key of a frontend.
fn key(frontend: &Frontend) -> Bytes {
    let FrontendAddress { address: at, protocol } = frontend.address;
    match by(frontend) {
        MatchKey::Address => address(frontend.address),
        MatchKey::NodePort => Bytes::new().protocol(protocol).port(at.port()),
    }
}

/// An address with its protocol and port.
fn address(FrontendAddress { address, protocol }: FrontendAddress) -> Bytes {
    Bytes::new().address(address.ip()).protocol(protocol).port(address.port())
}

/// How a frontend is matched.
fn by(frontend: &Frontend) -> MatchKey {
    if frontend.kind == FrontendKind::NodePort { MatchKey::NodePort } else { MatchKey::Address }
}

impl PlacedService {
    /// Assigns slots to the endpoints of a port, the previous ones where possible.
    fn place(&self, port: &PortImage, previous: &mut PreviousSlots) -> Vec<Slots> {
        let before = self.image.ports.iter().position(|it| it.identity == port.identity);
        let old = |scope: Scope| {
            let index = before?;
            let set = self.image.ports[index].sets.iter().position(|(it, _)| *it == scope)?;
            self.slots.get(index)?.get(set).cloned()
        };
        let slots = |(scope, set): &(Scope, Vec<SocketAddr>)| {
            let old = old(*scope).or_else(|| previous.remove(&(port.identity, set_number(*scope))));
            place(&old.unwrap_or_default(), set)
        };
        port.sets.iter().map(slots).collect()
    }

    /// Its ports that have won a frontend, each with its slots and which frontends it has won.
    fn ports(&self) -> impl Iterator<Item = (&PortImage, &[Slots], &[bool])> {
        let all = self.image.ports.iter().zip(&self.slots).zip(&self.own);
        all.map(|((port, slots), own)| (port, &**slots, &**own)).filter(|(_, _, own)| own.contains(&true))
    }

    /// The elements that belong to this Service alone.
    fn elements(&self) -> Elements {
        let mut elements = Elements::new();
        for (port, slots, own) in self.ports() {
            let family = port.identity.family();
            for (frontend, _) in port.frontends.iter().zip(own).filter(|(_, own)| **own) {
                let (key, by) = (key(frontend), by(frontend));
                for ((scope, _), slots) in port.sets.iter().zip(slots) {
                    if ![frontend.internal, frontend.external].contains(&Action::To(*scope)) {
                        continue;
                    }
                    for (slot, endpoint) in (0..).zip(slots) {
                        let key = key.clone().number(set_number(*scope) << SET_SHIFT | slot);
                        let value = Bytes::new().address(endpoint.ip()).port(endpoint.port());
                        elements.insert(Element::new(family, by.endpoints(), key), Value::Data(value));
                    }
                }
                for (first, last) in &frontend.sources {
                    let end = Some(key.clone().address(*last));
                    let key = key.clone().address(*first);
                    elements.insert(Element { family, map: Map::Sources, key, end }, Value::None);
                }
                let word = |way| match way {
                    Action::To(scope) => port.selector(scope, frontend).word(),
                    Action::Refuse => REFUSE,
                    Action::Drop => DROP,
                };
                let mut lead = |map, number| {
                    let value = Value::Data(Bytes::new().number(number));
                    elements.insert(Element::new(family, map, key.clone()), value);
                };
                lead(by.frontends(), frontend.policy.word());
                lead(by.internal(), word(frontend.internal));
                if frontend.policy.is_local() {
                    lead(by.external(), word(frontend.external));
                }
                if port.affinity > 0 {
                    let value = Value::Data(address(port.identity));
                    elements.insert(Element::new(family, by.service_ports(), key), value);
                }
            }
            elements.extend(port.members(own).into_iter().map(|it| (it, Value::None)));
        }
        elements
    }

    /// The elements that other Services may need, too.
    fn shared(&self) -> BTreeSet<Element> {
        let single = |ip, map| Element::new(Family::of(ip), map, Bytes::new().address(ip));
        let mut shared: BTreeSet<_> =
            self.image.cluster_ips.iter().map(|ip| single(*ip, Map::ClusterIps)).collect();
        shared.extend(self.image.local.iter().map(|ip| {
            let key = Bytes::new().address(*ip).address(*ip);
            Element::new(Family::of(*ip), Map::Hairpin, key)
        }));
        shared
    }

    /// The selectors of its frontends.
    fn selectors(&self) -> BTreeSet<(Family, Selector)> {
        let mut selectors = BTreeSet::new();
        for (port, _, own) in self.ports() {
            for (frontend, _) in port.frontends.iter().zip(own).filter(|(_, own)| **own) {
                for way in [frontend.internal, frontend.external] {
                    if let Action::To(scope) = way {
                        selectors.insert((port.identity.family(), port.selector(scope, frontend)));
                    }
                }
            }
        }
        selectors
    }
}

impl PortImage {
    /// The endpoints that session affinity may keep, in the sets of the frontends it has won.
    fn members(&self, own: &[bool]) -> Vec<Element> {
        let mut members = Vec::new();
        for (scope, set) in self.sets.iter().filter(|_| self.affinity > 0) {
            let data = |it: &Frontend| [it.internal, it.external].contains(&Action::To(*scope));
            if self.frontends.iter().zip(own).any(|(it, own)| *own && data(it)) {
                let (family, map) = (self.identity.family(), Map::members(set_number(*scope)));
                let key = |it: &SocketAddr| address(self.identity).address(it.ip()).port(it.port());
                members.extend(set.iter().map(|it| Element::new(family, map, key(it))));
            }
        }
        members
    }

    fn selector(&self, scope: Scope, frontend: &Frontend) -> Selector {
        let set = self.sets.iter().find(|(it, _)| *it == scope).map_or(0, |(_, set)| set.len());
        // `compile` has limited it.
        let count = u32::try_from(set).unwrap_or(u32::MAX);
        Selector { by: by(frontend), set: set_number(scope), count, affinity: self.affinity }
    }
}

/// An endpoint that stays keeps its slot; a new one, or one beyond the new end, gets a free one.
fn place(old: &[SocketAddr], new: &[SocketAddr]) -> Slots {
    let desired: HashSet<_> = new.iter().collect();
    let mut placed = HashSet::new();
    let mut stays = |it: &SocketAddr| (desired.contains(it) && placed.insert(*it)).then_some(*it);
    let mut slots: Vec<_> = old.iter().take(new.len()).map(&mut stays).collect();
    slots.resize(new.len(), None);
    let mut others = new.iter().filter(|it| !placed.contains(it)).copied();
    slots.into_iter().filter_map(|it| it.or_else(|| others.next())).collect()
}

#[cfg(test)]
mod at_scale;
#[cfg(test)]
mod tests;
