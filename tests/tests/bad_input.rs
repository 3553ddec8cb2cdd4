//! What is wrong is named, with what to do about it; what was good goes on, and nothing is left half-done.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr, TcpStream},
    os::unix::{fs::PermissionsExt as _, process::CommandExt as _},
    path::Path,
    process::{Command, Output},
    time::Duration,
};

use aya::{
    maps::Array,
    programs::{CgroupAttachMode, CgroupSockAddr, CgroupSockAddrAttachType},
};
use tests::{
    Build, EchoServer, TestNode, Transport, eventually,
    manifest::{self, Service},
    request,
    test_node::{kernel_objects, settled_kernel_objects},
};

const LIMIT: Duration = Duration::from_secs(10);
const WEB: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 10);

fn web() -> Service {
    Service::new("web", &[WEB.into()]).port("", "TCP", 80, 8080).endpoint("web-1", &[[10, 244, 1, 1].into()])
}

fn server() -> EchoServer {
    EchoServer::start("web-1", ([10, 244, 1, 1], 8080).into()).unwrap()
}

fn program(arguments: &[&str]) -> Output {
    Command::new(Build::Product.binary()).args(arguments).output().unwrap()
}

/// Runs the binary, which must end with this code and say all of this.
#[track_caller]
fn fails(arguments: &[&str], code: i32, says: &[&str]) {
    let Output { status, stderr, stdout } = program(arguments);
    let stderr = String::from_utf8_lossy(&stderr);
    assert_eq!(status.code(), Some(code), "{arguments:?}: {stderr}");
    for it in says {
        assert!(stderr.contains(it), "{arguments:?} does not say {it:?}: {stderr}");
    }
    assert!(stdout.is_empty(), "{}", String::from_utf8_lossy(&stdout));
    assert!(!stderr.contains("panicked"), "{stderr}");
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn wrong_usage_exits_64() {
    fails(&[], 64, &["Usage"]);
    fails(&["frobnicate"], 64, &["frobnicate"]);
    fails(&["run"], 64, &["--source"]);
    fails(&["run", "--source", "manifests"], 64, &["manifests", "file:PATH"]);
    fails(&["run", "--source", "file:"], 64, &["needs a path"]);
    fails(&["run", "--source", "file:x", "--node-name", "No Node"], 64, &["No Node", "lower-case"]);
    fails(&["run", "--source", "file:x", "--pin-dir", "pins"], 64, &["pins", "absolute"]);
    fails(&["print", "--source", "file:x", "--output", "xml"], 64, &["xml", "json"]);
    fails(
        &["print", "--source", "file:x", "--feature-gates", "Magic=true"],
        64,
        &["Magic", "AllowServiceExternalIPs"],
    );
    fails(&["print", "--source", "file:x", "--hostname-override", "No Node"], 64, &["No Node", "lower-case"]);
    fails(&["brain", "--source", "file:x", "--tls-cert", "x.crt"], 64, &["--tls-key", "--tls-client-ca"]);
    fails(&["agent", "--tls-cert", "x.crt", "--tls-key", "x.key"], 64, &["--tls-ca"]);
}

#[test]
fn help_and_version_exit_0() {
    for arguments in [&["--help"][..], &["--version"], &["run", "--help"], &["dump", "--help"]] {
        let Output { status, stdout, .. } = program(arguments);
        assert_eq!(status.code(), Some(0));
        assert!(!stdout.is_empty());
    }
}

#[test]
fn what_cannot_be_started_is_named_and_leaves_nothing_behind() {
    let Some(world) = TestNode::or_skip("what_cannot_be_started_is_named_and_leaves_nothing_behind") else {
        return;
    };
    world.write(&[web()]);
    let before = settled_kernel_objects();
    let source = format!("file:{}", world.manifests().display());
    let (pins, cgroup) = (text(world.sandbox().pins()), text(world.sandbox().cgroup()));
    let files = text(world.sandbox().files());
    let run = |source: &str, cgroup: &str, pins: &str, says: &[&str]| {
        fails(
            &["run", "--source", source, "--node-name", "n1", "--cgroup", cgroup, "--pin-dir", pins],
            1,
            says,
        );
    };
    run(&source, files, pins, &[files, "not a cgroup2", "--cgroup"]);
    run(&source, "/no/such/cgroup", pins, &["/no/such/cgroup does not exist", "mkdir"]);
    run(&source, cgroup, files, &[files, "bpf file system", "--pin-dir"]);
    run(&source, cgroup, &format!("{pins}/a.b"), &["a.b", "dot"]);
    run("file:/no/such/manifests", cgroup, pins, &["/no/such/manifests"]);
    fails(&["dump", "--pin-dir", pins], 1, &[pins, "no state is active"]);
    assert!(eventually(LIMIT, || kernel_objects() == before), "something was left in the kernel");
}

#[test]
fn a_missing_capability_is_named() {
    let Some(world) = TestNode::or_skip("a_missing_capability_is_named") else { return };
    world.write(&[web()]);
    let binary = world.sandbox().files().join("kube-proxy-ebpf");
    fs::copy(Build::Product.binary(), &binary).unwrap();
    fs::set_permissions(world.sandbox().files(), fs::Permissions::from_mode(0o755)).unwrap();
    let output = Command::new(&binary)
        .args(["run", "--source"])
        .arg(format!("file:{}", world.manifests().display()))
        .args(["--node-name", "n1", "--cgroup"])
        .arg(world.sandbox().cgroup())
        .arg("--pin-dir")
        .arg(world.sandbox().pins())
        .uid(65534)
        .gid(65534)
        .output()
        .unwrap();
    let says = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{says}");
    assert!(says.contains("CAP_BPF") && says.contains("root"), "{says}");
}

#[test]
fn a_second_instance_is_refused_and_the_first_goes_on() {
    let Some(world) = TestNode::or_skip("a_second_instance_is_refused_and_the_first_goes_on") else { return };
    let _server = server();
    world.write(&[web()]);
    let mut agent = world.command(Build::Product).start(world.sandbox()).unwrap();
    agent.wait_until(LIMIT, || request(Transport::Tcp, (WEB, 80).into()).is_ok()).unwrap();
    let mut second = world.command(Build::Product).start(world.sandbox()).unwrap();
    assert_eq!(second.wait(LIMIT).unwrap().code(), Some(1));
    assert!(second.log().contains("another instance is running"), "{}", second.log());
    fails(&["cleanup", "--pin-dir", text(world.sandbox().pins())], 1, &["another instance", "stop it first"]);
    assert_eq!(request(Transport::Tcp, (WEB, 80).into()).unwrap(), "web-1");
}

#[test]
fn pins_of_an_unknown_layout_are_refused_and_left_alone() {
    let Some(world) = TestNode::or_skip("pins_of_an_unknown_layout_are_refused_and_left_alone") else {
        return;
    };
    world.write(&[web()]);
    let layout = world.sandbox().pins().join("v4");
    fs::create_dir(&layout).unwrap();
    // An array like the side word's, but with values of 32 bytes: a read of one would overwrite our memory.
    let mut foreign = Array::<_, [u8; 32]>::create(1, 0).unwrap();
    foreign.set(0, [7; 32], 0).unwrap();
    foreign.pin(layout.join("active")).unwrap();
    let mut agent = world.command(Build::Product).start(world.sandbox()).unwrap();
    assert_eq!(agent.wait(LIMIT).unwrap().code(), Some(1));
    for it in ["v4/active", "32 bytes", "4 bytes", "cleanup"] {
        assert!(agent.log().contains(it), "does not say {it}: {}", agent.log());
    }
    let there = aya::maps::MapData::from_pin(layout.join("active")).unwrap();
    let there: Array<_, [u8; 32]> = aya::maps::Map::from_map_data(there).unwrap().try_into().unwrap();
    assert_eq!(there.get(&0, 0).unwrap(), [7; 32]);
    let error = TcpStream::connect((WEB, 80)).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(nix::libc::ENETUNREACH), "nothing is attached");
}

#[test]
fn a_broken_manifest_keeps_the_last_good_state() {
    let Some(world) = TestNode::or_skip("a_broken_manifest_keeps_the_last_good_state") else { return };
    let _server = server();
    world.write(&[web()]);
    let mut agent = world.command(Build::Product).start(world.sandbox()).unwrap();
    let service = SocketAddr::from((WEB, 80));
    agent.wait_until(LIMIT, || request(Transport::Tcp, service).is_ok()).unwrap();
    let file = world.manifests().join("all.yaml");
    let good = fs::read_to_string(&file).unwrap();
    for (broken, says) in [
        ("kind: Service\n  metadata: [", "all.yaml"),
        ("\0\u{1}\u{2} garbage", "all.yaml"),
        (&good[..good.len() / 2], "all.yaml"),
    ] {
        // Not even atomically.
        fs::write(&file, broken).unwrap();
        let log = agent.log_path().to_owned();
        let reported = || fs::read_to_string(&log).is_ok_and(|it| it.contains(says) && it.contains("WARN"));
        agent.wait_until(LIMIT, reported).unwrap();
        assert_eq!(request(Transport::Tcp, service).unwrap(), "web-1");
    }
    // A good one is believed again.
    world.write(&[web(), Service::new("late", &[[10, 96, 0, 11].into()]).port("", "TCP", 80, 8080)]);
    let late = "frontend 10.96.0.11:80/TCP backends=0".to_owned();
    agent.wait_until(LIMIT, || world.dump(Build::Product).is_ok_and(|it| it.contains(&late))).unwrap();
}

#[test]
fn a_bad_object_takes_nothing_else_down() {
    let Some(world) = TestNode::or_skip("a_bad_object_takes_nothing_else_down") else { return };
    let _server = server();
    world.write(&[web()]);
    manifest::write_atomically(
        &world.manifests().join("bad.yaml"),
        r"apiVersion: v1
kind: Service
metadata: {name: impossible, namespace: default}
spec:
  clusterIP: 10.96.0.300
  clusterIPs: [10.96.0.300, 10.96.0.20]
  ports: [{port: 0, name: a}, {port: 70000, name: b}, {port: 80, name: c}]
---
apiVersion: v1
kind: Service
metadata: {name: clash, namespace: default}
spec: {clusterIP: 10.96.0.10, clusterIPs: [10.96.0.10], ports: [{port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: of-nobody, namespace: default, labels: {kubernetes.io/service-name: nobody}}
addressType: IPv4
ports: [{port: 80}]
endpoints: [{addresses: [10.244.1.9]}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: default}
",
    )
    .unwrap();
    let mut agent = world.command(Build::Product).start(world.sandbox()).unwrap();
    let in_force = |it: Vec<String>| it.iter().any(|it| it.starts_with("frontend 10.96.0.20:80"));
    agent.wait_until(LIMIT, || world.dump(Build::Product).is_ok_and(in_force)).unwrap();
    // default/clash, which has no endpoints, comes before default/web in the order of names.
    let refused = |error: std::io::Error| error.kind() == std::io::ErrorKind::ConnectionRefused;
    agent.wait_until(LIMIT, || TcpStream::connect((WEB, 80)).is_err_and(refused)).unwrap();
    let names = [
        "10.96.0.300",
        "70000",
        "default/impossible",
        "Deployment",
        "bad.yaml",
        "default/web",
        "default/clash",
    ];
    let log = agent.log_path().to_owned();
    let says_all = || {
        let log = fs::read_to_string(&log).unwrap_or_default();
        names.iter().all(|it| log.contains(it))
    };
    agent.wait_until(LIMIT, says_all).unwrap();
}

#[test]
fn a_hook_that_cannot_be_had_leads_nobody_and_is_asked_for_again() {
    let test = "a_hook_that_cannot_be_had_leads_nobody_and_is_asked_for_again";
    let Some(world) = TestNode::or_skip(test) else { return };
    let _server = server();
    let start = || world.command(Build::Product).start(world.sandbox()).unwrap();
    // A program that lets everything pass, since it never heard of a Service.
    world.write(&[]);
    let mut agent = start();
    agent.wait_until(LIMIT, || world.is_attached()).unwrap();
    let mut idle =
        CgroupSockAddr::from_pin(world.program("connect6"), CgroupSockAddrAttachType::Connect6).unwrap();
    agent.terminate().unwrap();
    assert_eq!(program(&["cleanup", "--pin-dir", text(world.sandbox().pins())]).status.code(), Some(0));
    // As many as the kernel allows on one cgroup (BPF_CGROUP_MAX_PROGS).
    let cgroup = fs::File::open(world.sandbox().cgroup()).unwrap();
    let mut attach = || {
        let link = idle.attach(&cgroup, CgroupAttachMode::Single).unwrap();
        idle.take_link(link).unwrap()
    };
    let full: Vec<_> = (0..64).map(|_| attach()).collect();
    world.write(&[web()]);
    let mut agent = start();
    let log = agent.log_path().to_owned();
    let says = "attach of program connect6 failed";
    let has_failed = || fs::read_to_string(&log).is_ok_and(|it| it.matches(says).count() > 3);
    agent.wait_until(LIMIT, has_failed).unwrap();
    let links = world.sandbox().pins().join("links");
    // Between two attempts, which are ever further apart.
    let leads = || ["connect4", "sendmsg4", "sendmsg6"].iter().any(|it| links.join(it).exists());
    assert!(eventually(LIMIT, || !leads()), "{}", agent.log());
    TcpStream::connect((WEB, 80)).unwrap_err();
    assert!(links.join("sock_release").exists(), "sockets that were led meanwhile are still heard of");
    drop(full);
    agent.wait_until(LIMIT, || request(Transport::Tcp, (WEB, 80).into()).is_ok()).unwrap();
}

#[test]
fn cleanup_touches_nothing_that_is_not_ours() {
    let Some(world) = TestNode::or_skip("cleanup_touches_nothing_that_is_not_ours") else { return };
    let files = world.sandbox().files().join("precious");
    fs::create_dir_all(files.join("v4")).unwrap();
    fs::write(files.join("v4/active"), "data").unwrap();
    fails(&["cleanup", "--pin-dir", text(&files)], 1, &[text(&files), "bpf file system"]);
    assert_eq!(fs::read_to_string(files.join("v4/active")).unwrap(), "data");

    let foreign = world.sandbox().pins().join("foreign");
    Array::<_, u32>::create(1, 0).unwrap().pin(&foreign).unwrap();
    let output = program(&["cleanup", "--pin-dir", text(world.sandbox().pins())]);
    assert_eq!(output.status.code(), Some(0));
    let says = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(says.contains(text(&foreign)) && says.contains("was kept"), "{says}");
    assert!(foreign.exists());
}

#[test]
fn another_cgroup_is_refused_while_the_first_one_lives() {
    let Some(world) = TestNode::or_skip("another_cgroup_is_refused_while_the_first_one_lives") else {
        return;
    };
    let _server = server();
    world.write(&[web()]);
    let mut agent = world.command(Build::Product).start(world.sandbox()).unwrap();
    let service = SocketAddr::from((WEB, 80));
    agent.wait_until(LIMIT, || world.is_attached()).unwrap();
    agent.kill9().unwrap();
    let parent = world.sandbox().cgroup().parent().unwrap();
    let source = format!("file:{}", world.manifests().display());
    let pins = text(world.sandbox().pins());
    fails(
        &["run", "--source", &source, "--node-name", "n1", "--cgroup", text(parent), "--pin-dir", pins],
        1,
        &["links/", "another cgroup", "--cgroup", "cleanup"],
    );
    assert_eq!(request(Transport::Tcp, service).unwrap(), "web-1");
}

#[test]
fn a_cgroup_that_comes_back_is_served_again() {
    let Some(world) = TestNode::or_skip("a_cgroup_that_comes_back_is_served_again") else { return };
    let _server = server();
    world.write(&[web()]);
    let slice = world.sandbox().cgroup().join("slice");
    fs::create_dir(&slice).unwrap();
    let source = format!("file:{}", world.manifests().display());
    let mut agent = Command::new(Build::Product.binary())
        .args(["run", "--source", &source, "--node-name", "n1", "--cgroup", text(&slice), "--pin-dir"])
        .arg(world.sandbox().pins())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let own = std::process::id().to_string();
    let connects = || {
        fs::write(slice.join("cgroup.procs"), &own).unwrap();
        let answer = request(Transport::Tcp, (WEB, 80).into());
        world.sandbox().adopt(std::process::id()).unwrap();
        answer.is_ok()
    };
    assert!(eventually(LIMIT, connects));
    // The canary may be in it.
    assert!(eventually(LIMIT, || fs::remove_dir(&slice).is_ok()));
    fs::create_dir(&slice).unwrap();
    let again = eventually(LIMIT, connects);
    let _ = agent.kill();
    agent.wait().unwrap();
    let _ = fs::remove_dir(&slice);
    assert!(again, "the new cgroup is not served");
}

#[test]
fn cleanup_takes_every_trace_off_the_node() {
    let Some(world) = TestNode::or_skip("cleanup_takes_every_trace_off_the_node") else { return };
    let _server = server();
    let before = settled_kernel_objects();
    world.write(&[web()]);
    let mut agent = world.command(Build::Product).start(world.sandbox()).unwrap();
    let service = SocketAddr::from((WEB, 80));
    agent.wait_until(LIMIT, || request(Transport::Tcp, service).is_ok()).unwrap();
    assert_eq!(agent.terminate().unwrap().code(), Some(0));
    // It goes on serving without the agent.
    assert_eq!(request(Transport::Tcp, service).unwrap(), "web-1");
    let pins = text(world.sandbox().pins());
    assert_eq!(program(&["cleanup", "--pin-dir", pins]).status.code(), Some(0));
    assert!(!world.sandbox().pins().exists());
    assert_eq!(TcpStream::connect(service).unwrap_err().raw_os_error(), Some(nix::libc::ENETUNREACH));
    assert!(eventually(LIMIT, || kernel_objects() == before), "{:?}, {before:?} before", kernel_objects());
    // Again: nothing to do, and no failure.
    assert_eq!(program(&["cleanup", "--pin-dir", pins]).status.code(), Some(0));
}
