//! What the pods may do: to their nodes, and at the API server.

use std::{
    collections::BTreeSet,
    fs,
    process::{Command, Stdio},
};

use api_server::{ApiServer, Settings, WatchList};
use build_tools::command::{KilledOnDrop, workspace};
use rustix::thread::CapabilitySet;
use serde_json::Value;
use tests::{Build, TIMEOUT, deploy, deploy::Renderer, eventually};

use super::{
    CENTRAL, all_containers, containers, every_container, is_initializing, named, one, pod, pods, rendered,
    strings,
};

#[test]
fn the_pods_have_no_more_privileges_than_needed() {
    for (folder, pod) in rendered().iter().flat_map(|(folder, all)| pods(all).map(move |it| (folder, it))) {
        for it in ["hostPID", "hostIPC", "shareProcessNamespace"] {
            assert!(pod[it].is_null(), "{folder}: {it}");
        }
        for container in every_container(pod) {
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
            let is_written = path == "/sys/fs/bpf" || path == "/sys/kernel/rcu_expedited";
            if path.is_null() || is_written || is_backends {
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
        let container = |name: &str| every_container(pod).find(|it| it["name"] == name).unwrap();
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
        let volumes = pod["volumes"].to_string();
        assert!(
            !volumes.contains("/sys/fs/") && !volumes.contains("/sys/kernel/"),
            "{backend}: it has no eBPF"
        );

        let it = container("backend");
        let target = named(&it["env"], "KUBE_PROXY_EBPF_TARGET").unwrap();
        let listen = format!("--listen={}", target["value"].as_str().unwrap());
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
    let tested = deploy::capabilities().unwrap();
    for (folder, objects) in &rendered() {
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
        let mut brain = Command::new(Build::Product.binary());
        brain.args(["brain", "--source=kube", "--node-name=n1"]);
        brain.arg(format!("--listen=unix://{}/socket", folder.path().display()));
        brain.arg("--kubeconfig").arg(kubeconfig).stderr(Stdio::null());
        let _brain = KilledOnDrop(brain.spawn().unwrap());
        let mut now = BTreeSet::new();
        let all = eventually(TIMEOUT, || {
            now.extend(server.requests().iter().map(|it| rbac_terms(it)));
            let verb = if watch_list == WatchList::Supported { "watch" } else { "list" };
            allowed.iter().filter(|it| it[0] == verb).all(|it| now.contains(it))
        });
        assert!(all, "the requests: {now:?}");
        seen.extend(now);
    }
    // `run` also posts events: `a_health_check_port_in_use_is_an_event_of_its_service`.
    seen.insert(["create", "events.k8s.io", "events"].map(ToOwned::to_owned));
    assert_eq!(seen, allowed);
}
