//! The capabilities of the DaemonSet, on the real kernel: they suffice, and none is superfluous.

use std::{fs, process::Command};

use rustix::thread::CapabilitySet;
use tests::{
    AgentCommand, Build, EchoServer, FRONTEND, NetNs, TARGET_PORT, TIMEOUT, TestNode, Transport, deploy,
    endpoint, http, kernel_at_least, request, skip, web,
};

fn bounding_set(process: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let set = status.lines().find_map(|it| it.strip_prefix("CapBnd:")).unwrap();
    u64::from_str_radix(set.trim(), 16).unwrap()
}

/// Every other end-to-end test starts the proxy in the same way.
#[test]
fn the_capabilities_of_the_manifest_suffice() {
    let Some(mut node) = TestNode::running_or_skip([1], &[web([1])], &[]) else { return };
    assert_eq!(bounding_set(node.agent().pid()), deploy::capabilities().unwrap().bits());

    assert_eq!(request(Transport::Tcp, FRONTEND).unwrap(), "web-1");
    // The pages of the liveness and readiness probes.
    node.wait_until(|_| ["/livez", "/readyz"].iter().all(|it| http::health_status(it) == 200));
}

#[test]
fn without_any_of_its_capabilities_the_proxy_reports_what_it_needs() {
    let Some(node) = TestNode::prepared_or_skip([], &[web([1])]) else { return };
    let all = deploy::capabilities().unwrap();
    for (name, missing) in all.iter_names() {
        let command = node.command(Build::Product).capabilities(all.difference(missing));
        let mut agent = command.start(node.sandbox()).unwrap();
        let status = agent.wait(TIMEOUT).unwrap_or_else(|error| panic!("{name} is not needed: {error:#}"));
        assert_eq!(status.code(), Some(1), "{name}");
        let log = agent.log();
        assert!(log.contains("CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON"), "the log without {name}:\n{log}");
    }
}

#[test]
fn a_low_memlock_limit_is_raised_or_reported() {
    let Some(mut node) = TestNode::prepared_or_skip([], &[web([1])]) else { return };
    let line = format!("ulimit -l 64 && exec {}", node.command(Build::Product).line());
    node.start_inactive(&AgentCommand::new("/bin/sh".as_ref()).args(["-c", &line]));
    if kernel_at_least(5, 11) {
        node.wait_until(TestNode::is_attached);
        return;
    }
    let status = node.agent_mut().wait(TIMEOUT).unwrap();
    assert_eq!(status.code(), Some(1), "{}", node.log());
    assert!(node.log().contains("add CAP_SYS_RESOURCE, or raise the limit"), "{}", node.log());
}

/// Rootless k3s and unprivileged containers run in a user namespace.
#[test]
fn in_a_user_namespace_the_nftables_backend_serves_and_the_other_one_names_it() {
    const INSIDE: [&str; 3] = ["--user", "--map-root-user", "--net"];
    let Some(node) = TestNode::or_skip() else { return };
    if !Command::new("unshare").args(INSIDE).arg("true").status().unwrap().success() {
        return skip("this kernel lets no process create a user namespace");
    }
    node.write(&[web([1])]);
    let start = |arguments: &[&str]| {
        // Mapping root takes some of root's own.
        let command = node.command(Build::Product).args(arguments).capabilities(CapabilitySet::all());
        command.under("unshare".as_ref(), INSIDE.map(String::from).into()).start(node.sandbox()).unwrap()
    };
    let mut ebpf = start(&[]);
    assert_eq!(ebpf.wait(TIMEOUT).unwrap().code(), Some(1));
    assert!(ebpf.log().contains("user namespace") && ebpf.log().contains("--backend nft"), "{}", ebpf.log());

    let mut nft = start(&["--backend=nft", "--packets=nft"]);
    nft.wait_for_log(TIMEOUT, |log| log.contains("state active")).unwrap();
    let network = NetNs::open(format!("/proc/{}/ns/net", nft.pid()).as_ref()).unwrap();
    for words in [
        "link set lo up",
        "link add out type veth peer name other",
        "link set out up",
        "link set other up",
        "address add 192.0.2.1/24 dev out",
        "route add default dev out",
        "address add 10.244.1.1/32 dev lo",
    ] {
        network.ip(&words.split(' ').collect::<Vec<_>>()).unwrap();
    }
    let _inside = network.enter().unwrap();
    let _server = EchoServer::start("web-1", (endpoint(1)[0], TARGET_PORT).into()).unwrap();
    assert_eq!(request(Transport::Tcp, FRONTEND).unwrap(), "web-1");
}
