//! The manifests in `deploy/` are valid for Kubernetes, the binary, and the kernel.

mod brains;
mod configuration;
mod outside;
mod privileges;

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::Path,
    process::{Command, Stdio},
};

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
use serde::de::DeserializeOwned;
use serde_json::Value;
use tests::{
    Build, TIMEOUT,
    deploy::{self, Renderer},
    eventually, run,
};

use self::configuration::settings;

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
/// Every kustomization without a proxy.
const TOOLS: [&str; 2] = [CLEANUP, PREFLIGHT];

/// The objects of each kustomization; none without a renderer: the test is skipped.
fn rendered() -> Vec<(&'static str, Vec<Value>)> {
    let Some(renderer) = Renderer::or_skip() else { return Vec::new() };
    SERVING.into_iter().chain(TOOLS).map(|it| (it, renderer.render(it).unwrap())).collect()
}

/// The objects of each kustomization with a proxy.
fn serving() -> Vec<(&'static str, Vec<Value>)> {
    let mut all = rendered();
    all.retain(|(folder, _)| !TOOLS.contains(folder));
    all
}

/// The objects of a kustomization that adds components to a folder, `deploy` or one in it.
pub(crate) fn with_components(renderer: &Renderer, resource: &str, components: &[&str]) -> Vec<Value> {
    let folder = tempfile::tempdir().unwrap();
    symlink(deploy::folder(), folder.path().join("deploy")).unwrap();
    let components: Vec<_> = components.iter().map(|it| format!("deploy/components/{it}")).collect();
    let text = format!("resources: [{resource}]\ncomponents: [{}]\n", components.join(", "));
    fs::write(folder.path().join("kustomization.yaml"), text).unwrap();
    renderer.render(folder.path()).unwrap()
}

fn one<'a>(objects: &'a [Value], kind: &str) -> &'a Value {
    let mut found = objects.iter().filter(|it| it["kind"] == kind);
    let one = found.next().unwrap_or_else(|| panic!("there is no {kind}"));
    assert!(found.next().is_none(), "there is more than one {kind}");
    one
}

/// The entry of a list that has this name.
pub(crate) fn named<'a>(list: &'a Value, name: &str) -> Option<&'a Value> {
    list.as_array().into_iter().flatten().find(|it| it["name"] == name)
}

fn pod(objects: &[Value]) -> &Value {
    &one(objects, "DaemonSet")["spec"]["template"]["spec"]
}

/// The pods of the DaemonSet and of the Deployment, if there is one, with their metadata.
fn templates(objects: &[Value]) -> impl Iterator<Item = &Value> {
    let with_pods = objects.iter().filter(|it| it["kind"] == "DaemonSet" || it["kind"] == "Deployment");
    with_pods.map(|it| &it["spec"]["template"])
}

/// The specifications of the pods of the DaemonSet and of the Deployment, if there is one.
fn pods(objects: &[Value]) -> impl Iterator<Item = &Value> {
    templates(objects).map(|it| &it["spec"])
}

/// Whether a container ends before the others start.
fn is_initializing(container: &Value) -> bool {
    strings(&container["args"]).contains(&"--init-only")
}

fn image(container: &Value) -> &str {
    container["image"].as_str().unwrap()
}

/// Every container of a pod, init containers included.
fn every_container(pod: &Value) -> impl Iterator<Item = &Value> {
    ["initContainers", "containers"].into_iter().filter_map(move |it| pod[it].as_array()).flatten()
}

/// The containers of a pod that run our image.
fn containers(pod: &Value) -> Vec<&Value> {
    every_container(pod).filter(|it| image(it).contains(deploy::IMAGE)).collect()
}

/// The containers of all pods that run our image.
fn all_containers(objects: &[Value]) -> Vec<&Value> {
    pods(objects).flat_map(containers).collect()
}

/// The containers that serve until they are ended.
fn serving_containers(objects: &[Value]) -> impl Iterator<Item = &Value> {
    all_containers(objects).into_iter().filter(|it| !is_initializing(it))
}

fn strings(list: &Value) -> Vec<&str> {
    list.as_array().into_iter().flatten().map(|it| it.as_str().unwrap()).collect()
}

/// Every image of ours in a kustomization.
fn images(renderer: &Renderer, folder: &Path) -> Vec<String> {
    let objects = renderer.render(folder).unwrap();
    all_containers(&objects).into_iter().map(|it| image(it).to_owned()).collect()
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
    for (folder, objects) in rendered() {
        let has_backend = folder.starts_with("overlays/backend/");
        for it in templates(&objects) {
            let name = &it["metadata"]["annotations"]["kubectl.kubernetes.io/default-container"];
            assert!(containers(&it["spec"]).iter().any(|it| it["name"] == *name), "{folder}: {name}");
            for it in every_container(&it["spec"]) {
                assert!(has_backend || image(it).contains(deploy::IMAGE), "{folder}: {it}");
                assert_eq!(it["terminationMessagePolicy"], "FallbackToLogsOnError", "{folder}: {it}");
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
    for (overlay, metrics) in [
        ("deploy", "metrics"),
        ("deploy/overlays/kubeadm", "metrics"),
        ("deploy/overlays/split", "metrics-split"),
        ("deploy/overlays/central", "metrics-central"),
        ("deploy/overlays/kubeadm-split", "metrics-split"),
        ("deploy/overlays/kubeadm-central", "metrics-central"),
    ] {
        let objects = with_components(&renderer, overlay, &[metrics, "kube-prometheus"]);
        let spec = &one(&objects, "DaemonSet")["spec"];
        assert_eq!(spec["template"]["metadata"]["labels"]["k8s-app"], "kube-proxy", "{overlay}");
        assert!(spec["selector"]["matchLabels"].get("k8s-app").is_none(), "{overlay}");
        let datapaths = serving_containers(&objects).map(settings).filter(|it| it.contains_key("--pin-dir"));
        let addresses: Vec<_> = datapaths.map(|mut it| it.remove("--metrics-bind-address")).collect();
        assert_eq!(addresses, [Some("0.0.0.0:10249".to_owned())], "{overlay}");
        assert_eq!(spec["minReadySeconds"], 10);
    }
}

#[test]
fn components_set_their_flags_and_the_role_allows_what_these_read() {
    let Some(renderer) = Renderer::or_skip() else { return };
    let annotations = [("--pod-annotations", "true")];
    let outside = [("--external-forwarding", "dsr"), ("--watch-all-nodes", "true")];
    for (overlay, component, flags, read) in [
        ("deploy", "pod-annotations", &annotations[..], &["pods"][..]),
        ("deploy/overlays/kubeadm", "pod-annotations", &annotations, &["pods"]),
        ("deploy/overlays/split", "pod-annotations-split", &annotations, &["pods"]),
        ("deploy/overlays/central", "pod-annotations-central", &annotations, &["pods"]),
        ("deploy", "outside", &outside, &["services", "nodes"]),
        ("deploy/overlays/kubeadm", "outside", &outside, &["services", "nodes"]),
    ] {
        let objects = with_components(&renderer, overlay, &[component]);
        let serving: Vec<_> = serving_containers(&objects).collect();
        assert!(!serving.is_empty(), "{overlay} with {component}");
        for it in serving {
            let settings = settings(it);
            for (flag, expect) in flags {
                let set = settings.get(*flag).map(String::as_str);
                assert_eq!(set, Some(*expect), "{overlay} with {component}: {flag} of {it}");
            }
        }
        let mut rules = one(&objects, "ClusterRole")["rules"].as_array().unwrap().iter();
        let rule = rules.find(|it| strings(&it["resources"]) == read).unwrap();
        assert_eq!(strings(&rule["verbs"]), ["list", "watch"], "{overlay} with {component}");
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
    for (folder, objects) in rendered() {
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
    for (folder, objects) in &rendered() {
        let pod = pod(objects);
        assert_eq!(pod["priorityClassName"], "system-node-critical", "{folder}");
        assert_eq!(pod["hostNetwork"], true, "{folder}");
        assert_eq!(pod["nodeSelector"]["kubernetes.io/os"], "linux", "{folder}");
        assert_eq!(pod["tolerations"], serde_json::json!([{ "operator": "Exists" }]), "{folder}");
        let images: Vec<_> = all_containers(objects).into_iter().map(image).collect();
        let host = if *folder == "overlays/kind" { "localhost/" } else { "" };
        let expect = format!("{host}{}:{}", deploy::IMAGE, env!("CARGO_PKG_VERSION"));
        assert!(!images.is_empty() && images.iter().all(|it| *it == expect), "{folder}: {images:?}");
    }
}

/// The DaemonSet of the proxy and that of the cleanup must never run on the same node.
#[test]
fn a_node_is_served_or_cleaned_up_never_both() {
    let served = serde_json::json!([{ "key": "kube-proxy-ebpf", "operator": "NotIn", "values": ["off"] }]);
    for (folder, objects) in &rendered() {
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
fn the_plugin_calls_a_command_in_the_pod_of_the_node() {
    let folder = tempfile::tempdir().unwrap();
    let kubectl = folder.path().join("kubectl");
    let script = include_str!("deploy/kubectl.sh");
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
        let stderr = plugin(arguments).exits_with(code);
        assert!(stderr.contains(message), "{arguments}: {stderr}");
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
