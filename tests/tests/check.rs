//! `check` says what is the case: on a node that is served, and on nodes where something is wrong.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    fs,
    net::{Ipv4Addr, TcpListener},
    os::unix::fs::{PermissionsExt as _, chown},
    path::Path,
    process::{Command, Output},
    time::Duration,
};

use tests::{
    Agent, Build, EchoServer, TestNode, Transport, eventually,
    http::get,
    manifest::{self, Service},
    request,
    requirements::kernel_at_least,
    sandbox::skip,
};

const LIMIT: Duration = Duration::from_secs(20);
const WEB: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 10);

/// What `check` said, and its exit code.
struct Said {
    code: Option<i32>,
    text: String,
}

impl Said {
    fn of(mut command: Command, world: &TestNode) -> Self {
        command.arg("check").arg("--cgroup").arg(world.sandbox().cgroup());
        // As those proxies are started that are looked at.
        command.env("KUBE_PROXY_EBPF_PACKETS", "off");
        let Output { status, stdout, stderr } =
            command.arg("--pin-dir").arg(world.sandbox().pins()).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&stderr), "");
        Self { code: status.code(), text: String::from_utf8(stdout).unwrap() }
    }

    /// The finding about this subject, on one line with its remedy.
    fn about(&self, level: &str, subject: &str) -> Option<String> {
        let begin = self.text.find(&format!("  {level:<8}  {subject} "))?;
        let rest = &self.text[begin..];
        // It ends where the next one begins, or the group does.
        let is_next = |it: &str| it.is_empty() || (it.starts_with("  ") && !it.starts_with("   "));
        let lines = rest.lines().take(1).chain(rest.lines().skip(1).take_while(|it| !is_next(it)));
        let words: Vec<_> = lines.flat_map(str::split_whitespace).collect();
        Some(words.join(" "))
    }

    #[track_caller]
    fn has(&self, level: &str, subject: &str, says: &[&str]) {
        let about = self.about(level, subject);
        let about = about.unwrap_or_else(|| panic!("{subject} is not {level} in\n{}", self.text));
        for it in says {
            assert!(about.contains(it), "{it} is not in {about}");
        }
    }
}

fn check(world: &TestNode) -> Said {
    Said::of(Command::new(Build::Product.binary()), world)
}

fn serve(world: &TestNode) -> Agent {
    let web = Service::new("web", &[WEB.into()]).port("", "TCP", 80, 8080);
    world.write(&[web.endpoint("web-1", &[[10, 244, 1, 1].into()])]);
    let mut agent = world.command(Build::Product).start(world.sandbox()).unwrap();
    let is_ready = || get((Ipv4Addr::LOCALHOST, 10256).into(), "/readyz").is_ok_and(|it| it.status == 200);
    agent.wait_until(LIMIT, is_ready).unwrap();
    agent
}

#[test]
fn a_node_that_is_served_has_nothing_broken() {
    let Some(world) = TestNode::or_skip("a_node_that_is_served_has_nothing_broken") else { return };
    let before = check(&world);
    assert_eq!(before.code, Some(0), "{}", before.text);
    before.has("ok", "metrics port", &["is free"]);
    let agent = serve(&world);
    let said = check(&world);
    assert_eq!(said.code, Some(0), "{}", said.text);
    // An older kernel is named as what it is.
    let degraded = u8::from(!kernel_at_least(5, 18));
    assert!(said.text.contains(&format!("0 broken, {degraded} degraded")), "{}", said.text);
    said.has(if degraded == 0 { "ok" } else { "degraded" }, "kernel", &["Linux"]);
    said.has("ok", "instance", &["one is running"]);
    said.has("ok", "state", &["is active"]);
    said.has("ok", "programs", &["attached at all"]);
    said.has("ok", "probe", &["hooks work"]);
    said.has("ok", "UDP termination", &["are terminated"]);
    said.has("ok", "other programs", &["no other programs"]);
    said.has("ok", "health", &["1 Services with 1 endpoints"]);
    said.has("ok", "source", &["file"]);
    // To look is to change nothing.
    assert!(agent.terminate().unwrap().success());
    let mut command = Command::new(Build::Product.binary());
    command.args(["--log-format", "json"]);
    command.env("KUBE_PROXY_EBPF_OUTPUT", "json");
    let json = Said::of(command, &world);
    assert!(json.text.starts_with("{\"broken\":0,"), "{}", json.text);
    assert!(json.text.contains("\"level\":\"degraded\""), "nobody runs any more: {}", json.text);
}

#[test]
fn programs_that_are_off_are_broken_and_an_agent_that_is_away_degraded() {
    let Some(world) =
        TestNode::or_skip("programs_that_are_off_are_broken_and_an_agent_that_is_away_degraded")
    else {
        return;
    };
    let _server = EchoServer::start("web-1", ([10, 244, 1, 1], 8080).into()).unwrap();
    let agent = serve(&world);
    agent.kill9().unwrap();
    let away = check(&world);
    assert_eq!(away.code, Some(0), "{}", away.text);
    away.has("degraded", "instance", &["none is running", "start `run`"]);
    away.has("ok", "programs", &["attached at all"]);
    fs::remove_file(world.sandbox().pins().join("links/connect4")).unwrap();
    assert!(eventually(LIMIT, || request(Transport::Tcp, (WEB, 80).into()).is_err()));
    let off = check(&world);
    assert_eq!(off.code, Some(1), "{}", off.text);
    off.has("broken", "programs", &["connect4", "attaches them again"]);
}

#[test]
fn programs_of_others_are_named() {
    let Some(world) = TestNode::or_skip("programs_of_others_are_named") else { return };
    let mut agent = serve(&world);
    // The same programs, from another folder: to this one they are somebody else's.
    let pins = format!("{}_other", world.sandbox().pins().display());
    let source = format!("file:{}", world.manifests().display());
    let mut other = Command::new(Build::Product.binary());
    other.args(["run", "--source", &source, "--node-name", "n1", "--pin-dir", &pins, "--cgroup"]);
    other.arg(world.sandbox().cgroup()).args(["--healthz-bind-address=0", "--metrics-bind-address=0"]);
    let mut other = other.stderr(std::process::Stdio::null()).spawn().unwrap();
    let names_them = || check(&world).about("degraded", "other programs").is_some();
    let named = eventually(LIMIT, names_them);
    let log = agent.log_path().to_owned();
    let log = || fs::read_to_string(&log).unwrap_or_default();
    let told = agent.wait_until(LIMIT, || {
        log()
            .lines()
            .any(|it| it.contains("a foreign program is attached to our hooks") && it.contains("at connect4"))
    });
    let said = check(&world);
    let _ = other.kill();
    other.wait().unwrap();
    let cleanup =
        Command::new(Build::Product.binary()).args(["cleanup", "--pin-dir", &pins]).output().unwrap();
    assert!(cleanup.status.success());
    told.unwrap();
    agent.wait_until(LIMIT, || log().contains("is no longer attached to our hooks")).unwrap();
    assert!(named, "{}", said.text);
    said.has("degraded", "other programs", &["connect4 (id ", "another instance", "cleanup --pin-dir"]);
    said.has("ok", "programs", &["attached at all"]);
}

#[test]
fn rules_of_kube_proxy_are_named() {
    const NAME: &str = "rules_of_kube_proxy_are_named";
    let Some(world) = TestNode::or_skip(NAME) else { return };
    if Command::new("nft").arg("--version").output().is_err() {
        skip(NAME, "there is no nft: install nftables");
        return;
    }
    check(&world).has("ok", "kube-proxy's rules", &["there are none"]);
    let nft = |line: &str| {
        let output = Command::new("nft").arg(line).output().unwrap();
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    };
    nft("add table ip6 kube-proxy; add chain ip6 kube-proxy services");
    check(&world).has("degraded", "kube-proxy's rules", &["table kube-proxy", "kube-proxy --cleanup"]);
    nft("delete table ip6 kube-proxy; add table ip nat; add chain ip nat KUBE-SERVICES");
    check(&world).has("degraded", "kube-proxy's rules", &["chain KUBE-SERVICES"]);
}

#[test]
fn missing_privileges_and_file_systems_are_named_with_their_remedy() {
    let Some(world) = TestNode::or_skip("missing_privileges_and_file_systems_are_named_with_their_remedy")
    else {
        return;
    };
    let binary = Build::Product.binary();
    let mut without = Command::new("setpriv");
    without.args(["--bounding-set", "-bpf,-sys_admin,-net_admin", "--inh-caps", "-all"]).arg(&binary);
    let said = Said::of(without, &world);
    assert_eq!(said.code, Some(1), "{}", said.text);
    said.has("broken", "capabilities", &["missing: CAP_BPF, CAP_NET_ADMIN", "as root"]);

    // In a mount namespace of its own.
    let mut without = Command::new("unshare");
    without.args(["--mount", "sh", "-c", "umount -a -t bpf; exec \"$@\"", "sh"]).arg(&binary);
    let said = Said::of(without, &world);
    let level = if world.sandbox().pins().starts_with("/sys/fs/bpf") { "degraded" } else { "broken" };
    said.has(level, "bpf file system", &["mount"]);

    let check = |cgroup: &Path, pins: &Path| {
        let mut command = Command::new(&binary);
        let output = command.arg("check").arg("--cgroup").arg(cgroup).arg("--pin-dir").arg(pins).output();
        let output = output.unwrap();
        Said { code: output.status.code(), text: String::from_utf8(output.stdout).unwrap() }
    };
    let said = check(&world.sandbox().cgroup().join("missing"), world.sandbox().pins());
    assert_eq!(said.code, Some(1), "{}", said.text);
    said.has("broken", "cgroup", &["/missing does not exist", "mkdir", "--cgroup"]);

    let files = world.sandbox().files();
    let said = check(files, files);
    assert_eq!(said.code, Some(1), "{}", said.text);
    said.has("broken", "cgroup", &["not a cgroup2 folder", "--cgroup"]);
    said.has("broken", "bpf file system", &["not on a bpf file system", "--pin-dir"]);
}

/// What `status` prints.
fn status(world: &TestNode, more: &[&str]) -> String {
    let mut command = Command::new(Build::Product.binary());
    command.arg("status").arg("--cgroup").arg(world.sandbox().cgroup()).arg("--pin-dir");
    let output = command.arg(world.sandbox().pins()).args(more).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn status_shows_what_is_in_the_kernel_with_and_without_a_process() {
    let Some(world) = TestNode::or_skip("status_shows_what_is_in_the_kernel_with_and_without_a_process")
    else {
        return;
    };
    let agent = serve(&world);
    let row = |text: &str| {
        let line = text.lines().find(|it| it.contains("10.96.0.10:80/TCP"));
        let line = line.unwrap_or_else(|| panic!("no row in\n{text}"));
        line.split_whitespace().map(ToOwned::to_owned).collect::<Vec<_>>()
    };
    let says = status(&world, &[]);
    assert_eq!(row(&says), ["default/web", "10.96.0.10:80/TCP", "1", "0", "0", "10.244.1.1:8080"]);
    for it in [
        "node n1: healthy",
        "revision 1 active",
        "1 Services, 1 endpoints",
        "generation 1 active",
        "attached at all",
    ] {
        assert!(says.contains(it), "{it} is not in\n{says}");
    }
    let json = status(&world, &["--output", "json"]);
    for it in [
        "\"service\":\"default/web\"",
        "\"endpoints\":[\"10.244.1.1:8080\"]",
        "\"connect4\":true",
        "\"generation\":1",
    ] {
        assert!(json.contains(it), "{it} is not in\n{json}");
    }
    agent.kill9().unwrap();
    let says = status(&world, &[]);
    assert_eq!(row(&says), ["?", "10.96.0.10:80/TCP", "1", "0", "0", "10.244.1.1:8080"]);
    assert!(says.contains("none answers") && says.contains("generation 1 active"), "{says}");
}

/// Runs a command of the product's that only looks, without the privilege to look into everybody's folders.
fn unprivileged(world: &TestNode, arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set", "-dac_override,-dac_read_search", "--inh-caps", "-all"]);
    command.arg(Build::Product.binary()).args(arguments);
    command.env("KUBE_PROXY_EBPF_PIN_DIR", world.sandbox().pins());
    let Output { status, stdout, stderr } = command.output().unwrap();
    (status.code(), [stdout, stderr].map(|it| String::from_utf8(it).unwrap()).concat())
}

#[test]
fn what_cannot_be_read_is_not_taken_for_nothing() {
    let Some(world) = TestNode::or_skip("what_cannot_be_read_is_not_taken_for_nothing") else { return };
    let agent = serve(&world);
    let cgroup = world.sandbox().cgroup().to_str().unwrap();
    let commands = [&["dump"][..], &["status", "--cgroup", cgroup]];
    for arguments in commands {
        assert_eq!(unprivileged(&world, arguments).0, Some(0), "{arguments:?}: it may look there as yet");
    }
    agent.kill9().unwrap();
    // The folder is somebody else's.
    let pins = world.sandbox().pins();
    chown(pins, Some(65_534), Some(65_534)).unwrap();
    fs::set_permissions(pins, fs::Permissions::from_mode(0o700)).unwrap();
    let below = pins.join("below");
    let below = ["cleanup", "--pin-dir", below.to_str().unwrap()];
    for arguments in commands.into_iter().chain([&below[..]]) {
        let (code, says) = unprivileged(&world, arguments);
        assert_eq!(code, Some(1), "{arguments:?}: {says}");
        let flat = says.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(flat.contains("Permission denied") && flat.contains("run as root"), "{arguments:?}: {says}");
        for wrong in ["no state is active", "nftables only", "nothing to remove: "] {
            assert!(!flat.contains(wrong), "{arguments:?} says {wrong:?}: {says}");
        }
    }
}

#[test]
fn check_and_status_find_a_proxy_by_the_file_that_it_was_started_with() {
    const NAME: &str = "check_and_status_find_a_proxy_by_the_file_that_it_was_started_with";
    let Some(world) = TestNode::or_skip(NAME) else { return };
    let file = world.sandbox().files().join("config.conf");
    let text = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n\
                metricsBindAddress: 127.0.0.2:10249\n";
    fs::write(&file, text).unwrap();
    let web = Service::new("web", &[WEB.into()]).port("", "TCP", 80, 8080);
    world.write(&[web.endpoint("web-1", &[[10, 244, 1, 1].into()])]);
    let setting = world.command(Build::Product).env("KUBE_PROXY_EBPF_CONFIG", &file);
    let mut agent = setting.start(world.sandbox()).unwrap();
    let is_ready = || get((Ipv4Addr::LOCALHOST, 10256).into(), "/readyz").is_ok_and(|it| it.status == 200);
    agent.wait_until(LIMIT, is_ready).unwrap();

    // By the file it is found, in the environment as in the arguments.
    let mut command = Command::new(Build::Product.binary());
    command.env("KUBE_PROXY_EBPF_CONFIG", &file);
    Said::of(command, &world).has("ok", "health", &["serves 1 Services", "127.0.0.2:10249"]);
    let says = status(&world, &["--config", &file.display().to_string()]);
    assert!(says.contains("node n1: healthy") && says.contains("default/web"), "{says}");

    // Without it, one that runs is not taken for somebody who is in the way.
    let said = check(&world);
    said.has("ok", "metrics port", &["127.0.0.1:10249 is free"]);
    said.has("ok", "health", &["kube-proxy-ebpf answers", "--config"]);
    assert!(!said.text.contains("in use"), "{}", said.text);
    let says = status(&world, &[]);
    assert!(says.contains("kube-proxy-ebpf answers at") && says.contains("--config"), "{says}");

    // Whoever is one is.
    assert!(agent.terminate().unwrap().success());
    let _other = TcpListener::bind("0.0.0.0:10256").unwrap();
    check(&world).has("degraded", "health port", &["in use", "stop the process that listens there"]);
    assert!(status(&world, &[]).contains("none answers"));
}

#[test]
fn status_names_what_is_refused() {
    let Some(world) = TestNode::or_skip("status_names_what_is_refused") else { return };
    let mut agent = serve(&world);
    assert!(!status(&world, &[]).contains("REJECTED"));
    let bad = "apiVersion: v1\nkind: Service\nmetadata: {name: bad, namespace: default}\n\
               spec: {clusterIP: 10.96.0.300, ports: [{port: 80}]}\n";
    manifest::write_atomically(&world.manifests().join("bad.yaml"), bad).unwrap();
    let refused = || {
        let says = status(&world, &[]);
        let refused = says.split_once("\nREJECTED\n").map(|(_, it)| it.to_owned()).unwrap_or_default();
        refused.contains("default/bad") && refused.contains("(source)") && refused.contains("10.96.0.300")
    };
    agent.wait_until(LIMIT, refused).unwrap();
    // What is good beside it is still shown.
    assert!(status(&world, &[]).contains("10.96.0.10:80/TCP"));
}

#[test]
fn a_node_that_the_cluster_does_not_know_is_told_of() {
    let Some(world) = TestNode::or_skip("a_node_that_the_cluster_does_not_know_is_told_of") else { return };
    let mut agent = serve(&world);
    const SAYS: &str = "no Node object has this name (found n2)";
    assert!(!status(&world, &[]).contains("REJECTED"), "manifests may do without nodes");
    let node = |name| {
        manifest::write_atomically(&world.manifests().join("node.yaml"), &manifest::node(name)).unwrap()
    };
    node("n2");
    agent.wait_until(LIMIT, || status(&world, &[]).contains(SAYS)).unwrap();
    assert!(agent.log().contains(SAYS), "{}", agent.log());
    let said = check(&world);
    said.has("degraded", "items", &["node n1", SAYS, "--node-name"]);
    said.has("ok", "health", &[]);
    node("n1");
    agent.wait_until(LIMIT, || !status(&world, &[]).contains("REJECTED")).unwrap();
}

#[test]
fn status_that_watches_shows_what_changes() {
    let Some(world) = TestNode::or_skip("status_that_watches_shows_what_changes") else { return };
    let mut agent = serve(&world);
    let shown = world.sandbox().files().join("shown");
    let mut watching = Command::new(Build::Product.binary())
        .args(["status", "--watch", "--cgroup"])
        .arg(world.sandbox().cgroup())
        .arg("--pin-dir")
        .arg(world.sandbox().pins())
        .stdout(fs::File::create(&shown).unwrap())
        .spawn()
        .unwrap();
    let shows = |it: &str| fs::read_to_string(&shown).unwrap_or_default().contains(it);
    let before = agent.wait_until(LIMIT, || shows("10.244.1.1:8080"));
    let web = Service::new("web", &[WEB.into()]).port("", "TCP", 80, 8080);
    world.write(&[web.endpoint("web-2", &[[10, 244, 1, 2].into()])]);
    let after = agent.wait_until(LIMIT, || shows("10.244.1.2:8080") && shows("generation 2 in force"));
    let is_watching = watching.try_wait().unwrap().is_none();
    let _ = watching.kill();
    watching.wait().unwrap();
    before.unwrap();
    after.unwrap();
    assert!(is_watching, "it goes on until it is ended");
}

#[test]
fn a_cgroup_that_is_frozen_does_not_hold_check_up() {
    let Some(world) = TestNode::or_skip("a_cgroup_that_is_frozen_does_not_hold_check_up") else { return };
    let _agent = serve(&world);
    let frozen = world.sandbox().cgroup().join("frozen");
    fs::create_dir(&frozen).unwrap();
    fs::write(frozen.join("cgroup.freeze"), "1").unwrap();
    let check = Command::new(Build::Product.binary())
        .args(["check", "--cgroup"])
        .arg(&frozen)
        .arg("--pin-dir")
        .arg(world.sandbox().pins())
        .output()
        .unwrap();
    // Whoever was put there is gone, or this fails.
    let removed = eventually(LIMIT, || fs::remove_dir(&frozen).is_ok());
    let said = Said { code: check.status.code(), text: String::from_utf8(check.stdout).unwrap() };
    said.has("degraded", "probe", &["connect4 cannot be probed", "the cgroup may be frozen"]);
    assert!(removed, "a child was left behind");
}
