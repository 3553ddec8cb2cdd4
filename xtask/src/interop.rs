//! `cargo xtask interop`: backends in several languages, asked by `backend-conformance`.
//! Invariant: what could not be run is listed at the end with the reason.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail, ensure};
use build_tools::{
    build,
    command::{cargo, output, run, status, workspace},
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
/// Where they are.
const GO_SOURCES: &str = "/usr/share/gocode";

/// A backend: how it is built, which returns its command.
type Example = (&'static str, fn(&Path) -> Result<Vec<PathBuf>>);

const EXAMPLES: [Example; 3] = [("Rust", rust), ("Python", python), ("Go", go)];

/// Builds every example whose language this machine has, and plays the cases to it.
pub(crate) fn interop(arguments: &[std::ffi::OsString]) -> Result<()> {
    let binary = build::build(false)?;
    let folder = workspace().join("target/interop");
    let mut results = Vec::new();
    for (language, build) in EXAMPLES {
        let folder = folder.join(language.to_lowercase());
        fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let result = match build(&folder) {
            Err(error) => ("Skipped", format!("{language}: {error:#}")),
            Ok(command) => {
                status("Running", &format!("backend-conformance, with the example in {language}"));
                let mut conformance = Command::new(&binary);
                conformance.arg("backend-conformance").args(arguments).args(["--lines", "--"]).args(command);
                // What the example logs would hide the results.
                let log = folder.join("log");
                match run(conformance.env("PYTHONPATH", &folder).stderr(fs::File::create(&log)?)) {
                    Ok(()) => ("Passed", language.to_owned()),
                    Err(error) => ("Failed", format!("{language}: {error:#}; see {}", log.display())),
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

fn rust(_: &Path) -> Result<Vec<PathBuf>> {
    let target = workspace().join("target");
    run(cargo()
        .args(["build", "--package", "proxy-contract", "--example", "lines", "--target-dir"])
        .arg(&target))?;
    Ok(vec![target.join("debug/examples/lines")])
}

fn python(folder: &Path) -> Result<Vec<PathBuf>> {
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
    Ok(vec![python, workspace().join("proto/examples/python/backend.py")])
}

fn go(folder: &Path) -> Result<Vec<PathBuf>> {
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
    Ok(vec![backend])
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
