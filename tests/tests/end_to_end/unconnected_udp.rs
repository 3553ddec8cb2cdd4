//! One unconnected UDP socket and many Services: it keeps an endpoint of each, and replies bear the Service's address.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use aya::maps::{HashMap, MapData};
use tests::{Service, TIMEOUT, TestNode, endpoint, eventually, kernel_at_least, run, udp_socket};

use super::held_connections::allow_open_files;

/// Far more Services than the one that a socket has in its slot.
const MANY: u16 = 100;
fn ips(n: u16) -> [IpAddr; 2] {
    [[10, 96, 1, n as u8].into(), [0xfd00, 0x10, 0x96, 0, 0, 0, 1, n].into()]
}

/// A number of Services with these endpoints, each with a target port of its own.
fn services(number: u16, endpoints: &[u8]) -> Vec<Service> {
    let service = |n| {
        let service = Service::new(&format!("s-{n}"), &ips(n)).port("", "UDP", 53, 9000 + n);
        service.endpoints(endpoints.iter().copied())
    };
    (0..number).map(service).collect()
}

/// The notation in which a client uses a Service's address.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Notation {
    V4,
    V6,
    Mapped,
}

impl Notation {
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

struct Client {
    notation: Notation,
    socket: UdpSocket,
}

impl Client {
    fn new(notation: Notation) -> Self {
        Self { notation, socket: udp_socket(notation.address(0)).unwrap() }
    }

    fn all() -> [Self; 3] {
        [Notation::V4, Notation::V6, Notation::Mapped].map(Self::new)
    }

    fn try_send(&self, service: u16) -> std::io::Result<usize> {
        self.socket.send_to(b"who?", self.notation.address(service))
    }

    /// Sends a request to every Service.
    #[track_caller]
    fn send_to_all(&self) {
        for service in 0..MANY {
            self.try_send(service).unwrap();
        }
    }

    /// Receives a reply, which must bear the address of its Service: the Service.
    #[track_caller]
    fn receive(&self) -> u16 {
        let mut reply = [0; 2];
        let (_, from) = self.socket.recv_from(&mut reply).unwrap();
        let service = u16::from_ne_bytes(reply);
        assert_eq!(from, self.notation.address(service), "the source of a reply to {:?}", self.notation);
        service
    }
}

struct Node {
    /// Both sockets of every endpoint of every Service; they reply when the test says so.
    servers: BTreeMap<(u16, u8), [UdpSocket; 2]>,
    node: TestNode,
}

impl Node {
    fn or_skip(arguments: &[&str]) -> Option<Self> {
        let mut node = TestNode::or_skip()?;
        let mut servers = BTreeMap::new();
        for n in 1..=3 {
            node.netns().add_address(endpoint(n)[1]).unwrap();
            for service in 0..MANY {
                let sockets = endpoint(n).map(|ip| UdpSocket::bind((ip, 9000 + service)).unwrap());
                sockets.iter().for_each(|it| it.set_nonblocking(true).unwrap());
                servers.insert((service, n), sockets);
            }
        }
        node.write(&services(MANY, &[1, 2, 3]));
        node.start(arguments);
        Some(Self { servers, node })
    }

    #[track_caller]
    fn apply(&mut self, endpoints: &[u8]) {
        self.node.apply(&services(MANY, endpoints));
    }

    /// Replies to the next request for a Service: the endpoint that received it.
    #[track_caller]
    fn reply(&self, service: u16) -> u8 {
        for n in 1..=3 {
            for server in &self.servers[&(service, n)] {
                if let Ok((_, from)) = server.recv_from(&mut [0; 64]) {
                    server.send_to(&service.to_ne_bytes(), from).unwrap();
                    return n;
                }
            }
        }
        panic!("no endpoint of Service {service} received a request");
    }

    /// A client sends a request to every Service before it receives the replies: the endpoint of each Service.
    #[track_caller]
    fn round(&self, client: &Client) -> Vec<u8> {
        client.send_to_all();
        let endpoints = (0..MANY).map(|it| self.reply(it)).collect();
        let mut waiting: BTreeSet<_> = (0..MANY).collect();
        while !waiting.is_empty() {
            let service = client.receive();
            assert!(waiting.remove(&service), "Service {service} replies twice");
        }
        endpoints
    }

    /// The number of entries beyond the sockets' slots.
    fn entries(&self) -> usize {
        let entries: HashMap<MapData, [u64; 4], [u64; 6]> =
            self.node.map("sock_nat4/overflow").try_into().unwrap();
        entries.keys().count()
    }
}

#[test]
fn one_socket_can_use_any_number_of_services() {
    let Some(mut node) = Node::or_skip(&[]) else { return };
    assert_eq!(node.entries(), 0);
    let clients = Client::all();
    let first = clients.each_ref().map(|it| node.round(it));
    for endpoints in &first {
        assert!((1..=3).all(|n| endpoints.contains(&n)), "100 choices of three: {endpoints:?}");
    }
    assert_eq!(clients.each_ref().map(|it| node.round(it)), first);
    // When an endpoint is removed, its clients move, and they stay when it is added again. This one has the first address
    // that a socket uses, which is in its slot, and others.
    let removed = first[0][0];
    let others: Vec<_> = (1..=3).filter(|it| *it != removed).collect();
    clients.iter().for_each(Client::send_to_all);
    node.apply(&others);
    clients.iter().for_each(Client::send_to_all);
    // It answers what it was asked before when its clients have moved already.
    for service in 0..MANY {
        let replies = (0..2 * clients.len()).map(|_| node.reply(service));
        let late = replies.filter(|it| *it == removed).count();
        let asked = first.iter().filter(|it| it[usize::from(service)] == removed).count();
        assert_eq!(late, asked, "requests for Service {service} at endpoint {removed}");
        for client in &clients {
            assert_eq!([client.receive(), client.receive()], [service; 2]);
        }
    }
    let second = clients.each_ref().map(|it| node.round(it));
    for (before, after) in first.iter().flatten().zip(second.iter().flatten()) {
        assert!(after == before || (*before == removed && *after != removed), "from {before} to {after}");
    }
    node.apply(&[1, 2, 3]);
    assert_eq!(clients.each_ref().map(|it| node.round(it)), second);
    let one = Client::new(Notation::V4);
    node.round(&one);
    // A process in the root cgroup can use as many.
    let another = Client::new(Notation::V4);
    let root = node.node.sandbox().enter_root_cgroup().unwrap();
    let endpoints = node.round(&another);
    assert_eq!(node.round(&another), endpoints);
    drop((root, another));
    let before = node.entries();
    drop(one);
    assert!(node.entries() < before);
    drop(clients);
    assert_eq!(node.entries(), 0, "closed sockets leave nothing");
}

#[test]
fn the_addresses_of_a_socket_survive_a_restart() {
    let Some(mut node) = Node::or_skip(&[]) else { return };
    let clients = Client::all();
    let first = clients.each_ref().map(|it| node.round(it));
    node.node.kill();
    assert_eq!(clients.each_ref().map(|it| node.round(it)), first);
    // The table keeps the capacity that it was created with.
    node.node.start(&["--udp-addresses", "2"]);
    assert_eq!(clients.each_ref().map(|it| node.round(it)), first);
    drop(clients);
    assert_eq!(node.entries(), 0);
}

#[test]
fn a_datagram_without_room_for_its_entry_is_not_sent() {
    let Some(node) = Node::or_skip(&["--udp-addresses", "64"]) else { return };
    let full = Client::new(Notation::V4);
    let sent = |client: &Client| (0..MANY).take_while(|it| client.try_send(*it).is_ok()).count();
    // Of 128 entries one network namespace may have 15: the head, and two for each address; the first address needs none.
    assert_eq!(sent(&full), 1 + 7);
    let error = full.try_send(8).unwrap_err();
    let expected = if kernel_at_least(5, 18) { nix::libc::ENOBUFS } else { nix::libc::EPERM };
    assert_eq!(error.raw_os_error(), Some(expected));
    // Existing entries still work.
    for service in 0..8 {
        node.reply(service);
        full.receive();
    }
    // Another socket of the namespace has its slot, but no more.
    let other = Client::new(Notation::V4);
    assert_eq!(sent(&other), 1);
    // Datagrams to other destinations are not affected.
    let unrelated = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    full.socket.send_to(b"direct", unrelated.local_addr().unwrap()).unwrap();
    drop(full);
    assert_eq!(node.entries(), 0);
    assert_eq!(sent(&other), 8);
}

#[test]
fn leaked_entries_of_a_closed_socket_are_collected() {
    let Some(node) = TestNode::or_skip() else { return };
    let addresses: Vec<_> = (0..400_u16).map(|n| IpAddr::from([10, 97, (n >> 8) as u8, n as u8])).collect();
    let service = |(n, ip): (usize, &IpAddr)| {
        Service::new(&format!("s-{n}"), &[*ip]).port("", "UDP", 53, 9000).endpoints([1])
    };
    node.write(&addresses.iter().enumerate().map(service).collect::<Vec<_>>());
    let mut node = Node { servers: BTreeMap::new(), node };
    node.node.start(&[]);
    let client = Client::new(Notation::V4);
    for ip in &addresses {
        client.socket.send_to(b"who?", (*ip, 53)).unwrap();
    }
    assert_eq!(node.entries(), 1 + 399 + 1, "the head, the addresses, and the common endpoint");
    // Another agent than the one that ran when the socket was closed collects them.
    node.node.kill();
    drop(client);
    assert!(node.entries() > 0, "one run of the program cannot delete all");
    node.node.start(&[]);
    assert!(eventually(TIMEOUT, || node.entries() == 0));
}

/// How long a server across a network takes to answer.
const DELAY: Duration = Duration::from_millis(20);

/// Answers every datagram after [`DELAY`].
fn answer_late(socket: &UdpSocket, is_over: &AtomicBool) {
    let mut asked = VecDeque::new();
    while !is_over.load(Relaxed) {
        while let Ok((_, from)) = socket.recv_from(&mut [0; 16]) {
            asked.push_back((Instant::now() + DELAY, from));
        }
        while let Some((_, from)) = asked.pop_front_if(|(due, _)| *due <= Instant::now()) {
            socket.send_to(b"answer", from).unwrap();
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// Asks from many sockets, each again when it has its answer; returns the sources of answers.
fn ask_all_along(address: SocketAddr, answers: &AtomicUsize, is_over: &AtomicBool) -> BTreeSet<SocketAddr> {
    const SOCKETS: usize = 1000;
    const UNANSWERED: Duration = Duration::from_millis(500);
    allow_open_files(2 * SOCKETS);
    let new = |_| {
        let socket = udp_socket(address).unwrap();
        socket.set_nonblocking(true).unwrap();
        (socket, None)
    };
    let mut sockets: Vec<(UdpSocket, Option<Instant>)> = (0..SOCKETS).map(new).collect();
    let mut sources = BTreeSet::new();
    while !is_over.load(Relaxed) {
        for (socket, asked) in &mut sockets {
            if let Ok((_, from)) = socket.recv_from(&mut [0; 16]) {
                sources.insert(from);
                answers.fetch_add(1, Relaxed);
                *asked = None;
            }
            if asked.is_none_or(|it| it.elapsed() > UNANSWERED) {
                // Without a proxy there is no route.
                let _ = socket.send_to(b"question", address);
                *asked = Some(Instant::now());
            }
        }
        thread::sleep(Duration::from_millis(1));
    }
    sources
}

#[test]
fn replies_bear_the_services_address_while_the_programs_are_removed() {
    let removals: [fn(&mut TestNode); 2] = [
        |node| {
            node.terminate();
            run(&mut node.cli("cleanup")).success();
        },
        // Another backend removes them once its tables are active.
        |node| {
            node.terminate();
            node.start(&["--backend=nft", "--packets=nft"]);
            node.wait_until_logged(&["the socket path is off: its programs and maps were removed"]);
        },
    ];
    for remove in removals {
        let Some(mut node) = TestNode::running_or_skip([], &services(1, &[1]), &[]) else { return };
        let server = UdpSocket::bind((endpoint(1)[0], 9000)).unwrap();
        server.set_nonblocking(true).unwrap();
        let address = Notation::V4.address(0);
        let (answers, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
        let sources = thread::scope(|scope| {
            scope.spawn(|| answer_late(&server, &is_over));
            let asking = scope.spawn(|| ask_all_along(address, &answers, &is_over));
            let has_answers = eventually(TIMEOUT, || answers.load(Relaxed) > 5000);
            remove(&mut node);
            // What is on its way arrives.
            thread::sleep(DELAY * 10);
            is_over.store(true, Relaxed);
            assert!(has_answers, "there are {answers:?} answers");
            asking.join().unwrap()
        });
        assert_eq!(sources, [address].into());
    }
}
