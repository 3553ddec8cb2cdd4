//! `cargo xtask interop`: the examples in several languages and the backends on the contract, asked by `backend-conformance`.
//! Invariant: what could not be run is listed at the end with the reason.

use std::{
    env,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail, ensure};
use build_tools::{
    build,
    command::{cargo_into_target, output, run, status, workspace},
    create_folder,
    other_systems::{build_for_other_systems, windows_binary, wine},
    programs::{apt_install, find, find_or_install},
};

/// The packages of PyPI with which the example in Python runs.
const PYTHON_PACKAGES: [&str; 2] = ["grpcio==1.85.1", "grpcio-tools==1.85.1"];
/// The Go packages of Debian and Ubuntu, without which there is no gRPC for Go but from the Internet.
const GO_PACKAGES: [&str; 5] = [
    "golang-github-golang-protobuf-1-5-dev",
    "golang-google-grpc-dev",
    "protobuf-compiler",
    "protoc-gen-go",
    "protoc-gen-go-grpc",
];
/// Where the Go packages are.
const GO_SOURCES: &str = "/usr/share/gocode";

/// A backend: how it is asked, and how it is built, which returns its command.
struct Backend {
    name: &'static str,
    asked: &'static str,
    build: fn(&Path) -> Result<Vec<OsString>>,
}

const BACKENDS: [Backend; 8] = [
    Backend { name: "Rust", asked: "--lines", build: rust },
    Backend { name: "Python", asked: "--lines", build: python },
    Backend { name: "Go", asked: "--lines", build: go },
    Backend { name: "iptables", asked: "--packets", build: |_| iptables("nft") },
    Backend { name: "iptables-legacy", asked: "--packets", build: |_| iptables("legacy") },
    Backend { name: "ipvs", asked: "--packets", build: ipvs },
    Backend {
        name: "userspace",
        asked: "--listeners --skip backends/userspace/conformance-skips.txt",
        build: |_| Ok(listening(build::backend_binary("kube-proxy-userspace"))),
    },
    Backend {
        name: "userspace-wine",
        asked: "--listeners --skip backends/userspace/conformance-skips-wine.txt --timeout 120",
        build: userspace_under_wine,
    },
];
/// Several may run at a time, and none is asked for its pages.
const WITHOUT_PAGES: [&str; 2] = ["--healthz-bind-address=", "--metrics-bind-address="];

/// Builds every backend that this machine can run, and plays the cases to it.
pub(crate) fn interop(arguments: &[OsString]) -> Result<()> {
    let binary = build::build(false)?;
    build::build_backends(false)?;
    build_for_other_systems()?;
    let folder = workspace().join("target/interop");
    let mut results = Vec::new();
    for Backend { name, asked, build } in BACKENDS {
        let folder = folder.join(name.to_lowercase());
        create_folder(&folder)?;
        let result = match build(&folder) {
            Err(error) => ("Skipped", format!("{name}: {error:#}")),
            Ok(command) => {
                status("Running", &format!("backend-conformance, with {name}"));
                let mut conformance = Command::new(&binary);
                conformance.arg("backend-conformance").args(asked.split(' '));
                conformance.args(arguments).arg("--").args(command);
                conformance.current_dir(workspace());
                // What the example logs would hide the results.
                let log = folder.join("log");
                match run(conformance.env("PYTHONPATH", &folder).stderr(fs::File::create(&log)?)) {
                    Ok(()) => ("Passed", name.to_owned()),
                    Err(error) => ("Failed", format!("{name}: {error:#}; see {}", log.display())),
                }
            }
        };
        results.push(result);
    }
    for (verb, text) in &results {
        status(verb, text);
    }
    ensure!(results.iter().all(|(verb, _)| *verb != "Failed"), "not every backend is right");
    Ok(())
}

fn iptables(mode: &str) -> Result<Vec<OsString>> {
    Ok(command(build::backend_binary("kube-proxy-iptables"), &["--iptables-mode", mode]))
}

fn ipvs(_: &Path) -> Result<Vec<OsString>> {
    ensure!(
        Path::new("/proc/net/ip_vs").exists(),
        "this kernel has no IPVS; `cargo xtask vmtest 6.1 kube_proxy_ipvs` asks it in a virtual machine"
    );
    Ok(command(build::backend_binary("kube-proxy-ipvs"), &[]))
}

fn userspace_under_wine(folder: &Path) -> Result<Vec<OsString>> {
    let wine =
        wine().filter(|_| windows_binary().exists()).context("Wine is missing, or a compiler for Windows")?;
    let mut prefix = OsString::from("WINEPREFIX=");
    prefix.push(folder.join("wine"));
    let mut command = vec!["env".into(), prefix, "WINEDEBUG=-all".into(), wine.into()];
    command.extend(listening(windows_binary()));
    Ok(command)
}

/// The command of the backend that listens at the addresses of Services.
fn listening(binary: PathBuf) -> Vec<OsString> {
    command(binary, &["--listen", "services"])
}

/// The command of a backend on the contract.
fn command(binary: PathBuf, flags: &[&str]) -> Vec<OsString> {
    let flags = flags.iter().copied().chain(WITHOUT_PAGES).map(OsString::from);
    [binary.into()].into_iter().chain(flags).collect()
}

fn rust(_: &Path) -> Result<Vec<OsString>> {
    let example = ["--package", "proxy-contract", "--features", "backend", "--example", "lines"];
    run(cargo_into_target("build").args(example))?;
    Ok(vec![workspace().join("target/debug/examples/lines").into()])
}

fn python(folder: &Path) -> Result<Vec<OsString>> {
    let python = folder.join("venv/bin/python");
    if !python.exists() {
        let system = find("python3").context("`python3` is missing: install it")?;
        output(Command::new(system).args(["-m", "venv"]).arg(folder.join("venv")))?;
    }
    // Fetches nothing if they are there.
    output(Command::new(&python).args(["-m", "pip", "install", "--quiet"]).args(PYTHON_PACKAGES))?;
    let mut protoc = Command::new(&python);
    protoc.args(["-m", "grpc_tools.protoc"]).args(generated("python_out", "grpc_python_out", folder));
    output(&mut protoc)?;
    Ok(vec![python.into(), workspace().join("proto/examples/python/backend.py").into()])
}

fn go(folder: &Path) -> Result<Vec<OsString>> {
    let go = find_or_install("go", "golang-go")?;
    if find("protoc-gen-go-grpc").is_none()
        || !Path::new(GO_SOURCES).join("src/google.golang.org/grpc").exists()
    {
        apt_install(&GO_PACKAGES)?;
    }
    let sources = folder.join("src");
    let package = sources.join("backend");
    fs::create_dir_all(&package)?;
    output(Command::new("protoc").args(generated("go_out", "go-grpc_out", &sources)))?;
    for file in fs::read_dir(workspace().join("proto/examples/go"))?.flatten() {
        fs::copy(file.path(), package.join(file.file_name()))?;
    }
    let paths = env::join_paths([folder, Path::new(GO_SOURCES)])?;
    let backend = folder.join("backend");
    let mut build = Command::new(go);
    build.args(["build", "-o"]).arg(&backend).arg(".").current_dir(&package);
    // Debian's packages are sources below a GOPATH, and no modules.
    output(build.env("GO111MODULE", "off").env("GOPATH", paths).env("GOCACHE", folder.join("cache")))?;
    if !backend.exists() {
        bail!("go has built nothing");
    }
    Ok(vec![backend.into()])
}

/// The arguments of protoc for the state of a node.
fn generated(messages: &str, services: &str, folder: &Path) -> Vec<String> {
    let proto = workspace().join("proto/proto");
    vec![
        format!("-I{}", proto.display()),
        format!("--{messages}={}", folder.display()),
        format!("--{services}={}", folder.display()),
        proto.join("localv1/localv1.proto").display().to_string(),
    ]
}
