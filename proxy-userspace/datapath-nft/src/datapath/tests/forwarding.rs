//! Packets that other nodes forward, with a priority that rules of the test set: a node with a client, a pod and a second node.

use std::{
    io::{self, BufRead as _, BufReader, Write as _},
    net::{TcpListener, TcpStream},
    process::{Command, Stdio},
    sync::mpsc,
    thread,
};

use datapath::FrontendAddress;
use model::state::{ForwardedPort, ServiceKind};
use nix::{
    sched::{CloneFlags, unshare},
    unistd::gettid,
};
use proxy_common::forward::{FORWARDED, NO_SECOND};

use super::*;
use crate::observe::dump::{PacketTarget, lookup};

/// The priority of a packet without a second node, and of one with a second node.
const FIRST: u32 = FORWARDED | NO_SECOND as u32;
const WITH_SECOND: u32 = FORWARDED | 7;

type Job = Box<dyn FnOnce() + Send>;

/// A thread in a network namespace of its own, which ends with it.
struct Host {
    thread: i32,
    jobs: mpsc::Sender<Job>,
}

impl Host {
    fn new() -> Self {
        let (jobs, receiver) = mpsc::channel::<Job>();
        let (started, thread) = mpsc::channel();
        thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            started.send(gettid().as_raw()).unwrap();
            receiver.into_iter().for_each(|it| it());
        });
        Self { thread: thread.recv().unwrap(), jobs }
    }

    fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        let (done, result) = mpsc::channel();
        self.jobs.send(Box::new(move || done.send(work()).unwrap())).unwrap();
        result.recv().unwrap()
    }

    /// Answers each line of each connection with this name and the client's address.
    fn serve(&self, address: SocketAddr, name: &'static str) {
        let listener = self.run(move || TcpListener::bind(address).unwrap());
        thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let client = stream.peer_addr().unwrap().ip();
                thread::spawn(move || {
                    for _ in BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok) {
                        let _ = writeln!(stream, "{name} {client}");
                    }
                });
            }
        });
    }

    fn connect(&self, to: SocketAddr) -> io::Result<TcpStream> {
        self.run(move || {
            // IPv6 takes a second to find the first neighbor.
            let stream = TcpStream::connect_timeout(&to, Duration::from_secs(4))?;
            stream.set_read_timeout(Some(Duration::from_secs(20)))?;
            Ok(stream)
        })
    }
}

/// Sends a line and returns the answer.
fn ask(stream: &mut TcpStream) -> String {
    writeln!(stream, "who").unwrap();
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).unwrap();
    answer.trim_end().to_owned()
}

#[track_caller]
fn nft(arguments: &[&str]) -> String {
    let output = Command::new("nft").args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Has the client's packets arrive with this priority, and counts those that leave with one.
fn set_priority(priority: u32) {
    nft(&["add table inet test; delete table inet test"]);
    let chain = |hook: &str, priority: i32, rule: &str| {
        format!("chain {hook} {{ type filter hook {hook} priority {priority}; {rule}; }}\n")
    };
    let mark =
        chain("prerouting", -160, &format!("iifname client tcp dport 80 meta priority set {priority}"));
    let count = chain("postrouting", 0, &format!("ct state untracked meta priority {priority} counter"));
    nft(&[&format!("table inet test {{ {mark} {count} }}")]);
}

struct Network {
    family: Family,
    client: Host,
    /// The pod and the second node, whose namespaces live as long.
    others: [Host; 2],
    datapath: Datapath,
}

impl Network {
    /// The address of a host in a network of the family.
    fn ip(family: Family, network: u8, host: u8) -> IpAddr {
        match family {
            Family::V4 => IpAddr::from([10, 0, network, host]),
            Family::V6 => format!("fd00:{network}::{host}").parse().unwrap(),
        }
    }

    fn at(&self, network: u8, host: u8) -> IpAddr {
        Self::ip(self.family, network, host)
    }

    /// The address of the Service, which the second node has as well.
    fn frontend(&self) -> SocketAddr {
        SocketAddr::new(self.at(203, 9), 80)
    }

    /// In network 1 is the client, in 2 the second node, in 4 the pod, each as 9; the node is 1. Client and second node have
    /// network 3 together.
    fn new(family: Family) -> Self {
        let [client, second, pod] = [(); 3].map(|()| Host::new());
        let bits = if family == Family::V4 { 24 } else { 64 };
        let flags = if family == Family::V4 { "" } else { "nodad" };
        let address = move |network, host| format!("{}/{bits} {flags}", Self::ip(family, network, host));
        let ip = move |network, host| Self::ip(family, network, host);
        let settings = "sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1 net.ipv4.conf.all.rp_filter=0 \
                        net.ipv4.conf.default.rp_filter=0\n ip link set lo up\n";
        run(settings);
        [&client, &second, &pod].into_iter().for_each(|it| it.run(move || run(settings)));
        for (name, network, host) in [("client", 1, &client), ("second", 2, &second), ("pod", 4, &pod)] {
            let node = address(network, 1);
            run(&format!(
                "ip link add {name} type veth peer name eth0 netns {}
                 ip addr add {node} dev {name}
                 ip link set {name} up",
                host.thread
            ));
            let own = address(network, 9);
            host.run(move || run(&format!("ip addr add {own} dev eth0\n ip link set eth0 up")));
        }
        let peer = second.thread;
        client.run(move || {
            run(&format!(
                "ip link add direct type veth peer name direct netns {peer}
                 ip addr add {} dev direct
                 ip link set direct up
                 ip route add {} via {} src {}",
                address(3, 1),
                ip(203, 9),
                ip(1, 1),
                ip(1, 9)
            ));
        });
        second.run(move || {
            run(&format!(
                "ip addr add {} dev direct
                 ip link set direct up
                 ip addr add {} {flags} dev lo
                 ip route add {} via {}
                 ip route add default via {}",
                address(3, 9),
                ip(203, 9),
                ip(1, 9),
                ip(3, 1),
                ip(2, 1)
            ));
        });
        pod.run(move || run(&format!("ip route add default via {}", ip(4, 1))));
        pod.serve(SocketAddr::new(ip(4, 9), 8080), "pod");
        second.serve(SocketAddr::new(ip(2, 9), 8080), "other");
        second.serve(SocketAddr::new(ip(203, 9), 80), "second");
        let datapath = start_without_owner(false);
        Self { family, client, others: [pod, second], datapath }
    }

    /// Serves a Service with an endpoint on this node and one on another; of forwarded packets, these endpoints.
    fn apply(&mut self, forwarded: Option<&[SocketAddr]>, source_ranges: &[&str]) -> ApplyReport {
        let service = Service {
            kind: ServiceKind::LoadBalancer,
            cluster_ips: vec![self.at(96, 1)],
            load_balancer_ips: vec![self.frontend().ip()],
            ports: vec![ServicePort::new(Protocol::Tcp, port(80))],
            source_ranges: source_ranges.iter().map(|it| it.parse().unwrap()).collect(),
            ..Service::new(ServiceName::new("default", "web"))
        };
        let endpoint = |name, address, local| {
            let of_v4 = |it: Ipv4Addr| Endpoint { local, ..endpoint(name, it, port(8080)) };
            match address {
                IpAddr::V4(it) => of_v4(it),
                IpAddr::V6(it) => Endpoint { v4: None, v6: Some(it), ..of_v4(Ipv4Addr::UNSPECIFIED) },
            }
        };
        let endpoints = [endpoint("other", self.at(2, 9), false), endpoint("pod", self.at(4, 9), true)];
        let mut service = ServiceState::new(service, endpoints);
        let port = |targets: &[SocketAddr]| ForwardedPort {
            index: 0,
            family: self.family,
            nodes: Arc::default(),
            targets: targets.into(),
        };
        service.forwarded = forwarded.into_iter().map(port).collect();
        let services = [Arc::new(service)].into_iter().collect();
        self.datapath.apply(&NodeState { services, ..NodeState::default() }).unwrap()
    }

    /// Who serves new connections, with the client's address that it sees.
    fn served_by(&self) -> BTreeSet<String> {
        (0..20).map(|_| ask(&mut self.client.connect(self.frontend()).unwrap())).collect()
    }

    fn pod(&self) -> SocketAddr {
        SocketAddr::new(self.at(4, 9), 8080)
    }

    fn lists(&self) -> String {
        nft(&["-s", "list", "table", if self.family == Family::V4 { "ip" } else { "ip6" }, TABLE])
    }
}

/// Calls a function with a network of each family.
fn with_networks(work: impl Fn(Network) + Clone + Send + 'static) {
    for tool in ["ip", "nft"] {
        if Command::new(tool).arg("-V").stdout(Stdio::null()).status().is_err() {
            return eprintln!("skipped: there is no command `{tool}`");
        }
    }
    for family in Family::ALL {
        let work = work.clone();
        in_netns(move || work(Network::new(family)));
    }
}

#[test]
fn forwarded_connections_are_served_here_and_keep_their_source() {
    with_networks(|mut it| {
        let client = it.at(1, 9);
        let here = BTreeSet::from([format!("pod {client}")]);
        let [seen_by_pod, seen_by_other] = [4, 2].map(|network| it.at(network, 1));
        let everywhere = BTreeSet::from([format!("pod {seen_by_pod}"), format!("other {seen_by_other}")]);
        set_priority(FIRST);
        it.apply(None, &[]);
        let before = it.lists();
        assert_eq!(it.served_by(), everywhere, "the Service is not forwarded");

        let pod = it.pod();
        it.apply(Some(&[pod]), &[]);
        assert_eq!(it.served_by(), here);
        it.datapath = start_without_owner(false);
        assert_eq!(it.apply(Some(&[pod]), &[]).entries, 0, "the next process finds all of it");
        let frontend = FrontendAddress { address: it.frontend(), protocol: Protocol::Tcp };
        let all = Some(PacketTarget::Endpoints(vec![SocketAddr::new(it.at(2, 9), 8080), pod]));
        let found = lookup(&frontend).unwrap().unwrap();
        assert_eq!((&found.internal, &found.external), (&all, &all));
        assert_eq!(found.forwarded, Some(PacketTarget::Endpoints(vec![pod])));

        let every_source = ["0.0.0.0/1", "128.0.0.0/1", "::/1", "8000::/1"];
        it.apply(Some(&[pod]), &every_source);
        assert_eq!(it.served_by(), here);
        it.apply(Some(&[pod]), &["192.0.2.0/24", "2001:db8::/32"]);
        it.client.connect(it.frontend()).unwrap_err();

        it.apply(Some(&[]), &[]);
        assert_eq!(it.served_by(), everywhere, "no endpoint is here any more");
        it.apply(Some(&[pod]), &[]);
        set_priority(0x0001_0001);
        assert_eq!(it.served_by(), everywhere, "the packets are not forwarded ones");
        it.apply(None, &[]);
        assert!(it.lists().contains("chain second-chance-prerouting"), "connections may outlast it");
        it.datapath = start_without_owner(false);
        it.apply(None, &[]);
        assert_eq!(it.lists(), before, "other packets do not pay for it");
    });
}

#[test]
fn a_connection_that_is_not_known_gets_a_second_chance_and_no_conntrack_entry() {
    with_networks(|mut it| {
        let pod = it.pod();
        it.apply(Some(&[pod]), &[]);
        let route = |it: &Network, via: IpAddr| {
            let (frontend, client) = (it.frontend().ip(), it.at(1, 9));
            it.client.run(move || run(&format!("ip route replace {frontend} via {via} src {client}")));
        };
        route(&it, it.at(3, 9));
        let mut stream = it.client.connect(it.frontend()).unwrap();
        let expected = format!("second {}", it.at(1, 9));
        assert_eq!(ask(&mut stream), expected);
        // The router takes it to this node.
        let tracked = || std::fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_count").unwrap();
        set_priority(WITH_SECOND);
        route(&it, it.at(1, 1));
        let before = tracked();
        // Nothing wraps what leaves toward the client: it is retransmitted.
        writeln!(stream, "who").unwrap();
        thread::sleep(Duration::from_millis(500));
        assert_eq!(tracked(), before);
        let counted = nft(&["list", "chain", "inet", "test", "postrouting"]);
        assert!(!counted.contains("packets 0 "), "they leave with their priority: {counted}");
        // What begins a connection has a second only while forwarding begins. Nothing answers it here.
        let frontend = it.frontend();
        let begin = move || TcpStream::connect_timeout(&frontend, Duration::from_millis(300));
        assert!(it.client.run(begin).is_err());
        assert_eq!(tracked(), before);
        // It is resumed where it is known.
        route(&it, it.at(3, 9));
        let mut answer = String::new();
        BufReader::new(&mut stream).read_line(&mut answer).unwrap();
        assert_eq!(answer.trim_end(), expected);
        // Without a second, what begins a connection is served here.
        route(&it, it.at(1, 1));
        set_priority(FIRST);
        let here = format!("pod {}", it.at(1, 9));
        assert_eq!(it.served_by(), [here].into());
    });
}

#[test]
fn a_connection_whose_first_packet_is_sent_again_has_no_second_chance() {
    with_networks(|mut it| {
        let pod = it.pod();
        it.apply(Some(&[pod]), &[]);
        let (frontend, via) = (it.frontend(), it.at(1, 1));
        it.client.run(move || run(&format!("ip route replace {} via {via}", frontend.ip())));
        // The endpoints see the client by an address of this node.
        let answers = |command: &'static str| {
            for (host, network) in it.others.iter().zip([4, 2]) {
                let client = it.at(network, 1);
                host.run(move || run(&format!("ip route {command} blackhole {client}")));
            }
        };
        answers("add");
        thread::scope(|scope| {
            let begin = move || TcpStream::connect_timeout(&frontend, Duration::from_secs(20));
            let client = &it.client;
            let connection = scope.spawn(move || client.run(begin));
            thread::sleep(Duration::from_millis(300));
            set_priority(WITH_SECOND);
            // It is sent again after a second.
            thread::sleep(Duration::from_millis(1_500));
            let counted = nft(&["list", "chain", "inet", "test", "postrouting"]);
            assert!(counted.contains("packets 0 "), "{counted}");
            answers("del");
            connection.join().unwrap().unwrap();
        });
    });
}

#[test]
fn nft_lists_the_rules_for_forwarded_packets_and_loads_them_again() {
    with_networks(|mut it| {
        let pod = it.pod();
        // As in a kernel without nft_dup_ipv4 and nft_dup_ipv6.
        it.datapath.second_chance = Some(Vec::new());
        it.apply(Some(&[pod]), &[]);
        assert!(it.lists().contains("chain forwarded-prerouting") && !it.lists().contains("dup to"));
        it.datapath.second_chance = None;
        it.apply(Some(&[pod]), &[]);
        let listed = it.lists();
        for part in ["chain forwarded-prerouting", "chain second-chance-prerouting", "dup to"] {
            assert!(listed.contains(part), "{part}: {listed}");
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &listed).unwrap();
        assert!(cleanup().unwrap());
        nft(&["-f", file.path().to_str().unwrap()]);
        assert_eq!(it.lists(), listed);
        set_priority(FIRST);
        assert_eq!(it.served_by(), [format!("pod {}", it.at(1, 9))].into());
    });
}
