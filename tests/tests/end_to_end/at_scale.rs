//! An excessively large state is served completely, over the contract and in the kernel; its errors are reported; and
//! nothing of it is left behind.

use std::{
    fs,
    io::{self, ErrorKind},
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
};

use tests::{
    APPLIED, Agent, Build, Service, TIMEOUT, TestNode, expected_dump, kernel_at_least, manifest, repetitions,
};

/// More entries than the maps of a few Services have room for, and fewer than all Services need.
const MANY_ENTRIES: u32 = 2_000;

/// The number of Services, and the number of endpoints of one of them; far fewer on a slow machine.
fn sizes() -> (u32, u32) {
    (repetitions(50_000) as u32, repetitions(100_000) as u32)
}

/// The n-th Service. Every hundredth has an endpoint, and so has the last but one; the last has none.
fn service(n: u32) -> Service {
    let address = Ipv4Addr::from(0x0a40_0000 + n);
    let it = Service::new(&format!("s{n}"), &[address.into()]).port("", "UDP", 53, 5353);
    if n.is_multiple_of(100) || n + 2 == sizes().0 {
        it.endpoint(&format!("s{n}-1"), &[Ipv4Addr::from(0x0b80_0000 + n).into()])
    } else {
        it
    }
}

fn large(endpoints: u32) -> Service {
    let mut it = Service::new("large", &[[10, 96, 0, 1].into()]).port("", "UDP", 53, 5353);
    for n in 0..endpoints {
        it = it.endpoint(&format!("large-{n}"), &[pod(n)]);
    }
    it
}

fn pod(n: u32) -> IpAddr {
    Ipv4Addr::from(0x0b00_0000 + n).into()
}

/// Invalid manifests: ports out of range, an endpoint of the wrong family, one cluster IP of two Services, and an external
/// IP that is another Service's cluster IP.
const INVALID: &str = include_str!("at_scale/invalid.yaml");
/// What is reported about them.
const REPORTED: [&str; 4] = ["default/no-port", "fd00::1", "default/z-again", "default/z-thief"];
/// How many Services these are, and their frontends that are served nevertheless, without endpoints.
const REST: (usize, &[&str]) =
    (4, &["frontend 10.95.0.2:53/UDP backends=0", "frontend 10.95.0.3:53/UDP backends=0"]);
const NOTHING: (usize, &[&str]) = (0, &[]);

/// The endpoint that a connect is redirected to: a socket connected to a local address has it as its source.
fn redirected_to(service: &Service) -> io::Result<IpAddr> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    socket.connect(SocketAddr::new(service.cluster_ips[0], 53))?;
    Ok(socket.local_addr()?.ip())
}

/// Waits until exactly these Services are active, and the valid parts of the invalid ones.
#[track_caller]
fn wait_until_active(
    node: &TestNode,
    agent: &mut Agent,
    services: &[Service],
    (invalid, rest): (usize, &[&str]),
) {
    // The log first: a dump of everything takes long.
    let count = format!(" services={} ", services.len() + invalid);
    let is_logged =
        |log: &str| log.lines().rfind(|it| it.contains(APPLIED)).is_some_and(|it| it.contains(&count));
    agent.wait_for_log(TIMEOUT, is_logged).unwrap();
    let mut expected = expected_dump(services);
    expected.extend(rest.iter().map(|&it| it.to_owned()));
    expected.sort_unstable();
    let found = node.dump(Build::Product).unwrap();
    let missing: Vec<_> = expected.iter().filter(|it| found.binary_search(it).is_err()).take(5).collect();
    let extra: Vec<_> = found.iter().filter(|it| expected.binary_search(it).is_err()).take(5).collect();
    assert!(found == expected, "missing: {missing:#?}, unexpected: {extra:#?}");
}

/// The capacity of all maps of Services. (A map that will replace another has a temporary name.)
fn capacity(node: &TestNode) -> u32 {
    let inner = node.pins().into_iter().filter(|it| it.contains("/side") && !it.ends_with("_new"));
    let maps = inner.map(|it| node.sandbox().pins().join(it.trim_start_matches('/')));
    maps.map(|it| aya::maps::MapData::from_pin(it).unwrap().info().unwrap().max_entries()).sum()
}

#[test]
fn a_state_of_any_size_is_served_completely_and_leaves_nothing_behind() {
    let Some(node) = TestNode::or_skip() else { return };
    let (services, endpoints) = sizes();
    node.netns().ip(&["route", "add", "local", "11.0.0.0/8", "dev", "lo"]).unwrap();
    let few = [service(0), service(1)];
    node.write_file("all.json", &manifest::list(&few));
    let (brain, mut agent) = (node.start_brain(), node.start_agent());
    wait_until_active(&node, &mut agent, &few, NOTHING);

    let all: Vec<_> = (0..services).map(service).chain([large(endpoints)]).collect();
    node.write_file("all.json", &manifest::list(&all));
    wait_until_active(&node, &mut agent, &all, NOTHING);
    assert!(capacity(&node) > MANY_ENTRIES);
    let [.., last_but_one, last, large] = &all[..] else { unreachable!("there are at least three") };
    for service in [&all[0], last_but_one] {
        assert_eq!(redirected_to(service).unwrap(), service.endpoints[0].addresses[0]);
    }
    // Before `bpf_set_retval`, connected UDP is refused at its second send.
    if kernel_at_least(5, 18) {
        assert_eq!(redirected_to(last).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    }
    let is_of_large = |it: IpAddr| (pod(0)..=pod(endpoints - 1)).contains(&it);
    assert!((0..100).all(|_| is_of_large(redirected_to(large).unwrap())));

    // Invalid manifests change nothing of it, and are reported.
    node.write_file("invalid.yaml", INVALID);
    wait_until_active(&node, &mut agent, &all, REST);
    let log = brain.log();
    assert!(REPORTED.iter().all(|it| log.contains(it)), "{log}");

    // Back to few.
    fs::remove_file(node.manifests().join("invalid.yaml")).unwrap();
    node.write_file("all.json", &manifest::list(&few));
    wait_until_active(&node, &mut agent, &few, NOTHING);
    assert_eq!(redirected_to(&few[0]).unwrap(), few[0].endpoints[0].addresses[0]);
    // Maps shrink at a start: the spare side before it becomes active, the other side afterwards.
    drop((brain, agent));
    let (_brain, mut agent) = (node.start_brain(), node.start_agent());
    wait_until_active(&node, &mut agent, &few, NOTHING);
    agent.wait_until(TIMEOUT, || capacity(&node) < MANY_ENTRIES).unwrap();
}
