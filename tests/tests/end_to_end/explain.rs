//! `explain` on a node: its words, what the kernel has for the client, and what is missing.
//! `scenarios.rs` and `packet_path` compare it with every scenario and with traffic from pods and from outside.

use std::{net::TcpStream, os::unix::process::CommandExt as _, process::Command, sync::Arc};

use build_tools::command::KilledOnDrop;
use grpc_server::{Listener, ServedData};
use publish::{Publisher, SingleNode, cluster::ClusterPublisher};
use regex::Regex;
use tests::{
    AgentCommand, Build, NODE, NetNs, Output, TIMEOUT, TestNode, Transport, WEB4, assert_contains,
    brain_socket, eventually, kernel_at_least, request, run, status_socket, web4,
};

use super::passive_health::FOR_EVER;

const FRONTEND: &str = "10.96.0.10:80/tcp";

fn node_or_skip(arguments: &[&str]) -> Option<TestNode> {
    TestNode::running_or_skip([1, 2], &[web4([1, 2])], arguments)
}

#[track_caller]
fn explain(node: &TestNode, words: &[&str]) -> String {
    without_age(&run(node.cli("explain").args(words)).success())
}

/// The text without the time since which the state is active.
fn without_age(text: &str) -> String {
    Regex::new("(?s), for .*?: ").unwrap().replace(text, ": ").into_owned()
}

#[track_caller]
fn explain_failing(node: &TestNode, words: &[&str]) -> String {
    let output = run(node.cli("explain").args(words));
    assert_eq!(output.code, Some(1), "{output:?}");
    without_age(&output.stdout) + &output.stderr
}

#[test]
fn an_explanation_has_the_verdict_the_rules_and_the_endpoints() {
    let Some(mut node) = node_or_skip(&[]) else { return };
    let expect = "\
REDIRECTED to one of 2 endpoints

from       node n1
to         10.96.0.10:80/TCP
service    default/web, port 80/TCP to targetPort 8080
frontend   cluster IP
policy     internalTrafficPolicy Cluster: endpoints on every node
selection  at random
kernel     eBPF, generation 1: 2 endpoints

ENDPOINT         USED  REASON  POD    NODE
10.244.1.1:8080  yes   ready   web-1  n1
10.244.1.2:8080  yes   ready   web-2  n1
";
    assert_eq!(explain(&node, &["node", FRONTEND]), expect);
    assert_eq!(explain(&node, &["node", "web.default:80"]), expect);
    assert_eq!(explain(&node, &["node", "default/web"]), expect);

    node.write(&[web4([])]);
    let refused = || request(Transport::Tcp, (WEB4, 80).into()).is_err();
    assert!(eventually(TIMEOUT, refused));
    let text = explain(&node, &["node", FRONTEND]);
    assert_contains(&text, &["REFUSED: default/web has no endpoints\n", "eBPF, generation 2: refused"]);
    let text = explain(&node, &["node", "10.96.0.11:80"]);
    assert_contains(&text, &["NOT TRANSLATED: no Service", "nearest: 10.96.0.10:80/TCP (default/web)"]);
    let text = explain_failing(&node, &["node", "10.96.0.10:81"]);
    let expect = "REFUSED: 10.96.0.10 is a cluster IP of default/web, which has no such port: it has 80/TCP\n\
                  BUT the kernel does nothing with it: there are no nftables tables\n";
    assert_contains(&text, &[expect]);
    let text = explain_failing(&node, &["node", "wep.default"]);
    assert_contains(&text, &["there is no Service default/wep; nearest: default/web"]);
    node.wait_until_ready();
}

#[test]
fn an_explanation_says_what_the_kernel_has_for_the_client() {
    let Some(mut node) = node_or_skip(&FOR_EVER) else { return };
    // Endpoint 3 refuses.
    node.apply(&[web4(1..=3)]);
    let is_ejected = |text: &str| {
        text.contains("10.244.1.3:8080  ejected  ready; ejected for 59 min")
            && text.contains(" more: 3 refusals ")
    };
    assert!(!is_ejected(&explain(&node, &["node", FRONTEND])));
    for _ in 0..60 {
        let _ = TcpStream::connect((WEB4, 80));
    }
    let text = explain(&node, &["node", FRONTEND]);
    if !kernel_at_least(5, 14) {
        // Nothing tells user space which network namespace is which client.
        assert_contains(&text, &["10.244.1.3:8080  yes   ready; ejected for 1 client: 3 refusals "]);
        return;
    }
    assert!(is_ejected(&text), "{text}");
    // A pod is another client; as long as it has no process, its network namespace cannot be found.
    let pod = NetNs::with_local_endpoints().unwrap();
    pod.add_address("10.244.9.9".parse().unwrap()).unwrap();
    let of_pod = |node: &TestNode| explain(node, &["pod", "10.244.9.9", FRONTEND]);
    let expect = [
        "from       a pod at 10.244.9.9, if it is one of node n1: no endpoint has this address\n",
        "10.244.1.3:8080  yes   ready; ejected for 1 client: 3 refusals ",
    ];
    assert_contains(&of_pod(&node), &expect);
    let _process = KilledOnDrop(pod.run(|| Command::new("sleep").arg("infinity").spawn().unwrap()));
    let text = of_pod(&node);
    assert!(text.contains("10.244.1.3:8080  yes   ready  ") && !text.contains("ejected"), "{text}");

    node.apply(&[web4([1, 2]).affinity(3600)]);
    let kept = "; this client keeps it for ";
    assert!(!explain(&node, &["node", FRONTEND]).contains(kept));
    let server = request(Transport::Tcp, (WEB4, 80).into()).unwrap();
    let text = explain(&node, &["node", FRONTEND]);
    let line = text.lines().find(|it| it.contains(kept)).unwrap_or_else(|| panic!("{text}"));
    assert_contains(line, &[&server, "59 min"]);
    assert_contains(
        &text,
        &["selection  at random; a client keeps it for 3600 s (sessionAffinity ClientIP)"],
    );
    assert!(!of_pod(&node).contains(kept));
}

#[test]
fn where_the_kernel_differs_from_the_cluster_it_is_said() {
    let Some(mut node) = node_or_skip(&[]) else { return };
    node.kill();
    // The kernel's state is that of the process that was killed.
    let text = explain_failing(&node, &["node", FRONTEND]);
    let kernel = "kernel     eBPF, generation 1: 10.244.1.1:8080 10.244.1.2:8080";
    assert_contains(&text, &["UNKNOWN: no process answers at ", "explain manifests with --source", kernel]);
    assert_contains(&explain_failing(&node, &["node", "web.default"]), &["no process answers at "]);
    // A brain alone knows the cluster.
    node.write(&[web4([2, 3])]);
    let brain = AgentCommand::brain(&Build::Product.binary(), node.sandbox(), &node.manifests(), NODE)
        .arg("--status-socket")
        .arg(status_socket(node.sandbox()));
    node.start_inactive(&brain);
    node.wait_until(|node| node.status_page("/state").is_ok_and(|it| it.status == 200));
    let text = explain_failing(&node, &["node", FRONTEND]);
    let expect = "REDIRECTED to one of 2 endpoints\nBUT eBPF lacks 10.244.1.3:8080 and has 10.244.1.1:8080\n";
    assert_contains(&text, &[expect]);
}

/// What is asked of `run`, and of an agent.
const QUESTIONS: [&[&str]; 4] = [
    &["node", FRONTEND],
    &["node", "web.default:80"],
    &["pod", "default/web-1", "default/web"],
    &["outside", "192.0.2.1", FRONTEND],
];

#[test]
fn an_agent_asks_its_brain_and_answers_as_run_does() {
    let Some(mut node) = node_or_skip(&[]) else { return };
    let answers = |node: &TestNode| QUESTIONS.map(|it| run(node.cli("explain").args(it)));
    // Each start activates a generation of its own.
    let comparable = |it: [Output; 4]| {
        it.map(|it| (it.code, without_age(&it.stdout).replace("generation 2", "generation 1"), it.stderr))
    };
    let of_run = comparable(answers(&node));
    assert!(of_run[2].1.contains("from       pod default/web-1 (10.244.1.1) on node n1\n"), "{of_run:?}");
    node.terminate();
    let (brain, mut agent) = (node.start_brain(), node.start_agent());
    agent.wait_until_applied(TIMEOUT).unwrap();
    assert_eq!(comparable(answers(&node)), of_run);
    let wrong = run(node.cli("explain").args(["node", "wep.default"])).exits_with(1);
    assert_contains(&wrong, &["there is no Service default/wep; nearest: default/web"]);

    // While the brain is away, what the kernel has is shown, and why there is nothing else.
    brain.kill9().unwrap();
    let away = explain_failing(&node, &["node", FRONTEND]);
    let addresses = "10.244.1.1:8080 10.244.1.2:8080";
    assert_contains(&away, &["UNKNOWN: ", "the brain at unix:///", " gives no reasons: ", addresses]);
    assert!(!away.contains("default/web"), "{away}");
    assert_contains(&explain_failing(&node, &["node", "web.default"]), &["gives no reasons: "]);
    let _brain = node.start_brain();
    let explained = || run(node.cli("explain").args(["node", FRONTEND])).code == Some(0);
    assert!(eventually(TIMEOUT, explained), "{}", agent.log());
}

#[test]
fn with_a_brain_that_explains_nothing_the_kernel_is_shown() {
    let Some(node) = TestNode::prepared_or_skip([], &[web4([1, 2])]) else { return };
    let (brain, mut agent) = (node.start_brain(), node.start_agent());
    agent.wait_until_applied(TIMEOUT).unwrap();
    brain.kill9().unwrap();
    // As an older brain, or KPNG's; it has no state yet, so that the agent keeps the last one.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let publisher = Publisher::new(NODE);
    let nodes = Arc::new(SingleNode::new(NODE, publisher.subscribe()));
    let cluster = ClusterPublisher::new(None);
    let served =
        ServedData { nodes, cluster: cluster.subscribe(), followers: Default::default(), explainer: None };
    let target = brain_socket(node.sandbox()).parse().unwrap();
    let listener = runtime.block_on(Listener::bind(&target)).unwrap();
    runtime.spawn(grpc_server::serve(listener, served, std::future::pending(), std::future::pending()));
    let text = explain_failing(&node, &["node", FRONTEND]);
    let expect = [
        "UNKNOWN: ",
        "it does not explain connections (localv1.Explanations): it is older than this program, or another one",
        "10.244.1.1:8080 10.244.1.2:8080",
    ];
    assert_contains(&text, &expect);
}

#[test]
fn without_permission_manifests_can_be_explained() {
    let Some(node) = node_or_skip(&[]) else { return };
    let as_user = |arguments: &[&str]| run(node.cli("explain").args(arguments).uid(65534).gid(65534));
    let denied = as_user(&["node", FRONTEND]);
    assert_eq!(denied.code, Some(1), "{denied:?}");
    assert_contains(
        &denied.stdout,
        &["UNKNOWN: ", "ermission denied", "run this as root, or ", "cannot be read: "],
    );
    let source = node.source();
    // What is to be said of flags is for the log of a process.
    let gates = "--feature-gates=TopologyAwareHints=true";
    let explained = as_user(&["--source", &source, "--node-name", NODE, gates, "node", FRONTEND]);
    assert_eq!(explained.stderr, "");
    let explained = explained.success();
    assert_contains(&explained, &["REDIRECTED to one of 2 endpoints", "10.244.1.2:8080  yes   ready"]);
    assert!(!explained.contains("kernel"), "{explained}");
    let wrong = run(node.cli("explain").args(["node", "10.96.0.10"])).exits_with(64);
    assert_contains(&wrong, &["\"10.96.0.10\": a port is missing"]);
}
