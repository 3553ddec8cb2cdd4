//! Pods whose annotation leaves their sockets to packets.

use std::{
    net::TcpStream,
    time::{Duration, Instant},
};

use tests::{
    APPLIED, AgentCommand, Build, FRONTEND, NODE, NetNs, Sandbox, TIMEOUT, TestNode, Transport, eventually,
    request, run, scaled,
};

use super::exclusion::{ChildCgroup, assert_not_translated, assert_translated, leave, node_or_skip};

pub(super) const FLAG: &str = "--pod-annotations";

/// A UID of which only this digit differs.
fn uid(digit: u8) -> String {
    format!("3f2a8d1c-0b4e-4c7d-9a51-6d2f1e0c9b8{digit}")
}

/// A manifest of the Pod `default/pod-DIGIT` with this value of the annotation.
pub(super) fn pod(digit: u8, socket_lb: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: pod-{digit}\n  uid: {}\n  annotations:\n    \
         kube-proxy-ebpf.io/socket-lb: '{socket_lb}'\nspec: {{containers: [{{name: c, image: i}}]}}\n---\n",
        uid(digit)
    )
}

pub(super) fn write(node: &TestNode, pods: &[(u8, &str)]) {
    // An empty list is no empty file.
    let all: String = pods.iter().map(|(digit, it)| pod(*digit, it)).collect();
    node.write_file("pods.yaml", &format!("{{apiVersion: v1, kind: List, items: []}}\n---\n{all}"));
}

/// The cgroups that kubelet makes for pods of the class `burstable`.
pub(super) fn kubelets(sandbox: &Sandbox) -> [ChildCgroup; 2] {
    ["kubepods", "kubepods/burstable"].map(|it| ChildCgroup::new(sandbox, it))
}

pub(super) fn cgroup_of(sandbox: &Sandbox, digit: u8) -> ChildCgroup {
    ChildCgroup::new(sandbox, &format!("kubepods/burstable/pod{}", uid(digit)))
}

fn becomes_untranslated() -> bool {
    eventually(TIMEOUT, || Transport::ALL.into_iter().all(|it| request(it, FRONTEND).is_err()))
}

#[test]
fn sockets_of_a_pod_are_left_alone_as_its_annotation_says() {
    let Some(mut node) = node_or_skip() else { return };
    write(&node, &[(1, "off"), (2, "tcp-only"), (3, "on")]);
    let _kubelets = kubelets(node.sandbox());
    let pods = [1, 2, 3].map(|it| cgroup_of(node.sandbox(), it));
    let container = ChildCgroup::new(node.sandbox(), &format!("kubepods/burstable/pod{}/c", uid(1)));
    node.start(&[FLAG]);
    assert_translated();
    // Whoever connected before keeps its endpoint.
    let stream = TcpStream::connect(FRONTEND).unwrap();
    for of_first in [&container, &pods[0]] {
        of_first.enter();
        assert_not_translated();
        assert_eq!(stream.peer_addr().unwrap(), FRONTEND);
        // A network namespace that the pod has made.
        let nested = NetNs::with_local_endpoints().unwrap();
        nested.run(assert_not_translated);
    }
    pods[1].enter();
    assert_eq!(request(Transport::Tcp, FRONTEND).unwrap(), "web-1");
    for transport in [Transport::Udp, Transport::UdpUnconnected] {
        request(transport, FRONTEND).unwrap_err();
    }
    pods[2].enter();
    assert_translated();
    // No packet path is on.
    node.wait_until_logged(&[
        "reach no Service: the packet path does not serve",
        "default/pod-1, default/pod-2",
    ]);
    let report = run(node.cli("check").args(["--packets=off", FLAG])).stdout;
    assert!(report.contains("sockets that pods leave to packets reach no Service"), "{report}");
    // A change takes effect at once, and so does the end of the pod.
    write(&node, &[(1, "on"), (2, "off")]);
    pods[1].enter();
    assert!(becomes_untranslated());
    pods[0].enter();
    assert_translated();
    write(&node, &[]);
    pods[1].enter();
    assert!(eventually(TIMEOUT, || request(Transport::Tcp, FRONTEND).is_ok()));
    assert_translated();
    leave(&node);
}

#[test]
fn the_cgroup_of_a_pod_may_be_created_later() {
    let Some(mut node) = node_or_skip() else { return };
    let uids = 1..=5;
    write(&node, &uids.clone().map(|it| (it, "off")).collect::<Vec<_>>());
    node.start(&[FLAG]);
    let (begin, mut waited) = (Instant::now(), Duration::ZERO);
    let _kubelets = kubelets(node.sandbox());
    for digit in uids {
        let pod = cgroup_of(node.sandbox(), digit);
        let created = Instant::now();
        pod.enter();
        assert!(becomes_untranslated(), "{}", node.log());
        waited += created.elapsed();
        leave(&node);
        assert_translated();
    }
    println!("excluded after {:?} on average", waited / 5);
    // Cgroups are looked for every five seconds, too.
    assert!(begin.elapsed() < scaled(Duration::from_secs(10)), "they are found by chance only");
}

#[test]
fn a_restart_keeps_what_pods_leave_to_packets_and_drops_what_is_stale() {
    let Some(mut node) = node_or_skip() else { return };
    write(&node, &[(1, "off"), (2, "off")]);
    let _kubelets = kubelets(node.sandbox());
    let pods = [1, 2].map(|it| cgroup_of(node.sandbox(), it));
    node.start(&[FLAG]);
    pods[0].enter();
    assert_not_translated();
    node.kill();
    assert_not_translated();
    write(&node, &[(1, "off")]);
    let command = node.command(Build::Product).arg(FLAG);
    node.start_inactive(&command);
    // At no moment, whichever instance's programs run.
    while !node.log().contains(APPLIED) {
        assert_not_translated();
    }
    assert_not_translated();
    pods[1].enter();
    assert_translated();
    // A start without the flag honors no annotation.
    node.kill();
    node.start(&[]);
    pods[0].enter();
    assert_translated();
    leave(&node);
}

#[test]
fn a_brain_hands_the_annotations_out() {
    let Some(node) = node_or_skip() else { return };
    write(&node, &[(1, "off")]);
    let _kubelets = kubelets(node.sandbox());
    let pods = [1, 2].map(|it| cgroup_of(node.sandbox(), it));
    let binary = Build::Product.binary();
    let brain = AgentCommand::brain(&binary, node.sandbox(), &node.manifests(), NODE).arg(FLAG);
    let _brain = brain.start(node.sandbox()).unwrap();
    let agent = AgentCommand::agent(&binary, node.sandbox(), NODE).arg(FLAG);
    let mut agent = agent.start(node.sandbox()).unwrap();
    agent.wait_until_applied(TIMEOUT).unwrap();
    assert_translated();
    pods[0].enter();
    assert_not_translated();
    write(&node, &[(2, "off")]);
    pods[1].enter();
    assert!(becomes_untranslated(), "{}", agent.log());
    pods[0].enter();
    assert_translated();
    leave(&node);
}
