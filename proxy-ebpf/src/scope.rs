//! Who is served, and who is left alone: by network namespace, and by cgroup.
//!
//! The one rule: what is not asked for costs nothing. The verifier drops each test whose word is zero.

use aya_ebpf::{helpers::generated::bpf_get_current_ancestor_cgroup_id, programs::SockAddrContext};
use proxy_common::scope::LEVELS;

use crate::{
    ctx,
    maps::{EXCLUDED, excluded_levels, serves_host_only},
};

/// Whether the program that makes the call is to be left alone.
#[inline(always)]
pub(crate) fn is_left_alone(ctx: &SockAddrContext) -> bool {
    (serves_host_only() && !ctx::is_host(ctx)) || is_excluded()
}

/// Whether its process is in a cgroup that is left alone, or below one.
#[inline(always)]
fn is_excluded() -> bool {
    let levels = excluded_levels();
    if levels == 0 {
        return false;
    }
    for level in 0..LEVELS {
        if levels & (1 << level) == 0 {
            continue;
        }
        // SAFETY: the helper takes a number and touches nothing (socket address hooks may call it since Linux 5.7).
        let id = unsafe { bpf_get_current_ancestor_cgroup_id(level as i32) };
        if id == 0 {
            // The process is not that far down.
            break;
        }
        if EXCLUDED.get_ptr(id).is_some() {
            return true;
        }
    }
    false
}
