//! The node as the proxy sees it: files of /proc and /sys, the environment, and the pinned objects.

use std::{
    env, fs,
    io::{self, Write},
    path::Path,
};

/// Files whose whole content is of interest.
const FILES: [&str; 15] = [
    "/proc/version",
    "/proc/loadavg",
    "/proc/meminfo",
    "/proc/self/cgroup",
    "/proc/self/limits",
    "/proc/self/status",
    "/proc/sys/kernel/unprivileged_bpf_disabled",
    "/proc/sys/net/core/bpf_jit_enable",
    "/proc/sys/net/ipv4/ip_forward",
    "/proc/sys/net/ipv4/ip_local_port_range",
    "/proc/sys/net/ipv6/conf/all/forwarding",
    "/proc/sys/net/netfilter/nf_conntrack_count",
    "/proc/sys/net/netfilter/nf_conntrack_max",
    "/sys/kernel/security/lockdown",
    "/sys/kernel/security/lsm",
];

/// Writes the kernel, the limits and settings, our environment variables, and the names of the pinned objects.
pub(super) fn describe(pin_dir: &Path, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "architecture {}", env::consts::ARCH)?;
    for path in FILES {
        let text = read(path);
        let end = if text.is_empty() || text.ends_with('\n') { "" } else { "\n" };
        write!(out, "\n== {path}\n{text}{end}")?;
    }
    writeln!(out, "\n== /proc/self/mountinfo (cgroup and bpf)")?;
    // Only these matter, and other mounts name volumes and servers.
    let is_ours = |it: &&str| [" - cgroup", " - bpf "].iter().any(|kind| it.contains(kind));
    read("/proc/self/mountinfo").lines().filter(is_ours).try_for_each(|it| writeln!(out, "{it}"))?;
    writeln!(out, "\n== environment")?;
    let mut variables: Vec<_> = env::vars_os().collect();
    variables.retain(|(name, _)| name.to_string_lossy().starts_with("KUBE_PROXY_EBPF_"));
    variables.sort();
    for (name, value) in variables {
        writeln!(out, "{}={}", name.display(), value.display())?;
    }
    writeln!(out, "\n== pinned objects")?;
    list(pin_dir, out)
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| format!("cannot be read: {error}"))
}

/// Writes the paths of a folder's files, sorted.
fn list(folder: &Path, out: &mut dyn Write) -> io::Result<()> {
    let entries = match fs::read_dir(folder) {
        Ok(it) => it,
        Err(error) => return writeln!(out, "{}: cannot be read: {error}", folder.display()),
    };
    let mut entries: Vec<_> = entries.flatten().map(|it| it.path()).collect();
    entries.sort();
    entries.iter().try_for_each(|it| match it.is_dir() {
        true => list(it, out),
        false => writeln!(out, "{}", it.display()),
    })
}
