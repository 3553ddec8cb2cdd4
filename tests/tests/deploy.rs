//! What a cluster applies fits Kubernetes, the binary, and the kernel.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    collections::BTreeSet,
    fs,
    net::{IpAddr, SocketAddr},
    process::Command,
    time::Duration,
};

use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{ConfigMap, ServiceAccount},
    rbac::v1::{ClusterRole, ClusterRoleBinding},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;
use tests::{
    Build, EchoServer, Transport, World, ask,
    deploy::{self, Renderer},
    manifest::Service,
    sandbox::skip,
    world::expected_dump,
};

/// Every kustomization that serves; the first is what `kubectl apply -k deploy` applies.
const SERVING: [&str; 4] = [".", "overlays/kubeadm", "overlays/kind", "overlays/split"];
const CLEANUP: &str = "cleanup";
const LIMIT: Duration = Duration::from_secs(20);

/// What each kustomization renders to; `None` where nothing can render, and the test is skipped.
fn rendered(test: &str) -> Option<Vec<(&'static str, Vec<Value>)>> {
    match Renderer::find() {
        Ok(renderer) => {
            let all = SERVING.into_iter().chain([CLEANUP]);
            Some(all.map(|it| (it, renderer.render(it).unwrap())).collect())
        }
        Err(reason) => {
            skip(test, &reason.to_string());
            None
        }
    }
}

fn one<'a>(objects: &'a [Value], kind: &str) -> &'a Value {
    let mut found = objects.iter().filter(|it| it["kind"] == kind);
    let one = found.next().unwrap_or_else(|| panic!("there is no {kind}"));
    assert!(found.next().is_none(), "there is more than one {kind}");
    one
}

/// A DaemonSet's pod.
fn pod(objects: &[Value]) -> &Value {
    &one(objects, "DaemonSet")["spec"]["template"]["spec"]
}

/// Every container that runs our image, those that run first included.
fn containers(pod: &Value) -> Vec<&Value> {
    let all = ["initContainers", "containers"].into_iter().filter_map(|it| pod[it].as_array()).flatten();
    all.filter(|it| it["image"].as_str().unwrap().contains(deploy::IMAGE)).collect()
}

fn strings(list: &Value) -> Vec<&str> {
    list.as_array().into_iter().flatten().map(|it| it.as_str().unwrap()).collect()
}

/// What a type of Kubernetes does not keep of an object: what it does not know.
fn unknown(object: &Value) -> Vec<String> {
    fn kept<T: DeserializeOwned + Serialize>(object: &Value) -> Value {
        let read: T = serde_json::from_value(object.clone()).unwrap_or_else(|it| panic!("{it}: {object}"));
        serde_json::to_value(read).unwrap()
    }
    fn walk(given: &Value, kept: &Value, path: &str, unknown: &mut Vec<String>) {
        match (given, kept) {
            (Value::Object(given), Value::Object(kept)) => {
                for (key, value) in given {
                    let path = format!("{path}.{key}");
                    match kept.get(key) {
                        Some(kept) => walk(value, kept, &path, unknown),
                        None => unknown.push(path),
                    }
                }
            }
            (Value::Array(given), Value::Array(kept)) => {
                for (n, (given, kept)) in given.iter().zip(kept).enumerate() {
                    walk(given, kept, &format!("{path}[{n}]"), unknown);
                }
            }
            _ => {}
        }
    }
    let kept = match object["kind"].as_str().unwrap() {
        "DaemonSet" => kept::<DaemonSet>(object),
        "ConfigMap" => kept::<ConfigMap>(object),
        "ServiceAccount" => kept::<ServiceAccount>(object),
        "ClusterRole" => kept::<ClusterRole>(object),
        "ClusterRoleBinding" => kept::<ClusterRoleBinding>(object),
        other => panic!("a {other} is not expected"),
    };
    let mut unknown = Vec::new();
    walk(object, &kept, object["kind"].as_str().unwrap(), &mut unknown);
    unknown
}

#[test]
fn kubernetes_knows_every_field_of_the_manifests() {
    let Some(rendered) = rendered("kubernetes_knows_every_field_of_the_manifests") else { return };
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
fn a_field_that_kubernetes_does_not_know_is_named() {
    let file = deploy::folder().join("base/daemonset.yaml");
    let text = fs::read_to_string(file).unwrap().replace("readOnlyRootFilesystem", "readOnlyRootFileSystem");
    let documents = deploy::documents(&text).unwrap();
    assert_eq!(
        unknown(&documents[0]),
        ["DaemonSet.spec.template.spec.containers[0].securityContext.readOnlyRootFileSystem"]
    );
}

#[test]
fn the_pods_take_the_place_of_kube_proxy() {
    let Some(rendered) = rendered("the_pods_take_the_place_of_kube_proxy") else { return };
    for (folder, objects) in &rendered {
        let pod = pod(objects);
        assert_eq!(pod["priorityClassName"], "system-node-critical", "{folder}");
        assert_eq!(pod["hostNetwork"], true, "{folder}");
        assert_eq!(pod["nodeSelector"]["kubernetes.io/os"], "linux", "{folder}");
        assert_eq!(pod["tolerations"], serde_json::json!([{ "operator": "Exists" }]), "{folder}");
        let images: Vec<_> = containers(pod).into_iter().map(|it| it["image"].as_str().unwrap()).collect();
        let host = if *folder == "overlays/kind" { "localhost/" } else { "" };
        let image = format!("{host}{}:{}", deploy::IMAGE, env!("CARGO_PKG_VERSION"));
        assert!(!images.is_empty() && images.iter().all(|it| **it == image), "{folder}: {images:?}");
    }
}

/// A DaemonSet that serves and one that cleans up must never meet on a node.
#[test]
fn a_node_is_served_or_cleaned_up_never_both() {
    let Some(rendered) = rendered("a_node_is_served_or_cleaned_up_never_both") else { return };
    let served = serde_json::json!([{ "key": "kube-proxy-ebpf", "operator": "NotIn", "values": ["off"] }]);
    for (folder, objects) in &rendered {
        let pod = pod(objects);
        if *folder == CLEANUP {
            assert_eq!(pod["nodeSelector"]["kube-proxy-ebpf"], "off");
        } else {
            let affinity = &pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
            let terms = affinity["nodeSelectorTerms"].as_array().unwrap();
            assert_eq!(terms.len(), 1, "{folder}: any one of several terms would do");
            assert_eq!(terms[0]["matchExpressions"], served, "{folder}");
        }
    }
}

#[test]
fn the_pods_have_no_more_power_than_they_need() {
    let Some(rendered) = rendered("the_pods_have_no_more_power_than_they_need") else { return };
    for (folder, objects) in &rendered {
        let pod = pod(objects);
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
            // What serves must outlive the pod: nothing takes it down when the pod ends.
            assert!(container["lifecycle"].is_null(), "{folder}");
        }
        for volume in pod["volumes"].as_array().unwrap() {
            let path = &volume["hostPath"]["path"];
            if path.is_null() || path == "/sys/fs/bpf" {
                continue;
            }
            assert_eq!(path, "/sys/fs/cgroup", "{folder}");
            let mounts = containers(pod).into_iter().flat_map(|it| it["volumeMounts"].as_array().unwrap());
            for mount in mounts.filter(|it| it["name"] == volume["name"]) {
                assert_eq!(mount["readOnly"], true, "{folder}");
            }
        }
    }
}

#[test]
fn whoever_touches_the_kernel_has_the_capabilities_that_are_tested() {
    let Some(rendered) = rendered("whoever_touches_the_kernel_has_the_capabilities_that_are_tested") else {
        return;
    };
    let tested = deploy::capabilities().unwrap();
    for (folder, objects) in &rendered {
        for container in containers(pod(objects)) {
            let has = deploy::capabilities_of(container).unwrap();
            match strings(&container["args"])[0] {
                "run" | "agent" => assert_eq!(has, tested, "{folder}"),
                "brain" => assert!(has.is_empty(), "{folder}: a brain knows no kernel"),
                "cleanup" => assert!(tested.contains(has), "{folder}"),
                other => panic!("{folder}: {other} is not expected"),
            }
        }
    }
}

fn help(command: &str) -> String {
    let output = Command::new(Build::Product.binary()).args([command, "--help"]).output().unwrap();
    assert!(output.status.success(), "{command} --help: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_binary_knows_every_flag_and_variable_it_is_given() {
    let Some(rendered) = rendered("the_binary_knows_every_flag_and_variable_it_is_given") else { return };
    for (folder, objects) in &rendered {
        for container in containers(pod(objects)) {
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
                assert!(used || words.contains(variable), "{folder}: `{}` has no {variable}", arguments[0]);
            }
            // Kubernetes leaves what it does not know as it is.
            for argument in arguments.iter().filter_map(|it| it.split_once("$(")) {
                let name = argument.1.trim_end_matches(')');
                assert!(variables.contains(&name), "{folder}: {name} is not defined");
            }
        }
    }
}

#[test]
fn the_probes_ask_where_the_proxy_answers() {
    let Some(rendered) = rendered("the_probes_ask_where_the_proxy_answers") else { return };
    for (folder, objects) in rendered.iter().filter(|(folder, _)| *folder != CLEANUP) {
        for container in containers(pod(objects)) {
            let flag = strings(&container["args"])
                .into_iter()
                .find_map(|it| it.strip_prefix("--healthz-bind-address="))
                .map(|it| it.rsplit(':').next().unwrap().parse::<u64>().unwrap());
            // kube-proxy's, which is ours too where nothing else is said.
            let serves = flag.unwrap_or(10256);
            for (probe, path) in
                [("startupProbe", "/livez"), ("livenessProbe", "/livez"), ("readinessProbe", "/readyz")]
            {
                let get = &container[probe]["httpGet"];
                assert_eq!(get["path"], path, "{folder}: {probe}");
                let port = match &get["port"] {
                    Value::String(name) => {
                        let ports = container["ports"].as_array().unwrap();
                        let port = ports.iter().find(|it| it["name"] == **name).unwrap();
                        assert_eq!(port["containerPort"], port["hostPort"], "{folder}");
                        port["containerPort"].as_u64()
                    }
                    number => number.as_u64(),
                };
                assert_eq!(port, Some(serves), "{folder}: {probe}");
            }
        }
    }
}

#[test]
fn nothing_but_the_kubeadm_overlay_starts_without_an_api_servers_address() {
    let Some(rendered) = rendered("nothing_but_the_kubeadm_overlay_starts_without_an_api_servers_address")
    else {
        return;
    };
    for (folder, objects) in rendered.iter().filter(|(folder, _)| *folder != CLEANUP) {
        for container in containers(pod(objects)) {
            let arguments = strings(&container["args"]);
            if !arguments.contains(&"--source=kube") {
                continue;
            }
            let variables = container["env"].as_array().unwrap();
            let address = variables.iter().find(|it| it["name"] == "KUBE_API_SERVER");
            if *folder == "overlays/kubeadm" {
                assert!(address.is_none());
                assert!(arguments.contains(&"--config=/var/lib/kube-proxy/config.conf"));
                let volume =
                    pod(objects)["volumes"].as_array().unwrap().iter().find(|it| it["name"] == "config");
                assert_eq!(volume.unwrap()["configMap"]["name"], "kube-proxy");
            } else {
                let from = &address.unwrap()["valueFrom"]["configMapKeyRef"];
                // Absent, the kubelet does not start the container and says what is missing.
                assert_eq!(
                    (&from["name"], &from["optional"]),
                    (&"kube-proxy-ebpf-api-server".into(), &Value::Null)
                );
                assert!(arguments.contains(&"--kube-api-server=$(KUBE_API_SERVER)"), "{folder}");
            }
        }
    }
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn web() -> Vec<Service> {
    let addresses = [ip("10.96.0.10"), ip("fd00:10:96::10")];
    let web = Service::new("web", &addresses).port("tcp", "TCP", 80, 8080).port("udp", "UDP", 80, 8080);
    vec![web.endpoint("e1", &[ip("10.244.1.1"), ip("fd00:10:244::1:1")])]
}

/// The bounding set of a process, as /proc shows it.
fn bounding_set(process: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let set = status.lines().find_map(|it| it.strip_prefix("CapBnd:")).unwrap();
    u64::from_str_radix(set.trim(), 16).unwrap()
}

/// Every other end-to-end test starts the proxy in the same way.
#[test]
fn the_capabilities_of_the_manifest_suffice() {
    let Some(world) = World::or_skip("the_capabilities_of_the_manifest_suffice") else { return };
    let services = web();
    world.write(&services);
    let mut agent = world.setting(Build::Product).start(world.sandbox()).unwrap();
    assert_eq!(bounding_set(agent.process()), deploy::capabilities().unwrap().bits());

    let expected = expected_dump(&services);
    agent.wait_until(LIMIT, || world.dump(Build::Product).is_ok_and(|it| it == expected)).unwrap();
    for endpoint in ["10.244.1.1:8080", "[fd00:10:244::1:1]:8080"] {
        let endpoint: SocketAddr = endpoint.parse().unwrap();
        world.netns().add_address(endpoint.ip()).unwrap();
        let server = EchoServer::start("e1", endpoint).unwrap();
        let service = if server.address().is_ipv4() { "10.96.0.10:80" } else { "[fd00:10:96::10]:80" };
        let service: SocketAddr = service.parse().unwrap();
        for transport in [Transport::Tcp, Transport::Udp, Transport::UdpUnconnected] {
            let answer = tests::eventually(LIMIT, || ask(transport, service).is_ok_and(|it| it == "e1"));
            assert!(answer, "{transport:?} to {service}: {:?}\n{}", ask(transport, service), agent.log());
        }
    }
}

#[test]
fn without_any_one_of_its_capabilities_the_proxy_says_what_it_needs() {
    let name = "without_any_one_of_its_capabilities_the_proxy_says_what_it_needs";
    let Some(world) = World::or_skip(name) else { return };
    world.write(&web());
    let all = deploy::capabilities().unwrap();
    for (name, missing) in all.iter_names() {
        let setting = world.setting(Build::Product).capabilities(all.difference(missing));
        let mut agent = setting.start(world.sandbox()).unwrap();
        let status = agent.wait(LIMIT).unwrap_or_else(|error| panic!("{name} is not needed: {error:#}"));
        assert_eq!(status.code(), Some(1), "{name}");
        let log = agent.log();
        assert!(log.contains("CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON"), "without {name} it said:\n{log}");
    }
}
