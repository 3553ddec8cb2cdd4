//! Lays out the frontends whose packets from outside are forwarded: their rows, and the numbers of nodes.
//!
//! Invariant: a row that gets another owner has the one before as its second, until its next change.
//! A port whose packets are to be forwarded is a frontend here from the beginning, so that this node takes what others forward;
//! while nodes with its endpoints have never answered, its only row has no owner, and this node translates.

mod nodes;
mod restored;
mod rows;
mod stage;

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    mem,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use datapath::FrontendAddress;
use model::{
    Family, Protocol, ServiceName,
    state::{NodeShare, NodeState, Service, ServicePort, ServiceState},
};
use proxy_common::{
    counters::ForwardCounters,
    forward::{BY_CLIENT, Forward, NodeNumber},
    net::{Be16, V6},
    tables::FrontendKey6,
};

pub use self::stage::PacketPath;
use self::{
    nodes::ForwardNodes,
    rows::{RowSets, RowsId},
    stage::Stage,
};
use super::table_state::TableState;
use crate::tables::{
    compile::port_id,
    counter_alloc::{CounterAllocator, CounterOwner, ForwardPart},
    map_updates::MapUpdates,
    peers::PeerState,
    store::Table,
};

/// The rows that an earlier process has left, with the addresses of nodes.
#[derive(Debug, Default)]
pub(crate) struct PreviousRows {
    pub(crate) frontends: HashMap<FrontendKey6, Forward>,
    /// Owner and second of each row, by the position of the first; an unspecified address for none.
    pub(crate) rows: HashMap<u32, Vec<[IpAddr; 2]>>,
    /// The number of each node's addresses.
    pub(crate) numbers: HashMap<IpAddr, NodeNumber>,
}

/// With more pairs of rows than this (16 MB of the kernel's memory), none stay for connections alone.
const MAX_PAIRS_OF_ENDED: usize = 1 << 21;

#[derive(Debug, Default)]
pub(crate) struct Forwarding {
    /// The state that rows follow: that of the packet path, or the newest one if there is none.
    followed: NodeState,
    packet_path: PacketPath,
    /// The families whose packets do not fit through this node's uplinks.
    narrow: BTreeSet<Family>,
    /// Whether ports were placed since [`Forwarding::take_begun`].
    has_changed: bool,
    /// Services to be placed again, though they are the same.
    outdated: BTreeSet<ServiceName>,
    previous: PreviousRows,
    /// What became of those rows, by the position of the first.
    restored: HashMap<u32, RowsId>,
    pub(crate) nodes: ForwardNodes,
    /// What is placed of each Service with ports that are to be forwarded: maybe nothing yet.
    services: HashMap<ServiceName, Vec<PlacedPort>>,
    frontends: HashMap<FrontendKey6, Forward>,
    rows: RowSets,
}

/// What Services had before a change.
#[derive(Default)]
struct Left {
    ports: Vec<PlacedPort>,
    /// The frontends that they have now: one may move from a Service to another.
    taken: HashSet<FrontendKey6>,
}

/// A port of a Service in one family.
#[derive(Clone, Copy)]
struct Port<'a> {
    service: &'a Service,
    port: &'a ServicePort,
    family: Family,
}

/// A port that is to be forwarded, and the nodes with endpoints.
type ForwardedTo<'a> = (Port<'a>, &'a Arc<[NodeShare]>);

/// The id of a port, see [`port_id`], and the family.
type PortKey = (u64, Family);

#[derive(Clone, Copy, Debug)]
struct Placement {
    rows: RowsId,
    stage: Stage,
    by_client: bool,
}

/// A port that has frontends in the tables.
#[derive(Debug)]
struct PlacedPort {
    key: PortKey,
    /// The nodes with endpoints.
    nodes: Arc<[NodeShare]>,
    frontends: Vec<FrontendKey6>,
    placement: Placement,
    counters: ForwardCounters,
}

impl Forwarding {
    /// Sets what the packet path has, for the next [`Forwarding::update`]. Returns whether that makes a difference.
    pub(crate) fn set_packet_path(&mut self, now: PacketPath) -> bool {
        let is_different = match (&self.packet_path, &now) {
            (PacketPath::Has { second_chance: before, .. }, PacketPath::Has { state, second_chance })
                if before == second_chance =>
            {
                state.diff(&self.followed).any(|(name, before, now)| self.concerns(name, before, now))
            }
            _ => {
                self.outdated.extend(self.services.keys().cloned());
                !self.services.is_empty()
            }
        };
        self.packet_path = now;
        is_different
    }

    /// Sets the families whose packets do not fit through this node's uplinks: it translates them, and takes those that others
    /// forward. Returns whether they are others; the next [`Forwarding::update`] follows.
    pub(crate) fn set_narrow(&mut self, families: BTreeSet<Family>) -> bool {
        if self.narrow == families {
            return false;
        }
        self.narrow = families;
        self.outdated.extend(self.services.keys().cloned());
        true
    }

    /// The TCP frontends whose forwarding has begun while this node may know connections that it has translated, if they may have
    /// changed since the last call.
    pub(crate) fn take_begun(&mut self) -> Option<BTreeSet<SocketAddr>> {
        let ports = self.services.values().flatten().filter(|it| it.placement.stage == Stage::Begun);
        mem::take(&mut self.has_changed).then(|| ports.flat_map(PlacedPort::addresses).collect())
    }

    /// This node knows no translated connections of these frontends any more. Returns whether that makes a difference to the next
    /// [`Forwarding::update`].
    pub(crate) fn set_settled(&mut self, frontends: &HashSet<SocketAddr>) -> bool {
        // It is asked every second.
        if frontends.is_empty() {
            return false;
        }
        for (name, ports) in &mut self.services {
            let begun = ports.iter_mut().filter(|it| it.placement.stage == Stage::Begun);
            for it in begun.filter(|it| it.addresses().all(|it| frontends.contains(&it))) {
                it.placement.stage = Stage::Forwarded;
                self.outdated.insert(name.clone());
            }
        }
        !self.outdated.is_empty()
    }

    /// Whether anything is to be forwarded.
    pub(crate) fn is_used(&self) -> bool {
        !self.frontends.is_empty()
    }

    pub(super) fn frontends(&self) -> impl Iterator<Item = IpAddr> {
        self.frontends.keys().map(|it| it.address.into())
    }

    pub(super) fn full_table(&self, table: Table, updates: &mut MapUpdates) {
        match table {
            Table::Forwards => self.frontends.iter().for_each(|(key, it)| updates.set(table, key, Some(it))),
            Table::ForwardRows => self.rows.full_table(updates),
            Table::ForwardNodes => {
                self.nodes.addresses.iter().for_each(|(number, it)| updates.set(table, number, Some(it)));
            }
            Table::ForwardNumbers => {
                self.nodes.by_address.iter().for_each(|(address, it)| updates.set(table, address, Some(it)));
            }
            _ => {}
        }
    }

    pub(super) fn entries(&self, table: Table) -> u32 {
        let entries = match table {
            Table::Forwards => self.frontends.len(),
            Table::ForwardRows => self.rows.pairs(),
            Table::ForwardNodes => self.nodes.addresses.len(),
            Table::ForwardNumbers => self.nodes.by_address.len(),
            _ => 0,
        };
        u32::try_from(entries).unwrap_or(u32::MAX)
    }

    pub(super) fn required_capacity(&self, table: Table) -> u32 {
        match table {
            Table::ForwardRows => self.rows.end(),
            Table::ForwardNodes => self.nodes.addresses.last_key_value().map_or(0, |(it, _)| it + 1),
            _ => self.entries(table),
        }
    }

    /// Whether a change of a Service may be one of what is forwarded.
    fn concerns(
        &self,
        name: &ServiceName,
        before: Option<&Arc<ServiceState>>,
        now: Option<&Arc<ServiceState>>,
    ) -> bool {
        let has_left = !self.previous.frontends.is_empty();
        has_ports(before) || has_ports(now) || has_left || self.services.contains_key(name)
    }

    /// Replaces the state `before`, the newest one of the last call. Rows follow the packet path.
    pub(super) fn update(&mut self, before: &NodeState, newest: &NodeState, tables: &mut TableState) {
        let followed = match &self.packet_path {
            PacketPath::Has { state, .. } => state.clone(),
            PacketPath::Off | PacketPath::Starting => newest.clone(),
        };
        let mut changed = mem::take(&mut self.outdated);
        for (from, to) in [(before, newest), (&self.followed, &followed)] {
            let of = to.diff(from).filter(|(name, before, now)| self.concerns(name, *before, *now));
            changed.extend(of.map(|(name, ..)| name.clone()));
        }
        self.followed.clone_from(&followed);
        if self.services.is_empty() && changed.is_empty() {
            return;
        }
        if self.nodes.set_infos(&newest.nodes) {
            changed.extend(self.services.keys().cloned());
        }
        let peers = self.nodes.take_changed();
        if !peers.is_empty() {
            let concerned = self.services.iter().filter(|(_, ports)| ports.iter().any(|it| it.is_on(&peers)));
            changed.extend(concerned.map(|(name, _)| name.clone()));
        }
        if changed.is_empty() {
            return;
        }
        self.has_changed = true;
        let mut left = Left::default();
        for name in &changed {
            let states = [followed.services.get(name), newest.services.get(name)];
            self.replace(name, states, &mut left, tables);
        }
        self.give_up(left, tables);
        self.nodes.write(!self.frontends.is_empty(), &mut tables.updates);
        self.previous = PreviousRows::default();
        if !mem::take(&mut self.restored).is_empty() {
            self.rows.remove_unused();
        }
    }

    /// Replaces the ports of a Service by those of the state that is followed; what only the newest one has is expected.
    fn replace(
        &mut self,
        name: &ServiceName,
        [followed, newest]: [Option<&Arc<ServiceState>>; 2],
        left: &mut Left,
        tables: &mut TableState,
    ) {
        let old = self.services.remove(name).unwrap_or_default();
        let has_rules = !matches!(self.packet_path, PacketPath::Starting);
        let mut new: Vec<PlacedPort> = Vec::new();
        for it in forwarded_ports(followed) {
            let frontends = it.0.frontends();
            new.extend(self.place(it, (has_rules, frontends), &old, tables));
        }
        for it in forwarded_ports(newest) {
            let frontends = self.expected(it.0, &old, &new);
            new.extend(self.place(it, (false, frontends), &old, tables));
        }
        if let Some(state) = followed.or(newest) {
            let ended = self.ended(&state.service, &old, &new, tables);
            new.extend(ended);
        }
        new.iter().for_each(|it| self.write(it, &mut tables.updates));
        left.taken.extend(new.iter().flat_map(|it| it.frontends.iter().copied()));
        left.ports.extend(old);
        if has_ports(followed) || has_ports(newest) || !new.is_empty() {
            self.services.insert(name.clone(), new);
        }
    }

    /// The frontends of a port of the newest state that no other port has: none if the port is placed, or ends and may begin again. Until
    /// the packet path moves a frontend, it stays where it is.
    fn expected(&self, port: Port<'_>, old: &[PlacedPort], new: &[PlacedPort]) -> Vec<FrontendKey6> {
        let key = port.key();
        let ends = old.iter().any(|it| it.key == key && it.placement.stage.is_forwarded());
        if new.iter().any(|it| it.key == key) || ends && self.can_keep(port) {
            return Vec::new();
        }
        let has = |ports: &[PlacedPort], key: &_| ports.iter().any(|it| it.frontends.contains(key));
        let mut frontends = port.frontends();
        frontends.retain(|it| !has(new, it) && (has(old, it) || !self.frontends.contains_key(it)));
        frontends
    }

    /// Gives up what no port has any more.
    fn give_up(&mut self, left: Left, tables: &mut TableState) {
        for PlacedPort { key: (port_id, family), nodes, frontends, placement, .. } in left.ports {
            for key in frontends.iter().filter(|it| !left.taken.contains(it)) {
                if self.frontends.remove(key).is_some() {
                    tables.updates.set(Table::Forwards, key, None::<&Forward>);
                }
            }
            self.nodes.remove_targets(&nodes, family);
            for part in [ForwardPart::Arrived, ForwardPart::Forwarded] {
                tables.counters.release(CounterOwner::forwarded(port_id, part));
            }
            self.rows.release(placement.rows);
        }
    }

    /// Places a port with these frontends; `None` without one, or if this node has no address to forward from. It begins to be forwarded
    /// only if it may, and when all nodes have answered once.
    fn place(
        &mut self,
        (port, nodes): ForwardedTo<'_>,
        (may_begin, frontends): (bool, Vec<FrontendKey6>),
        old: &[PlacedPort],
        tables: &mut TableState,
    ) -> Option<PlacedPort> {
        let family = port.family;
        if frontends.is_empty() || nodes.is_empty() || !self.nodes.can_send(family) {
            return None;
        }
        let key = port.key();
        // The port may have another name now.
        let has_frontend = |it: &&PlacedPort| it.frontends.iter().any(|it| frontends.contains(it));
        let before = old.iter().find(|it| it.key == key).or_else(|| old.iter().find(has_frontend));
        let before =
            before.map(|it| it.placement).or_else(|| frontends.iter().find_map(|it| self.restored(it)));
        let stage = before.map_or(Stage::Translated, |it| it.stage);
        let may_begin = may_begin && nodes.iter().all(|it| self.has_answered(it, family));
        let can_keep = self.can_keep(port);
        self.nodes.add_targets(nodes, family);
        let mut placement = match before {
            Some(before) if stage == Stage::Ended && can_keep && !may_begin => {
                self.rows.keep(before.rows, &mut tables.updates);
                before
            }
            _ => {
                let before = before.map(|it| it.rows);
                let serving = match stage.is_forwarded() || may_begin {
                    true => self.serving(nodes, family, before.filter(|_| stage.is_forwarded())),
                    false => [].into(),
                };
                let is_translated = serving.is_empty();
                let before = before.filter(|_| !is_translated);
                Placement {
                    rows: self.rows.acquire(before, &serving, &mut self.nodes, &mut tables.updates),
                    stage: if is_translated { Stage::Translated } else { stage.forwarded(can_keep) },
                    by_client: port.service.affinity.is_some(),
                }
            }
        };
        if self.narrow.contains(&family) && placement.stage != Stage::Translated {
            self.translate(&mut placement, can_keep, &mut tables.updates);
        }
        let counters = acquire_counters(&mut tables.counters, key);
        Some(PlacedPort { key, nodes: Arc::clone(nodes), frontends, placement, counters })
    }

    /// Has this node translate what others forward. Their rows stay here for connections that were forwarded, wherever they began.
    fn translate(&mut self, placement: &mut Placement, can_keep: bool, updates: &mut MapUpdates) {
        placement.stage = if can_keep { Stage::Ended } else { Stage::Translated };
        if !can_keep {
            self.rows.release(placement.rows);
            placement.rows = self.rows.acquire(None, &[].into(), &mut self.nodes, updates);
        }
    }

    /// Whether a node with endpoints has answered once.
    fn has_answered(&self, share: &NodeShare, family: Family) -> bool {
        matches!(self.nodes.state(&share.node, family), PeerState::Answers | PeerState::Silent)
    }

    /// Whether connections to a port go on the way they began when forwarding begins or ends.
    fn can_keep(&self, Port { port, family, .. }: Port<'_>) -> bool {
        port.protocol == Protocol::Tcp
            && self.packet_path.knows_connections(family)
            && self.nodes.can_send(family)
    }

    /// Whether a port that is forwarded no longer can stay for its connections.
    fn can_end(&self, port: Port<'_>) -> bool {
        self.can_keep(port) && self.rows.pairs() <= MAX_PAIRS_OF_ENDED
    }

    /// The ports of a Service that were forwarded, by this process or an earlier one, and are not placed: those whose connections
    /// stay.
    fn ended(
        &mut self,
        service: &Service,
        old: &[PlacedPort],
        placed: &[PlacedPort],
        tables: &mut TableState,
    ) -> Vec<PlacedPort> {
        let mut ended = Vec::new();
        let ports = service.ports.iter();
        for port in ports.flat_map(|port| Family::ALL.map(|family| Port { service, port, family })) {
            let key = port.key();
            if placed.iter().any(|it| it.key == key) || !self.can_end(port) {
                continue;
            }
            // The first update takes over what an earlier process has left, and finds no old ports.
            let before = old.iter().find(|it| it.key == key);
            if before.is_none() && self.previous.frontends.is_empty() {
                continue;
            }
            let mut frontends = port.frontends();
            let before = match before {
                Some(old) => {
                    frontends.retain(|it| old.frontends.contains(it));
                    Some(old.placement)
                }
                None => {
                    frontends.retain(|it| self.previous.frontends.contains_key(it));
                    frontends.first().and_then(|it| self.restored(it))
                }
            };
            let before = before.filter(|it| it.stage != Stage::Translated && !frontends.is_empty());
            let Some(before) = before else { continue };
            self.rows.keep(before.rows, &mut tables.updates);
            let placement = Placement { stage: Stage::Ended, ..before };
            let counters = acquire_counters(&mut tables.counters, key);
            // Nobody needs to answer for rows that do not change any more.
            ended.push(PlacedPort { key, nodes: [].into(), frontends, placement, counters });
        }
        ended
    }

    /// The nodes that get rows; none if the packets are translated. Forwarding does not end because one does not answer: then others
    /// serve.
    fn serving(&self, nodes: &Arc<[NodeShare]>, family: Family, before: Option<RowsId>) -> Arc<[NodeShare]> {
        let state = |it: &NodeShare| self.nodes.state(&it.node, family);
        let had = before.and_then(|it| self.rows.owners(it));
        let had_rows = |it: &NodeShare| {
            had.zip(self.nodes.known_number(&it.node)).is_some_and(|(had, it)| had.contains(&it))
        };
        let serves = |it: &NodeShare| match state(it) {
            PeerState::Answers => true,
            PeerState::Untried => had_rows(it),
            PeerState::Silent | PeerState::Mute => false,
        };
        let those = |is_wanted: &dyn Fn(&NodeShare) -> bool| -> Arc<[NodeShare]> {
            nodes.iter().filter(|it| is_wanted(it)).cloned().collect()
        };
        if nodes.iter().all(serves) {
            return Arc::clone(nodes);
        }
        let serving = those(&serves);
        if serving.is_empty() { those(&|it| state(it) != PeerState::Mute) } else { serving }
    }

    /// Writes the frontends of a port that differ.
    fn write(&mut self, port: &PlacedPort, updates: &mut MapUpdates) {
        let Placement { rows, stage, by_client } = port.placement;
        let Some((first, mask)) = self.rows.place(rows) else { return };
        let flags = stage.flags() | if by_client { BY_CLIENT } else { 0 };
        let forward = Forward { first, mask, flags, counters: port.counters };
        for key in &port.frontends {
            if self.frontends.insert(*key, forward) != Some(forward) {
                updates.set(Table::Forwards, key, Some(&forward));
            }
        }
    }
}

impl PlacedPort {
    fn addresses(&self) -> impl Iterator<Item = SocketAddr> {
        self.frontends.iter().map(|it| SocketAddr::new(it.address.into(), it.port.get()))
    }

    /// Whether one of these nodes has endpoints of it.
    fn is_on(&self, nodes: &BTreeSet<(Arc<str>, Family)>) -> bool {
        let has = |name: &Arc<str>| self.nodes.binary_search_by(|it| it.node.cmp(name)).is_ok();
        nodes.iter().any(|(name, family)| *family == self.key.1 && has(name))
    }
}

fn has_ports(state: Option<&Arc<ServiceState>>) -> bool {
    state.is_some_and(|it| !it.forwarded.is_empty())
}

/// The ports of a Service that are to be forwarded.
fn forwarded_ports(state: Option<&Arc<ServiceState>>) -> impl Iterator<Item = ForwardedTo<'_>> {
    state.into_iter().flat_map(|state| {
        state.forwarded.iter().filter_map(move |it| {
            let port = state.service.ports.get(usize::from(it.index))?;
            Some((Port { service: &state.service, port, family: it.family }, &it.nodes))
        })
    })
}

impl Port<'_> {
    fn key(self) -> PortKey {
        (port_id(&self.service.name, &self.port.name, self.port.protocol), self.family)
    }

    /// Its frontends, in ascending order; none if its protocol is not forwarded.
    fn frontends(self) -> Vec<FrontendKey6> {
        let Self { service, port, family } = self;
        let ips = service.load_balancer_ips.iter().chain(&service.external_ips);
        let ips = ips.filter(|ip| Family::of(**ip) == family && !port.conflicting_addresses.contains(ip));
        let key = |ip: &IpAddr| {
            let address = SocketAddr::new(*ip, port.port.get());
            frontend_key(&FrontendAddress { address, protocol: port.protocol })
        };
        ips.filter_map(key).collect::<BTreeSet<_>>().into_iter().collect()
    }
}

fn acquire_counters(counters: &mut CounterAllocator, (port_id, _): PortKey) -> ForwardCounters {
    let mut counter = |part| counters.acquire_port(CounterOwner::forwarded(port_id, part));
    ForwardCounters { arrived: counter(ForwardPart::Arrived), forwarded: counter(ForwardPart::Forwarded) }
}

/// An address of a Service in the tables; `None` if its protocol is not forwarded.
pub(crate) fn frontend_key(it: &FrontendAddress) -> Option<FrontendKey6> {
    (it.protocol != Protocol::Sctp).then(|| FrontendKey6 {
        address: V6::from(it.address.ip()),
        port: Be16::new(it.address.port()),
        protocol: it.protocol.number(),
        zero: 0,
    })
}

#[cfg(test)]
mod tests;
