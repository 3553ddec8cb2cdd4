//! The capabilities of the DaemonSet, tried on the kernel: they suffice, and none is too many.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    fs,
    net::{IpAddr, SocketAddr},
    path::Path,
    time::Duration,
};

use tests::{
    Build, EchoServer, TestNode, Transport, agent::AgentCommand, deploy, http::get, manifest::Service,
    request, requirements::kernel_at_least, test_node::expected_dump,
};

const LIMIT: Duration = Duration::from_secs(20);

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn web() -> Vec<Service> {
    let addresses = [ip("10.96.0.10"), ip("fd00:10:96::10")];
    let web = Service::new("web", &addresses).port("tcp", "TCP", 80, 8080).port("udp", "UDP", 80, 8080);
    vec![web.endpoint("e1", &[ip("10.244.1.1"), ip("fd00:10:244::1:1")])]
}

/// The bounding set of a process, as /proc shows it.
fn bounding_set(process: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let set = status.lines().find_map(|it| it.strip_prefix("CapBnd:")).unwrap();
    u64::from_str_radix(set.trim(), 16).unwrap()
}

/// Every other end-to-end test starts the proxy in the same way.
#[test]
fn the_capabilities_of_the_manifest_suffice() {
    let Some(world) = TestNode::or_skip("the_capabilities_of_the_manifest_suffice") else { return };
    let services = web();
    world.write(&services);
    let mut agent = world.command(Build::Product).start(world.sandbox()).unwrap();
    assert_eq!(bounding_set(agent.pid()), deploy::capabilities().unwrap().bits());

    let expected = expected_dump(&services);
    agent.wait_until(LIMIT, || world.dump(Build::Product).is_ok_and(|it| it == expected)).unwrap();
    for endpoint in ["10.244.1.1:8080", "[fd00:10:244::1:1]:8080"] {
        let endpoint: SocketAddr = endpoint.parse().unwrap();
        world.netns().add_address(endpoint.ip()).unwrap();
        let server = EchoServer::start("e1", endpoint).unwrap();
        let service = if server.address().is_ipv4() { "10.96.0.10:80" } else { "[fd00:10:96::10]:80" };
        let service: SocketAddr = service.parse().unwrap();
        for transport in [Transport::Tcp, Transport::Udp, Transport::UdpUnconnected] {
            let answer = tests::eventually(LIMIT, || request(transport, service).is_ok_and(|it| it == "e1"));
            assert!(answer, "{transport:?} to {service}: {:?}\n{}", request(transport, service), agent.log());
        }
    }
    // What the probes ask.
    for path in ["/livez", "/readyz"] {
        let address = "127.0.0.1:10256".parse().unwrap();
        let answers = || get(address, path).is_ok_and(|it| it.status == 200);
        agent.wait_until(LIMIT, answers).unwrap_or_else(|error| panic!("{path}: {error:#}"));
    }
}

#[test]
fn without_any_one_of_its_capabilities_the_proxy_says_what_it_needs() {
    let name = "without_any_one_of_its_capabilities_the_proxy_says_what_it_needs";
    let Some(world) = TestNode::or_skip(name) else { return };
    world.write(&web());
    let all = deploy::capabilities().unwrap();
    for (name, missing) in all.iter_names() {
        let setting = world.command(Build::Product).capabilities(all.difference(missing));
        let mut agent = setting.start(world.sandbox()).unwrap();
        let status = agent.wait(LIMIT).unwrap_or_else(|error| panic!("{name} is not needed: {error:#}"));
        assert_eq!(status.code(), Some(1), "{name}");
        let log = agent.log();
        assert!(log.contains("CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON"), "without {name} it said:\n{log}");
    }
}

#[test]
fn a_kernel_that_counts_maps_as_locked_memory_is_asked_for_more() {
    let name = "a_kernel_that_counts_maps_as_locked_memory_is_asked_for_more";
    let Some(world) = TestNode::or_skip(name) else { return };
    world.write(&web());
    let line = format!("ulimit -l 64 && exec {}", world.command(Build::Product).line());
    let shell = AgentCommand::new(Path::new("/bin/sh"), &["-c".as_ref(), line.as_ref()]);
    let mut agent = shell.start(world.sandbox()).unwrap();
    if kernel_at_least(5, 11) {
        agent.wait_until(LIMIT, || world.is_attached()).unwrap();
        return;
    }
    let status = agent.wait(LIMIT).unwrap();
    let log = agent.log();
    assert_eq!(status.code(), Some(1), "{log}");
    assert!(log.contains("add CAP_SYS_RESOURCE, or raise the limit"), "{log}");
}
