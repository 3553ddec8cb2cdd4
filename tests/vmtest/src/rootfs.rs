//! The root file system of every virtual machine: busybox, the tests, every build of the product, and this program.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use anyhow::Result;
use build_tools::command::workspace;

use crate::{initramfs::Initramfs, system::System};

/// Files of this machine that programs read: the certificates that a client of an API server trusts, and the names of protocols
/// for `nft`.
const FILES: [&str; 2] = ["/etc/ssl/certs/ca-certificates.crt", "/etc/protocols"];

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
    for path in FILES {
        if let Ok(bytes) = fs::read(path) {
            root.file(path, bytes);
        }
    }
    // The tests read the proxy's capabilities from the DaemonSet.
    root.folder(&workspace().join("deploy"))?;
    root.link("/var/run", "/run");
    root.file("/init", include_str!("init.sh"));
    Ok(root)
}
