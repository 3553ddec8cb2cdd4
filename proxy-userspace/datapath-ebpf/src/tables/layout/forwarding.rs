//! Lays out the frontends whose packets from outside are forwarded: their rows, and the numbers of nodes.
//!
//! Invariant: a row that gets another owner has the one before as its second, until its next change.
//! Services with the same nodes and the same history share their rows.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    net::IpAddr,
    sync::Arc,
};

use model::{
    Family, Protocol, ServiceName,
    state::{ForwardedPort, NodeInfo, NodeInfos, NodeShare, NodeState, ServiceState},
};
use proxy_common::{
    forward::{Forward, ForwardNode, NO_NODE, NodeNumber, Row, THIS_NODE},
    net::{Be16, V4, V6},
    tables::{FrontendKey6, TCP, UDP},
};

use super::ranges::{Range, RangeAllocator};
use crate::tables::{maglev, map_updates::MapUpdates, store::Table};

/// The rows that an earlier process has left, with the addresses of nodes.
#[derive(Debug, Default)]
pub(crate) struct PreviousRows {
    /// The first position of each frontend's rows.
    pub(crate) frontends: HashMap<FrontendKey6, u32>,
    /// Owner and second of each row, by the position of the first; an unspecified address for none.
    pub(crate) rows: HashMap<u32, Vec<[IpAddr; 2]>>,
}

/// What is forwarded.
#[derive(Debug, Default)]
pub(super) struct Forwarding {
    previous: PreviousRows,
    /// What became of those rows, by the position of the first.
    restored: HashMap<u32, RowsId>,
    nodes: NodeInfos,
    /// The numbers of nodes; one stays while the process runs, as rows may have the node as their second.
    numbers: BTreeMap<Arc<str>, NodeNumber>,
    /// What the tables say of each node.
    addresses: BTreeMap<NodeNumber, ForwardNode>,
    /// What is placed of each Service with ports that are to be forwarded: maybe nothing yet.
    services: HashMap<ServiceName, Vec<PlacedPort>>,
    frontends: HashMap<FrontendKey6, Forward>,
    rows: HashMap<RowsId, Rows>,
    next_id: RowsId,
    /// Rows of these nodes, whatever came before.
    by_nodes: HashMap<Arc<[NodeShare]>, RowsId>,
    /// What follows rows when their nodes become others.
    successors: HashMap<(RowsId, Arc<[NodeShare]>), RowsId>,
    ranges: RangeAllocator,
}

/// Identifies rows; never used twice.
type RowsId = u64;

/// The rows of some frontends.
#[derive(Debug)]
struct Rows {
    nodes: Arc<[NodeShare]>,
    rows: Vec<Row>,
    range: Range,
    /// How many ports use them.
    users: usize,
}

/// A port of a Service in one family.
#[derive(Debug)]
struct PlacedPort {
    /// Its position in the Service, and its family.
    port: (u16, Family),
    frontends: Vec<FrontendKey6>,
    rows: RowsId,
    by_client: bool,
}

impl Forwarding {
    /// Takes over the seconds of the rows of an earlier process, at the first [`Forwarding::update`].
    pub(super) fn restore(&mut self, previous: PreviousRows) {
        self.previous = previous;
    }

    /// Whether anything is forwarded.
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
            Table::ForwardRows => {
                for Rows { rows, range, .. } in self.rows.values() {
                    (range.first..)
                        .zip(rows)
                        .for_each(|(position, it)| updates.set(table, &position, Some(it)));
                }
            }
            Table::ForwardNodes => {
                let entries = self.addresses.iter().map(|(number, it)| (u32::from(*number), it));
                entries.for_each(|(number, it)| updates.set(table, &number, Some(it)));
            }
            Table::ForwardNumbers => {
                let entries = by_address(&self.addresses);
                entries.iter().for_each(|(address, it)| updates.set(table, address, Some(it)));
            }
            _ => {}
        }
    }

    /// How many entries one of its tables has.
    pub(super) fn entries(&self, table: Table) -> u32 {
        let entries = match table {
            Table::Forwards => self.frontends.len(),
            Table::ForwardRows => self.rows.values().map(|it| it.rows.len()).sum(),
            Table::ForwardNodes => self.addresses.len(),
            Table::ForwardNumbers => by_address(&self.addresses).len(),
            _ => 0,
        };
        u32::try_from(entries).unwrap_or(u32::MAX)
    }

    /// The capacity that one of its tables needs.
    pub(super) fn required_capacity(&self, table: Table) -> u32 {
        match table {
            Table::ForwardRows => self.ranges.end(),
            Table::ForwardNodes => self.addresses.last_key_value().map_or(0, |(it, _)| u32::from(*it) + 1),
            _ => self.entries(table),
        }
    }

    /// Replaces the state `before` by another one; `own` is the name of this node.
    pub(super) fn update(
        &mut self,
        before: &NodeState,
        state: &NodeState,
        own: &str,
        updates: &mut MapUpdates,
    ) {
        let has_ports = |it: &Option<&Arc<ServiceState>>| it.is_some_and(|it| !it.forwarded.is_empty());
        let changed = state.diff(before).filter(|(_, before, now)| has_ports(before) || has_ports(now));
        let mut changed: BTreeMap<_, _> = changed.map(|(name, _, now)| (name, now)).collect();
        if self.services.is_empty() && changed.is_empty() {
            return;
        }
        if !state.nodes.ptr_eq(&self.nodes) {
            self.nodes = state.nodes.clone();
            let all = state.services.iter().map(|(name, it)| (name, Some(it)));
            changed.extend(all.filter(|(_, it)| has_ports(it)));
        } else if changed.is_empty() {
            return;
        }
        // A frontend may move from a Service to another.
        let mut given_up = Vec::new();
        let mut taken = HashSet::new();
        for (name, now) in changed {
            let old = self.services.remove(name).unwrap_or_default();
            let ports = now.into_iter().flat_map(|state| state.forwarded.iter().map(move |it| (state, it)));
            let new: Vec<_> =
                ports.filter_map(|(state, it)| self.place(state, it, own, &old, updates)).collect();
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
            self.release(old.rows);
        }
        self.write_nodes(own, updates);
        self.previous = PreviousRows::default();
        for (_, id) in self.restored.drain() {
            self.rows.remove(&id);
        }
    }

    /// The rows that an earlier process has left for a frontend.
    fn restored(&mut self, frontend: &FrontendKey6, own: &str) -> Option<RowsId> {
        let first = *self.previous.frontends.get(frontend)?;
        if let Some(id) = self.restored.get(&first) {
            return Some(*id);
        }
        let previous = self.previous.rows.remove(&first)?;
        let names: HashMap<IpAddr, Arc<str>> = self
            .nodes
            .iter()
            .flat_map(|(name, node)| {
                node.addresses.iter().map(move |it| (it.to_canonical(), Arc::clone(name)))
            })
            .collect();
        let mut number = |it: &IpAddr| names.get(it).map_or(NO_NODE, |name| self.number(name, own));
        let rows = previous.iter().map(|[owner, second]| Row::new(number(owner), number(second))).collect();
        let id = self.next_id;
        self.next_id += 1;
        self.rows.insert(id, Rows { nodes: [].into(), rows, range: Range::default(), users: 0 });
        self.restored.insert(first, id);
        Some(id)
    }

    /// Places a port; `None` if it has no frontend, or a node that cannot receive its packets.
    fn place(
        &mut self,
        state: &ServiceState,
        port: &ForwardedPort,
        own: &str,
        old: &[PlacedPort],
        updates: &mut MapUpdates,
    ) -> Option<PlacedPort> {
        let service = &state.service;
        let it = service.ports.get(usize::from(port.index))?;
        let protocol = match it.protocol {
            Protocol::Tcp => TCP,
            Protocol::Udp => UDP,
            Protocol::Sctp => return None,
        };
        let ips = service.load_balancer_ips.iter().chain(&service.external_ips);
        let ips = ips.filter(|ip| Family::of(**ip) == port.family && !it.conflicting_addresses.contains(ip));
        let key = |ip: &IpAddr| {
            let port = Be16::new(it.port.get());
            FrontendKey6 { address: V6::from(*ip), port, protocol, zero: 0 }
        };
        let frontends: HashSet<_> = ips.map(key).collect();
        let can_receive = |name: &str| {
            let node = self.nodes.get(name);
            node.is_some_and(|it| address(it, port.family).is_some())
        };
        if frontends.is_empty()
            || port.nodes.is_empty()
            || !can_receive(own)
            || !port.nodes.iter().all(|it| can_receive(&it.node))
        {
            return None;
        }
        let mut frontends: Vec<_> = frontends.into_iter().collect();
        frontends.sort_unstable();
        let before = old.iter().find(|it| it.port == (port.index, port.family)).map(|it| it.rows);
        let before = before.or_else(|| frontends.iter().find_map(|it| self.restored(it, own)));
        let rows = self.acquire(before, &port.nodes, own, updates);
        Some(PlacedPort {
            port: (port.index, port.family),
            frontends,
            rows,
            by_client: service.affinity.is_some(),
        })
    }

    /// The rows of these nodes that follow those before.
    fn acquire(
        &mut self,
        before: Option<RowsId>,
        nodes: &Arc<[NodeShare]>,
        own: &str,
        updates: &mut MapUpdates,
    ) -> RowsId {
        let is_same = |it: &RowsId| self.rows.get(it).is_some_and(|it| it.nodes == *nodes);
        let known = match before.filter(|it| self.rows.contains_key(it)) {
            Some(before) if is_same(&before) => Some(before),
            Some(before) => self.successors.get(&(before, Arc::clone(nodes))).copied(),
            None => self.by_nodes.get(nodes).copied(),
        };
        if let Some(id) = known
            && let Some(rows) = self.rows.get_mut(&id)
        {
            rows.users += 1;
            return id;
        }
        let numbers: Vec<_> = nodes.iter().map(|it| self.number(&it.node, own)).collect();
        let owners = maglev::owners(nodes).into_iter().map(|it| numbers[usize::from(it)]);
        let old = before.and_then(|it| self.rows.get(&it)).map(|it| &*it.rows).unwrap_or_default();
        let row = |(owner, old): (NodeNumber, Option<&Row>)| match old {
            Some(old) if old.owner() != owner && old.owner() != NO_NODE => Row::new(owner, old.owner()),
            Some(old) if old.owner() != owner => Row::new(owner, NO_NODE),
            Some(old) => *old,
            None => Row::new(owner, NO_NODE),
        };
        let rows: Vec<_> =
            owners.zip(old.iter().map(Some).cycle().chain([None].into_iter().cycle())).map(row).collect();
        let range = self.ranges.allocate(rows.len() as u32);
        for (position, it) in (range.first..).zip(&rows) {
            updates.set(Table::ForwardRows, &position, Some(it));
        }
        let id = self.next_id;
        self.next_id += 1;
        self.by_nodes.insert(Arc::clone(nodes), id);
        if let Some(before) = before {
            self.successors.insert((before, Arc::clone(nodes)), id);
        }
        self.rows.insert(id, Rows { nodes: Arc::clone(nodes), rows, range, users: 1 });
        id
    }

    /// Gives rows up; without users they are gone.
    fn release(&mut self, id: RowsId) {
        let Some(rows) = self.rows.get_mut(&id) else { return };
        rows.users -= 1;
        if rows.users > 0 {
            return;
        }
        if let Some(Rows { nodes, range, .. }) = self.rows.remove(&id) {
            self.ranges.release(range);
            if self.by_nodes.get(&nodes) == Some(&id) {
                self.by_nodes.remove(&nodes);
            }
        }
        let rows = &self.rows;
        self.successors.retain(|(before, _), it| rows.contains_key(before) && rows.contains_key(it));
    }

    /// The number of a node, which may be new.
    fn number(&mut self, name: &Arc<str>, own: &str) -> NodeNumber {
        if &**name == own {
            return THIS_NODE;
        }
        if let Some(known) = self.numbers.get(name) {
            return *known;
        }
        let next = self.numbers.values().max().map_or(THIS_NODE + 1, |it| it.saturating_add(1));
        self.numbers.insert(Arc::clone(name), next);
        next
    }

    /// Writes the frontends of a port that differ.
    fn write(&mut self, port: &PlacedPort, updates: &mut MapUpdates) {
        let Some(rows) = self.rows.get(&port.rows) else { return };
        let Range { first, size } = rows.range;
        let forward = Forward { first, mask: size - 1, by_client: port.by_client.into() };
        for key in &port.frontends {
            if self.frontends.insert(*key, forward) != Some(forward) {
                updates.set(Table::Forwards, key, Some(&forward));
            }
        }
    }

    /// Writes the nodes that differ; all are gone if nothing is forwarded.
    fn write_nodes(&mut self, own: &str, updates: &mut MapUpdates) {
        let mut wanted = BTreeMap::new();
        if self.is_used() {
            // Packets are taken from any node, also from one without endpoints.
            let names: Vec<_> = self.nodes.keys().filter(|it| &***it != own).cloned().collect();
            for it in &names {
                self.number(it, own);
            }
            let numbers = self.numbers.iter().map(|(name, it)| (&**name, *it));
            for (name, number) in numbers.chain([(own, THIS_NODE)]) {
                let node = self.nodes.get(name).cloned().unwrap_or_default();
                let of = |family| address(&node, family).map(V6::from).unwrap_or_default();
                let v4 = V4::from_mapped(of(Family::V4)).unwrap_or_default();
                wanted.insert(number, ForwardNode { v4, v6: of(Family::V6) });
            }
        }
        let before = std::mem::replace(&mut self.addresses, wanted);
        for number in before.keys().filter(|it| !self.addresses.contains_key(it)) {
            updates.set(Table::ForwardNodes, &u32::from(*number), Some(&ForwardNode::default()));
        }
        for (number, it) in self.addresses.iter().filter(|(number, it)| before.get(number) != Some(it)) {
            updates.set(Table::ForwardNodes, &u32::from(*number), Some(it));
        }
        // An address may have moved to another node.
        let numbers = by_address(&self.addresses);
        let old = by_address(&before);
        for address in old.keys().filter(|it| !numbers.contains_key(it)) {
            updates.set(Table::ForwardNumbers, address, None::<&u32>);
        }
        for (address, number) in numbers.iter().filter(|(address, it)| old.get(address) != Some(it)) {
            updates.set(Table::ForwardNumbers, address, Some(number));
        }
    }
}

/// The number of each address; of an address of several nodes the lowest.
fn by_address(nodes: &BTreeMap<NodeNumber, ForwardNode>) -> BTreeMap<V6, u32> {
    let addresses = nodes.iter().rev().flat_map(|(number, it)| [(it.v4.mapped(), *number), (it.v6, *number)]);
    let is_set = |address: &V6| *address != V6::default() && *address != V4::default().mapped();
    addresses.filter(|(it, _)| is_set(it)).map(|(it, number)| (it, number.into())).collect()
}

/// The first address of a node in a family, which is its primary one.
fn address(node: &NodeInfo, family: Family) -> Option<IpAddr> {
    node.addresses.iter().copied().map(|it| it.to_canonical()).find(|it| Family::of(*it) == family)
}

#[cfg(test)]
mod tests;
