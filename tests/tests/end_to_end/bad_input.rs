//! Errors are reported with a remedy; what works keeps working, and nothing is left half-done.

use std::{
    fs,
    net::TcpStream,
    os::unix::{
        fs::{PermissionsExt as _, symlink},
        process::CommandExt as _,
    },
    path::Path,
    process::{self, Command, Stdio},
    thread,
    time::Duration,
};

use aya::{
    maps::{Array, Map, MapData},
    programs::{CgroupAttachMode, CgroupSockAddr, CgroupSockAddrAttachType},
};
use build_tools::command::KilledOnDrop;
use tests::{
    AgentCommand, Build, FRONTEND, ObjectTracker, Output, Service, TARGET_PORT, TIMEOUT, TestNode, Transport,
    WEB4, assert_contains, endpoint, eventually,
    http::{health, metrics},
    move_to, request, run, web4,
};

/// A node with `web`; no proxy runs yet.
fn node_or_skip() -> Option<TestNode> {
    TestNode::prepared_or_skip([1], &[web4([1])])
}

fn product(arguments: &[&str]) -> Output {
    run(Command::new(Build::Product.binary()).args(arguments))
}

#[track_caller]
fn assert_fails(arguments: &[&str], code: i32, texts: &[&str]) {
    let Output { code: found, stderr, stdout } = product(arguments);
    assert_eq!(found, Some(code), "{arguments:?}: {stderr}");
    assert_contains(&stderr, texts);
    assert!(stdout.is_empty(), "{stdout}");
    assert!(!stderr.contains("panicked"), "{stderr}");
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Whether a connect fails for lack of a route, because nothing is translated.
#[track_caller]
fn assert_not_translated() {
    assert_eq!(TcpStream::connect(FRONTEND).unwrap_err().raw_os_error(), Some(nix::libc::ENETUNREACH));
}

#[test]
fn wrong_usage_exits_64() {
    let cases: [(&[&str], &[&str]); 15] = [
        (&[], &["Usage"]),
        (&["frobnicate"], &["frobnicate"]),
        (&["run"], &["--source"]),
        (&["run", "--source", "manifests"], &["manifests", "file:PATH"]),
        (&["run", "--source", "file:"], &["needs a path"]),
        (&["run", "--source", "file:x", "--node-name", "No Node"], &["No Node", "lower-case"]),
        (&["run", "--source", "file:x", "--pin-dir", "pins"], &["pins", "absolute"]),
        (&["print", "--source", "file:x", "--output", "xml"], &["xml", "json"]),
        (&["print", "--source", "file:x", "--feature-gates", "Magic=maybe"], &["maybe", "true nor false"]),
        (&["print", "--source", "file:x", "--hostname-override", "No Node"], &["No Node", "lower-case"]),
        (&["brain", "--source", "file:x", "--tls-cert", "x.crt"], &["--tls-key", "--tls-client-ca"]),
        (&["agent", "--tls-cert", "x.crt", "--tls-key", "x.key"], &["--tls-ca"]),
        (&["print", "--source", "file:x", "--service-proxy-name", "a/b"], &["a/b", "letter or digit"]),
        (&["run", "--source", "file:x", "--ipvs-scheduler", "rr"], &["--ipvs-scheduler", "IPVS is not used"]),
        (
            &[
                "agent",
                "--node-name=n1",
                "--target=tcp://127.0.0.1:1",
                "--cluster-cidr=10.0.0.0/16,10.1.0.0/16",
            ],
            &["--cluster-cidr", "10.0.0.0/16 and 10.1.0.0/16", "one per family"],
        ),
    ];
    for (arguments, texts) in cases {
        assert_fails(arguments, 64, texts);
    }
}

#[test]
fn help_and_version_exit_0() {
    for arguments in [&["--help"][..], &["--version"], &["run", "--help"], &["dump", "--help"]] {
        assert!(!product(arguments).success().is_empty());
    }
}

#[test]
fn a_failed_start_is_explained_and_leaves_nothing_behind() {
    let Some(node) = node_or_skip() else { return };
    let mut objects = ObjectTracker::new(node.sandbox());
    let source = node.source();
    let (pins, cgroup) = (text(node.sandbox().pins()), text(node.sandbox().cgroup()));
    let files = text(node.sandbox().files());
    let with_dot = format!("{pins}/a.b");
    let cases: [(&str, &str, &str, &[&str]); 5] = [
        (&source, files, pins, &[files, "not a cgroup2", "--cgroup"]),
        (&source, "/no/such/cgroup", pins, &["/no/such/cgroup does not exist", "mkdir"]),
        (&source, cgroup, files, &[files, "bpf file system", "--pin-dir"]),
        (&source, cgroup, &with_dot, &["a.b", "dot"]),
        ("file:/no/such/manifests", cgroup, pins, &["/no/such/manifests"]),
    ];
    for (source, cgroup, pins, texts) in cases {
        let run = ["run", "--source", source, "--node-name", "n1", "--cgroup", cgroup, "--pin-dir", pins];
        assert_fails(&run, 1, texts);
    }
    assert_fails(&["dump", "--pin-dir", pins], 1, &[pins, "no state is active"]);
    let is_clean = eventually(TIMEOUT, || objects.observe().is_empty());
    assert!(is_clean, "left behind: {:?}", objects.observe());
    assert_not_translated();
}

#[test]
fn a_missing_capability_is_reported() {
    let Some(node) = node_or_skip() else { return };
    let binary = node.sandbox().files().join("kube-proxy-ebpf");
    fs::copy(Build::Product.binary(), &binary).unwrap();
    fs::set_permissions(node.sandbox().files(), fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = Command::new(&binary);
    command.args(["run", "--source", &node.source(), "--node-name", "n1", "--cgroup"]);
    command.arg(node.sandbox().cgroup()).arg("--pin-dir").arg(node.sandbox().pins());
    assert_contains(&run(command.uid(65534).gid(65534)).exits_with(1), &["CAP_BPF", "root"]);
}

#[test]
fn a_second_instance_is_refused_and_the_first_keeps_running() {
    let Some(mut node) = node_or_skip() else { return };
    node.start(&[]);
    let mut second = node.command(Build::Product).start(node.sandbox()).unwrap();
    assert_eq!(second.wait(TIMEOUT).unwrap().code(), Some(1));
    assert!(second.log().contains("another instance is running"), "{}", second.log());
    let pins = text(node.sandbox().pins());
    assert_fails(&["cleanup", "--pin-dir", pins], 1, &["another instance", "stop it first"]);
    assert_eq!(request(Transport::Tcp, FRONTEND).unwrap(), "web-1");
}

#[test]
fn pins_of_an_unknown_layout_are_refused_and_not_modified() {
    let Some(mut node) = node_or_skip() else { return };
    let layout = node.sandbox().pins().join(Build::Product.layout());
    fs::create_dir(&layout).unwrap();
    // An array as the one of the active side, but with values of 32 bytes: a lookup would overwrite our memory.
    let mut foreign = Array::<_, [u8; 32]>::create(1, 0).unwrap();
    foreign.set(0, [7; 32], 0).unwrap();
    foreign.pin(layout.join("active")).unwrap();
    node.start_inactive(&node.command(Build::Product));
    assert_eq!(node.agent_mut().wait(TIMEOUT).unwrap().code(), Some(1));
    let active = format!("{}/active", Build::Product.layout());
    assert_contains(&node.log(), &[&active, "32 bytes", "4 bytes", "cleanup"]);
    let found = MapData::from_pin(layout.join("active")).unwrap();
    let found: Array<_, [u8; 32]> = Map::from_map_data(found).unwrap().try_into().unwrap();
    assert_eq!(found.get(&0, 0).unwrap(), [7; 32]);
    assert_not_translated();
}

#[test]
fn a_broken_manifest_keeps_the_last_good_state() {
    let Some(mut node) = node_or_skip() else { return };
    node.start(&[]);
    let file = node.manifests().join("all.yaml");
    let good = fs::read_to_string(&file).unwrap();
    for broken in ["kind: Service\n  metadata: [", "\0\u{1}\u{2} garbage", &good[..good.len() / 2]] {
        // Written in place, not atomically.
        fs::write(&file, broken).unwrap();
        node.wait_until_logged(&["all.yaml", "WARN"]);
        assert_eq!(request(Transport::Tcp, FRONTEND).unwrap(), "web-1");
    }
    // The next valid manifest is applied.
    let late = Service::new("late", &[[10, 96, 0, 11].into()]).port("", "TCP", 80, 8080);
    node.apply(&[web4([1]), late]);
}

#[test]
fn an_attach_failure_detaches_redirecting_hooks_and_is_retried() {
    let Some(mut node) = node_or_skip() else { return };
    // A program without Services, which redirects nothing.
    node.write(&[]);
    node.start(&[]);
    let mut idle =
        CgroupSockAddr::from_pin(node.program("connect6"), CgroupSockAddrAttachType::Connect6).unwrap();
    node.terminate();
    run(&mut node.cli("cleanup")).success();
    // As many as the kernel allows at one cgroup (BPF_CGROUP_MAX_PROGS).
    let cgroup = fs::File::open(node.sandbox().cgroup()).unwrap();
    let mut attach = || {
        let link = idle.attach(&cgroup, CgroupAttachMode::Single).unwrap();
        idle.take_link(link).unwrap()
    };
    let full: Vec<_> = (0..64).map(|_| attach()).collect();
    node.write(&[web4([1])]);
    node.start_inactive(&node.command(Build::Product));
    node.agent_mut()
        .wait_for_log(TIMEOUT, |log| log.matches("attach of program connect6 failed").count() > 3)
        .unwrap();
    let links = node.sandbox().pins().join("links");
    // No program redirects between two attempts, whose interval grows.
    let redirects = || ["connect4", "sendmsg4", "sendmsg6"].iter().any(|it| links.join(it).exists());
    assert!(eventually(TIMEOUT, || !redirects()), "{}", node.log());
    TcpStream::connect(FRONTEND).unwrap_err();
    assert!(links.join("sock_release").exists(), "sockets that were translated meanwhile are still released");
    drop(full);
    node.wait_until(|_| request(Transport::Tcp, FRONTEND).is_ok());
}

#[test]
fn cleanup_does_not_touch_foreign_objects() {
    let Some(node) = node_or_skip() else { return };
    let files = node.sandbox().files().join("precious");
    let layout = files.join(Build::Product.layout());
    fs::create_dir_all(&layout).unwrap();
    fs::write(layout.join("active"), "data").unwrap();
    assert_fails(&["cleanup", "--pin-dir", text(&files)], 1, &[text(&files), "bpf file system"]);
    assert_eq!(fs::read_to_string(layout.join("active")).unwrap(), "data");

    let foreign = node.sandbox().pins().join("foreign");
    Array::<_, u32>::create(1, 0).unwrap().pin(&foreign).unwrap();
    let stderr = run(&mut node.cli("cleanup")).exits_with(0);
    assert_contains(&stderr, &[text(&foreign), "kept: it does not belong"]);
    assert!(foreign.exists());
}

#[test]
fn another_cgroup_is_refused_while_the_first_exists() {
    let Some(mut node) = node_or_skip() else { return };
    node.start(&[]);
    node.kill();
    let (source, root) = (node.source(), text(node.sandbox().root_cgroup()));
    let pins = text(node.sandbox().pins());
    let run = ["run", "--source", &source, "--node-name", "n1", "--cgroup", root, "--pin-dir", pins];
    assert_fails(&run, 1, &["links/", "another cgroup", "--cgroup", "cleanup"]);
    assert_eq!(request(Transport::Tcp, FRONTEND).unwrap(), "web-1");
}

#[test]
fn a_recreated_cgroup_is_served_again() {
    let Some(node) = node_or_skip() else { return };
    let slice = node.sandbox().cgroup().join("slice");
    fs::create_dir(&slice).unwrap();
    let mut command = node.cli("run");
    command.args(["--source", &node.source(), "--node-name", "n1", "--cgroup", text(&slice)]);
    let agent = KilledOnDrop(command.stderr(Stdio::null()).spawn().unwrap());
    let is_served = || {
        move_to(&slice, process::id()).unwrap();
        let reply = request(Transport::Tcp, FRONTEND);
        node.sandbox().add_process(process::id()).unwrap();
        reply.is_ok()
    };
    assert!(eventually(TIMEOUT, is_served));
    // The agent's probe may run in it briefly.
    assert!(eventually(TIMEOUT, || fs::remove_dir(&slice).is_ok()));
    fs::create_dir(&slice).unwrap();
    let again = eventually(TIMEOUT, is_served);
    drop(agent);
    let _ = fs::remove_dir(&slice);
    assert!(again, "the new cgroup is not served");
}

#[test]
fn cleanup_removes_everything_from_the_node() {
    let Some(mut node) = node_or_skip() else { return };
    let mut objects = ObjectTracker::new(node.sandbox());
    node.start(&[]);
    assert!(!objects.observe().is_empty());
    node.terminate();
    // The kernel serves without the agent.
    assert_eq!(request(Transport::Tcp, FRONTEND).unwrap(), "web-1");
    assert!(!objects.observe().is_empty());
    run(&mut node.cli("cleanup")).success();
    assert!(!node.sandbox().pins().exists());
    assert_not_translated();
    let is_clean = eventually(TIMEOUT, || objects.observe().is_empty() && objects.leaked().is_empty());
    assert!(is_clean, "{:?} now; leaked: {:?}", objects.observe(), objects.leaked());
    // Again: nothing to do, and no error.
    run(&mut node.cli("cleanup")).success();
}

/// What NAME stands for in a file of objects: a screen is cleared, a line is forged, a direction is reversed.
const ACTIVE_NAME: &str = "web\\u001b[2J\\u009b31m\\nERROR forged\\u202e\\u0007";

#[test]
fn nothing_that_a_tenant_names_acts_on_a_terminal() {
    let Some(mut node) = node_or_skip() else { return };
    node.start(&[]);
    let objects = include_str!("bad_input/active.json.txt").replace("NAME", ACTIVE_NAME);
    node.write_file("bad.json", &objects);
    node.wait_until_logged(&["Service default/bad", "EndpointSlice default/bad"]);
    // A file that does not parse is quoted as well.
    node.write_file(
        "broken.json",
        &format!(r#"{{"apiVersion":"{ACTIVE_NAME}","kind":"Service","spec":"{ACTIVE_NAME}"}}"#),
    );
    // Many rejections were logged: of those that follow, the log has the first ones after a while.
    let mut files = 0;
    let is_logged = || {
        files += 1;
        node.write_file(
            &format!("unknown-{files}.json"),
            &format!(r#"{{"apiVersion":"v1","kind":"{ACTIVE_NAME}"}}"#),
        );
        node.write_file(&format!("typed-{files}.json"), &format!(r#"{{"apiVersion":"v1","kind":"Service","metadata":{{"name":"{ACTIVE_NAME}"}},"spec":"{ACTIVE_NAME}"}}"#));
        thread::sleep(Duration::from_millis(500));
        let log = node.log();
        log.contains("unknown-") && log.contains("typed-")
    };
    assert!(eventually(TIMEOUT, is_logged), "{}", node.log());

    let mut outputs = vec![("the log".to_owned(), node.log())];
    let source = node.source();
    for arguments in [
        &["status"][..],
        &["status", "--output", "json"],
        &["check"],
        &["check", "--output", "json"],
        &["dump"],
        &["print", "--once", "--source", &source, "--node-name", "n1"],
        &["print", "--once", "--source", &source, "--node-name", "n1", "--output", "yaml"],
    ] {
        let Output { stdout, stderr, .. } = run(node.cli(arguments[0]).args(&arguments[1..]));
        outputs.push((arguments.join(" "), stdout + &stderr));
    }
    for page in ["/metrics", "/state", "/status"] {
        outputs.push((page.to_owned(), metrics(page).unwrap().body));
    }
    outputs.push(("/readyz".to_owned(), health("/readyz").unwrap().body));
    for (name, text) in &outputs {
        let is_active = |it: char| it != '\n' && (it.is_control() || it == '\u{202e}');
        assert!(!text.contains(is_active), "{name}: {text:?}");
        assert!(!text.lines().any(|it| it.starts_with("ERROR forged")), "{name}: {text}");
    }
    assert!(outputs[1].1.contains("default/bad"), "{}", outputs[1].1);
}

#[test]
fn a_changed_configuration_file_ends_the_proxy_and_an_invalid_one_does_not() {
    let Some(mut node) = node_or_skip() else { return };
    // As a volume of a ConfigMap: the file is behind a link to a folder, which is replaced by another one.
    let volume = node.sandbox().files().join("config");
    let write = |version: &str, text: &str| {
        let folder = volume.join(version);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("config.conf"), text).unwrap();
        symlink(version, volume.join("..next")).unwrap();
        fs::rename(volume.join("..next"), volume.join("..data")).unwrap();
    };
    const BEGIN: &str = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";
    write("..1", BEGIN);
    symlink("..data/config.conf", volume.join("config.conf")).unwrap();
    let config = format!("--config={}", volume.join("config.conf").display());
    node.start(&[&config]);

    write("..2", &format!("{BEGIN}clusterCIDR: 10.0.0.0/33\n"));
    node.wait_until_logged(&["the changed file cannot be used", "clusterCIDR: \"10.0.0.0/33\""]);
    assert_eq!(request(Transport::Tcp, FRONTEND).unwrap(), "web-1");
    write("..3", &format!("{BEGIN}clusterCIDR: 10.0.0.0/8\n"));
    let status = node.agent_mut().wait(TIMEOUT).unwrap();
    assert_eq!(status.code(), Some(1));
    assert!(node.log().contains("config.conf: the content was changed, a new start will use it"));
    assert_eq!(request(Transport::Tcp, FRONTEND).unwrap(), "web-1", "the kernel serves meanwhile");
    node.start(&[&config]);
    assert!(node.log().contains("--cluster-cidr=10.0.0.0/8"), "{}", node.log());
}

#[test]
fn names_at_their_longest_are_served_and_reported() {
    let Some(mut node) = TestNode::serving_or_skip([1]) else { return };
    let label = "a".repeat(63);
    let name = [&*label, &label, &label, &label[..61]].join(".");
    assert_eq!(name.len(), 253);
    let service = Service::new(&label, &[WEB4.into()]).port(&label, "TCP", 80, TARGET_PORT);
    node.write(&[service.endpoint_on(&name, &name, &[endpoint(1)[0]])]);
    node.start_with(&AgentCommand::run(&Build::Product.binary(), node.sandbox(), &node.manifests(), &name));
    TcpStream::connect(FRONTEND).unwrap();
    let status = run(node.cli("status").arg("-o").arg("json")).success();
    let explained = run(node.cli("explain").args(["node", &format!("{label}.default:80")])).success();
    for text in [&status, &explained, &metrics("/metrics").unwrap().body] {
        assert!(text.contains(&label), "{text}");
    }
    assert!(explained.contains(&name), "{explained}");
    assert!(run(&mut node.cli("dump")).success().contains("10.96.0.10:80/TCP"));
    node.terminate();
}
