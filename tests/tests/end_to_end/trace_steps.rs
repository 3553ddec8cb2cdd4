//! `trace -v` on a node: each decision has its steps, as the programs have logged them, in order and complete; what finds no room
//! is counted.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream, UdpSocket},
};

use serde_json::Value;
use tests::{
    EchoConnection, FRONTEND, ObjectTracker, Service, TARGET_PORT, TIMEOUT, TestNode, Transport, WEB,
    endpoint, eventually, exchange, kernel_at_least, request, udp_socket, web, web_frontends, web4,
};

use super::trace::{OTHER4, are_products, node_or_skip, other4, start, unread_trace};

const NODE_PORT: u16 = 30_080;
/// Each failure ejects, but not for long.
const SHORT_EJECTIONS: [&str; 3] = [
    "--passive-health-failures=1",
    "--passive-health-ejection-time=1s",
    "--passive-health-max-ejection-time=1s",
];
/// The steps before and after that on the way to an endpoint.
const FOUND: [&str; 2] = ["prefilter: hit", "frontend: looked up found"];

/// The steps of a line, with the names of what is 1 in their fields.
fn steps_of(line: &Value) -> Vec<String> {
    let steps = line["steps"].as_array().unwrap_or_else(|| panic!("no steps: {line}"));
    let text = |step: &Value| {
        assert!(["debug", "info", "trace"].contains(&step["level"].as_str().unwrap()), "{line}");
        let mut text = step["step"].as_str().unwrap().to_owned();
        for field in ["found", "ejected", "avoided", "tried"] {
            if step[field] == 1 {
                text += &format!(" {field}");
            }
        }
        text
    };
    steps.iter().map(text).collect()
}

#[track_caller]
fn check(line: &Value, expect: &[&[&str]]) {
    assert_eq!(steps_of(line), expect.concat(), "{line}");
}

#[test]
fn every_step_of_a_connect_is_traced_in_order() {
    let node_port = Service::new("node-port", &[IpAddr::from([10, 96, 0, 30])]);
    let node_port = node_port.port("", "TCP", 80, TARGET_PORT).node_port(NODE_PORT).endpoints([1]);
    let Some(node) = node_or_skip(&[web([1, 2]), other4([]), node_port]) else { return };
    let trace = start(&node, &["-v"]);
    let redirected: &[&str] = &["endpoint: read", "slot: claimed", "decision: redirect"];
    for address in web_frontends() {
        drop(EchoConnection::connect(address).unwrap());
        let line = trace.next();
        check(&line, &[&FOUND, redirected]);
        assert_eq!(line["steps"][1]["endpoints"], 2, "{line}");
        assert_eq!(line["steps"][1]["level"], "debug", "{line}");
        assert_eq!(line["steps"][4]["level"], "info", "{line}");
    }
    TcpStream::connect((OTHER4, 80)).unwrap_err();
    check(&trace.next(), &[&FOUND, &["decision: refused"]]);
    TcpStream::connect((Ipv4Addr::new(10, 96, 0, 99), 80)).unwrap_err();
    check(&trace.next(), &[&["prefilter: hit", "frontend: looked up", "decision: passed"]]);
    // On some kernels not on loopback.
    if kernel_at_least(5, 14) {
        drop(EchoConnection::connect((Ipv4Addr::LOCALHOST, NODE_PORT).into()).unwrap());
        check(&trace.next(), &[&["node port: looked up found", "node address: loopback"], redirected]);
    }
    // A socket that connects again has its slot.
    let socket = udp_socket(FRONTEND).unwrap();
    for slot in ["slot: claimed", "slot: owned"] {
        socket.connect(FRONTEND).unwrap();
        check(&trace.next(), &[&FOUND, &["endpoint: read", slot, "decision: redirect"]]);
    }
}

#[test]
fn the_steps_of_affinity_are_traced() {
    let Some(node) = node_or_skip(&[web4([1, 2]).affinity(3600), other4([1])]) else { return };
    let trace = start(&node, &["-v", "--service", "default/web", "--count", "2"]);
    // The steps of another Service's are read, and belong to no event.
    drop(EchoConnection::connect((OTHER4, 80).into()).unwrap());
    drop(EchoConnection::connect(FRONTEND).unwrap());
    let rest: &[&str] = &["slot: claimed", "decision: redirect"];
    let new = trace.expect(&[("affinity", "new")]);
    check(&new, &[&FOUND, &["endpoint: read", "affinity: looked up"], rest]);
    drop(EchoConnection::connect(FRONTEND).unwrap());
    let kept = trace.expect(&[("affinity", "kept")]);
    check(&kept, &[&FOUND, &["member: looked up found", "affinity: looked up found"], rest]);
    assert!(kept["steps"][3]["idle_ms"].is_u64(), "{kept}");
    assert_eq!(new["endpoint"], kept["endpoint"]);
    // It has ended by itself.
    assert!(eventually(TIMEOUT, || are_products(&node)));
}

#[test]
fn the_steps_of_an_ejection_are_traced() {
    let least = web4([1, 2]).annotation("kube-proxy-ebpf.io/load-balancing", "least-connections");
    // Endpoint 3 refuses, and is tried again and again.
    let services = [least, other4([1, 3])];
    let Some(node) = TestNode::running_or_skip([1, 2], &services, &SHORT_EJECTIONS) else { return };
    let trace = start(&node, &["-vv"]);
    drop(EchoConnection::connect(FRONTEND).unwrap());
    let line = trace.expect(&[("event", "connect")]);
    assert_eq!((&line["leastConnections"], &line["ejected"]), (&true.into(), &Value::Null), "{line}");
    trace.expect(&[("event", "end")]);
    let (mut chosen, mut has_failed) = (BTreeMap::<String, String>::new(), false);
    let has_seen_all = || {
        drop(TcpStream::connect((OTHER4, 80)));
        let line = trace.expect(&[("event", "connect")]);
        assert_eq!(line["leastConnections"], Value::Null, "{line}");
        let [begin, end] = [&line, &trace.expect(&[("event", "end")])].map(steps_of);
        let has = |steps: &[String], step: &str| steps.iter().any(|it| it == step);
        assert!(has(&begin, "endpoint: read"), "{begin:?}");
        if let Some(it) = line["ejected"].as_str() {
            assert!(has(&begin, &format!("choice: made {it}")), "{it}: {begin:?}");
            chosen.insert(it.to_owned(), line["endpoint"].as_str().unwrap().to_owned());
        }
        has_failed |=
            has(&end, "connection: refused by the endpoint") && has(&end, "failure: counted ejected");
        chosen.len() == 2 && has_failed
    };
    assert!(eventually(TIMEOUT, has_seen_all));
    let at = |n| SocketAddr::new(endpoint(n)[0], TARGET_PORT).to_string();
    assert_eq!(chosen, BTreeMap::from([("avoided".to_owned(), at(1)), ("tried".to_owned(), at(3))]));
}

#[test]
fn the_steps_of_a_sockets_end_are_traced() {
    let Some(node) = node_or_skip(&[web4([1])]) else { return };
    let trace = start(&node, &["-vv"]);
    drop(EchoConnection::connect(FRONTEND).unwrap());
    let begin = trace.next();
    check(&begin, &[&FOUND, &["endpoint: read", "slot: claimed", "decision: redirect"]]);
    let end = trace.expect(&[("event", "end")]);
    check(&end, &[&["connection: established", "slot: freed", "closed"]]);
}

#[test]
fn the_steps_of_datagrams_are_traced() {
    let Some(node) = node_or_skip(&[web([1])]) else { return };
    let trace = start(&node, &["-v", "--all", "--to", "10.96.0.10:80"]);
    for (address, is_shown) in [(WEB[0], true), (WEB[1], false)] {
        let address = SocketAddr::new(address, 80);
        let socket = udp_socket(address).unwrap();
        for _ in 0..2 {
            exchange(&socket, address).unwrap();
        }
        if is_shown {
            check(&trace.next(), &[&FOUND, &["endpoint: read", "slot: claimed", "decision: redirect"]]);
            check(
                &trace.next(),
                &[&FOUND, &["member: looked up found", "slot: owned", "decision: redirect"]],
            );
        }
    }
    drop(trace);
    let trace = start(&node, &["-v"]);
    let address = SocketAddr::new(WEB[1], 80);
    exchange(&udp_socket(address).unwrap(), address).unwrap();
    check(&trace.next(), &[&FOUND, &["endpoint: read", "slot: claimed", "decision: redirect"]]);
}

#[test]
fn each_tracer_has_its_steps_and_a_killed_one_leaves_nothing() {
    let Some(node) = node_or_skip(&[web4([1])]) else { return };
    let mut objects = ObjectTracker::new(node.sandbox());
    let before = objects.counts();
    let first = start(&node, &["-v"]);
    assert_eq!(request(Transport::Tcp, FRONTEND).unwrap(), "web-1");
    assert_eq!(steps_of(&first.next()).len(), 5);
    // Another process has no lines, and the next trace has those of its level.
    let mut second = start(&node, &["-v", "--replace", "--pid", "1"]);
    assert_eq!(request(Transport::Tcp, FRONTEND).unwrap(), "web-1");
    second.kill();
    drop(first);
    let mut third = start(&node, &[]);
    assert_eq!(request(Transport::Tcp, FRONTEND).unwrap(), "web-1");
    assert!(third.next()["steps"].is_null());
    third.kill();
    assert!(eventually(TIMEOUT, || are_products(&node)));
    // The kernel frees objects asynchronously.
    assert!(eventually(TIMEOUT, || objects.counts() == before), "{before:?}, now {:?}", objects.counts());
}

/// A datagram has five steps.
#[test]
fn lost_steps_are_counted() {
    const SENT: usize = 20_000;
    let Some(node) = node_or_skip(&[web([1])]) else { return };
    let mut next = unread_trace(&node, "all&verbose&to=10.96.0.10:80", SENT);
    let (mut events, mut complete, mut lost, mut lost_steps) = (0, 0, 0, 0);
    while events + lost < SENT || lost_steps == 0 {
        let Some(line) = next() else { continue };
        let count = || line["count"].as_u64().unwrap() as usize;
        match line["event"].as_str().unwrap() {
            "lost" => lost += count(),
            "stepsLost" => {
                lost_steps += count();
                assert_eq!(line["total"], lost_steps);
            }
            _ => {
                events += 1;
                complete += usize::from(line["steps"].as_array().is_some_and(|it| it.len() == 5));
            }
        }
    }
    assert!(complete > 100, "{complete} of {events} events have steps, {lost_steps} lost");
    // What comes later is complete.
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
    socket.send_to(b"who?", FRONTEND).unwrap();
    let line = loop {
        match next() {
            Some(line) if line["event"] == "send" => break line,
            _ => {}
        }
    };
    check(&line, &[&FOUND, &["endpoint: read", "slot: claimed", "decision: redirect"]]);
}
