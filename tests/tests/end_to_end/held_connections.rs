//! Clients that hold connections to the pages of the proxy, idle, slow or without reading, take nothing from others.
//!
//! They are in a network namespace of their own, and need no capability for what they do.

use std::{
    collections::VecDeque,
    io::{self, Write},
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use socket2::{Domain, Socket, Type};
use tests::{
    Background, NetNs, Service, TestNode, eventually,
    http::{self, HEALTH_PORT, health, metrics, probe},
    is_slow_machine, metric, repetitions, web4,
};

use super::large_reports::unread;

const NODE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
/// A load balancer, beside the attackers.
const NEIGHBOR: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
const CHECK_PORT: u16 = 32_001;
const HELD: usize = 10_000;

/// The namespace of the attackers, who have every address of 10.99.0.0/16.
fn attackers(node: &TestNode) -> NetNs {
    let attackers = NetNs::new().unwrap();
    node.netns().connect_veth("attack", &attackers, "eth0").unwrap();
    node.netns().add_interface_address(&format!("{NODE}/24"), "attack").unwrap();
    node.netns().ip(&["route", "add", "10.99.0.0/16", "via", &NEIGHBOR.to_string()]).unwrap();
    attackers.add_interface_address(&format!("{NEIGHBOR}/24"), "eth0").unwrap();
    attackers.ip(&["route", "add", "local", "10.99.0.0/16", "dev", "lo"]).unwrap();
    attackers
}

/// Raises this process's limit of open files, which is 1,024 by default.
pub(super) fn allow_open_files(number: usize) {
    let number = number as u64;
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, soft.max(number), hard.max(number)).unwrap();
}

/// The n-th connection, each from another address: idle, with half a request, or with requests whose responses it never reads.
fn hold(n: usize) -> io::Result<Socket> {
    let port = if n.is_multiple_of(2) { HEALTH_PORT } else { CHECK_PORT };
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    let source = Ipv4Addr::from_bits(Ipv4Addr::new(10, 99, 0, 1).to_bits() + n as u32 % 60_000);
    socket.bind(&SocketAddr::from((source, 0)).into())?;
    socket.connect_timeout(&SocketAddr::from((NODE, port)).into(), Duration::from_secs(10))?;
    let sent = match n % 3 {
        0 => String::new(),
        1 => "GET /healthz HTTP/1.1\r\nHost:".to_owned(),
        _ => "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n".repeat(100),
    };
    // The server may have closed it already.
    let _ = (&socket).write(sent.as_bytes());
    Ok(socket)
}

/// As many connections as the machine can open.
mod alone {
    use super::*;

    #[test]
    fn every_probe_is_answered_while_ten_thousand_connections_are_held() {
        let Some(mut node) = TestNode::or_skip() else { return };
        // On an emulated machine opening them all takes more than ten minutes; these are also several times what the pages hold.
        let held = if is_slow_machine() { 3_000 } else { HELD };
        allow_open_files(held + 1_000);
        let attackers = attackers(&node);
        let web = web4([1]).load_balancer_ips(&[[203, 0, 113, 1].into()]);
        node.write(&[web.external_local().health_check_node_port(CHECK_PORT)]);
        node.start(&["--packets=off"]);
        node.wait_until_ready();
        node.wait_until(|_| http::get((NODE, CHECK_PORT).into(), "/").is_ok());

        let (opened, mut holding) = (Arc::<AtomicUsize>::default(), Background::default());
        let opening = Arc::clone(&opened);
        let open = move |stop: &AtomicBool| {
            let mut all = VecDeque::new();
            // More and more, and then again and again.
            while !stop.load(Ordering::Relaxed) {
                all.extend(hold(opening.load(Ordering::Relaxed)));
                if all.len() > held {
                    all.pop_front();
                    thread::sleep(Duration::from_millis(1));
                }
                opening.fetch_add(1, Ordering::Relaxed);
            }
        };
        attackers.run(|| holding.spawn(open));
        let mut times = Vec::new();
        let mut check = |name: &'static str, get: &dyn Fn() -> io::Result<http::Response>| {
            let start = Instant::now();
            let response = get().unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!(response.status, 200, "{name}: {response:?}");
            times.push((start.elapsed(), name));
        };
        let from_outside = |port: u16, path: &str| attackers.run(|| http::get((NODE, port).into(), path));
        let mut round = || {
            check("probe", &|| probe("/livez"));
            check("readiness probe", &|| probe("/readyz"));
            check("/livez of this host", &|| health("/livez"));
            check("/healthz of a load balancer", &|| from_outside(HEALTH_PORT, "/healthz"));
            check("health-check node port", &|| from_outside(CHECK_PORT, "/"));
        };
        // While the connections are opened, and while they are held.
        while opened.load(Ordering::Relaxed) <= held {
            round();
            thread::sleep(Duration::from_millis(20));
        }
        (0..repetitions(30)).for_each(|_| round());
        let number = metric("kube_proxy_ebpf_http_connections{pages=\"health\"}").unwrap();
        drop(holding);

        assert!((1.0..=512.0).contains(&number), "{number} connections are open");
        let closed = metric("kube_proxy_ebpf_http_connections_closed_total{pages=\"health\"}").unwrap();
        // An emulated machine opens them hardly faster than the pages end idle ones by themselves.
        assert!(
            is_slow_machine() || closed > held as f64 / 2.0,
            "{closed} of {held} were closed for newer ones"
        );
        assert_eq!(metric("kube_proxy_ebpf_http_connections_closed_total{pages=\"probes\"}"), Some(0.0));
        let files = metric("process_open_fds").unwrap();
        // Those that are about to close have not been closed yet.
        assert!(files < 1_300.0, "{files} files are open");
        assert!(node.agent().count_logged("connections are open") <= 3, "{}", node.log());
        let (longest, name) = times.iter().max().unwrap();
        let sum: Duration = times.iter().map(|(it, _)| *it).sum();
        println!(
            "{} answers beside {held} connections: mean {:?}, longest {longest:?} ({name})",
            times.len(),
            sum / times.len() as u32
        );
    }
}

/// On slow machines, too: a small rendering says nothing about the memory of many.
const SERVICES: usize = 800;

fn large(last: u8) -> Vec<Service> {
    let service = |n: usize| {
        let address = Ipv4Addr::from_bits(Ipv4Addr::new(10, 96, 16, 0).to_bits() + n as u32);
        Service::new(&format!("service-{n}"), &[address.into()])
            .port("http", "TCP", 80, 8080)
            .endpoints(1..=last)
    };
    (0..SERVICES).map(service).collect()
}

#[test]
fn readers_of_many_states_that_never_read_cost_no_page() {
    let Some(mut node) = TestNode::running_or_skip([], &large(19), &[]) else { return };
    node.wait_until_ready();
    // What any reader costs, and what the process needs anyway.
    let page = node.status_page("/state").unwrap();
    assert_eq!(page.status, 200);
    let rendering = page.body.len() as u64 / 1024;
    let before = node.agent().memory_kb("VmRSS").unwrap();
    let mut readers = Vec::new();
    for round in 0..3 {
        readers.extend((0..20).map(|_| unread(&node)));
        // Each round reads another state.
        let backends = |last: u8| {
            let rows = f64::from(last) * SERVICES as f64;
            move || metric("kube_proxy_ebpf_map_entries{table=\"backends4\"}") == Some(rows)
        };
        let last = 18 - round;
        node.write(&large(last));
        assert!(eventually(tests::TIMEOUT, backends(last)), "{}", node.log());
    }
    let after = node.agent().memory_kb("VmRSS").unwrap();
    let grown = after.saturating_sub(before);
    println!(
        "60 readers of {rendering} kB that never read, and 60 scrapers: {before} kB before, {after} kB after"
    );
    // Each round leaves a state behind that is still being read.
    assert!(grown < 15 * rendering, "grown by {grown} kB, a rendering has {rendering} kB");
    // Others are served.
    assert_eq!(metrics("/metrics").unwrap().status, 200);
    assert!(node.status_page("/state").unwrap().body.contains("service-0"));
    assert!(metric("kube_proxy_ebpf_http_connections{pages=\"status\"}") <= Some(32.0));
    assert!(metric("kube_proxy_ebpf_http_connections{pages=\"metrics\"}") <= Some(16.0 + 1.0));
    drop(readers);
}
