//! Which sockets are not load-balanced: by network namespace, and by cgroup.
//!
//! Invariant: an option that is off costs nothing; the verifier removes each test whose global is zero.

use aya_ebpf::{helpers::generated::bpf_get_current_ancestor_cgroup_id, programs::SockAddrContext};
use proxy_common::{
    exclusion::{ALL, MAX_LEVELS},
    tables::UDP,
};

use crate::{
    config::{EXCLUDED_LEVELS, HOST_ONLY},
    ctx,
    maps::EXCLUDED,
};

#[inline(always)]
pub(crate) fn is_excluded(ctx: &SockAddrContext) -> bool {
    (HOST_ONLY.load() != 0 && !ctx::is_in_host_netns(ctx)) || is_in_excluded_cgroup(ctx)
}

/// Whether the calling process is in a cgroup that is excluded for this protocol, or in a descendant of one.
#[inline(always)]
fn is_in_excluded_cgroup(ctx: &SockAddrContext) -> bool {
    let levels = EXCLUDED_LEVELS.load();
    if levels == 0 {
        return false;
    }
    for level in 0..MAX_LEVELS {
        if levels & (1 << level) == 0 {
            continue;
        }
        // SAFETY: the helper takes a number and touches nothing (socket address hooks may call it since Linux 5.7).
        let id = unsafe { bpf_get_current_ancestor_cgroup_id(level as i32) };
        if id == 0 {
            // The process is at a higher level.
            break;
        }
        // SAFETY: an entry that is removed meanwhile may be reused for another cgroup; which one is read is a matter of moments.
        if let Some(sockets) = EXCLUDED.get_ptr(id).map(|it| unsafe { it.read_volatile() })
            && (sockets == ALL || ctx::protocol(ctx) == UDP)
        {
            return true;
        }
    }
    false
}
