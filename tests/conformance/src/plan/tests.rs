//! The plan, as far as it can be tested without a cluster.

use std::{
    io::Write as _,
    process::{Command, Stdio},
};

use serde_json::{Value, json};

use super::*;

fn options(ip_family: IpFamily) -> Options {
    Options {
        ip_family,
        dry_run: true,
        keep: false,
        focus: r"\[Conformance\]|\[sig-network\]".into(),
        parallel: 8,
        name: "kpe".into(),
        container_tool: None,
    }
}

fn plan(ip_family: IpFamily, tool: ContainerTool) -> Plan {
    let skips = skips::parse("- {match: '\\[Disruptive\\]', reason: it breaks nodes}").expect("a good list");
    Plan::new(&options(ip_family), tool, &skips, "abc").expect("an architecture that kind knows")
}

#[test]
fn the_cluster_has_two_workers_and_no_kube_proxy() {
    for family in IpFamily::ALL {
        let read: Value = serde_saphyr::from_str(&cluster(family)).expect("YAML");
        let expect = json!({
            "kind": "Cluster",
            "apiVersion": "kind.x-k8s.io/v1alpha4",
            "networking": { "ipFamily": family.name(), "kubeProxyMode": "none", "dnsSearch": [] },
            "nodes": [{ "role": "control-plane" }, { "role": "worker" }, { "role": "worker" }],
        });
        assert_eq!(read, expect);
    }
}

#[test]
fn a_shell_can_parse_every_plan() {
    for family in IpFamily::ALL {
        for tool in ContainerTool::ALL.into_iter().filter(|it| it.runs_kind()) {
            let mut shell = Command::new("sh").arg("-n").stdin(Stdio::piped()).spawn().expect("a shell");
            let script = plan(family, tool).script();
            shell.stdin.take().expect("it is piped").write_all(script.as_bytes()).expect("it reads");
            assert!(shell.wait().expect("it ends").success(), "{script}");
        }
    }
}

#[test]
fn words_reach_the_program_unchanged() {
    let words = [r"--focus=\[Conformance\]|it's $HOME `x`", "", "plain", "a\nb"];
    let line = words.map(quoted).join(" ");
    let output = Command::new("sh").args(["-c", &format!("printf '%s\\0' {line}")]).output();
    let output = output.expect("a shell").stdout;
    let seen: Vec<_> = output.split(|it| *it == 0).map(String::from_utf8_lossy).collect();
    assert_eq!(seen[..words.len()], words);
}

#[test]
fn the_tests_have_the_version_of_the_node_image() {
    assert!(NODE_IMAGE.starts_with(&format!("kindest/node:{KUBERNETES}@sha256:")));
    let test = &plan(IpFamily::Ipv4, ContainerTool::Docker).test[0].command;
    assert!(
        test.contains(&format!("{TOOLS}/tests-{KUBERNETES}/e2e.test -- --kubeconfig={KUBECONFIG}")),
        "{test}"
    );
    assert!(test.contains(r"'--focus=\[Conformance\]|\[sig-network\]' '--skip=\[Disruptive\]'"), "{test}");
}

#[test]
fn kind_uses_the_container_tool() {
    let with = |tool| plan(IpFamily::Ipv4, tool).end[0].command.clone();
    assert_eq!(with(ContainerTool::Docker), format!("{TOOLS}/kind-{KIND} delete cluster --name kpe"));
    assert!(with(ContainerTool::Podman).starts_with("KIND_EXPERIMENTAL_PROVIDER=podman "));
}

#[test]
fn only_an_ipv6_cluster_keeps_dns_inside() {
    for family in IpFamily::ALL {
        let script = plan(family, ContainerTool::Docker).script();
        assert_eq!(script.contains("coredns --output=yaml"), family == IpFamily::Ipv6);
    }
}

/// The CoreDNS configuration of kubeadm, after the step that keeps DNS inside.
#[test]
fn a_corefile_without_forward_is_valid() {
    let corefile = "    .:53 {\n        errors\n        kubernetes cluster.local in-addr.arpa ip6.arpa {\n           \
                    pods insecure\n           fallthrough in-addr.arpa ip6.arpa\n           ttl 30\n        }\n        \
                    forward . /etc/resolv.conf {\n           max_concurrent 1000\n        }\n        \
                    loop\n        reload\n    }\n";
    let plan = plan(IpFamily::Ipv6, ContainerTool::Docker);
    let step = plan.cluster.iter().find(|it| it.command.contains("| sed ")).expect("the step");
    let sed = step.command.split(" | ").nth(1).expect("the middle of the pipe");
    let mut shell = Command::new("sh");
    let mut shell =
        shell.args(["-c", sed]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a shell");
    shell.stdin.take().expect("it is piped").write_all(corefile.as_bytes()).expect("it reads");
    let output = shell.wait_with_output().expect("it ends").stdout;
    let expect = "    .:53 {\n        errors\n        kubernetes cluster.local in-addr.arpa ip6.arpa {\n           \
                  pods insecure\n           ttl 30\n        }\n        reload\n    }\n";
    assert_eq!(String::from_utf8_lossy(&output), expect);
}

#[test]
fn the_deployed_image_is_the_one_that_was_built() {
    let script = plan(IpFamily::Ipv4, ContainerTool::Docker).script();
    let Some(renderer) = ::tests::deploy::Renderer::or_skip() else { return };
    let rendered = renderer.render("overlays/kind").expect("it renders");
    let pods: Vec<_> =
        rendered.iter().map(|it| &it["spec"]["template"]["spec"]).filter(|it| it.is_object()).collect();
    assert_eq!(pods.len(), 1);
    assert_eq!(pods[0]["containers"][0]["image"], IMAGE);
    assert_eq!(pods[0]["containers"][0]["imagePullPolicy"], "Never");
    assert!(
        script.contains(&format!("--tag {IMAGE} ")) && script.contains("--kustomize deploy/overlays/kind")
    );
    let address =
        &pods[0]["containers"][0]["env"].as_array().expect("variables")[1]["valueFrom"]["configMapKeyRef"];
    let made = format!(
        "create configmap {} --from-literal={}=https://kpe-control-plane:6443",
        address["name"].as_str().expect("a name"),
        address["key"].as_str().expect("a key")
    );
    assert!(script.contains(&made), "{made}");
}
