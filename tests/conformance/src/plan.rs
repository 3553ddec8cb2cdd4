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

fn step(purpose: impl Into<String>, command: impl Into<String>) -> Step {
    Step { purpose: purpose.into(), command: command.into() }
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
        let commands = Commands::new(options, tool);
        let Commands { kind, name, .. } = &commands;
        Ok(Self {
            prepare: commands.prepare(arch, options.ip_family, revision),
            cluster: commands.cluster(options.ip_family),
            test: vec![commands.test(options, &skips::expression(skips, options.ip_family))],
            evidence: commands.evidence(),
            end: vec![step("remove the cluster", format!("{kind} delete cluster --name {name}"))],
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

/// The programs of a run as the first words of a shell command, and the cluster's name, quoted.
struct Commands {
    tool: ContainerTool,
    kind: String,
    kubectl: String,
    /// kubectl in the namespace of the proxy and of CoreDNS.
    kubectl_system: String,
    name: String,
}

impl Commands {
    fn new(options: &Options, tool: ContainerTool) -> Self {
        let provider = match tool {
            ContainerTool::Docker => String::new(),
            other => format!("KIND_EXPERIMENTAL_PROVIDER={} ", other.program()),
        };
        let kubectl = format!("{TOOLS}/kubectl-{KUBERNETES} --kubeconfig={KUBECONFIG}");
        Self {
            tool,
            kind: format!("{provider}{TOOLS}/kind-{KIND}"),
            kubectl_system: format!("{kubectl} --namespace=kube-system"),
            kubectl,
            name: quoted(&options.name),
        }
    }

    fn prepare(&self, arch: &str, family: IpFamily, revision: &str) -> Vec<Step> {
        let tool = self.tool.program();
        let build: Vec<_> = self.tool.build(revision).iter().map(|it| quoted(it)).collect();
        let (kind, kubectl) = (format!("{TOOLS}/kind-{KIND}"), format!("{TOOLS}/kubectl-{KUBERNETES}"));
        let tests = format!("{TOOLS}/tests-{KUBERNETES}");
        let executable = |it: &str| format!("chmod +x {it}.part && mv {it}.part {it}");
        vec![
            step(
                "remove the files of the last run",
                format!("rm -rf {FOLDER} && mkdir -p {FOLDER}/report {TOOLS}"),
            ),
            step("build the image", build.join(" ")),
            step("write the image to a file", format!("{tool} save --output {FOLDER}/image.tar {IMAGE}")),
            step(
                format!("fetch kind {KIND}, once"),
                fetch(
                    &format!("https://kind.sigs.k8s.io/dl/{KIND}/kind-linux-{arch}"),
                    "sha256sum",
                    &kind,
                    &executable(&kind),
                ),
            ),
            step(
                format!("fetch kubectl {KUBERNETES}, once"),
                fetch(
                    &format!("https://dl.k8s.io/release/{KUBERNETES}/bin/linux/{arch}/kubectl"),
                    "sha256",
                    &kubectl,
                    &executable(&kubectl),
                ),
            ),
            step(
                format!("fetch Kubernetes' tests {KUBERNETES}, once"),
                fetch(
                    &format!("https://dl.k8s.io/release/{KUBERNETES}/kubernetes-test-linux-{arch}.tar.gz"),
                    "sha256",
                    &format!("{tests}/e2e.test"),
                    &format!(
                        "tar -xzf {tests}/e2e.test.part -C {tests} --strip-components=3 \
                         kubernetes/test/bin/ginkgo kubernetes/test/bin/e2e.test && rm {tests}/e2e.test.part"
                    ),
                ),
            ),
            step(
                "write the cluster's configuration",
                format!("cat > {FOLDER}/kind.yaml <<'EOF'\n{}EOF", cluster(family)),
            ),
        ]
    }

    fn cluster(&self, family: IpFamily) -> Vec<Step> {
        let Self { tool, kind, kubectl, kubectl_system, name } = self;
        let rollout = |purpose: &str, workload: &str| {
            step(purpose, format!("{kubectl_system} rollout status {workload} --timeout=5m"))
        };
        let mut steps = vec![step(
            "create the cluster",
            format!(
                "{kind} create cluster --name {name} --image {NODE_IMAGE} --config {FOLDER}/kind.yaml \
                 --kubeconfig {KUBECONFIG} --retain --wait 3m"
            ),
        )];
        for node in ["control-plane", "worker", "worker2"].map(|it| format!("{name}-{it}")) {
            // systemd does not mount it in a container. Each node gets a file system of its own.
            let mount = "'mountpoint -q /sys/fs/bpf || mount -t bpf bpf /sys/fs/bpf'";
            let command = format!("{} exec {node} sh -c {mount}", tool.program());
            steps.push(step(format!("mount a bpf file system on {node}"), command));
        }
        steps.extend([
            step(
                "load the image on the nodes",
                format!("{kind} load image-archive {FOLDER}/image.tar --name {name}"),
            ),
            step(
                "configure the address of the API server",
                format!(
                    "{kubectl_system} create configmap kube-proxy-ebpf-api-server \
                     --from-literal=url=https://{name}-control-plane:6443"
                ),
            ),
            step("deploy", format!("{kubectl} apply --kustomize deploy/overlays/kind")),
            rollout("wait until every node serves", "daemonset/kube-proxy-ebpf"),
        ]);
        if family == IpFamily::Ipv6 {
            // As Kubernetes' own IPv6 jobs do: names are not forwarded to a resolver that is reachable only over IPv4.
            let drop = r"-e '/forward \. /,/}/d' -e '/^ *loop$/d' -e '/fallthrough/d'";
            let get = format!("{kubectl_system} get configmap coredns --output=yaml");
            steps.push(step(
                "keep DNS inside the cluster",
                format!("{get} | sed {drop} | {kubectl} apply --filename=-"),
            ));
        }
        // CoreDNS reaches the API server by its Service.
        steps.push(rollout("wait until DNS is ready", "deployment/coredns"));
        steps
    }

    fn test(&self, Options { focus, parallel, .. }: &Options, skip: &str) -> Step {
        let tests = format!("{TOOLS}/tests-{KUBERNETES}");
        let [focus, skip] = [format!("--focus={focus}"), format!("--skip={skip}")].map(|it| quoted(&it));
        // The environment is for the tests of RuntimeClass.
        step(
            "run the tests",
            format!(
                "KUBERNETES_CONFORMANCE_TEST=y KUBE_CONTAINER_RUNTIME=remote \
                 KUBE_CONTAINER_RUNTIME_ENDPOINT=unix:///run/containerd/containerd.sock \
                 KUBE_CONTAINER_RUNTIME_NAME=containerd \
                 {tests}/ginkgo --nodes={parallel} --timeout=6h --no-color {focus} {skip} {tests}/e2e.test -- \
                 --kubeconfig={KUBECONFIG} --provider=skeleton --num-nodes={WORKERS} \
                 --report-dir={FOLDER}/report --disable-log-dump=true"
            ),
        )
    }

    fn evidence(&self) -> Vec<Step> {
        let Self { kind, kubectl, kubectl_system, name, .. } = self;
        let pods = "--selector=app.kubernetes.io/name=kube-proxy-ebpf";
        vec![
            step(
                "keep the state of the cluster",
                format!(
                    "{kubectl} get nodes,services,endpointslices --all-namespaces --output=yaml > {FOLDER}/objects.yaml"
                ),
            ),
            step(
                "keep the pods",
                format!("{kubectl} get pods --all-namespaces --output=wide > {FOLDER}/pods.txt"),
            ),
            step(
                "keep the logs of kube-proxy-ebpf",
                format!(
                    "{kubectl_system} logs {pods} --all-containers --prefix --tail=-1 > {FOLDER}/kube-proxy-ebpf.log"
                ),
            ),
            step(
                "keep the programmed state of each node",
                format!(
                    "for pod in $({kubectl_system} get pods {pods} --output=name); do {kubectl_system} exec \"$pod\" \
                     -- /usr/local/bin/kube-proxy-ebpf dump > {FOLDER}/\"${{pod#pod/}}\".dump; done"
                ),
            ),
            step("keep kind's logs", format!("{kind} export logs {FOLDER}/logs --name {name}")),
        ]
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

/// A word, quoted for a shell.
fn quoted(word: &str) -> String {
    let plain = |it: char| it.is_ascii_alphanumeric() || "-_./:=,@%+".contains(it);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests;
