//! What a careless or large cluster costs stays within the memory that the process has, with the kernel's.

use std::{
    net::{Ipv4Addr, SocketAddr, TcpStream},
    thread,
    time::{Duration, Instant},
};

use api_server::{ApiServer, Settings};
use serde_json::{Value, json};
use tests::{
    APPLIED, AgentCommand, Build, MemoryCgroup, NODE, TIMEOUT, TestNode, VERBOSE, WEB4, assert_contains,
    eventually, is_slow_machine, run, scaled,
};

use super::kube::{server_with_node, service, set};

const MB: u64 = 1 << 20;
/// The limit of the manifests.
const SHIPPED_LIMIT: u64 = 512 * MB;
/// The limit that docs/install.md names for a million endpoints.
const LIMIT_OF_A_MILLION: u64 = 1024 * MB;
const LARGE: Ipv4Addr = Ipv4Addr::new(10, 96, 1, 1);

fn is_served(address: impl Into<SocketAddr>) -> bool {
    TcpStream::connect(address.into()).is_ok()
}

/// An API server with this Node, and a process that follows it within a memory cgroup with a limit.
fn start(
    node: &mut TestNode,
    limit: u64,
    fill: impl FnOnce(&ApiServer),
) -> Option<(ApiServer, MemoryCgroup)> {
    let (server, memory) = serve(node, limit, fill)?;
    node.start_with(&follow(node, &server, &memory));
    Some((server, memory))
}

/// An API server with this Node, and a memory cgroup with a limit.
fn serve(node: &TestNode, limit: u64, fill: impl FnOnce(&ApiServer)) -> Option<(ApiServer, MemoryCgroup)> {
    let memory = MemoryCgroup::or_skip(node.sandbox())?;
    memory.limit(limit).unwrap();
    let server = server_with_node(Settings::default());
    fill(&server);
    Some((server, memory))
}

/// A process that follows an API server within a memory cgroup.
fn follow(node: &TestNode, server: &ApiServer, memory: &MemoryCgroup) -> AgentCommand {
    AgentCommand::kube(&Build::Product.binary(), node.sandbox(), &server.url(), NODE)
        .env(VERBOSE, "0")
        .memory_cgroup(memory)
}

/// A Service with a hundred endpoints, none of which another one has.
fn with_a_hundred(number: u32) -> [Value; 2] {
    let name = format!("s{number}");
    let address = Ipv4Addr::from_bits(u32::from(Ipv4Addr::new(10, 97, 0, 0)) + number);
    let service = service(&name, address, &[1]);
    let [mut service, mut slice] =
        [service.service(), service.slices().next().expect("there is an endpoint")];
    // A namespace may have 320,000 entries.
    for it in [&mut service, &mut slice] {
        it["metadata"]["namespace"] = format!("n{}", number % 4).into();
    }
    let first = u32::from(Ipv4Addr::new(10, 128, 0, 0)) + number * 100;
    let endpoint = |address| {
        json!({
            "addresses": [Ipv4Addr::from_bits(address)],
            "conditions": {"ready": true},
            "nodeName": "elsewhere",
            "targetRef": {"kind": "Pod", "namespace": "default", "name": format!("pod-{address}")},
        })
    };
    slice["endpoints"] = (first..first + 100).map(endpoint).collect();
    [service, slice]
}

#[test]
fn a_million_endpoints_fit_into_their_limit_at_a_start_and_a_restart() {
    let services = if is_slow_machine() { 100 } else { 10_000 };
    let Some(mut node) = TestNode::serving_or_skip([1]) else { return };
    let fill = |server: &ApiServer| {
        (0..services).flat_map(with_a_hundred).for_each(|it| server.set(it));
        set(server, &[service("web", WEB4, &[1])]);
    };
    let Some((server, memory)) = serve(&node, LIMIT_OF_A_MILLION, fill) else { return };
    let command = follow(&node, &server, &memory).arg("--packets=nft");
    for when in ["at the start", "at the restart"] {
        node.start_inactive(&command);
        // A million take a busy machine more than a minute.
        let active = format!("services={}", services + 1);
        node.agent_mut().wait_until_applied(5 * TIMEOUT).unwrap();
        node.wait_until(|_| is_served((WEB4, 80)));
        node.wait_until_logged(&[APPLIED, &active]);
        // Older kernels do not tell.
        if let Ok(peak) = memory.peak() {
            eprintln!("{when}: {} MB at most", peak / MB);
        }
        node.kill();
    }
}

/// A Service and a slice with this many ports, all with the target 8080, and endpoint 1 ready `is_ready`.
fn with_ports(name: &str, ports: u16, is_ready: bool) -> [Value; 2] {
    let service = service(name, LARGE, &[1]);
    let [mut service, mut slice] =
        [service.service(), service.slices().next().expect("there is an endpoint")];
    let numbers = 1..=ports;
    let port = |it| json!({"name": format!("p{it}"), "protocol": "TCP", "port": it, "targetPort": 8080});
    service["spec"]["ports"] = numbers.clone().map(port).collect();
    slice["ports"] =
        numbers.map(|it| json!({"name": format!("p{it}"), "protocol": "TCP", "port": 8080})).collect();
    slice["endpoints"][0]["conditions"]["ready"] = is_ready.into();
    [service, slice]
}

#[test]
fn a_service_of_20_000_ports_is_served_within_the_shipped_limit() {
    let Some(mut node) = TestNode::serving_or_skip([1, 2]) else { return };
    let fill = |server: &ApiServer| {
        with_ports("large", 20_000, true).into_iter().for_each(|it| server.set(it));
        set(server, &[service("web", WEB4, &[2])]);
    };
    let Some((server, _memory)) = start(&mut node, SHIPPED_LIMIT, fill) else { return };
    for port in [1, 80, 20_000] {
        node.wait_until(|_| is_served((LARGE, port)));
    }
    // Each of these changes every port.
    for is_ready in [false, true, false, true] {
        let [_, slice] = with_ports("large", 20_000, is_ready);
        server.set(slice);
        set(&server, &[service("web", WEB4, if is_ready { &[2] } else { &[] })]);
        node.wait_until(|_| is_served((WEB4, 80)) == is_ready);
        node.wait_until(|_| is_served((LARGE, 20_000)) == is_ready);
    }
    assert_contains(&run(&mut node.cli("status")).success(), &["healthy"]);
    node.terminate();
}

#[test]
fn a_node_of_128_mb_serves_a_thousand_services() {
    let Some(mut node) = TestNode::serving_or_skip([1]) else { return };
    let fill = |server: &ApiServer| {
        for n in 0..1_000_u16 {
            let [high, low] = n.to_be_bytes();
            set(server, &[service(&format!("s{n}"), Ipv4Addr::new(10, 97, high, low), &[1])]);
        }
    };
    let Some((server, _memory)) = start(&mut node, 100 * MB, fill) else { return };
    node.wait_until(|_| is_served((Ipv4Addr::new(10, 97, 3, 231), 80)));
    set(&server, &[service("web", WEB4, &[1])]);
    node.wait_until(|_| is_served((WEB4, 80)));
    assert_contains(&run(&mut node.cli("status")).success(), &["1001 Services"]);
    node.terminate();
}

#[test]
fn an_object_that_never_stops_changing_takes_no_memory_and_holds_nothing_up() {
    let Some(mut node) = TestNode::serving_or_skip([1, 2]) else { return };
    let services = [service("large", LARGE, &[1]), service("web", WEB4, &[2])];
    let fill = |server: &ApiServer| set(server, &services);
    let Some((server, _memory)) = start(&mut node, SHIPPED_LIMIT, fill) else { return };
    node.wait_until(|_| is_served((WEB4, 80)));
    let changes = |seconds: u64| {
        let end = Instant::now() + scaled(Duration::from_secs(seconds));
        for n in 0_u32.. {
            if Instant::now() >= end {
                break;
            }
            let [_, slice] = with_ports("large", 1, n % 2 == 0);
            server.set(slice);
            thread::sleep(Duration::from_millis(10));
        }
    };
    changes(3);
    let [before, logged] = [node.agent().memory_kb("VmRSS").unwrap(), node.log().lines().count() as u64];
    thread::scope(|scope| {
        let changing = scope.spawn(|| changes(10));
        for n in 0.. {
            if changing.is_finished() {
                break;
            }
            let is_served_now = n % 2 == 1;
            set(&server, &[service("web", WEB4, if is_served_now { &[2] } else { &[] })]);
            assert!(eventually(TIMEOUT, || is_served((WEB4, 80)) == is_served_now));
        }
    });
    let after = node.agent().memory_kb("VmRSS").unwrap();
    assert!(after < before + 8 * 1024, "{before} kB before, {after} kB after");
    let lines = node.log().lines().count() as u64 - logged;
    assert!(lines < 30, "{}", node.log());
    node.terminate();
}
