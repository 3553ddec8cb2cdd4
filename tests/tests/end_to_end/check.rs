//! `check` and `status` report the state of a node, whether it works or not.

use std::{
    fs,
    net::TcpListener,
    os::unix::fs::{PermissionsExt as _, chown},
    path::Path,
    process::{Command, Stdio},
};

use build_tools::command::KilledOnDrop;
use tests::{
    Build, Output, TIMEOUT, TestNode, Transport, WEB4, agent::STATUS_SOCKET, assert_contains, eventually,
    kernel_at_least, manifest, program_or_skip, request, run, status_socket, web4,
};

/// What `check` printed, and its exit code.
struct Report {
    code: Option<i32>,
    text: String,
}

impl Report {
    fn of(command: &mut Command, node: &TestNode) -> Self {
        command.env(STATUS_SOCKET, status_socket(node.sandbox()));
        Self::at(command, node.sandbox().cgroup(), node.sandbox().pins())
    }

    fn at(command: &mut Command, cgroup: &Path, pins: &Path) -> Self {
        command.arg("check").arg("--cgroup").arg(cgroup).arg("--pin-dir").arg(pins);
        // As the proxies under test are started.
        let output = run(command.env("KUBE_PROXY_EBPF_PACKETS", "off"));
        assert_eq!(output.stderr, "");
        Self { code: output.code, text: output.stdout }
    }

    /// The finding about a subject, on one line with its remedy.
    fn about(&self, level: &str, subject: &str) -> Option<String> {
        let begin = self.text.find(&format!("  {level:<8}  {subject} "))?;
        let rest = &self.text[begin..];
        // It ends where the next finding begins, or the group ends.
        let is_next = |it: &str| it.is_empty() || (it.starts_with("  ") && !it.starts_with("   "));
        let lines = rest.lines().take(1).chain(rest.lines().skip(1).take_while(|it| !is_next(it)));
        let words: Vec<_> = lines.flat_map(str::split_whitespace).collect();
        Some(words.join(" "))
    }

    #[track_caller]
    fn has(&self, level: &str, subject: &str, texts: &[&str]) {
        let about = self.about(level, subject);
        let about = about.unwrap_or_else(|| panic!("{subject} is not {level} in\n{}", self.text));
        assert_contains(&about, texts);
    }

    #[track_caller]
    fn exits_with(&self, code: i32) {
        assert_eq!(self.code, Some(code), "{}", self.text);
    }
}

fn product() -> Command {
    Command::new(Build::Product.binary())
}

fn check(node: &TestNode) -> Report {
    Report::of(&mut product(), node)
}

/// A node with `web`, whose proxy is ready.
fn node_or_skip() -> Option<TestNode> {
    let mut node = TestNode::running_or_skip([1], &[web4([1])], &[])?;
    node.wait_until_ready();
    Some(node)
}

#[track_caller]
fn status(node: &TestNode, arguments: &[&str]) -> String {
    run(node.cli("status").args(arguments)).success()
}

#[test]
fn check_finds_nothing_broken_on_a_working_node() {
    let Some(mut node) = TestNode::or_skip() else { return };
    let before = check(&node);
    before.exits_with(0);
    before.has("ok", "metrics port", &["is free"]);
    node.write(&[web4([1])]);
    node.start(&[]);
    node.wait_until_ready();
    let report = check(&node);
    report.exits_with(0);
    // An older kernel is degraded.
    let degraded = u8::from(!kernel_at_least(5, 18));
    assert_contains(&report.text, &[&format!("0 broken, {degraded} degraded")]);
    report.has(if degraded == 0 { "ok" } else { "degraded" }, "kernel", &["Linux"]);
    for (subject, text) in [
        ("instance", "one is running"),
        ("state", "is active"),
        ("programs", "attached at all"),
        ("probe", "hooks work"),
        ("UDP termination", "are terminated"),
        ("TCP draining", "are terminated"),
        ("other programs", "no other programs"),
        ("health", "1 Service with 1 endpoint"),
        ("source", "file"),
    ] {
        report.has("ok", subject, &[text]);
    }
    // Of packets from outside only where they are to be forwarded.
    for text in [&report.text, &status(&node, &[])] {
        assert!(!text.contains("external forwarding") && !text.contains("\nforwarding "), "{text}");
    }
    if kernel_at_least(5, 12) {
        let report = Report::of(product().env("KUBE_PROXY_EBPF_EXTERNAL_FORWARDING", "dsr"), &node);
        let expect = ["the packet path is off: packets from outside are not served here"];
        report.has("broken", "external forwarding", &expect);
    }
    // `check` changes nothing.
    node.terminate();
    let mut command = product();
    command.args(["--log-format", "json"]).env("KUBE_PROXY_EBPF_OUTPUT", "json");
    let json = Report::of(&mut command, &node).text;
    assert!(json.starts_with("{\"broken\":0,"), "{json}");
    assert!(json.contains("\"level\":\"degraded\""), "no agent runs: {json}");
}

#[test]
fn check_reports_detached_programs_as_broken_and_a_missing_agent_as_degraded() {
    let Some(mut node) = node_or_skip() else { return };
    node.kill();
    let without_agent = check(&node);
    without_agent.exits_with(0);
    without_agent.has("degraded", "instance", &["none is running", "start `run`"]);
    without_agent.has("ok", "programs", &["attached at all"]);
    fs::remove_file(node.sandbox().pins().join("links/connect4")).unwrap();
    assert!(eventually(TIMEOUT, || request(Transport::Tcp, (WEB4, 80).into()).is_err()));
    let detached = check(&node);
    detached.exits_with(1);
    detached.has("broken", "programs", &["connect4", "attaches them again"]);
}

#[test]
fn foreign_programs_are_reported() {
    let Some(mut node) = node_or_skip() else { return };
    // The same programs pinned in another folder are foreign to the first instance.
    let pins = format!("{}_other", node.sandbox().pins().display());
    let mut other = product();
    other.args(["run", "--source", &node.source(), "--node-name", "n1", "--pin-dir", &pins, "--cgroup"]);
    other.arg(node.sandbox().cgroup()).args(["--healthz-bind-address=0", "--metrics-bind-address=0"]);
    other.args(["--probe-bind-address=0", "--status-socket=0"]).stderr(Stdio::null());
    let other = KilledOnDrop(other.spawn().unwrap());
    let checked = eventually(TIMEOUT, || check(&node).about("degraded", "other programs").is_some());
    let logged = node.agent_mut().wait_for_log(TIMEOUT, |log| {
        log.lines().any(|it| {
            it.contains("a foreign program is attached to our hooks") && it.contains("hooks=\"connect4")
        })
    });
    let report = check(&node);
    drop(other);
    run(product().args(["cleanup", "--pin-dir", &pins])).success();
    logged.unwrap();
    node.wait_until_logged(&["is no longer attached to our hooks"]);
    assert!(checked, "{}", report.text);
    report.has("degraded", "other programs", &["connect4 (id ", "another instance", "cleanup --pin-dir"]);
    report.has("ok", "programs", &["attached at all"]);
}

#[test]
fn rules_of_kube_proxy_are_reported_where_this_program_serves() {
    let Some(_nft) = program_or_skip("nft") else { return };
    let Some(node) = node_or_skip() else { return };
    check(&node).has("ok", "kube-proxy's rules", &["there are none"]);
    let nft = |line: &str| drop(run(Command::new("nft").arg(line)).success());
    nft("add table ip6 kube-proxy; add chain ip6 kube-proxy services");
    check(&node).has("degraded", "kube-proxy's rules", &["table kube-proxy", "cleanup --kube-proxy"]);
    nft("delete table ip6 kube-proxy; add table ip nat; add chain ip nat KUBE-SERVICES");
    check(&node).has("degraded", "kube-proxy's rules", &["chain KUBE-SERVICES", "stop it"]);
}

#[test]
fn after_the_switch_back_check_does_not_advise_to_stop_kube_proxy() {
    let Some(_nft) = program_or_skip("nft") else { return };
    let Some(mut node) = node_or_skip() else { return };
    let nft = |line: &str| drop(run(Command::new("nft").arg(line)).success());
    nft("add table ip nat; add chain ip nat KUBE-SERVICES");
    node.terminate();
    check(&node).has("degraded", "kube-proxy's rules", &["`cleanup` removes what this program has there"]);
    run(product().args(["cleanup", "--pin-dir"]).arg(node.sandbox().pins())).success();
    let _kube_proxy = ["0.0.0.0:10256", "127.0.0.1:10249"].map(|it| TcpListener::bind(it).unwrap());
    let report = check(&node);
    report.exits_with(0);
    report.has("ok", "kube-proxy's rules", &["chain KUBE-SERVICES", "it serves this node"]);
    report.has("ok", "health port", &["in use, as kube-proxy uses it"]);
    report.has("ok", "metrics port", &["in use, as kube-proxy uses it"]);
    assert!(!report.text.contains("stop"), "{}", report.text);
}

#[test]
fn check_reports_missing_privileges_and_file_systems_with_a_remedy() {
    let Some(node) = TestNode::or_skip() else { return };
    let binary = Build::Product.binary();
    let mut unprivileged = Command::new("setpriv");
    unprivileged.args(["--bounding-set", "-bpf,-sys_admin,-net_admin", "--inh-caps", "-all"]).arg(&binary);
    let report = Report::of(&mut unprivileged, &node);
    report.exits_with(1);
    report.has("broken", "capabilities", &["missing: CAP_BPF, CAP_NET_ADMIN", "as root"]);

    // In a mount namespace of its own.
    let mut without_bpffs = Command::new("unshare");
    without_bpffs.args(["--mount", "sh", "-c", "umount -a -t bpf; exec \"$@\"", "sh"]).arg(&binary);
    let report = Report::of(&mut without_bpffs, &node);
    let level = if node.sandbox().pins().starts_with("/sys/fs/bpf") { "degraded" } else { "broken" };
    report.has(level, "bpf file system", &["mount"]);

    let missing = node.sandbox().cgroup().join("missing");
    let report = Report::at(&mut product(), &missing, node.sandbox().pins());
    report.exits_with(1);
    report.has("broken", "cgroup", &["/missing does not exist", "mkdir", "--cgroup"]);

    let files = node.sandbox().files();
    let report = Report::at(&mut product(), files, files);
    report.exits_with(1);
    report.has("broken", "cgroup", &["not a cgroup2 folder", "--cgroup"]);
    report.has("broken", "bpf file system", &["not on a bpf file system", "--pin-dir"]);
}

#[test]
fn status_shows_kernel_state_with_and_without_an_agent() {
    let Some(mut node) = node_or_skip() else { return };
    let row = |text: &str| {
        let line = text.lines().find(|it| it.contains("10.96.0.10:80/TCP"));
        let line = line.unwrap_or_else(|| panic!("no row in\n{text}"));
        line.split_whitespace().map(ToOwned::to_owned).collect::<Vec<_>>()
    };
    let text = status(&node, &[]);
    assert_eq!(row(&text), ["default/web", "10.96.0.10:80/TCP", "1", "0", "0", "10.244.1.1:8080"]);
    assert_contains(&text, &["node n1: healthy", "revision 1 active", "1 Service, 1 endpoint"]);
    assert_contains(&text, &["generation 1 active", "attached at all"]);
    let json = status(&node, &["--output", "json"]);
    assert_contains(&json, &[r#""service":"default/web""#, r#""endpoints":["10.244.1.1:8080"]"#]);
    assert_contains(&json, &[r#""connect4":true"#, r#""generation":1"#]);
    // With another cgroup than that of `run`, and with its other flags, which fit.
    let other = node.sandbox().cgroup().parent().unwrap();
    let flags = ["--source=file:x", "--node-name=n1", "--packets=off", "--masquerade-all"];
    let text = run(node.cli("status").arg("--cgroup").arg(other).args(flags)).success();
    assert_contains(&text, &["none is attached to", "give the --cgroup that `run` was started with"]);
    assert!(run(node.cli("dump").args(flags)).success().contains("frontend 10.96.0.10:80/TCP"));
    // By flags instead of variables; other tests give them to `check`, `support-bundle` and `cleanup`.
    let cgroup = format!("--cgroup={}", node.sandbox().cgroup().display());
    let pins = format!("--pin-dir={}", node.sandbox().pins().display());
    for (arguments, text) in [
        (&["status", &cgroup, &pins][..], "attached at all"),
        (&["top", &cgroup, &pins, "--once"], "10.96.0.10:80/TCP"),
        (&["dump", &cgroup, &pins], "frontend 10.96.0.10:80/TCP"),
        (&["explain", &pins, "node", "10.96.0.10:80"], "eBPF, generation 1"),
    ] {
        let mut command = product();
        command.args(arguments).env(STATUS_SOCKET, status_socket(node.sandbox()));
        assert_contains(&run(&mut command).success(), &[text]);
    }
    node.kill();
    let text = status(&node, &[]);
    assert_eq!(row(&text), ["?", "10.96.0.10:80/TCP", "1", "0", "0", "10.244.1.1:8080"]);
    assert_contains(&text, &["none answers", "generation 1 active"]);
}

/// Runs a read-only subcommand without the capabilities that override file permissions: its exit code and output.
fn unprivileged(node: &TestNode, arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set", "-dac_override,-dac_read_search", "--inh-caps", "-all"]);
    command.arg(Build::Product.binary()).args(arguments);
    let Output { code, stdout, stderr } = run(command.env("KUBE_PROXY_EBPF_PIN_DIR", node.sandbox().pins()));
    (code, stdout + &stderr)
}

#[test]
fn unreadable_state_is_an_error_and_not_an_empty_state() {
    let Some(mut node) = node_or_skip() else { return };
    let cgroup = node.sandbox().cgroup().to_str().unwrap();
    let commands = [&["dump"][..], &["status", "--cgroup", cgroup]];
    for arguments in commands {
        assert_eq!(unprivileged(&node, arguments).0, Some(0), "{arguments:?}: still readable");
    }
    let pins = node.sandbox().pins().to_owned();
    let cgroup = cgroup.to_owned();
    node.kill();
    // Another user owns the folder now.
    chown(&pins, Some(65_534), Some(65_534)).unwrap();
    fs::set_permissions(&pins, fs::Permissions::from_mode(0o700)).unwrap();
    let below = pins.join("below");
    let commands =
        [&["dump"][..], &["status", "--cgroup", &cgroup], &["cleanup", "--pin-dir", below.to_str().unwrap()]];
    for arguments in commands {
        let (code, text) = unprivileged(&node, arguments);
        assert_eq!(code, Some(1), "{arguments:?}: {text}");
        let flat = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(flat.contains("Permission denied") && flat.contains("run as root"), "{arguments:?}: {text}");
        for wrong in ["no state is active", "nftables only", "nothing to remove: "] {
            assert!(!flat.contains(wrong), "{arguments:?} prints {wrong:?}: {text}");
        }
    }
}

#[test]
fn check_and_status_find_the_agent_by_its_socket() {
    let Some(mut node) = node_or_skip() else { return };
    check(&node).has("ok", "health", &["serves 1 Service ", "status.sock"]);
    assert_contains(&status(&node, &[]), &["node n1: healthy", "default/web"]);

    // Without it, our own agent is not reported as a process that occupies the port of the health pages.
    let other = node.sandbox().files().join("other.sock");
    let mut command = product();
    command.arg("check").arg("--status-socket").arg(&other).arg("--metrics-bind-address=127.0.0.3");
    command.arg("--cgroup").arg(node.sandbox().cgroup()).arg("--pin-dir").arg(node.sandbox().pins());
    let output = run(command.env("KUBE_PROXY_EBPF_PACKETS", "off"));
    let report = Report { code: output.code, text: output.stdout };
    report.has("ok", "metrics port", &["127.0.0.3:10249 is free"]);
    report.has("ok", "health", &["kube-proxy-ebpf answers", "--status-socket"]);
    assert!(!report.text.contains("in use"), "{}", report.text);
    let socket = other.display().to_string();
    assert_contains(
        &status(&node, &["--status-socket", &socket]),
        &["kube-proxy-ebpf answers at", "--status-socket"],
    );

    // Another user may not read it.
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--clear-groups"]).arg(Build::Product.binary());
    command.arg("check").arg("--status-socket").arg(status_socket(node.sandbox()));
    let output = run(command.args(["--metrics-bind-address=0", "--healthz-bind-address=0"]));
    let report = Report { code: output.code, text: output.stdout };
    report.has("degraded", "status socket", &["Permission denied", "run this command as root"]);

    // A process that is not ours occupies the port.
    node.terminate();
    let _other = TcpListener::bind("0.0.0.0:10256").unwrap();
    check(&node).has("degraded", "health port", &["in use", "stop the process that listens there"]);
    assert_contains(&status(&node, &[]), &["none answers"]);
}

#[test]
fn status_lists_rejected_items() {
    let Some(mut node) = node_or_skip() else { return };
    assert!(!status(&node, &[]).contains("REJECTED"));
    node.write_file("bad.yaml", &manifest::invalid_service("default", "bad"));
    node.wait_until(|node| {
        let text = status(node, &[]);
        let rejected = text.split_once("\nREJECTED\n").map(|(_, it)| it).unwrap_or_default();
        ["default/bad", "(source)", "10.96.0.300"].iter().all(|it| rejected.contains(it))
    });
    // Valid Services are still listed.
    assert_contains(&status(&node, &[]), &["10.96.0.10:80/TCP"]);
}

#[test]
fn an_unknown_node_name_is_reported() {
    const TEXT: &str = "no Node object has this name (found n2)";
    let Some(mut node) = node_or_skip() else { return };
    assert!(!status(&node, &[]).contains("REJECTED"), "manifests without Nodes are accepted");
    node.write_file("node.yaml", &manifest::node("n2"));
    node.wait_until(|node| status(node, &[]).contains(TEXT));
    assert!(node.log().contains(TEXT), "{}", node.log());
    let report = check(&node);
    report.has("degraded", "items", &["node n1", TEXT, "--node-name"]);
    report.has("ok", "health", &[]);
    node.write_file("node.yaml", &manifest::node("n1"));
    node.wait_until(|node| !status(node, &[]).contains("REJECTED"));
}

#[test]
fn status_watch_shows_changes() {
    let Some(node) = node_or_skip() else { return };
    let shown = node.sandbox().files().join("shown");
    let mut watch =
        node.cli("status").arg("--watch").stdout(fs::File::create(&shown).unwrap()).spawn().unwrap();
    let shows = |it: &str| fs::read_to_string(&shown).unwrap_or_default().contains(it);
    let before = eventually(TIMEOUT, || shows("10.244.1.1:8080"));
    node.write(&[web4([2])]);
    let after = eventually(TIMEOUT, || shows("10.244.1.2:8080") && shows("generation 2 active"));
    let is_running = watch.try_wait().unwrap().is_none();
    drop(KilledOnDrop(watch));
    assert!(before && after, "{}", fs::read_to_string(&shown).unwrap());
    assert!(is_running, "it watches until it is ended");
}

#[test]
fn check_does_not_hang_on_a_frozen_cgroup() {
    let Some(node) = node_or_skip() else { return };
    let frozen = node.sandbox().cgroup().join("frozen");
    fs::create_dir(&frozen).unwrap();
    fs::write(frozen.join("cgroup.freeze"), "1").unwrap();
    let output = run(node.cli("check").arg("--cgroup").arg(&frozen));
    // This fails while a child process of `check` is left in the cgroup.
    let removed = eventually(TIMEOUT, || fs::remove_dir(&frozen).is_ok());
    let report = Report { code: output.code, text: output.stdout };
    report.has("degraded", "probe", &["connect4 cannot be probed", "the cgroup may be frozen"]);
    assert!(removed, "a child process was left behind");
}
