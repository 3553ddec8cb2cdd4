//! Turns a state into elements: assigns slots to endpoints, and computes the difference to the previous state.
//!
//! Invariant: a change costs what it touches.
//! An unchanged Service is not visited, and the slot of a removed endpoint goes to a new one or to the last one.

mod slots;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use model::{
    Family, Rejected, ServiceName,
    state::{NodeState, Scope, ServiceState, TargetDiff},
};

use crate::{
    encode::{
        elements::{Changes, Element, Elements, Value},
        schema::{Bytes, Map},
    },
    plan::{
        affinity,
        affinity_numbers::{Numbers, TOO_MANY, free_number, seconds_word},
        compile::{Action, Frontend, PortImage, ServiceImage, compile, set_number},
        endpoint_selector::{DROP, MatchKey, REFUSE, Selector, slot_word},
        rules::FrontendPolicy,
        source_list::{SourceList, SourceLists},
        watch::Watch,
    },
};
use datapath::{AvoidedEndpoints, FrontendAddress};
use slots::{change_set, place};

pub(crate) use slots::Slots;

/// What exists in the kernel and should stay: slots by service port and set, and numbers of session affinity.
#[derive(Clone, Debug, Default)]
pub(crate) struct PreviousSlots {
    pub(crate) slots: HashMap<(FrontendAddress, u32), Slots>,
    pub(crate) numbers: HashMap<FrontendAddress, Numbers>,
    /// The numbers of service ports among them.
    pub(crate) taken: HashSet<(Family, u32)>,
}

/// The desired contents of the tables, apart from the constant part.
///
/// A frontend belongs to one Service, because the state has no conflicts, see [`model::conflicts`].
#[derive(Debug, Default)]
pub(crate) struct Layout {
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
    numbers: HashSet<(Family, u32)>,
    /// The endpoints that packets avoid.
    avoided: AvoidedEndpoints,
    /// The Services of which they avoid others than at the last update.
    reconsidered: BTreeSet<ServiceName>,
}

/// A Service with its slots.
#[derive(Clone, Debug, Default)]
struct PlacedService {
    image: Arc<ServiceImage>,
    /// The slots of each set of each port.
    slots: Vec<Vec<Slots>>,
    /// The numbers of each port with session affinity.
    numbers: HashMap<FrontendAddress, Numbers>,
}

/// The difference that an update makes.
#[derive(Debug, Default)]
pub(crate) struct Update {
    pub(crate) changes: Changes,
    pub(crate) services: Vec<Changed>,
}

/// A Service that is new, changed or gone.
#[derive(Debug)]
pub(crate) struct Changed {
    /// What it was; nothing if it is new.
    pub(crate) before: Arc<ServiceImage>,
    /// What it is; nothing if it is gone.
    pub(crate) after: Arc<ServiceImage>,
}

impl Layout {
    /// Sets the endpoints that packets avoid, for the next update.
    pub(crate) fn set_avoided(&mut self, avoided: &AvoidedEndpoints) {
        if self.avoided != *avoided {
            let before = std::mem::replace(&mut self.avoided, avoided.clone());
            let names = before.keys().chain(avoided.keys());
            let differ = names.filter(|it| before.get(it) != avoided.get(it));
            self.reconsidered.extend(differ.cloned());
        }
    }

    /// Takes the state of the node, and the node's own addresses, and returns how the tables change.
    ///
    /// A process that starts has `previous` slots, which endpoints of ports that were not known take. There the changes, which are
    /// as many as all elements, are left out.
    pub(crate) fn update(
        &mut self,
        state: &NodeState,
        node: &[IpAddr],
        previous: Option<PreviousSlots>,
    ) -> Update {
        let has_changes = previous.is_none();
        let mut previous = previous.unwrap_or_default();
        let before = std::mem::replace(&mut self.state, state.clone());
        let reconsidered = std::mem::take(&mut self.reconsidered);
        let mut changed: Vec<_> = if self.node == node {
            state.diff(&before).collect()
        } else {
            // Which sources may come depends on it: all Services are looked at again.
            self.node = node.to_vec();
            let gone = before.services.keys().filter(|it| !state.services.contains_key(it));
            gone.map(|it| (it, None, None))
                .chain(state.services.iter().map(|(name, it)| (name, None, Some(it))))
                .collect()
        };
        if !reconsidered.is_empty() {
            let is_new: HashSet<_> = changed.iter().map(|(name, ..)| *name).collect();
            let others = reconsidered.iter().filter(|it| !is_new.contains(it));
            changed.extend(others.filter_map(|it| Some((it, None, Some(state.services.get(it)?)))));
        }
        let mut update = Update::default();
        for (name, before, now) in changed {
            let old = self.services.remove(name).unwrap_or_default();
            let is_avoided = reconsidered.contains(name) || self.avoided.contains_key(name);
            let with_endpoints = match (before, now) {
                (Some(before), Some(now)) if !is_avoided && before.service == now.service => {
                    old.with_endpoints(before, now)
                }
                _ => None,
            };
            let new = with_endpoints.unwrap_or_else(|| self.place(name, now, &old, &mut previous));
            self.replace(&old, &new, &mut update.changes);
            // At once: those of all Services would be as many as all elements.
            if !has_changes {
                update.changes = Changes::default();
            }
            update.services.push(Changed { before: old.image, after: Arc::clone(&new.image) });
            if now.is_some() {
                self.services.insert(name.clone(), new);
            }
        }
        update
    }

    /// Compiles a Service, and assigns its slots and numbers.
    fn place(
        &mut self,
        name: &ServiceName,
        now: Option<&Arc<ServiceState>>,
        old: &PlacedService,
        previous: &mut PreviousSlots,
    ) -> PlacedService {
        let none = BTreeSet::new();
        let avoided = self.avoided.get(name).unwrap_or(&none);
        let mut image = now.map(|it| compile(it, &self.node, avoided)).unwrap_or_default();
        let numbers = self.number(old, &mut image, previous);
        let rejected = std::mem::take(&mut image.rejected);
        if rejected.is_empty() {
            self.rejected.remove(name);
        } else {
            self.rejected.insert(name.clone(), rejected);
        }
        let slots = image.ports.iter().map(|it| old.place(it, previous)).collect();
        PlacedService { image: Arc::new(image), slots, numbers }
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
            self.numbers.remove(&(identity.family(), it.service_port));
        }
        let mut all = HashMap::new();
        for port in image.ports.iter_mut().filter(|it| it.affinity > 0) {
            let identity = port.identity;
            let family = identity.family();
            let before = old.numbers.get(&identity).cloned().or_else(|| {
                previous.numbers.remove(&identity).filter(|it| self.numbers.insert((family, it.service_port)))
            });
            let numbers = before.or_else(|| {
                let taken = [&previous.taken, &self.numbers];
                let number = free_number(identity, |it| taken.iter().any(|all| all.contains(&(family, it))))?;
                self.numbers.insert((family, number));
                Some(Numbers::new(number))
            });
            if let Some(mut numbers) = numbers {
                numbers.update(&port.sets.iter().flat_map(|(_, set)| &**set).copied().collect());
                all.insert(identity, numbers);
            } else {
                port.affinity = 0;
                image.rejected.push(Rejected::not_served(identity.to_string(), TOO_MANY));
            }
        }
        all
    }

    /// Adds the difference of one Service to the changes.
    fn replace(&mut self, before: &PlacedService, after: &PlacedService, changes: &mut Changes) {
        let has_same_keys = before.has_same_keys(after);
        if has_same_keys && before.has_same_counts(after) {
            return changes.extend(before.slot_changes(after));
        }
        let acquired: Vec<_> = after.source_lists().iter().map(|it| self.source_lists.acquire(it)).collect();
        for (element, value) in acquired.into_iter().flatten() {
            changes.add(element, value);
        }
        let lists = &self.source_lists;
        changes.extend(Changes::between(&before.frontend_elements(lists), &after.frontend_elements(lists)));
        changes.extend(match has_same_keys {
            true => before.slot_changes(after),
            false => {
                let [before, after] = [before, after].map(|it| it.endpoint_elements(|_| true));
                Changes::between(&before, &after)
            }
        });
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

    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn elements(&self) -> Elements {
        let mut elements = self.other_elements();
        elements.extend(Family::ALL.into_iter().flat_map(|it| self.endpoint_elements(it)));
        elements
    }

    /// The elements of a family that lead to endpoints, which are by far the most: made one Service after the other.
    pub(crate) fn endpoint_elements(&self, family: Family) -> impl Iterator<Item = (Element, Value)> {
        self.services.values().flat_map(move |it| it.endpoint_elements(|it| it == family))
    }

    pub(crate) fn other_elements(&self) -> Elements {
        let mut elements: Elements =
            self.services.values().flat_map(|it| it.frontend_elements(&self.source_lists)).collect();
        elements.extend(self.source_lists.elements());
        elements.extend(self.shared.iter().map(|(it, (value, _))| (it.clone(), value.clone())));
        elements
    }

    pub(crate) fn ports(&self) -> impl Iterator<Item = &PortImage> {
        self.services.values().flat_map(|it| &it.image.ports)
    }

    /// Whether a Service has session affinity.
    pub(crate) fn has_affinity(&self) -> bool {
        Family::ALL.iter().any(|it| self.shared.contains_key(&Watch::Answered.element(*it).0))
    }

    /// Whether packets to a Service are forwarded whole.
    pub(crate) fn is_forwarded(&self, family: Family) -> bool {
        self.shared.contains_key(&Watch::Forwarded.element(family).0)
    }

    pub(crate) fn services(&self) -> usize {
        self.services.len()
    }

    pub(crate) fn rejected(&self) -> Vec<Rejected> {
        self.rejected.values().flatten().cloned().collect()
    }
}

fn key(frontend: &Frontend) -> Bytes {
    let FrontendAddress { address: at, protocol } = frontend.address;
    match by(frontend) {
        MatchKey::Address => Bytes::frontend(frontend.address),
        MatchKey::NodePort => Bytes::new().protocol(protocol).port(at.port()),
    }
}

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
        let slots = |(scope, set): &(Scope, Arc<[SocketAddr]>)| {
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

    /// The Service with the endpoints of another state, of which nothing else differs; `None` if more than the difference decides
    /// what it becomes.
    fn with_endpoints(&self, before: &ServiceState, now: &ServiceState) -> Option<Self> {
        let lists = |it: &ServiceState| (Arc::clone(&it.other_serving), Arc::clone(&it.not_serving));
        // The set of forwarded packets does not follow the scopes.
        let is_forwarded = |it: &ServiceState| !it.forwarded.is_empty();
        if is_forwarded(before)
            || is_forwarded(now)
            || !self.numbers.is_empty()
            || lists(before) != lists(now)
        {
            return None;
        }
        let diff = now.endpoint_diff(before);
        if diff.removed.iter().chain(&diff.added).any(|it| it.local) {
            return None;
        }
        let (mut image, mut slots) = (ServiceImage::clone(&self.image), self.slots.clone());
        let mut scratch = Vec::new();
        for (port, slots) in image.ports.iter_mut().zip(&mut slots) {
            let family = port.identity.family();
            let change =
                |(scope, set): &(Scope, Option<Scope>)| (*set, diff.targets(port.index, family, *scope));
            let changes: Vec<_> = port.scopes.iter().map(change).collect();
            let change_of = |set| changes.iter().find(|(it, _)| *it == Some(set)).map(|(_, change)| change);
            // Scopes whose endpoints differ cannot share a set any more, and one without endpoints would get a set.
            let is_decided = |(set, change): &(Option<Scope>, TargetDiff)| match set {
                Some(set) => change_of(*set) == Some(change),
                None => *change == TargetDiff::default(),
            };
            if !port.is_unique || !changes.iter().all(is_decided) {
                return None;
            }
            for ((scope, set), slots) in port.sets.iter_mut().zip(slots) {
                change_set(set, slots, change_of(*scope)?, &mut scratch)?;
            }
            // Equal sets are stored once.
            let sets = || port.sets.iter().map(|(_, set)| set);
            let is_known = |(n, set): (usize, &Arc<[SocketAddr]>)| sets().take(n).any(|it| it == set);
            let max = Selector::max_count(port.affinity);
            if sets().enumerate().any(is_known) || sets().any(|it| it.is_empty() || it.len() > max) {
                return None;
            }
        }
        Some(Self { image: Arc::new(image), slots, numbers: HashMap::new() })
    }

    /// Whether the same elements lead to the endpoints of another Service, apart from the numbers of their slots.
    fn has_same_keys(&self, other: &Self) -> bool {
        let scopes = |it: &PortImage| it.sets.iter().map(|(scope, _)| *scope).collect::<Vec<_>>();
        let mut ports = self.image.ports.iter().zip(&other.image.ports);
        self.numbers.is_empty()
            && other.numbers.is_empty()
            && self.image.ports.len() == other.image.ports.len()
            && ports
                .all(|(a, b)| (a.identity, &a.frontends, scopes(a)) == (b.identity, &b.frontends, scopes(b)))
    }

    /// Whether the sets have as many endpoints, and all else is the same that decides about elements, apart from their keys.
    fn has_same_counts(&self, other: &Self) -> bool {
        fn of_port(it: &PortImage) -> (u32, bool, Option<&str>) {
            (it.affinity, it.is_forwarded, it.counter.as_deref())
        }
        let counts = |it: &Self| it.slots.iter().flatten().map(|it| it.len()).collect::<Vec<_>>();
        counts(self) == counts(other)
            && self.image.ports.iter().map(of_port).eq(other.image.ports.iter().map(of_port))
            && (&self.image.cluster_ips, &self.image.local) == (&other.image.cluster_ips, &other.image.local)
    }

    /// The difference between endpoints whose elements have the same keys.
    fn slot_changes(&self, after: &Self) -> Changes {
        let mut changes = Changes::default();
        for (port, (before, after)) in self.image.ports.iter().zip(self.slots.iter().zip(&after.slots)) {
            for (set, (before, after)) in before.iter().zip(after).enumerate() {
                let differ =
                    (0..before.len().max(after.len())).filter(|it| before.get(*it) != after.get(*it));
                for slot in differ {
                    for (key, map) in port.endpoint_keys(set, slot, false) {
                        let element = Element::new(port.identity.family(), map, key);
                        let value = |it: &SocketAddr| Value::Data(Bytes::endpoint(*it));
                        changes.delete.extend(before.get(slot).map(|it| (element.clone(), value(it))));
                        changes.add.extend(after.get(slot).map(|it| (element, value(it))));
                    }
                }
            }
        }
        changes
    }

    /// The elements that lead to its endpoints.
    fn endpoint_elements(&self, is_family: impl Fn(Family) -> bool) -> Elements {
        let mut elements = Elements::new();
        let ports = self.image.ports.iter().zip(&self.slots);
        for (port, slots) in ports.filter(|(it, _)| is_family(it.identity.family())) {
            let numbers = self.numbers.get(&port.identity);
            let members = numbers.map(Numbers::members).unwrap_or_default();
            for (set, slots) in slots.iter().enumerate() {
                for (slot, endpoint) in slots.iter().enumerate() {
                    let number = members.get(endpoint);
                    let value =
                        number.map_or_else(|| Bytes::endpoint(*endpoint), |it| Bytes::new().number(*it));
                    for (key, map) in port.endpoint_keys(set, slot, number.is_some()) {
                        let element = Element::new(port.identity.family(), map, key);
                        elements.insert(element, Value::Data(value.clone()));
                    }
                }
            }
        }
        elements
    }

    /// The elements that belong to this Service alone, and do not lead to its endpoints.
    fn frontend_elements(&self, lists: &SourceLists) -> Elements {
        let mut elements = Elements::new();
        for port in &self.image.ports {
            let family = port.identity.family();
            let numbers = self.numbers.get(&port.identity);
            for frontend in &port.frontends {
                let (key, by) = (key(frontend), by(frontend));
                let word = |way| match way {
                    Action::To(scope) => port.selector(scope, frontend).word(),
                    Action::Refuse => REFUSE,
                    Action::Drop => DROP,
                };
                let mut put = |map, number| {
                    let value = Value::Data(Bytes::new().number(number));
                    elements.insert(Element::new(family, map, key.clone()), value);
                };
                put(by.map(Map::Frontends), frontend.policy as u32);
                if let Some(list) = frontend.sources.as_ref().and_then(|it| lists.number(it)) {
                    put(Map::SourceLists, list);
                }
                put(by.map(Map::Internal), word(frontend.internal));
                if frontend.policy.is_local() || frontend.is_forwarded {
                    put(by.map(Map::External), word(frontend.external));
                }
                if frontend.is_forwarded {
                    put(Map::Forwarded, FrontendPolicy::forwarded(frontend.sources.is_some()) as u32);
                }
                if let Some(it) = numbers {
                    put(by.map(Map::ServicePorts), it.service_port);
                }
                if let Some(counter) = port.counter.as_ref().filter(|_| frontend.is_counted()) {
                    let element = Element::new(family, by.map(Map::Counted), key);
                    elements.insert(element, Value::Counter(Bytes::name(counter)));
                }
            }
            if let Some(counter) = &port.counter {
                elements.insert(Element::new(family, Map::Counters, Bytes::name(counter)), Value::None);
            }
            if let Some(it) = numbers {
                let key = Element::new(family, Map::AffinitySeconds, Bytes::new().number(it.service_port));
                let seconds = Bytes::new().number(seconds_word(port.affinity));
                elements.insert(key, Value::Data(seconds));
                elements.extend(port.members(&it.members()));
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
            if port.is_forwarded {
                shared.extend([Watch::Forwarded.element(port.identity.family())]);
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
    /// The keys and maps of the elements that lead to a slot of the set at a position, which has a number with session affinity.
    fn endpoint_keys(&self, set: usize, slot: usize, has_number: bool) -> impl Iterator<Item = (Bytes, Map)> {
        let scope = self.sets.get(set).map(|(scope, _)| *scope);
        self.frontends.iter().filter_map(move |it| {
            let (by, scope) = (by(it), scope.filter(|scope| it.uses(*scope))?);
            let word = slot_word(set_number(scope), u32::try_from(slot).ok()?);
            let map = if has_number { Map::AffinityEndpoints } else { Map::Endpoints };
            Some((key(it).number(word), by.map(map)))
        })
    }

    /// The endpoints that session affinity may keep, in the sets that its frontends use.
    fn members(&self, numbers: &HashMap<SocketAddr, u32>) -> Vec<(Element, Value)> {
        let mut members = Vec::new();
        for (scope, set) in &self.sets {
            if self.frontends.iter().any(|it| it.uses(*scope)) {
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

#[cfg(test)]
mod tests;
