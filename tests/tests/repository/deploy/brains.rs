//! The brains beside the agents, and the overlays of kubeadm.

use std::fs;

use build_tools::command::workspace;
use serde_json::Value;
use tests::deploy::Renderer;

use super::{
    CENTRAL, all_containers, containers, named, one, pod, pods, rendered, serving, strings, with_components,
};

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

/// The names that the install page gives to Secrets, and the component for cert-manager.
#[test]
fn brains_and_agents_trust_the_certificates_that_are_written_for_them() {
    let Some(renderer) = Renderer::or_skip() else { return };
    let objects = with_components(&renderer, "deploy/overlays/central", &["cert-manager"]);
    let page = fs::read_to_string(workspace().join("docs/install.md")).unwrap();
    let (brain, agent) = ("kube-proxy-ebpf-brain", "kube-proxy-ebpf-agent");
    let [brains, agents] =
        ["Deployment", "DaemonSet"].map(|it| &one(&objects, it)["spec"]["template"]["spec"]);
    for (pod, own) in [(brains, brain), (agents, agent)] {
        let secret = named(&pod["volumes"], "tls").unwrap()["secret"]["secretName"].as_str().unwrap();
        assert!(page.contains(&format!("create secret generic {secret} ")), "{secret}");
        let is_certificate = |it: &&Value| it["kind"] == "Certificate" && it["spec"]["secretName"] == secret;
        let certificate = objects.iter().find(is_certificate).unwrap();
        assert_eq!(strings(&certificate["spec"]["dnsNames"]), [own]);
        assert!(page.contains(&format!("subjectAltName=DNS:{own}")), "{own}");
    }
    let arguments = strings(&brains["containers"][0]["args"]);
    assert!(arguments.contains(&&*format!("--tls-allow={agent}")), "{arguments:?}");
    let variables = &agents["containers"][0]["env"];
    assert_eq!(named(variables, "KUBE_PROXY_EBPF_TARGET_TLS_SERVER_NAME").unwrap()["value"], brain);
}

#[test]
fn only_kubeadm_overlays_start_without_an_api_server_address() {
    for (folder, objects) in &serving() {
        for container in all_containers(objects) {
            let arguments = strings(&container["args"]);
            if !arguments.contains(&"--source=kube") {
                continue;
            }
            let address = named(&container["env"], "KUBE_API_SERVER");
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
    for (folder, objects) in rendered().iter().filter(|(folder, _)| folder.starts_with("overlays/kubeadm")) {
        assert!(objects.iter().all(|it| it["kind"] != "ConfigMap"), "{folder}");
        for pod in pods(objects) {
            let volume = named(&pod["volumes"], "config").unwrap();
            assert_eq!(volume["configMap"]["name"], "kube-proxy", "{folder}");
            for container in containers(pod) {
                assert!(!container.to_string().contains("/etc/kube-proxy-ebpf/"), "{folder}: {container}");
                assert!(container.to_string().contains("/var/lib/kube-proxy/config.conf"), "{folder}");
                let config = named(&container["volumeMounts"], "config").unwrap();
                assert_eq!(config["mountPath"], "/var/lib/kube-proxy", "{folder}");
            }
        }
    }
}

/// An overlay differs from the one it combines with kubeadm's configuration in that configuration only.
#[test]
fn brains_of_kubeadm_overlays_have_the_arguments_of_the_others() {
    let Some(renderer) = Renderer::or_skip() else { return };
    let brain = |folder: &str| {
        let objects = renderer.render(folder).unwrap();
        let mut all = all_containers(&objects).into_iter().filter(|it| it["name"] == "brain");
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
    for (components, flag) in [(&[][..], "--wait-for-kube-proxy"), (&["without-kube-proxy"], "--force")] {
        let objects = with_components(&renderer, "deploy/cleanup", components);
        let pod = pod(&objects);
        assert_eq!(strings(&pod["initContainers"][0]["args"]), ["cleanup", flag]);
    }
}
