//! Whether a socket belongs to a process or to the kernel (to a file system, or as a subflow of MPTCP).
//!
//! Invariant: the socket decides, not the caller: the kernel may connect a socket of its own on behalf of a process, and a
//! process may be in the root cgroup. Only where programs cannot read the kernel's sockets, the caller decides.
//! The release hook does not run for the kernel's own sockets: nothing is stored for them. Their TCP connections are
//! translated; what the kernel sends by UDP is left to the packet path, since a reply could not be translated back.

use aya_ebpf::{
    helpers::generated::{bpf_get_current_cgroup_id, bpf_skc_to_mptcp_sock},
    programs::SockAddrContext,
};
use proxy_common::tables::TCP;

use crate::{
    config::{KERN_SOCK_BIT, KERN_SOCK_BYTE, MPTCP},
    ctx, kernel_sock,
};

/// The id of the root of the cgroup2 hierarchy.
const ROOT_CGROUP: u64 = 1;

/// Whether a TCP or UDP socket is, presumably, the kernel's own: then the release hook will not run.
#[inline(always)]
pub(crate) fn is_kernel_socket(ctx: &SockAddrContext) -> bool {
    match kernel_sock::has_bit(ctx, KERN_SOCK_BYTE.load(), KERN_SOCK_BIT.load()) {
        Some(is_kernel) => is_kernel,
        None => (ctx::protocol(ctx) == TCP && is_subflow(ctx)) || is_in_root_cgroup(),
    }
}

/// Whether the caller is in the root cgroup, as kernel threads are.
#[inline(always)]
fn is_in_root_cgroup() -> bool {
    // SAFETY: the helper takes nothing and touches nothing.
    unsafe { bpf_get_current_cgroup_id() == ROOT_CGROUP }
}

#[inline(always)]
pub(crate) fn is_subflow(ctx: &SockAddrContext) -> bool {
    // SAFETY: the socket of the context is valid; its subflow is compared to null only.
    MPTCP.load() != 0 && unsafe { !bpf_skc_to_mptcp_sock(ctx::socket(ctx).cast()).is_null() }
}
