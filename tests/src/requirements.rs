//! What end-to-end tests require of a machine.
//!
//! Every missing requirement is reported together with its remedy.

use std::{
    fs,
    path::{Path, PathBuf},
};

use build_tools::programs::find;
use nix::unistd::geteuid;

use crate::skip::skip;

/// The oldest supported kernel.
const MIN_KERNEL: (u32, u32) = (5, 10);

/// Where this machine mounts the kernel's file systems.
#[derive(Clone, Debug)]
pub struct Host {
    /// The root of the cgroup2 hierarchy.
    pub cgroup2: PathBuf,
    /// The BPF file system; `None` if it is not mounted.
    pub bpffs: Option<PathBuf>,
    /// `uname -r`.
    pub kernel: String,
}

/// Checks the requirements; the error is every missing one, with its remedy.
pub fn requirements() -> Result<Host, Vec<String>> {
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let cgroup2 = mounted(&mounts, "cgroup2");
    let requirements = [
        (
            geteuid().is_root(),
            format!("not root (uid {})", geteuid()),
            "run it as root, for example `sudo env PATH=\"$PATH\" cargo xtask …`",
        ),
        (
            version(&kernel) >= Some(MIN_KERNEL),
            format!("the kernel is {kernel:?}"),
            "use a Linux kernel of 5.10 or later",
        ),
        (
            Path::new("/sys/kernel/btf/vmlinux").exists(),
            "no /sys/kernel/btf/vmlinux".to_owned(),
            "use a kernel built with CONFIG_DEBUG_INFO_BTF=y",
        ),
        (
            cgroup2.is_some(),
            "no cgroup2 is mounted".to_owned(),
            "mount it: `mkdir -p /sys/fs/cgroup/unified && mount -t cgroup2 none /sys/fs/cgroup/unified`",
        ),
        (
            Path::new("/sys/fs/bpf").exists(),
            "no /sys/fs/bpf".to_owned(),
            "use a kernel built with CONFIG_BPF_SYSCALL=y, and mount sysfs at /sys",
        ),
    ];
    let missing = requirements.into_iter().filter(|(is_met, ..)| !is_met);
    let missing: Vec<_> = missing.map(|(_, what, remedy)| format!("{what}: {remedy}")).collect();
    match cgroup2 {
        Some(cgroup2) if missing.is_empty() => Ok(Host { cgroup2, bpffs: mounted(&mounts, "bpf"), kernel }),
        _ => Err(missing),
    }
}

/// Whether the kernel is at least of this version, for tests of features that older kernels lack.
pub fn kernel_at_least(major: u32, minor: u32) -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    version(release.trim()) >= Some((major, minor))
}

pub fn program_or_skip(name: &str) -> Option<PathBuf> {
    let found = find(name);
    if found.is_none() {
        skip(&format!("{name} is not installed"));
    }
    found
}

/// The first two numbers of a kernel's release.
pub fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|it: char| !it.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// The mount point of a file system type in `/proc/self/mountinfo` (proc(5)).
fn mounted(mounts: &str, kind: &str) -> Option<PathBuf> {
    mounts.lines().find_map(|line| {
        let (mount, source) = line.split_once(" - ")?;
        let point = mount.split(' ').nth(4)?;
        (source.split(' ').next() == Some(kind)).then(|| PathBuf::from(point))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_versions_are_compared_as_numbers() {
        assert_eq!(version("5.10.0-28-cloud-amd64"), Some((5, 10)));
        assert_eq!(version("6.18.44-fc"), Some((6, 18)));
        assert!(version("5.9.0") < Some(MIN_KERNEL));
        assert_eq!(version(""), None);
    }

    #[test]
    fn a_mount_is_found_by_its_type() {
        let mounts = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
                      41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:4 - cgroup2 cgroup2 rw\n";
        assert_eq!(mounted(mounts, "cgroup2"), Some("/sys/fs/cgroup/unified".into()));
        assert_eq!(mounted(mounts, "bpf"), None);
    }
}
