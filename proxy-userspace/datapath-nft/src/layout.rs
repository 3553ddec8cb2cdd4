//! Lays a state out in elements: gives endpoints their slots, and finds what differs from before.
//!
//! The one rule: a change costs what it touches.
//! A Service that is as it was is not looked at again, and an endpoint that goes leaves its slot to one that comes, or to
//! the last one.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    net::SocketAddr,
};

use model::{Family, Rejected, ServiceName, state::NodeState, state::Scope};

use crate::{
    compile::{Frontend, FrontendAddress, PortImage, ServiceImage, Way, compile, set_number},
    elements::{Changes, Element, Elements, Value},
    endpoint_selector::{By, DROP, Pick, REFUSE, SET_SHIFT},
    schema::{Bytes, Map},
};
use datapath::FrontendKind;

/// What the slots of a set hold.
pub(super) type Slots = Vec<SocketAddr>;

/// Where endpoints are, by port and set, according to somebody who knows.
pub(super) type Hints = HashMap<(FrontendAddress, u32), Slots>;

/// Everything that should be in the tables, apart from what is always there.
#[derive(Debug, Default)]
pub(super) struct Layout {
    state: NodeState,
    node: Vec<std::net::IpAddr>,
    services: HashMap<ServiceName, Known>,
    /// Who wants a frontend, and why; the first has it.
    claims: HashMap<FrontendAddress, BTreeSet<(FrontendKind, ServiceName)>>,
    /// The frontends that more than one Service claims.
    contested: BTreeSet<FrontendAddress>,
    /// What of single Services is not served.
    rejected: BTreeMap<ServiceName, Vec<Rejected>>,
    /// How many Services want an element that they share.
    shared: HashMap<Element, usize>,
    /// How many frontends want a pick.
    picks: HashMap<(Family, Pick), usize>,
}

/// A Service that is laid out.
#[derive(Clone, Debug, Default)]
struct Known {
    image: ServiceImage,
    /// The slots of each set of each port.
    slots: Vec<Vec<Slots>>,
    /// Which frontends of each port are its own.
    own: Vec<Vec<bool>>,
}

/// What an update found.
#[derive(Debug, Default)]
pub(super) struct Update {
    /// How the elements change.
    pub(super) changes: Changes,
    /// The picks that are wanted from now on.
    pub(super) new_picks: BTreeSet<(Family, Pick)>,
    /// The picks that nobody wants any more.
    pub(super) old_picks: BTreeSet<(Family, Pick)>,
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
        hints: &mut Hints,
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
        // The frontends that somebody wants, or wants no more, and who had them.
        let mut touched = BTreeMap::new();
        let mut old = HashMap::new();
        for (name, now) in &changed {
            let known = self.services.remove(name).unwrap_or_default();
            for it in frontends(&known.image) {
                if let Some(claims) = self.claims.get_mut(&it.address) {
                    touched.entry(it.address).or_insert_with(|| first(claims).cloned());
                    claims.remove(&(it.claim, name.clone()));
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
                let claims = self.claims.entry(it.address).or_default();
                touched.entry(it.address).or_insert_with(|| first(claims).cloned());
                claims.insert((it.claim, name.clone()));
            }
            let (before, after) = (known.image.clone(), image.clone());
            update.services.push(Changed { before, after });
            if now.is_some() {
                let slots = image.ports.iter().map(|it| known.relay(it, hints)).collect();
                self.services.insert(name.clone(), Known { image, slots, own: Vec::new() });
            }
            old.insert(name.clone(), known);
        }
        // Whoever else had what somebody wants, or has what somebody had.
        for (address, former) in touched {
            let Some(claims) = self.claims.get(&address) else { continue };
            if claims.len() > 1 {
                self.contested.insert(address);
            } else {
                self.contested.remove(&address);
            }
            for name in former.iter().chain(first(claims)) {
                if !old.contains_key(name)
                    && let Some(known) = self.services.get(name)
                {
                    old.insert(name.clone(), known.clone());
                }
            }
            if claims.is_empty() {
                self.claims.remove(&address);
            }
        }
        for (name, before) in old {
            let mut after = self.services.remove(&name);
            if let Some(after) = &mut after {
                after.own = self.owned(&name, &after.image);
            }
            self.replace(&before, after.as_ref(), &mut update);
            if let Some(after) = after {
                self.services.insert(name, after);
            }
        }
        update
    }

    /// Which frontends of a Service's ports are its own. Without the one that tells it from others, a port has none.
    fn owned(&self, name: &ServiceName, image: &ServiceImage) -> Vec<Vec<bool>> {
        let is_own = |address: &FrontendAddress| {
            self.claims.get(address).and_then(first).is_some_and(|owner| owner == name)
        };
        let own = |port: &PortImage| {
            let all = is_own(&port.identity);
            port.frontends.iter().map(|it| all && is_own(&it.address)).collect()
        };
        image.ports.iter().map(own).collect()
    }

    /// Notes how the elements of one Service change.
    fn replace(&mut self, before: &Known, after: Option<&Known>, update: &mut Update) {
        let old = before.elements();
        let new = after.map(Known::elements).unwrap_or_default();
        let own = Changes::between(&old, &new);
        for (element, value) in own.delete {
            update.changes.delete(element, value);
        }
        for (element, value) in own.add {
            update.changes.add(element, value);
        }
        let nothing = Known::default();
        let after = after.unwrap_or(&nothing);
        // What comes is counted before what goes, so that what stays is not touched.
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
        for pick in after.picks() {
            let count = self.picks.entry(pick).or_default();
            *count += 1;
            if *count == 1 && !update.old_picks.remove(&pick) {
                update.new_picks.insert(pick);
            }
        }
        for pick in before.picks() {
            if let Some(count) = self.picks.get_mut(&pick) {
                *count -= 1;
                if *count == 0 {
                    self.picks.remove(&pick);
                    if !update.new_picks.remove(&pick) {
                        update.old_picks.insert(pick);
                    }
                }
            }
        }
    }

    /// Every element.
    pub(super) fn elements(&self) -> Elements {
        let mut elements: Elements = self.services.values().flat_map(Known::elements).collect();
        elements.extend(self.shared.keys().map(|it| (it.clone(), Value::None)));
        elements
    }

    /// The Service that answers at an address, and the port of it that does.
    pub(super) fn owner(&self, address: &FrontendAddress) -> Option<(&ServiceName, &PortImage)> {
        let name = first(self.claims.get(address)?)?;
        let Known { image, own, .. } = self.services.get(name)?;
        let mut ports = image.ports.iter().zip(own);
        let is_it = |port: &PortImage, own: &[bool]| {
            port.frontends.iter().zip(own).any(|(it, own)| *own && it.address == *address)
        };
        ports.find_map(|(port, own)| is_it(port, own).then_some((name, port)))
    }

    /// Every pick.
    pub(super) fn picks(&self) -> BTreeSet<(Family, Pick)> {
        self.picks.keys().copied().collect()
    }

    /// How many Services there are.
    pub(super) fn services(&self) -> usize {
        self.services.len()
    }

    /// What is not served, and why.
    pub(super) fn rejected(&self) -> Vec<Rejected> {
        let own = self.rejected.values().flatten().cloned();
        let contested = self.contested.iter().filter_map(|address| self.claims.get_key_value(address));
        let lost = contested.filter_map(|(address, claims)| {
            let mut all = claims.iter();
            let (claim, winner) = all.next()?;
            Some(all.map(move |(lost, loser)| Rejected {
                item: format!("{loser} {lost} {address}"),
                reason: format!("it is {winner}'s {claim} already; give one of them another"),
            }))
        });
        own.chain(lost.flatten()).collect()
    }
}

/// Who has a frontend, of those who want it.
fn first(claims: &BTreeSet<(FrontendKind, ServiceName)>) -> Option<&ServiceName> {
    claims.first().map(|(_, name)| name)
}

fn frontends(image: &ServiceImage) -> impl Iterator<Item = &Frontend> {
    image.ports.iter().flat_map(|it| &it.frontends)
}

/// The key that a frontend is looked up by.
fn key(frontend: &Frontend) -> Bytes {
    let FrontendAddress { address: at, protocol } = frontend.address;
    match by(frontend) {
        By::Address => address(frontend.address),
        By::NodePort => Bytes::new().protocol(protocol).port(at.port()),
    }
}

/// An address with its protocol and port.
fn address(FrontendAddress { address, protocol }: FrontendAddress) -> Bytes {
    Bytes::new().address(address.ip()).protocol(protocol).port(address.port())
}

/// Which frontends are looked up without their address.
fn by(frontend: &Frontend) -> By {
    if frontend.claim == FrontendKind::NodePort { By::NodePort } else { By::Address }
}

impl Known {
    /// Gives the endpoints of a port their slots: those they had, where that is possible.
    fn relay(&self, port: &PortImage, hints: &mut Hints) -> Vec<Slots> {
        let before = self.image.ports.iter().position(|it| it.identity == port.identity);
        let old = |scope: Scope| {
            let index = before?;
            let set = self.image.ports[index].sets.iter().position(|(it, _)| *it == scope)?;
            self.slots.get(index)?.get(set).cloned()
        };
        let slots = |(scope, set): &(Scope, Vec<SocketAddr>)| {
            let old = old(*scope).or_else(|| hints.remove(&(port.identity, set_number(*scope))));
            relay(&old.unwrap_or_default(), set)
        };
        port.sets.iter().map(slots).collect()
    }

    /// Its ports, each with its slots and with which of its frontends are its own; those that have one.
    fn ports(&self) -> impl Iterator<Item = (&PortImage, &[Slots], &[bool])> {
        let all = self.image.ports.iter().zip(&self.slots).zip(&self.own);
        all.map(|((port, slots), own)| (port, &**slots, &**own)).filter(|(_, _, own)| own.contains(&true))
    }

    /// The elements that no other Service has.
    fn elements(&self) -> Elements {
        let mut elements = Elements::new();
        for (port, slots, own) in self.ports() {
            let family = port.identity.family();
            for (frontend, _) in port.frontends.iter().zip(own).filter(|(_, own)| **own) {
                let (key, by) = (key(frontend), by(frontend));
                for ((scope, _), slots) in port.sets.iter().zip(slots) {
                    if ![frontend.inside, frontend.outside].contains(&Way::To(*scope)) {
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
                    Way::To(scope) => port.pick(scope, frontend).word(),
                    Way::Refuse => REFUSE,
                    Way::Drop => DROP,
                };
                let mut lead = |map, number| {
                    let value = Value::Data(Bytes::new().number(number));
                    elements.insert(Element::new(family, map, key.clone()), value);
                };
                lead(by.frontends(), frontend.behaviour.word());
                lead(by.inside(), word(frontend.inside));
                if frontend.behaviour.is_local() {
                    lead(by.outside(), word(frontend.outside));
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

    /// The elements that other Services may have, too.
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

    /// The picks that its frontends want.
    fn picks(&self) -> BTreeSet<(Family, Pick)> {
        let mut picks = BTreeSet::new();
        for (port, _, own) in self.ports() {
            for (frontend, _) in port.frontends.iter().zip(own).filter(|(_, own)| **own) {
                for way in [frontend.inside, frontend.outside] {
                    if let Way::To(scope) = way {
                        picks.insert((port.identity.family(), port.pick(scope, frontend)));
                    }
                }
            }
        }
        picks
    }
}

impl PortImage {
    /// The endpoints that clients may keep, in the sets that frontends of its own lead to.
    fn members(&self, own: &[bool]) -> Vec<Element> {
        let mut members = Vec::new();
        for (scope, set) in self.sets.iter().filter(|_| self.affinity > 0) {
            let leads = |it: &Frontend| [it.inside, it.outside].contains(&Way::To(*scope));
            if self.frontends.iter().zip(own).any(|(it, own)| *own && leads(it)) {
                let (family, map) = (self.identity.family(), Map::members(set_number(*scope)));
                let key = |it: &SocketAddr| address(self.identity).address(it.ip()).port(it.port());
                members.extend(set.iter().map(|it| Element::new(family, map, key(it))));
            }
        }
        members
    }

    fn pick(&self, scope: Scope, frontend: &Frontend) -> Pick {
        let set = self.sets.iter().find(|(it, _)| *it == scope).map_or(0, |(_, set)| set.len());
        // `compile` has seen to it that it is not more than fits.
        let count = u32::try_from(set).unwrap_or(u32::MAX);
        Pick { by: by(frontend), set: set_number(scope), count, affinity: self.affinity }
    }
}

/// Who stays keeps its slot; who comes, or is beyond the end now, takes one that is free.
fn relay(old: &[SocketAddr], new: &[SocketAddr]) -> Slots {
    let wanted: HashSet<_> = new.iter().collect();
    let mut placed = HashSet::new();
    let mut stays = |it: &SocketAddr| (wanted.contains(it) && placed.insert(*it)).then_some(*it);
    let mut slots: Vec<_> = old.iter().take(new.len()).map(&mut stays).collect();
    slots.resize(new.len(), None);
    let mut others = new.iter().filter(|it| !placed.contains(it)).copied();
    slots.into_iter().filter_map(|it| it.or_else(|| others.next())).collect()
}

#[cfg(test)]
mod at_scale;
#[cfg(test)]
mod tests;
