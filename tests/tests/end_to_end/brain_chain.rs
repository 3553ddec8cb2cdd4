//! Brains that get the cluster state from one another decide as the first one does.

use std::{
    path::Path,
    process::{Command, Stdio},
};

use build_tools::command::KilledOnDrop;
use tests::{Build, TIMEOUT, eventually};

const MANIFESTS: &str = include_str!("brain_chain/cluster.yaml");

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(Build::Product.binary());
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    command
}

fn brain(source: &str, socket: &Path, flags: &[&str]) -> KilledOnDrop {
    let listen = format!("unix://{}", socket.display());
    let arguments =
        ["brain", "--source", source, "--node-name", "n1", "--serve-any-node", "--listen", &listen];
    KilledOnDrop(command(&arguments).args(flags).stdout(Stdio::null()).spawn().expect("the binary starts"))
}

/// What `print --once` prints for a node, without the revision.
fn print(flag: &str, value: &str, node: &str) -> Option<String> {
    let arguments = ["print", "--once", "--output", "json", flag, value, "--node-name", node];
    // `print` waits for a brain that does not respond.
    let mut child = command(&arguments).spawn().ok()?;
    if !eventually(TIMEOUT, || child.try_wait().is_ok_and(|it| it.is_some())) {
        let _ = child.kill();
    }
    let output = child.wait_with_output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    text.split_once("\"items\":").map(|(_, items)| items.to_owned())
}

#[test]
fn chained_brains_decide_alike() {
    let folder = tempfile::tempdir().expect("a folder can be created");
    let manifest = folder.path().join("cluster.yaml");
    let write = |policy: &str| {
        std::fs::write(&manifest, MANIFESTS.replace("POLICY", policy)).expect("the folder is writable");
    };
    write("Cluster");
    let sockets = ["a", "b", "c"].map(|it| folder.path().join(it));
    let file = format!("file:{}", manifest.display());
    let api = |socket: &Path| format!("api:unix://{}", socket.display());
    let target = |socket: &Path| format!("unix://{}", socket.display());
    let mut brains = vec![brain(&file, &sockets[0], &[])];
    for pair in sockets.windows(2) {
        brains.push(brain(&api(&pair[0]), &pair[1], &[]));
    }
    for policy in ["Cluster", "Local"] {
        write(policy);
        for node in ["n1", "n2", "n3"] {
            let expected = print("--source", &file, node).expect("a state");
            let is_equal = |flag: &str, value: &str| print(flag, value, node).as_ref() == Some(&expected);
            assert!(eventually(TIMEOUT, || is_equal("--target", &target(&sockets[2]))), "{node}, {policy}");
            assert!(is_equal("--source", &api(&sockets[2])), "{node}, {policy}");
        }
    }
    // Without the first one the others keep its last state.
    let expected = print("--source", &file, "n2").expect("a state");
    drop(brains.remove(0));
    assert_eq!(print("--target", &target(&sockets[2]), "n2"), Some(expected));
}

#[test]
fn a_chain_of_brains_hands_out_the_labels_that_each_of_them_requests() {
    let folder = tempfile::tempdir().expect("a folder can be created");
    let manifest = folder.path().join("cluster.yaml");
    let write = |app: &str| {
        let metadata = format!(
            "{{name: web, namespace: ns, labels: {{app: {app}, tier: x}}, annotations: {{example.com/a: b, other: c}}}}"
        );
        let text = MANIFESTS.replace("POLICY", "Cluster").replace("{name: web, namespace: ns}", &metadata);
        std::fs::write(&manifest, text).expect("the folder is writable");
    };
    write("one");
    let sockets = ["a", "b", "c"].map(|it| folder.path().join(it));
    let [a, b, c] = sockets.each_ref().map(|it| format!("unix://{}", it.display()));
    let labels = ["--with-service-labels", "app,none", "--with-service-annotations", "example.com/*"];
    let _brains = [
        brain(&format!("file:{}", manifest.display()), &sockets[0], &labels),
        brain(&format!("api:{a}"), &sockets[1], &["--with-service-labels", "*"]),
        brain(&format!("api:{b}"), &sockets[2], &[]),
    ];
    for app in ["one", "two"] {
        write(app);
        let labels = format!("\"labels\":{{\"app\":\"{app}\"}}");
        let has_labels = |it: &str| print("--target", it, "n1").is_some_and(|it| it.contains(&labels));
        assert!(eventually(TIMEOUT, || has_labels(&b)), "{app}");
        let first = print("--target", &a, "n1").expect("a state");
        assert!(first.contains(&format!("{labels},\"annotations\":{{\"example.com/a\":\"b\"}}")), "{first}");
        let second = print("--target", &b, "n1").expect("a state");
        assert!(!second.contains("annotations"), "{second}");
        let third = print("--target", &c, "n1").expect("a state");
        assert!(!third.contains("labels") && !third.contains("annotations"), "{third}");
    }
}
