//! The manifests in `deploy/` are valid for Kubernetes, the binary, and the kernel.

mod outside;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::Write as _,
    net::SocketAddr,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::Path,
    process::{Command, Stdio},
};

use api_server::{ApiServer, Settings, WatchList};
use build_tools::command::workspace;
use k8s_openapi::api::{
    apps::v1::{DaemonSet, Deployment},
    core::v1::{ConfigMap, ServiceAccount},
    policy::v1::PodDisruptionBudget,
    rbac::v1::{ClusterRole, ClusterRoleBinding},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use rustix::thread::CapabilitySet;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tempfile::NamedTempFile;
use tests::{
    Build, TIMEOUT,
    agent::run,
    deploy::{self, Renderer},
    eventually,
};

/// Every kustomization with a proxy; the first is the base.
const SERVING: [&str; 9] = [
    ".",
    "overlays/kubeadm",
    "overlays/kubeadm-split",
    "overlays/kubeadm-central",
    "overlays/kind",
    "overlays/split",
    CENTRAL,
    "overlays/backend/iptables",
    "overlays/backend/ipvs",
];
const CENTRAL: &str = "overlays/central";
const CLEANUP: &str = "cleanup";
const PREFLIGHT: &str = "preflight";
/// Those without a proxy.
const TOOLS: [&str; 2] = [CLEANUP, PREFLIGHT];

/// The objects of each kustomization; `None` without a renderer: the test is skipped.
fn rendered() -> Option<Vec<(&'static str, Vec<Value>)>> {
    let renderer = Renderer::or_skip()?;
    Some(SERVING.into_iter().chain(TOOLS).map(|it| (it, renderer.render(it).unwrap())).collect())
}

fn one<'a>(objects: &'a [Value], kind: &str) -> &'a Value {
    let mut found = objects.iter().filter(|it| it["kind"] == kind);
    let one = found.next().unwrap_or_else(|| panic!("there is no {kind}"));
    assert!(found.next().is_none(), "there is more than one {kind}");
    one
}

/// The pod of the DaemonSet.
fn pod(objects: &[Value]) -> &Value {
    &one(objects, "DaemonSet")["spec"]["template"]["spec"]
}

/// The pods of the DaemonSet and of the Deployment, if there is one.
fn pods(objects: &[Value]) -> Vec<&Value> {
    let with_pods = objects.iter().filter(|it| it["kind"] == "DaemonSet" || it["kind"] == "Deployment");
    with_pods.map(|it| &it["spec"]["template"]["spec"]).collect()
}

/// Whether a container ends before the others start.
fn is_initializing(container: &Value) -> bool {
    strings(&container["args"]).contains(&"--init-only")
}

/// Every container of a pod that runs our image, init containers included.
fn containers(pod: &Value) -> Vec<&Value> {
    let all = ["initContainers", "containers"].into_iter().filter_map(|it| pod[it].as_array()).flatten();
    all.filter(|it| it["image"].as_str().unwrap().contains(deploy::IMAGE)).collect()
}

/// The same of all pods.
fn all_containers(objects: &[Value]) -> Vec<&Value> {
    pods(objects).into_iter().flat_map(containers).collect()
}

fn strings(list: &Value) -> Vec<&str> {
    list.as_array().into_iter().flatten().map(|it| it.as_str().unwrap()).collect()
}

/// Every image of ours in a kustomization.
fn images(renderer: &Renderer, folder: &Path) -> Vec<String> {
    let objects = renderer.render(folder).unwrap();
    all_containers(&objects).into_iter().map(|it| it["image"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn kustomizations_of_the_install_page_have_a_pullable_image() {
    let Some(renderer) = Renderer::or_skip() else { return };
    let text = fs::read_to_string(workspace().join("docs/install.md")).unwrap();
    let top = tempfile::tempdir().unwrap();
    let top = top.path();
    symlink(deploy::folder(), top.join("deploy")).unwrap();
    // Each example begins with the name of its file.
    for example in text.split("```yaml\n").skip(1) {
        let lines = example.lines().take_while(|it| it.trim() != "```");
        let example: Vec<_> = lines.map(|it| it.strip_prefix("   ").unwrap_or(it)).collect();
        let path = top.join(example[0].strip_prefix("# ").unwrap());
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, example.join("\n")).unwrap();
    }
    let applied = text.split(" -k ").skip(1).map(|it| it.split([' ', '`', '\n']).next().unwrap());
    let applied: BTreeSet<_> = applied.filter(|it| !it.is_empty()).collect();
    let with_pods = ["deploy/overlays/kind", "mine", "mine-backend", "mine-cleanup", "mine-preflight"];
    assert_eq!(applied, with_pods.into_iter().chain(["deploy/observability"]).collect());
    for it in with_pods {
        for image in images(&renderer, &top.join(it)) {
            let name = image.split_once('/').map(|(_, name)| name).unwrap_or_default();
            assert!(name.starts_with("kube-proxy-ebpf:"), "{it}: {image}");
        }
    }
    // The alternative resources that the first one names.
    let mine = top.join("mine/kustomization.yaml");
    let first = fs::read_to_string(&mine).unwrap();
    for other in ["kubeadm", "split", "central", "kubeadm-split", "kubeadm-central"]
        .map(|it| format!("../deploy/overlays/{it}"))
    {
        assert!(first.contains(&other), "{first}");
        fs::write(&mine, first.replacen("../deploy #", &format!("{other} #"), 1)).unwrap();
        let image = format!("registry.example.com/kube-proxy-ebpf:{}", env!("CARGO_PKG_VERSION"));
        let images = images(&renderer, &top.join("mine"));
        assert!(images.iter().all(|it| *it == image), "{other}: {images:?}");
    }
}

/// `kubectl exec` and `kubectl logs` find the container, the node needs no other image, and `kubectl describe` has the last
/// lines of a container that failed.
#[test]
fn every_pod_names_its_container_and_needs_one_image() {
    let Some(rendered) = rendered() else { return };
    for (folder, objects) in rendered {
        for it in objects.iter().filter(|it| it["kind"] == "DaemonSet" || it["kind"] == "Deployment") {
            let template = &it["spec"]["template"];
            let name = &template["metadata"]["annotations"]["kubectl.kubernetes.io/default-container"];
            let all = containers(&template["spec"]);
            assert!(all.iter().any(|it| it["name"] == *name), "{folder}: {name}");
            for it in all {
                let image = it["image"].as_str().unwrap();
                assert!(image.contains(deploy::IMAGE), "{folder}: {image}");
                assert_eq!(
                    it["terminationMessagePolicy"], "FallbackToLogsOnError",
                    "{folder}: {}",
                    it["name"]
                );
            }
        }
    }
}

#[test]
fn the_pod_that_cleans_up_runs_until_it_is_ended() {
    let Some(renderer) = Renderer::or_skip() else { return };
    let objects = renderer.render(CLEANUP).unwrap();
    let [done] = &pod(&objects)["containers"].as_array().unwrap()[..] else { panic!("one container") };
    let mut child = Command::new(Build::Product.binary())
        .args(strings(&done["args"]))
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let has_handler = || {
        let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
        let caught = status.lines().find_map(|it| it.strip_prefix("SigCgt:")).unwrap().trim();
        u64::from_str_radix(caught, 16).unwrap() & 1 << (Signal::SIGTERM as u32 - 1) != 0
    };
    assert!(eventually(TIMEOUT, has_handler));
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGTERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn with_the_component_for_kube_prometheus_the_pods_are_found_as_kube_proxys() {
    let Some(renderer) = Renderer::or_skip() else { return };
    let top = tempfile::tempdir().unwrap();
    symlink(deploy::folder(), top.path().join("deploy")).unwrap();
    let mine = top.path().join("mine");
    fs::create_dir(&mine).unwrap();
    for (overlay, metrics) in [
        ("deploy", "metrics"),
        ("deploy/overlays/kubeadm", "metrics"),
        ("deploy/overlays/split", "metrics-split"),
        ("deploy/overlays/central", "metrics-central"),
        ("deploy/overlays/kubeadm-split", "metrics-split"),
        ("deploy/overlays/kubeadm-central", "metrics-central"),
    ] {
        let text = format!(
            "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources: [../{overlay}]\n\
             components: [../deploy/components/{metrics}, ../deploy/components/kube-prometheus]\n"
        );
        fs::write(mine.join("kustomization.yaml"), text).unwrap();
        let objects = renderer.render(&mine).unwrap();
        let spec = &one(&objects, "DaemonSet")["spec"];
        assert_eq!(spec["template"]["metadata"]["labels"]["k8s-app"], "kube-proxy", "{overlay}");
        assert!(spec["selector"]["matchLabels"].get("k8s-app").is_none(), "{overlay}");
        let containers = containers(pod(&objects)).into_iter().filter(|it| !is_initializing(it));
        let settings = containers.map(settings);
        let addresses: Vec<_> = settings
            .filter(|it| it.contains_key("--pin-dir"))
            .map(|mut it| it.remove("--metrics-bind-address"))
            .collect();
        assert_eq!(addresses, [Some("0.0.0.0:10249".to_owned())], "{overlay}");
        assert_eq!(spec["minReadySeconds"], 10);
    }
}

#[test]
fn with_the_component_for_annotations_of_pods_they_are_honored_and_may_be_read() {
    let Some(renderer) = Renderer::or_skip() else { return };
    let top = tempfile::tempdir().unwrap();
    symlink(deploy::folder(), top.path().join("deploy")).unwrap();
    let mine = top.path().join("mine");
    fs::create_dir(&mine).unwrap();
    for (overlay, component) in [
        ("deploy", "pod-annotations"),
        ("deploy/overlays/kubeadm", "pod-annotations"),
        ("deploy/overlays/split", "pod-annotations-split"),
        ("deploy/overlays/central", "pod-annotations-central"),
    ] {
        let text = format!(
            "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources: [../{overlay}]\n\
             components: [../deploy/components/{component}]\n"
        );
        fs::write(mine.join("kustomization.yaml"), text).unwrap();
        let objects = renderer.render(&mine).unwrap();
        for it in all_containers(&objects).into_iter().filter(|it| !is_initializing(it)) {
            let settings = settings(it);
            assert_eq!(
                settings.get("--pod-annotations").map(String::as_str),
                Some("true"),
                "{overlay}: {it}"
            );
        }
        let role = one(&objects, "ClusterRole");
        let is_readable = |it: &&Value| strings(&it["resources"]) == ["pods"];
        let rule = role["rules"].as_array().unwrap().iter().find(is_readable).unwrap();
        assert_eq!(strings(&rule["verbs"]), ["list", "watch"], "{overlay}");
    }
}

/// The fields of an object that its Kubernetes type does not have.
fn unknown(object: &Value) -> Vec<String> {
    fn ignored<T: DeserializeOwned>(object: &Value) -> Vec<String> {
        let mut ignored = Vec::new();
        let read: Result<T, _> = serde_ignored::deserialize(object, |path| ignored.push(path.to_string()));
        read.unwrap_or_else(|error| panic!("{error}: {object}"));
        ignored
    }
    let unknown = match object["kind"].as_str().unwrap() {
        "DaemonSet" => ignored::<DaemonSet>(object),
        "Deployment" => ignored::<Deployment>(object),
        "PodDisruptionBudget" => ignored::<PodDisruptionBudget>(object),
        "ConfigMap" => ignored::<ConfigMap>(object),
        "ServiceAccount" => ignored::<ServiceAccount>(object),
        "ClusterRole" => ignored::<ClusterRole>(object),
        "ClusterRoleBinding" => ignored::<ClusterRoleBinding>(object),
        other => panic!("unexpected kind {other}"),
    };
    // Without the marks of optional fields.
    unknown.into_iter().map(|it| it.replace(".?", "")).collect()
}

#[test]
fn every_field_of_the_manifests_exists_in_kubernetes() {
    let Some(rendered) = rendered() else { return };
    for (folder, objects) in rendered {
        for object in &objects {
            assert_eq!(unknown(object), [""; 0], "{folder}");
            let namespaced = !object["kind"].as_str().unwrap().starts_with("Cluster");
            if namespaced {
                assert_eq!(object["metadata"]["namespace"], "kube-system", "{folder}: {object}");
            }
            let labels = &object["metadata"]["labels"];
            assert!(labels["app.kubernetes.io/name"].is_string(), "{folder}: {object}");
        }
    }
}

#[test]
fn an_unknown_field_is_reported() {
    let file = deploy::folder().join("base/daemonset.yaml");
    let text =
        fs::read_to_string(file).unwrap().replacen("readOnlyRootFilesystem", "readOnlyRootFileSystem", 1);
    let documents = deploy::documents(&text).unwrap();
    assert_eq!(
        unknown(&documents[0]),
        ["spec.template.spec.initContainers.0.securityContext.readOnlyRootFileSystem"]
    );
}

#[test]
fn the_pods_are_placed_as_kube_proxys() {
    let Some(rendered) = rendered() else { return };
    for (folder, objects) in &rendered {
        let pod = pod(objects);
        assert_eq!(pod["priorityClassName"], "system-node-critical", "{folder}");
        assert_eq!(pod["hostNetwork"], true, "{folder}");
        assert_eq!(pod["nodeSelector"]["kubernetes.io/os"], "linux", "{folder}");
        assert_eq!(pod["tolerations"], serde_json::json!([{ "operator": "Exists" }]), "{folder}");
        let images: Vec<_> =
            all_containers(objects).into_iter().map(|it| it["image"].as_str().unwrap()).collect();
        let host = if *folder == "overlays/kind" { "localhost/" } else { "" };
        let image = format!("{host}{}:{}", deploy::IMAGE, env!("CARGO_PKG_VERSION"));
        assert!(!images.is_empty() && images.iter().all(|it| **it == image), "{folder}: {images:?}");
    }
}

/// The DaemonSet of the proxy and that of the cleanup must never run on the same node.
#[test]
fn a_node_is_served_or_cleaned_up_never_both() {
    let Some(rendered) = rendered() else { return };
    let served = serde_json::json!([{ "key": "kube-proxy-ebpf", "operator": "NotIn", "values": ["off"] }]);
    for (folder, objects) in &rendered {
        let pod = pod(objects);
        if *folder == CLEANUP {
            assert_eq!(pod["nodeSelector"]["kube-proxy-ebpf"], "off");
        } else if *folder != PREFLIGHT {
            let affinity = &pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
            let terms = affinity["nodeSelectorTerms"].as_array().unwrap();
            assert_eq!(terms.len(), 1, "{folder}: any one of several terms would match");
            assert_eq!(terms[0]["matchExpressions"], served, "{folder}");
        }
    }
}

#[test]
fn the_pods_have_no_more_privileges_than_needed() {
    let Some(rendered) = rendered() else { return };
    for (folder, pod) in
        rendered.iter().flat_map(|(folder, all)| pods(all).into_iter().map(move |it| (folder, it)))
    {
        for it in ["hostPID", "hostIPC", "shareProcessNamespace"] {
            assert!(pod[it].is_null(), "{folder}: {it}");
        }
        for container in ["initContainers", "containers"].iter().filter_map(|it| pod[it].as_array()).flatten()
        {
            let security = &container["securityContext"];
            assert!(security["privileged"].is_null(), "{folder}");
            assert_eq!(security["allowPrivilegeEscalation"], false, "{folder}");
            assert_eq!(security["readOnlyRootFilesystem"], true, "{folder}");
            assert_eq!(strings(&security["capabilities"]["drop"]), ["ALL"], "{folder}");
            assert!(container["resources"]["requests"]["memory"].is_string(), "{folder}");
            assert!(container["resources"]["limits"]["cpu"].is_null(), "{folder}");
            // The programs must outlive the pod: nothing may remove them when it ends.
            assert!(container["lifecycle"].is_null(), "{folder}");
        }
        for volume in pod["volumes"].as_array().unwrap() {
            let path = &volume["hostPath"]["path"];
            // Backends' own are in `a_backend_has_the_rights_that_it_needs_and_no_account`.
            let is_backends = folder.starts_with("overlays/backend/") && path != "/proc/sys/net";
            if path.is_null() || path == "/sys/fs/bpf" || is_backends {
                continue;
            }
            // Only the container that sets it can write it, and ends before another one starts.
            let is_setting = path == "/proc/sys/net";
            assert!(is_setting || path == "/sys/fs/cgroup", "{folder}: {path}");
            let containers = containers(pod).into_iter().filter(|it| !is_setting || !is_initializing(it));
            let mounts = containers.flat_map(|it| it["volumeMounts"].as_array().into_iter().flatten());
            for mount in mounts.filter(|it| it["name"] == volume["name"]) {
                assert!(!is_setting && mount["readOnly"] == true, "{folder}: {mount}");
            }
        }
    }
}

/// Backends on the contract, beside a brain.
#[test]
fn a_backend_has_the_rights_that_it_needs_and_no_account() {
    let Some(renderer) = Renderer::or_skip() else { return };
    let compiler = fs::read_to_string(deploy::folder().join("Containerfile")).unwrap();
    let compiler = compiler.lines().find(|it| it.starts_with("FROM ")).unwrap();
    let admin = CapabilitySet::NET_ADMIN;
    let loads = ["/lib/modules", "/host/proc/sys/net"];
    let expected = [
        ("iptables", "backend", admin | CapabilitySet::NET_RAW, &["/run/xtables.lock"][..]),
        ("ipvs", "backend", admin, &[][..]),
        ("ipvs", "ipvs", admin | CapabilitySet::SYS_MODULE, &loads[..]),
    ];
    for (backend, name, capabilities, mounts) in expected {
        let objects = renderer.render(format!("overlays/backend/{backend}")).unwrap();
        let pod = pod(&objects);
        let all = || ["initContainers", "containers"].into_iter().flat_map(|it| pod[it].as_array().unwrap());
        let container = |name: &str| all().find(|it| it["name"] == name).unwrap();
        let it = container(name);
        assert_eq!(it["image"], format!("kube-proxy-{backend}:{}", env!("CARGO_PKG_VERSION")));
        assert_eq!(deploy::capabilities_of(it).unwrap(), capabilities, "{backend}: {name}");
        let account = "/var/run/secrets/kubernetes.io/serviceaccount";
        let mounted =
            it["volumeMounts"].as_array().unwrap().iter().map(|it| it["mountPath"].as_str().unwrap());
        let mut mounted: BTreeSet<_> = mounted.collect();
        assert!(mounted.remove(account), "{backend}: {name} has the token");
        assert_eq!(mounted.remove("/run/kube-proxy-ebpf"), name == "backend", "{backend}: {name}");
        assert_eq!(mounted, mounts.iter().copied().collect(), "{backend}: {name}");
        assert!(!pod["volumes"].to_string().contains("/sys/fs/"), "{backend}: it has no eBPF");

        let it = container("backend");
        let target = it["env"].as_array().unwrap().iter().find(|it| it["name"] == "KUBE_PROXY_EBPF_TARGET");
        let listen = format!("--listen={}", target.unwrap()["value"].as_str().unwrap());
        assert!(strings(&container("brain")["args"]).contains(&&*listen), "{backend}: {listen}");
        let get = &it["readinessProbe"]["httpGet"];
        assert_eq!((&get["path"], &get["port"]), (&"/healthz".into(), &it["ports"][0]["hostPort"]));

        let file = workspace().join(format!("backends/{backend}/Dockerfile"));
        let file = fs::read_to_string(file).unwrap();
        assert!(file.lines().any(|it| it == compiler), "{backend}: {compiler}");
        assert!(file.contains(&format!(" --tag kube-proxy-{backend}:{} ", env!("CARGO_PKG_VERSION"))));
    }
}

/// That it allows enough is shown by every other test: their proxies run under it.
#[test]
fn the_seccomp_profile_denies_what_the_proxy_never_calls() {
    let text = fs::read_to_string(deploy::folder().join("seccomp/kube-proxy-ebpf.json")).unwrap();
    let profile: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(profile["defaultAction"], "SCMP_ACT_ERRNO");
    assert!(profile["syscalls"].as_array().unwrap().iter().all(|it| it["action"] == "SCMP_ACT_ALLOW"));
    let allowed = deploy::allowed_calls().unwrap();
    assert!(allowed.is_sorted() && allowed.iter().any(|it| it == "bpf"), "{allowed:?}");
    for denied in [
        "add_key",
        "init_module",
        "io_uring_setup",
        "keyctl",
        "mount",
        "open_by_handle_at",
        "perf_event_open",
        "pivot_root",
        "process_vm_writev",
        "ptrace",
        "reboot",
        "unshare",
        "userfaultfd",
    ] {
        assert!(!allowed.iter().any(|it| it == denied), "{denied}");
    }
}

#[test]
fn containers_have_the_tested_capabilities() {
    let Some(rendered) = rendered() else { return };
    let tested = deploy::capabilities().unwrap();
    for (folder, objects) in &rendered {
        for container in all_containers(objects) {
            let has = deploy::capabilities_of(container).unwrap();
            if is_initializing(container) {
                assert_eq!(has, CapabilitySet::NET_ADMIN, "{folder}");
                continue;
            }
            match strings(&container["args"])[0] {
                "run" | "agent" | "check" => assert_eq!(has, tested, "{folder}"),
                "brain" | "wait" => assert!(has.is_empty(), "{folder}: it does not use the kernel"),
                "cleanup" => assert!(tested.contains(has), "{folder}"),
                other => panic!("{folder}: unexpected subcommand {other}"),
            }
        }
    }
}

fn help(command: &str) -> String {
    run(Command::new(Build::Product.binary()).args([command, "--help"])).success()
}

#[test]
fn the_binary_accepts_every_flag_and_variable_of_the_manifests() {
    let Some(rendered) = rendered() else { return };
    // `check` is run in the same container.
    let check = help("check");
    for (folder, objects) in &rendered {
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
    let Some(rendered) = rendered() else { return };
    let (check, status) = (help("check"), help("status"));
    for (folder, objects) in &rendered {
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
            assert!(
                container["env"].as_array().unwrap().iter().any(|it| it["name"] == "KUBE_PROXY_EBPF_CONFIG")
            );
        }
    }
}

#[test]
fn the_init_container_has_the_configuration_of_the_proxy() {
    let Some(rendered) = rendered() else { return };
    for (folder, objects) in rendered.iter().filter(|(folder, _)| !TOOLS.contains(folder)) {
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
fn settings(container: &Value) -> BTreeMap<String, String> {
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
    let Some(rendered) = rendered() else { return };
    for (folder, objects) in rendered.iter().filter(|(folder, _)| !TOOLS.contains(folder)) {
        // All are on the host's network, and those of one pod share a folder for their sockets.
        let (mut ports, mut sockets) = (BTreeSet::new(), BTreeSet::new());
        for container in all_containers(objects).into_iter().filter(|it| !is_initializing(it)) {
            let settings = settings(container);
            assert_eq!(settings["--node-name"], "n1", "{folder}");
            if settings.contains_key("--pin-dir") {
                assert_eq!(settings["--pin-dir"], "/host/sys/fs/bpf/kube-proxy-ebpf", "{folder}");
                assert_eq!(settings["--cgroup"], "/host/sys/fs/cgroup", "{folder}");
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

#[test]
fn the_brains_start_without_a_service_and_leave_a_drained_node() {
    let Some(renderer) = Renderer::or_skip() else { return };
    let objects = renderer.render(CENTRAL).unwrap();
    assert!(objects.iter().all(|it| it["kind"] != "Service"), "agents could not reach it before they serve");
    let deployment = &one(&objects, "Deployment")["spec"];
    let pod = &deployment["template"]["spec"];
    assert_eq!((&pod["hostNetwork"], &pod["dnsPolicy"]), (&true.into(), &"Default".into()));
    assert_eq!(pod["priorityClassName"], "system-cluster-critical");
    assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
    // Of two pods on a node the second one could not listen.
    assert_eq!(
        deployment["strategy"]["rollingUpdate"],
        serde_json::json!({ "maxSurge": 0, "maxUnavailable": 1 })
    );
    for toleration in pod["tolerations"].as_array().unwrap() {
        assert_eq!(toleration["effect"], "NoSchedule", "a pod leaves a node that is lost");
        assert!(toleration["key"] != Value::Null && toleration["key"] != "node.kubernetes.io/unschedulable");
    }
    // Everything that selects the brains selects them only.
    let labels = &deployment["template"]["metadata"]["labels"];
    let selector = &deployment["selector"];
    assert_eq!(one(&objects, "PodDisruptionBudget")["spec"]["selector"], *selector);
    let apart = &pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
    assert_eq!(apart[0]["labelSelector"], *selector);
    assert_eq!(pod["topologySpreadConstraints"][0]["labelSelector"], *selector);
    for (label, value) in selector["matchLabels"].as_object().unwrap() {
        assert_eq!(labels[label], *value);
        assert_ne!(one(&objects, "DaemonSet")["spec"]["template"]["metadata"]["labels"][label], *value);
    }
}

#[test]
fn only_brains_have_an_account_at_the_api_server() {
    let Some(renderer) = Renderer::or_skip() else { return };
    let objects = renderer.render(CENTRAL).unwrap();
    let account = |kind| &one(&objects, kind)["spec"]["template"]["spec"]["serviceAccountName"];
    let (agent, brain) = (account("DaemonSet"), account("Deployment"));
    let subjects = one(&objects, "ClusterRoleBinding")["subjects"].as_array().unwrap();
    assert!(subjects.len() == 1 && subjects[0]["name"] == *brain && agent != brain);
    let account =
        objects.iter().find(|it| it["kind"] == "ServiceAccount" && it["metadata"]["name"] == *agent);
    assert_eq!(account.unwrap()["automountServiceAccountToken"], false);
}

/// The names that the install page gives to Secrets, and the component for cert-manager.
#[test]
fn brains_and_agents_trust_the_certificates_that_are_written_for_them() {
    let Some(renderer) = Renderer::or_skip() else { return };
    let top = tempfile::tempdir().unwrap();
    symlink(deploy::folder(), top.path().join("deploy")).unwrap();
    let text = "resources: [deploy/overlays/central]\ncomponents: [deploy/components/cert-manager]\n";
    fs::write(top.path().join("kustomization.yaml"), text).unwrap();
    let objects = renderer.render(top.path()).unwrap();
    let page = fs::read_to_string(workspace().join("docs/install.md")).unwrap();
    for (kind, own, trusted) in
        [("Deployment", "kube-proxy-ebpf-brain", "--tls-allow="), ("DaemonSet", "kube-proxy-ebpf-agent", "")]
    {
        let pod = &one(&objects, kind)["spec"]["template"]["spec"];
        let volume = pod["volumes"].as_array().unwrap().iter().find(|it| it["name"] == "tls").unwrap();
        let secret = volume["secret"]["secretName"].as_str().unwrap();
        assert!(page.contains(&format!("create secret generic {secret} ")), "{secret}");
        let is_certificate = |it: &&Value| it["kind"] == "Certificate" && it["spec"]["secretName"] == secret;
        let certificate = objects.iter().find(is_certificate).unwrap();
        assert_eq!(strings(&certificate["spec"]["dnsNames"]), [own]);
        let container = &pod["containers"][0];
        // Each names the other.
        let other = if kind == "Deployment" {
            let arguments = strings(&container["args"]);
            arguments.into_iter().find_map(|it| it.strip_prefix(trusted)).unwrap()
        } else {
            let variables = container["env"].as_array().unwrap();
            let name = "KUBE_PROXY_EBPF_TARGET_TLS_SERVER_NAME";
            variables.iter().find(|it| it["name"] == name).unwrap()["value"].as_str().unwrap()
        };
        assert!(other.starts_with("kube-proxy-ebpf-") && other != own, "{kind}: {other}");
        assert!(page.contains(&format!("subjectAltName=DNS:{own}")), "{own}");
    }
}

#[test]
fn only_kubeadm_overlays_start_without_an_api_server_address() {
    let Some(rendered) = rendered() else { return };
    for (folder, objects) in rendered.iter().filter(|(folder, _)| !TOOLS.contains(folder)) {
        for container in all_containers(objects) {
            let arguments = strings(&container["args"]);
            if !arguments.contains(&"--source=kube") {
                continue;
            }
            let variables = container["env"].as_array().unwrap();
            let address = variables.iter().find(|it| it["name"] == "KUBE_API_SERVER");
            if folder.starts_with("overlays/kubeadm") {
                assert!(address.is_none() && !arguments.iter().any(|it| it.contains("KUBE_API_SERVER")));
            } else {
                let from = &address.unwrap()["valueFrom"]["configMapKeyRef"];
                // Without it the kubelet does not start the container and reports what is missing.
                assert_eq!(
                    (&from["name"], &from["optional"]),
                    (&"kube-proxy-ebpf-api-server".into(), &Value::Null)
                );
                assert!(arguments.contains(&"--kube-api-server=$(KUBE_API_SERVER)"), "{folder}");
            }
        }
    }
}

#[test]
fn kubeadm_overlays_use_nothing_but_kubeadms_configuration() {
    let Some(rendered) = rendered() else { return };
    for (folder, objects) in rendered.iter().filter(|(folder, _)| folder.starts_with("overlays/kubeadm")) {
        assert!(objects.iter().all(|it| it["kind"] != "ConfigMap"), "{folder}");
        for pod in pods(objects) {
            let volume = pod["volumes"].as_array().unwrap().iter().find(|it| it["name"] == "config");
            assert_eq!(volume.unwrap()["configMap"]["name"], "kube-proxy", "{folder}");
            for container in containers(pod) {
                assert!(!container.to_string().contains("/etc/kube-proxy-ebpf/"), "{folder}: {container}");
                assert!(container.to_string().contains("/var/lib/kube-proxy/config.conf"), "{folder}");
                let mounts = container["volumeMounts"].as_array().unwrap();
                let config = mounts.iter().find(|it| it["name"] == "config").unwrap();
                assert_eq!(config["mountPath"], "/var/lib/kube-proxy", "{folder}");
            }
        }
    }
}

/// An overlay differs from the one it combines with kubeadm's configuration in that configuration only.
#[test]
fn brains_of_kubeadm_overlays_have_the_arguments_of_the_others() {
    let Some(rendered) = rendered() else { return };
    let brain = |folder: &str| {
        let (_, objects) = rendered.iter().find(|(it, _)| *it == folder).unwrap();
        let mut all = all_containers(objects).into_iter().filter(|it| it["name"] == "brain");
        let arguments = strings(&all.next().unwrap()["args"]);
        let is_kept = |it: &&&str| !it.starts_with("--config=") && !it.starts_with("--kube-api-server=");
        arguments.iter().filter(is_kept).map(ToString::to_string).collect::<Vec<_>>()
    };
    for it in ["split", "central"] {
        assert_eq!(brain(&format!("overlays/kubeadm-{it}")), brain(&format!("overlays/{it}")));
    }
}

#[test]
fn a_cleanup_waits_for_kube_proxy_unless_none_follows() {
    let Some(renderer) = Renderer::or_skip() else { return };
    let top = tempfile::tempdir().unwrap();
    symlink(deploy::folder(), top.path().join("deploy")).unwrap();
    for (components, flag) in
        [("[]", "--wait-for-kube-proxy"), ("[deploy/components/without-kube-proxy]", "--force")]
    {
        let text = format!("resources: [deploy/cleanup]\ncomponents: {components}\n");
        fs::write(top.path().join("kustomization.yaml"), text).unwrap();
        let objects = renderer.render(top.path()).unwrap();
        let pod = pod(&objects);
        assert_eq!(strings(&pod["initContainers"][0]["args"]), ["cleanup", flag]);
    }
}

/// A request to an API server in the terms of RBAC: verb, group and resource.
fn rbac_terms(request: &str) -> [String; 3] {
    let (path, query) = request.split_once('?').unwrap_or((request, ""));
    let verb =
        if query.split('&').any(|it| it == "watch=true" || it == "watch=1") { "watch" } else { "list" };
    let parts: Vec<_> = path.trim_start_matches('/').split('/').collect();
    match parts[..] {
        ["api", "v1", resource] => [verb, "", resource].map(ToOwned::to_owned),
        ["apis", group, _, resource] => [verb, group, resource].map(ToOwned::to_owned),
        _ => panic!("{request} is neither a list nor a watch of all objects"),
    }
}

#[test]
fn the_role_allows_exactly_the_requests_that_are_made() {
    let file = deploy::folder().join("base/rbac.yaml");
    let documents = deploy::documents(&fs::read_to_string(file).unwrap()).unwrap();
    let mut allowed = BTreeSet::new();
    for rule in one(&documents, "ClusterRole")["rules"].as_array().unwrap() {
        for group in strings(&rule["apiGroups"]) {
            for resource in strings(&rule["resources"]) {
                let verbs = strings(&rule["verbs"]).into_iter();
                allowed.extend(verbs.map(|it| [it, group, resource].map(ToOwned::to_owned)));
            }
        }
    }

    // A server with streaming lists, and one without.
    let mut seen = BTreeSet::new();
    for watch_list in [WatchList::Supported, WatchList::Rejected] {
        let server = ApiServer::start(Settings { watch_list, ..Settings::default() }).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let kubeconfig = server.kubeconfig(folder.path()).unwrap();
        let mut brain = Command::new(Build::Product.binary())
            .args(["brain", "--source=kube", "--node-name=n1"])
            .arg(format!("--listen=unix://{}/socket", folder.path().display()))
            .arg("--kubeconfig")
            .arg(kubeconfig)
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut now = BTreeSet::new();
        let all = eventually(TIMEOUT, || {
            now.extend(server.requests().iter().map(|it| rbac_terms(it)));
            let verb = if watch_list == WatchList::Supported { "watch" } else { "list" };
            allowed.iter().filter(|it| it[0] == verb).all(|it| now.contains(it))
        });
        brain.kill().unwrap();
        brain.wait().unwrap();
        assert!(all, "the requests: {now:?}");
        seen.extend(now);
    }
    // `run` also posts events: `a_health_check_port_in_use_is_an_event_of_its_service`.
    seen.insert(["create", "events.k8s.io", "events"].map(ToOwned::to_owned));
    assert_eq!(seen, allowed);
}

/// The plugin, with a `kubectl` that knows one pod and prints how it is called.
#[test]
fn the_plugin_calls_a_command_in_the_pod_of_the_node() {
    let folder = tempfile::tempdir().unwrap();
    let kubectl = folder.path().join("kubectl");
    // Of a trace, it also prints the names of pods that are in its input.
    let script = r#"#!/bin/sh
case "$*" in
*' get pods '*spec.nodeName=worker-1,*) echo pod/p1; echo pod/p2 ;;
*' get pods '*) ;;
*metadata.name=client*|*status.podIP=10.244.1.7*) echo 'worker-1|0f-1||default/client||10.244.1.7 fd00::7' ;;
*metadata.name=static*) echo 'worker-1|0f-2|abc|kube-system/static|true|192.0.2.1' ;;
*metadata.name=other*) echo 'worker-2|0f-3||default/other||10.244.2.7' ;;
*spec.nodeName=worker-1*) echo 'worker-1|0f-1||default/client||10.244.1.7'; echo 'worker-1|0f-2|abc|kube-system/static|true|' ;;
'get pods '*) ;;
*) printf '%s\n' "$*"; if [ -p /dev/stdin ]; then echo input; fi
   case "$*" in *' trace '*) head -n 2 ;; esac ;;
esac
"#;
    fs::write(&kubectl, script).unwrap();
    fs::set_permissions(&kubectl, fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
    let plugin = |arguments: &str| {
        let mut command = Command::new(deploy::folder().join("kubectl-service_proxy"));
        run(command.args(arguments.split_whitespace()).env("PATH", &path).stdin(Stdio::null()))
    };
    let exec = "-n kube-system exec --quiet pod/p1 -- /usr/local/bin/kube-proxy-ebpf";
    let called = plugin("check worker-1 --output json").success();
    assert_eq!(called, format!("{exec} check --output json\n"));
    let called = plugin("support-bundle worker-1 --anonymize").success();
    assert_eq!(called, format!("{exec} support-bundle - --anonymize\n"));
    let called = plugin("top worker-1 --once").success();
    assert_eq!(called, format!("{exec} top --once\n"), "without a terminal");
    // Its input lasts as long as kubectl, so that it ends when kubectl is interrupted.
    let called = plugin("trace worker-1 --failed").success();
    let with_input = exec.replace("--quiet", "--quiet --stdin");
    assert_eq!(plugin("print worker-1 --watch").success(), format!("{with_input} print --watch\ninput\n"));
    let names = "input\n0f-1 default/client\nabc kube-system/static\n";
    assert_eq!(called, format!("{with_input} trace --failed\n{names}"));
    for (arguments, expect) in [
        ("--pod default/client --all", "--pod 0f-1 --all"),
        ("--pod=kube-system/static", "--pod=abc"),
        ("--service default/client", "--service default/client"),
    ] {
        let called = plugin(&format!("trace worker-1 {arguments}")).success();
        assert_eq!(called, format!("{with_input} trace {expect}\n{names}"));
    }
    // Any pod can be named.
    for (client, expect) in [
        ("pod default/client", "pod default/client=10.244.1.7,fd00::7"),
        ("pod 10.244.1.7", "pod default/client=10.244.1.7,fd00::7"),
        ("pod kube-system/static", "node"),
        ("pod 10.244.1.8", "pod 10.244.1.8"),
        ("node", "node"),
    ] {
        let called = plugin(&format!("explain worker-1 {client} web.default:http")).success();
        assert_eq!(called, format!("{exec} explain {expect} web.default:http\n"));
    }
    assert_eq!(plugin("cleanup worker-1 --kube-proxy").success(), format!("{exec} cleanup --kube-proxy\n"));
    for (arguments, code, message) in [
        ("status", 64, "usage: kubectl service-proxy COMMAND NODE"),
        ("run worker-1", 64, "unknown command run: use check,"),
        ("explain worker-1 pod default/none web.default", 1, "there is no pod default/none"),
        ("explain worker-1 pod default/other web.default", 1, "pod default/other runs on node worker-2"),
        ("check worker-9", 1, "runs on node worker-9 in namespace kube-system"),
    ] {
        let output = plugin(arguments);
        assert_eq!(output.code, Some(code), "{arguments}: {}", output.stderr);
        assert!(output.stderr.contains(message), "{arguments}: {}", output.stderr);
    }
    // What it looks for are the pods of the DaemonSet, and the program is that of the image.
    let script = fs::read_to_string(deploy::folder().join("kubectl-service_proxy")).unwrap();
    let Some(renderer) = Renderer::or_skip() else { return };
    let objects = renderer.render(".").unwrap();
    let labels = &one(&objects, "DaemonSet")["spec"]["template"]["metadata"]["labels"];
    let name = labels["app.kubernetes.io/name"].as_str().unwrap();
    assert!(script.contains(&format!("label=app.kubernetes.io/name={name}\n")));
    let image = fs::read_to_string(deploy::folder().join("Containerfile")).unwrap();
    assert!(image.contains(&format!("/usr/local/bin/{}", deploy::IMAGE)));
}
