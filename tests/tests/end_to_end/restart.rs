//! The agent can be killed at any moment: the kernel keeps serving one complete generation, and the next start takes over.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::unix::process::ExitStatusExt as _,
    thread,
    time::{Duration, Instant},
};

use tests::{
    APPLIED, Agent, Build, ConnectLoad, EchoConnection, FRONTEND, ObjectTracker, Service, TIMEOUT, TestNode,
    Transport, WEB, eventually, expected_dump, is_slow_machine,
    kernel_objects::ObjectKind::{Link, Map, Program},
    repetitions, scaled, skip, web, web4,
};

use super::upgrade::{self, Flow};

/// The addresses of a Service whose endpoint stays.
const STEADY: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(10, 96, 0, 11)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 0, 0x11)),
];

/// `web`, with other endpoints in each round, `steady`, and a number of other Services.
fn services(round: usize, others: usize) -> Vec<Service> {
    let web = web((0..=round % 3).map(|n| 1 + ((round + n) % 5) as u8));
    let steady = Service::new("steady", &STEADY).port("", "UDP", 80, 8080).endpoints([1]);
    let other = |n: usize| {
        let address = Ipv4Addr::new(10, 96, (1 + n / 250) as u8, (1 + n % 250) as u8);
        Service::new(&format!("other-{n}"), &[address.into()])
            .port("", "UDP", 53, 5353)
            .endpoint("e1", &[[10, 244, 2, 1].into()])
    };
    [web, steady].into_iter().chain((0..others).map(other)).collect()
}

/// Connections made at the start that must survive.
struct LongLived {
    tcp: Vec<(EchoConnection, SocketAddr)>,
    udp: Vec<Flow>,
}

impl LongLived {
    fn connect() -> Self {
        let tcp = WEB.map(|it| SocketAddr::new(it, 80)).map(|it| (EchoConnection::connect(it).unwrap(), it));
        // Connected UDP is terminated with its endpoint.
        let udp = STEADY.map(|it| Flow::new(SocketAddr::new(it, 80), true));
        Self { tcp: tcp.into(), udp: udp.into() }
    }

    #[track_caller]
    fn check(&mut self, when: &str) {
        upgrade::check(&mut self.tcp, when);
        self.udp.iter_mut().for_each(|it| it.exchange(when));
    }
}

/// Starts an agent and waits until exactly these Services are active.
#[track_caller]
fn start(node: &TestNode, services: &[Service], when: &str) -> Agent {
    let mut agent = node.command(Build::Failpoints).start(node.sandbox()).unwrap();
    // A dump is a process of its own, which takes seconds in an emulated machine.
    agent.wait_until_applied(TIMEOUT).unwrap_or_else(|error| panic!("no state {when}: {error:#}"));
    let expected = expected_dump(services);
    let mut last = Vec::new();
    let done = agent.wait_until(TIMEOUT, || {
        last = node.dump(Build::Failpoints).unwrap_or_default();
        last == expected
    });
    if let Err(error) = done {
        panic!("no convergence {when}: {error:#}\nexpected {expected:#?}\nfound {last:#?}");
    }
    agent
}

/// Starts an agent that kills itself at a failpoint, and changes the Services until it does.
fn crash_at(node: &TestNode, failpoint: &str, round: &mut usize, others: &mut usize) {
    let command = node.command(Build::Failpoints).env("KUBE_PROXY_EBPF_FAULT", failpoint);
    let mut agent = command.start(node.sandbox()).unwrap();
    let growth = match failpoint {
        _ if failpoint.starts_with("mid-growth") => 40,
        // The counters of removed Services and endpoints keep their owners for some seconds: only a new one has none.
        _ if failpoint.starts_with("owned-not-filled") => 1,
        _ => 0,
    };
    let applied = format!("{APPLIED} rev");
    let has_crashed = eventually(TIMEOUT, || {
        *round += 1;
        let before = agent.count_logged(&applied);
        *others += growth;
        node.write(&services(*round, *others));
        // Growth waits for the agent: a slow start would face an ever larger state.
        eventually(TIMEOUT, || {
            agent.wait(Duration::from_millis(60)).is_ok()
                || growth == 0
                || agent.count_logged(&applied) > before
        });
        agent.wait(Duration::ZERO).is_ok()
    });
    assert!(has_crashed, "{failpoint} was not reached; the agent's log:\n{}", agent.log());
    eprintln!("crashed at {failpoint} in round {round}, with {others} other Services");
    let status = agent.wait(TIMEOUT).unwrap();
    assert_eq!(status.signal(), Some(9), "{failpoint}: {}", agent.log());
}

fn cleanup(node: &TestNode) {
    tests::run(&mut node.cli("cleanup")).success();
    assert!(!node.sandbox().pins().exists());
}

#[track_caller]
fn assert_no_objects(objects: &mut ObjectTracker, when: &str) {
    let is_clean = eventually(TIMEOUT, || objects.observe().is_empty() && objects.leaked().is_empty());
    assert!(is_clean, "left behind {when}: {:?}; leaked: {:?}", objects.observe(), objects.leaked());
}

#[test]
fn the_switch_of_grace_periods_is_set_only_while_an_update_waits() {
    let tickless = fs::read_to_string("/sys/devices/system/cpu/nohz_full").unwrap_or_default();
    if !matches!(tickless.trim(), "" | "(null)") {
        return skip("this machine has tickless CPUs");
    }
    let Some(mut node) = TestNode::serving_or_skip([1]) else { return };
    let switch = node.sandbox().files().join("rcu_expedited");
    let is_unset = || fs::read_to_string(&switch).is_ok_and(|it| it == "0");
    let last_written = || fs::metadata(&switch).unwrap().modified().unwrap();
    // As a killed process leaves it.
    fs::write(&switch, "2").unwrap();
    node.write(&[web([1])]);
    let flag = format!("--rcu-expedited={}", switch.display());
    node.start(&[&flag]);
    node.wait_until(|_| is_unset());
    let started = last_written();
    node.apply(&[web([])]);
    node.wait_until(|_| last_written() > started && is_unset());
    node.kill();
    fs::write(&switch, "2").unwrap();
    tests::run(node.cli("cleanup").arg(&flag)).success();
    assert!(is_unset(), "cleanup leaves nothing");
}

#[test]
fn the_next_start_completes_a_first_start_that_crashed() {
    let Some(mut node) = TestNode::prepared_or_skip([1], &[web4([1])]) else { return };
    let mut objects = ObjectTracker::new(node.sandbox());
    for failpoint in
        ["filled-not-flipped", "half-attached", "link-unnamed", "link-unnamed:5", "link-unnamed:8"]
    {
        node.start_inactive(&node.command(Build::Failpoints).env("KUBE_PROXY_EBPF_FAULT", failpoint));
        let status = node.agent_mut().wait(TIMEOUT).unwrap();
        assert_eq!(status.signal(), Some(9), "{failpoint}");
        objects.observe();
        node.start_inactive(&node.command(Build::Failpoints));
        node.wait_until(|it| it.is_attached() && EchoConnection::connect(FRONTEND).is_ok());
        // Two links at one hook would hide the Service from getpeername.
        for _ in 0..50 {
            let connection = EchoConnection::connect(FRONTEND).unwrap();
            assert_eq!(connection.stream().peer_addr().unwrap(), FRONTEND, "{failpoint}");
        }
        assert!(!node.pins().iter().any(|it| it.ends_with("_new")), "{failpoint}: {:?}", node.pins());
        objects.observe();
        node.terminate();
        cleanup(&node);
        assert_no_objects(&mut objects, failpoint);
        fs::create_dir(node.sandbox().pins()).unwrap();
    }
}

#[test]
fn restart_keeps_connections() {
    let Some(node) = TestNode::serving_or_skip(1..=5) else { return };
    let (mut round, mut others) = (1, 3);
    node.write(&services(round, others));
    let mut agent = start(&node, &services(round, others), "at first");
    // The maps are filled before the programs are attached.
    agent.wait_until(TIMEOUT, || node.is_attached()).unwrap();

    let loads = [
        (Transport::Tcp, WEB[0]),
        (Transport::Tcp, WEB[1]),
        (Transport::Udp, WEB[0]),
        (Transport::UdpUnconnected, WEB[1]),
    ]
    .map(|(transport, ip)| {
        // The interval is scaled so that an emulated machine has time left for the agents.
        ConnectLoad::start(transport, SocketAddr::new(ip, 80), 1, scaled(Duration::from_millis(4)))
    });
    let mut connections = LongLived::connect();
    let mut objects = ObjectTracker::new(node.sandbox());
    let counts = objects.settled_counts();
    assert!(counts[&Link] > 8 && counts[&Program] > 8 && counts[&Map] > 16, "{counts:?}");
    let pins = node.pins();
    agent.kill9().unwrap();

    // During a start over existing state, and during a later change; where each start takes minutes, the former only.
    let failpoints = [
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
    ];
    for failpoint in failpoints.into_iter().filter(|it| !is_slow_machine() || !it.contains(':')) {
        crash_at(&node, failpoint, &mut round, &mut others);
        objects.observe();
        let when = format!("after a crash at {failpoint}");
        connections.check(&when);
        let agent = start(&node, &services(round, others), &when);
        objects.observe();
        connections.check(&when);
        agent.kill9().unwrap();
    }

    // At random moments.
    let mut random = 0x2545_f491_u32;
    for _ in 0..repetitions(25) {
        let agent = node.command(Build::Failpoints).start(node.sandbox()).unwrap();
        random = random.wrapping_mul(0x9e37_79b1).wrapping_add(1);
        let lifetime = scaled(Duration::from_micros(u64::from(random >> 13)));
        let begin = Instant::now();
        while begin.elapsed() < lifetime {
            round += 1;
            node.write(&services(round, others));
            thread::sleep(Duration::from_millis(7));
        }
        agent.kill9().unwrap();
        objects.observe();
    }
    connections.check("after crashes at random moments");
    others = 3;
    node.write(&services(round, others));
    let agent = start(&node, &services(round, others), "at the end");
    connections.check("at the end");

    for load in loads {
        load.stop_without_failure(100);
    }
    let same_pins = eventually(TIMEOUT, || node.pins() == pins);
    assert!(same_pins, "a pin is left over, or is missing: {:#?} now, {pins:#?} before", node.pins());
    let no_leak = eventually(TIMEOUT, || objects.counts() == counts && objects.leaked().is_empty());
    let (now, leaked) = (objects.counts(), objects.leaked());
    assert!(no_leak, "{now:?} now, {counts:?} before; leaked: {leaked:?}");

    // And `cleanup` leaves nothing at all.
    drop(connections);
    assert_eq!(agent.terminate().unwrap().code(), Some(0));
    cleanup(&node);
    assert_no_objects(&mut objects, "by cleanup");
}
