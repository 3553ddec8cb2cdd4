//! Lays out the frontends whose packets from outside are forwarded: their rows, and the numbers of nodes.
//!
//! Invariant: a row that gets another owner has the one before as its second, until its next change.
//! A port whose packets are to be forwarded is a frontend here from the beginning, so that this node takes what others forward;
//! while nodes with its endpoints have never answered, its only row has no owner, and this node translates.

mod nodes;
mod rows;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    mem,
    net::IpAddr,
    sync::Arc,
};

use model::{
    Family, Protocol, ServiceName,
    state::{ForwardedPort, NodeShare, NodeState, Service, ServicePort, ServiceState},
};
use proxy_common::{
    counters::ForwardCounters,
    forward::{Forward, NO_NODE, NodeNumber, Row},
    net::{Be16, V6},
    tables::{FrontendKey6, TCP, UDP},
};

use self::{
    nodes::ForwardNodes,
    rows::{RowSets, RowsId},
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
    /// The first position of each frontend's rows.
    pub(crate) frontends: HashMap<FrontendKey6, u32>,
    /// Owner and second of each row, by the position of the first; an unspecified address for none.
    pub(crate) rows: HashMap<u32, Vec<[IpAddr; 2]>>,
    /// The number of each node's addresses.
    pub(crate) numbers: HashMap<IpAddr, NodeNumber>,
}

/// What is forwarded.
#[derive(Debug, Default)]
pub(crate) struct Forwarding {
    previous: PreviousRows,
    /// What became of those rows, by the position of the first.
    restored: HashMap<u32, RowsId>,
    nodes: ForwardNodes,
    /// What is placed of each Service with ports that are to be forwarded: maybe nothing yet.
    services: HashMap<ServiceName, Vec<PlacedPort>>,
    frontends: HashMap<FrontendKey6, Forward>,
    rows: RowSets,
}

/// A port of a Service in one family.
#[derive(Debug)]
struct PlacedPort {
    /// Its position in the Service.
    index: u16,
    family: Family,
    /// The nodes with endpoints.
    nodes: Arc<[NodeShare]>,
    frontends: Vec<FrontendKey6>,
    rows: RowsId,
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

    /// Sets which nodes answer probes, for the next [`Forwarding::update`]. If it is never called, nodes are taken to answer.
    pub(crate) fn set_peers(&mut self, states: PeerStates) {
        self.nodes.set_peers(states);
    }

    /// Whether [`Forwarding::take_peers`] returns something.
    pub(super) fn has_new_peers(&self) -> bool {
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

    /// Replaces the state `before` by another one.
    pub(super) fn update(
        &mut self,
        before: &NodeState,
        state: &NodeState,
        counters: &mut CounterAllocator,
        updates: &mut MapUpdates,
    ) {
        let has_ports = |it: &Option<&Arc<ServiceState>>| it.is_some_and(|it| !it.forwarded.is_empty());
        let changed = state.diff(before).filter(|(_, before, now)| has_ports(before) || has_ports(now));
        let mut changed: BTreeMap<_, _> = changed.map(|(name, _, now)| (name, now)).collect();
        if self.services.is_empty() && changed.is_empty() {
            return;
        }
        if self.nodes.set_infos(&state.nodes) {
            let all = state.services.iter().map(|(name, it)| (name, Some(it)));
            changed.extend(all.filter(|(_, it)| has_ports(it)));
        }
        let peers = self.nodes.take_changed();
        if !peers.is_empty() {
            let concerned = self.services.iter().filter(|(_, ports)| ports.iter().any(|it| it.is_on(&peers)));
            let states = concerned.filter_map(|(name, _)| state.services.get(name));
            changed.extend(states.map(|it| (&it.service.name, Some(it))));
        }
        if changed.is_empty() {
            return;
        }
        // A frontend may move from a Service to another.
        let mut given_up = Vec::new();
        let mut taken = HashSet::new();
        for (name, now) in changed {
            let old = self.services.remove(name).unwrap_or_default();
            let ports = now.into_iter().flat_map(|state| state.forwarded.iter().map(move |it| (state, it)));
            let new: Vec<_> =
                ports.filter_map(|(state, it)| self.place(state, it, &old, counters, updates)).collect();
            new.iter().for_each(|it| self.write(it, updates));
            taken.extend(new.iter().flat_map(|it| it.frontends.iter().copied()));
            if has_ports(&now) {
                self.services.insert(name.clone(), new);
            }
            given_up.extend(old);
        }
        for old in given_up {
            for key in old.frontends.iter().filter(|it| !taken.contains(it)) {
                if self.frontends.remove(key).is_some() {
                    updates.set(Table::Forwards, key, None::<&Forward>);
                }
            }
            self.nodes.remove_targets(&old.nodes, old.family);
            for part in [ForwardPart::Arrived, ForwardPart::Forwarded] {
                counters.release(CounterOwner::forwarded(old.port_id, part));
            }
            self.rows.release(old.rows);
        }
        self.nodes.write(!self.frontends.is_empty(), updates);
        self.previous = PreviousRows::default();
        for (_, id) in self.restored.drain() {
            self.rows.remove_restored(id);
        }
    }

    /// The rows that an earlier process has left for a frontend.
    fn restored(&mut self, frontend: &FrontendKey6) -> Option<RowsId> {
        let first = *self.previous.frontends.get(frontend)?;
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
        let before =
            old.iter().find(|it| (it.index, it.family) == (port.index, port.family)).map(|it| it.rows);
        let before = before.or_else(|| frontends.iter().find_map(|it| self.restored(it)));
        let serving = self.serving(port, before);
        let before = before.filter(|_| !serving.is_empty());
        self.nodes.add_targets(&port.nodes, port.family);
        let port_id = port_id(&service.name, &it.name, it.protocol);
        let mut counter = |part| counters.acquire_port(CounterOwner::forwarded(port_id, part));
        let counters = ForwardCounters {
            arrived: counter(ForwardPart::Arrived),
            forwarded: counter(ForwardPart::Forwarded),
        };
        Some(PlacedPort {
            index: port.index,
            family: port.family,
            nodes: Arc::clone(&port.nodes),
            frontends,
            rows: self.rows.acquire(before, &serving, &mut self.nodes, updates),
            by_client: service.affinity.is_some(),
            counters,
            port_id,
        })
    }

    /// The nodes that get rows; none if the packets are translated. Forwarding begins when all nodes have answered once, and does
    /// not end because one does not: then others serve.
    fn serving(&self, port: &ForwardedPort, before: Option<RowsId>) -> Arc<[NodeShare]> {
        let state = |it: &NodeShare| self.nodes.state(&it.node, port.family);
        let had = before.and_then(|it| self.rows.owners(it)).filter(|it| !it.is_empty());
        let has_answered = |it: &NodeShare| matches!(state(it), PeerState::Answers | PeerState::Silent);
        if had.is_none() && !port.nodes.iter().all(has_answered) {
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
        let (by_client, counters) = (port.by_client.into(), port.counters);
        let forward = Forward { first, mask: size - 1, by_client, counters };
        for key in &port.frontends {
            if self.frontends.insert(*key, forward) != Some(forward) {
                updates.set(Table::Forwards, key, Some(&forward));
            }
        }
    }
}

impl PlacedPort {
    /// Whether one of these nodes has endpoints of it.
    fn is_on(&self, nodes: &BTreeSet<(Arc<str>, Family)>) -> bool {
        let has = |name: &Arc<str>| self.nodes.binary_search_by(|it| it.node.cmp(name)).is_ok();
        nodes.iter().any(|(name, family)| *family == self.family && has(name))
    }
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
