//! A brain and an agent in two processes behave as `run` does in one, and each may crash and restart.

use std::{net::IpAddr, process::Command, time::Duration};

use serde_json::{Value, json};
use tests::{
    APPLIED, Agent, AgentCommand, Build, ConnectLoad, EchoConnection, FRONTEND, NODE, Service, TIMEOUT,
    TestNode, Transport, endpoint, eventually, expected_dump, http, manifest, run, scaled, web4,
};

/// `web` with these endpoints, and a Service that never changes.
fn services(endpoints: &[u8]) -> Vec<Service> {
    let other = Service::new("other", &[IpAddr::from([10, 96, 0, 11])]).port("udp", "UDP", 53, 5353);
    vec![other.endpoint("o1", &endpoint(9)), web4(endpoints.iter().copied())]
}

/// Waits until exactly the Services with these endpoints are active; programs are attached after the first state is written.
#[track_caller]
fn wait_until_active(node: &TestNode, agent: &mut Agent, endpoints: &[u8]) {
    agent.wait_until_applied(TIMEOUT).unwrap();
    let expected = expected_dump(&services(endpoints));
    agent.wait_until(TIMEOUT, || node.dump(Build::Product).is_ok_and(|it| it == expected)).unwrap();
}

#[track_caller]
fn assert_active(node: &TestNode, endpoints: &[u8]) {
    assert_eq!(node.dump(Build::Product).unwrap(), expected_dump(&services(endpoints)));
}

#[test]
fn two_processes_behave_as_one() {
    let Some(mut node) = TestNode::prepared_or_skip(1..=3, &services(&[1])) else { return };

    // In one process.
    node.start(&[]);
    node.wait_until_active(&services(&[1]));
    let mut connection = EchoConnection::connect(FRONTEND).unwrap();
    let load = ConnectLoad::start(Transport::Tcp, FRONTEND, 1, scaled(Duration::from_millis(1)));
    node.terminate();

    // The same in two, whichever starts first; connections survive.
    let mut agent = node.start_agent();
    agent.wait_until_logged(TIMEOUT, "no state received yet").unwrap();
    let is_reported = |failing| {
        let metric = || http::metric("kube_proxy_ebpf_source_failing{source=\"brain\"}");
        assert!(eventually(TIMEOUT, || metric() == Some(failing)), "{:?}", metric());
    };
    is_reported(1.0);
    assert_active(&node, &[1]);
    let brain = node.start_brain();
    node.write(&services(&[1, 2]));
    wait_until_active(&node, &mut agent, &[1, 2]);
    is_reported(0.0);
    connection.ping().unwrap();

    // A crash of the brain changes nothing, and changes made meanwhile are applied when it is back.
    brain.kill9().unwrap();
    node.write(&services(&[3]));
    agent.wait_until_logged(TIMEOUT, "stays active").unwrap();
    is_reported(1.0);
    assert_active(&node, &[1, 2]);
    connection.ping().unwrap();
    let before = agent.count_logged(APPLIED);
    let brain = node.start_brain();
    wait_until_active(&node, &mut agent, &[3]);
    is_reported(0.0);
    assert!(eventually(TIMEOUT, || agent.count_logged(APPLIED) > before));
    assert_eq!(agent.count_logged(APPLIED), before + 1, "{}", agent.log());
    let last = agent.log().lines().rfind(|it| it.contains(APPLIED)).unwrap().to_owned();
    assert!(last.contains("changed=1"), "only the difference is written: {last}");

    // A brain that comes back with the same state changes nothing: the next change is the next generation.
    let synced = agent.count_logged("in sync again");
    assert!(brain.terminate().unwrap().success());
    let brain = node.start_brain();
    assert!(eventually(TIMEOUT, || agent.count_logged("in sync again") > synced), "{}", agent.log());
    node.write(&services(&[1, 3]));
    wait_until_active(&node, &mut agent, &[1, 3]);
    assert!(eventually(TIMEOUT, || agent.count_logged(APPLIED) > before + 1));
    assert_eq!(agent.count_logged(APPLIED), before + 2, "{}", agent.log());

    // A crash of the agent, and a change before it is back.
    agent.kill9().unwrap();
    node.write(&services(&[2, 3]));
    let mut agent = node.start_agent();
    wait_until_active(&node, &mut agent, &[2, 3]);
    connection.ping().unwrap();
    load.stop_without_failure(100);

    assert!(agent.terminate().unwrap().success());
    assert!(brain.terminate().unwrap().success());
    assert!(!node.sandbox().files().join("proxy.sock").exists());
    assert_active(&node, &[2, 3]);
}

#[test]
fn brain_and_agent_report_an_unknown_node_name() {
    let Some(node) = TestNode::prepared_or_skip([], &services(&[1])) else { return };
    node.write_file("node.yaml", &manifest::node("n2"));
    // Both must run until both have reported it.
    for process in &mut [node.start_brain(), node.start_agent()] {
        process.wait_until_logged(TIMEOUT, "no Node object has this name (found n2)").unwrap();
    }
}

#[test]
fn a_brain_behind_a_brain_decides_alike_and_hands_out_what_both_request() {
    let Some(node) = TestNode::or_skip() else { return };
    let web = || {
        let service = web4([1]).endpoint_on("n2", "web-2", &endpoint(2));
        service.annotation("example.com/a", "b").annotation("example.org/c", "d")
    };
    let write = |service: &Service| {
        let mut objects: Vec<_> = service.objects().collect();
        objects[0]["metadata"]["labels"] = json!({ "app": "web", "tier": "x" });
        node.write_file("all.yaml", &manifest::documents(objects));
    };
    write(&web());
    let binary = Build::Product.binary();
    let start = |name: &str, source: &str, labels: &str, annotations: &str| {
        let listen = format!("unix://{}", node.sandbox().files().join(name).display());
        let command = AgentCommand::new(&binary).args(["brain", "--source", source, "--listen", &listen]);
        let command = command.args(["--serve-any-node", "--with-service-labels", labels]);
        let command = command.args(["--with-service-annotations", annotations]).node(NODE);
        (command.start(node.sandbox()).unwrap(), listen)
    };
    let (_first, target) = start("first", &node.source(), "app", "*");
    let (_second, target) = start("second", &format!("api:{target}"), "*", "example.com/*");
    let items = |flag: &str, value: &str, name: &str| {
        let mut print = Command::new(&binary);
        print.args(["print", "--once", "--output", "json", "--node-name", name, flag, value]);
        // From a target it prints whatever that hands out.
        print.args(["--with-service-labels", "app", "--with-service-annotations", "example.com/*"]);
        serde_json::from_str::<Value>(&run(&mut print).success()).unwrap()["items"].take()
    };
    for service in [web(), web().internal_local()] {
        write(&service);
        for name in [NODE, "n2"] {
            let expected = items("--source", &node.source(), name);
            let printed = &expected[0]["service"];
            assert_eq!(printed["labels"], json!({ "app": "web" }), "{expected}");
            assert_eq!(printed["annotations"], json!({ "example.com/a": "b" }), "{expected}");
            for (flag, value) in [("--target", &target), ("--source", &format!("api:{target}"))] {
                let is_equal = || items(flag, value, name) == expected;
                assert!(eventually(TIMEOUT, is_equal), "{name} by {flag} {value}: {expected}");
            }
        }
    }
}
