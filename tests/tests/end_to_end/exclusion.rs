//! Which sockets are translated: by network namespace, and by cgroup.

use std::{
    ffi::OsStr,
    fs,
    net::TcpStream,
    path::PathBuf,
    process::{self, Command},
};

use rustix::thread::CapabilitySet;
use tests::{
    APPLIED, AgentCommand, Build, FRONTEND, NODE, Sandbox, TIMEOUT, TestNode, Transport, assert_contains,
    connected_udp_socket, eventually, exchange, http, kernel_at_least, move_to, pod_with_servers, request,
    run, web,
};

/// A node with `web`; no proxy runs yet.
pub(super) fn node_or_skip() -> Option<TestNode> {
    TestNode::prepared_or_skip([1], &[web([1])])
}

#[track_caller]
pub(super) fn assert_translated() {
    for transport in Transport::ALL {
        assert_eq!(request(transport, FRONTEND).unwrap(), "web-1", "{transport:?}");
    }
}

/// A Service's address has no route.
#[track_caller]
pub(super) fn assert_not_translated() {
    for transport in Transport::ALL {
        let error = request(transport, FRONTEND).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(nix::libc::ENETUNREACH), "{transport:?}: {error}");
    }
}

#[test]
fn socket_lb_host_does_not_translate_in_other_namespaces() {
    let Some(mut node) = node_or_skip() else { return };
    let (pod, _server) = pod_with_servers([1]);
    for (scope, includes_pods) in [("host", false), ("all", true), ("host", false)] {
        node.start(&["--socket-lb", scope]);
        // An older kernel takes the initial namespace for the node's, and this is another.
        if includes_pods || kernel_at_least(5, 14) {
            assert_translated();
        } else {
            assert_not_translated();
        }
        pod.run(|| if includes_pods { assert_translated() } else { assert_not_translated() });
        node.kill();
    }
}

/// A cgroup below the sandbox's, removed when dropped.
pub(super) struct ChildCgroup(PathBuf);

impl ChildCgroup {
    pub(super) fn new(sandbox: &Sandbox, name: &str) -> Self {
        let path = sandbox.cgroup().join(name);
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    pub(super) fn enter(&self) {
        move_to(&self.0, process::id()).unwrap();
    }

    pub(super) fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for ChildCgroup {
    fn drop(&mut self) {
        // It fails if the cgroup has been removed already.
        let _ = fs::remove_dir(&self.0);
    }
}

/// Moves this process back to the sandbox's cgroup.
pub(super) fn leave(node: &TestNode) {
    node.sandbox().add_process(process::id()).unwrap();
}

#[test]
fn an_excluded_cgroup_and_its_children_are_not_translated() {
    const EXCLUDE: &str = "--socket-lb-exclude-cgroup";
    let Some(mut node) = node_or_skip() else { return };
    let mesh = ChildCgroup::new(node.sandbox(), "mesh");
    let inner = ChildCgroup::new(node.sandbox(), "mesh/inner");
    let other = ChildCgroup::new(node.sandbox(), "other");
    let vm = ChildCgroup::new(node.sandbox(), "other/vm");
    node.start(&[EXCLUDE, mesh.path(), EXCLUDE, vm.path()]);

    assert_translated();
    let stream = TcpStream::connect(FRONTEND).unwrap();
    let socket = connected_udp_socket(FRONTEND).unwrap();
    for excluded in [&mesh, &inner, &vm] {
        excluded.enter();
        assert_not_translated();
        // Sockets that were connected before keep working.
        assert_eq!(stream.peer_addr().unwrap(), FRONTEND);
        assert_eq!(exchange(&socket, FRONTEND).unwrap().1, FRONTEND);
        other.enter();
        assert_translated();
        leave(&node);
        assert_translated();
    }
    // A start without the flags excludes nothing.
    node.kill();
    inner.enter();
    assert_not_translated();
    node.start(&[]);
    assert_translated();
    leave(&node);
}

#[test]
fn an_excluded_cgroup_may_be_created_later_and_recreated() {
    let Some(mut node) = node_or_skip() else { return };
    let path = node.sandbox().cgroup().join("later").display().to_string();
    node.start(&["--socket-lb-exclude-cgroup", &path]);
    node.wait_until_logged(&["the excluded cgroup does not exist", &path]);
    for _ in 0..2 {
        let later = ChildCgroup::new(node.sandbox(), "later");
        later.enter();
        assert!(eventually(TIMEOUT, || request(Transport::Tcp, FRONTEND).is_err()), "{}", node.log());
        assert_not_translated();
        leave(&node);
        assert_translated();
    }
}

#[test]
fn excluding_a_path_that_is_not_a_cgroup_is_an_error() {
    let Some(node) = node_or_skip() else { return };
    let root = node.sandbox().root_cgroup().to_owned();
    let files = node.sandbox().files().join("nothing");
    for (path, text) in [(&files, "is not a cgroup2 folder"), (&root, "cannot be excluded")] {
        let command = node.command(Build::Product).arg("--socket-lb-exclude-cgroup").arg(path);
        let mut agent = command.start(node.sandbox()).unwrap();
        assert!(!agent.wait(TIMEOUT).unwrap().success());
        assert_contains(&agent.log(), &[text, &path.to_string_lossy()]);
    }
    assert!(TcpStream::connect(FRONTEND).is_err(), "nothing was attached");
}

/// Unmounts all cgroup2 file systems, mounts its own cgroup namespace's at `$0`, and executes the arguments.
const AS_IN_A_CONTAINER: &str =
    "umount -a -l -t cgroup2; mkdir \"$0\"; mount -t cgroup2 none \"$0\"; exec \"$@\"";

/// What a program prints, without a default of the tests for `--packets`.
fn print(program: impl AsRef<OsStr>, arguments: &[&str]) -> String {
    run(Command::new(program).args(arguments).env_remove("KUBE_PROXY_EBPF_PACKETS")).success()
}

#[test]
fn a_cgroup_below_the_root_disables_the_packet_path_by_default() {
    let Some(mut node) = node_or_skip() else { return };
    let text = |path: &std::path::Path| path.to_str().unwrap().to_owned();
    let (cgroup, pins) = (text(node.sandbox().cgroup()), text(node.sandbox().pins()));
    let (root, binary) = (text(node.sandbox().root_cgroup()), text(&Build::Product.binary()));
    let source = node.source();
    let run = ["run", "--source", &source, "--node-name", NODE];
    let row = |text: &str| {
        let row = text.lines().find(|it| it.starts_with("--packets ")).unwrap().to_owned();
        row.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let packets = |more: &[&str]| row(&print(&binary, &[&run, more, &["--print-config"]].concat()));
    assert_eq!(packets(&[]), "--packets nft default");
    assert_eq!(packets(&["--cgroup", &root]), "--packets nft default");
    assert_eq!(packets(&["--cgroup", &cgroup]), "--packets off default below the root cgroup");
    assert_eq!(packets(&["--cgroup", &cgroup, "--packets=nft"]), "--packets nft flag");
    // In a container that is a node, as in kind, no cgroup above its own is visible.
    let mount = text(&node.sandbox().files().join("cgroup"));
    let container = ["--cgroup", "--mount", "sh", "-ec", AS_IN_A_CONTAINER, &mount, &binary];
    let arguments = [&container[..], &run, &["--cgroup", &mount, "--print-config"]].concat();
    assert_eq!(row(&print("unshare", &arguments)), "--packets nft default");
    // Without the socket path, the cgroup has no effect.
    assert_eq!(packets(&["--cgroup", &cgroup, "--backend=nft"]), "--packets nft default");

    let env = ["-u", "KUBE_PROXY_EBPF_PACKETS", &binary];
    let default = AgentCommand::new("env".as_ref()).args(env).args(run).kernel(node.sandbox());
    let dump = || print(&binary, &["dump", "--pin-dir", &pins]);
    for (command, is_on) in [(default.clone(), false), (default.arg("--packets=nft"), true)] {
        node.start_inactive(&command);
        node.wait_until_logged(&[APPLIED]);
        assert_translated();
        assert_eq!(node.log().contains("the nftables path is off"), !is_on, "{}", node.log());
        assert_eq!(dump().lines().any(|it| it.starts_with("packets")), is_on, "{}", dump());
        node.kill();
    }
}

#[test]
fn a_default_cgroup_that_leaves_processes_out_is_reported() {
    let Some(mut node) = node_or_skip() else { return };
    // As in a container where its own cgroup is the only cgroup2 mount.
    let mount = node.sandbox().files().join("cgroup");
    let container = ["--cgroup", "--mount", "--", "sh", "-ec", AS_IN_A_CONTAINER];
    let command = AgentCommand::new("unshare".as_ref())
        .args(container)
        .args([&mount, &Build::Product.binary()])
        .args(["run", "--source", &node.source(), "--node-name", NODE, "--pin-dir"])
        .arg(node.sandbox().pins());
    node.start_inactive(&command.capabilities(CapabilitySet::all()));
    let readiness = || http::health("/readyz").map_or_else(|_| String::new(), |it| it.body);
    node.wait_until(|_| readiness().contains("[-]programs failed: ") && readiness().contains("nested"));
    assert_eq!(http::health_status("/readyz"), 503);
    assert_eq!(http::health_status("/livez"), 200, "a restart would not help");
    let warnings = |node: &TestNode| {
        let is_warning = |it: &&str| it.contains("WARN") && it.contains("nested cgroup without pods");
        node.log().lines().filter(is_warning).count()
    };
    assert_eq!(warnings(&node), 1, "{}", node.log());
    assert_translated();
    // Its pods come later.
    let _pods = ChildCgroup::new(node.sandbox(), "kubepods");
    node.wait_until_ready();
    assert_eq!(warnings(&node), 1, "{}", node.log());
}
