//! The end of a `trace`: when the reader is gone, however it ended, the programs are the product's.

use std::{io, process::Stdio};

use build_tools::command::KilledOnDrop;
use nix::{
    fcntl::{FcntlArg, FdFlag, fcntl},
    pty::openpty,
};
use tests::{
    EchoConnection, FRONTEND, TIMEOUT, TestNode, Trace, Transport, assert_contains, eventually, request, run,
    web4,
};

use super::trace::{are_products, node_or_skip, refused, start};

#[test]
fn the_products_programs_return_however_the_trace_ends() {
    let Some(mut node) = node_or_skip(&[web4([1])]) else { return };
    let _ended_by_time = run(node.cli("trace").args(["--for", "100ms"])).success();
    assert!(eventually(TIMEOUT, || are_products(&node)));
    let mut killed = start(&node, &[]);
    assert!(!are_products(&node));
    killed.kill();
    assert!(eventually(TIMEOUT, || are_products(&node)));
    // Of an agent that ends.
    let traced = start(&node, &[]);
    node.terminate();
    assert!(are_products(&node));
    drop(traced);
    node.start(&[]);
    // Of an agent that is killed, the next start.
    let traced = start(&node, &[]);
    node.kill();
    assert!(!are_products(&node));
    drop(traced);
    assert_eq!(request(Transport::Tcp, FRONTEND).unwrap(), "web-1");
    node.start(&[]);
    assert!(are_products(&node));
    assert_eq!(request(Transport::Tcp, FRONTEND).unwrap(), "web-1");
}

/// A trace with these streams, once it reports.
#[track_caller]
fn start_with(node: &TestNode, stdin: Stdio, stdout: Stdio) -> KilledOnDrop {
    KilledOnDrop(tests::trace::spawn(node.cli("trace").stdin(stdin).stdout(stdout)))
}

#[test]
fn a_trace_ends_when_nobody_reads_it() {
    let Some(node) = node_or_skip(&[web4([1])]) else { return };
    let ends = |mut child: KilledOnDrop, way: &str| {
        let has_ended = eventually(TIMEOUT, || child.0.try_wait().unwrap().is_some());
        drop(child);
        assert!(has_ended, "{way}");
        assert!(eventually(TIMEOUT, || are_products(&node)), "{way}");
    };
    let mut child = start_with(&node, Stdio::null(), Stdio::piped());
    drop(child.0.stdout.take());
    ends(child, "the output is closed");

    // As the runtime of a container does when the connection of `kubectl exec --stdin` is lost: it goes on reading.
    let mut child = start_with(&node, Stdio::piped(), Stdio::piped());
    drop(child.0.stdin.take());
    ends(child, "the input ends");

    let pty = openpty(None, None).unwrap();
    // The command must not have the other side.
    fcntl(&pty.master, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)).unwrap();
    let child = start_with(&node, pty.slave.try_clone().unwrap().into(), pty.slave.into());
    drop(pty.master);
    ends(child, "the terminal is closed");

    // A reader that has stopped reading, and is gone.
    let (reader, writer) = io::pipe().unwrap();
    let mut child = start_with(&node, Stdio::piped(), writer.into());
    for _ in 0..1_000 {
        drop(EchoConnection::connect(FRONTEND).unwrap());
    }
    drop(child.0.stdin.take());
    ends(child, "the input ends while the output is full");
    drop(reader);

    // Input that had ended before says nothing.
    for stdin in [Stdio::null(), io::pipe().unwrap().0.into()] {
        let mut trace = Trace::start(node.cli("trace").stdin(stdin));
        drop(EchoConnection::connect(FRONTEND).unwrap());
        assert_eq!(trace.next()["verdict"], "redirected");
        trace.kill();
    }
}

#[test]
fn a_trace_takes_the_place_of_one_that_runs_on_request() {
    let Some(node) = node_or_skip(&[web4([1])]) else { return };
    let first = node.cli("trace").args(["--pid", "1"]).stderr(Stdio::piped()).spawn().unwrap();
    let runs = || run(&mut node.cli("check")).stdout;
    assert!(eventually(TIMEOUT, || runs().contains("one runs since 2")), "{}", runs());
    assert_contains(&runs(), &["with --pid 1"]);
    drop(start(&node, &["--replace"]));
    let first = first.wait_with_output().unwrap();
    let error = String::from_utf8(first.stderr).unwrap();
    assert_eq!(first.status.code(), Some(1));
    assert_contains(&error, &["the process has ended the trace; its log names the reason"]);
    assert_contains(&node.log(), &["the trace has ended: another one has replaced it"]);
    assert!(!runs().contains("one runs since"), "{}", runs());

    // One whose reader has stopped reading.
    let (_reader, writer) = io::pipe().unwrap();
    let _stopped = start_with(&node, Stdio::null(), writer.into());
    for _ in 0..3_000 {
        drop(EchoConnection::connect(FRONTEND).unwrap());
    }
    let trace = start(&node, &["--replace"]);
    drop(EchoConnection::connect(FRONTEND).unwrap());
    assert_eq!(trace.next()["verdict"], "redirected");
}

#[test]
fn one_trace_runs_at_a_time_and_what_cannot_be_traced_is_said() {
    let Some(mut node) = node_or_skip(&[web4([1])]) else { return };
    let first = start(&node, &["--service", "default/web"]);
    let expect = ["another trace runs since 2", "with --service default/web: one trace runs at a time"];
    assert_contains(&refused(&node, &[]), &expect);
    drop(first);
    assert!(eventually(TIMEOUT, || run(node.cli("trace").args(["--for", "1ms"])).code == Some(0)));
    let uid = "3f2a8d1c-0b4e-4c7d-9a51-6d2f1e0c9b8a";
    for (flag, value, text) in [
        ("--service", "default/wep", "there is no Service default/wep; nearest: default/web"),
        ("--cgroup", "/sys/fs/cgroup/none-such", "/none-such does not exist"),
        ("--pod", uid, &*format!("no pod with the UID {uid} runs on this node")),
    ] {
        assert_contains(&refused(&node, &[flag, value]), &[text]);
    }
    assert!(are_products(&node));
    node.terminate();
    assert_contains(&refused(&node, &[]), &["no process answers at "]);
}
