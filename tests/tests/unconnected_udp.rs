//! One unconnected UDP socket and many Services: it keeps its endpoint at each, and each answers in its own name.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    time::Duration,
};

use aya::maps::{HashMap, Map, MapData};
use tests::{Agent, Build, TestNode, eventually, manifest::Service, test_node::expected_dump};

const LIMIT: Duration = Duration::from_secs(20);
/// Far more than a socket's own storage has slots for.
const MANY: u16 = 100;
/// Some more than that, for what changes often.
const SOME: u16 = 10;

fn ips(n: u16) -> [IpAddr; 2] {
    [[10, 96, 1, n as u8].into(), [0xfd00, 0x10, 0x96, 0, 0, 0, 1, n].into()]
}

fn endpoint(n: u16) -> [IpAddr; 2] {
    [[10, 244, 1, n as u8].into(), [0xfd00, 0x10, 0x244, 0, 0, 0, 1, n].into()]
}

/// So many Services, each with these endpoints, at ports of its own.
fn services(number: u16, endpoints: &[u16]) -> Vec<Service> {
    let service = |n| {
        let service = Service::new(&format!("s-{n}"), &ips(n)).port("", "UDP", 53, 9000 + n);
        endpoints.iter().fold(service, |it, n| it.endpoint(&format!("e-{n}"), &endpoint(*n)))
    };
    (0..number).map(service).collect()
}

/// How a client writes a Service's address.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    V4,
    V6,
    Mapped,
}

impl Kind {
    const ALL: [Self; 3] = [Self::V4, Self::V6, Self::Mapped];

    fn address(self, service: u16) -> SocketAddr {
        let ip = match (self, ips(service)) {
            (Self::V4, [v4, _]) => v4,
            (Self::V6, [_, v6]) => v6,
            (Self::Mapped, [IpAddr::V4(v4), _]) => v4.to_ipv6_mapped().into(),
            (Self::Mapped, _) => unreachable!("the first address is of IPv4"),
        };
        SocketAddr::new(ip, 53)
    }
}

struct Node {
    services: u16,
    /// A server at every endpoint's port of every Service: its socket answers when the test says so.
    servers: BTreeMap<(u16, u16), [UdpSocket; 2]>,
    agent: Option<Agent>,
    world: TestNode,
}

impl Node {
    fn or_skip(test: &str, services: u16, arguments: &[&str]) -> Option<Self> {
        let world = TestNode::or_skip(test)?;
        let mut servers = BTreeMap::new();
        for n in 1..=3 {
            world.netns().add_address(endpoint(n)[1]).unwrap();
            for service in 0..services {
                let sockets = endpoint(n).map(|ip| UdpSocket::bind((ip, 9000 + service)).unwrap());
                sockets.iter().for_each(|it| it.set_nonblocking(true).unwrap());
                servers.insert((service, n), sockets);
            }
        }
        world.write(&self::services(services, &[1, 2, 3]));
        let mut node = Self { services, servers, agent: None, world };
        node.start(arguments);
        Some(node)
    }

    fn start(&mut self, arguments: &[&str]) {
        let setting = self.world.command(Build::Product);
        let setting = arguments.iter().fold(setting, tests::agent::AgentCommand::arg);
        let mut agent = setting.start(self.world.sandbox()).unwrap();
        let log = agent.log_path().to_owned();
        let is_attached = || std::fs::read_to_string(&log).is_ok_and(|it| it.contains("state active"));
        agent.wait_until(LIMIT, is_attached).unwrap();
        self.agent = Some(agent);
    }

    fn apply(&mut self, endpoints: &[u16]) {
        let services = services(self.services, endpoints);
        self.world.write(&services);
        let expected = expected_dump(&services);
        let Self { agent, world, .. } = self;
        let is_in_force = || world.dump(Build::Product).is_ok_and(|it| it == expected);
        agent.as_mut().unwrap().wait_until(LIMIT, is_in_force).unwrap();
    }

    /// Answers what came for a Service, and says at which endpoint.
    #[track_caller]
    fn answer(&self, service: u16) -> u16 {
        for n in 1..=3 {
            for server in &self.servers[&(service, n)] {
                if let Ok((_, from)) = server.recv_from(&mut [0; 64]) {
                    server.send_to(&service.to_ne_bytes(), from).unwrap();
                    return n;
                }
            }
        }
        panic!("nothing came for Service {service}");
    }

    /// A socket asks these Services.
    #[track_caller]
    fn ask((kind, socket): &(Kind, UdpSocket), services: u16) {
        for service in 0..services {
            socket.send_to(b"who?", kind.address(service)).unwrap();
        }
    }

    /// One endpoint loses everything that came to it so far.
    fn discard(&self, n: u16) {
        let servers = (0..self.services).flat_map(|service| &self.servers[&(service, n)]);
        servers.for_each(|it| while it.recv_from(&mut [0; 64]).is_ok() {});
    }

    /// One endpoint answers everything that came to it so far, and the sockets hear it from each of the Services.
    #[track_caller]
    fn answer_late(&self, n: u16, askers: &[(Kind, UdpSocket)], services: u16) {
        for service in 0..services {
            let servers = self.servers[&(service, n)].iter();
            let mut answered = 0;
            for server in servers {
                while let Ok((_, from)) = server.recv_from(&mut [0; 64]) {
                    server.send_to(&service.to_ne_bytes(), from).unwrap();
                    answered += 1;
                }
            }
            assert_eq!(answered, askers.len(), "what came to endpoint {n} for Service {service}");
            for (kind, socket) in askers {
                let (mut answer, address) = ([0; 2], kind.address(service));
                let (_, from) = socket.recv_from(&mut answer).unwrap();
                assert_eq!(from, address, "{kind:?}, {services} Services: who answers from endpoint {n}");
                assert_eq!(u16::from_ne_bytes(answer), service);
            }
        }
    }

    /// A socket asks every Service, and only then hears the answers: who each Service was.
    #[track_caller]
    fn round(&self, asker: &(Kind, UdpSocket)) -> Vec<u16> {
        Self::ask(asker, self.services);
        let (kind, socket) = asker;
        let answerers = (0..self.services).map(|it| self.answer(it)).collect();
        let mut waiting: BTreeSet<_> = (0..self.services).map(|it| kind.address(it)).collect();
        while !waiting.is_empty() {
            let mut answer = [0; 2];
            let (_, from) = socket.recv_from(&mut answer).unwrap();
            assert_eq!(from, kind.address(u16::from_ne_bytes(answer)), "the source of a reply");
            assert!(waiting.remove(&from), "{from} answers twice");
        }
        answerers
    }

    /// How many entries there are beyond the sockets' own storage.
    fn entries(&self) -> usize {
        let peers = self.world.sandbox().pins().join("sock_nat1/udp_nat");
        let map = Map::from_map_data(MapData::from_pin(peers).unwrap()).unwrap();
        let peers: HashMap<MapData, [u64; 4], [u64; 6]> = HashMap::try_from(map).unwrap();
        peers.keys().count()
    }
}

fn socket(kind: Kind) -> (Kind, UdpSocket) {
    let any = if kind == Kind::V4 { "0.0.0.0:0" } else { "[::]:0" };
    let socket = UdpSocket::bind(any).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    (kind, socket)
}

#[test]
fn one_socket_talks_to_any_number_of_services() {
    let Some(mut node) = Node::or_skip("one_socket_talks_to_any_number_of_services", MANY, &[]) else {
        return;
    };
    assert_eq!(node.entries(), 0);
    let sockets = Kind::ALL.map(socket);
    let first = sockets.each_ref().map(|it| node.round(it));
    for answerers in &first {
        assert!((1..=3).all(|n| answerers.contains(&n)), "100 choices of three: {answerers:?}");
    }
    assert_eq!(sockets.each_ref().map(|it| node.round(it)), first);
    // Endpoint 3 goes: whoever was there goes elsewhere, and stays there when it comes back.
    node.apply(&[1, 2]);
    let second = sockets.each_ref().map(|it| node.round(it));
    for (before, after) in first.iter().flatten().zip(second.iter().flatten()) {
        assert!(after == before || (*before == 3 && *after != 3), "from {before} to {after}");
    }
    node.apply(&[1, 2, 3]);
    assert_eq!(sockets.each_ref().map(|it| node.round(it)), second);
    let one = socket(Kind::V4);
    node.round(&one);
    // Who calls from the root cgroup may remember as much.
    let another = socket(Kind::V4);
    let root = node.world.sandbox().call_from_root().unwrap();
    let answerers = node.round(&another);
    assert_eq!(node.round(&another), answerers);
    drop((root, another));
    let before = node.entries();
    drop(one);
    assert!(node.entries() < before);
    drop(sockets);
    assert_eq!(node.entries(), 0, "closed sockets leave nothing");
}

#[test]
fn an_answer_under_way_when_its_endpoint_goes_is_the_services() {
    let Some(mut node) =
        Node::or_skip("an_answer_under_way_when_its_endpoint_goes_is_the_services", SOME, &[])
    else {
        return;
    };
    // In the slots of its own storage, out of these when they are full, and beyond them.
    for services in [1, 2, 4, 5, SOME] {
        let askers = Kind::ALL.map(socket);
        node.apply(&[1]);
        askers.iter().for_each(|it| Node::ask(it, services));
        for (before, now) in [(1, 2), (2, 3), (3, 1)] {
            node.apply(&[now]);
            askers.iter().for_each(|it| Node::ask(it, services));
            node.answer_late(before, &askers, services);
        }
        node.answer_late(1, &askers, services);
        assert_eq!(node.entries() == 0, services <= 2);
        drop(askers);
        assert_eq!(node.entries(), 0, "closed sockets leave nothing");
    }
}

#[test]
fn an_answer_under_way_is_the_services_where_there_is_hardly_room() {
    let test = "an_answer_under_way_is_the_services_where_there_is_hardly_room";
    let Some(mut node) = Node::or_skip(test, SOME, &["--udp-addresses", "2"]) else { return };
    let asker = socket(Kind::V4);
    // The slots, and one more: three of four entries are taken.
    Node::ask(&asker, 5);
    for now in [1, 2, 3, 1, 2, 3] {
        node.apply(&[now]);
        // Whatever was before makes room for what is.
        Node::ask(&asker, 5);
        (1..=3).filter(|it| *it != now).for_each(|it| node.discard(it));
        for _ in 0..2 {
            node.discard(now);
            Node::ask(&asker, 5);
            node.answer_late(now, std::slice::from_ref(&asker), 5);
        }
    }
    drop(asker);
    assert_eq!(node.entries(), 0);
}

#[test]
fn what_a_socket_remembers_of_many_services_outlives_the_proxy() {
    let Some(mut node) =
        Node::or_skip("what_a_socket_remembers_of_many_services_outlives_the_proxy", MANY, &[])
    else {
        return;
    };
    let sockets = Kind::ALL.map(socket);
    let first = sockets.each_ref().map(|it| node.round(it));
    node.agent.take().unwrap().kill9().unwrap();
    assert_eq!(sockets.each_ref().map(|it| node.round(it)), first);
    // It has the room that it was given first.
    node.start(&["--udp-addresses", "2"]);
    assert_eq!(sockets.each_ref().map(|it| node.round(it)), first);
    drop(sockets);
    assert_eq!(node.entries(), 0);
}

#[test]
fn what_cannot_be_remembered_is_not_sent() {
    let Some(node) = Node::or_skip("what_cannot_be_remembered_is_not_sent", MANY, &["--udp-addresses", "8"])
    else {
        return;
    };
    let (kind, full) = socket(Kind::V4);
    let sent = |socket: &UdpSocket| {
        (0..MANY).take_while(|it| socket.send_to(b"who?", kind.address(*it)).is_ok()).count()
    };
    // Sixteen entries: a head, and two for each address; four addresses need none.
    assert_eq!(sent(&full), 4 + 7);
    let error = full.send_to(b"who?", kind.address(11)).unwrap_err();
    let expected =
        if tests::requirements::kernel_at_least(5, 18) { nix::libc::ENOBUFS } else { nix::libc::EPERM };
    assert_eq!(error.raw_os_error(), Some(expected));
    // What it has it keeps.
    for service in 0..11 {
        node.answer(service);
        let mut answer = [0; 2];
        assert_eq!(full.recv_from(&mut answer).unwrap().1, kind.address(u16::from_ne_bytes(answer)));
    }
    // Another socket has its own storage all the same.
    let (_, other) = socket(kind);
    assert_eq!(sent(&other), 4);
    // A stranger's datagrams are nobody's business.
    let stranger = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    full.send_to(b"direct", stranger.local_addr().unwrap()).unwrap();
    drop(full);
    assert_eq!(node.entries(), 0);
    assert_eq!(sent(&other), 11);
}

#[test]
fn whoever_asks_the_canary_takes_no_room_of_others() {
    let Some(node) = Node::or_skip("whoever_asks_the_canary_takes_no_room_of_others", MANY, &[]) else {
        return;
    };
    let (kind, socket) = socket(Kind::V4);
    // The socket's own storage is full, and the head, the address and the endpoint of a fifth are beyond it.
    for service in 0..5 {
        socket.send_to(b"who?", kind.address(service)).unwrap();
    }
    let before = node.entries();
    assert_eq!(before, 3);
    for port in 20_000..21_000_u16 {
        socket.send_to(b"who?", (Ipv4Addr::new(127, 107, 112, 101), port)).unwrap();
    }
    assert_eq!(node.entries(), before);
    // It is led all the same, and the answer is the canary's.
    let server = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    server.set_read_timeout(Some(LIMIT)).unwrap();
    let canary = SocketAddr::from(([127, 107, 112, 101], server.local_addr().unwrap().port()));
    socket.send_to(b"who?", canary).unwrap();
    let (_, from) = server.recv_from(&mut [0; 64]).unwrap();
    server.send_to(b"me", from).unwrap();
    assert_eq!(socket.recv_from(&mut [0; 64]).unwrap().1, canary);
    drop(socket);
    assert_eq!(node.entries(), 0);
}

#[test]
fn what_a_socket_of_very_many_addresses_leaves_over_is_swept() {
    let Some(world) = TestNode::or_skip("what_a_socket_of_very_many_addresses_leaves_over_is_swept") else {
        return;
    };
    let addresses: Vec<_> = (0..400_u16).map(|n| IpAddr::from([10, 97, (n >> 8) as u8, n as u8])).collect();
    let service = |(n, ip): (usize, &IpAddr)| {
        Service::new(&format!("s-{n}"), &[*ip]).port("", "UDP", 53, 9000).endpoint("e", &[endpoint(1)[0]])
    };
    world.write(&addresses.iter().enumerate().map(service).collect::<Vec<_>>());
    let mut node = Node { services: 0, servers: BTreeMap::new(), agent: None, world };
    node.start(&[]);
    let (_, socket) = socket(Kind::V4);
    for ip in &addresses {
        socket.send_to(b"who?", (*ip, 53)).unwrap();
    }
    assert_eq!(node.entries(), 1 + 396 + 1, "the head, the addresses, and the one endpoint of all");
    // The one who sweeps need not be the one who was there.
    node.agent.take().unwrap().kill9().unwrap();
    drop(socket);
    assert!(node.entries() > 0, "one run of the program does not get that far");
    node.start(&[]);
    assert!(eventually(LIMIT, || node.entries() == 0));
}
