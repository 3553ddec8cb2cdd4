//! Runs the examples against a brain that sends two states.

#![expect(clippy::unwrap_used, reason = "a failed helper fails the test")]

#[path = "common/scripted_brain.rs"]
mod scripted_brain;

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use proxy_contract::localv1::{
    Endpoint, EndpointScopes, IpSet, OpItem, PortMapping, PortName, Protocol, Service, ServiceIPs, Set,
};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader, Lines},
    process::{Child, ChildStdout, Command},
    time::timeout,
};

use scripted_brain::{ScriptedBrain, delete, set};

/// Only a hang takes as long.
const LIMIT: Duration = Duration::from_secs(120);

fn service(path: &str, ip: &str) -> OpItem {
    let (namespace, name) = path.split_once('/').unwrap();
    let cluster_ips = Some(IpSet::of([ip]));
    let ips = Some(ServiceIPs { cluster_ips, ..ServiceIPs::default() });
    let port = |port, target_port| PortMapping {
        port,
        target_port,
        protocol: Protocol::Tcp.into(),
        ..PortMapping::default()
    };
    let message = Service {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        ips,
        ports: vec![port(80, 8080), port(443, 8443)],
        ..Service::default()
    };
    set(Set::ServicesSet, path, &message)
}

fn endpoint(path: &str, ip: &str) -> OpItem {
    let ips = Some(IpSet::of([ip]));
    let scopes = Some(EndpointScopes { internal: true, ..EndpointScopes::default() });
    // It serves only the first port.
    let port_overrides = vec![PortName { port: 9090, index: Some(0), ..PortName::default() }];
    set(Set::EndpointsSet, path, &Endpoint { ips, scopes, port_overrides, ..Endpoint::default() })
}

fn brain() -> ScriptedBrain {
    let first = vec![
        service("ns/a", "10.96.0.1"),
        service("ns/b", "10.96.0.2"),
        endpoint("ns/a/p", "10.1.0.1"),
        endpoint("ns/b/p", "10.1.0.2"),
    ];
    let second = vec![
        service("ns/c", "10.96.0.3"),
        endpoint("ns/a/q", "10.1.0.3"),
        delete(Set::EndpointsSet, "ns/b/p"),
        delete(Set::ServicesSet, "ns/b"),
    ];
    ScriptedBrain::new([first, second])
}

fn binary(example: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let binary = test.parent().and_then(Path::parent).unwrap().join("examples").join(example);
    assert!(binary.exists(), "{} is missing: run the tests with `cargo xtask test`", binary.display());
    binary
}

/// Starts an example; its lines are read from the result.
fn start(example: &str, arguments: &[&str]) -> (Child, Lines<BufReader<ChildStdout>>) {
    let mut command = Command::new(binary(example));
    let mut child = command.args(arguments).stdout(Stdio::piped()).kill_on_drop(true).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    (child, lines)
}

async fn check(example: &str, expect: &str) {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("proxy.sock");
    brain().serve(&socket);
    let (_child, mut lines) = start(example, &[&format!("unix://{}", socket.display()), "n1"]);
    for expect in expect.lines() {
        let line = timeout(LIMIT, lines.next_line()).await.unwrap().unwrap().unwrap();
        assert_eq!(line, expect);
    }
    // The example keeps running.
    assert!(timeout(Duration::from_millis(100), lines.next_line()).await.is_err());
}

#[tokio::test]
async fn print() {
    check("print", &r#"ns/a: ["p"]|ns/b: ["p"]|-|ns/a: ["p", "q"]|ns/c: []|-"#.replace('|', "\n")).await;
}

#[tokio::test]
async fn difference() {
    let first = "add 10.96.0.1:443/TCP -> \nadd 10.96.0.1:80/TCP -> 10.1.0.1:9090\n\
                 add 10.96.0.2:443/TCP -> \nadd 10.96.0.2:80/TCP -> 10.1.0.2:9090\ndone\n";
    let second = "add 10.96.0.3:443/TCP -> \nadd 10.96.0.3:80/TCP -> \n\
                  change 10.96.0.1:80/TCP -> 10.1.0.1:9090 10.1.0.3:9090\n\
                  remove 10.96.0.2:443/TCP\nremove 10.96.0.2:80/TCP\ndone";
    check("difference", &[first, second].concat()).await;
}

#[tokio::test]
async fn backend() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("proxy.sock");
    brain().serve(&socket);
    let target = format!("--target=unix://{}", socket.display());
    let pages = ["--healthz-bind-address=", "--metrics-bind-address="];
    let (_child, mut lines) = start("backend", &[&target, "--node-name=n1", pages[0], pages[1]]);
    let line = timeout(LIMIT, lines.next_line()).await.unwrap().unwrap().unwrap();
    assert!(line.starts_with("ns/a: [ServedPort {"), "{line}");
}

#[tokio::test]
async fn an_address_without_a_brain_is_logged() {
    for example in ["print", "difference"] {
        let mut child = Command::new(binary(example))
            .args(["unix:///no/such.sock", "n1"])
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let line = timeout(LIMIT, lines.next_line()).await.unwrap().unwrap().unwrap();
        assert!(line.contains("unix:///no/such.sock") && line.contains("retry_in"), "{line}");
    }
}

#[test]
fn a_backend_that_prints_is_under_twenty_lines() {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/print.rs")).unwrap();
    let lines = text.lines().filter(|it| !it.trim().is_empty() && !it.starts_with("//")).count();
    assert!(lines < 20, "{lines} lines");
}
