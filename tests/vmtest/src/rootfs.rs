//! The root file system of every virtual machine: busybox, the tests, every build of the product, and this program.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use anyhow::Result;
use build_tools::command::workspace;

use crate::{initramfs::Initramfs, system::System};

/// The certificates that this machine trusts.
const CERTIFICATES: &str = "/etc/ssl/certs/ca-certificates.crt";

/// The root with these test binaries, without kernel modules and without a plan.
pub(crate) fn root(system: &System, binaries: &BTreeSet<PathBuf>) -> Result<Initramfs> {
    let mut root = Initramfs::new();
    root.program(system, &system.busybox()?, Path::new("/bin/busybox"))?;
    for binary in binaries {
        root.program(system, binary, binary)?;
    }
    for (program, path) in system.programs() {
        root.program(system, program, path)?;
    }
    // The client of an API server needs trusted certificates.
    if let Ok(certificates) = fs::read(CERTIFICATES) {
        root.file(CERTIFICATES, certificates);
    }
    // The tests read the proxy's capabilities from the DaemonSet.
    root.folder(&workspace().join("deploy"))?;
    root.link("/var/run", "/run");
    root.file("/init", include_str!("init.sh"));
    Ok(root)
}
