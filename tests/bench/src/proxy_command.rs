//! The command lines of proxies: ours, kube-proxy's and KPNG's.
//! Invariant: all of them follow the API server of the same kubeconfig, and leave the machine's settings alone.

use std::{
    ffi::OsString,
    fs, iter,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};
use build_tools::command::output;
use serde_json::json;

/// The backends on the contract: the name, the package, and the arguments.
const BACKENDS: [(&str, &str, &[&str]); 4] = [
    ("kube-proxy-iptables, nft", "kube-proxy-iptables", &["--iptables-mode=nft"]),
    ("kube-proxy-iptables, legacy", "kube-proxy-iptables", &["--iptables-mode=legacy"]),
    ("kube-proxy-ipvs", IPVS, &[]),
    ("kube-proxy-userspace", "kube-proxy-userspace", &[LISTEN_AT_SERVICES]),
];
const LISTEN_AT_SERVICES: &str = "--listen=services";
/// The backend whose kernel module a machine may lack.
const IPVS: &str = "kube-proxy-ipvs";

/// The beginning of the names of this proxy's modes.
pub(crate) const OWN: &str = "kube-proxy-ebpf";

/// A proxy in one of its modes.
#[derive(Clone, Debug)]
pub(crate) struct Proxy {
    pub(crate) name: String,
    /// The version of another proxy, if it says so.
    pub(crate) version: Option<(String, String)>,
    /// The program that serves a backend with the cluster's state; others follow the API server themselves.
    pub(crate) brain: Option<PathBuf>,
    binary: PathBuf,
    mode: Mode,
}

#[derive(Clone, Copy, Debug)]
enum Mode {
    /// With a value of `--packets`.
    Own(&'static str),
    /// With a value of `mode`.
    KubeProxy(&'static str),
    /// With a backend.
    Kpng(&'static str),
    /// A backend on the contract, with its arguments.
    Backend(&'static [&'static str]),
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Place<'a> {
    pub(crate) files: &'a Path,
    pub(crate) kubeconfig: &'a Path,
    /// The cgroup of the sockets that it serves.
    pub(crate) cgroup: &'a Path,
    pub(crate) pins: &'a Path,
    /// The address of the brain that a backend follows.
    pub(crate) brain: &'a str,
}

impl Proxy {
    fn new(name: String, binary: &Path, mode: Mode) -> Self {
        Self { name, version: None, brain: None, binary: binary.to_owned(), mode }
    }

    /// This proxy, with eBPF alone and with nftables.
    pub(crate) fn own(binary: &Path) -> Vec<Self> {
        let modes = [("sockets", "off"), ("sockets and packets", "nft")];
        modes.map(|(mode, packets)| Self::new(format!("{OWN}, {mode}"), binary, Mode::Own(packets))).into()
    }

    pub(crate) fn kube_proxy(binary: &Path) -> Result<Vec<Self>> {
        let binary = find(binary)?;
        // `Kubernetes v1.36.2`
        let text = output(Command::new(&binary).arg("--version"))?;
        let version = text
            .split_whitespace()
            .map(|it| it.trim_start_matches('v'))
            .find(|it| it.starts_with(|it: char| it.is_ascii_digit()))
            .with_context(|| format!("--version prints no version: {text:?}"))?;
        let proxy = |mode| Self {
            version: Some(("kube-proxy".into(), version.into())),
            ..Self::new(format!("kube-proxy {version} {mode}"), &binary, Mode::KubeProxy(mode))
        };
        Ok(["nftables", "iptables"].map(proxy).into())
    }

    /// A KPNG that serves the node in one process, with each of its backends.
    pub(crate) fn kpng(binary: &Path) -> Result<Vec<Self>> {
        let binary = find(binary)?;
        let proxy = |backend| Self::new(format!("KPNG {backend}"), &binary, Mode::Kpng(backend));
        Ok(["nft", "iptables", "ebpf"].map(proxy).into())
    }

    /// The backends on the contract: that of this proxy's nftables, and those in a folder.
    pub(crate) fn backends(own: &Path, folder: &Path) -> Vec<Self> {
        let backend = |name: &str, binary: &Path, arguments| Self {
            brain: Some(own.to_owned()),
            ..Self::new(name.to_owned(), binary, Mode::Backend(arguments))
        };
        let nft: &[&str] = &["agent", "--backend=nft", "--conntrack-max-per-core=0", "--conntrack-min=0"];
        let nft = backend(&format!("{OWN} agent --backend nft"), own, nft);
        let others =
            BACKENDS.iter().map(|(name, package, arguments)| backend(name, &folder.join(package), arguments));
        iter::once(nft).chain(others).collect()
    }

    /// Whether it listens at the addresses of Services, which then have to be local.
    pub(crate) fn listens_at_services(&self) -> bool {
        matches!(self.mode, Mode::Backend(arguments) if arguments.contains(&LISTEN_AT_SERVICES))
    }

    /// Why this machine cannot run it, if it cannot.
    pub(crate) fn unavailable(&self) -> Option<&'static str> {
        let lacks_ipvs = self.binary.ends_with(IPVS) && !Path::new("/proc/net/ip_vs").exists();
        lacks_ipvs.then_some("the kernel has no ip_vs")
    }

    pub(crate) fn command_line(&self, place: &Place<'_>) -> Result<Vec<OsString>> {
        let mut line: Vec<OsString> = vec![self.binary.clone().into()];
        match self.mode {
            Mode::Own(packets) => {
                line.extend(
                    ["run", "--source=kube", "--node-name=n1", "--packets", packets].map(OsString::from),
                );
                line.extend(["--conntrack-max-per-core=0", "--conntrack-min=0"].map(OsString::from));
                for (flag, value) in [
                    ("--kubeconfig", place.kubeconfig.to_owned()),
                    ("--cgroup", place.cgroup.to_owned()),
                    ("--pin-dir", place.pins.to_owned()),
                    ("--status-socket", place.files.join("status.sock")),
                ] {
                    line.extend([flag.into(), value.into()]);
                }
            }
            Mode::KubeProxy(mode) => {
                let sync = json!({"minSyncPeriod": "100ms"});
                let config = json!({
                    "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",
                    "mode": mode, "hostnameOverride": "n1",
                    // The API server speaks JSON only.
                    "clientConnection": {
                        "kubeconfig": place.kubeconfig,
                        "contentType": "application/json", "acceptContentTypes": "application/json",
                    },
                    "conntrack": {
                        "maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s",
                    },
                    "iptables": sync, "nftables": sync,
                });
                let file = place.files.join("kube-proxy.yaml");
                fs::write(&file, config.to_string())?;
                line.extend(["--config".into(), file.into()]);
            }
            Mode::Kpng(backend) => {
                let kubeconfig = format!("--kubeconfig={}", place.kubeconfig.display());
                line.extend(["kube", &kubeconfig, "to-local", &format!("to-{backend}")].map(OsString::from));
                if backend == "nft" {
                    line.push("--cluster-cidrs=10.128.0.0/9".into());
                }
            }
            Mode::Backend(arguments) => {
                line.extend(arguments.iter().map(OsString::from));
                line.extend(["--node-name=n1", "--target", place.brain].map(OsString::from));
            }
        }
        Ok(line)
    }
}

fn find(binary: &Path) -> Result<PathBuf> {
    binary.canonicalize().with_context(|| format!("cannot find {}", binary.display()))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use ::tests::http;
    use api_server::{ApiServer, Settings};
    use serde_json::Value;

    use super::*;

    fn line(mode: Mode) -> (Vec<String>, tempfile::TempDir) {
        let files = tempfile::tempdir().unwrap();
        let [kubeconfig, cgroup, pins] = ["/k/config", "/cgroup/x", "/bpf/x"].map(Path::new);
        let place = Place { files: files.path(), kubeconfig, cgroup, pins, brain: "unix:///b" };
        let line = Proxy::new(String::new(), Path::new("/bin/proxy"), mode).command_line(&place).unwrap();
        (line.into_iter().map(|it| it.into_string().unwrap()).collect(), files)
    }

    #[test]
    fn kube_proxy_gets_its_mode_and_its_credentials_by_a_file() {
        let (line, files) = line(Mode::KubeProxy("nftables"));
        let file = files.path().join("kube-proxy.yaml");
        assert_eq!(line, ["/bin/proxy", "--config", file.to_str().unwrap()]);
        let config: Value = serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
        assert_eq!(config["mode"], "nftables");
        assert_eq!(config["clientConnection"]["kubeconfig"], "/k/config");
    }

    #[test]
    fn kpng_serves_the_node_in_one_process_and_a_backend_follows_the_brain() {
        let (kpng, _files) = line(Mode::Kpng("ebpf"));
        assert_eq!(kpng, ["/bin/proxy", "kube", "--kubeconfig=/k/config", "to-local", "to-ebpf"]);
        let (backend, _files) = line(Mode::Backend(&["--iptables-mode=nft"]));
        assert_eq!(backend, ["/bin/proxy", "--iptables-mode=nft", "--node-name=n1", "--target", "unix:///b"]);
    }

    #[test]
    fn backends_have_names_of_their_own_and_a_brain() {
        let backends = Proxy::backends(Path::new("/own"), Path::new("/folder"));
        let names: BTreeSet<_> = backends.iter().map(|it| &it.name).collect();
        assert_eq!(names.len(), backends.len());
        assert!(backends.iter().all(|it| it.brain.as_deref() == Some(Path::new("/own"))));
        let unavailable: Vec<_> = backends.iter().filter(|it| it.unavailable().is_some()).collect();
        assert!(unavailable.iter().all(|it| it.name == IPVS), "{unavailable:?}");
    }

    #[test]
    fn a_proxy_that_cannot_be_started_is_named() {
        let error = Proxy::kube_proxy(Path::new("/nowhere/kube-proxy")).unwrap_err();
        assert_eq!(error.to_string(), "cannot find /nowhere/kube-proxy");
        // It prints a version, and fails.
        let error = Proxy::kube_proxy(Path::new("/bin/false")).unwrap_err();
        assert!(error.to_string().contains("false --version` failed"), "{error}");
    }

    #[test]
    fn a_kube_proxy_finds_its_node_by_name() {
        let server = ApiServer::start(Settings::default()).unwrap();
        server.set(json!({"kind": "Node", "metadata": {"name": "n1"}, "status": {"addresses": []}}));
        let address = server.url().trim_start_matches("http://").parse().unwrap();
        let get = |name| http::get(address, &format!("/api/v1/nodes/{name}")).unwrap();
        assert!(get("n1").body.contains("\"name\":\"n1\""));
        assert_eq!(get("n2").status, 404);
    }
}
