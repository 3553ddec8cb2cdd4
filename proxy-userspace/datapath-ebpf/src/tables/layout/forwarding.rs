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
            changed.extend(
                state.services.iter().map(|(name, it)| (name, Some(it))).filter(|(_, it)| has_ports(it)),
            );
        }
        for (name, now) in changed {
            let old = self.services.remove(name).unwrap_or_default();
            let ports = now.into_iter().flat_map(|state| state.forwarded.iter().map(move |it| (state, it)));
            let new: Vec<_> =
                ports.filter_map(|(state, it)| self.place(state, it, own, &old, updates)).collect();
            self.replace(&old, &new, updates);
            old.iter().for_each(|it| self.release(it.rows));
            if has_ports(&now) {
                self.services.insert(name.clone(), new);
            }
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
        let next = self.numbers.values().max().map_or(THIS_NODE + 1, |it| it.saturating_add(1));
        *self.numbers.entry(Arc::clone(name)).or_insert(next)
    }

    /// Writes the frontends that differ.
    fn replace(&mut self, old: &[PlacedPort], new: &[PlacedPort], updates: &mut MapUpdates) {
        let kept: HashSet<_> = new.iter().flat_map(|it| &it.frontends).collect();
        for key in old.iter().flat_map(|it| &it.frontends).filter(|it| !kept.contains(it)) {
            if self.frontends.remove(key).is_some() {
                updates.set(Table::Forwards, key, None::<&Forward>);
            }
        }
        for it in new {
            let Some(rows) = self.rows.get(&it.rows) else { continue };
            let Range { first, size } = rows.range;
            let forward = Forward { first, mask: size - 1, by_client: it.by_client.into() };
            for key in &it.frontends {
                if self.frontends.insert(*key, forward) != Some(forward) {
                    updates.set(Table::Forwards, key, Some(&forward));
                }
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
mod tests {
    use model::state::{Service, ServicePort};
    use proptest::prelude::*;

    use super::*;

    const OWN: &str = "n0";

    fn service(name: &str, ip: u8, nodes: &[(u8, u32)]) -> ServiceState {
        let mut service = Service::new(ServiceName::new("default", name));
        service.load_balancer_ips = vec![IpAddr::from([203, 0, 113, ip])];
        service.ports = vec![ServicePort::new(Protocol::Tcp, 80.try_into().unwrap())];
        let mut state = ServiceState::new(service, []);
        let share = |(node, endpoints): &(u8, u32)| NodeShare {
            node: format!("n{node}").into(),
            endpoints: *endpoints,
        };
        if !nodes.is_empty() {
            let nodes = nodes.iter().map(share).collect();
            state.forwarded =
                [ForwardedPort { index: 0, family: Family::V4, nodes, targets: [].into() }].into();
        }
        state
    }

    fn state(services: impl IntoIterator<Item = ServiceState>) -> NodeState {
        let node = |n: u8| {
            let info = NodeInfo { addresses: vec![IpAddr::from([192, 0, 2, n + 1])], ..NodeInfo::default() };
            (format!("n{n}").into(), info)
        };
        NodeState {
            services: services.into_iter().map(Arc::new).collect(),
            nodes: (0..8).map(node).collect(),
            ..NodeState::default()
        }
    }

    /// The layout, and what was written.
    #[derive(Default)]
    struct Written {
        forwarding: Forwarding,
        state: NodeState,
        tables: HashMap<Table, BTreeMap<Vec<u8>, Vec<u8>>>,
    }

    impl Written {
        fn update(&mut self, mut state: NodeState) {
            if self.state.nodes == state.nodes {
                state.nodes = self.state.nodes.clone();
            }
            let mut updates = MapUpdates::default();
            self.forwarding.update(&self.state, &state, OWN, &mut updates);
            self.apply(&updates);
            self.state = state;
        }

        fn apply(&mut self, updates: &MapUpdates) {
            for table in Table::FORWARDING {
                let (updates, entry) = (updates.table(table), table.entry());
                let rows = self.tables.entry(table).or_default();
                for key in updates.deletes.chunks(entry.key) {
                    assert!(rows.remove(key).is_some(), "{table}: an entry that is not there is deleted");
                }
                let values = updates.values.chunks(entry.value);
                rows.extend(
                    updates.keys.chunks(entry.key).zip(values).map(|(key, it)| (key.to_vec(), it.to_vec())),
                );
            }
        }

        fn forward(&self, ip: u8) -> Option<Forward> {
            let address = V6::from(IpAddr::from([203, 0, 113, ip]));
            let key = FrontendKey6 { address, port: Be16::new(80), protocol: TCP, zero: 0 };
            self.tables[&Table::Forwards]
                .get(bytemuck::bytes_of(&key))
                .map(|it| bytemuck::pod_read_unaligned(it))
        }

        /// The owner and the second of each row, as the last byte of their addresses minus one; `None` for none.
        fn rows(&self, ip: u8) -> Vec<[Option<u8>; 2]> {
            let Some(Forward { first, mask, .. }) = self.forward(ip) else { return Vec::new() };
            let node = |number: NodeNumber| {
                let node = self.tables[&Table::ForwardNodes].get(&u32::from(number).to_ne_bytes()[..])?;
                let node: ForwardNode = bytemuck::pod_read_unaligned(node);
                std::net::Ipv4Addr::from(node.v4).octets()[3].checked_sub(1)
            };
            let row = |position: u32| {
                let row: Row = bytemuck::pod_read_unaligned(
                    &self.tables[&Table::ForwardRows][&position.to_ne_bytes()[..]],
                );
                [node(row.owner()), node(row.second())]
            };
            (first..=first + mask).map(row).collect()
        }
    }

    #[test]
    fn a_row_has_the_owner_before_as_its_second_until_it_changes_again() {
        let mut written = Written::default();
        let nodes = [(0, 1), (1, 1), (2, 1)];
        written.update(state([service("a", 1, &nodes)]));
        let first = written.rows(1);
        assert!(first.iter().all(|[owner, second]| owner.is_some() && second.is_none()));
        written.update(state([service("a", 1, &[(0, 1), (1, 1), (2, 1), (3, 1)])]));
        let second = written.rows(1);
        for (before, now) in first.iter().zip(&second) {
            assert_eq!(now[1], if now[0] == before[0] { None } else { before[0] });
        }
        // Rows that others take now keep what they had; back again, the fourth node is the second.
        written.update(state([service("a", 1, &nodes)]));
        for ((first, second), now) in first.iter().zip(&second).zip(written.rows(1)) {
            assert_eq!(now[0], first[0]);
            assert_eq!(now[1], if second[0] == first[0] { second[1] } else { second[0] });
        }
    }

    #[test]
    fn services_with_the_same_nodes_and_history_share_rows() {
        let mut written = Written::default();
        let three = [(0, 1), (1, 1), (2, 1)];
        written.update(state([service("a", 1, &three), service("b", 2, &three), service("c", 3, &[(0, 1)])]));
        assert_eq!(written.forward(1), written.forward(2));
        assert_ne!(written.forward(1), written.forward(3));
        // One after the other.
        let two = [(0, 1), (1, 1)];
        written.update(state([service("a", 1, &two), service("b", 2, &three)]));
        assert_ne!(written.forward(1), written.forward(2));
        written.update(state([service("a", 1, &two), service("b", 2, &two)]));
        assert_eq!(written.forward(1), written.forward(2));
        // A Service without a history takes what is there.
        written.update(state([service("a", 1, &two), service("d", 4, &two)]));
        assert_eq!(written.forward(1), written.forward(4));
    }

    #[test]
    fn the_seconds_outlive_the_process() {
        let mut first = Written::default();
        let (three, two) = ([(0, 1), (1, 1), (2, 1)], [(0, 1), (1, 1)]);
        first.update(state([service("a", 1, &three), service("b", 2, &three)]));
        first.update(state([service("a", 1, &two), service("b", 2, &two)]));
        let previous = || {
            let address = |it: Option<u8>| IpAddr::from(it.map_or([0; 4], |it| [192, 0, 2, it + 1]));
            let key = |ip: u8| {
                *first
                    .forwarding
                    .frontends
                    .keys()
                    .find(|it| IpAddr::from(it.address) == IpAddr::from([203, 0, 113, ip]))
                    .unwrap()
            };
            let rows = first.rows(1).into_iter().map(|it| it.map(address)).collect();
            PreviousRows { frontends: [(key(1), 7), (key(2), 7)].into(), rows: [(7, rows)].into() }
        };
        let mut second = Written::default();
        second.forwarding.restore(previous());
        second.update(state([service("a", 1, &two), service("b", 2, &two)]));
        assert_eq!(second.rows(1), first.rows(1));
        assert_eq!(second.forward(1), second.forward(2));
        // What has changed meanwhile has the owner before.
        let mut third = Written::default();
        third.forwarding.restore(previous());
        third.update(state([service("a", 1, &three)]));
        first.update(state([service("a", 1, &three)]));
        assert_eq!(third.rows(1), first.rows(1));
    }

    #[test]
    fn what_cannot_be_received_is_not_forwarded() {
        let mut written = Written::default();
        written.update(state([service("a", 1, &[(0, 1), (9, 1)])]));
        assert_eq!(written.forward(1), None, "n9 has no address");
        let mut with_it = state([service("a", 1, &[(0, 1), (9, 1)])]);
        with_it
            .nodes
            .insert("n9".into(), NodeInfo { addresses: vec![[192, 0, 2, 10].into()], ..NodeInfo::default() });
        written.update(with_it);
        assert!(written.rows(1).iter().any(|it| it[0] == Some(9)));
        written.update(state([service("a", 1, &[])]));
        assert_eq!(written.forward(1), None);
        assert!(!written.forwarding.is_used());
        assert!(written.tables[&Table::ForwardNumbers].is_empty());
    }

    fn any_nodes() -> impl Strategy<Value = Vec<(u8, u32)>> {
        prop::collection::btree_map(0_u8..8, 1_u32..3, 0..6).prop_map(|it| it.into_iter().collect())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// As of two nodes that entered the cluster at different times.
        #[test]
        fn owners_do_not_depend_on_the_history(history in prop::collection::vec(prop::collection::vec(any_nodes(), 3), 1..8)) {
            let of = |nodes: &[Vec<(u8, u32)>]| {
                state((1..).zip(nodes).map(|(ip, it)| service(&format!("s{ip}"), ip, it)))
            };
            let mut long = Written::default();
            history.iter().for_each(|it| long.update(of(it)));
            let mut short = Written::default();
            let last = history.last().unwrap();
            short.update(of(last));
            let mut full = Written::default();
            for table in Table::FORWARDING {
                let mut updates = MapUpdates::default();
                long.forwarding.full_table(table, &mut updates);
                full.apply(&updates);
                prop_assert!(long.forwarding.entries(table) <= long.forwarding.required_capacity(table));
            }
            for (ip, nodes) in (1..).zip(last) {
                let owners = |it: &Written| it.rows(ip).iter().map(|it| it[0]).collect::<Vec<_>>();
                prop_assert_eq!(owners(&long), owners(&short));
                prop_assert_eq!(long.rows(ip), full.rows(ip));
                prop_assert_eq!(long.rows(ip).is_empty(), nodes.is_empty());
            }
        }
    }
}
