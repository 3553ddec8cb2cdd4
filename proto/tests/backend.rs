//! A backend that follows a brain of two states: what it is given, when it fails, and what its pages say.

#![expect(clippy::unwrap_used, reason = "a failed helper fails the test")]

#[path = "common/scripted_brain.rs"]
mod scripted_brain;

use std::{
    collections::VecDeque,
    future::pending,
    io,
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    sync::Arc,
    time::Duration,
};

use clap::Parser;
use proxy_contract::{
    backend::{Backend, Changed, Flags, NotServed, run},
    client::State,
    localv1::{Endpoint, EndpointScopes, IpSet, OpItem, Service, Set},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::mpsc,
    time::timeout,
};

use scripted_brain::{ScriptedBrain, delete, set};

/// Only a hang takes as long.
const LIMIT: Duration = Duration::from_secs(60);

#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    flags: Flags,
}

/// What a backend was given: the Services of the state, and which of them have changed; `None` for everything.
type Applied = (Vec<String>, Option<Vec<String>>);

/// Answers applies and checks as the script says, and by success at its end.
struct Scripted {
    applies: VecDeque<Result<Vec<NotServed>, String>>,
    checks: VecDeque<bool>,
    given: mpsc::UnboundedSender<Applied>,
}

impl Backend for Scripted {
    type Error = String;

    async fn apply(&mut self, state: &State, changed: Changed<'_>) -> Result<Vec<NotServed>, String> {
        let names = state.services.keys().map(ToString::to_string).collect();
        let changed = match changed {
            Changed::Everything => None,
            Changed::Services(names) => Some(names.iter().map(ToString::to_string).collect()),
        };
        self.given.send((names, changed)).unwrap();
        self.applies.pop_front().unwrap_or(Ok(Vec::new()))
    }

    async fn is_intact(&mut self) -> Result<bool, String> {
        Ok(self.checks.pop_front().unwrap_or(true))
    }
}

/// A running backend, and the brain that it follows.
struct Running {
    given: mpsc::UnboundedReceiver<Applied>,
    brain: ScriptedBrain,
    healthz: SocketAddr,
    metrics: SocketAddr,
    _folder: tempfile::TempDir,
}

/// An address of loopback that only this process uses: at 127.0.0.1, a connection of another test may take the port meanwhile.
async fn free_address() -> SocketAddr {
    let ip = Ipv4Addr::from_bits(0x7f80_0000 | std::process::id() & 0x7f_ffff);
    TcpListener::bind((ip, 0)).await.unwrap().local_addr().unwrap()
}

fn flags(socket: &Path, arguments: &[&str]) -> Flags {
    let target = format!("--target=unix://{}", socket.display());
    let all = ["backend", &target, "--node-name=n1"].into_iter().chain(arguments.iter().copied());
    Arguments::parse_from(all).flags
}

fn service(path: &str, health_check_node_port: u16) -> OpItem {
    let service = Service { health_check_node_port: health_check_node_port.into(), ..Service::default() };
    set(Set::ServicesSet, path, &service)
}

impl Running {
    async fn start(
        change_sets: Vec<Vec<OpItem>>,
        applies: impl IntoIterator<Item = Result<Vec<NotServed>, String>>,
        checks: impl IntoIterator<Item = bool>,
    ) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("brain.sock");
        let brain = ScriptedBrain::new(change_sets);
        brain.available.send_replace(1);
        brain.clone().serve(&socket);
        let (healthz, metrics) = (free_address().await, free_address().await);
        let (sender, given) = mpsc::unbounded_channel();
        let (applies, checks) = (applies.into_iter().collect(), checks.into_iter().collect());
        let mut backend = Scripted { applies, checks, given: sender };
        let pages =
            [format!("--healthz-bind-address={healthz}"), format!("--metrics-bind-address={metrics}")];
        let flags = flags(&socket, &["--sync-period=1", &pages[0], &pages[1]]);
        tokio::spawn(async move {
            let Err(error) = run(&flags, &mut backend, pending()).await else { return };
            eprintln!("the backend ended: {error}");
        });
        Self { given, brain, healthz, metrics, _folder: folder }
    }

    async fn given(&mut self) -> Applied {
        timeout(LIMIT, self.given.recv()).await.unwrap().unwrap()
    }
}

/// The status and the body of a page, once it begins as expected.
async fn page(address: SocketAddr, path: &str, expected: &str) -> String {
    let get = async || -> io::Result<String> {
        let mut stream = TcpStream::connect(address).await?;
        stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        Ok(answer)
    };
    let found = async {
        loop {
            match get().await {
                Ok(it) if it.starts_with(expected) => return it,
                _ => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    };
    timeout(LIMIT, found).await.unwrap()
}

fn everything(names: &[&str]) -> Applied {
    (names.iter().map(ToString::to_string).collect(), None)
}

fn changed(names: &[&str], changed: &[&str]) -> Applied {
    (everything(names).0, Some(everything(changed).0))
}

#[tokio::test]
async fn a_backend_is_given_everything_and_then_what_has_changed() {
    let second = vec![service("ns/c", 0), delete(Set::ServicesSet, "ns/a")];
    let mut it = Running::start(vec![vec![service("ns/a", 0), service("ns/b", 0)], second], [], []).await;
    assert_eq!(it.given().await, everything(&["ns/a", "ns/b"]));
    it.brain.available.send_replace(2);
    assert_eq!(it.given().await, changed(&["ns/b", "ns/c"], &["ns/a", "ns/c"]));
}

#[tokio::test]
async fn a_failed_apply_is_repeated_with_everything_and_said_by_the_pages() {
    let failures = ["line 3 failed", "line 3 failed"].map(|it| Err(it.to_owned()));
    let mut it = Running::start(vec![vec![service("ns/a", 0)]], failures, []).await;
    assert_eq!(it.given().await, everything(&["ns/a"]));
    let failed = page(it.healthz, "/healthz", "HTTP/1.1 503").await;
    assert!(failed.ends_with("cannot apply a state: line 3 failed\n"), "{failed}");
    for _ in 0..2 {
        assert_eq!(it.given().await, everything(&["ns/a"]));
    }
    assert!(page(it.healthz, "/healthz", "HTTP/1.1 200").await.ends_with("\r\n\r\nok\n"));
    let metrics = page(it.metrics, "/metrics", "HTTP/1.1 200").await;
    assert!(metrics.contains("kubeproxy_apply_failures_total 2\n"), "{metrics}");
    assert!(page(it.metrics, "/healthz", "HTTP/1.1 404").await.ends_with("no such page\n"));
}

#[tokio::test]
async fn what_something_else_has_changed_is_written_again() {
    let mut it = Running::start(vec![vec![service("ns/a", 0)]], [], [true, false]).await;
    for _ in 0..2 {
        assert_eq!(it.given().await, everything(&["ns/a"]));
    }
    assert!(page(it.metrics, "/metrics", "HTTP/1.1 200").await.contains("kubeproxy_repairs_total 1\n"));
}

#[tokio::test]
async fn what_is_not_served_is_tried_again_without_a_change() {
    let not_served = NotServed { service: Arc::from("ns/a"), reason: "its port is in use".to_owned() };
    let mut it = Running::start(vec![vec![service("ns/a", 0)]], [Ok(vec![not_served])], []).await;
    assert_eq!(it.given().await, everything(&["ns/a"]));
    assert_eq!(it.given().await, changed(&["ns/a"], &[]));
    assert!(page(it.healthz, "/healthz", "HTTP/1.1 200").await.ends_with("ok\n"), "the rest is served");
}

#[tokio::test]
async fn a_health_check_node_port_says_whether_an_endpoint_is_local() {
    let port = free_address().await.port();
    let scopes = Some(EndpointScopes { internal: true, ..EndpointScopes::default() });
    let endpoint =
        |local| Endpoint { ips: Some(IpSet::of(["10.1.0.1"])), local, scopes, ..Endpoint::default() };
    let states = vec![
        vec![service("ns/a", port), set(Set::EndpointsSet, "ns/a/p", &endpoint(true))],
        vec![set(Set::EndpointsSet, "ns/a/p", &endpoint(false))],
    ];
    let it = Running::start(states, [], []).await;
    let at = SocketAddr::from(([127, 0, 0, 1], port));
    let answer = page(at, "/", "HTTP/1.1 200").await;
    assert!(answer.contains(r#"{"namespace":"ns","name":"a"},"localEndpoints":1,"#), "{answer}");
    it.brain.available.send_replace(2);
    assert!(page(at, "/", "HTTP/1.1 503").await.contains(r#""localEndpoints":0,"#));
}

#[tokio::test]
async fn once_ends_after_one_state_and_a_failure_is_its_result() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("brain.sock");
    ScriptedBrain::new([vec![service("ns/a", 0)]]).serve(&socket);
    let flags = flags(&socket, &["--once"]);
    let (given, mut received) = mpsc::unbounded_channel();
    let applies = VecDeque::from([Err("no iptables".to_owned())]);
    let mut backend = Scripted { applies, checks: VecDeque::new(), given };
    let error = timeout(LIMIT, run(&flags, &mut backend, pending())).await.unwrap().unwrap_err();
    assert_eq!(error.to_string(), "cannot apply the state: no iptables");
    timeout(LIMIT, run(&flags, &mut backend, pending())).await.unwrap().unwrap();
    assert_eq!(received.recv().await, received.recv().await);
}
