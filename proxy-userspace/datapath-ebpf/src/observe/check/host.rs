//! Whether the host has what the datapath needs.

use std::path::Path;

use aya::{
    programs::ProgramType,
    sys::{BpfHelper, is_helper_supported},
};
use datapath::{Finding, Level};
use netlink::{netns::sees_all_processes, sock_diag::Transport};

use crate::{
    host::{
        capabilities::{
            Capabilities, SYS_ADMIN, SYS_PTRACE, SYS_RESOURCE, charges_memlock, is_in_user_namespace,
            kernel_release, kernel_version, memlock_limit,
        },
        cgroup::{Cgroup, NESTED, NESTED_REMEDY, Reach},
    },
    maps::{exclusions, pins::Pins},
    options::Options,
    programs::socket_termination,
};

/// The oldest kernel with everything that the programs need.
const OLDEST: (u32, u32) = (5, 10);
/// From this kernel on a program can choose the errno of a refused call (`bpf_set_retval`).
const HAS_SET_RETVAL: (u32, u32) = (5, 18);

pub(super) fn check(options: &Options) -> Vec<Finding> {
    let capabilities = Capabilities::own();
    let mut findings = vec![kernel(&kernel_release()), btf(), cgroup(options), pin_dir(options)];
    findings.extend(exclusions::missing(&options.excluded_cgroups).map(|it| {
        Finding::degraded(
            "exclusion",
            format!("{} does not exist: nothing is excluded there", it.display()),
            "--socket-lb-exclude-cgroup takes the path below /sys/fs/cgroup; the cgroup may be created later",
        )
    }));
    findings.push(capability_finding(capabilities));
    findings.extend([Transport::Udp, Transport::Tcp].map(|it| termination(it, capabilities)));
    findings.extend(memlock());
    findings
}

pub(super) fn kernel(release: &str) -> Finding {
    const SUBJECT: &str = "kernel";
    let Some(version) = kernel_version(release) else {
        let says = format!("{release:?} is not a kernel version");
        return Finding::degraded(SUBJECT, says, "make sure that it is Linux 5.10 or later");
    };
    if version < OLDEST {
        let says = format!("Linux {release} lacks what the programs need");
        return Finding::broken(SUBJECT, says, "use Linux 5.10 or later");
    }
    let helper = is_helper_supported(ProgramType::CgroupSockAddr, BpfHelper::BPF_FUNC_set_retval);
    match helper.unwrap_or(version >= HAS_SET_RETVAL) {
        true => Finding::ok(SUBJECT, format!("Linux {release} has everything that is used")),
        false => Finding::degraded(
            SUBJECT,
            format!(
                "Linux {release} cannot refuse UDP at once: a program gets ECONNREFUSED from its second send on"
            ),
            "use Linux 5.18 or later if that matters; TCP is refused at once on any kernel",
        ),
    }
}

fn btf() -> Finding {
    const SUBJECT: &str = "BTF";
    const FILE: &str = "/sys/kernel/btf/vmlinux";
    if Path::new(FILE).exists() {
        return Finding::ok(SUBJECT, format!("{FILE} exists"));
    }
    let says = format!(
        "{FILE} does not exist: a kernel without type information rejects the programs (since Linux 5.19), or they do not \
         recognize its own sockets"
    );
    Finding::broken(SUBJECT, says, "use a kernel built with CONFIG_DEBUG_INFO_BTF=y, and mount sysfs at /sys")
}

fn cgroup(options: &Options) -> Finding {
    const SUBJECT: &str = "cgroup";
    let cgroup = match Cgroup::open(options.cgroup.as_deref()) {
        Ok(cgroup) => cgroup,
        Err(error) if options.cgroup.is_some() => return Finding::failed(SUBJECT, Level::Broken, &error),
        Err(error) => {
            let remedy = "mount it: `mkdir -p /sys/fs/cgroup/unified && mount -t cgroup2 none /sys/fs/cgroup/unified`; \
                          in a container, mount the host's /sys/fs/cgroup";
            return Finding::broken(SUBJECT, error.to_string(), remedy);
        }
    };
    let shown = cgroup.path.display();
    match cgroup.reach() {
        Reach::Machine => {
            Finding::ok(SUBJECT, format!("{shown} is the machine's root cgroup: every process is served"))
        }
        Reach::Pods(pods) => {
            Finding::ok(SUBJECT, format!("{shown} is a nested root with the pods below it ({pods})"))
        }
        Reach::Explicit => Finding::ok(
            SUBJECT,
            format!("{shown}: as requested, only sockets of processes in it and below are translated"),
        ),
        Reach::Nested => Finding::degraded(SUBJECT, format!("{shown} {NESTED}"), NESTED_REMEDY),
    }
}

fn pin_dir(options: &Options) -> Finding {
    const SUBJECT: &str = "bpf file system";
    let pins = Pins::new(&options.pin_dir);
    match pins.is_on_bpffs() {
        Ok(true) => Finding::ok(SUBJECT, format!("{} is on a bpf file system", options.pin_dir.display())),
        Ok(false) => Finding::degraded(
            SUBJECT,
            "none is mounted at /sys/fs/bpf: `run` mounts it, for the lifetime of its mount namespace",
            "mount it on the host: `mount -t bpf bpf /sys/fs/bpf`; in a container, mount the host's",
        ),
        Err(error) => Finding::failed(SUBJECT, Level::Broken, &error),
    }
}

/// Whether sockets can be terminated: connected UDP sockets when their endpoint is removed, and TCP connections when their
/// Service has drained.
fn termination(transport: Transport, capabilities: Capabilities) -> Finding {
    let (subject, sockets, when, otherwise, used_by) = match transport {
        Transport::Udp => (
            "UDP termination",
            "connected sockets",
            "when their endpoint is removed",
            "get ECONNREFUSED through nftables",
            "programs here keep UDP sockets connected to Services",
        ),
        Transport::Tcp => (
            "TCP draining",
            "connections",
            "when the time of the annotation drain has passed since their endpoint left",
            "are kept",
            "Services here have the annotation drain",
        ),
    };
    match socket_termination::is_supported(transport) {
        Ok(()) if enters_pods(capabilities) => {
            Finding::ok(subject, format!("{sockets} are terminated {when}"))
        }
        Ok(()) => Finding::ok(
            subject,
            format!(
                "{sockets} of this network namespace are terminated {when}; those of pods {otherwise}, unless \
                 CAP_SYS_ADMIN, CAP_SYS_PTRACE and the host's process ids (hostPID) are granted"
            ),
        ),
        Err(error) => Finding::degraded(
            subject,
            format!("{sockets} stay with a removed endpoint: {error}"),
            format!("use a kernel with CONFIG_INET_DIAG_DESTROY=y if {used_by}"),
        ),
    }
}

/// Whether the network namespaces of pods can be entered.
pub(super) fn enters_pods(capabilities: Capabilities) -> bool {
    [SYS_ADMIN, SYS_PTRACE].iter().all(|it| capabilities.has(*it)) && sees_all_processes()
}

fn capability_finding(capabilities: Capabilities) -> Finding {
    const SUBJECT: &str = "capabilities";
    let names = |only_missing: bool| {
        let needed = capabilities.needed().iter().filter(|it| !only_missing || !capabilities.has(**it));
        needed.map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
    };
    if is_in_user_namespace() {
        return Finding::broken(
            SUBJECT,
            "they are those of a user namespace, from which Linux loads no programs",
            "use --backend nft, or run it outside of the namespace",
        );
    }
    let missing = names(true);
    if missing.is_empty() {
        return Finding::ok(SUBJECT, format!("{} are effective", names(false)));
    }
    Finding::broken(
        SUBJECT,
        format!("missing: {missing}"),
        "run as root; in a container, add them (securityContext.capabilities) or make it privileged",
    )
}

/// Only older kernels count maps as locked memory.
fn memlock() -> Option<Finding> {
    const SUBJECT: &str = "locked memory";
    if !charges_memlock(&kernel_release()) {
        return None;
    }
    Some(match memlock_limit() {
        None => Finding::ok(SUBJECT, "the limit can be lifted"),
        Some(limit) => Finding::degraded(
            SUBJECT,
            format!(
                "this kernel counts maps as locked memory, limited to {} KiB (RLIMIT_MEMLOCK)",
                limit / 1024
            ),
            format!("add {}, or raise the limit (`ulimit -l unlimited`)", SYS_RESOURCE.0),
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::capabilities::{BPF, Capability, NET_ADMIN, PERFMON};

    #[test]
    fn a_kernel_that_is_too_old_is_broken() {
        assert_eq!(kernel("5.9.16-generic").level, Level::Broken);
        assert_eq!(kernel("unreadable").level, Level::Degraded);
        assert_ne!(kernel("5.10.0").level, Level::Broken);
    }

    #[test]
    fn missing_capabilities_are_named() {
        let check = |capabilities: &[Capability]| {
            let mask = capabilities.iter().map(|it| 1 << it.1).sum();
            let Finding { level, says, .. } = capability_finding(Capabilities(mask));
            (level, says)
        };
        assert_eq!(check(&[SYS_ADMIN, NET_ADMIN]).0, Level::Ok);
        assert_eq!(check(&[BPF, PERFMON, NET_ADMIN]).0, Level::Ok);
        assert_eq!(check(&[SYS_ADMIN]), (Level::Broken, "missing: CAP_NET_ADMIN".into()));
        assert_eq!(check(&[PERFMON]), (Level::Broken, "missing: CAP_BPF, CAP_NET_ADMIN".into()));
    }
}
