//! The canary: whether the hooks act is seen by using them.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr, TcpStream},
    path::Path,
    process::{self, Command},
    time::Duration,
};

use tests::{Agent, Build, TestNode, eventually, http::get, manifest::Service};

const LIMIT: Duration = Duration::from_secs(20);
const HOOKS: [&str; 8] =
    ["connect4", "connect6", "getpeername4", "getpeername6", "sendmsg4", "sendmsg6", "recvmsg4", "recvmsg6"];

fn serve(world: &TestNode, arguments: &[&str]) -> Agent {
    let web = Service::new("web", &[[10, 96, 0, 10].into()]).port("", "TCP", 80, 8080);
    world.write(&[web.endpoint("web-1", &[[10, 244, 1, 1].into()])]);
    let setting = world.command(Build::Product);
    let setting = arguments.iter().fold(setting, tests::agent::AgentCommand::arg);
    let mut agent = setting.start(world.sandbox()).unwrap();
    let is_ready = || get((Ipv4Addr::LOCALHOST, 10256).into(), "/readyz").is_ok_and(|it| it.status == 200);
    agent.wait_until(LIMIT, is_ready).unwrap();
    agent
}

fn page(name: &str) -> String {
    get((Ipv4Addr::LOCALHOST, 10249).into(), name).map_or_else(|_| String::new(), |it| it.body)
}

fn is_heard(hook: &str) -> bool {
    let name = format!("kube_proxy_ebpf_canary{{hook=\"{hook}\"}} ");
    page("/metrics").lines().any(|it| it.strip_prefix(&name).is_some_and(|it| it.parse() == Ok(1.0)))
}

/// What `check` says of the canary: how good it is, and what it found.
fn check(world: &TestNode) -> (String, String) {
    let output = Command::new(Build::Product.binary())
        .args(["check", "--output", "json", "--cgroup"])
        .arg(world.sandbox().cgroup())
        .arg("--pin-dir")
        .arg(world.sandbox().pins())
        .output()
        .unwrap();
    let said: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let findings = said["findings"].as_array().unwrap();
    let canary = findings.iter().find(|it| it["subject"] == "probe").unwrap();
    (canary["level"].as_str().unwrap().to_owned(), canary["message"].as_str().unwrap().to_owned())
}

fn enter(cgroup: &Path) {
    fs::write(cgroup.join("cgroup.procs"), process::id().to_string()).unwrap();
}

#[test]
fn every_hook_is_seen_to_act() {
    let Some(world) = TestNode::or_skip("every_hook_is_seen_to_act") else { return };
    // Those that leave others alone act all the same.
    for arguments in [&[][..], &["--socket-lb", "host"]] {
        let mut agent = serve(&world, arguments);
        agent.wait_until(LIMIT, || HOOKS.iter().all(|it| is_heard(it))).unwrap();
        assert_eq!(get((Ipv4Addr::LOCALHOST, 10256).into(), "/livez").unwrap().status, 200);
        assert_eq!(check(&world), ("ok".into(), "8 hooks work".into()));
        // It is nobody's Service.
        for text in [page("/status"), page("/state"), world.dump(Build::Product).unwrap().join("\n")] {
            assert!(
                !text.is_empty() && !text.contains("127.107.112.101") && !text.contains("100::"),
                "{text}"
            );
        }
        agent.kill9().unwrap();
    }
}

#[test]
fn from_outside_of_the_cgroup_a_child_is_sent() {
    let Some(world) = TestNode::or_skip("from_outside_of_the_cgroup_a_child_is_sent") else { return };
    let _agent = serve(&world, &[]);
    let cgroup = world.sandbox().cgroup().to_owned();
    enter(cgroup.parent().unwrap());
    assert!(TcpStream::connect(SocketAddr::from(([10, 96, 0, 10], 80))).is_err(), "here is nobody served");
    let outside = check(&world);
    enter(&cgroup);
    assert_eq!(outside, ("ok".into(), "8 hooks work".into()));
    assert_eq!(check(&world), outside);
}

#[test]
fn a_hook_that_does_not_act_is_named() {
    let Some(world) = TestNode::or_skip("a_hook_that_does_not_act_is_named") else { return };
    serve(&world, &[]).kill9().unwrap();
    assert_eq!(check(&world).0, "ok", "the programs stay");
    // Those that show the way back first: where nothing is led away any more, they cannot be tried.
    for hook in [
        "getpeername4",
        "getpeername6",
        "recvmsg4",
        "recvmsg6",
        "connect4",
        "connect6",
        "sendmsg4",
        "sendmsg6",
    ] {
        fs::remove_file(world.sandbox().pins().join("links").join(hook)).unwrap();
        // The kernel takes it off a while later.
        let is_named = || {
            let (level, says) = check(&world);
            level == "broken" && says.contains(&format!("{hook} does not work"))
        };
        assert!(eventually(LIMIT, is_named), "{hook}: {:?}", check(&world));
    }
}
