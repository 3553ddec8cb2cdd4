//! Lays out the frontends whose packets from outside are forwarded: their rows, and the numbers of nodes.
//!
//! Invariant: a row that gets another owner has the one before as its second, until its next change.
//! A port whose packets are to be forwarded is a frontend here from the beginning, so that this node takes what others forward;
//! while nodes with its endpoints have never answered, its only row has no owner, and this node translates.

mod nodes;
mod rows;
mod stage;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    mem,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use model::{
    Family, Protocol, ServiceName,
    state::{ForwardedPort, NodeShare, NodeState, Service, ServicePort, ServiceState},
};
use proxy_common::{
    counters::ForwardCounters,
    forward::{BY_CLIENT, Forward, NO_NODE, NodeNumber, Row},
    net::{Be16, V6},
    tables::{FrontendKey6, TCP, UDP},
};

pub use self::stage::PacketPath;
use self::{
    nodes::ForwardNodes,
    rows::{RowSets, RowsId},
    stage::Stage,
};
use super::ranges::Range;
use crate::tables::{
    compile::port_id,
    counter_alloc::{CounterAllocator, CounterOwner, ForwardPart},
    map_updates::MapUpdates,
    peers::{PeerState, PeerStates},
    store::Table,
};

/// The rows that an earlier process has left, with the addresses of nodes.
#[derive(Debug, Default)]
pub(crate) struct PreviousRows {
    /// The frontends.
    pub(crate) frontends: HashMap<FrontendKey6, Forward>,
    /// Owner and second of each row, by the position of the first; an unspecified address for none.
    pub(crate) rows: HashMap<u32, Vec<[IpAddr; 2]>>,
    /// The number of each node's addresses.
    pub(crate) numbers: HashMap<IpAddr, NodeNumber>,
}

const FAMILIES: [Family; 2] = [Family::V4, Family::V6];

/// What is forwarded.
#[derive(Debug, Default)]
pub(crate) struct Forwarding {
    /// The state that was placed.
    state: NodeState,
    packet_path: PacketPath,
    /// Services to be placed again, though they are the same.
    outdated: BTreeSet<ServiceName>,
    previous: PreviousRows,
    /// What became of those rows, by the position of the first.
    restored: HashMap<u32, RowsId>,
    nodes: ForwardNodes,
    /// What is placed of each Service with ports that are to be forwarded: maybe nothing yet.
    services: HashMap<ServiceName, Vec<PlacedPort>>,
    frontends: HashMap<FrontendKey6, Forward>,
    rows: RowSets,
}

/// What Services had before a change.
#[derive(Default)]
struct Left {
    ports: Vec<PlacedPort>,
    frontends: Vec<FrontendKey6>,
    /// The frontends that they have now: one may move from a Service to another.
    taken: HashSet<FrontendKey6>,
}

/// A port of a Service in one family.
#[derive(Debug)]
struct PlacedPort {
    family: Family,
    /// The nodes with endpoints.
    nodes: Arc<[NodeShare]>,
    frontends: Vec<FrontendKey6>,
    rows: RowsId,
    stage: Stage,
    by_client: bool,
    counters: ForwardCounters,
    /// Who owns them.
    port_id: u64,
}

impl Forwarding {
    /// Sets the name of this node, before the first [`Forwarding::update`].
    pub(super) fn set_own(&mut self, name: &str) {
        self.nodes.set_own(name.into());
    }

    /// Takes over the seconds of the rows of an earlier process, at the first [`Forwarding::update`].
    pub(crate) fn restore(&mut self, mut previous: PreviousRows) {
        self.nodes.restore(mem::take(&mut previous.numbers));
        self.previous = previous;
    }

    /// The families of what an earlier process has left.
    pub(crate) fn previous_families(&self) -> Vec<Family> {
        let family = |it: &FrontendKey6| Family::of(IpAddr::from(it.address).to_canonical());
        let found: HashSet<_> = self.previous.frontends.keys().map(family).collect();
        FAMILIES.into_iter().filter(|it| found.contains(it)).collect()
    }

    /// Sets what the packet path has, for the next [`Forwarding::update`]. Returns whether that makes a difference.
    pub(crate) fn set_packet_path(&mut self, now: PacketPath) -> bool {
        let (is_first, is_different) = match (&self.packet_path, &now) {
            (PacketPath::Has { .. }, PacketPath::Has { state, .. }) => {
                let mut changed = state.diff(&self.state);
                let has_changed = changed.any(|(_, before, now)| has_ports(before) || has_ports(now));
                (false, has_changed || self.is_used() && !state.nodes.ptr_eq(&self.state.nodes))
            }
            _ => (true, !self.services.is_empty()),
        };
        if is_first {
            self.outdated.extend(self.services.keys().cloned());
        }
        self.packet_path = now;
        is_different
    }

    /// The TCP frontends whose forwarding has begun while this node may know connections that it has translated.
    pub(crate) fn begun(&self) -> impl Iterator<Item = SocketAddr> {
        let ports = self.services.values().flatten().filter(|it| it.stage == Stage::Begun);
        ports.flat_map(PlacedPort::addresses)
    }

    /// This node knows no translated connections of these frontends any more. Returns whether that makes a difference to the next
    /// [`Forwarding::update`].
    pub(crate) fn set_settled(&mut self, frontends: &HashSet<SocketAddr>) -> bool {
        for (name, ports) in &mut self.services {
            let begun = ports.iter_mut().filter(|it| it.stage == Stage::Begun);
            for it in begun.filter(|it| it.addresses().all(|it| frontends.contains(&it))) {
                it.stage = Stage::Forwarded;
                self.outdated.insert(name.clone());
            }
        }
        !self.outdated.is_empty()
    }

    /// Sets which nodes answer probes, for the next [`Forwarding::update`]. If it is never called, nodes are taken to answer.
    pub(crate) fn set_peers(&mut self, states: PeerStates) {
        self.nodes.set_peers(states);
    }

    /// Whether [`Forwarding::take_peers`] returns something.
    pub(crate) fn has_new_peers(&self) -> bool {
        self.nodes.has_new_peers()
    }

    /// This node's addresses, and those of the nodes that packets are forwarded to, if they have changed since the last call.
    pub(crate) fn take_peers(&mut self) -> Option<(BTreeSet<IpAddr>, BTreeSet<IpAddr>)> {
        self.nodes.take_peers()
    }

    /// Whether anything is to be forwarded.
    pub(super) fn is_used(&self) -> bool {
        !self.frontends.is_empty()
    }

    /// The addresses of the frontends.
    pub(super) fn frontends(&self) -> impl Iterator<Item = IpAddr> {
        self.frontends.keys().map(|it| it.address.into())
    }

    /// Every entry of one of its tables.
    pub(super) fn full_table(&self, table: Table, updates: &mut MapUpdates) {
        match table {
            Table::Forwards => self.frontends.iter().for_each(|(key, it)| updates.set(table, key, Some(it))),
            Table::ForwardRows => self.rows.full_table(updates),
            Table::ForwardNodes => {
                let entries = self.nodes.addresses().iter().map(|(number, it)| (u32::from(*number), it));
                entries.for_each(|(number, it)| updates.set(table, &number, Some(it)));
            }
            Table::ForwardNumbers => {
                let entries = self.nodes.numbers();
                entries.iter().for_each(|(address, it)| updates.set(table, address, Some(it)));
            }
            _ => {}
        }
    }

    /// How many entries one of its tables has.
    pub(super) fn entries(&self, table: Table) -> u32 {
        let entries = match table {
            Table::Forwards => self.frontends.len(),
            Table::ForwardRows => self.rows.len(),
            Table::ForwardNodes => self.nodes.addresses().len(),
            Table::ForwardNumbers => self.nodes.numbers().len(),
            _ => 0,
        };
        u32::try_from(entries).unwrap_or(u32::MAX)
    }

    /// The capacity that one of its tables needs.
    pub(super) fn required_capacity(&self, table: Table) -> u32 {
        match table {
            Table::ForwardRows => self.rows.end(),
            Table::ForwardNodes => {
                self.nodes.addresses().last_key_value().map_or(0, |(it, _)| u32::from(*it) + 1)
            }
            _ => self.entries(table),
        }
    }

    /// Replaces the state by the one that the packet path has, or by `newest` as long as it has none.
    pub(super) fn update(
        &mut self,
        newest: &NodeState,
        counters: &mut CounterAllocator,
        updates: &mut MapUpdates,
    ) {
        let state = match &self.packet_path {
            PacketPath::Has { state, .. } => state.clone(),
            PacketPath::Off | PacketPath::Starting => newest.clone(),
        };
        let before = mem::replace(&mut self.state, state.clone());
        let has_left = !self.previous.frontends.is_empty();
        let changed = state.diff(&before).filter(|(name, before, now)| {
            has_ports(*before) || has_ports(*now) || has_left || self.services.contains_key(*name)
        });
        let mut changed: BTreeMap<_, _> = changed.map(|(name, _, now)| (name, now)).collect();
        if self.services.is_empty() && changed.is_empty() {
            return;
        }
        if self.nodes.set_infos(&state.nodes) {
            let all = state.services.iter().map(|(name, it)| (name, Some(it)));
            changed.extend(all.filter(|(_, it)| has_ports(*it)));
        }
        let mut outdated = mem::take(&mut self.outdated);
        let peers = self.nodes.take_changed();
        if !peers.is_empty() {
            let concerned = self.services.iter().filter(|(_, ports)| ports.iter().any(|it| it.is_on(&peers)));
            outdated.extend(concerned.map(|(name, _)| name.clone()));
        }
        let outdated = outdated.iter().filter_map(|it| state.services.get(it));
        changed.extend(outdated.map(|it| (&it.service.name, Some(it))));
        if changed.is_empty() {
            return;
        }
        let mut left = Left::default();
        for (name, now) in changed {
            self.replace(name, now, &mut left, counters, updates);
        }
        self.give_up(left, counters, updates);
        self.nodes.write(!self.frontends.is_empty(), updates);
        self.previous = PreviousRows::default();
        for (_, id) in self.restored.drain() {
            self.rows.remove_restored(id);
        }
    }

    /// Replaces the ports of a Service.
    fn replace(
        &mut self,
        name: &ServiceName,
        now: Option<&Arc<ServiceState>>,
        left: &mut Left,
        counters: &mut CounterAllocator,
        updates: &mut MapUpdates,
    ) {
        let old = self.services.remove(name).unwrap_or_default();
        left.frontends.extend(old.iter().flat_map(|it| it.frontends.iter().copied()));
        let Some(state) = now else {
            left.ports.extend(old);
            return;
        };
        let placed = state.forwarded.iter().map(|it| self.place(state, it, &old, counters, updates));
        let mut new: Vec<_> = placed.collect::<Vec<_>>().into_iter().flatten().collect();
        for port in old {
            let is_replaced = new.iter().any(|it| it.id() == port.id());
            match if is_replaced { Err(port) } else { self.ended(state, port) } {
                Ok(port) => new.push(port),
                Err(port) => left.ports.push(port),
            }
        }
        let ended = self.restore_ended(state, &new, counters, updates);
        new.extend(ended);
        new.iter().for_each(|it| self.write(it, updates));
        left.taken.extend(new.iter().flat_map(|it| it.frontends.iter().copied()));
        if has_ports(now) || !new.is_empty() {
            self.services.insert(name.clone(), new);
        }
    }

    /// Gives up what no port has any more.
    fn give_up(&mut self, left: Left, counters: &mut CounterAllocator, updates: &mut MapUpdates) {
        for key in left.frontends.iter().filter(|it| !left.taken.contains(it)) {
            if self.frontends.remove(key).is_some() {
                updates.set(Table::Forwards, key, None::<&Forward>);
            }
        }
        for port in left.ports {
            self.nodes.remove_targets(&port.nodes, port.family);
            for part in [ForwardPart::Arrived, ForwardPart::Forwarded] {
                counters.release(CounterOwner::forwarded(port.port_id, part));
            }
            self.rows.release(port.rows);
        }
    }

    /// The rows that an earlier process has left for a frontend, and how far its forwarding was.
    fn restored(&mut self, frontend: &FrontendKey6) -> Option<(RowsId, Stage)> {
        let Forward { first, flags, .. } = *self.previous.frontends.get(frontend)?;
        let id = self.restored_rows(first)?;
        let has_owners = self.rows.owners(id).is_some_and(|it| !it.is_empty());
        Some((id, Stage::of(flags, has_owners)))
    }

    /// The rows that began at a position.
    fn restored_rows(&mut self, first: u32) -> Option<RowsId> {
        if let Some(id) = self.restored.get(&first) {
            return Some(*id);
        }
        let previous = self.previous.rows.remove(&first)?;
        let names = self.nodes.names();
        let mut number = |it: &IpAddr| names.get(it).map_or(NO_NODE, |name| self.nodes.number(name));
        let rows = previous.iter().map(|[owner, second]| Row::new(number(owner), number(second))).collect();
        let id = self.rows.add_restored(rows);
        self.restored.insert(first, id);
        Some(id)
    }

    /// Places a port; `None` if it has no frontend, or this node no address to forward from.
    fn place(
        &mut self,
        state: &ServiceState,
        port: &ForwardedPort,
        old: &[PlacedPort],
        counters: &mut CounterAllocator,
        updates: &mut MapUpdates,
    ) -> Option<PlacedPort> {
        let service = &state.service;
        let it = service.ports.get(usize::from(port.index))?;
        let frontends = frontends(service, it, port.family);
        if frontends.is_empty() || port.nodes.is_empty() || !self.nodes.can_send(port.family) {
            return None;
        }
        let id = (port_id(&service.name, &it.name, it.protocol), port.family);
        let before = old.iter().find(|it| it.id() == id).map(|it| (it.rows, it.stage));
        let before = before.or_else(|| frontends.iter().find_map(|it| self.restored(it)));
        let (before, stage) = before.unzip();
        let serving = self.serving(port, before);
        let before = before.filter(|_| !serving.is_empty());
        let stage = match stage.unwrap_or(Stage::Translated) {
            _ if serving.is_empty() => Stage::Translated,
            stage => stage.forwarded(self.can_keep(it.protocol, port.family)),
        };
        self.nodes.add_targets(&port.nodes, port.family);
        Some(PlacedPort {
            family: port.family,
            nodes: Arc::clone(&port.nodes),
            frontends,
            rows: self.rows.acquire(before, &serving, &mut self.nodes, updates),
            stage,
            by_client: service.affinity.is_some(),
            counters: acquire_counters(counters, id.0),
            port_id: id.0,
        })
    }

    /// Whether connections to a port go on the way they began when forwarding begins or ends.
    fn can_keep(&self, protocol: Protocol, family: Family) -> bool {
        protocol == Protocol::Tcp && self.packet_path.knows_connections(family) && self.nodes.can_send(family)
    }

    /// A port that is forwarded no longer, but for its connections; the port itself if none of its frontends is left.
    fn ended(&mut self, state: &ServiceState, port: PlacedPort) -> Result<PlacedPort, PlacedPort> {
        let service = &state.service;
        let is_it = |it: &&ServicePort| port_id(&service.name, &it.name, it.protocol) == port.port_id;
        let Some(it) = service.ports.iter().find(is_it) else { return Err(port) };
        let mut left = frontends(service, it, port.family);
        left.retain(|it| port.frontends.contains(it));
        if left.is_empty() || port.stage == Stage::Translated || !self.can_keep(it.protocol, port.family) {
            return Err(port);
        }
        // Nobody needs to answer for rows that do not change any more.
        self.nodes.remove_targets(&port.nodes, port.family);
        Ok(PlacedPort { nodes: [].into(), frontends: left, stage: Stage::Ended, ..port })
    }

    /// The ports, except those that are placed, that an earlier process forwarded.
    fn restore_ended(
        &mut self,
        state: &ServiceState,
        placed: &[PlacedPort],
        counters: &mut CounterAllocator,
        updates: &mut MapUpdates,
    ) -> Vec<PlacedPort> {
        let mut ended = Vec::new();
        if self.previous.frontends.is_empty() {
            return ended;
        }
        let service = &state.service;
        for (it, family) in service.ports.iter().flat_map(|it| FAMILIES.map(|family| (it, family))) {
            let id = (port_id(&service.name, &it.name, it.protocol), family);
            let mut frontends = frontends(service, it, family);
            frontends.retain(|it| self.previous.frontends.contains_key(it));
            let is_placed = placed.iter().any(|it| it.id() == id);
            if is_placed || frontends.is_empty() || !self.can_keep(it.protocol, family) {
                continue;
            }
            let Some((rows, stage)) = self.restored(&frontends[0]) else { continue };
            if stage != Stage::Translated {
                self.rows.keep_restored(rows, updates);
                ended.push(PlacedPort {
                    family,
                    nodes: [].into(),
                    frontends,
                    rows,
                    stage: Stage::Ended,
                    by_client: service.affinity.is_some(),
                    counters: acquire_counters(counters, id.0),
                    port_id: id.0,
                });
            }
        }
        ended
    }

    /// The nodes that get rows; none if the packets are translated. Forwarding begins when all nodes have answered once, and does
    /// not end because one does not: then others serve.
    fn serving(&self, port: &ForwardedPort, before: Option<RowsId>) -> Arc<[NodeShare]> {
        let state = |it: &NodeShare| self.nodes.state(&it.node, port.family);
        let had = before.and_then(|it| self.rows.owners(it)).filter(|it| !it.is_empty());
        let has_answered = |it: &NodeShare| matches!(state(it), PeerState::Answers | PeerState::Silent);
        let is_starting = matches!(self.packet_path, PacketPath::Starting);
        if had.is_none() && (is_starting || !port.nodes.iter().all(has_answered)) {
            return [].into();
        }
        let had_rows = |it: &NodeShare| {
            self.nodes.known_number(&it.node).is_some_and(|it| had.is_some_and(|had| had.contains(&it)))
        };
        let serves = |it: &NodeShare| match state(it) {
            PeerState::Answers => true,
            PeerState::Untried => had_rows(it),
            PeerState::Silent | PeerState::Mute => false,
        };
        let those = |is_wanted: &dyn Fn(&NodeShare) -> bool| -> Arc<[NodeShare]> {
            port.nodes.iter().filter(|it| is_wanted(it)).cloned().collect()
        };
        if port.nodes.iter().all(serves) {
            return Arc::clone(&port.nodes);
        }
        let serving = those(&serves);
        if serving.is_empty() { those(&|it| state(it) != PeerState::Mute) } else { serving }
    }

    /// Writes the frontends of a port that differ.
    fn write(&mut self, port: &PlacedPort, updates: &mut MapUpdates) {
        let Some(Range { first, size }) = self.rows.range(port.rows) else { return };
        let flags = port.stage.flags() | if port.by_client { BY_CLIENT } else { 0 };
        let forward = Forward { first, mask: size - 1, flags, counters: port.counters };
        for key in &port.frontends {
            if self.frontends.insert(*key, forward) != Some(forward) {
                updates.set(Table::Forwards, key, Some(&forward));
            }
        }
    }
}

impl PlacedPort {
    /// What it is known by.
    fn id(&self) -> (u64, Family) {
        (self.port_id, self.family)
    }

    /// The addresses of its frontends.
    fn addresses(&self) -> impl Iterator<Item = SocketAddr> {
        let address =
            |it: &FrontendKey6| SocketAddr::new(IpAddr::from(it.address).to_canonical(), it.port.get());
        self.frontends.iter().map(address)
    }

    /// Whether one of these nodes has endpoints of it.
    fn is_on(&self, nodes: &BTreeSet<(Arc<str>, Family)>) -> bool {
        let has = |name: &Arc<str>| self.nodes.binary_search_by(|it| it.node.cmp(name)).is_ok();
        nodes.iter().any(|(name, family)| *family == self.family && has(name))
    }
}

fn has_ports(state: Option<&Arc<ServiceState>>) -> bool {
    state.is_some_and(|it| !it.forwarded.is_empty())
}

fn acquire_counters(counters: &mut CounterAllocator, port_id: u64) -> ForwardCounters {
    let mut counter = |part| counters.acquire_port(CounterOwner::forwarded(port_id, part));
    ForwardCounters { arrived: counter(ForwardPart::Arrived), forwarded: counter(ForwardPart::Forwarded) }
}

/// The frontends of a port in a family, in ascending order; none if its protocol is not forwarded.
fn frontends(service: &Service, port: &ServicePort, family: Family) -> Vec<FrontendKey6> {
    let protocol = match port.protocol {
        Protocol::Tcp => TCP,
        Protocol::Udp => UDP,
        Protocol::Sctp => return Vec::new(),
    };
    let ips = service.load_balancer_ips.iter().chain(&service.external_ips);
    let ips = ips.filter(|ip| Family::of(**ip) == family && !port.conflicting_addresses.contains(ip));
    let port = Be16::new(port.port.get());
    let key = |ip: &IpAddr| FrontendKey6 { address: V6::from(*ip), port, protocol, zero: 0 };
    ips.map(key).collect::<BTreeSet<_>>().into_iter().collect()
}

#[cfg(test)]
mod tests;
