//! What the kernel offers, and what this process may do with it.

use std::{fs, path::Path};

use aya::{
    programs::ProgramType,
    sys::{BpfHelper, is_helper_supported},
};
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};

use super::{Finding, Level};
use crate::{
    ebpf::{
        Options,
        cgroup::{Cgroup, NESTED, NESTED_REMEDY, Reach},
        ending, exclusions,
        pins::Pins,
    },
    namespaces::sees_every_process,
};

/// The oldest kernel that has all that the programs cannot do without.
const OLDEST: (u32, u32) = (5, 10);
/// From here on a program can say with which errno a call ends.
const SAYS_ERRNO: (u32, u32) = (5, 18);
/// From here on map memory is charged to the cgroup, not to RLIMIT_MEMLOCK.
const CHARGES_CGROUP: (u32, u32) = (5, 11);

pub(super) fn check(options: &Options) -> Vec<Finding> {
    let release = release();
    let release = &*release;
    let capabilities = Capabilities::own();
    let mut findings = vec![kernel(release), btf(), cgroup(options), pin_dir(options)];
    findings.extend(exclusions::missing(&options.excluded_cgroups).map(|it| {
        Finding::degraded(
            "exclusion",
            format!("{} does not exist: nobody there is left alone", it.display()),
            "see that --socket-lb-exclude-cgroup names it as it is below /sys/fs/cgroup; it may come later",
        )
    }));
    findings.push(capabilities.check());
    findings.push(endings(&capabilities));
    findings.extend(memlock(release, &capabilities));
    findings
}

/// `uname -r`.
pub(super) fn release() -> String {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    release.trim().to_owned()
}

pub(super) fn kernel(release: &str) -> Finding {
    const SUBJECT: &str = "kernel";
    let Some(version) = version(release) else {
        let says = format!("{release:?} cannot be read as a version");
        return Finding::degraded(SUBJECT, says, "see that it is Linux 5.10 or later");
    };
    if version < OLDEST {
        let says = format!("Linux {release} lacks what the programs need");
        return Finding::broken(SUBJECT, says, "use Linux 5.10 or later");
    }
    let helper = is_helper_supported(ProgramType::CgroupSockAddr, BpfHelper::BPF_FUNC_set_retval);
    match helper.unwrap_or(version >= SAYS_ERRNO) {
        true => Finding::ok(SUBJECT, format!("Linux {release} has everything that is used")),
        false => Finding::degraded(
            SUBJECT,
            format!("Linux {release} cannot refuse UDP at once: a program hears of it at its second send"),
            "use Linux 5.18 or later, if that matters; TCP is refused at once on any",
        ),
    }
}

fn btf() -> Finding {
    const SUBJECT: &str = "type information";
    const FILE: &str = "/sys/kernel/btf/vmlinux";
    if Path::new(FILE).exists() {
        return Finding::ok(SUBJECT, format!("{FILE} is there"));
    }
    let says = format!("there is no {FILE}, which socket storage needs");
    Finding::broken(SUBJECT, says, "use a kernel built with CONFIG_DEBUG_INFO_BTF=y, and mount sysfs at /sys")
}

fn cgroup(options: &Options) -> Finding {
    const SUBJECT: &str = "cgroup";
    let cgroup = match Cgroup::open(options.cgroup.as_deref()) {
        Ok(cgroup) => cgroup,
        Err(error) if options.cgroup.is_some() => return Finding::failed(SUBJECT, &error),
        Err(error) => {
            let remedy = "mount it: `mkdir -p /sys/fs/cgroup/unified && mount -t cgroup2 none /sys/fs/cgroup/unified`; \
                          in a container, mount the host's /sys/fs/cgroup";
            return Finding::broken(SUBJECT, error.to_string(), remedy);
        }
    };
    let shown = cgroup.path().display();
    match cgroup.reach() {
        Reach::Machine => {
            Finding::ok(SUBJECT, format!("{shown} is the machine's root: every process is served"))
        }
        Reach::Pods(pods) => {
            Finding::ok(SUBJECT, format!("{shown} is a nested root, with the pods below it ({pods})"))
        }
        Reach::Named => Finding::ok(
            SUBJECT,
            format!("{shown}: only processes in it and below are served, as was asked for"),
        ),
        Reach::Nested => Finding::degraded(SUBJECT, format!("{shown} {NESTED}"), NESTED_REMEDY),
    }
}

fn pin_dir(options: &Options) -> Finding {
    const SUBJECT: &str = "bpf file system";
    let pins = Pins::new(&options.pin_dir);
    match pins.place() {
        Ok(true) => Finding::ok(SUBJECT, format!("{} is on one", options.pin_dir.display())),
        Ok(false) => Finding::degraded(
            SUBJECT,
            "none is mounted at /sys/fs/bpf: `run` mounts it, for as long as its mount namespace lives",
            "mount it on the host: `mount -t bpf bpf /sys/fs/bpf`; in a container, mount the host's",
        ),
        Err(error) => Finding::failed(SUBJECT, &error),
    }
}

/// Whether connected UDP sockets can be ended when their endpoint goes.
fn endings(capabilities: &Capabilities) -> Finding {
    const SUBJECT: &str = "UDP flows";
    match ending::is_possible() {
        Ok(()) if [SYS_ADMIN, SYS_PTRACE].iter().all(|it| capabilities.have(*it)) && sees_every_process() => {
            Finding::ok(SUBJECT, "connected sockets are ended when their endpoint goes")
        }
        Ok(()) => Finding::ok(
            SUBJECT,
            "connected sockets of this network namespace are ended when their endpoint goes; those of pods may stay, for \
             want of CAP_SYS_ADMIN, CAP_SYS_PTRACE or the host's process ids (hostPID)",
        ),
        Err(error) => Finding::degraded(
            SUBJECT,
            format!("connected sockets stay with an endpoint that is gone: {error}"),
            "use a kernel with CONFIG_INET_DIAG_DESTROY=y, if programs here keep UDP sockets connected to Services",
        ),
    }
}

/// Whether this process lacks a capability that the data plane takes.
pub(in crate::ebpf) fn is_powerless() -> bool {
    let own = Capabilities::own();
    own.needed().iter().any(|it| !own.have(*it))
}

/// Whether this process may load programs, as far as its capabilities say.
pub(in crate::ebpf) fn may_load() -> bool {
    let own = Capabilities::own();
    own.have(BPF) || own.have(SYS_ADMIN)
}

/// Whether this kernel counts maps as locked memory, and this process may lock little of it.
pub(in crate::ebpf) fn locks_little() -> bool {
    memlock(&release(), &Capabilities::own()).is_some_and(|it| it.level > Level::Ok)
}

/// Capabilities that are in effect, as a mask (capabilities(7)).
#[derive(Clone, Copy, Debug)]
struct Capabilities(u64);

const NET_ADMIN: (&str, u32) = ("CAP_NET_ADMIN", 12);
const SYS_PTRACE: (&str, u32) = ("CAP_SYS_PTRACE", 19);
const SYS_ADMIN: (&str, u32) = ("CAP_SYS_ADMIN", 21);
const SYS_RESOURCE: (&str, u32) = ("CAP_SYS_RESOURCE", 24);
const PERFMON: (&str, u32) = ("CAP_PERFMON", 38);
const BPF: (&str, u32) = ("CAP_BPF", 39);

impl Capabilities {
    fn own() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let mask = status.lines().find_map(|it| it.strip_prefix("CapEff:"));
        Self(mask.and_then(|it| u64::from_str_radix(it.trim(), 16).ok()).unwrap_or_default())
    }

    fn have(self, (_, bit): (&str, u32)) -> bool {
        self.0 >> bit & 1 == 1
    }

    /// What it takes.
    fn needed(self) -> &'static [(&'static str, u32)] {
        // What these three allow, the fourth does as well, but for some of the network's matters.
        if self.have(SYS_ADMIN) { &[NET_ADMIN, SYS_ADMIN] } else { &[BPF, PERFMON, NET_ADMIN] }
    }

    fn check(self) -> Finding {
        const SUBJECT: &str = "capabilities";
        let needed = self.needed();
        let names = |it: &mut dyn Iterator<Item = &(&'static str, u32)>| {
            it.map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
        };
        let missing = names(&mut needed.iter().filter(|it| !self.have(**it)));
        if missing.is_empty() {
            return Finding::ok(SUBJECT, format!("{} are in effect", names(&mut needed.iter())));
        }
        Finding::broken(
            SUBJECT,
            format!("missing: {missing}"),
            "run it as root; in a container, add them (securityContext.capabilities) or make it privileged",
        )
    }
}

/// Only older kernels ask for it.
fn memlock(release: &str, capabilities: &Capabilities) -> Option<Finding> {
    const SUBJECT: &str = "locked memory";
    if version(release).is_none_or(|it| it >= CHARGES_CGROUP) {
        return None;
    }
    let limit = getrlimit(Resource::RLIMIT_MEMLOCK).map_or(0, |(_, hard)| hard);
    Some(if limit == RLIM_INFINITY || capabilities.have(SYS_RESOURCE) {
        Finding::ok(SUBJECT, "the limit can be lifted")
    } else {
        Finding::degraded(
            SUBJECT,
            format!(
                "maps may take {} KiB in all (RLIMIT_MEMLOCK), and this kernel counts them",
                limit / 1024
            ),
            format!("add {}, or raise the limit (`ulimit -l unlimited`)", SYS_RESOURCE.0),
        )
    })
}

fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|it: char| !it.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_that_is_too_old_is_broken() {
        assert_eq!(kernel("5.9.16-generic").level, Level::Broken);
        assert_eq!(kernel("unreadable").level, Level::Degraded);
        assert_ne!(kernel("5.10.0").level, Level::Broken);
    }

    #[test]
    fn capabilities_that_are_missing_are_named() {
        let check = |names: &[(&str, u32)]| {
            let Finding { level, says, .. } = Capabilities(names.iter().map(|it| 1 << it.1).sum()).check();
            (level, says)
        };
        assert_eq!(check(&[SYS_ADMIN, NET_ADMIN]).0, Level::Ok);
        assert_eq!(check(&[BPF, PERFMON, NET_ADMIN]).0, Level::Ok);
        assert_eq!(check(&[SYS_ADMIN]), (Level::Broken, "missing: CAP_NET_ADMIN".into()));
        assert_eq!(check(&[PERFMON]), (Level::Broken, "missing: CAP_BPF, CAP_NET_ADMIN".into()));
    }

    #[test]
    fn only_old_kernels_ask_for_locked_memory() {
        assert_eq!(memlock("5.11.0", &Capabilities(0)), None);
        assert_eq!(memlock("5.10.0", &Capabilities(u64::MAX)).unwrap().level, Level::Ok);
    }
}
