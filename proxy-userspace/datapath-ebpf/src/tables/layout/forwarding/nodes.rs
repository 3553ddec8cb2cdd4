//! The nodes that packets are forwarded to: their numbers, their addresses, and whether they answer.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    mem,
    net::IpAddr,
    sync::Arc,
};

use model::{
    Family,
    diff::pairs,
    state::{NodeInfo, NodeInfos, NodeShare},
};
use proxy_common::{
    forward::{ForwardNode, MAX_NODE, NO_NODE, NodeNumber, THIS_NODE},
    net::{V4, V6},
};

use crate::tables::{
    map_updates::MapUpdates,
    peers::{PeerState, PeerStates},
    store::Table,
};

/// The nodes, as far as the state knows them.
#[derive(Debug, Default)]
pub(crate) struct ForwardNodes {
    /// The name of this node. It is set before the first state.
    pub(crate) own: Arc<str>,
    infos: NodeInfos,
    /// The nodes with endpoints whose Node has gone, or has lost its addresses, as they were.
    gone: BTreeMap<Arc<str>, NodeInfo>,
    /// The numbers of other nodes; one stays while the process runs, as rows may have the node as their second.
    numbers: HashMap<Arc<str>, NodeNumber>,
    /// The numbers that an earlier process gave to addresses. They stay: while its programs are replaced, one may read a number that
    /// another has written.
    previous: HashMap<IpAddr, NodeNumber>,
    highest: NodeNumber,
    /// What the tables say of each number.
    pub(super) addresses: BTreeMap<u32, ForwardNode>,
    /// The number of each address; of an address of several nodes the lowest.
    pub(super) by_address: BTreeMap<V6, u32>,
    /// How many ports have endpoints on a node.
    targets: BTreeMap<(Arc<str>, Family), usize>,
    /// Whether targets or their addresses have changed since [`ForwardNodes::take_peers`].
    pub(crate) has_new_peers: bool,
    /// Who answers; `None` if nodes are not probed.
    peers: Option<PeerStates>,
    /// Whose state has changed.
    changed_peers: BTreeSet<IpAddr>,
}

impl ForwardNodes {
    /// Takes over the numbers of an earlier process, before the first one is given.
    pub(super) fn restore(&mut self, numbers: HashMap<IpAddr, NodeNumber>) {
        self.previous = numbers;
        self.previous.retain(|_, it| (THIS_NODE + 1..=MAX_NODE).contains(it));
        self.highest = self.previous.values().copied().max().unwrap_or_default();
    }

    /// Replaces the nodes; returns whether they were others.
    pub(super) fn set_infos(&mut self, infos: &NodeInfos) -> bool {
        if Arc::ptr_eq(&self.infos, infos) {
            return false;
        }
        let before = mem::replace(&mut self.infos, Arc::clone(infos));
        let names: BTreeSet<_> = self.targets.keys().map(|(name, _)| name).collect();
        let was = |name: &Arc<str>| with_address(&before, name).or_else(|| self.gone.get(name)).cloned();
        let gone = names.into_iter().filter(|it| with_address(infos, it).is_none());
        self.gone = gone.filter_map(|it| Some((Arc::clone(it), was(it)?))).collect();
        self.has_new_peers = true;
        true
    }

    /// Replaces what is known of the nodes that were probed, for the next state. If it is never called, nodes are taken to answer.
    pub(crate) fn set_peers(&mut self, peers: PeerStates) {
        let before = self.peers.take().unwrap_or_default();
        let all = before.keys().chain(peers.keys());
        self.changed_peers.extend(all.filter(|it| before.get(it) != peers.get(it)));
        self.peers = Some(peers);
    }

    /// The targets whose state has changed since the last call.
    pub(super) fn take_changed(&mut self) -> BTreeSet<(Arc<str>, Family)> {
        let changed = mem::take(&mut self.changed_peers);
        if changed.is_empty() {
            return BTreeSet::new();
        }
        let is_changed = |(name, family): &&(Arc<str>, Family)| {
            self.address(name, *family).is_some_and(|it| changed.contains(&it))
        };
        self.targets.keys().filter(is_changed).cloned().collect()
    }

    /// The addresses of this node, and of the other ones with endpoints, if they have changed since the last call.
    pub(crate) fn take_peers(&mut self) -> Option<(BTreeSet<IpAddr>, BTreeSet<IpAddr>)> {
        if !mem::take(&mut self.has_new_peers) {
            return None;
        }
        let own = self.own_addresses();
        let others = self.targets.keys().filter(|(name, _)| *name != self.own);
        let addresses = others.filter_map(|(name, family)| self.address(name, *family));
        let others = addresses.filter(|it| !own.contains(it)).collect();
        Some((own, others))
    }

    /// The addresses at which this node receives wrapped packets, at most one of each family.
    pub(crate) fn own_addresses(&self) -> BTreeSet<IpAddr> {
        Family::ALL.into_iter().filter_map(|it| self.address(&self.own, it)).collect()
    }

    /// A port has endpoints on these nodes.
    pub(super) fn add_targets(&mut self, nodes: &[NodeShare], family: Family) {
        for it in nodes {
            let ports = self.targets.entry((Arc::clone(&it.node), family)).or_default();
            self.has_new_peers |= *ports == 0;
            *ports += 1;
        }
    }

    /// A port has endpoints on these nodes no longer.
    pub(super) fn remove_targets(&mut self, nodes: &[NodeShare], family: Family) {
        for it in nodes {
            let key = (Arc::clone(&it.node), family);
            match self.targets.get_mut(&key) {
                Some(ports) if *ports > 1 => *ports -= 1,
                _ => {
                    self.targets.remove(&key);
                    self.has_new_peers = true;
                }
            }
        }
    }

    /// What is known of a node in a family.
    pub(super) fn state(&self, name: &str, family: Family) -> PeerState {
        match (self.address(name, family), &self.peers) {
            (None, _) => PeerState::Mute,
            (Some(_), None) => PeerState::Answers,
            (Some(address), Some(peers)) => {
                let unasked = if *name == *self.own { PeerState::Answers } else { PeerState::Untried };
                peers.get(&address).copied().unwrap_or(unasked)
            }
        }
    }

    /// Whether this node has an address in a family.
    pub(super) fn can_send(&self, family: Family) -> bool {
        self.address(&self.own, family).is_some()
    }

    /// The names of nodes by their addresses.
    pub(super) fn names(&self) -> HashMap<IpAddr, Arc<str>> {
        let addresses =
            self.infos.iter().flat_map(|(name, it)| it.addresses.iter().map(move |ip| (ip, name)));
        addresses.map(|(ip, name)| (ip.to_canonical(), Arc::clone(name))).collect()
    }

    /// The number of a node, which may be new; [`NO_NODE`] if there are no more numbers.
    pub(super) fn number(&mut self, name: &Arc<str>) -> NodeNumber {
        if *name == self.own {
            return THIS_NODE;
        }
        if let Some(known) = self.numbers.get(name) {
            return *known;
        }
        let addresses = Family::ALL.into_iter().filter_map(|it| self.address(name, it));
        let previous = addresses.filter_map(|it| self.previous.get(&it).copied()).next();
        // An address that has come to another node gives that one no number twice.
        self.previous.retain(|_, it| previous != Some(*it));
        let number = previous.unwrap_or(self.highest.max(THIS_NODE) + 1);
        let number = if number > MAX_NODE { NO_NODE } else { number };
        self.highest = self.highest.max(number);
        self.numbers.insert(Arc::clone(name), number);
        number
    }

    /// The number of a node if it has one.
    pub(super) fn known_number(&self, name: &str) -> Option<NodeNumber> {
        if *name == *self.own { Some(THIS_NODE) } else { self.numbers.get(name).copied() }
    }

    /// Writes the nodes that differ; all are gone if nothing is forwarded.
    pub(super) fn write(&mut self, is_used: bool, updates: &mut MapUpdates) {
        let is_target = |name: &Arc<str>, family| self.targets.contains_key(&(Arc::clone(name), family));
        self.gone.retain(|name, _| Family::ALL.into_iter().any(|it| is_target(name, it)));
        let mut wanted = BTreeMap::new();
        if is_used {
            // Packets are taken from any node, also from one without endpoints.
            for it in Arc::clone(&self.infos).keys() {
                self.number(it);
            }
            let own = (&self.own, &THIS_NODE);
            for (name, number) in self.numbers.iter().chain([own]).filter(|(_, it)| **it != NO_NODE) {
                let of = |family| self.address(name, family).map(V6::from).unwrap_or_default();
                let v4 = V4::from_mapped(of(Family::V4)).unwrap_or_default();
                wanted.insert(u32::from(*number), ForwardNode { v4, v6: of(Family::V6) });
            }
        }
        let before = mem::replace(&mut self.addresses, wanted);
        for (number, _, now) in pairs(&before, &self.addresses).filter(|(_, before, now)| before != now) {
            updates.set(Table::ForwardNodes, number, Some(now.unwrap_or(&ForwardNode::default())));
        }
        // An address may have moved to another node.
        let before = mem::replace(&mut self.by_address, by_address(&self.addresses));
        for (address, _, now) in pairs(&before, &self.by_address).filter(|(_, before, now)| before != now) {
            updates.set(Table::ForwardNumbers, address, now);
        }
    }

    /// The first address of a node in a family, which is its primary one.
    fn address(&self, name: &str, family: Family) -> Option<IpAddr> {
        let node = with_address(&self.infos, name).or_else(|| self.gone.get(name))?;
        node.addresses.iter().map(IpAddr::to_canonical).find(|it| Family::of(*it) == family)
    }
}

/// A node, unless it has lost its addresses.
fn with_address<'a>(infos: &'a NodeInfos, name: &str) -> Option<&'a NodeInfo> {
    infos.get(name).filter(|it| !it.addresses.is_empty())
}

fn by_address(nodes: &BTreeMap<u32, ForwardNode>) -> BTreeMap<V6, u32> {
    let addresses = nodes.iter().rev().flat_map(|(number, it)| [(it.v4.mapped(), *number), (it.v6, *number)]);
    let is_set = |address: &V6| *address != V6::default() && *address != V4::default().mapped();
    addresses.filter(|(it, _)| is_set(it)).collect()
}
