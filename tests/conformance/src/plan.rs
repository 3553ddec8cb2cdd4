//! Every step of a run, as a shell command in the root of the workspace.
//! Invariant: pure; the commands that are printed are those that run.

use std::{env, fmt::Write as _};

use anyhow::{Result, bail};

use build_tools::container::{ContainerTool, IMAGE};

use crate::{
    options::{IpFamily, Options},
    skips,
};

/// kind, and the node image that this version was released with.
const KIND: &str = "v0.32.0";
const NODE_IMAGE: &str =
    "kindest/node:v1.36.1@sha256:3489c7674813ba5d8b1a9977baea8a6e553784dab7b84759d1014dbd78f7ebd5";
/// The version of the cluster and of the tests.
const KUBERNETES: &str = "v1.36.1";

/// The files of a run, from the root of the workspace.
pub(crate) const FOLDER: &str = "target/conformance";
/// The kubeconfig of the cluster.
pub(crate) const KUBECONFIG: &str = "target/conformance/kubeconfig";
/// Programs that are kept between runs.
const TOOLS: &str = "target/tools/conformance";

/// A step of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    /// What it is for.
    pub(crate) purpose: String,
    pub(crate) command: String,
}

impl Step {
    fn new(purpose: impl Into<String>, command: impl Into<String>) -> Self {
        Self { purpose: purpose.into(), command: command.into() }
    }
}

/// All steps of a run.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// The steps before there is a cluster.
    pub(crate) prepare: Vec<Step>,
    /// Until every node of the cluster serves.
    pub(crate) cluster: Vec<Step>,
    /// The tests.
    pub(crate) test: Vec<Step>,
    /// Only after a failure.
    pub(crate) evidence: Vec<Step>,
    /// In any case, unless the cluster is kept.
    pub(crate) end: Vec<Step>,
}

impl Plan {
    /// The plan for these options.
    pub(crate) fn new(
        options: &Options,
        tool: ContainerTool,
        skips: &[skips::Skip],
        revision: &str,
    ) -> Result<Self> {
        let arch = match env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => bail!("kind has no node image for {other}"),
        };
        let run = Run { options, tool, arch };
        Ok(Self {
            prepare: run.prepare(revision),
            cluster: run.cluster(),
            test: vec![run.test(&skips::expression(skips, options.ip_family))],
            evidence: run.evidence(),
            end: vec![Step::new(
                "remove the cluster",
                run.kind(&["delete", "cluster", "--name", &options.name]),
            )],
        })
    }

    /// The whole run as a shell script.
    pub(crate) fn script(&self) -> String {
        let mut script = String::from("#!/bin/sh\n# In the root of the workspace.\nset -eu\n");
        let parts = [
            ("Before there is a cluster", &self.prepare),
            ("The cluster, with kube-proxy-ebpf instead of kube-proxy", &self.cluster),
            ("The tests", &self.test),
            ("Only after a failure", &self.evidence),
            ("In any case, without --keep", &self.end),
        ];
        for (part, steps) in parts {
            let _ = writeln!(script, "\n### {part}");
            for step in steps {
                let _ = writeln!(script, "\n# {}\n{}", step.purpose, step.command);
            }
        }
        script
    }
}

struct Run<'a> {
    options: &'a Options,
    tool: ContainerTool,
    arch: &'a str,
}

impl Run<'_> {
    fn prepare(&self, revision: &str) -> Vec<Step> {
        let arch = self.arch;
        let words = self.tool.build(revision);
        let build: Vec<_> = words.iter().map(String::as_str).collect();
        let tests = format!("kubernetes-test-linux-{arch}.tar.gz");
        vec![
            Step::new(
                "remove the files of the last run",
                format!("rm -rf {FOLDER} && mkdir -p {FOLDER}/report {TOOLS}"),
            ),
            Step::new("build the image", line(&build)),
            Step::new(
                "write the image to a file",
                line(&[self.tool.program(), "save", "--output", &format!("{FOLDER}/image.tar"), IMAGE]),
            ),
            Step::new(
                format!("fetch kind {KIND}, once"),
                fetch(
                    &format!("https://kind.sigs.k8s.io/dl/{KIND}/kind-linux-{arch}"),
                    "sha256sum",
                    &kind(),
                    &format!("chmod +x {0}.part && mv {0}.part {0}", kind()),
                ),
            ),
            Step::new(
                format!("fetch kubectl {KUBERNETES}, once"),
                fetch(
                    &format!("https://dl.k8s.io/release/{KUBERNETES}/bin/linux/{arch}/kubectl"),
                    "sha256",
                    &kubectl(),
                    &format!("chmod +x {0}.part && mv {0}.part {0}", kubectl()),
                ),
            ),
            Step::new(
                format!("fetch Kubernetes' tests {KUBERNETES}, once"),
                fetch(
                    &format!("https://dl.k8s.io/release/{KUBERNETES}/{tests}"),
                    "sha256",
                    &format!("{}/e2e.test", test_folder()),
                    &format!(
                        "tar -xzf {0}/e2e.test.part -C {0} --strip-components=3 \
                         kubernetes/test/bin/ginkgo kubernetes/test/bin/e2e.test && rm {0}/e2e.test.part",
                        test_folder()
                    ),
                ),
            ),
            Step::new(
                "write the cluster's configuration",
                format!("cat > {FOLDER}/kind.yaml <<'EOF'\n{}EOF", cluster(self.options.ip_family)),
            ),
        ]
    }

    fn cluster(&self) -> Vec<Step> {
        let name = &self.options.name;
        let mut steps = vec![Step::new(
            "create the cluster",
            self.kind(&[
                "create",
                "cluster",
                "--name",
                name,
                "--image",
                NODE_IMAGE,
                "--config",
                &format!("{FOLDER}/kind.yaml"),
                "--kubeconfig",
                KUBECONFIG,
                "--retain",
                "--wait",
                "3m",
            ]),
        )];
        for node in self.nodes() {
            // systemd does not mount it in a container. Each node gets a file system of its own.
            let mount = "mountpoint -q /sys/fs/bpf || mount -t bpf bpf /sys/fs/bpf";
            let exec = [self.tool.program(), "exec", &node, "sh", "-c", mount];
            steps.push(Step::new(format!("mount a bpf file system on {node}"), line(&exec)));
        }
        steps.extend([
            Step::new(
                "load the image on the nodes",
                self.kind(&["load", "image-archive", &format!("{FOLDER}/image.tar"), "--name", name]),
            ),
            Step::new(
                "configure the address of the API server",
                kube_system(&[
                    "create",
                    "configmap",
                    "kube-proxy-ebpf-api-server",
                    &format!("--from-literal=url=https://{name}-control-plane:6443"),
                ]),
            ),
            Step::new("deploy", on_cluster(&["apply", "--kustomize", "deploy/overlays/kind"])),
            rollout("wait until every node serves", "daemonset/kube-proxy-ebpf"),
        ]);
        if self.options.ip_family == IpFamily::Ipv6 {
            // As Kubernetes' own IPv6 jobs do: names are not forwarded to a resolver that is reachable only over IPv4.
            let drop = r"-e '/forward \. /,/}/d' -e '/^ *loop$/d' -e '/fallthrough/d'";
            let get = kube_system(&["get", "configmap", "coredns", "--output=yaml"]);
            let apply = on_cluster(&["apply", "--filename=-"]);
            steps.push(Step::new("keep DNS inside the cluster", format!("{get} | sed {drop} | {apply}")));
        }
        // CoreDNS reaches the API server by its Service.
        steps.push(rollout("wait until DNS is ready", "deployment/coredns"));
        steps
    }

    fn test(&self, skip: &str) -> Step {
        let Options { focus, parallel, .. } = self.options;
        let ginkgo = format!("{}/ginkgo", test_folder());
        let e2e = format!("{}/e2e.test", test_folder());
        // For the tests of RuntimeClass.
        let environment = "KUBERNETES_CONFORMANCE_TEST=y KUBE_CONTAINER_RUNTIME=remote \
                           KUBE_CONTAINER_RUNTIME_ENDPOINT=unix:///run/containerd/containerd.sock \
                           KUBE_CONTAINER_RUNTIME_NAME=containerd";
        let command = line(&[
            &ginkgo,
            &format!("--nodes={parallel}"),
            "--timeout=6h",
            "--no-color",
            &format!("--focus={focus}"),
            &format!("--skip={skip}"),
            &e2e,
            "--",
            &format!("--kubeconfig={KUBECONFIG}"),
            "--provider=skeleton",
            &format!("--num-nodes={WORKERS}"),
            &format!("--report-dir={FOLDER}/report"),
            "--disable-log-dump=true",
        ]);
        Step::new("run the tests", format!("{environment} {command}"))
    }

    fn evidence(&self) -> Vec<Step> {
        let name = &self.options.name;
        let pods = "--selector=app.kubernetes.io/name=kube-proxy-ebpf";
        let to = |file: &str, words: &[&str]| format!("{} > {FOLDER}/{file}", on_cluster(words));
        let list = kube_system(&["get", "pods", pods, "--output=name"]);
        let dump = kube_system(&["exec", "POD", "--", "/usr/local/bin/kube-proxy-ebpf", "dump"])
            .replace("POD", "\"$pod\"");
        vec![
            Step::new(
                "keep the state of the cluster",
                to(
                    "objects.yaml",
                    &["get", "nodes,services,endpointslices", "--all-namespaces", "--output=yaml"],
                ),
            ),
            Step::new("keep the pods", to("pods.txt", &["get", "pods", "--all-namespaces", "--output=wide"])),
            Step::new(
                "keep the logs of kube-proxy-ebpf",
                to(
                    "kube-proxy-ebpf.log",
                    &["--namespace=kube-system", "logs", pods, "--all-containers", "--prefix", "--tail=-1"],
                ),
            ),
            Step::new(
                "keep the programmed state of each node",
                format!("for pod in $({list}); do {dump} > {FOLDER}/\"${{pod#pod/}}\".dump; done"),
            ),
            Step::new(
                "keep kind's logs",
                self.kind(&["export", "logs", &format!("{FOLDER}/logs"), "--name", name]),
            ),
        ]
    }

    fn nodes(&self) -> Vec<String> {
        let name = &self.options.name;
        vec![format!("{name}-control-plane"), format!("{name}-worker"), format!("{name}-worker2")]
    }

    fn kind(&self, words: &[&str]) -> String {
        let kind = kind();
        let command = line(&[&[kind.as_str()], words].concat());
        match self.tool {
            ContainerTool::Docker => command,
            other => format!("KIND_EXPERIMENTAL_PROVIDER={} {command}", other.program()),
        }
    }
}

/// The conformance tests need two.
const WORKERS: usize = 2;

/// kind's configuration of the cluster.
fn cluster(family: IpFamily) -> String {
    let mut text = format!(
        "kind: Cluster\n\
         apiVersion: kind.x-k8s.io/v1alpha4\n\
         networking:\n  \
           ipFamily: {}\n  \
           kubeProxyMode: none\n  \
           # Without the host's search domains.\n  \
           dnsSearch: []\n\
         nodes:\n  \
           - role: control-plane\n",
        family.name()
    );
    for _ in 0..WORKERS {
        text.push_str("  - role: worker\n");
    }
    text
}

fn kind() -> String {
    format!("{TOOLS}/kind-{KIND}")
}

fn kubectl() -> String {
    format!("{TOOLS}/kubectl-{KUBERNETES}")
}

fn test_folder() -> String {
    format!("{TOOLS}/tests-{KUBERNETES}")
}

fn on_cluster(words: &[&str]) -> String {
    let kubectl = kubectl();
    let config = format!("--kubeconfig={KUBECONFIG}");
    line(&[&[kubectl.as_str(), &config], words].concat())
}

fn kube_system(words: &[&str]) -> String {
    on_cluster(&[&["--namespace=kube-system"], words].concat())
}

fn rollout(purpose: &str, workload: &str) -> Step {
    Step::new(purpose, kube_system(&["rollout", "status", workload, "--timeout=5m"]))
}

/// Fetches a file unless it exists, and compares it with the checksum published next to it.
fn fetch(url: &str, sum: &str, to: &str, unpack: &str) -> String {
    let folder = to.rsplit_once('/').map_or(".", |(folder, _)| folder);
    format!(
        "test -x {to} || {{\n  \
           mkdir -p {folder}\n  \
           curl --fail --location --silent --show-error --retry 3 --output {to}.part {url}\n  \
           sum=$(curl --fail --location --silent --show-error --retry 3 {url}.{sum} | cut -d' ' -f1)\n  \
           echo \"$sum  {to}.part\" | sha256sum --check --quiet\n  \
           {unpack}\n\
         }}"
    )
}

/// A command line, quoted for a shell.
fn line(words: &[&str]) -> String {
    words.iter().map(|it| quoted(it)).collect::<Vec<_>>().join(" ")
}

fn quoted(word: &str) -> String {
    let plain = |it: char| it.is_ascii_alphanumeric() || "-_./:=,@%+".contains(it);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests;
