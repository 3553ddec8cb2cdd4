//! A run as a shell script for the root of the workspace.
//! Invariant: the script that is printed is the one that runs.

use std::{env, iter};

use anyhow::{Result, bail};
use build_tools::container::{ContainerTool, IMAGE};
use clap::ValueEnum;

use crate::{options::Options, skips};

/// kind, and the node image that this version was released with.
const KIND: &str = "v0.32.0";
const NODE_IMAGE: &str =
    "kindest/node:v1.36.1@sha256:3489c7674813ba5d8b1a9977baea8a6e553784dab7b84759d1014dbd78f7ebd5";
/// The version of the cluster and of the tests.
const KUBERNETES: &str = "v1.36.1";

pub(crate) fn script(
    options: &Options,
    tool: ContainerTool,
    skips: &[skips::Skip],
    revision: &str,
) -> Result<String> {
    let arch = match env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => bail!("kind has no node image for {other}"),
    };
    let Options { ip_family, keep, focus, parallel, name, .. } = options;
    let variables = [
        ("KIND", KIND),
        ("NODE_IMAGE", NODE_IMAGE),
        ("KUBERNETES", KUBERNETES),
        ("ARCH", arch),
        ("TOOL", tool.program()),
        ("IMAGE", IMAGE),
        ("NAME", name),
        ("IP_FAMILY", &value_name(*ip_family)),
        ("FOCUS", focus),
        ("SKIP", &skips::expression(skips, *ip_family)),
        ("PARALLEL", &parallel.to_string()),
        ("KEEP", if *keep { "yes" } else { "" }),
    ];
    let variables = variables.map(|(name, value)| format!("{name}={}", quoted(value)));
    let build: Vec<_> = tool.build(revision).iter().map(|it| quoted(it)).collect();
    let begin = ["#!/bin/sh", "# In the root of the workspace.", "set -eu", ""].map(ToOwned::to_owned);
    let build = format!("build_image() {{ {}; }}", build.join(" "));
    let lines: Vec<_> = begin.into_iter().chain(variables).chain(iter::once(build)).collect();
    Ok(lines.join("\n") + "\n" + include_str!("run.sh"))
}

fn value_name(value: impl ValueEnum) -> String {
    value.to_possible_value().expect("no value is hidden").get_name().to_owned()
}

fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{PermissionsExt as _, symlink},
        path::Path,
        process::Command,
    };

    use clap::Parser as _;
    use serde_json::{Value, json};

    use super::*;

    /// Runs a script in a folder with a stub for each program, which logs its command line and fails if that contains
    /// `failing`. Returns whether the script succeeded, and the log.
    fn run(arguments: &[&str], tool: ContainerTool, failing: &str) -> (bool, String) {
        let skips =
            skips::parse("- {match: '\\[Disruptive\\]', reason: it breaks nodes}").expect("a good list");
        let options = Options::parse_from([&["conformance", "--name=it's"], arguments].concat());
        let script = script(&options, tool, &skips, "abc").expect("an architecture that kind knows");
        let folder = tempfile::tempdir().expect("a folder");
        let stub = folder.path().join("stub");
        let program = "#!/bin/sh\nexec >>log\necho \"${0##*/} ${KIND_EXPERIMENTAL_PROVIDER-} $*\"\n\
                       case \"$*\" in *\"$FAILING\"*) exit 1 ;; esac\n";
        fs::write(&stub, program).expect("a stub");
        fs::set_permissions(&stub, fs::Permissions::from_mode(0o755)).expect("a program");
        let tools = folder.path().join("target/tools/conformance");
        for program in [
            folder.path().join(tool.program()),
            tools.join(format!("kind-{KIND}")),
            tools.join(format!("kubectl-{KUBERNETES}")),
            tools.join(format!("tests-{KUBERNETES}/ginkgo")),
            tools.join(format!("tests-{KUBERNETES}/e2e.test")),
        ] {
            fs::create_dir_all(program.parent().expect("a folder")).expect("a folder");
            symlink(&stub, program).expect("a link");
        }
        let path = format!("{}:{}", folder.path().display(), env::var("PATH").expect("a path"));
        let output = Command::new("sh")
            .args(["-c", &script])
            .current_dir(folder.path())
            .envs([("PATH", &*path), ("FAILING", failing)])
            .output()
            .expect("a shell");
        check_cluster(&folder.path().join("target/conformance/kind.yaml"), &value_name(options.ip_family));
        (output.status.success(), fs::read_to_string(folder.path().join("log")).expect("a log"))
    }

    /// The cluster has two workers and no kube-proxy.
    fn check_cluster(file: &Path, family: &str) {
        let Ok(text) = fs::read_to_string(file) else { return };
        let expect = json!({
            "kind": "Cluster",
            "apiVersion": "kind.x-k8s.io/v1alpha4",
            "networking": { "ipFamily": family, "kubeProxyMode": "none", "dnsSearch": [] },
            "nodes": [{ "role": "control-plane" }, { "role": "worker" }, { "role": "worker" }],
        });
        assert_eq!(serde_saphyr::from_str::<Value>(&text).expect("YAML"), expect);
    }

    #[test]
    fn a_run_creates_tests_and_removes_a_cluster() {
        for (tool, provider) in [(ContainerTool::Docker, ""), (ContainerTool::Podman, "podman")] {
            let program = tool.program();
            let (is_ok, log) = run(&[], tool, "nothing");
            assert!(is_ok, "{log}");
            let expect = [
                format!("{program} {provider} build --file deploy/Containerfile --tag {IMAGE} ")
                    + concat!(
                        "--build-arg VERSION=",
                        env!("CARGO_PKG_VERSION"),
                        " --build-arg REVISION=abc .\n"
                    ),
                format!("kind-{KIND} {provider} create cluster --name it's --image {NODE_IMAGE}"),
                format!("{program} {provider} exec it's-worker2 sh -c mountpoint -q"),
                "--namespace=kube-system rollout status daemonset/kube-proxy-ebpf".to_owned(),
                r"--no-color --focus=\[Conformance\]|\[sig-network\] --skip=\[Disruptive\] ".to_owned(),
                format!("kind-{KIND} {provider} delete cluster --name it's\n"),
            ];
            let mut rest = &*log;
            for it in &expect {
                rest = rest.split_once(it).unwrap_or_else(|| panic!("{it} is not in {rest}")).1;
            }
            assert!(rest.is_empty() && !log.contains("export logs"), "{log}");
        }
    }

    #[test]
    fn a_failure_leaves_evidence_and_no_cluster() {
        for (arguments, failing, has_evidence, is_removed) in [
            (&[][..], "build", false, false),
            (&[], "create cluster", true, true),
            (&["--ip-family=dual"], "--focus", true, true),
            (&["--keep"], "--focus", true, false),
            (&["--keep"], "nothing", false, false),
            (&[], "delete cluster", false, true),
        ] {
            let (is_ok, log) = run(arguments, ContainerTool::Docker, failing);
            assert_eq!(is_ok, failing == "nothing", "{failing}: {log}");
            assert_eq!(log.contains("export logs"), has_evidence, "{failing}: {log}");
            assert_eq!(log.contains("delete cluster"), is_removed, "{failing}: {log}");
        }
    }

    #[test]
    fn only_an_ipv6_cluster_keeps_dns_inside() {
        for (family, keeps) in [("ipv4", false), ("ipv6", true), ("dual", false)] {
            let (_, log) = run(&["--ip-family", family], ContainerTool::Docker, "nothing");
            assert_eq!(log.contains("coredns --output=yaml"), keeps, "{family}");
        }
    }

    #[test]
    fn the_tests_have_the_version_of_the_node_image() {
        assert!(NODE_IMAGE.starts_with(&format!("kindest/node:{KUBERNETES}@sha256:")));
    }

    /// The CoreDNS configuration of kubeadm, after the step that keeps DNS inside.
    #[test]
    fn a_corefile_without_forward_is_valid() {
        let corefile = "    .:53 {\n        errors\n        kubernetes cluster.local in-addr.arpa ip6.arpa {\n           \
                        pods insecure\n           fallthrough in-addr.arpa ip6.arpa\n           ttl 30\n        }\n        \
                        forward . /etc/resolv.conf {\n           max_concurrent 1000\n        }\n        \
                        loop\n        reload\n    }\n";
        let line = include_str!("run.sh").lines().find(|it| it.trim().starts_with("sed ")).expect("a filter");
        let filter = format!("printf %s {} | {}", quoted(corefile), line.trim_end_matches('|'));
        let output = Command::new("sh").args(["-c", &filter]).output().expect("a shell").stdout;
        let expect = "    .:53 {\n        errors\n        kubernetes cluster.local in-addr.arpa ip6.arpa {\n           \
                      pods insecure\n           ttl 30\n        }\n        reload\n    }\n";
        assert_eq!(String::from_utf8_lossy(&output), expect);
    }

    #[test]
    fn the_deployed_image_is_the_one_that_was_built() {
        let (_, log) = run(&[], ContainerTool::Docker, "nothing");
        let Some(renderer) = ::tests::deploy::Renderer::or_skip() else { return };
        let rendered = renderer.render("overlays/kind").expect("it renders");
        let pods: Vec<_> =
            rendered.iter().map(|it| &it["spec"]["template"]["spec"]).filter(|it| it.is_object()).collect();
        assert_eq!(pods.len(), 1);
        assert_eq!(pods[0]["containers"][0]["image"], IMAGE);
        assert_eq!(pods[0]["containers"][0]["imagePullPolicy"], "Never");
        assert!(log.contains(&format!("--tag {IMAGE} ")) && log.contains("--kustomize deploy/overlays/kind"));
        let variables = pods[0]["containers"][0]["env"].as_array().expect("variables");
        let address = &variables[1]["valueFrom"]["configMapKeyRef"];
        let made = format!(
            "create configmap {} --from-literal={}=https://it's-control-plane:6443",
            address["name"].as_str().expect("a name"),
            address["key"].as_str().expect("a key")
        );
        assert!(log.contains(&made), "{made}");
    }
}
