//! `support-bundle`: complete with and without a running process, with pseudonyms, and never half a file.

use std::{
    collections::BTreeMap,
    fs,
    io::Read as _,
    os::unix::fs::PermissionsExt as _,
    path::Path,
    process::{Command, Stdio},
};

use flate2::read::GzDecoder;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use serde_json::Value;
use tar::Archive;
use tests::{
    AgentCommand, Build, NODE, Service, TIMEOUT, TestNode, agent::spawn_without_capabilities,
    assert_contains, manifest, run, status_socket, web,
};

/// The files of an archive, without the folder that contains them.
fn unpack(archive: &[u8]) -> BTreeMap<String, String> {
    let mut archive = Archive::new(GzDecoder::new(archive));
    let file = |mut it: tar::Entry<'_, GzDecoder<&[u8]>>| {
        let path = it.path().unwrap().strip_prefix("kube-proxy-ebpf-support").unwrap().display().to_string();
        let mut text = String::new();
        it.read_to_string(&mut text).unwrap();
        (path, text)
    };
    archive.entries().unwrap().map(|it| file(it.unwrap())).collect()
}

fn command(node: &TestNode, arguments: &[&str]) -> Command {
    let mut command = node.cli("support-bundle");
    command.arg("--packets=off").args(arguments);
    command
}

/// What it writes to a file.
fn bundle(node: &TestNode, arguments: &[&str]) -> BTreeMap<String, String> {
    let file = node.sandbox().files().join("bundle.tar.gz");
    assert_eq!(run(command(node, arguments).arg(&file)).success(), "");
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600, "it may contain secrets");
    let files = unpack(&fs::read(&file).unwrap());
    fs::remove_file(file).unwrap();
    files
}

#[test]
fn a_bundle_has_what_can_be_read_with_and_without_a_process() {
    let Some(mut node) = TestNode::running_or_skip([], &[web([1, 2])], &[]) else { return };
    node.wait_until_ready();
    let running = bundle(&node, &[]);
    for (file, text) in [
        ("README.txt", "hooks.txt"),
        ("check.txt", "0 broken"),
        ("status.txt", "default/web"),
        ("status.json", "\"endpoint\":\"10.244.1.1:8080\""),
        ("dump.txt", "10.96.0.10:80/TCP"),
        ("hooks.txt", "connect6      ours (id "),
        ("host.txt", "KUBE_PROXY_EBPF_STATUS_SOCKET="),
        ("host.txt", "/links/connect4"),
        ("process/status.json", "\"healthy\":true"),
        ("process/state.json", "10.244.1.2"),
        ("process/metrics.txt", "\nkube_proxy_ebpf_services 1"),
        ("process/config.txt", "--node-name"),
        ("process/log.txt", "programs attached"),
    ] {
        assert!(running[file].contains(text), "{text} is not in {file}:\n{}", running[file]);
    }
    assert!(!running.values().any(|it| it.starts_with("cannot be read")), "{}", running["README.txt"]);

    // In a pod, with the capabilities and the seccomp profile of the manifests.
    let file = node.sandbox().files().join("bundle.tar.gz");
    let command = AgentCommand::new(&Build::Product.binary()).arg("support-bundle");
    let mut ended = command.arg(&file).kernel(node.sandbox()).start(node.sandbox()).unwrap();
    assert!(ended.wait(TIMEOUT).unwrap().success(), "{}", ended.log());
    assert_eq!(unpack(&fs::read(&file).unwrap())["dump.txt"], running["dump.txt"]);
    fs::remove_file(file).unwrap();

    node.kill();
    let without = bundle(&node, &[]);
    assert!(without.keys().eq(running.keys()));
    assert_eq!(without["dump.txt"], running["dump.txt"], "the kernel's part is there");
    let socket = status_socket(node.sandbox()).display().to_string();
    for (file, text) in without.iter().filter(|(it, _)| it.starts_with("process/")) {
        assert!(text.starts_with("cannot be read: ") && text.contains(&socket), "{file}: {text}");
    }
    assert!(without["README.txt"].contains("(cannot be read)"), "{}", without["README.txt"]);
}

#[test]
fn pseudonyms_hide_addresses_and_names_and_are_the_same_in_all_files() {
    let billing = Service::new("billing", &[[10, 96, 0, 77].into()]).port("", "TCP", 80, 8080);
    let services = [web([1, 2]), billing.endpoint("secret-pod", &[[10, 244, 7, 7].into()])];
    let Some(mut node) = TestNode::running_or_skip([], &services, &[]) else { return };
    node.wait_until_ready();
    node.write_file("bad.yaml", &manifest::invalid_service("finance", "unserved"));
    node.wait_until_logged(&["finance/unserved"]);
    let files = bundle(&node, &["--anonymize"]);
    for secret in ["10.96.0.", "10.244.", "fd00:10", "billing", "secret-pod", "finance", "unserved"] {
        for (file, text) in &files {
            assert!(!text.contains(secret), "{secret} is in {file}:\n{text}");
        }
    }
    let status: Value = serde_json::from_str(&files["process/status.json"]).unwrap();
    assert!(status["node"].as_str().unwrap().starts_with("node-") && status["node"] != NODE);

    // The cluster IP of a Service has one pseudonym, in what the process serves and in the kernel.
    let state: Value = serde_json::from_str(&files["process/state.json"]).unwrap();
    let addresses =
        state["items"].as_array().unwrap().iter().map(|it| &it["service"]["ips"]["clusterIps"]["v4"][0]);
    let addresses: Vec<_> = addresses.map(|it| it.as_str().unwrap()).collect();
    assert_eq!(addresses.len(), 2);
    assert_ne!(addresses[0], addresses[1]);
    for it in addresses {
        let frontend = format!("{it}:80/TCP");
        assert!(
            files["dump.txt"].contains(&frontend) && files["status.txt"].contains(&frontend),
            "{frontend}"
        );
    }
}

#[test]
fn a_bundle_can_go_to_standard_output() {
    let Some(node) = TestNode::or_skip() else { return };
    let output = command(&node, &["-"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(unpack(&output.stdout)["dump.txt"].starts_with("cannot be read: "), "nothing is programmed");
}

/// The error of a bundle that cannot be written to this file.
fn error(node: &TestNode, file: &Path) -> String {
    run(command(node, &[]).arg(file)).exits_with(1)
}

fn files_in(folder: &Path) -> Vec<String> {
    fs::read_dir(folder).unwrap().map(|it| it.unwrap().file_name().display().to_string()).collect()
}

#[test]
fn a_file_that_cannot_be_written_is_reported_and_nothing_is_left() {
    let Some(node) = TestNode::or_skip() else { return };
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let file = folder.join("bundle.tar.gz");
    fs::write(&file, "mine").unwrap();
    let text = error(&node, &file);
    assert_contains(&text, &["bundle.tar.gz exists: remove it, or name another file"]);
    assert_eq!(fs::read_to_string(&file).unwrap(), "mine");
    fs::remove_file(&file).unwrap();

    assert_contains(&error(&node, &folder.join("missing/bundle.tar.gz")), &["missing is not a folder"]);
    assert_contains(&error(&node, Path::new("/")), &["name a file"]);

    // A full disk.
    let disk = folder.join("disk");
    fs::create_dir(&disk).unwrap();
    mount(Some("tmpfs"), &disk, Some("tmpfs"), MsFlags::empty(), Some("size=4k")).unwrap();
    fs::write(disk.join("full"), [0; 4096]).unwrap();
    let (text, left) = (error(&node, &disk.join("bundle.tar.gz")), files_in(&disk));
    umount2(&disk, MntFlags::MNT_DETACH).unwrap();
    assert_contains(&text, &["cannot write", "No space left on device"]);
    assert_eq!(left, ["full"]);

    // Without the right to write there, nor to read anything in the kernel.
    fs::set_permissions(&disk, fs::Permissions::from_mode(0o555)).unwrap();
    let mut unprivileged = command(&node, &[]);
    unprivileged.arg(disk.join("bundle.tar.gz")).stderr(Stdio::piped());
    let output = spawn_without_capabilities(&mut unprivileged).unwrap().wait_with_output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert_contains(&text, &["cannot write", "Permission denied"]);
    assert_eq!(files_in(&disk), [""; 0]);
}
