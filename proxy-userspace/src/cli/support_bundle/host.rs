//! The node as the proxy sees it: files of /proc and /sys, the environment, and the pinned objects.

use std::{env, fmt::Write as _, fs, path::Path};

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

/// The kernel, the limits and settings, our environment variables, and the names of the pinned objects.
pub(super) fn describe(pin_dir: &Path) -> String {
    let mut text = format!("architecture {}\n", env::consts::ARCH);
    for path in FILES {
        section(&mut text, path, &read(path));
    }
    let mounts = read("/proc/self/mountinfo");
    // Only these matter, and other mounts name volumes and servers.
    let mounts = mounts.lines().filter(|it| [" - cgroup", " - bpf "].iter().any(|kind| it.contains(kind)));
    section(
        &mut text,
        "/proc/self/mountinfo (cgroup and bpf)",
        &mounts.map(|it| format!("{it}\n")).collect::<String>(),
    );
    let mut variables: Vec<_> = env::vars_os().collect();
    variables.retain(|(name, _)| name.to_string_lossy().starts_with("KUBE_PROXY_EBPF_"));
    variables.sort();
    let variables = variables.iter().map(|(name, value)| format!("{}={}\n", name.display(), value.display()));
    section(&mut text, "environment", &variables.collect::<String>());
    let mut pins = String::new();
    list(pin_dir, &mut pins);
    section(&mut text, "pinned objects", &pins);
    text
}

fn section(text: &mut String, title: &str, content: &str) {
    let end = if content.is_empty() || content.ends_with('\n') { "" } else { "\n" };
    // Writing to a string cannot fail.
    let _ = write!(text, "\n== {title}\n{content}{end}");
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| format!("cannot be read: {error}"))
}

/// Appends the paths of a folder's files, sorted.
fn list(folder: &Path, paths: &mut String) {
    let entries = match fs::read_dir(folder) {
        Ok(it) => it,
        Err(error) => {
            let _ = writeln!(paths, "{}: cannot be read: {error}", folder.display());
            return;
        }
    };
    let mut entries: Vec<_> = entries.flatten().map(|it| it.path()).collect();
    entries.sort();
    for it in entries {
        if it.is_dir() {
            list(&it, paths);
        } else {
            let _ = writeln!(paths, "{}", it.display());
        }
    }
}
