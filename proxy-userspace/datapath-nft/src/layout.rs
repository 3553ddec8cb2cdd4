//! Turns a state into elements: assigns slots to endpoints, and computes the difference to the previous state.
//!
//! Invariant: a change costs what it touches.
//! An unchanged Service is not visited, and the slot of a removed endpoint goes to a new one or to the last one.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use model::{Family, Rejected, ServiceName, state::NodeState, state::Scope};

use crate::{
    affinity,
    affinity_numbers::{Numbers, ServicePortNumbers, TOO_MANY, seconds_word},
    compile::{Action, Frontend, PortImage, ServiceImage, compile, set_number},
    elements::{Changes, Element, Elements, Value},
    endpoint_selector::{DROP, MatchKey, REFUSE, Selector, slot_word},
    schema::{Bytes, Map},
    source_list::{SourceList, SourceLists},
    watch::Watch,
};
use datapath::{AvoidedEndpoints, FrontendAddress};

/// The endpoints of a set by slot.
pub(super) type Slots = Vec<SocketAddr>;

/// What exists in the kernel and should stay: slots by service port and set, and numbers of session affinity.
#[derive(Clone, Debug, Default)]
pub(super) struct PreviousSlots {
    pub(super) slots: HashMap<(FrontendAddress, u32), Slots>,
    pub(super) numbers: HashMap<FrontendAddress, Numbers>,
    /// The numbers of service ports among them.
    pub(super) taken: HashSet<(Family, u32)>,
}

/// The desired contents of the tables, apart from the constant part.
///
/// A frontend belongs to one Service, because the state has no conflicts, see [`model::conflicts`].
#[derive(Debug, Default)]
pub(super) struct Layout {
    state: NodeState,
    node: Vec<IpAddr>,
    services: HashMap<ServiceName, PlacedService>,
    /// What is not served, by Service.
    rejected: BTreeMap<ServiceName, Vec<Rejected>>,
    /// The lists of source ranges that Services share.
    source_lists: SourceLists,
    /// The elements that Services share, and by how many.
    shared: HashMap<Element, (Value, usize)>,
    /// The numbers of service ports with session affinity.
    numbers: ServicePortNumbers,
    /// The endpoints that packets avoid.
    avoided: AvoidedEndpoints,
    /// The Services of which they avoid others than at the last update.
    reconsidered: BTreeSet<ServiceName>,
}

/// A Service with its slots.
#[derive(Clone, Debug, Default)]
struct PlacedService {
    image: ServiceImage,
    /// The slots of each set of each port.
    slots: Vec<Vec<Slots>>,
    /// The numbers of each port with session affinity.
    numbers: HashMap<FrontendAddress, Numbers>,
}

/// The difference that an update makes.
#[derive(Debug, Default)]
pub(super) struct Update {
    /// How the elements change.
    pub(super) changes: Changes,
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
    /// Sets the endpoints that packets avoid, for the next update.
    pub(super) fn set_avoided(&mut self, avoided: &AvoidedEndpoints) {
        if self.avoided != *avoided {
            let before = std::mem::replace(&mut self.avoided, avoided.clone());
            let names = before.keys().chain(avoided.keys());
            let differ = names.filter(|it| before.get(it) != avoided.get(it));
            self.reconsidered.extend(differ.cloned());
        }
    }

    /// Takes the state of the node, and the node's own addresses, and returns how the tables change.
    /// An endpoint of a port that was not known takes the slot that the hints say.
    pub(super) fn update(
        &mut self,
        state: &NodeState,
        node: &[IpAddr],
        previous: &mut PreviousSlots,
    ) -> Update {
        let before = std::mem::replace(&mut self.state, state.clone());
        let reconsidered = std::mem::take(&mut self.reconsidered);
        let mut changed: Vec<_> = if self.node == node {
            state.diff(&before).map(|(name, _, now)| (name, now)).collect()
        } else {
            // Which sources may come depends on it: all Services are looked at again.
            self.node = node.to_vec();
            let gone = before.services.keys().filter(|it| !state.services.contains_key(it));
            gone.map(|it| (it, None))
                .chain(state.services.iter().map(|(name, it)| (name, Some(it))))
                .collect()
        };
        if !reconsidered.is_empty() {
            let is_new: HashSet<_> = changed.iter().map(|(name, _)| *name).collect();
            let others = reconsidered.iter().filter(|it| !is_new.contains(it));
            changed.extend(others.filter_map(|it| Some((it, Some(state.services.get(it)?)))));
        }
        let (mut update, none) = (Update::default(), BTreeSet::new());
        for (name, now) in changed {
            let old = self.services.remove(name).unwrap_or_default();
            let mut image = now
                .map(|it| compile(it, &self.node, self.avoided.get(name).unwrap_or(&none)))
                .unwrap_or_default();
            let numbers = self.number(&old, &mut image, previous);
            let rejected = std::mem::take(&mut image.rejected);
            if rejected.is_empty() {
                self.rejected.remove(name);
            } else {
                self.rejected.insert(name.clone(), rejected);
            }
            let slots = image.ports.iter().map(|it| old.place(it, previous)).collect();
            let new = PlacedService { image, slots, numbers };
            self.replace(&old, &new, &mut update.changes);
            update.services.push(Changed { before: old.image, after: new.image.clone() });
            if now.is_some() {
                self.services.insert(name.clone(), new);
            }
        }
        update
    }

    /// Numbers the ports with session affinity and their members; those that get no number lose it.
    fn number(
        &mut self,
        old: &PlacedService,
        image: &mut ServiceImage,
        previous: &mut PreviousSlots,
    ) -> HashMap<FrontendAddress, Numbers> {
        let identities: HashSet<_> =
            image.ports.iter().filter(|it| it.affinity > 0).map(|it| it.identity).collect();
        for (identity, it) in old.numbers.iter().filter(|(it, _)| !identities.contains(it)) {
            self.numbers.release(identity.family(), it.service_port);
        }
        let mut all = HashMap::new();
        for port in image.ports.iter_mut().filter(|it| it.affinity > 0) {
            let identity = port.identity;
            let family = identity.family();
            let before = old.numbers.get(&identity).cloned().or_else(|| {
                previous.numbers.remove(&identity).filter(|it| self.numbers.take(family, it.service_port))
            });
            let numbers = before.or_else(|| {
                let is_taken = |it| previous.taken.contains(&(family, it));
                self.numbers.acquire(identity, is_taken).map(Numbers::new)
            });
            if let Some(mut numbers) = numbers {
                numbers.update(&port.sets.iter().flat_map(|(_, set)| set).copied().collect());
                all.insert(identity, numbers);
            } else {
                port.affinity = 0;
                let item = format!("{identity}");
                image.rejected.push(Rejected::not_served(item, TOO_MANY));
            }
        }
        all
    }

    /// Adds the difference of one Service to the changes.
    fn replace(&mut self, before: &PlacedService, after: &PlacedService, changes: &mut Changes) {
        let acquired: Vec<_> = after.source_lists().iter().map(|it| self.source_lists.acquire(it)).collect();
        for (element, value) in acquired.into_iter().flatten() {
            changes.add(element, value);
        }
        let own = Changes::between(&before.elements(&self.source_lists), &after.elements(&self.source_lists));
        for (element, value) in own.delete {
            changes.delete(element, value);
        }
        for (element, value) in own.add {
            changes.add(element, value);
        }
        let released: Vec<_> = before.source_lists().iter().map(|it| self.source_lists.release(it)).collect();
        for (element, value) in released.into_iter().flatten() {
            changes.delete(element, value);
        }
        // Additions are counted before removals, so that what stays is not touched.
        for (element, value) in after.shared() {
            let (_, count) = self.shared.entry(element.clone()).or_insert_with(|| (value.clone(), 0));
            *count += 1;
            if *count == 1 {
                changes.add(element, value);
            }
        }
        for (element, value) in before.shared() {
            if let Some((_, count)) = self.shared.get_mut(&element) {
                *count -= 1;
                if *count == 0 {
                    self.shared.remove(&element);
                    changes.delete(element, value);
                }
            }
        }
    }

    /// Every element.
    pub(super) fn elements(&self) -> Elements {
        let mut elements: Elements =
            self.services.values().flat_map(|it| it.elements(&self.source_lists)).collect();
        elements.extend(self.source_lists.elements());
        elements.extend(self.shared.iter().map(|(it, (value, _))| (it.clone(), value.clone())));
        elements
    }

    /// Every port of every Service.
    pub(super) fn ports(&self) -> impl Iterator<Item = &PortImage> {
        self.services.values().flat_map(|it| &it.image.ports)
    }

    /// Whether a Service has session affinity.
    pub(super) fn has_affinity(&self) -> bool {
        [Family::V4, Family::V6].iter().any(|it| self.shared.contains_key(&Watch::Answered.element(*it).0))
    }

    /// How many Services there are.
    pub(super) fn services(&self) -> usize {
        self.services.len()
    }

    /// What is not served, and why.
    pub(super) fn rejected(&self) -> Vec<Rejected> {
        self.rejected.values().flatten().cloned().collect()
    }
}

/// The key of a frontend.
fn key(frontend: &Frontend) -> Bytes {
    let FrontendAddress { address: at, protocol } = frontend.address;
    match by(frontend) {
        MatchKey::Address => Bytes::frontend(frontend.address),
        MatchKey::NodePort => Bytes::new().protocol(protocol).port(at.port()),
    }
}

/// How a frontend is matched.
fn by(frontend: &Frontend) -> MatchKey {
    if frontend.address.address.ip().is_unspecified() { MatchKey::NodePort } else { MatchKey::Address }
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
            let old = old(*scope).or_else(|| {
                // Not every address uses every set.
                let mut addresses = port.frontends.iter().map(|it| it.address);
                addresses.find_map(|it| previous.slots.remove(&(it, set_number(*scope))))
            });
            place(&old.unwrap_or_default(), set)
        };
        port.sets.iter().map(slots).collect()
    }

    /// The lists of source ranges that it uses, each once.
    fn source_lists(&self) -> HashSet<Arc<SourceList>> {
        let frontends = self.image.ports.iter().flat_map(|it| &it.frontends);
        frontends.filter_map(|it| it.sources.clone()).collect()
    }

    /// The elements that belong to this Service alone.
    fn elements(&self, lists: &SourceLists) -> Elements {
        let mut elements = Elements::new();
        for (port, slots) in self.image.ports.iter().zip(&self.slots) {
            let family = port.identity.family();
            let numbers = self.numbers.get(&port.identity);
            let members = numbers.map(Numbers::members).unwrap_or_default();
            for frontend in &port.frontends {
                let (key, by) = (key(frontend), by(frontend));
                for ((scope, _), slots) in port.sets.iter().zip(slots) {
                    if ![frontend.internal, frontend.external].contains(&Action::To(*scope)) {
                        continue;
                    }
                    for (slot, endpoint) in (0..).zip(slots) {
                        let key = key.clone().number(slot_word(set_number(*scope), slot));
                        let (map, value) = match members.get(endpoint) {
                            Some(number) => (by.affinity_endpoints(), Bytes::new().number(*number)),
                            None => (by.endpoints(), Bytes::endpoint(*endpoint)),
                        };
                        elements.insert(Element::new(family, map, key), Value::Data(value));
                    }
                }
                let word = |way| match way {
                    Action::To(scope) => port.selector(scope, frontend).word(),
                    Action::Refuse => REFUSE,
                    Action::Drop => DROP,
                };
                let mut put = |map, number| {
                    let value = Value::Data(Bytes::new().number(number));
                    elements.insert(Element::new(family, map, key.clone()), value);
                };
                put(by.frontends(), frontend.policy.word());
                if let Some(list) = frontend.sources.as_ref().and_then(|it| lists.number(it)) {
                    put(Map::SourceLists, list);
                }
                put(by.internal(), word(frontend.internal));
                if frontend.policy.is_local() {
                    put(by.external(), word(frontend.external));
                }
                if let Some(it) = numbers {
                    put(by.service_ports(), it.service_port);
                }
            }
            if let Some(it) = numbers {
                let key = Element::new(family, Map::AffinitySeconds, Bytes::new().number(it.service_port));
                let seconds = Bytes::new().number(seconds_word(port.affinity));
                elements.insert(key, Value::Data(seconds));
                elements.extend(port.members(&members));
            }
        }
        elements
    }

    /// The elements that other Services may need, too.
    fn shared(&self) -> Elements {
        let element = |map, ip, key| (Element::new(Family::of(ip), map, key), Value::None);
        let mut shared = Elements::new();
        for ip in &self.image.cluster_ips {
            shared.extend([element(Map::ClusterIps, *ip, Bytes::new().address(*ip))]);
        }
        for ip in &self.image.local {
            shared.extend([element(Map::Hairpin, *ip, Bytes::new().address(*ip).address(*ip))]);
        }
        for port in &self.image.ports {
            if port.affinity > 0 {
                let family = port.identity.family();
                shared.extend([affinity::timeout(family, port.affinity), Watch::Answered.element(family)]);
            }
            for frontend in &port.frontends {
                for action in [frontend.internal, frontend.external] {
                    if let Action::To(scope) = action {
                        shared.extend([port.selector(scope, frontend).element(port.identity.family())]);
                    }
                }
            }
        }
        shared
    }
}

impl PortImage {
    /// The endpoints that session affinity may keep, in the sets that its frontends use.
    fn members(&self, numbers: &HashMap<SocketAddr, u32>) -> Vec<(Element, Value)> {
        let mut members = Vec::new();
        for (scope, set) in &self.sets {
            let uses = |it: &Frontend| [it.internal, it.external].contains(&Action::To(*scope));
            if self.frontends.iter().any(uses) {
                let (family, map) = (self.identity.family(), Map::members(set_number(*scope)));
                let key = |number: &u32| Bytes::new().protocol(self.identity.protocol).number(*number);
                members.extend(set.iter().filter_map(|it| {
                    let element = Element::new(family, map, key(numbers.get(it)?));
                    Some((element, Value::Data(Bytes::endpoint(*it))))
                }));
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
mod tests;
