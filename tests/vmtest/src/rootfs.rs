//! The root file system of every virtual machine: busybox, the tests, every build of the product, and this program.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Result;
use build_tools::{
    command::{output, workspace},
    programs::find_or_install,
};

use crate::initramfs::Initramfs;

/// The certificates that this machine trusts.
const CERTIFICATES: &str = "/etc/ssl/certs/ca-certificates.crt";

/// The root with these programs, without kernel modules and without a plan.
pub(crate) fn root(programs: impl Iterator<Item = PathBuf>) -> Result<Initramfs> {
    let busybox = find_or_install("busybox", "busybox-static")?;
    let mut root = Initramfs::new();
    root.program(&busybox, Some(Path::new("/bin/busybox")))?;
    let applets = output(Command::new(&busybox).arg("--list"))?;
    for applet in applets.lines().filter(|it| *it != "busybox") {
        root.link(format!("/bin/{applet}"), "/bin/busybox");
    }
    for program in programs {
        root.program(&program, None)?;
    }
    for build in fs::read_dir(workspace().join("target/test-binaries"))?.flatten() {
        root.program(&build.path().join("kube-proxy-ebpf"), None)?;
    }
    // The client of an API server needs trusted certificates.
    if let Ok(certificates) = fs::read(CERTIFICATES) {
        root.file(CERTIFICATES, certificates);
    }
    // The tests read the proxy's capabilities from the DaemonSet.
    root.folder(&workspace().join("deploy"))?;
    root.program(&std::env::current_exe()?, Some(Path::new("/guest")))?;
    root.link("/var/run", "/run");
    root.file("/init", include_str!("init.sh"));
    Ok(root)
}
