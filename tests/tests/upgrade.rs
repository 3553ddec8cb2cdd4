//! Invariant 8: what a socket remembers survives an upgrade to another map layout, and the way back.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    process::Command,
    time::Duration,
};

use aya::maps::MapData;
use tests::{
    Agent, Build, ConnectLoad, EchoConnection, EchoServer, TestNode, Transport, load::LoadReport,
    manifest::Service, request, scaled, test_node::expected_dump,
};

const LIMIT: Duration = Duration::from_secs(20);

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn service() -> SocketAddr {
    SocketAddr::new(ip("10.96.0.10"), 80)
}

fn service6() -> SocketAddr {
    SocketAddr::new(ip("fd00:10:96::10"), 80)
}

fn endpoint(n: usize) -> [IpAddr; 2] {
    [ip(&format!("10.244.1.{n}")), ip(&format!("fd00:10:244::1:{n}"))]
}

fn web(endpoints: std::ops::RangeInclusive<usize>) -> Vec<Service> {
    let web = Service::new("web", &[service().ip(), service6().ip()])
        .port("tcp", "TCP", 80, 8080)
        .port("udp", "UDP", 80, 8080);
    vec![endpoints.fold(web, |web, n| web.endpoint(&format!("e{n}"), &endpoint(n)))]
}

/// A UDP socket that asks again and again and must always be answered by the same backend, in the Service's name.
struct Asker {
    socket: UdpSocket,
    service: SocketAddr,
    connected: bool,
    answerer: Option<Vec<u8>>,
}

impl Asker {
    fn new(service: SocketAddr, connected: bool) -> Self {
        let any = if service.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let socket = UdpSocket::bind(any).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
        if connected {
            socket.connect(service).unwrap();
        }
        Self { socket, service, connected, answerer: None }
    }

    #[track_caller]
    fn ask(&mut self, when: &str) {
        if self.connected {
            self.socket.send(b"who?").unwrap();
            assert_eq!(self.socket.peer_addr().unwrap(), self.service, "{when}");
        } else {
            self.socket.send_to(b"who?", self.service).unwrap();
        }
        self.receive(when);
    }

    #[track_caller]
    fn receive(&mut self, when: &str) {
        let mut answer = [0; 64];
        let (length, from) =
            self.socket.recv_from(&mut answer).unwrap_or_else(|error| panic!("{when}: {error}"));
        assert_eq!(from, self.service, "the source of a reply, {when}");
        let answer = answer[..length].to_vec();
        let before = self.answerer.get_or_insert_with(|| answer.clone());
        assert_eq!(*before, answer, "who answers a socket that stays, {when}");
    }
}

#[track_caller]
fn start(world: &TestNode, build: Build, services: &[Service]) -> Agent {
    let mut agent = world.command(build).start(world.sandbox()).unwrap();
    // The log says so only after the links were switched and what was before was removed.
    let in_force = |log: &str| log.contains("state active");
    let log = agent_log(&mut agent, in_force);
    assert_eq!(world.dump(build).unwrap(), expected_dump(services), "{log}");
    agent
}

fn agent_log(agent: &mut Agent, ready: impl Fn(&str) -> bool) -> String {
    let mut log = String::new();
    // Read through another handle: waiting borrows the agent.
    let path = agent.log_path().to_owned();
    agent
        .wait_until(LIMIT, || {
            log = std::fs::read_to_string(&path).unwrap_or_default();
            ready(&log)
        })
        .unwrap();
    log
}

fn layouts(world: &TestNode) -> Vec<String> {
    let mut layouts: Vec<_> = std::fs::read_dir(world.sandbox().pins())
        .unwrap()
        .flatten()
        .map(|it| it.file_name().to_string_lossy().into_owned())
        .filter(|it| it.starts_with('v'))
        .collect();
    layouts.sort();
    layouts
}

#[test]
fn upgrade_keeps_sockets() {
    let Some(world) = TestNode::or_skip("upgrade_keeps_sockets") else { return };
    let _servers: Vec<_> = (1..=5)
        .flat_map(endpoint)
        .map(|it| {
            if it.is_ipv6() {
                world.netns().add_address(it).unwrap();
            }
            EchoServer::start(&it.to_string(), SocketAddr::new(it, 8080)).unwrap()
        })
        .collect();
    let services = web(1..=5);
    world.write(&services);
    let mut agent = start(&world, Build::Failpoints, &services);
    assert_eq!(layouts(&world), ["v4"]);

    let mut connections: Vec<_> =
        [service(), service6()].map(|it| (EchoConnection::connect(it).unwrap(), it)).into_iter().collect();
    let mut askers: Vec<_> = [service(), service6()]
        .into_iter()
        .flat_map(|it| [Asker::new(it, true), Asker::new(it, false), Asker::new(it, false)])
        .collect();
    askers.iter_mut().for_each(|it| it.ask("at first"));
    let loads =
        [(Transport::Tcp, service()), (Transport::Udp, service6()), (Transport::UdpUnconnected, service())]
            .map(|(transport, address)| {
                ConnectLoad::start(transport, address, 1, scaled(Duration::from_millis(1)))
            });

    for (build, layout) in [
        (Build::NextLayout, "v1004"),
        (Build::Failpoints, "v4"),
        (Build::NextLayout, "v1004"),
        (Build::Failpoints, "v4"),
    ] {
        // A question from before the upgrade is answered after it.
        let asked = Asker::new(service(), false);
        asked.socket.send_to(b"who?", service()).unwrap();
        agent.kill9().unwrap();
        agent = start(&world, build, &services);
        let when = format!("on layout {layout}");
        assert_eq!(layouts(&world), [layout], "the other layout is gone");
        let mut asked = asked;
        asked.receive(&when);
        for (probe, service) in &mut connections {
            probe.ping().unwrap();
            assert_eq!(probe.stream().peer_addr().unwrap(), *service, "{when}");
        }
        askers.iter_mut().for_each(|it| it.ask(&when));
    }

    // One that dies between two links: some programs are of one layout, some of the other.
    agent.kill9().unwrap();
    let setting = world.command(Build::NextLayout).env("KUBE_PROXY_EBPF_FAULT", "half-attached");
    let mut half = setting.start(world.sandbox()).unwrap();
    half.wait(LIMIT).unwrap();
    assert_eq!(layouts(&world), ["v1004", "v4"]);
    askers.iter_mut().for_each(|it| it.ask("between two layouts"));
    let _agent = start(&world, Build::Failpoints, &services);
    assert_eq!(layouts(&world), ["v4"]);
    askers.iter_mut().for_each(|it| it.ask("in the end"));
    for (probe, service) in &mut connections {
        probe.ping().unwrap();
        assert_eq!(probe.stream().peer_addr().unwrap(), *service);
    }

    for load in loads {
        let report = LoadReport::of(&load.stop());
        eprintln!("{} connects, {} failed", report.connects, report.failed);
        assert_eq!(report.failed, 0, "{:?}", report.errors);
        assert!(report.connects > 100);
    }
}

/// What `cleanup` says.
fn cleanup(world: &TestNode) -> String {
    let output = Command::new(Build::Failpoints.binary())
        .args(["cleanup", "--pin-dir"])
        .arg(world.sandbox().pins())
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn hooks_of_a_later_version_go_with_a_downgrade_and_with_cleanup() {
    let Some(world) = TestNode::or_skip("hooks_of_a_later_version_go_with_a_downgrade_and_with_cleanup")
    else {
        return;
    };
    let _servers: Vec<_> = [1, 2]
        .map(|n| EchoServer::start(&format!("e{n}"), SocketAddr::new(endpoint(n)[0], 8080)).unwrap())
        .into();
    let services = |n| {
        vec![
            Service::new("web", &[service().ip()]).port("", "TCP", 80, 8080).endpoint("e", &endpoint(n)[..1]),
        ]
    };
    let links = world.sandbox().pins().join("links");
    // A hook by a name that the older version does not know, whose program leads by the later one's maps.
    let later = || std::fs::rename(links.join("connect4"), links.join("later4")).unwrap();

    world.write(&services(1));
    start(&world, Build::NextLayout, &services(1)).kill9().unwrap();
    later();
    world.write(&services(2));
    let agent = start(&world, Build::Failpoints, &services(2));
    assert_eq!(request(Transport::Tcp, service()).unwrap(), "e2", "nobody leads by the maps of before");
    assert!(!links.join("later4").exists(), "{:?}", world.pins());
    assert!(agent.log().contains("detached later4"), "{}", agent.log());
    agent.kill9().unwrap();

    later();
    let no_link = links.join("no_link");
    MapData::from_pin(world.program("").join("../active")).unwrap().pin(&no_link).unwrap();
    let said = cleanup(&world);
    assert!(said.contains("links/no_link is not ours"), "{said}");
    assert_eq!(world.pins(), ["/links/no_link"]);
    assert!(request(Transport::Tcp, service()).is_err(), "no hook is left");
}
