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
    state::{ForwardedPort, NodeShare, NodeState, Service, ServicePort, ServiceState},
};
use proxy_common::{
    counters::ForwardCounters,
    forward::{BY_CLIENT, Forward, NodeNumber},
    net::{Be16, V6},
    tables::{FrontendKey6, TCP, UDP},
};

pub use self::stage::PacketPath;
use self::{
    nodes::ForwardNodes,
    rows::{RowSets, RowsId},
    stage::Stage,
};
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
    /// The frontends.
    pub(crate) frontends: HashMap<FrontendKey6, Forward>,
    /// Owner and second of each row, by the position of the first; an unspecified address for none.
    pub(crate) rows: HashMap<u32, Vec<[IpAddr; 2]>>,
    /// The number of each node's addresses.
    pub(crate) numbers: HashMap<IpAddr, NodeNumber>,
}

/// With more pairs of rows than this (16 MB of the kernel's memory), none stay for connections alone.
const MAX_PAIRS_OF_ENDED: usize = 1 << 21;

/// What is forwarded.
#[derive(Debug, Default)]
pub(crate) struct Forwarding {
    /// The newest state.
    newest: NodeState,
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

/// What a port had.
#[derive(Clone, Copy)]
struct Before {
    rows: RowsId,
    stage: Stage,
    by_client: bool,
}

/// A port of a state that is forwarded in one family.
#[derive(Clone, Copy)]
struct PortToPlace<'a> {
    state: &'a ServiceState,
    port: &'a ServicePort,
    forwarded: &'a ForwardedPort,
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
    /// The nodes that packets are forwarded to.
    pub(crate) fn nodes(&mut self) -> &mut ForwardNodes {
        &mut self.nodes
    }

    /// Sets what the packet path has, for the next [`Forwarding::update`]. Returns whether that makes a difference.
    pub(crate) fn set_packet_path(&mut self, now: PacketPath) -> bool {
        let (is_first, is_different) = match (&self.packet_path, &now) {
            (PacketPath::Has { second_chance: before, .. }, PacketPath::Has { state, second_chance })
                if before == second_chance =>
            {
                let mut changed = state.diff(&self.followed);
                let is_concerned = changed.any(|(name, before, now)| self.concerns(name, before, now));
                (false, is_concerned)
            }
            _ => (true, !self.services.is_empty()),
        };
        if is_first {
            self.outdated.extend(self.services.keys().cloned());
        }
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
        let ports = self.services.values().flatten().filter(|it| it.stage == Stage::Begun);
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
            let begun = ports.iter_mut().filter(|it| it.stage == Stage::Begun);
            for it in begun.filter(|it| it.addresses().all(|it| frontends.contains(&it))) {
                it.stage = Stage::Forwarded;
                self.outdated.insert(name.clone());
            }
        }
        !self.outdated.is_empty()
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
            Table::ForwardRows => self.rows.pairs(),
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

    /// Replaces the state. Rows follow the packet path.
    pub(super) fn update(
        &mut self,
        newest: &NodeState,
        counters: &mut CounterAllocator,
        updates: &mut MapUpdates,
    ) {
        let followed = match &self.packet_path {
            PacketPath::Has { state, .. } => state.clone(),
            PacketPath::Off | PacketPath::Starting => newest.clone(),
        };
        let mut changed = mem::take(&mut self.outdated);
        for (before, now) in [(&self.newest, newest), (&self.followed, &followed)] {
            let of = now.diff(before).filter(|(name, before, now)| self.concerns(name, *before, *now));
            changed.extend(of.map(|(name, ..)| name.clone()));
        }
        (self.newest, self.followed) = (newest.clone(), followed.clone());
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
            self.replace(name, states, &mut left, counters, updates);
        }
        self.give_up(left, counters, updates);
        self.nodes.write(!self.frontends.is_empty(), updates);
        self.previous = PreviousRows::default();
        for (_, id) in self.restored.drain() {
            self.rows.remove_restored(id);
        }
    }

    /// Replaces the ports of a Service by those of the state that is followed; what only the newest one has is expected.
    fn replace(
        &mut self,
        name: &ServiceName,
        [followed, newest]: [Option<&Arc<ServiceState>>; 2],
        left: &mut Left,
        counters: &mut CounterAllocator,
        updates: &mut MapUpdates,
    ) {
        let old = self.services.remove(name).unwrap_or_default();
        left.frontends.extend(old.iter().flat_map(|it| it.frontends.iter().copied()));
        let Some(state) = followed.or(newest) else {
            left.ports.extend(old);
            return;
        };
        let has_rules = !matches!(self.packet_path, PacketPath::Starting);
        let mut new: Vec<PlacedPort> = Vec::new();
        for port in forwarded_ports(followed) {
            let frontends = port.frontends();
            new.extend(self.place(port, (has_rules, frontends), &old, counters, updates));
        }
        for port in forwarded_ports(newest) {
            let frontends = self.expected(port, &old, &new);
            new.extend(self.place(port, (false, frontends), &old, counters, updates));
        }
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
        if has_ports(followed) || has_ports(newest) || !new.is_empty() {
            self.services.insert(name.clone(), new);
        }
    }

    /// The frontends of a port of the newest state that no other port has: none if the port is placed, or ends and may begin again. Until
    /// the packet path moves a frontend, it stays where it is.
    fn expected(&self, port: PortToPlace<'_>, old: &[PlacedPort], new: &[PlacedPort]) -> Vec<FrontendKey6> {
        let id = port.id();
        let is_forwarded = |it: &PlacedPort| matches!(it.stage, Stage::Begun | Stage::Forwarded);
        let ends = old.iter().any(|it| it.id() == id && is_forwarded(it));
        if new.iter().any(|it| it.id() == id)
            || ends && self.can_keep(port.port.protocol, port.forwarded.family)
        {
            return Vec::new();
        }
        let has = |ports: &[PlacedPort], key: &_| ports.iter().any(|it| it.frontends.contains(key));
        let mut frontends = port.frontends();
        frontends.retain(|it| !has(new, it) && (has(old, it) || !self.frontends.contains_key(it)));
        frontends
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

    /// Places a port with these frontends; `None` without one, or if this node has no address to forward from. It begins to be forwarded
    /// only if it may, and when all nodes have answered once.
    fn place(
        &mut self,
        to_place: PortToPlace<'_>,
        (may_begin, frontends): (bool, Vec<FrontendKey6>),
        old: &[PlacedPort],
        counters: &mut CounterAllocator,
        updates: &mut MapUpdates,
    ) -> Option<PlacedPort> {
        let port = to_place.forwarded;
        if frontends.is_empty() || port.nodes.is_empty() || !self.nodes.can_send(port.family) {
            return None;
        }
        let id = to_place.id();
        // The port may have another name now.
        let has_frontend = |it: &&PlacedPort| it.frontends.iter().any(|it| frontends.contains(it));
        let before = old.iter().find(|it| it.id() == id).or_else(|| old.iter().find(has_frontend));
        let before =
            before.map(PlacedPort::before).or_else(|| frontends.iter().find_map(|it| self.restored(it)));
        let stage = before.map_or(Stage::Translated, |it| it.stage);
        let may_begin = may_begin && port.nodes.iter().all(|it| self.has_answered(it, port.family));
        let can_keep = self.can_keep(to_place.port.protocol, port.family);
        let mut placed = PlacedPort {
            family: port.family,
            nodes: Arc::clone(&port.nodes),
            frontends,
            rows: 0,
            stage,
            by_client: to_place.state.service.affinity.is_some(),
            counters: acquire_counters(counters, id.0),
            port_id: id.0,
        };
        self.nodes.add_targets(&port.nodes, port.family);
        match before {
            Some(before) if stage == Stage::Ended && can_keep && !may_begin => {
                self.rows.keep(before.rows, updates);
                (placed.rows, placed.by_client) = (before.rows, before.by_client);
            }
            _ => {
                let is_forwarded = matches!(stage, Stage::Begun | Stage::Forwarded);
                let before = before.map(|it| it.rows);
                let serving = match is_forwarded || may_begin {
                    true => self.serving(port, before.filter(|_| is_forwarded)),
                    false => [].into(),
                };
                let before = before.filter(|_| !serving.is_empty());
                let is_translated = serving.is_empty();
                placed.stage = if is_translated { Stage::Translated } else { stage.forwarded(can_keep) };
                placed.rows = self.rows.acquire(before, &serving, &mut self.nodes, updates);
            }
        }
        if self.narrow.contains(&port.family) && placed.stage != Stage::Translated {
            self.translate(&mut placed, can_keep, updates);
        }
        Some(placed)
    }

    /// Has this node translate what others forward. Their rows stay here for connections that were forwarded, wherever they began.
    fn translate(&mut self, placed: &mut PlacedPort, can_keep: bool, updates: &mut MapUpdates) {
        placed.stage = if can_keep { Stage::Ended } else { Stage::Translated };
        if !can_keep {
            self.rows.release(placed.rows);
            placed.rows = self.rows.acquire(None, &[].into(), &mut self.nodes, updates);
        }
    }

    /// Whether a node with endpoints has answered once.
    fn has_answered(&self, share: &NodeShare, family: Family) -> bool {
        matches!(self.nodes.state(&share.node, family), PeerState::Answers | PeerState::Silent)
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
        let is_kept = port.stage != Stage::Translated && self.can_keep(it.protocol, port.family);
        if left.is_empty() || !is_kept || self.rows.pairs() > MAX_PAIRS_OF_ENDED {
            return Err(port);
        }
        // Nobody needs to answer for rows that do not change any more.
        self.nodes.remove_targets(&port.nodes, port.family);
        Ok(PlacedPort { nodes: [].into(), frontends: left, stage: Stage::Ended, ..port })
    }

    /// The nodes that get rows; none if the packets are translated. Forwarding does not end because one does not answer: then others
    /// serve.
    fn serving(&self, port: &ForwardedPort, before: Option<RowsId>) -> Arc<[NodeShare]> {
        let state = |it: &NodeShare| self.nodes.state(&it.node, port.family);
        let had = before.and_then(|it| self.rows.owners(it)).filter(|it| !it.is_empty());
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
        let Some((first, mask)) = self.rows.place(port.rows) else { return };
        let flags = port.stage.flags() | if port.by_client { BY_CLIENT } else { 0 };
        let forward = Forward { first, mask, flags, counters: port.counters };
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

    fn before(&self) -> Before {
        Before { rows: self.rows, stage: self.stage, by_client: self.by_client }
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

/// The ports of a Service that are forwarded.
fn forwarded_ports(state: Option<&Arc<ServiceState>>) -> impl Iterator<Item = PortToPlace<'_>> {
    state.into_iter().flat_map(|state| {
        state.forwarded.iter().filter_map(move |forwarded| {
            let port = state.service.ports.get(usize::from(forwarded.index))?;
            Some(PortToPlace { state, port, forwarded })
        })
    })
}

impl PortToPlace<'_> {
    fn id(self) -> (u64, Family) {
        id_of(self.state, self.port, self.forwarded.family)
    }

    fn frontends(self) -> Vec<FrontendKey6> {
        frontends(&self.state.service, self.port, self.forwarded.family)
    }
}

/// What a port is known by.
fn id_of(state: &ServiceState, port: &ServicePort, family: Family) -> (u64, Family) {
    (port_id(&state.service.name, &port.name, port.protocol), family)
}

fn acquire_counters(counters: &mut CounterAllocator, port_id: u64) -> ForwardCounters {
    let mut counter = |part| counters.acquire_port(CounterOwner::forwarded(port_id, part));
    ForwardCounters { arrived: counter(ForwardPart::Arrived), forwarded: counter(ForwardPart::Forwarded) }
}

/// An address of a Service in the tables; `None` if its protocol is not forwarded.
pub(crate) fn frontend_key(it: &FrontendAddress) -> Option<FrontendKey6> {
    let protocol = match it.protocol {
        Protocol::Tcp => TCP,
        Protocol::Udp => UDP,
        Protocol::Sctp => return None,
    };
    Some(FrontendKey6 {
        address: V6::from(it.address.ip()),
        port: Be16::new(it.address.port()),
        protocol,
        zero: 0,
    })
}

/// The frontends of a port in a family, in ascending order; none if its protocol is not forwarded.
fn frontends(service: &Service, port: &ServicePort, family: Family) -> Vec<FrontendKey6> {
    let ips = service.load_balancer_ips.iter().chain(&service.external_ips);
    let ips = ips.filter(|ip| Family::of(**ip) == family && !port.conflicting_addresses.contains(ip));
    let key = |ip: &IpAddr| {
        let address = SocketAddr::new(*ip, port.port.get());
        frontend_key(&FrontendAddress { address, protocol: port.protocol })
    };
    ips.filter_map(key).collect::<BTreeSet<_>>().into_iter().collect()
}

#[cfg(test)]
mod tests;
