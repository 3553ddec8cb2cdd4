//! Invariant 7: the agent can die at any moment; the kernel goes on serving a whole generation, and the next start takes
//! it over.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    thread,
    time::Duration,
};

use tests::{
    Agent, Build, ConnectLoad, EchoConnection, EchoServer, TestNode, Transport, eventually,
    load::LoadReport,
    manifest::Service,
    repetitions, scaled,
    test_node::{expected_dump, kernel_objects, settled_kernel_objects},
};

const LIMIT: Duration = Duration::from_secs(20);
const WEB4: &str = "10.96.0.10";
const WEB6: &str = "fd00:10:96::10";
/// A Service whose endpoint stays.
const STEADY4: &str = "10.96.0.11";
const STEADY6: &str = "fd00:10:96::11";

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn endpoint(n: usize) -> [IpAddr; 2] {
    [ip(&format!("10.244.1.{n}")), ip(&format!("fd00:10:244::1:{n}"))]
}

/// The Service under load, with a set of endpoints that differs from round to round, and some others beside it.
fn services(round: usize, others: usize) -> Vec<Service> {
    let mut web =
        Service::new("web", &[ip(WEB4), ip(WEB6)]).port("tcp", "TCP", 80, 8080).port("udp", "UDP", 80, 8080);
    for n in 0..=round % 3 {
        let n = 1 + (round + n) % 5;
        web = web.endpoint(&format!("e{n}"), &endpoint(n));
    }
    let other = |n| {
        let address = ip(&format!("10.96.{}.{}", 1 + n / 250, 1 + n % 250));
        Service::new(&format!("other-{n}"), &[address])
            .port("", "UDP", 53, 5353)
            .endpoint("e1", &[ip("10.244.2.1")])
    };
    let steady = Service::new("steady", &[ip(STEADY4), ip(STEADY6)])
        .port("", "UDP", 80, 8080)
        .endpoint("e1", &endpoint(1));
    [web, steady].into_iter().chain((0..others).map(other)).collect()
}

/// Connections that were made before, and must last.
struct Lasting {
    tcp: Vec<(EchoConnection, SocketAddr)>,
    udp: Vec<(UdpSocket, SocketAddr)>,
}

impl Lasting {
    fn begin() -> Self {
        let services = [WEB4, WEB6].map(|it| SocketAddr::new(ip(it), 80));
        let tcp = services.map(|it| (EchoConnection::connect(it).unwrap(), it)).into();
        // Connected UDP ends with its endpoint.
        let udp = [STEADY4, STEADY6].map(|it| SocketAddr::new(ip(it), 80)).map(|service| {
            let any = if service.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
            let socket = UdpSocket::bind(any).unwrap();
            socket.set_read_timeout(Some(scaled(Duration::from_secs(2)))).unwrap();
            socket.connect(service).unwrap();
            (socket, service)
        });
        Self { tcp, udp: udp.into() }
    }

    #[track_caller]
    fn check(&mut self, after: &str) {
        for (probe, service) in &mut self.tcp {
            probe.ping().unwrap_or_else(|error| panic!("a connection to {service} broke {after}: {error}"));
            assert_eq!(probe.stream().peer_addr().unwrap(), *service, "{after}");
        }
        for (socket, service) in &self.udp {
            let mut answer = [0; 64];
            socket.send(b"who?").unwrap();
            let (_, from) =
                socket.recv_from(&mut answer).unwrap_or_else(|error| panic!("{service} {after}: {error}"));
            assert_eq!((from, socket.peer_addr().unwrap()), (*service, *service), "{after}");
        }
    }
}

/// Waits until exactly these Services are in force.
#[track_caller]
fn converges(world: &TestNode, agent: &mut Agent, services: &[Service], after: &str) {
    let expected = expected_dump(services);
    let mut last = Vec::new();
    let done = agent.wait_until(LIMIT, || {
        last = world.dump(Build::Failpoints).unwrap_or_default();
        last == expected
    });
    if let Err(error) = done {
        panic!("no convergence {after}: {error:#}\nexpected {expected:#?}\nfound {last:#?}");
    }
}

/// Starts an agent that dies at a named step, and changes the Services until it does.
fn die_at(world: &TestNode, fault: &str, round: &mut usize, others: &mut usize) {
    let setting = world.command(Build::Failpoints).env("KUBE_PROXY_EBPF_FAULT", fault);
    let mut agent = setting.start(world.sandbox()).unwrap();
    let grows = fault.starts_with("mid-growth");
    let log = agent.log_path().to_owned();
    let told = || std::fs::read_to_string(&log).unwrap_or_default().matches("state active rev").count();
    let died = eventually(LIMIT, || {
        *round += 1;
        let before = told();
        *others += if grows { 40 } else { 0 };
        world.write(&services(*round, *others));
        // What grows is waited for: a slow start would be met by ever more.
        eventually(LIMIT, || agent.wait(Duration::from_millis(60)).is_ok() || !grows || told() > before);
        agent.wait(Duration::ZERO).is_ok()
    });
    assert!(died, "{fault} was never reached; the agent said:\n{}", agent.log());
    eprintln!("died at {fault} in round {round}, with {others} Services beside");
    let status = agent.wait(LIMIT).unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9), "{fault}: {}", agent.log());
}

fn cleanup(world: &TestNode) {
    let cleanup = std::process::Command::new(Build::Failpoints.binary())
        .args(["cleanup", "--pin-dir"])
        .arg(world.sandbox().pins())
        .output()
        .unwrap();
    assert!(cleanup.status.success(), "{cleanup:?}");
    assert!(!world.sandbox().pins().exists());
}

#[test]
fn a_first_start_that_dies_is_finished_by_the_next() {
    let Some(world) = TestNode::or_skip("a_first_start_that_dies_is_finished_by_the_next") else { return };
    let _server = EchoServer::start("e1", SocketAddr::new(endpoint(1)[0], 8080)).unwrap();
    let web = Service::new("web", &[ip(WEB4)]).port("tcp", "TCP", 80, 8080).endpoint("e1", &endpoint(1)[..1]);
    world.write(&[web]);
    let before = settled_kernel_objects();
    for fault in ["filled-not-flipped", "half-attached", "link-unnamed", "link-unnamed:5", "link-unnamed:8"] {
        let setting = world.command(Build::Failpoints).env("KUBE_PROXY_EBPF_FAULT", fault);
        let status = setting.start(world.sandbox()).unwrap().wait(LIMIT).unwrap();
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9), "{fault}");
        let mut agent = world.command(Build::Failpoints).start(world.sandbox()).unwrap();
        let service = SocketAddr::new(ip(WEB4), 80);
        agent.wait_until(LIMIT, || world.is_attached() && EchoConnection::connect(service).is_ok()).unwrap();
        // Two links at one hook would hide the Service from getpeername.
        for _ in 0..50 {
            assert_eq!(
                EchoConnection::connect(service).unwrap().stream().peer_addr().unwrap(),
                service,
                "{fault}"
            );
        }
        assert!(!world.pins().iter().any(|it| it.ends_with("_new")), "{fault}: {:?}", world.pins());
        agent.terminate().unwrap();
        cleanup(&world);
        assert!(eventually(LIMIT, || kernel_objects() == before), "{fault}: {:?}", kernel_objects());
        std::fs::create_dir(world.sandbox().pins()).unwrap();
    }
}

#[test]
fn restart_keeps_connections() {
    let Some(world) = TestNode::or_skip("restart_keeps_connections") else { return };
    let servers: Vec<_> = (1..=5)
        .flat_map(endpoint)
        .map(|it| {
            if it.is_ipv6() {
                world.netns().add_address(it).unwrap();
            }
            EchoServer::start(&format!("{it}"), SocketAddr::new(it, 8080)).unwrap()
        })
        .collect();
    let (mut round, mut others) = (1, 3);
    let before = settled_kernel_objects();
    world.write(&services(round, others));
    let mut agent = world.command(Build::Failpoints).start(world.sandbox()).unwrap();
    converges(&world, &mut agent, &services(round, others), "at first");
    // The maps are filled a little before the programs are in effect.
    agent.wait_until(LIMIT, || world.is_attached()).unwrap();

    let loads = [
        (Transport::Tcp, WEB4),
        (Transport::Tcp, WEB6),
        (Transport::Udp, WEB4),
        (Transport::UdpUnconnected, WEB6),
    ]
    .map(|(transport, address)| {
        // An emulated machine must have time left for the agents.
        ConnectLoad::start(transport, SocketAddr::new(ip(address), 80), 1, scaled(Duration::from_millis(4)))
    });
    let mut lasting = Lasting::begin();
    let objects = settled_kernel_objects();
    let pins = world.pins();
    agent.kill9().unwrap();

    // At a start over what is there, and at a change later on.
    for fault in [
        "mid-batch",
        "mid-batch:5",
        "mid-batch:14",
        "owned-not-filled",
        "owned-not-filled:3",
        "filled-not-flipped",
        "filled-not-flipped:3",
        "flipped-before-grace",
        "flipped-before-grace:3",
        "mid-growth",
        "mid-growth:5",
        "half-attached",
    ] {
        die_at(&world, fault, &mut round, &mut others);
        let after = format!("after dying at {fault}");
        lasting.check(&after);
        let mut agent = world.command(Build::Failpoints).start(world.sandbox()).unwrap();
        converges(&world, &mut agent, &services(round, others), &after);
        lasting.check(&after);
        agent.kill9().unwrap();
    }

    // Anywhere.
    let mut random = 0x2545_f491_u32;
    for _ in 0..repetitions(25) {
        let agent = world.command(Build::Failpoints).start(world.sandbox()).unwrap();
        random = random.wrapping_mul(0x9e37_79b1).wrapping_add(1);
        let lives = scaled(Duration::from_micros(u64::from(random >> 13)));
        let begin = std::time::Instant::now();
        while begin.elapsed() < lives {
            round += 1;
            world.write(&services(round, others));
            thread::sleep(Duration::from_millis(7));
        }
        agent.kill9().unwrap();
    }
    lasting.check("after dying at random");
    others = 3;
    world.write(&services(round, others));
    let mut agent = world.command(Build::Failpoints).start(world.sandbox()).unwrap();
    converges(&world, &mut agent, &services(round, others), "in the end");
    lasting.check("in the end");

    for load in loads {
        let report = LoadReport::of(&load.stop());
        eprintln!(
            "{} connects, {} failed, p50 {:?}, p99 {:?}",
            report.connects, report.failed, report.p50, report.p99
        );
        assert_eq!(report.failed, 0, "{:?}", report.errors);
        assert!(report.connects > 100);
    }
    let same_pins = eventually(LIMIT, || world.pins() == pins);
    assert!(same_pins, "a pin was left over, or is missing: {:#?} now, {pins:#?} before", world.pins());
    assert!(
        eventually(LIMIT, || kernel_objects() == objects),
        "leaked: {:?} now, {objects:?} before",
        kernel_objects()
    );

    // And then nothing is left at all.
    drop(lasting);
    assert_eq!(agent.terminate().unwrap().code(), Some(0));
    cleanup(&world);
    assert!(
        eventually(LIMIT, || kernel_objects() == before),
        "leaked: {:?} now, {before:?} before",
        kernel_objects()
    );
    drop(servers);
}
