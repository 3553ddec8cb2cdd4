//! The log is complete enough for an operator, and never in the way of what is served.

use std::{
    io::{PipeReader, Read as _, pipe},
    os::fd::AsFd as _,
    process::Command,
    thread,
    time::Duration,
};

use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::signal::Signal,
};
use tests::{
    APPLIED, Build, TestNode, Transport, VERBOSE, WEB4, assert_contains,
    http::{health_status, metrics},
    request, run, web4,
};

/// Has more lines logged than the pipe and the queue of the log hold: each signal changes the level, and is logged. A process that
/// gets little of the CPU takes several for one.
fn flood(node: &TestNode) {
    for _ in 0..30_000 {
        change_level(node);
        thread::sleep(Duration::from_micros(100));
    }
}

fn change_level(node: &TestNode) {
    node.agent().signal(Signal::SIGUSR1).unwrap();
}

/// Reads the log until it says that lines were lost; false if it does not.
fn says_that_lines_were_lost(reader: &mut PipeReader) -> bool {
    let (mut text, mut part) = (String::new(), [0; 1 << 16]);
    loop {
        let mut polled = [PollFd::new(reader.as_fd(), PollFlags::POLLIN)];
        if poll(&mut polled, PollTimeout::from(2_000_u16)).unwrap() == 0 {
            return false;
        }
        let length = reader.read(&mut part).unwrap();
        text += &String::from_utf8_lossy(&part[..length]);
        if text.lines().any(|it| it.contains("lines of the log were lost here") && it.contains("lost=")) {
            return true;
        }
        text.drain(..text.rfind('\n').map_or(0, |it| it + 1));
    }
}

fn answer() -> Option<String> {
    request(Transport::Tcp, (WEB4, 80).into()).ok()
}

#[test]
fn an_unread_log_delays_nothing_and_its_lost_lines_are_counted() {
    let Some(mut node) = TestNode::prepared_or_skip([1, 2], &[web4([1])]) else { return };
    let (mut reader, writer) = pipe().unwrap();
    node.start_inactive(&node.command(Build::Product).log_to(writer));
    node.wait_until(|_| answer().as_deref() == Some("web-1"));

    flood(&node);
    node.write(&[web4([2])]);
    node.wait_until(|_| answer().as_deref() == Some("web-2"));
    assert_eq!(health_status("/livez"), 200);

    let mut attempts = 0..10;
    while !says_that_lines_were_lost(&mut reader) {
        assert!(attempts.next().is_some(), "no line was lost");
        flood(&node);
    }
    // The pipe is full again.
    flood(&node);
    node.terminate();
}

#[test]
fn the_first_line_says_version_commit_and_flags() {
    let Some(node) = TestNode::running_or_skip([], &[web4([])], &["--affinity-clients=1024"]) else { return };
    let log = node.log();
    let first = log.lines().next().unwrap();
    assert_contains(first, &["starting", "flags=\"run --source=file:", " --node-name=n1 "]);
    assert_contains(first, &[" --affinity-clients=1024", "--packets=off"]);
    assert!(!first.contains("--udp-addresses"), "{first}");
    let version = run(Command::new(Build::Product.binary()).arg("--version")).success();
    let (version, commit) =
        version.trim().strip_prefix("kube-proxy-ebpf ").unwrap().split_once(" (commit ").unwrap();
    let commit = commit.strip_suffix(')').unwrap();
    assert!(first.contains(&format!("version=\"{version}\" commit=\"{commit}\"")), "{first}");
    let labels = format!("kube_proxy_ebpf_build_info{{version=\"{version}\",commit=\"{commit}\"}} 1");
    assert!(metrics("/metrics").unwrap().body.contains(&labels), "{labels}");
}

#[test]
fn at_level_info_only_the_first_of_many_states_is_logged() {
    let Some(mut node) = TestNode::prepared_or_skip([1, 2], &[web4([1])]) else { return };
    node.start_with(&node.command(Build::Product).env(VERBOSE, "0"));
    for n in [2, 1, 2] {
        node.write(&[web4([n])]);
        node.wait_until(|_| answer() == Some(format!("web-{n}")));
    }
    assert_eq!(node.agent().count_logged(APPLIED), 1, "{}", node.log());

    // The level is changed while the proxy runs.
    change_level(&node);
    node.wait_until_logged(&["the level of the log was changed level=\"debug\""]);
    node.apply(&[web4([1])]);
    node.wait_until_logged(&["DEBUG state active"]);
    change_level(&node);
    node.wait_until_logged(&["level=\"trace\""]);
    change_level(&node);
    node.wait_until_logged(&["level=\"info\""]);
}
