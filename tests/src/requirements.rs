//! What a machine must have for the real thing.
//! The one rule: whatever is missing is named together with its remedy.

use std::{
    fmt, fs,
    path::{Path, PathBuf},
};

use nix::unistd::geteuid;

/// The oldest kernel that has every feature the data plane needs.
const OLDEST_KERNEL: (u32, u32) = (5, 10);

/// Where the kernel's file systems are on this machine.
#[derive(Clone, Debug)]
pub struct Host {
    /// The root of the cgroup2 hierarchy.
    pub cgroup2: PathBuf,
    /// The BPF file system; `None` if it must be mounted first.
    pub bpffs: Option<PathBuf>,
    /// `uname -r`.
    pub kernel: String,
}

/// Something that is not there, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingRequirement {
    /// What.
    pub what: String,
    /// What to do.
    pub remedy: &'static str,
}

impl fmt::Display for MissingRequirement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what, self.remedy)
    }
}

/// Looks for what the real thing needs.
///
/// # Errors
///
/// Everything that is missing.
pub fn requirements() -> Result<Host, Vec<MissingRequirement>> {
    let mut missing = Vec::new();
    let mut need = |what: String, remedy| missing.push(MissingRequirement { what, remedy });

    if !geteuid().is_root() {
        need(
            format!("not root (uid {})", geteuid()),
            "run it as root, for example `sudo env PATH=\"$PATH\" cargo xtask …`",
        );
    }
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned();
    match version(&kernel) {
        Some(version) if version >= OLDEST_KERNEL => {}
        _ => need(format!("the kernel is {kernel:?}"), "use a Linux kernel of 5.10 or later"),
    }
    if !Path::new("/sys/kernel/btf/vmlinux").exists() {
        need("no /sys/kernel/btf/vmlinux".into(), "use a kernel built with CONFIG_DEBUG_INFO_BTF=y");
    }
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let cgroup2 = mounted(&mounts, "cgroup2");
    if cgroup2.is_none() {
        need(
            "no cgroup2 is mounted".into(),
            "mount it: `mkdir -p /sys/fs/cgroup/unified && mount -t cgroup2 none /sys/fs/cgroup/unified`",
        );
    }
    if !Path::new("/sys/fs/bpf").exists() {
        need(
            "no /sys/fs/bpf".into(),
            "use a kernel built with CONFIG_BPF_SYSCALL=y, and mount sysfs at /sys",
        );
    }
    match cgroup2 {
        Some(cgroup2) if missing.is_empty() => Ok(Host { cgroup2, bpffs: mounted(&mounts, "bpf"), kernel }),
        _ => Err(missing),
    }
}

/// Whether the kernel is at least this one, for what an older one does in another way.
#[must_use]
pub fn kernel_at_least(major: u32, minor: u32) -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    version(release.trim()) >= Some((major, minor))
}

fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|it: char| !it.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// Where a file system of this type is mounted, according to `/proc/self/mountinfo` (proc(5)).
fn mounted(mounts: &str, kind: &str) -> Option<PathBuf> {
    mounts.lines().find_map(|line| {
        let (place, source) = line.split_once(" - ")?;
        let point = place.split(' ').nth(4)?;
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
        assert!(version("5.9.0") < Some(OLDEST_KERNEL));
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
