//! What the conformance kit does not ask: the sources that endpoints see, session affinity, stale UDP flows, foreign changes, and
//! programs that fail. As root, in network namespaces of their own.

#![expect(clippy::unwrap_used, reason = "a failed helper fails the test")]

#[path = "../../../proto/tests/common/process.rs"]
mod process;
#[path = "../../../proto/tests/common/scripted_brain.rs"]
mod scripted_brain;

use std::{
    collections::BTreeSet,
    env, fs,
    future::pending,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::unix::fs::PermissionsExt as _,
    path::Path,
    process::{Command, Stdio},
    sync::Arc,
    thread::{self, sleep},
    time::{Duration, Instant},
};

use process::{Process, skip};
use proxy_contract::localv1::{
    ClientIpAffinity, Endpoint, EndpointScopes, IpSet, OpItem, PortMapping, PortName, Protocol, Service,
    ServiceIPs, Set, service::SessionAffinity,
};
use scripted_brain::{ScriptedBrain, delete, set};
use tempfile::TempDir;
use tokio::sync::watch;

/// Only a hang takes as long.
const LIMIT: Duration = Duration::from_secs(60);
const MODES: [&str; 2] = ["nft", "legacy"];
const AFFINITY: SessionAffinity = SessionAffinity::ClientIp(ClientIpAffinity { timeout_seconds: 100 });

/// A network namespace.
struct Namespace(Process);

impl Namespace {
    /// `None`, with a message, without root.
    fn new() -> Option<Self> {
        let child = Command::new("unshare").args(["-n", "sleep", "infinity"]).spawn().unwrap();
        let (child, begin) = (Process(child), Instant::now());
        let namespace = |process: &str| fs::read_link(format!("/proc/{process}/ns/net")).ok();
        let own = namespace("self");
        while namespace(&child.0.id().to_string()).is_none_or(|it| Some(it) == own) {
            if begin.elapsed() > Duration::from_secs(5) {
                skip("a network namespace needs root");
                return None;
            }
            sleep(Duration::from_millis(5));
        }
        Some(Self(child))
    }

    fn command(&self, words: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["-n", "-t", &self.0.0.id().to_string()]).args(words.split(' '));
        command
    }

    #[track_caller]
    fn run(&self, words: &str) -> String {
        let output = self.command(words).output().unwrap();
        assert!(output.status.success(), "{words}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// All rules, without counters and times.
    fn rules(&self, mode: &str) -> String {
        let text = self.run(&format!("iptables-{mode}-save"));
        text.lines().filter(|it| !it.starts_with('#')).map(|it| it.to_owned() + "\n").collect()
    }

    #[track_caller]
    fn wait_for(&self, mode: &str, is_right: impl Fn(&str) -> bool) {
        let begin = Instant::now();
        loop {
            let rules = self.rules(mode);
            if is_right(&rules) {
                return;
            }
            assert!(begin.elapsed() < LIMIT, "{rules}");
            sleep(Duration::from_millis(20));
        }
    }

    /// Runs the test [`peer`] in this namespace.
    fn peer(&self, task: &str) -> Command {
        let mut command = self.command(env::current_exe().unwrap().to_str().unwrap());
        command.args(["--exact", "peer", "--nocapture"]).env("PEER", task).stdout(Stdio::piped());
        command
    }

    /// What the server at an address says: its name, and the source that it sees.
    #[track_caller]
    fn ask(&self, protocol: &str, address: &str) -> String {
        let output = self.peer(&format!("ask {protocol} {address}")).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let answer = text.lines().find_map(|it| Some(it.split_once("answer: ")?.1.to_owned()));
        answer.unwrap_or_else(|| panic!("{address}: {text}"))
    }
}

/// Not a test, but the program of a peer in a namespace.
#[test]
fn peer() {
    let Ok(task) = env::var("PEER") else { return };
    let task: Vec<&str> = task.split(' ').collect();
    match task[..] {
        ["serve", name] => {
            let udp = UdpSocket::bind("[::]:8080").unwrap();
            let tcp = TcpListener::bind("[::]:8080").unwrap();
            let of_udp = name.to_owned();
            thread::spawn(move || {
                while let Ok((_, source)) = udp.recv_from(&mut [0]) {
                    udp.send_to(format!("{of_udp} sees {}", source.ip().to_canonical()).as_bytes(), source)
                        .unwrap();
                }
            });
            for stream in tcp.incoming() {
                let mut stream = stream.unwrap();
                let source = stream.peer_addr().unwrap().ip().to_canonical();
                let _ = write!(stream, "{name} sees {source}");
            }
        }
        ["ask", "tcp", address] => {
            let address: SocketAddr = address.parse().unwrap();
            let mut answer = String::new();
            TcpStream::connect_timeout(&address, LIMIT).unwrap().read_to_string(&mut answer).unwrap();
            println!("answer: {answer}");
        }
        ["ask", _, address] => {
            let socket = UdpSocket::bind("0.0.0.0:5555").unwrap();
            socket.set_read_timeout(Some(LIMIT)).unwrap();
            socket.send_to(b"?", address).unwrap();
            let mut answer = [0; 100];
            let length = socket.recv(&mut answer).unwrap();
            println!("answer: {}", String::from_utf8_lossy(&answer[..length]));
        }
        _ => panic!("{task:?}"),
    }
}

/// A node with two pods, and a client outside: their servers say from where they are asked.
fn network() -> Option<(Namespace, [Namespace; 3], Vec<Process>)> {
    let node = Namespace::new()?;
    let peers = [Namespace::new()?, Namespace::new()?, Namespace::new()?];
    let mut servers = Vec::new();
    node.run("ip link set lo up");
    node.run("sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1");
    for (index, (peer, [name, net])) in
        peers.iter().zip([["a", "10.1.1"], ["b", "10.1.2"], ["outside", "192.0.2"]]).enumerate()
    {
        peer.run("ip link set lo up");
        let pid = peer.0.0.id();
        node.run(&format!("ip link add peer{index} type veth peer name eth0 netns {pid}"));
        node.run(&format!("ip address add {net}.1/24 dev peer{index}"));
        node.run(&format!("ip link set peer{index} up"));
        peer.run(&format!("ip address add {net}.2/24 dev eth0"));
        peer.run("ip link set eth0 up");
        peer.run(&format!("ip route add default via {net}.1"));
        node.run(&format!("ip address add fd00:{index}::1/64 dev peer{index} nodad"));
        peer.run(&format!("ip address add fd00:{index}::2/64 dev eth0 nodad"));
        peer.run(&format!("ip route add default via fd00:{index}::1"));
        servers.push(Process(peer.peer(&format!("serve {name}")).spawn().unwrap()));
        let begin = Instant::now();
        while !peer.run("ss -Hltn").contains(":8080") {
            assert!(begin.elapsed() < LIMIT, "{name} does not serve");
            sleep(Duration::from_millis(10));
        }
    }
    node.run("ip route add default via 192.0.2.2");
    Some((node, peers, servers))
}

/// A brain that sends change sets, one at first and further ones when told to.
struct Brain {
    folder: TempDir,
    available: Arc<watch::Sender<usize>>,
}

impl Brain {
    fn start(change_sets: impl Into<Vec<Vec<OpItem>>>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let brain = ScriptedBrain::new(change_sets);
        brain.available.send_replace(1);
        let (available, socket) = (Arc::clone(&brain.available), folder.path().join("proxy.sock"));
        thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                brain.serve(&socket);
                pending::<()>().await;
            });
        });
        Self { folder, available }
    }

    fn next(&self) {
        self.available.send_modify(|it| *it += 1);
    }

    /// The backend's command, which logs to the file `log`.
    fn backend(&self, node: &Namespace, mode: &str) -> Command {
        let mut command = node.command(env!("CARGO_BIN_EXE_kube-proxy-iptables"));
        let socket = self.folder.path().join("proxy.sock");
        command.args(["--target", &format!("unix://{}", socket.display()), "--node-name", "n1"]);
        command.args([
            "--iptables-mode",
            mode,
            "--cluster-cidr",
            "10.0.0.0/8,fd00::/16",
            "--sync-period",
            "1",
        ]);
        command.args(["--healthz-bind-address=", "--metrics-bind-address="]);
        command.stderr(fs::File::create(self.folder.path().join("log")).unwrap());
        command
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap()
    }
}

/// The Service `ns/N` with the cluster IP 10.96.0.N and the node port 3000N.
fn service(number: u8, protocol: Protocol, change: impl FnOnce(&mut Service)) -> OpItem {
    let cluster_ips = Some(IpSet::of([format!("10.96.0.{number}"), format!("fd00:96::{number}")]));
    let port = PortMapping {
        port: 80,
        node_port: 30_000 + i32::from(number),
        target_port: 8080,
        protocol: protocol.into(),
        ..PortMapping::default()
    };
    let mut service = Service {
        namespace: "ns".to_owned(),
        name: number.to_string(),
        ips: Some(ServiceIPs { cluster_ips, ..ServiceIPs::default() }),
        ports: vec![port],
        ..Service::default()
    };
    change(&mut service);
    set(Set::ServicesSet, &format!("ns/{number}"), &service)
}

fn endpoint(path: &str, ips: &[&str]) -> OpItem {
    let scopes = Some(EndpointScopes { internal: true, external: true, cluster: Some(true) });
    let port_overrides = vec![PortName { port: 8080, index: Some(0), ..PortName::default() }];
    let ips = Some(IpSet::of(ips));
    set(Set::EndpointsSet, path, &Endpoint { ips, scopes, port_overrides, ..Endpoint::default() })
}

fn traffic(mode: &str) {
    let Some((node, [a, b, outside], _servers)) = network() else { return };
    let [pod_a, pod_b] = [&["10.1.1.2", "fd00:0::2"], &["10.1.2.2", "fd00:1::2"]];
    let first = vec![
        service(1, Protocol::Tcp, |_| {}),
        service(2, Protocol::Tcp, |it| it.external_traffic_to_local = true),
        service(3, Protocol::Tcp, |it| it.session_affinity = Some(AFFINITY)),
        service(4, Protocol::Udp, |_| {}),
        endpoint("ns/1/a", pod_a),
        endpoint("ns/2/a", pod_a),
        endpoint("ns/3/a", pod_a),
        endpoint("ns/3/b", pod_b),
        endpoint("ns/4/a", pod_a),
    ];
    let second = vec![endpoint("ns/4/b", pod_b), delete(Set::EndpointsSet, "ns/4/a")];
    let brain = Brain::start([first, second]);
    let _backend = Process(brain.backend(&node, mode).spawn().unwrap());
    node.wait_for(mode, |it| it.contains("ns/4"));

    let cases = [
        (&b, "10.96.0.1:80", "a sees 10.1.2.2", "a pod keeps its source"),
        (&a, "10.96.0.1:80", "a sees 10.1.1.1", "a pod that reaches itself is masqueraded"),
        (&node, "10.96.0.1:80", "a sees 10.1.1.1", "the node has the address toward the pod"),
        (&outside, "10.96.0.1:80", "a sees 10.1.1.1", "outside traffic is masqueraded"),
        (&outside, "192.0.2.1:30001", "a sees 10.1.1.1", "at node ports, too"),
        (&b, "192.0.2.1:30001", "a sees 10.1.2.2", "but not that of pods"),
        (&outside, "192.0.2.1:30002", "a sees 192.0.2.2", "the policy Local keeps the source"),
        (&b, "192.0.2.1:30002", "a sees 10.1.2.2", "and that of pods"),
        (&b, "[fd00:96::1]:80", "a sees fd00:1::2", "IPv6"),
        (&a, "[fd00:96::1]:80", "a sees fd00::1", "a pod that reaches itself by IPv6"),
    ];
    for (client, address, expected, about) in cases {
        assert_eq!(client.ask("tcp", address), expected, "{mode}: {about}");
    }
    let answers =
        (0..10).map(|_| outside.ask("tcp", "192.0.2.1:30003").split(' ').next().unwrap().to_owned());
    assert_eq!(answers.collect::<BTreeSet<_>>().len(), 1, "{mode}: a client keeps its endpoint");
    node.run(&format!("iptables-{mode} -P FORWARD DROP"));
    assert_eq!(
        outside.ask("tcp", "192.0.2.1:30001"),
        "a sees 10.1.1.1",
        "{mode}: what is masqueraded is accepted"
    );
    node.run(&format!("iptables-{mode} -P FORWARD ACCEPT"));

    assert_eq!(outside.ask("udp", "10.96.0.4:80"), "a sees 10.1.1.1");
    brain.next();
    node.wait_for(mode, |it| it.matches("--to-destination 10.1.2.2:8080").count() == 3);
    if Command::new("conntrack").arg("--version").output().is_err() {
        skip("stale UDP flows need the program conntrack");
        return;
    }
    // The flow ends right after the rules are written.
    sleep(Duration::from_millis(500));
    assert_eq!(
        outside.ask("udp", "10.96.0.4:80"),
        "b sees 10.1.2.1",
        "{mode}: a flow leaves a removed endpoint"
    );
}

#[test]
fn endpoints_see_the_right_source_and_clients_keep_theirs() {
    MODES.into_iter().for_each(traffic);
}

#[test]
fn foreign_changes_are_undone_and_foreign_rules_stay() {
    for mode in MODES {
        let Some(node) = Namespace::new() else { return };
        let iptables = |arguments: &str| node.run(&format!("iptables-{mode} {arguments}"));
        // Rules of others, and a chain of an earlier process, which is still in use.
        for arguments in [
            "-t nat -N CNI-X",
            "-t nat -A CNI-X -s 10.9.0.0/16 -j RETURN",
            "-t nat -A PREROUTING -j CNI-X",
            "-A INPUT -s 203.0.113.9/32 -j DROP",
        ] {
            iptables(arguments);
        }
        let foreign = node.rules(mode);
        iptables("-t nat -N KPI-SVC-OLD");
        iptables("-t nat -A OUTPUT -j KPI-SVC-OLD");
        let brain =
            Brain::start([vec![service(1, Protocol::Tcp, |_| {}), endpoint("ns/1/a", &["10.1.1.2"])]]);
        let backend = Process(brain.backend(&node, mode).spawn().unwrap());
        node.wait_for(mode, |it| it.contains("ns/1") && !it.contains("KPI-SVC-OLD"));
        let written = node.rules(mode);
        let chain = written.lines().find_map(|it| it.strip_prefix(":KPI-SVC")?.split(' ').next()).unwrap();
        // The number of rules says nothing of those that are replaced: they were listed before.
        sleep(Duration::from_millis(1500));
        for arguments in [
            &format!("-t nat -R KPI-SVC{chain} 2 -p tcp -j DNAT --to-destination 10.1.1.3:8080"),
            "-t nat -F KPI-SERVICES",
            "-t nat -F OUTPUT",
            "-F FORWARD",
            "-t nat -D PREROUTING -j KPI-SERVICES",
            "-t nat -I OUTPUT -j KPI-SERVICES",
            "-t nat -N KPI-SVC-NEW",
        ] {
            iptables(arguments);
            node.wait_for(mode, |it| it == written);
        }
        drop(backend);
        assert_eq!(node.rules(mode), written, "the rules stay when the process ends");
        assert!(brain.backend(&node, mode).arg("--cleanup").status().unwrap().success());
        assert_eq!(node.rules(mode), foreign);
    }
}

/// A program in a folder for PATH, instead of that of the system.
fn program(folder: &Path, name: &str, script: &str) {
    let file = folder.join(name);
    fs::write(&file, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(file, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn a_program_that_fails_leaves_the_last_state() {
    let Some(node) = Namespace::new() else { return };
    let first = vec![service(1, Protocol::Tcp, |_| {}), endpoint("ns/1/a", &["10.1.1.2"])];
    let second = vec![endpoint("ns/1/a", &["10.1.1.3"]), service(2, Protocol::Tcp, |_| {})];
    let brain = Brain::start([first, second]);
    let folder = tempfile::tempdir().unwrap();
    let path = env::var("PATH").unwrap();
    // Sends a part of the input and fails, as long as there is the file `half`.
    let real = "/usr/sbin/iptables-nft-restore";
    let half = folder.path().join("half");
    let script =
        format!("[ -e {half} ] || exec {real} \"$@\"\nhead -c 200 | {real} \"$@\"", half = half.display());
    program(folder.path(), "iptables-nft-restore", &script);
    let mut command = brain.backend(&node, "nft");
    let path_with_program = format!("{}:{path}", folder.path().display());
    let _backend = Process(command.env("PATH", &path_with_program).spawn().unwrap());
    node.wait_for("nft", |it| it.contains("10.1.1.2:8080"));
    let written = node.rules("nft");

    fs::write(&half, "").unwrap();
    brain.next();
    let begin = Instant::now();
    while !brain.log().contains("cannot apply the state") {
        assert!(begin.elapsed() < LIMIT, "{}", brain.log());
        sleep(Duration::from_millis(20));
    }
    assert_eq!(node.rules("nft"), written, "{}", brain.log());
    fs::remove_file(&half).unwrap();
    node.wait_for("nft", |it| {
        it.contains("10.1.1.3:8080") && it.contains("ns/2") && !it.contains("10.1.1.2:8080")
    });
}

#[test]
fn what_does_not_work_is_named_and_the_rest_is_served() {
    let Some(node) = Namespace::new() else { return };
    let brain = Brain::start([vec![
        service(1, Protocol::Tcp, |it| it.session_affinity = Some(AFFINITY)),
        endpoint("ns/1/a", &["10.1.1.2"]),
    ]]);
    let folder = tempfile::tempdir().unwrap();
    let run = |path: &str| {
        let status = brain.backend(&node, "nft").arg("--once").env("PATH", path).status().unwrap();
        (status.success(), brain.log())
    };
    let (is_applied, log) = run("/usr/bin:/bin");
    assert!(!is_applied && log.contains("cannot run `iptables-nft-restore`: No such file"), "{log}");
    assert!(log.contains("install the package iptables"), "{log}");

    let path = format!("{}:{}", folder.path().display(), env::var("PATH").unwrap());
    let message = "line 3: RULE_APPEND failed (No such file or directory): rule in chain KPI-PROBE";
    let script = format!("cat > /dev/null; echo '{message}' >&2; exit 4");
    program(folder.path(), "ip6tables-nft-restore", &script);
    let (is_applied, log) = run(&path);
    assert!(is_applied && log.contains("IPv6 does not work here") && log.contains("ns/1"), "{log}");
    assert!(node.rules("nft").contains("ns/1"));

    // Without the match `recent`, the Service is served without session affinity; `bpf` is required.
    let real = "/usr/sbin/iptables-nft-restore";
    let without = |word: &str| {
        let script = format!("case $input in *{word}*) {script};; esac");
        let script = format!("input=$(cat); {script}; echo \"$input\" | {real} \"$@\"");
        program(folder.path(), "iptables-nft-restore", &script);
    };
    without("recent");
    let (is_applied, log) = run(&path);
    assert!(is_applied && log.contains("session affinity does not work here"), "{log}");
    assert!(node.rules("nft").contains("ns/1"));
    without("bpf");
    let (is_applied, log) = run(&path);
    assert!(!is_applied && log.contains("(for a match NAME its module xt_NAME) must have `-m bpf "), "{log}");

    program(folder.path(), "iptables-nft-restore", &script);
    let (is_applied, log) = run(&path);
    assert!(!is_applied && log.contains(message), "{log}");
    assert!(log.contains("; line 3 is `-A KPI-PROBE -j RETURN`"), "{log}");
}
