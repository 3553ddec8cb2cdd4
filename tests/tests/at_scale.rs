//! A state of a size that nobody should have is served totally, over the contract and in the kernel; what is wrong in it is
//! named; and nothing of it stays.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    ffi::{OsStr, OsString},
    fmt::{self, Write as _},
    fs,
    io::{self, ErrorKind},
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    time::Duration,
};

use tests::{
    Agent, Build, TestNode,
    agent::AgentCommand,
    manifest::{self, Service},
    repetitions,
    requirements::kernel_at_least,
    test_node::{NODE, expected_dump},
};

const LIMIT: Duration = Duration::from_secs(60);

/// More entries than maps for a few Services have room for, and fewer than all need.
const MUCH: u32 = 2_000;

/// How many Services there are, and how many endpoints one of them has; far fewer where everything is slow.
fn sizes() -> (u32, u32) {
    (repetitions(50_000) as u32, repetitions(100_000) as u32)
}

/// The n-th Service. One in a hundred has an endpoint; so has the last but one of all, and the last has none.
fn service(n: u32) -> Service {
    let address = Ipv4Addr::from(0x0a40_0000 + n);
    let it = Service::new(&format!("s{n}"), &[address.into()]).port("", "UDP", 53, 5353);
    if n.is_multiple_of(100) || n + 2 == sizes().0 {
        it.endpoint(&format!("s{n}-1"), &[Ipv4Addr::from(0x0b80_0000 + n).into()])
    } else {
        it
    }
}

/// The Service that has this many endpoints.
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

/// As the list that `kubectl get -o json` prints, which is read many times faster than YAML.
fn list<'a>(services: impl IntoIterator<Item = &'a Service>) -> String {
    let mut text = r#"{"apiVersion": "v1", "kind": "List", "items": ["#.to_owned();
    for it in services {
        write_objects(&mut text, it).expect("a String takes whatever is written");
    }
    text.truncate(text.len() - 1);
    text + "]}"
}

fn write_objects(text: &mut String, service: &Service) -> fmt::Result {
    let Service { name, cluster_ips, ports, endpoints, .. } = service;
    let (ip, manifest::Port { protocol, port, target, .. }) = (cluster_ips[0], &ports[0]);
    write!(
        text,
        r#"{{"apiVersion": "v1", "kind": "Service", "metadata": {{"name": "{name}", "namespace": "default"}},
        "spec": {{"type": "ClusterIP", "clusterIP": "{ip}", "clusterIPs": ["{ip}"],
        "ports": [{{"port": {port}, "protocol": "{protocol}", "targetPort": {target}}}]}}}},"#
    )?;
    if endpoints.is_empty() {
        return Ok(());
    }
    write!(
        text,
        r#"{{"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {{"name": "{name}", "namespace": "default",
        "labels": {{"kubernetes.io/service-name": "{name}"}}}},
        "ports": [{{"name": "", "port": {target}, "protocol": "{protocol}"}}], "endpoints": ["#
    )?;
    for (n, it) in endpoints.iter().enumerate() {
        let comma = if n > 0 { "," } else { "" };
        let manifest::Endpoint { name, node, addresses, .. } = it;
        write!(
            text,
            r#"{comma}{{"addresses": ["{}"], "conditions": {{"ready": true}}, "nodeName": "{node}",
            "targetRef": {{"kind": "Pod", "name": "{name}", "namespace": "default"}}}}"#,
            addresses[0]
        )?;
    }
    write!(text, "]}},")
}

/// What else somebody may write: ports that there are not, an endpoint of the wrong family, the same Service under two
/// names, and one that names another's cluster IP an external IP of its own.
const WRONG: &str = "
apiVersion: v1
kind: Service
metadata: {name: no-port, namespace: default}
spec: {clusterIP: 10.95.0.1, clusterIPs: [10.95.0.1], ports: [{port: 0, name: a}, {port: 65536, name: b}]}
---
apiVersion: v1
kind: Service
metadata: {name: wrong-family, namespace: default}
spec: {clusterIP: 10.95.0.2, clusterIPs: [10.95.0.2], ports: [{port: 53, protocol: UDP}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: wrong-family, namespace: default, labels: {kubernetes.io/service-name: wrong-family}}
addressType: IPv4
ports: [{port: 5353, protocol: UDP, name: ''}]
endpoints: [{addresses: ['fd00::1']}]
---
apiVersion: v1
kind: Service
metadata: {name: z-again, namespace: default}
spec: {clusterIP: 10.96.0.1, clusterIPs: [10.96.0.1], ports: [{port: 53, protocol: UDP}]}
---
apiVersion: v1
kind: Service
metadata: {name: z-thief, namespace: default}
spec: {clusterIP: 10.95.0.3, clusterIPs: [10.95.0.3], externalIPs: [10.64.0.1], ports: [{port: 53, protocol: UDP}]}
";
/// Who is named for it.
const NAMED: [&str; 4] = ["default/no-port", "fd00::1", "default/z-again", "default/z-thief"];
/// How many Services that are, and what is served of them all the same: nobody is there.
const REST: (usize, &[&str]) =
    (4, &["frontend 10.95.0.2:53/UDP backends=0", "frontend 10.95.0.3:53/UDP backends=0"]);
const NOTHING: (usize, &[&str]) = (0, &[]);

/// Where a connect to a Service leads: a socket that is connected to an address of this host bears it.
fn led_to(service: &Service) -> io::Result<IpAddr> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    socket.connect(SocketAddr::new(service.cluster_ips[0], 53))?;
    Ok(socket.local_addr()?.ip())
}

/// A brain and an agent.
fn start(world: &TestNode) -> [Agent; 2] {
    let sandbox = world.sandbox();
    let (mut source, mut target) = (OsString::from("file:"), OsString::from("unix://"));
    source.push(world.manifests());
    target.push(sandbox.files().join("proxy.sock"));
    let text = OsStr::new;
    let begin = |arguments: &[&OsStr]| {
        let arguments = [arguments, &[text("--node-name"), text(NODE)]].concat();
        AgentCommand::new(&Build::Product.binary(), &arguments).start(sandbox).unwrap()
    };
    let (cgroup, pins) = (sandbox.cgroup().as_os_str(), sandbox.pins().as_os_str());
    [
        begin(&[text("brain"), text("--source"), &source, text("--listen"), &target]),
        begin(&[text("agent"), text("--cgroup"), cgroup, text("--pin-dir"), pins, text("--target"), &target]),
    ]
}

/// Waits until exactly these Services are in force, and what is served of what is wrong.
#[track_caller]
fn comes_to(world: &TestNode, agent: &mut Agent, services: &[Service], (wrong, rest): (usize, &[&str])) {
    // The log first: a dump of everything takes its time.
    let (log, count) = (agent.log_path().to_owned(), services.len() + wrong);
    let says = format!(" services={count} ");
    let is_told = || {
        let log = fs::read_to_string(&log).unwrap_or_default();
        log.lines().rfind(|it| it.contains("state active")).is_some_and(|it| it.contains(&says))
    };
    agent.wait_until(LIMIT, is_told).unwrap();
    let mut expect = expected_dump(services);
    expect.extend(rest.iter().map(|&it| it.to_owned()));
    expect.sort_unstable();
    let found = world.dump(Build::Product).unwrap();
    let missing: Vec<_> = expect.iter().filter(|it| found.binary_search(it).is_err()).take(5).collect();
    let extra: Vec<_> = found.iter().filter(|it| expect.binary_search(it).is_err()).take(5).collect();
    assert!(found == expect, "missing: {missing:#?}, should not be there: {extra:#?}");
}

/// How many entries there is room for in the maps of Services. (One that is about to take another's place has the name of
/// its own for a moment only.)
fn room(world: &TestNode) -> u32 {
    let inner = world.pins().into_iter().filter(|it| it.contains("/side") && !it.ends_with("_new"));
    let maps = inner.map(|it| world.sandbox().pins().join(it.trim_start_matches('/')));
    maps.map(|it| aya::maps::MapData::from_pin(it).unwrap().info().unwrap().max_entries()).sum()
}

#[test]
fn a_state_of_any_size_is_served_totally_and_leaves_nothing_behind() {
    let Some(world) = TestNode::or_skip("at_scale") else { return };
    let (services, endpoints) = sizes();
    world.netns().ip(&["route", "add", "local", "11.0.0.0/8", "dev", "lo"]).unwrap();
    let few = [service(0), service(1)];
    let file = world.manifests().join("all.json");
    manifest::write_atomically(&file, &list(&few)).unwrap();
    let [brain, mut agent] = start(&world);
    comes_to(&world, &mut agent, &few, NOTHING);

    let all: Vec<_> = (0..services).map(service).chain([large(endpoints)]).collect();
    manifest::write_atomically(&file, &list(&all)).unwrap();
    comes_to(&world, &mut agent, &all, NOTHING);
    assert!(room(&world) > MUCH);
    let [.., last_but_one, last, large] = &all[..] else { unreachable!("there are more") };
    for service in [&all[0], last_but_one] {
        assert_eq!(led_to(service).unwrap(), service.endpoints[0].addresses[0]);
    }
    // Before `bpf_set_retval`, connected UDP is refused at its second send.
    if kernel_at_least(5, 18) {
        assert_eq!(led_to(last).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    }
    let is_of_large = |it: IpAddr| (pod(0)..=pod(endpoints - 1)).contains(&it);
    assert!((0..100).all(|_| is_of_large(led_to(large).unwrap())));

    // Something wrong takes nothing of it away, and is named.
    manifest::write_atomically(&world.manifests().join("wrong.yaml"), WRONG).unwrap();
    comes_to(&world, &mut agent, &all, REST);
    let log = brain.log();
    assert!(NAMED.iter().all(|it| log.contains(it)), "{log}");

    // And back.
    fs::remove_file(world.manifests().join("wrong.yaml")).unwrap();
    manifest::write_atomically(&file, &list(&few)).unwrap();
    comes_to(&world, &mut agent, &few, NOTHING);
    assert_eq!(led_to(&few[0]).unwrap(), few[0].endpoints[0].addresses[0]);
    // Maps shrink at a start: one side before it is in force, the other after.
    drop((brain, agent));
    let [_brain, mut agent] = start(&world);
    comes_to(&world, &mut agent, &few, NOTHING);
    agent.wait_until(LIMIT, || room(&world) < MUCH).unwrap();
}
