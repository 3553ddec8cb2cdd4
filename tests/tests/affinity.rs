//! Session affinity at socket level: who is one client, and for how long it keeps its endpoint.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use aya::maps::{Array, HashMap, Map, MapData};
use socket2::{Domain, Socket, Type};
use tests::{
    Agent, Build, EchoServer, NetNs, TestNode, Transport, eventually, http::metric, manifest::Service,
    request,
};

const LIMIT: Duration = Duration::from_secs(10);
const TRANSPORTS: [Transport; 3] = [Transport::Tcp, Transport::Udp, Transport::UdpUnconnected];

fn service() -> [SocketAddr; 2] {
    ["10.96.0.10:80", "[fd00:10:96::10]:80"].map(|it| it.parse().unwrap())
}

fn endpoint(n: u8) -> [IpAddr; 2] {
    [[10, 244, 1, n].into(), [0xfd00, 0x10, 0x244, 0, 0, 0, 1, u16::from(n)].into()]
}

fn web(seconds: u32, endpoints: impl IntoIterator<Item = u8>) -> Service {
    let web = Service::new("web", &service().map(|it| it.ip()))
        .port("tcp", "TCP", 80, 8080)
        .port("udp", "UDP", 80, 8080)
        .affinity(seconds);
    endpoints.into_iter().fold(web, |web, n| web.endpoint(&format!("web-{n}"), &endpoint(n)))
}

struct Node {
    _servers: Vec<EchoServer>,
    agent: Option<Agent>,
    world: TestNode,
}

impl Node {
    /// A node with a Service of ten endpoints.
    fn or_skip(test: &str, seconds: u32, arguments: &[&str]) -> Option<Self> {
        let world = TestNode::or_skip(test)?;
        let servers = (1..=10).flat_map(|n| endpoint(n).map(|it| (n, it)));
        let servers = servers.map(|(n, address)| {
            if address.is_ipv6() {
                world.netns().add_address(address).unwrap();
            }
            EchoServer::start(&format!("web-{n}"), SocketAddr::new(address, 8080)).unwrap()
        });
        let mut node = Self { _servers: servers.collect(), agent: None, world };
        node.world.write(&[web(seconds, 1..=10)]);
        node.start(arguments);
        Some(node)
    }

    fn start(&mut self, arguments: &[&str]) {
        let setting = self.world.command(Build::Product);
        let setting = arguments.iter().fold(setting, tests::agent::AgentCommand::arg);
        let mut agent = setting.start(self.world.sandbox()).unwrap();
        agent.wait_until(LIMIT, || self.world.is_attached()).unwrap();
        self.agent = Some(agent);
    }
}

/// Everybody who answers `times` questions.
#[track_caller]
fn answerers(transport: Transport, address: SocketAddr, times: usize) -> BTreeSet<String> {
    (0..times).map(|_| request(transport, address).unwrap()).collect()
}

/// Who answers a connected socket.
#[track_caller]
fn answer(socket: &std::net::UdpSocket) -> String {
    socket.send(b"who?").unwrap();
    hear(socket)
}

#[track_caller]
fn hear(socket: &std::net::UdpSocket) -> String {
    let mut answer = [0; 64];
    let length = socket.recv(&mut answer).unwrap();
    String::from_utf8_lossy(&answer[..length]).into_owned()
}

/// The table of clients.
type Clients = HashMap<MapData, [u64; 4], [u64; 4]>;

fn clients(world: &TestNode) -> Clients {
    let clients = MapData::from_pin(world.sandbox().pins().join("affinity2/affinity")).unwrap();
    Map::from_map_data(clients).unwrap().try_into().unwrap()
}

#[test]
fn a_client_keeps_its_endpoint() {
    let Some(mut node) = Node::or_skip("a_client_keeps_its_endpoint", 3600, &[]) else { return };
    let ask_all = || {
        let both = service().into_iter().flat_map(|address| TRANSPORTS.map(|it| (it, address)));
        both.map(|(transport, address)| answerers(transport, address, 20)).collect::<Vec<_>>()
    };
    let before = ask_all();
    for answerers in &before {
        assert_eq!(answerers.len(), 1, "{answerers:?}");
    }
    // Connected or not, it is one service port.
    assert_eq!(before[1], before[2]);
    assert_eq!(before[4], before[5]);
    // Neither another instance nor another generation changes that.
    node.agent.take().unwrap().kill9().unwrap();
    node.start(&[]);
    assert_eq!(ask_all(), before);
}

#[test]
fn a_new_client_that_connects_many_times_at_once_has_one_endpoint() {
    let test = "a_new_client_that_connects_many_times_at_once_has_one_endpoint";
    let Some(node) = Node::or_skip(test, 3600, &[]) else { return };
    const AT_ONCE: usize = 8;
    for n in 0..50 {
        let source = SocketAddr::from(([10, 244, 3, n], 0));
        let start = Barrier::new(AT_ONCE);
        let connect = || {
            let socket = Socket::new(Domain::IPV4, Type::DGRAM, None).unwrap();
            socket.bind(&source.into()).unwrap();
            start.wait();
            socket.connect(&service()[0].into()).unwrap();
            answer(&socket.into())
        };
        let given: BTreeSet<_> = thread::scope(|scope| {
            let threads: Vec<_> = (0..AT_ONCE).map(|_| scope.spawn(connect)).collect();
            threads.into_iter().map(|it| it.join().unwrap()).collect()
        });
        assert_eq!(given.len(), 1, "client {n}: {given:?}");
    }
    drop(node);
}

#[test]
fn a_removed_endpoint_frees_its_clients_at_once() {
    let Some(node) = Node::or_skip("a_removed_endpoint_frees_its_clients_at_once", 3600, &[]) else { return };
    let address = service()[0];
    let first = request(Transport::Tcp, address).unwrap();
    let rest = |name: &str| (1..=10).filter(move |n| format!("web-{n}") != name).collect::<Vec<u8>>();
    node.world.write(&[web(3600, rest(&first))]);
    let now = || answerers(Transport::Tcp, address, 10);
    assert!(eventually(LIMIT, || !now().contains(&first)));
    let second = now();
    assert_eq!(second.len(), 1);
    // It comes back, and its clients stay where they are.
    node.world.write(&[web(3600, 1..=10)]);
    let everybody = format!("frontend {address}/TCP backends=10 affinity=3600s");
    assert!(eventually(LIMIT, || node.world.dump(Build::Product).is_ok_and(|it| it.contains(&everybody))));
    assert_eq!(now(), second);
}

#[test]
fn each_namespace_and_each_bound_address_is_a_client() {
    let Some(node) = Node::or_skip("each_namespace_and_each_bound_address_is_a_client", 3600, &[]) else {
        return;
    };
    let address = service()[0];
    let connect = |source: [u8; 4]| {
        let socket = Socket::new(Domain::IPV4, Type::DGRAM, None).unwrap();
        socket.bind(&SocketAddr::from((source, 0)).into()).unwrap();
        socket.connect(&address.into()).unwrap();
        let socket = std::net::UdpSocket::from(socket);
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        answer(&socket)
    };
    // Of 30 clients at 10 endpoints all would have the same one once in 10^29 runs.
    let mut given = BTreeSet::new();
    for n in 1..=30 {
        let first = connect([10, 244, 2, n]);
        assert!((0..5).all(|_| connect([10, 244, 2, n]) == first), "client {n}");
        given.insert(first);
    }
    assert!(given.len() > 1);
    // A loopback address is no other client than its namespace.
    let unbound = request(Transport::Udp, address).unwrap();
    assert!((1..=30).all(|n| connect([127, 0, 1, n]) == unbound));
    // The same from namespaces, which a socket that is bound to nothing stands for.
    let mut given = BTreeSet::new();
    for _ in 0..30 {
        let pod = NetNs::new().unwrap();
        pod.ip(&["route", "add", "local", "10.244.0.0/16", "dev", "lo"]).unwrap();
        given.insert(thread::scope(|scope| {
            let work = || {
                let _inside = pod.enter().unwrap();
                let _servers: Vec<_> = (1..=10)
                    .map(|n| {
                        EchoServer::start(&format!("web-{n}"), SocketAddr::new(endpoint(n)[0], 8080)).unwrap()
                    })
                    .collect();
                let answerers = answerers(Transport::Tcp, address, 5);
                assert_eq!(answerers.len(), 1, "{answerers:?}");
                answerers
            };
            scope.spawn(work).join().unwrap()
        }));
    }
    assert!(given.len() > 1);
    drop(node);
}

#[test]
fn a_source_address_that_the_kernel_chose_makes_no_client() {
    let test = "a_source_address_that_the_kernel_chose_makes_no_client";
    let Some(node) = Node::or_skip(test, 3600, &[]) else { return };
    let clients = || clients(&node.world).keys().count();
    for (family, address) in service().into_iter().enumerate() {
        let first = request(Transport::Udp, address).unwrap();
        assert_eq!(clients(), family + 1);
        // A socket that is connected to an endpoint has that address for its source, too: all are of this machine.
        for n in 1..=10 {
            let any = if address.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
            let socket = std::net::UdpSocket::bind(any).unwrap();
            socket.set_read_timeout(Some(LIMIT)).unwrap();
            let endpoint = SocketAddr::new(endpoint(n)[family], 8080);
            socket.connect(endpoint).unwrap();
            assert_eq!(socket.local_addr().unwrap().ip(), endpoint.ip());
            // The answer to this one would not be let through: it comes from somebody else than the peer.
            socket.send_to(b"who?", address).unwrap();
            for _ in 0..2 {
                socket.connect(address).unwrap();
                assert_eq!(answer(&socket), first);
            }
            assert_eq!(clients(), family + 1, "clients after endpoint {n}");
        }
    }
}

#[test]
fn a_socket_that_is_bound_to_any_address_is_bound_to_none() {
    let test = "a_socket_that_is_bound_to_any_address_is_bound_to_none";
    let Some(node) = Node::or_skip(test, 3600, &[]) else { return };
    let SocketAddr::V4(address) = service()[0] else { unreachable!("the first address is of IPv4") };
    let mapped = SocketAddr::new(address.ip().to_ipv6_mapped().into(), address.port());
    let first = request(Transport::Udp, address.into()).unwrap();
    for any in ["[::]:0", "[::ffff:0.0.0.0]:0"] {
        for is_connected in [true, false] {
            let socket = Socket::new(Domain::IPV6, Type::DGRAM, None).unwrap();
            socket.set_only_v6(false).unwrap();
            socket.bind(&any.parse::<SocketAddr>().unwrap().into()).unwrap();
            let socket = std::net::UdpSocket::from(socket);
            socket.set_read_timeout(Some(LIMIT)).unwrap();
            if is_connected {
                socket.connect(mapped).unwrap();
                assert_eq!(answer(&socket), first);
            } else {
                socket.send_to(b"who?", mapped).unwrap();
                assert_eq!(hear(&socket), first);
            }
        }
    }
    assert_eq!(clients(&node.world).keys().count(), 1);
}

#[test]
fn a_client_that_stays_away_is_free() {
    let Some(_node) = Node::or_skip("a_client_that_stays_away_is_free", 1, &[]) else { return };
    let address = service()[0];
    let free = |_: usize| {
        let before = request(Transport::Tcp, address).unwrap();
        thread::sleep(Duration::from_millis(1050));
        request(Transport::Tcp, address).unwrap() != before
    };
    // Each time it is given another of ten, nine times of ten.
    assert!((0..9).any(free), "in 10^9 runs, once");
    // Whoever comes again in time stays for as long as he likes.
    let begin = Instant::now();
    let now = Instant::now();
    let mut last = (request(Transport::Tcp, address).unwrap(), now);
    while begin.elapsed() < Duration::from_secs(3) {
        thread::sleep(Duration::from_millis(50));
        let now = Instant::now();
        let answer = request(Transport::Tcp, address).unwrap();
        // Unless this machine was too busy to come in time.
        assert!(answer == last.0 || last.1.elapsed() >= Duration::from_secs(1));
        last = (answer, now);
    }
}

#[test]
fn the_client_that_was_away_longest_is_forgotten_first() {
    let arguments = ["--affinity-clients", "128"];
    let Some(node) = Node::or_skip("the_client_that_was_away_longest_is_forgotten_first", 3600, &arguments)
    else {
        return;
    };
    let address = service()[0];
    let connect = |n: u16| {
        let socket = Socket::new(Domain::IPV4, Type::DGRAM, None).unwrap();
        let [high, low] = n.to_be_bytes();
        socket.bind(&SocketAddr::from(([10, 244, high, low], 0)).into()).unwrap();
        socket.connect(&address.into()).unwrap();
    };
    (0x0300..0x0700).for_each(connect);
    let there = clients(&node.world).keys().count();
    assert!((1..=128).contains(&there), "{there} clients");
    // The table took every one of them.
    let came = MapData::from_pin(node.world.sandbox().pins().join("affinity2/affinity_inserts")).unwrap();
    let came: Array<_, u64> = Map::from_map_data(came).unwrap().try_into().unwrap();
    assert_eq!(came.get(&0, 0).unwrap(), 0x400);
    assert!(eventually(LIMIT, || metric("kube_proxy_ebpf_affinity_clients_total") == Some(1024.0)));
    assert_eq!(metric("kube_proxy_ebpf_affinity_capacity"), Some(128.0));
}
