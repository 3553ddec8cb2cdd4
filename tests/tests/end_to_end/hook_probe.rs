//! The probe: it verifies by use that the hooks act.

use std::{fs, net::TcpStream};

use tests::{Build, FRONTEND, TIMEOUT, TestNode, eventually, http, run, web4};

/// Those of the reverse direction first: they cannot be probed once nothing is redirected.
const HOOKS: [&str; 8] =
    ["getpeername4", "getpeername6", "recvmsg4", "recvmsg6", "connect4", "connect6", "sendmsg4", "sendmsg6"];

fn start(node: &mut TestNode, arguments: &[&str]) {
    node.write(&[web4([1])]);
    node.start(arguments);
    node.wait_until_ready();
}

fn is_ok(hook: &str) -> bool {
    http::metric(&format!("kube_proxy_ebpf_probe_success{{hook=\"{hook}\"}}")) == Some(1.0)
}

/// What `check` reports about the probe: the level and the text.
fn check(node: &TestNode) -> (String, String) {
    let output = run(node.cli("check").args(["--output", "json"]));
    let report: serde_json::Value = serde_json::from_str(&output.stdout).unwrap();
    let findings = report["findings"].as_array().unwrap();
    let probe = findings.iter().find(|it| it["subject"] == "probe").unwrap();
    (probe["level"].as_str().unwrap().to_owned(), probe["message"].as_str().unwrap().to_owned())
}

#[test]
fn the_probe_covers_every_hook() {
    let Some(mut node) = TestNode::or_skip() else { return };
    // Also if other namespaces are not translated.
    for arguments in [&[][..], &["--socket-lb", "host"]] {
        start(&mut node, arguments);
        node.wait_until(|_| HOOKS.iter().all(|it| is_ok(it)));
        assert_eq!(http::health_status("/livez"), 200);
        assert_eq!(check(&node), ("ok".into(), "8 hooks work".into()));
        // The probe's addresses do not appear as a Service.
        let page = |path| node.status_page(path).unwrap().body;
        for text in [page("/status"), page("/state"), node.dump(Build::Product).unwrap().join("\n")] {
            let has_probe = text.contains("127.107.112.101") || text.contains("100::");
            assert!(!text.is_empty() && !has_probe, "{text}");
        }
        node.kill();
    }
}

#[test]
fn check_probes_through_a_child_process_outside_the_cgroup() {
    let Some(mut node) = TestNode::or_skip() else { return };
    start(&mut node, &[]);
    let root = node.sandbox().enter_root_cgroup().unwrap();
    assert!(TcpStream::connect(FRONTEND).is_err(), "nothing is translated outside the cgroup");
    let outside = check(&node);
    drop(root);
    assert_eq!(outside, ("ok".into(), "8 hooks work".into()));
    assert_eq!(check(&node), outside);
}

#[test]
fn a_detached_hook_is_reported() {
    let Some(mut node) = TestNode::or_skip() else { return };
    start(&mut node, &[]);
    node.kill();
    assert_eq!(check(&node).0, "ok", "the programs stay attached");
    for hook in HOOKS {
        fs::remove_file(node.sandbox().pins().join("links").join(hook)).unwrap();
        // The kernel detaches the program asynchronously.
        let is_reported = || {
            let (level, text) = check(&node);
            level == "broken" && text.contains(&format!("{hook} does not work"))
        };
        assert!(eventually(TIMEOUT, is_reported), "{hook}: {:?}", check(&node));
    }
}
