//! Programs of this machine: where they are, and how a missing one is installed.

use std::{
    env, fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};

use crate::{
    apt,
    command::{cargo, output, run, status, workspace},
};

/// The programs that end-to-end tests call, and the packages that contain them.
pub const TEST_PROGRAMS: [(&str, &str); 20] = [
    ("chromedriver", "chromium-driver"),
    ("chromium", "chromium"),
    ("conntrack", "conntrack"),
    ("ethtool", "ethtool"),
    ("ip", "iproute2"),
    ("ip6tables-legacy-restore", "iptables"),
    ("ip6tables-legacy-save", "iptables"),
    ("ip6tables-nft-restore", "iptables"),
    ("ip6tables-nft-save", "iptables"),
    ("iptables-legacy-restore", "iptables"),
    ("iptables-legacy-save", "iptables"),
    ("iptables-nft-restore", "iptables"),
    ("iptables-nft-save", "iptables"),
    ("iperf3", "iperf3"),
    ("ipvsadm", "ipvsadm"),
    ("nft", "nftables"),
    ("setpriv", "util-linux"),
    ("ss", "iproute2"),
    ("tc", "iproute2"),
    ("unshare", "util-linux"),
];

/// The path of a program: on the PATH, or in /usr/sbin or /sbin.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    folders.map(|folder| folder.join(program)).find(|file| is_executable(file))
}

fn is_executable(file: &Path) -> bool {
    fs::metadata(file).is_ok_and(|it| it.is_file() && it.permissions().mode() & 0o111 != 0)
}

/// Finds a program, or installs the Debian package that contains it.
pub fn find_or_install(program: &str, package: &str) -> Result<PathBuf> {
    if let Some(path) = find(program) {
        return Ok(path);
    }
    apt_install(&[package]).with_context(|| {
        format!("`{program}` is missing: install it (package `{package}` on Debian and Ubuntu)")
    })?;
    find(program).with_context(|| format!("`{program}` is still missing after installing `{package}`"))
}

/// Finds a program on the PATH or at a path below target/tools; `install` puts a missing one there.
pub fn find_or_fetch(program: &str, path: &str, install: impl FnOnce() -> Result<()>) -> Result<PathBuf> {
    let private = workspace().join("target/tools").join(path);
    if let Some(path) = find(program).or_else(|| Some(private.clone()).filter(|it| is_executable(it))) {
        return Ok(path);
    }
    install().map(|()| private)
}

/// Finds a program on the PATH, or installs a version of it from crates.io, in target/tools.
pub fn cargo_tool(program: &str, version: &str) -> Result<PathBuf> {
    find_or_fetch(program, &format!("bin/{program}"), || {
        status("Installing", &format!("{program} {version}, once (a minute or two)"));
        // It runs for seconds, and would be optimized for minutes.
        let mut install = cargo_install(program, version);
        run(install.arg("--root").arg(workspace().join("target/tools")))
            .with_context(|| format!("`{program}` is missing and cannot be installed"))
    })
}

/// `cargo install` of a version of a program for this machine, without optimizations.
pub(crate) fn cargo_install(program: &str, version: &str) -> Command {
    let mut install = cargo();
    install.args(["install", program, "--version", version, "--debug", "--locked"]);
    // An ordinary program of the host.
    install.env_remove("RUSTFLAGS").env_remove("CARGO_ENCODED_RUSTFLAGS").env_remove("CARGO_TARGET_DIR");
    install
}

/// Installs a subcommand of cargo, if it is missing.
pub fn install_subcommand(program: &str) -> Result<()> {
    if find(program).is_some() {
        return Ok(());
    }
    status("Installing", program);
    run(cargo().args(["install", program, "--locked"]))
}

/// Finds or installs the programs of end-to-end tests; warns about those that stay missing, without which tests are skipped.
pub fn test_programs() -> Vec<PathBuf> {
    let found = TEST_PROGRAMS.iter().map(|(program, package)| find_or_install(program, package));
    found.filter_map(|it| it.inspect_err(|error| status("Warning", &format!("{error:#}"))).ok()).collect()
}

/// Finds `promtool`, or unpacks it in target/tools. It is not installed: that would start a server of Prometheus.
pub fn promtool() -> Result<PathBuf> {
    find_or_fetch("promtool", "prometheus/usr/bin/promtool", || {
        status("Fetching", "promtool, once (Debian's package prometheus)");
        apt::unpack_own("prometheus", &workspace().join("target/tools/prometheus"))
            .context("`promtool` is missing: install it (package `prometheus` on Debian and Ubuntu)")
    })
}

/// Installs the font of the pictures in the documents, if it is missing.
pub fn install_font() -> Result<()> {
    const PACKAGE: &str = "fonts-inter";
    if Path::new("/usr/share/doc").join(PACKAGE).exists() { Ok(()) } else { apt_install(&[PACKAGE]) }
}

/// Installs Debian packages, if this machine has apt and the user is root.
pub fn apt_install(packages: &[&str]) -> Result<()> {
    let names = packages.join(" ");
    if find("apt-get").is_none() {
        bail!("there is no `apt-get` to install {names} with");
    }
    if output(Command::new("id").arg("-u"))? != "0" {
        bail!("only root can run `apt-get install {names}`");
    }
    status("Installing", &format!("{names} (apt-get)"));
    let apt = || {
        let mut command = Command::new("apt-get");
        command.args(["-q", "-y"]).env("DEBIAN_FRONTEND", "noninteractive");
        command
    };
    // The old package lists often suffice; if not, the installation fails.
    if let Err(error) = run(apt().arg("update")) {
        status("Warning", &format!("{error:#}"));
    }
    run(apt().args(["install", "--no-install-recommends"]).args(packages))
}
