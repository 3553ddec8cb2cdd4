//! Connections through a cluster whose nodes learn of changes one after another: the way of each packet by the decisions of the
//! kernel programs, with what conntrack knows on each node.

use proxy_common::forward::{self, Flow, Way};

use super::*;

const NODES: u8 = 5;

/// A node that packets enter by, and that serves.
struct Node {
    number: u8,
    written: Written,
    /// Whether it has heard of nobody after the last change.
    was_cut_off: bool,
    /// Connections before the end of a silence in which endpoints changed: it has not seen who served them.
    unseen: HashSet<u16>,
    /// The last change that it has applied.
    version: usize,
    /// The connections that conntrack knows.
    known: HashSet<u16>,
    /// The owners that the row of each connection has had here since that began.
    owners: HashMap<u16, Vec<Option<u8>>>,
}

#[derive(Clone, Copy, Debug)]
struct Connection {
    /// The client's port.
    port: u16,
    /// The node that knows it.
    at: u8,
    /// The node of its endpoint.
    endpoint: u8,
    /// Whether it was translated where it entered. Its packets must always enter there.
    is_translated: bool,
    /// The last change before it began, on the node that it entered by.
    version: usize,
}

#[derive(Clone, Debug)]
enum Change {
    /// The Service has these endpoints on nodes.
    Endpoints(Vec<(u8, u32)>),
    /// A node does not answer any more, or all do.
    Silent(Option<u8>),
    Forwarded(bool),
    /// The proxy of a node starts anew.
    Restart(u8),
}

/// What all nodes will have.
#[derive(Clone)]
struct Wanted {
    endpoints: Vec<(u8, u32)>,
    silent: Option<u8>,
    /// Whether the endpoints have changed while a node was silent.
    is_changed_in_silence: bool,
    is_forwarded: bool,
}

struct Cluster {
    nodes: Vec<Node>,
    wanted: Wanted,
    version: usize,
    connections: Vec<Connection>,
    next_port: u16,
}

fn flow(port: u16, continues: bool) -> Flow {
    let address = |it: [u8; 4]| V6::from(IpAddr::from(it));
    Flow {
        source: address([198, 51, 100, 7]),
        destination: address([203, 0, 113, 1]),
        source_port: Be16::new(port),
        destination_port: Be16::new(80),
        protocol: TCP,
        continues,
    }
}

impl Node {
    fn new(number: u8) -> Self {
        let mut written = Written::beside_packets();
        written.layout.forwarding.nodes.own = format!("n{number}").into();
        written.layout.forwarding.nodes.set_peers(PeerStates::new());
        let (known, owners) = (HashSet::new(), HashMap::new());
        Self { number, written, was_cut_off: false, unseen: HashSet::new(), version: 0, known, owners }
    }

    fn apply(&mut self, wanted: &Wanted, version: usize) {
        let nodes = if wanted.is_forwarded { &wanted.endpoints[..] } else { &[] };
        self.written.both(&web(nodes));
        let is_cut_off = wanted.silent == Some(self.number);
        if wanted.is_changed_in_silence && self.was_cut_off {
            self.unseen.extend(self.owners.keys());
        }
        if mem::replace(&mut self.was_cut_off, is_cut_off) && !is_cut_off {
            self.probed(Some(self.number));
        }
        // Who hears of nobody changes nothing.
        self.probed(wanted.silent.filter(|_| !is_cut_off));
        self.version = version;
    }

    /// All others but one answer.
    fn probed(&mut self, silent: Option<u8>) {
        let answer = |n| if silent == Some(n) { Silent } else { Answers };
        self.written.probed(&(0..NODES).map(|n| (n, answer(n))).collect::<Vec<_>>());
        for (port, owners) in &mut self.owners {
            let owner = self.written.owner(*port);
            if owners.last() != Some(&owner) {
                owners.push(owner);
            }
        }
    }

    fn restart(&mut self) {
        let mut next = Self::new(self.number).written;
        if self.written.forward(1).is_some() {
            next.layout.forwarding.restore(self.written.previous(&[1]));
        }
        self.written = next;
    }

    /// The second of a packet that this node serves unless it does not know its connection, or where it goes.
    fn way(&self, port: u16, continues: bool) -> Way {
        forward::way(&self.written, &flow(port, continues))
    }
}

impl Written {
    /// The owner of the row of a connection.
    fn owner(&self, port: u16) -> Option<u8> {
        let flow = flow(port, true);
        let forward = ForwardTables::forward(self, flow.frontend())?;
        self.node(forward::row(self, &forward, &flow)?.owner())
    }
}

impl Cluster {
    fn new() -> Self {
        let endpoints = vec![(0, 1), (1, 1), (2, 2)];
        let wanted = Wanted { endpoints, silent: None, is_changed_in_silence: false, is_forwarded: false };
        let mut nodes: Vec<_> = (0..NODES).map(Node::new).collect();
        nodes.iter_mut().for_each(|it| it.apply(&wanted, 0));
        Self { nodes, wanted, version: 0, connections: Vec::new(), next_port: 1 }
    }

    fn node(&self, number: u8) -> &Node {
        &self.nodes[usize::from(number)]
    }

    /// Nodes learn of a change in this order, while connections go on and begin.
    fn change(&mut self, change: &Change, first: u8) -> Result<(), TestCaseError> {
        self.version += 1;
        match change {
            Change::Endpoints(endpoints) => {
                self.wanted.endpoints.clone_from(endpoints);
                self.wanted.is_changed_in_silence |= self.wanted.silent.is_some();
            }
            Change::Silent(node) => self.wanted.silent = *node,
            // Rows that stay for connections alone are not given to others.
            Change::Forwarded(false) if self.wanted.silent.is_some() => {}
            Change::Forwarded(it) => self.wanted.is_forwarded = *it,
            Change::Restart(_) => {}
        }
        let has_endpoint = |node: u8| self.wanted.endpoints.iter().any(|it| it.0 == node);
        self.connections.retain(|it| has_endpoint(it.endpoint));
        for number in (0..NODES).map(|it| (it + first) % NODES) {
            let (wanted, version) = (self.wanted.clone(), self.version);
            let node = &mut self.nodes[usize::from(number)];
            if matches!(change, Change::Restart(it) if *it == number) {
                node.restart();
            }
            node.apply(&wanted, version);
            self.go_on()?;
            self.begin(number);
            self.begin((number + 2) % NODES);
        }
        self.wanted.is_changed_in_silence &= self.wanted.silent.is_some();
        Ok(())
    }

    /// Whether routers send packets to a node. They take longer to find it again than it takes to find others.
    fn is_next_hop(&self, node: u8) -> bool {
        self.wanted.silent != Some(node) && !self.node(node).was_cut_off
    }

    /// A connection begins at a node.
    fn begin(&mut self, ingress: u8) {
        let endpoints = &self.wanted.endpoints;
        if endpoints.is_empty() || !self.is_next_hop(ingress) {
            return;
        }
        let port = self.next_port;
        self.next_port += 1;
        let node = self.node(ingress);
        let way = node.way(port, false);
        let at = match way.onward() {
            Some(number) => node.written.node(number),
            None => Some(ingress),
        };
        let (Some(at), is_translated) = (at, way == Way::Pass) else { return };
        // One that gets to a silent node does not begin.
        if self.wanted.silent == Some(at) {
            return;
        }
        let local = endpoints.iter().map(|it| it.0).find(|it| *it == at && !is_translated);
        let endpoint = local.unwrap_or(endpoints[usize::from(port) % endpoints.len()].0);
        self.connections.push(Connection { port, at, endpoint, is_translated, version: node.version });
        self.nodes[usize::from(at)].known.insert(port);
        let owner = self.node(ingress).written.owner(port);
        for it in &mut self.nodes {
            // Some nodes have learned of more changes.
            let mut owners = vec![owner, it.written.owner(port)];
            owners.dedup();
            it.owners.insert(port, owners);
        }
    }

    /// A packet of each connection enters by each node.
    fn go_on(&self) -> Result<(), TestCaseError> {
        for it in &self.connections {
            if self.wanted.silent == Some(it.at) {
                continue;
            }
            let hops = (0..NODES).filter(|n| self.is_next_hop(*n));
            for ingress in hops.filter(|n| !it.is_translated || *n == it.at) {
                let node = self.node(ingress);
                // A node that is behind may not forward it yet; and a row has one second.
                let is_owed = node.version >= it.version && node.owners[&it.port].len() <= 2;
                let is_owed = is_owed && !node.unseen.contains(&it.port);
                let is_known = self.serves(ingress, it.port) == Some(it.at);
                prop_assert!(is_known || !is_owed, "{it:?} by n{ingress}: {:?}", node.owners[&it.port]);
            }
        }
        Ok(())
    }

    /// The node that serves a packet of a connection that exists.
    fn serves(&self, ingress: u8, port: u16) -> Option<u8> {
        let knows = |it: &u8| self.node(*it).known.contains(&port);
        let node = self.node(ingress);
        let at = |number| node.written.node(number);
        // What is wrapped for a node, and for its second.
        let wrapped = |number, second| at(number).filter(knows).or_else(|| at(second).filter(knows));
        match node.way(port, true) {
            Way::Pass => Some(ingress).filter(knows),
            Way::To { node, second, .. } => wrapped(node, second),
            Way::Here { second, .. } => Some(ingress).filter(knows).or_else(|| {
                let flow = flow(port, true);
                let forward = ForwardTables::forward(&node.written, flow.frontend())?;
                let (second, is_owner) = forward::second_of(forward::priority(second));
                let after = forward::second_after(&node.written, &forward, &flow, second);
                wrapped(second, if is_owner { after } else { NO_NODE })
            }),
        }
    }
}

fn any_change() -> impl Strategy<Value = Change> {
    let endpoints = prop::collection::btree_map(0..NODES, 1_u32..3, 0..5);
    prop_oneof![
        4 => endpoints.prop_map(|it| Change::Endpoints(it.into_iter().collect())),
        2 => prop::option::of(0..NODES).prop_map(Change::Silent),
        2 => any::<bool>().prop_map(Change::Forwarded),
        1 => (0..NODES).prop_map(Change::Restart),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    /// By any node that has learned what the one that it began at knew, unless its row has had three owners meanwhile.
    #[test]
    fn a_connection_goes_on_while_its_endpoint_serves(changes in prop::collection::vec((any_change(), 0..NODES), 1..10)) {
        let mut cluster = Cluster::new();
        for (change, first) in changes {
            cluster.change(&change, first)?;
        }
    }
}
