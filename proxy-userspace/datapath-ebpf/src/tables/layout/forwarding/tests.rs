//! Rows and their seconds, across changes and processes.

mod histories;
mod stages;

use std::collections::BTreeMap;

use model::state::{ForwardedPort, NodeInfo};
use proptest::prelude::*;
use proxy_common::{
    forward::{ESTABLISHED_ONLY, ForwardNode, ForwardTables, KNOWN_FIRST, NO_NODE, Row, RowPair},
    tables::TCP,
};

use super::*;
use crate::tables::{layout::Layout, node_addresses::NodeAddresses, peers::PeerStates};

const OWN: &str = "n0";

fn service(name: &str, ip: u8, nodes: &[(u8, u32)]) -> ServiceState {
    let mut service = Service::new(ServiceName::new("default", name));
    service.load_balancer_ips = vec![IpAddr::from([203, 0, 113, ip])];
    service.ports = vec![ServicePort::new(Protocol::Tcp, 80.try_into().unwrap())];
    let mut state = ServiceState::new(service, []);
    let share =
        |(node, endpoints): &(u8, u32)| NodeShare { node: format!("n{node}").into(), endpoints: *endpoints };
    if !nodes.is_empty() {
        let nodes = nodes.iter().map(share).collect();
        state.forwarded = [ForwardedPort { index: 0, family: Family::V4, nodes, targets: [].into() }].into();
    }
    state
}

/// A node at 192.0.2.`address`.
fn node_at(address: u8) -> NodeInfo {
    NodeInfo { addresses: vec![[192, 0, 2, address].into()], ..NodeInfo::default() }
}

fn state(services: impl IntoIterator<Item = ServiceState>) -> NodeState {
    let node = |n: u8| (format!("n{n}").into(), node_at(n + 1));
    NodeState {
        services: services.into_iter().map(Arc::new).collect(),
        nodes: Arc::new((0..8).map(node).collect()),
        ..NodeState::default()
    }
}

fn key(ip: u8) -> FrontendKey6 {
    let address = V6::from(IpAddr::from([203, 0, 113, ip]));
    FrontendKey6 { address, port: Be16::new(80), protocol: TCP, zero: 0 }
}

/// The layout, and what was written.
struct Written {
    layout: Layout,
    tables: HashMap<Table, BTreeMap<Vec<u8>, Vec<u8>>>,
}

impl Default for Written {
    fn default() -> Self {
        let mut layout = Layout::default();
        layout.forwarding.nodes.own = OWN.into();
        Self { layout, tables: HashMap::new() }
    }
}

impl Written {
    /// One whose nodes are probed, and none has answered.
    fn probing() -> Self {
        let mut it = Self::default();
        it.layout.forwarding.nodes.set_peers(PeerStates::new());
        it
    }

    /// Probes say this of nodes, and nothing of others.
    fn probed(&mut self, states: &[(u8, PeerState)]) {
        let address = |n: u8| IpAddr::from([192, 0, 2, n + 1]);
        self.layout.forwarding.nodes.set_peers(states.iter().map(|(n, it)| (address(*n), *it)).collect());
        self.update(self.layout.state.clone());
    }

    /// The owners of rows; `None` stands for translated packets.
    fn owners(&self, ip: u8) -> BTreeSet<Option<u8>> {
        self.rows(ip).iter().map(|it| it[0]).collect()
    }

    fn update(&mut self, mut state: NodeState) {
        if self.layout.state.nodes == state.nodes {
            state.nodes = Arc::clone(&self.layout.state.nodes);
        }
        let (updates, _) = self.layout.update(&state, &NodeAddresses::default());
        self.apply(&updates);
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

    /// A frontend's entry, but for its counters.
    fn forward(&self, ip: u8) -> Option<Forward> {
        let forward = ForwardTables::forward(self, key(ip))?;
        Some(Forward { counters: ForwardCounters::default(), ..forward })
    }

    fn numbers(&self) -> HashMap<IpAddr, NodeNumber> {
        let numbers = self.layout.forwarding.nodes.by_address.iter();
        numbers.map(|(address, it)| ((*address).into(), *it as NodeNumber)).collect()
    }

    /// What another process finds of frontends with the same rows.
    fn previous(&self, ips: &[u8]) -> PreviousRows {
        let address = |it: Option<u8>| IpAddr::from(it.map_or([0; 4], |it| [192, 0, 2, it + 1]));
        let rows = self.rows(ips[0]).into_iter().map(|it| it.map(address)).collect();
        let forward = |ip: &u8| Forward { first: 7, ..self.forward(*ip).unwrap() };
        let frontends = ips.iter().map(|it| (key(*it), forward(it))).collect();
        PreviousRows { frontends, rows: [(7, rows)].into(), numbers: self.numbers() }
    }

    /// The owner and the second of each row, as the last byte of their addresses minus one; `None` for none.
    fn rows(&self, ip: u8) -> Vec<[Option<u8>; 2]> {
        let Some(Forward { first, mask, .. }) = self.forward(ip) else { return Vec::new() };
        let row = |position: u32| {
            let row = self.row(position).unwrap();
            [row.owner(), row.second()].map(|it| self.node(it))
        };
        (first..=first + mask).map(row).collect()
    }

    /// The node with a number.
    fn node(&self, number: NodeNumber) -> Option<u8> {
        let node = self.tables[&Table::ForwardNodes].get(&u32::from(number).to_ne_bytes()[..])?;
        let node: ForwardNode = bytemuck::pod_read_unaligned(node);
        std::net::Ipv4Addr::from(node.v4).octets()[3].checked_sub(1)
    }
}

impl ForwardTables for Written {
    fn forward(&self, key: FrontendKey6) -> Option<Forward> {
        Some(bytemuck::pod_read_unaligned(self.tables[&Table::Forwards].get(bytemuck::bytes_of(&key))?))
    }

    fn row(&self, position: u32) -> Option<Row> {
        let pair = self.tables[&Table::ForwardRows].get(&RowPair::of(position).to_ne_bytes()[..])?;
        Some(bytemuck::pod_read_unaligned::<RowPair>(pair).row(position))
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
    let previous = || first.previous(&[1, 2]);
    let mut second = Written::default();
    second.layout.forwarding.restore(previous());
    second.update(state([service("a", 1, &two), service("b", 2, &two)]));
    assert_eq!(second.rows(1), first.rows(1));
    assert_eq!(second.forward(1), second.forward(2));
    // What has changed meanwhile has the owner before.
    let mut third = Written::default();
    third.layout.forwarding.restore(previous());
    third.update(state([service("a", 1, &three)]));
    first.update(state([service("a", 1, &three)]));
    assert_eq!(third.rows(1), first.rows(1));
}

#[test]
fn the_numbers_of_nodes_outlive_the_process() {
    let mut first = Written::default();
    // In another order than that of names.
    first.update(state([service("a", 1, &[(7, 1)])]));
    first.update(state([service("a", 1, &[(3, 1), (5, 1)])]));
    let mut second = Written::default();
    second.layout.forwarding.restore(first.previous(&[1]));
    let mut without = state([service("a", 1, &[(3, 1), (5, 1)])]);
    Arc::make_mut(&mut without.nodes).remove("n1");
    Arc::make_mut(&mut without.nodes).insert("new".into(), node_at(99));
    second.update(without);
    let (before, now) = (first.numbers(), second.numbers());
    for (address, number) in &now {
        let is_new = *address == IpAddr::from([192, 0, 2, 99]);
        assert_eq!(before.get(address), Some(number).filter(|_| !is_new), "{address}");
        assert!(!is_new || !before.values().any(|it| it == number), "a number is given twice");
    }
}

#[test]
fn an_address_may_move_to_another_service() {
    let mut written = Written::default();
    let (two, one) = ([(0, 1), (1, 1)], [(1, 1)]);
    for (from, to) in [("a", "b"), ("b", "a")] {
        written.update(state([service(from, 1, &two)]));
        written.update(state([service(to, 1, &one)]));
        assert!(written.rows(1).iter().all(|it| it[0] == Some(1)), "from {from} to {to}");
        written.update(state([]));
        assert_eq!(written.forward(1), None);
    }
}

#[test]
fn what_cannot_be_received_is_translated() {
    let mut written = Written::default();
    written.update(state([service("a", 1, &[(0, 1), (9, 1)])]));
    assert_eq!(written.rows(1), [[None, None]], "n9 has no address");
    let mut with_it = state([service("a", 1, &[(0, 1), (9, 1)])]);
    Arc::make_mut(&mut with_it.nodes).insert("n9".into(), node_at(10));
    written.update(with_it);
    assert_eq!(written.owners(1), [Some(0), Some(9)].into());
    written.update(state([service("a", 1, &[])]));
    assert_eq!(written.forward(1), None);
    assert!(!written.layout.forwarding.is_used());
    assert!(written.tables[&Table::ForwardNumbers].is_empty());
}

#[test]
fn a_node_that_goes_before_its_endpoints_keeps_its_rows() {
    let mut written = Written::default();
    let nodes = [(0, 1), (1, 1), (2, 1)];
    written.update(state([service("a", 1, &nodes)]));
    let before = written.rows(1);
    let mut without = state([service("a", 1, &nodes)]);
    Arc::make_mut(&mut without.nodes).remove("n1");
    Arc::make_mut(&mut without.nodes).insert("n2".into(), NodeInfo::default());
    written.update(without.clone());
    assert_eq!(written.rows(1), before);
    without.services = state([service("a", 1, &[(0, 1)])]).services;
    written.update(without);
    assert!(written.rows(1).iter().all(|it| *it == [Some(0), None]), "what has gone is nobody's second");
}

use PeerState::{Answers, Mute, Silent, Untried};

#[test]
fn forwarding_begins_when_every_node_has_answered() {
    let mut written = Written::probing();
    written.update(state([service("a", 1, &[(0, 1), (1, 1), (2, 1)]), service("b", 2, &[(0, 1)])]));
    let (own, wanted) = written.layout.forwarding.nodes.take_peers().unwrap();
    assert_eq!(own, [[192, 0, 2, 1].into()].into());
    assert_eq!(wanted, [[192, 0, 2, 2].into(), [192, 0, 2, 3].into()].into());
    assert_eq!(written.layout.forwarding.nodes.take_peers(), None);
    assert_eq!(written.owners(2), [Some(0)].into(), "this node need not be asked");
    for states in [[(1, Untried), (2, Untried)], [(1, Answers), (2, Untried)], [(1, Answers), (2, Mute)]] {
        written.probed(&states);
        assert_eq!(written.rows(1), [[None, None]], "{states:?}");
    }
    written.probed(&[(1, Answers), (2, Answers)]);
    assert_eq!(written.owners(1), [Some(0), Some(1), Some(2)].into());
    assert!(written.rows(1).iter().all(|it| it[1].is_none()));
}

#[test]
fn the_rows_of_a_silent_node_go_to_others_and_return() {
    let mut written = Written::probing();
    written.update(state([service("a", 1, &[(0, 1), (1, 1), (2, 1)])]));
    written.probed(&[(1, Answers), (2, Answers)]);
    let before = written.rows(1);
    written.probed(&[(1, Answers), (2, Silent)]);
    assert_eq!(written.owners(1), [Some(0), Some(1)].into());
    for ([owner, _], now) in before.iter().zip(written.rows(1)) {
        assert!(*owner != Some(2) || now[1] == Some(2), "it may know connections yet");
    }
    written.probed(&[(1, Answers), (2, Answers)]);
    for ([owner, _], now) in before.iter().zip(written.rows(1)) {
        assert_eq!(*owner, now[0]);
    }
    // All that is left if nobody else serves.
    written.update(state([service("a", 1, &[(1, 1), (2, 1)])]));
    written.probed(&[(1, Silent), (2, Silent)]);
    assert_eq!(written.owners(1), [Some(1), Some(2)].into());
}

#[test]
fn a_node_gets_rows_when_it_answers_and_the_others_go_on() {
    let mut written = Written::probing();
    written.update(state([service("a", 1, &[(0, 1), (1, 1)])]));
    written.probed(&[(1, Answers)]);
    written.update(state([service("a", 1, &[(0, 1), (1, 1), (2, 1)])]));
    assert!(written.layout.forwarding.nodes.take_peers().is_some());
    for states in [[(1, Answers), (2, Untried)], [(1, Answers), (2, Mute)]] {
        written.probed(&states);
        assert_eq!(written.owners(1), [Some(0), Some(1)].into(), "{states:?}");
    }
    written.probed(&[(1, Answers), (2, Answers)]);
    assert_eq!(written.owners(1), [Some(0), Some(1), Some(2)].into());
}

#[test]
fn after_a_restart_rows_stay_until_nodes_prove_silent() {
    let services = || state([service("a", 1, &[(0, 1), (1, 1), (2, 1)])]);
    let mut first = Written::default();
    first.update(services());
    let mut second = Written::probing();
    second.layout.forwarding.restore(first.previous(&[1]));
    second.update(services());
    assert_eq!(second.rows(1), first.rows(1));
    second.probed(&[(1, Untried), (2, Answers)]);
    assert_eq!(second.rows(1), first.rows(1));
    second.probed(&[(1, Mute), (2, Answers)]);
    assert_eq!(second.owners(1), [Some(0), Some(2)].into());
    second.probed(&[(1, Answers), (2, Answers)]);
    assert_eq!(second.owners(1), [Some(0), Some(1), Some(2)].into());
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
            full.apply(&long.layout.full_table(table));
            prop_assert!(long.layout.rows(table) <= long.layout.required_capacity(table));
        }
        for (ip, nodes) in (1..).zip(last) {
            let owners = |it: &Written| it.rows(ip).iter().map(|it| it[0]).collect::<Vec<_>>();
            prop_assert_eq!(owners(&long), owners(&short));
            prop_assert_eq!(long.rows(ip), full.rows(ip));
            prop_assert_eq!(long.rows(ip).is_empty(), nodes.is_empty());
        }
    }
}

impl Written {
    /// One beside a packet path, which has no state yet.
    fn beside_packets() -> Self {
        let mut it = Self::default();
        it.layout.forwarding.set_packet_path(PacketPath::Starting);
        it
    }

    /// The packet path has this state, with a second chance for IPv4; then the state is applied again. Returns whether that was due.
    fn packets_have(&mut self, state: &NodeState) -> bool {
        let second_chance = vec![Family::V4];
        let is_due =
            self.layout.forwarding.set_packet_path(PacketPath::Has { state: state.clone(), second_chance });
        self.update(state.clone());
        is_due
    }

    /// Both have this state.
    fn both(&mut self, state: &NodeState) {
        self.update(state.clone());
        self.packets_have(state);
    }

    /// The flags of a frontend; `None` if it is not in the tables, or translated.
    fn flags(&self, ip: u8) -> Option<u32> {
        let forward = self.forward(ip)?;
        (self.owners(ip) != [None].into()).then_some(forward.flags)
    }
}

const ENDED: u32 = KNOWN_FIRST | ESTABLISHED_ONLY;

/// The state with a Service that is forwarded to these nodes, or is translated.
fn web(nodes: &[(u8, u32)]) -> NodeState {
    state([service("web", 1, nodes)])
}
