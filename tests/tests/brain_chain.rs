//! Brains that follow each other decide as the first one would.

use std::{
    ffi::OsString,
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use tests::{Build, eventually};

const LIMIT: Duration = Duration::from_secs(20);

const MANIFESTS: &str = "
apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: Node, metadata: {name: n1, labels: {topology.kubernetes.io/zone: a}}}
- {apiVersion: v1, kind: Node, metadata: {name: n2, labels: {topology.kubernetes.io/zone: b}}}
- apiVersion: v1
  kind: Service
  metadata: {name: web, namespace: ns}
  spec: {clusterIP: 10.96.0.1, internalTrafficPolicy: POLICY, ports: [{port: 80}]}
- apiVersion: discovery.k8s.io/v1
  kind: EndpointSlice
  metadata: {name: web-1, namespace: ns, labels: {kubernetes.io/service-name: web}}
  addressType: IPv4
  ports: [{port: 8080}]
  endpoints:
  - {addresses: [10.1.0.1], nodeName: n1, hints: {forZones: [{name: a}]}}
  - {addresses: [10.1.0.2], nodeName: n2, hints: {forZones: [{name: b}]}}
";

/// A process that does not outlive its test.
struct Brain(Child);

impl Drop for Brain {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn command(arguments: &[OsString]) -> Command {
    let mut command = Command::new(Build::Product.binary());
    command.args(arguments).stdin(Stdio::null()).stderr(Stdio::null());
    command
}

fn brain(source: &str, socket: &Path) -> Brain {
    let listen = format!("unix://{}", socket.display());
    let arguments =
        ["brain", "--source", source, "--node-name", "n1", "--serve-any-node", "--listen", &listen];
    Brain(command(&arguments.map(OsString::from)).stdout(Stdio::null()).spawn().expect("the binary starts"))
}

/// What `print --once` says of a node, but for the revision.
fn printed(flag: &str, value: &str, node: &str) -> Option<String> {
    let arguments = ["print", "--once", "--output", "json", flag, value, "--node-name", node];
    // A brain that does not answer is waited for.
    let mut child = command(&arguments.map(OsString::from)).stdout(Stdio::piped()).spawn().ok()?;
    let ended = eventually(LIMIT, || child.try_wait().is_ok_and(|it| it.is_some()));
    if !ended {
        let _ = child.kill();
    }
    let output = child.wait_with_output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    text.split_once("\"items\":").map(|(_, items)| items.to_owned())
}

#[test]
fn brains_that_follow_each_other_decide_alike() {
    let folder = tempfile::tempdir().expect("a folder can be made");
    let manifest = folder.path().join("cluster.yaml");
    let write = |policy: &str| {
        std::fs::write(&manifest, MANIFESTS.replace("POLICY", policy)).expect("it can be written");
    };
    write("Cluster");
    let sockets = ["a", "b", "c"].map(|it| folder.path().join(it));
    let file = format!("file:{}", manifest.display());
    let api = |socket: &Path| format!("api:unix://{}", socket.display());
    let target = |socket: &Path| format!("unix://{}", socket.display());
    let mut brains = vec![brain(&file, &sockets[0])];
    for pair in sockets.windows(2) {
        brains.push(brain(&api(&pair[0]), &pair[1]));
    }
    for policy in ["Cluster", "Local"] {
        write(policy);
        for node in ["n1", "n2", "n3"] {
            let expected = printed("--source", &file, node).expect("a state");
            let is_so = |flag: &str, value: &str| printed(flag, value, node).as_ref() == Some(&expected);
            assert!(eventually(LIMIT, || is_so("--target", &target(&sockets[2]))), "{node}, {policy}");
            assert!(is_so("--source", &api(&sockets[2])), "{node}, {policy}");
        }
    }
    // The first one is gone: the others keep its last word.
    let expected = printed("--source", &file, "n2").expect("a state");
    drop(brains.remove(0));
    assert_eq!(printed("--target", &target(&sockets[2]), "n2"), Some(expected));
}
