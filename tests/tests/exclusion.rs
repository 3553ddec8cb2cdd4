//! Who is served and who is left alone: by network namespace, and by cgroup.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    ffi::OsStr,
    fs,
    net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket},
    path::{Path, PathBuf},
    process::{self, Command},
    time::Duration,
};

use rustix::thread::CapabilitySet;
use tests::{
    Agent, Build, EchoServer, NetNs, TestNode, Transport, eventually, http::get, manifest::Service, request,
    requirements::kernel_at_least, test_node::NODE,
};

const LIMIT: Duration = Duration::from_secs(20);

fn web() -> SocketAddr {
    SocketAddr::from(([10, 96, 0, 10], 80))
}

fn endpoint() -> SocketAddr {
    SocketAddr::from(([10, 244, 1, 1], 8080))
}

fn prepare(world: &TestNode) -> EchoServer {
    let web = Service::new("web", &[web().ip()])
        .port("tcp", "TCP", 80, 8080)
        .port("udp", "UDP", 80, 8080)
        .endpoint("web-1", &[endpoint().ip()]);
    world.write(&[web]);
    EchoServer::start("web-1", endpoint()).unwrap()
}

fn start(world: &TestNode, arguments: &[&Path]) -> Agent {
    let setting = world.command(Build::Product);
    let setting = arguments.iter().fold(setting, tests::agent::AgentCommand::arg);
    let mut agent = setting.start(world.sandbox()).unwrap();
    let log = agent.log_path().to_owned();
    agent.wait_until(LIMIT, || fs::read_to_string(&log).is_ok_and(|it| it.contains("state active"))).unwrap();
    agent
}

const TRANSPORTS: [Transport; 3] = [Transport::Tcp, Transport::Udp, Transport::UdpUnconnected];

#[track_caller]
fn assert_served() {
    for transport in TRANSPORTS {
        assert_eq!(request(transport, web()).unwrap(), "web-1", "{transport:?}");
    }
}

/// No route leads to a Service's address.
#[track_caller]
fn assert_left_alone() {
    for transport in TRANSPORTS {
        let error = request(transport, web()).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(nix::libc::ENETUNREACH), "{transport:?}: {error}");
    }
}

#[test]
fn host_leaves_other_namespaces_alone() {
    let Some(world) = TestNode::or_skip("host_leaves_other_namespaces_alone") else { return };
    let _server = prepare(&world);
    let pod = NetNs::new().unwrap();
    pod.ip(&["route", "add", "local", "10.244.0.0/16", "dev", "lo"]).unwrap();
    let _other_server = {
        let _inside = pod.enter().unwrap();
        EchoServer::start("web-1", endpoint()).unwrap()
    };
    for (scope, is_served) in [("host", false), ("all", true), ("host", false)] {
        let agent = start(&world, &["--socket-lb".as_ref(), scope.as_ref()]);
        // An older kernel takes the first namespace of all for the node's, and this is another.
        if is_served || kernel_at_least(5, 14) {
            assert_served();
        } else {
            assert_left_alone();
        }
        let inside = pod.enter().unwrap();
        if is_served {
            assert_served();
        } else {
            assert_left_alone();
        }
        drop(inside);
        agent.kill9().unwrap();
    }
}

/// A cgroup below the sandbox's, which is gone in the end.
struct Below(PathBuf);

impl Below {
    fn new(world: &TestNode, name: &str) -> Self {
        let path = world.sandbox().cgroup().join(name);
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn enter(&self) {
        enter(&self.0);
    }
}

impl Drop for Below {
    fn drop(&mut self) {
        // It may be gone already.
        let _ = fs::remove_dir(&self.0);
    }
}

fn enter(cgroup: &Path) {
    fs::write(cgroup.join("cgroup.procs"), process::id().to_string()).unwrap();
}

#[test]
fn an_excluded_cgroup_is_left_alone_with_all_below() {
    let Some(world) = TestNode::or_skip("an_excluded_cgroup_is_left_alone_with_all_below") else { return };
    let _server = prepare(&world);
    let top = world.sandbox().cgroup().to_owned();
    let mesh = Below::new(&world, "mesh");
    let inner = Below::new(&world, "mesh/inner");
    let other = Below::new(&world, "other");
    let vm = Below::new(&world, "other/vm");
    let exclude: &Path = "--socket-lb-exclude-cgroup".as_ref();
    let agent = start(&world, &[exclude, &mesh.0, exclude, &vm.0]);

    assert_served();
    let stream = TcpStream::connect(web()).unwrap();
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    socket.connect(web()).unwrap();
    for below in [&mesh, &inner, &vm] {
        below.enter();
        assert_left_alone();
        // A socket that was led before goes on as it was.
        assert_eq!(stream.peer_addr().unwrap(), web());
        socket.send_to(b"who?", web()).unwrap();
        assert_eq!(socket.recv_from(&mut [0; 64]).unwrap().1, web());
        other.enter();
        assert_served();
        enter(&top);
        assert_served();
    }
    // Another start with other flags, and nobody is excluded any more.
    agent.kill9().unwrap();
    inner.enter();
    assert_left_alone();
    let _agent = start(&world, &[]);
    assert_served();
    enter(&top);
}

#[test]
fn an_excluded_cgroup_may_come_later_and_come_back() {
    let Some(world) = TestNode::or_skip("an_excluded_cgroup_may_come_later_and_come_back") else { return };
    let _server = prepare(&world);
    let top = world.sandbox().cgroup().to_owned();
    let path = top.join("later");
    let agent = start(&world, &["--socket-lb-exclude-cgroup".as_ref(), &path]);
    let missing = format!("{} does not exist", path.display());
    assert!(agent.log().contains(&missing), "{}", agent.log());
    for _ in 0..2 {
        let later = Below::new(&world, "later");
        later.enter();
        assert!(eventually(LIMIT, || request(Transport::Tcp, web()).is_err()), "{}", agent.log());
        assert_left_alone();
        enter(&top);
        assert_served();
    }
}

#[test]
fn what_is_no_cgroup_cannot_be_excluded() {
    let Some(world) = TestNode::or_skip("what_is_no_cgroup_cannot_be_excluded") else { return };
    let _server = prepare(&world);
    let root = world.sandbox().cgroup().parent().unwrap().to_owned();
    let files = world.sandbox().files().join("nothing");
    for (path, says) in [(&files, "is not a cgroup2 folder"), (&root, "cannot be left alone")] {
        let setting = world.command(Build::Product).arg("--socket-lb-exclude-cgroup").arg(path);
        let mut agent = setting.start(world.sandbox()).unwrap();
        assert!(!agent.wait(LIMIT).unwrap().success());
        assert!(agent.log().contains(says), "{}", agent.log());
        assert!(agent.log().contains(&*path.to_string_lossy()), "{}", agent.log());
    }
    assert!(TcpStream::connect(web()).is_err(), "nothing was attached");
}

/// Hides all other cgroups, mounts its own at `$0`, and goes on as what follows.
const AS_IN_A_CONTAINER: &str =
    "umount -a -l -t cgroup2; mkdir \"$0\"; mount -t cgroup2 none \"$0\"; exec \"$@\"";

/// What the product says to arguments, where nothing is said of packets.
fn say(arguments: &[&OsStr]) -> String {
    say_by(Build::Product.binary(), arguments)
}

/// The same by way of another program.
fn say_by(program: impl AsRef<OsStr>, arguments: &[&OsStr]) -> String {
    let mut command = Command::new(program);
    let output = command.args(arguments).env_remove("KUBE_PROXY_EBPF_PACKETS").output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_cgroup_below_the_root_bounds_packets_too_unless_they_are_asked_for() {
    const NAME: &str = "a_cgroup_below_the_root_bounds_packets_too_unless_they_are_asked_for";
    let Some(world) = TestNode::or_skip(NAME) else { return };
    let _server = prepare(&world);
    let (cgroup, pins) = (world.sandbox().cgroup().as_os_str(), world.sandbox().pins().as_os_str());
    let source = format!("file:{}", world.manifests().display());
    let run: [&OsStr; 5] =
        ["run".as_ref(), "--source".as_ref(), source.as_ref(), "--node-name".as_ref(), NODE.as_ref()];
    let row = |said: &str| {
        let row = said.lines().find(|it| it.starts_with("--packets ")).unwrap().to_owned();
        row.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let print: [&OsStr; 1] = ["--print-config".as_ref()];
    let packets = |more: &[&OsStr]| row(&say(&[&run, more, &print].concat()));
    let below: [&OsStr; 2] = ["--cgroup".as_ref(), cgroup];
    let root = world.sandbox().cgroup().parent().unwrap().as_os_str();
    assert_eq!(packets(&[]), "--packets nft default");
    assert_eq!(packets(&["--cgroup".as_ref(), root]), "--packets nft default");
    assert_eq!(packets(&below), "--packets off default below the root cgroup");
    assert_eq!(packets(&[&below[..], &["--packets=nft".as_ref()]].concat()), "--packets nft flag");
    // A container that is a machine of its own, as in kind, sees nothing above its cgroup.
    let mount = world.sandbox().files().join("cgroup");
    let container: [&OsStr; 6] = [
        "--cgroup".as_ref(),
        "--mount".as_ref(),
        "sh".as_ref(),
        "-ec".as_ref(),
        AS_IN_A_CONTAINER.as_ref(),
        mount.as_ref(),
    ];
    let binary = Build::Product.binary();
    let top: [&OsStr; 2] = ["--cgroup".as_ref(), mount.as_ref()];
    let arguments = [&container[..], &[binary.as_ref()], &run, &top, &print].concat();
    assert_eq!(row(&say_by("unshare", &arguments)), "--packets nft default");
    // Where all is packets, the cgroup means nothing.
    assert_eq!(packets(&[&below[..], &["--backend=nft".as_ref()]].concat()), "--packets nft default");

    let env: [&OsStr; 3] = ["-u".as_ref(), "KUBE_PROXY_EBPF_PACKETS".as_ref(), binary.as_ref()];
    let arguments = [&env[..], &run, &below, &["--pin-dir".as_ref(), pins]].concat();
    let unasked = tests::agent::AgentCommand::new("env".as_ref(), &arguments);
    let dump = || say(&["dump".as_ref(), "--pin-dir".as_ref(), pins]);
    for (setting, is_asked_for) in [(unasked.clone(), false), (unasked.arg("--packets=nft"), true)] {
        let mut agent = setting.start(world.sandbox()).unwrap();
        let is_in_force = |it: &str| it.contains("state active");
        let log = agent.log_path().to_owned();
        agent.wait_until(LIMIT, || fs::read_to_string(&log).is_ok_and(|it| is_in_force(&it))).unwrap();
        assert_served();
        assert_eq!(agent.log().contains("the nftables path is off"), !is_asked_for, "{}", agent.log());
        assert_eq!(dump().lines().any(|it| it.starts_with("packets")), is_asked_for, "{}", dump());
        agent.kill9().unwrap();
    }
}

#[test]
fn a_cgroup_that_is_taken_unasked_and_leaves_processes_out_is_told_of() {
    const NAME: &str = "a_cgroup_that_is_taken_unasked_and_leaves_processes_out_is_told_of";
    let Some(world) = TestNode::or_skip(NAME) else { return };
    let _server = prepare(&world);
    // As in a container that sees its own cgroup alone: no other cgroup2 mount is left.
    let mount = world.sandbox().files().join("cgroup");
    let source = format!("file:{}", world.manifests().display());
    let binary = Build::Product.binary();
    let arguments: [&OsStr; 15] = [
        "--cgroup".as_ref(),
        "--mount".as_ref(),
        "--".as_ref(),
        "sh".as_ref(),
        "-ec".as_ref(),
        AS_IN_A_CONTAINER.as_ref(),
        mount.as_ref(),
        binary.as_ref(),
        "run".as_ref(),
        "--source".as_ref(),
        source.as_ref(),
        "--node-name".as_ref(),
        NODE.as_ref(),
        "--pin-dir".as_ref(),
        world.sandbox().pins().as_ref(),
    ];
    let setting = tests::agent::AgentCommand::new("unshare".as_ref(), &arguments);
    let mut agent = setting.capabilities(CapabilitySet::all()).start(world.sandbox()).unwrap();
    let page = |path| {
        get((Ipv4Addr::LOCALHOST, 10256).into(), path).map_or((0, String::new()), |it| (it.status, it.body))
    };
    agent
        .wait_until(LIMIT, || {
            page("/readyz").1.contains("[-]programs failed: ") && page("/readyz").1.contains("nested")
        })
        .unwrap();
    assert_eq!(page("/readyz").0, 503);
    assert_eq!(page("/livez").0, 200, "no restart would mend it");
    let warned = |log: &str| {
        log.lines().filter(|it| it.contains("WARN") && it.contains("nested cgroup without pods")).count()
    };
    assert_eq!(warned(&agent.log()), 1, "{}", agent.log());
    assert_served();
    // Its pods come later.
    let _pods = Below::new(&world, "kubepods");
    agent.wait_until(LIMIT, || page("/readyz").0 == 200).unwrap();
    assert_eq!(warned(&agent.log()), 1, "{}", agent.log());
}
