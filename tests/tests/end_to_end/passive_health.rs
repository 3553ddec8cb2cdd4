//! Passive health: endpoints to which connections fail get no new ones for a time, on real sockets.

use std::{
    collections::BTreeMap,
    io::{ErrorKind, Read as _},
    net::TcpStream,
    thread,
    time::{Duration, Instant},
};

use nix::libc::EINPROGRESS;
use socket2::{Domain, Socket, Type};
use tests::{
    BlackHole, FRONTEND, Service, TARGET_PORT, TIMEOUT, TestNode, assert_contains, count_each, endpoint,
    eventually, metric, pod_with_servers, reset_on_close, run, web4,
};

/// Ejections that last longer than any test.
pub(super) const FOR_EVER: [&str; 2] =
    ["--passive-health-ejection-time=1h", "--passive-health-max-ejection-time=1h"];
/// A SYN is retransmitted after a second, which is when its connection counts as failed.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(1500);

/// An endpoint that answers no SYN.
fn hole(n: u8) -> BlackHole {
    BlackHole::at((endpoint(n)[0], TARGET_PORT).into())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Outcome {
    Served(u8),
    Refused,
    Unanswered,
}
use Outcome::{Refused, Served, Unanswered};

fn connect() -> Outcome {
    match TcpStream::connect_timeout(&FRONTEND, CONNECT_TIMEOUT) {
        Ok(mut stream) => {
            reset_on_close(&stream).unwrap();
            stream.set_read_timeout(Some(TIMEOUT)).unwrap();
            let mut name = [0; 64];
            let length = stream.read(&mut name).unwrap();
            let name = str::from_utf8(&name[..length]).unwrap().trim();
            Served(name.strip_prefix("web-").map_or(0, |it| it.parse().unwrap()))
        }
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => Refused,
        Err(error) if error.kind() == ErrorKind::TimedOut => Unanswered,
        Err(error) => panic!("{error}"),
    }
}

/// How often each outcome came of so many connects.
fn outcomes(connects: usize) -> BTreeMap<Outcome, usize> {
    count_each((0..connects).map(|_| connect()))
}

/// So many connects at once.
fn outcomes_at_once(connects: usize) -> BTreeMap<Outcome, usize> {
    thread::scope(|it| {
        let threads: Vec<_> = (0..connects).map(|_| it.spawn(connect)).collect();
        count_each(threads.into_iter().map(|it| it.join().unwrap()))
    })
}

/// A node with `web` at a good endpoint 1, endpoint 2, which refuses, and endpoint 3, which answers no SYN.
fn node_or_skip(services: &[Service], arguments: &[&str]) -> Option<(TestNode, BlackHole)> {
    let mut node = TestNode::serving_or_skip([1])?;
    let hole = hole(3);
    node.write(services);
    node.start(arguments);
    Some((node, hole))
}

/// Connects until the failing endpoints are ejected.
#[track_caller]
fn eject_failing() {
    let first = outcomes_at_once(60);
    assert!(first[&Refused] >= 3 && first[&Unanswered] >= 3, "{first:?}");
}

fn ejected() -> Option<f64> {
    metric("kube_proxy_ebpf_endpoint_ejected{namespace=\"default\",service=\"web\",port=\"\"}")
}

#[test]
fn failing_endpoints_get_no_new_connections() {
    let Some((mut node, _hole)) = node_or_skip(&[web4(1..=3)], &FOR_EVER) else { return };
    eject_failing();
    assert_eq!(outcomes(300), BTreeMap::from([(Served(1), 300)]));
    node.wait_until(|_| ejected() == Some(2.0));
    let reasons = ["timeout", "refused"]
        .map(|it| metric(&format!("kube_proxy_ebpf_ejections_total{{reason=\"{it}\"}}")));
    assert!(reasons.iter().all(|it| *it >= Some(1.0)), "{reasons:?}");
    node.wait_until_logged(&["endpoint ejected", "endpoint=\"10.244.1.2:8080 of default/web"]);
    node.wait_until_logged(&["10.244.1.3:8080 of"]);
    let status = run(&mut node.cli("status")).success();
    assert_contains(&status, &["ejected    10.244.1.3:8080 of default/web for 1 client"]);
    let check = run(&mut node.cli("check")).stdout;
    let check = check.split_whitespace().collect::<Vec<_>>().join(" ");
    let finding = "degraded endpoints connections from this node to 2 endpoints of default/web fail";
    assert_contains(&check, &[finding]);
    // What left and returned may have changed.
    node.apply(&[web4([1])]);
    node.apply(&[web4(1..=3)]);
    eject_failing();
}

/// Gives up connects of clients without patience: this many, one after the other, each after so long.
fn give_up(connects: usize, after: Duration) {
    for _ in 0..connects {
        let connected = TcpStream::connect_timeout(&FRONTEND, after);
        assert_eq!(connected.unwrap_err().kind(), ErrorKind::TimedOut);
    }
}

#[test]
fn an_endpoint_that_clients_without_patience_give_up_is_ejected() {
    let Some((mut node, _hole)) = node_or_skip(&[web4([3])], &FOR_EVER) else { return };
    // Happy eyeballs (RFC 8305) give up the slower family of two after 250 or 300 ms.
    give_up(10, Duration::from_millis(250));
    assert_eq!(ejected().unwrap_or(0.0), 0.0);
    give_up(3, Duration::from_millis(500));
    node.wait_until(|_| ejected() == Some(1.0));
    node.write(&[web4([1, 3])]);
    node.wait_until(|_| outcomes(1) == BTreeMap::from([(Served(1), 1)]));
    assert_eq!(outcomes(50), BTreeMap::from([(Served(1), 50)]));
}

#[test]
fn ejected_endpoints_stay_ejected_through_a_restart() {
    let Some((mut node, _hole)) = node_or_skip(&[web4(1..=3)], &FOR_EVER) else { return };
    eject_failing();
    node.kill();
    assert_eq!(outcomes(50), BTreeMap::from([(Served(1), 50)]), "the kernel decides");
    node.start(&FOR_EVER);
    assert_eq!(outcomes(50), BTreeMap::from([(Served(1), 50)]));
    node.wait_until(|_| ejected() == Some(2.0));
}

#[test]
fn a_healed_endpoint_gets_its_share_after_one_connection_has_tried() {
    let arguments = ["--passive-health-ejection-time=1s", "--passive-health-max-ejection-time=2s"];
    let Some((_node, hole)) = node_or_skip(&[web4([1, 3])], &arguments) else { return };
    assert!(outcomes_at_once(40)[&Unanswered] >= 3);
    // While it is down, one connection at a time tries.
    let tries = outcomes_at_once(60);
    assert!(tries.get(&Unanswered).copied().unwrap_or(0) <= 3, "{tries:?}");
    let _healed = hole.heal().unwrap();
    assert!(eventually(TIMEOUT, || connect() == Served(0)));
    let shares = outcomes(400);
    assert_eq!(shares.values().sum::<usize>(), 400);
    assert!((120..280).contains(&shares[&Served(0)]), "{shares:?}");
}

#[test]
fn an_endpoint_that_stays_dead_is_tried_by_the_proxy_and_not_by_clients() {
    let arguments = ["--passive-health-ejection-time=3s", "--passive-health-max-ejection-time=1h"];
    let Some((_node, hole)) = node_or_skip(&[web4(1..=3)], &arguments) else { return };
    eject_failing();
    let end = Instant::now() + Duration::from_secs(10);
    while Instant::now() < end {
        assert_eq!(connect(), Served(1));
        thread::sleep(Duration::from_millis(5));
    }
    let _healed = hole.heal().unwrap();
    assert!(eventually(TIMEOUT, || connect() == Served(0)));
}

/// A pod may be kept from an endpoint by a network policy, or pretend to be.
#[test]
fn what_fails_for_a_pod_is_not_ejected_for_others() {
    let Some((_node, _hole)) = node_or_skip(&[web4(1..=3)], &FOR_EVER) else { return };
    let (other, _servers) = pod_with_servers(1..=3);
    for _ in 0..3 {
        outcomes_at_once(60);
    }
    let shares = other.run(|| outcomes(300));
    assert!((1..=3).all(|it| (60..140).contains(&shares[&Served(it)])), "{shares:?}");
}

#[test]
fn a_socket_that_is_closed_early_is_no_failure() {
    let Some((node, _hole)) = node_or_skip(&[web4([3])], &FOR_EVER) else { return };
    for _ in 0..50 {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.set_nonblocking(true).unwrap();
        let error = socket.connect(&FRONTEND.into()).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(EINPROGRESS));
    }
    thread::sleep(CONNECT_TIMEOUT);
    assert_eq!(node.health_words(), [0; 4], "no record");
    assert_eq!(outcomes_at_once(3), BTreeMap::from([(Unanswered, 3)]));
    assert_eq!(node.health_words()[..3], [1, 1, 0], "one ejection, for want of an answer");
}
