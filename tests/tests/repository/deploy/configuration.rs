//! The flags, settings and ports of the pods.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::Write as _,
    net::SocketAddr,
    process::Command,
};

use serde_json::Value;
use tempfile::NamedTempFile;
use tests::{Build, deploy, run};

use super::{
    all_containers, containers, is_initializing, named, pod, rendered, serving, serving_containers, strings,
};

fn help(command: &str) -> String {
    run(Command::new(Build::Product.binary()).args([command, "--help"])).success()
}

#[test]
fn the_binary_accepts_every_flag_and_variable_of_the_manifests() {
    // `check` is run in the same container.
    let check = help("check");
    for (folder, objects) in &rendered() {
        for container in all_containers(objects) {
            let arguments = strings(&container["args"]);
            let help = help(arguments[0]);
            let words: BTreeSet<_> =
                help.split(|it: char| !(it.is_ascii_alphanumeric() || it == '-' || it == '_')).collect();
            for argument in &arguments[1..] {
                let flag = argument.split('=').next().unwrap();
                assert!(words.contains(flag), "{folder}: `{}` has no {flag}", arguments[0]);
            }
            let variables = container["env"].as_array().into_iter().flatten();
            let variables: Vec<_> = variables.map(|it| it["name"].as_str().unwrap()).collect();
            for variable in &variables {
                let used = arguments.iter().any(|it| it.contains(&format!("$({variable})")));
                let is_known = words.contains(variable) || check.contains(variable);
                assert!(used || is_known, "{folder}: `{}` has no {variable}", arguments[0]);
            }
            // Kubernetes does not replace a reference to an undefined variable.
            for argument in arguments.iter().filter_map(|it| it.split_once("$(")) {
                let name = argument.1.trim_end_matches(')');
                assert!(variables.contains(&name), "{folder}: {name} is not defined");
            }
        }
    }
}

/// A file with kubeadm's configuration, changed to serve health pages on loopback only; removed when dropped.
fn kubeadm_config() -> NamedTempFile {
    let file = deploy::folder().join("../proxy-userspace/src/cli/kubeadm-config.yaml");
    let text = fs::read_to_string(file).unwrap();
    let changed = text.replace("healthzBindAddress: \"\"", "healthzBindAddress: 127.0.0.1:10256");
    assert_ne!(text, changed);
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(changed.as_bytes()).unwrap();
    file
}

#[test]
fn commands_run_by_kubectl_exec_find_the_configuration() {
    let (check, status) = (help("check"), help("status"));
    for (folder, objects) in &rendered() {
        for container in containers(pod(objects)) {
            let arguments = strings(&container["args"]);
            if !matches!(arguments[0], "run" | "agent") {
                continue;
            }
            // A command of `kubectl exec` has the environment of the container, but not its arguments.
            for argument in &arguments[1..] {
                let flag = format!("{} ", argument.split('=').next().unwrap());
                assert!(!check.contains(&flag) && !status.contains(&flag), "{folder}: {argument}");
            }
            assert!(named(&container["env"], "KUBE_PROXY_EBPF_CONFIG").is_some(), "{folder}");
        }
    }
}

#[test]
fn the_init_container_has_the_configuration_of_the_proxy() {
    for (folder, objects) in &serving() {
        let containers = containers(pod(objects));
        let (init, others): (Vec<_>, Vec<_>) = containers.into_iter().partition(|it| is_initializing(it));
        let [init] = init[..] else { panic!("{folder}: {init:?}") };
        let init = settings(init);
        assert_eq!(init["--proc-sys-net"], "/host/proc/sys/net", "{folder}");
        let others = others.into_iter().map(settings).filter(|it| it.contains_key("--pin-dir"));
        for other in others.inspect(|it| assert_eq!(it["--proc-sys-net"], "/proc/sys/net", "{folder}")) {
            let of = |all: &BTreeMap<String, String>| {
                let mut all = all.clone();
                all.retain(|flag, _| flag.starts_with("--conntrack-"));
                all
            };
            assert_eq!(of(&init), of(&other), "{folder}");
            assert_eq!(of(&init).len(), 7, "{folder}");
        }
    }
}

/// The settings that result from a container's arguments and variables, as `--print-config` prints them.
pub(super) fn settings(container: &Value) -> BTreeMap<String, String> {
    // The files that the pod mounts from its ConfigMap.
    let kubeadm = kubeadm_config();
    let here = |it: &str| {
        it.replace("/etc/kube-proxy-ebpf/", &format!("{}/", deploy::folder().join("base").display()))
            .replace("/var/lib/kube-proxy/config.conf", &kubeadm.path().display().to_string())
            .replace("$(NODE_NAME)", "n1")
            .replace("$(KUBE_API_SERVER)", "https://10.0.0.10:6443")
    };
    let variables = container["env"].as_array().into_iter().flatten();
    let output = run(Command::new(Build::Product.binary())
        .args(strings(&container["args"]).into_iter().map(here))
        .arg("--print-config")
        .envs(variables.filter_map(|it| Some((it["name"].as_str()?, here(it["value"].as_str()?))))));
    assert!(!output.stderr.contains("unknown"), "{container}: {}", output.stderr);
    let lines = output.success();
    let setting = |line: &str| {
        let mut words = line.split_whitespace();
        Some((words.next()?.to_owned(), words.next()?.to_owned()))
    };
    lines.lines().filter_map(setting).collect()
}

#[test]
fn the_probes_have_an_address_of_their_own_on_loopback_and_no_port_is_used_twice() {
    for (folder, objects) in &serving() {
        // All are on the host's network, and those of one pod share a folder for their sockets.
        let (mut ports, mut sockets) = (BTreeSet::new(), BTreeSet::new());
        for container in serving_containers(objects) {
            let settings = settings(container);
            assert_eq!(settings["--node-name"], "n1", "{folder}");
            if settings.contains_key("--pin-dir") {
                assert_eq!(settings["--pin-dir"], "/host/sys/fs/bpf/kube-proxy-ebpf", "{folder}");
                assert_eq!(settings["--cgroup"], "/host/sys/fs/cgroup", "{folder}");
                assert_eq!(settings["--rcu-expedited"], "/host/sys/kernel/rcu_expedited", "{folder}");
            }
            let serves: SocketAddr = settings["--probe-bind-address"].parse().unwrap();
            assert!(serves.ip().is_loopback(), "{folder}");
            let others = ["--healthz-bind-address", "--metrics-bind-address"].map(|it| &settings[it]);
            let others = others.into_iter().filter(|it| *it != "0").map(|it| it.parse().unwrap());
            for it in others.chain([serves]) {
                assert!(ports.insert(it.port()), "{folder}: {it} is used twice");
            }
            let socket = &settings["--status-socket"];
            assert!(sockets.insert(socket.clone()), "{folder}: {socket}");
            let mounts = container["volumeMounts"].as_array().unwrap();
            let switch = mounts.iter().any(|it| it["mountPath"] == "/host/sys/kernel/rcu_expedited");
            assert_eq!(switch, settings.contains_key("--pin-dir"), "{folder}: {mounts:?}");
            assert!(mounts.iter().any(|it| it["mountPath"] == "/run/kube-proxy-ebpf"), "{folder}");
            assert!(socket.starts_with("/run/kube-proxy-ebpf/"), "{folder}: {socket}");
            for (probe, path) in
                [("startupProbe", "/livez"), ("livenessProbe", "/livez"), ("readinessProbe", "/readyz")]
            {
                let get = &container[probe]["httpGet"];
                assert_eq!(get["path"], path, "{folder}: {probe}");
                // By default the kubelet probes the pod's address, which is the node's.
                assert_eq!(get["host"], serves.ip().to_string(), "{folder}: {probe}");
                assert_eq!(get["port"], serves.port(), "{folder}: {probe}");
            }
        }
    }
}
