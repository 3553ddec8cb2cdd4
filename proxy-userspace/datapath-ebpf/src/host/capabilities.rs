//! The capabilities of this process, and the limits of older kernels that apply to it.

use std::fs;

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};

/// A capability: its name and its bit in a capability mask (capabilities(7)).
pub(crate) type Capability = (&'static str, u32);

pub(crate) const NET_ADMIN: Capability = ("CAP_NET_ADMIN", 12);
pub(crate) const SYS_PTRACE: Capability = ("CAP_SYS_PTRACE", 19);
pub(crate) const SYS_ADMIN: Capability = ("CAP_SYS_ADMIN", 21);
pub(crate) const SYS_RESOURCE: Capability = ("CAP_SYS_RESOURCE", 24);
pub(crate) const PERFMON: Capability = ("CAP_PERFMON", 38);
pub(crate) const BPF: Capability = ("CAP_BPF", 39);

/// Map memory is charged to the cgroup, not to RLIMIT_MEMLOCK, from this kernel on.
const CHARGES_CGROUP: (u32, u32) = (5, 11);

/// Effective capabilities, as a mask.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Capabilities(pub(crate) u64);

impl Capabilities {
    pub(crate) fn own() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let mask = status.lines().find_map(|it| it.strip_prefix("CapEff:"));
        Self(mask.and_then(|it| u64::from_str_radix(it.trim(), 16).ok()).unwrap_or_default())
    }

    pub(crate) fn has(self, (_, bit): Capability) -> bool {
        self.0 >> bit & 1 == 1
    }

    /// The capabilities that the datapath needs.
    pub(crate) fn needed(self) -> &'static [Capability] {
        // CAP_SYS_ADMIN implies BPF and PERFMON (kernel commits a17b53c4a4b5 and 980737282232), but not NET_ADMIN.
        if self.has(SYS_ADMIN) { &[NET_ADMIN, SYS_ADMIN] } else { &[BPF, PERFMON, NET_ADMIN] }
    }
}

pub(crate) fn is_any_missing() -> bool {
    let own = Capabilities::own();
    own.needed().iter().any(|it| !own.has(*it))
}

/// Whether this process may load programs, as far as its capabilities say.
pub(crate) fn may_load_programs() -> bool {
    let own = Capabilities::own();
    own.has(BPF) || own.has(SYS_ADMIN)
}

/// Whether this process is in another user namespace than the initial one: its capabilities do not hold outside
/// (user_namespaces(7)).
pub(crate) fn is_in_user_namespace() -> bool {
    fs::read_to_string("/proc/self/uid_map").is_ok_and(|it| !maps_every_id(&it))
}

/// Whether a map of user ids is that of the initial user namespace.
fn maps_every_id(uid_map: &str) -> bool {
    uid_map.split_whitespace().eq(["0", "0", "4294967295"])
}

/// The limit of locked memory in bytes, where this kernel counts maps as locked memory and this process cannot lift it.
pub(crate) fn memlock_limit() -> Option<u64> {
    let limit = getrlimit(Resource::RLIMIT_MEMLOCK).map_or(0, |(_, hard)| hard);
    let can_lift = limit == RLIM_INFINITY || Capabilities::own().has(SYS_RESOURCE);
    (charges_memlock(&kernel_release()) && !can_lift).then_some(limit)
}

/// Whether a kernel counts maps as locked memory.
pub(crate) fn charges_memlock(release: &str) -> bool {
    kernel_version(release).is_some_and(|it| it < CHARGES_CGROUP)
}

/// `uname -r`.
pub(crate) fn kernel_release() -> String {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    release.trim().to_owned()
}

/// Major and minor version of a kernel release.
pub(crate) fn kernel_version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|it: char| !it.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_initial_user_namespace_maps_every_id() {
        assert!(maps_every_id("         0          0 4294967295\n"));
        for other in ["0 100000 65536\n", "0 1000 1\n1 100000 65536\n", ""] {
            assert!(!maps_every_id(other), "{other:?}");
        }
    }

    #[test]
    fn only_old_kernels_charge_locked_memory() {
        assert!(!charges_memlock("5.11.0"));
        assert!(charges_memlock("5.10.0"));
    }
}
