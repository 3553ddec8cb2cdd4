//! Whose a socket is: a process's, or the kernel's own (of a file system, or a subflow of MPTCP).
//!
//! The one rule: the socket is asked, not who calls: the kernel's own may be connected in a process's name, and a process
//! may be in the root cgroup. Only where the kernel does not show its sockets, the caller is asked.
//! The release of a socket of the kernel's own is told to nobody.

use aya_ebpf::{
    helpers::generated::{
        bpf_get_current_cgroup_id, bpf_probe_read_kernel, bpf_skc_to_mptcp_sock, bpf_skc_to_tcp_sock,
    },
    programs::SockAddrContext,
};
use proxy_common::tables::TCP;

use crate::{
    ctx,
    maps::{can_read_any_sock, can_read_tcp_sock, can_tell_mptcp, kern_sock_bit, kern_sock_byte},
};

/// The id of the root of the cgroup2 hierarchy.
const ROOT_CGROUP: u64 = 1;

/// Whose a socket is.
#[derive(Clone, Copy)]
pub(crate) enum Owner {
    /// A process's, and its release will be told.
    Process,
    /// The kernel's own, as it seems; it may want to know what it was led to.
    Kernel,
    /// The kernel's own, which no program will ever ask.
    Nobody,
}

impl Owner {
    /// Asks a socket of TCP or UDP.
    #[inline(always)]
    pub(crate) fn of(ctx: &SockAddrContext) -> Self {
        if ctx::protocol(ctx) == TCP {
            return Self::of_tcp(ctx);
        }
        let is_kernels = if can_read_any_sock() { is_kernels(ctx) } else { is_root_calling() };
        // It is shown the Service as the sender of replies.
        if is_kernels { Self::Kernel } else { Self::Process }
    }

    #[inline(always)]
    fn of_tcp(ctx: &SockAddrContext) -> Self {
        if can_read_tcp_sock() {
            return if is_kernels_tcp(ctx) { Self::Nobody } else { Self::Process };
        }
        if is_subflow(ctx) {
            return Self::Nobody;
        }
        if is_root_calling() { Self::Kernel } else { Self::Process }
    }
}

/// Whether a TCP socket is the kernel's own.
#[inline(always)]
fn is_kernels_tcp(ctx: &SockAddrContext) -> bool {
    // SAFETY: the socket of the context is valid.
    let sk = unsafe { bpf_skc_to_tcp_sock(ctx::socket(ctx).cast()) };
    if sk.is_null() {
        return false;
    }
    // SAFETY: a `tcp_sock` begins with its `sock`, and this byte is in it; the verifier checks that it is one that may be
    // read. Where it is, is read after the socket is known to be there: nothing may be added to null.
    let byte = unsafe { sk.cast::<u8>().add(kern_sock_byte()).read_volatile() };
    u32::from(byte) & kern_sock_bit() != 0
}

/// Whether a socket is the kernel's own. Costs more than to ask a TCP socket.
#[inline(always)]
fn is_kernels(ctx: &SockAddrContext) -> bool {
    // Negated twice, an address is a number, which the verifier lets us add to. The compiler would do neither.
    let mut address = ctx::socket(ctx) as u64;
    // SAFETY: nothing but that register is touched.
    unsafe { core::arch::asm!("{0} = -{0}", inout(reg) address) };
    let address = address.wrapping_neg().wrapping_add(kern_sock_byte() as u64);
    let mut byte = 0_u8;
    // SAFETY: one byte is written, and there is room for it; what cannot be read is an error.
    unsafe { bpf_probe_read_kernel((&raw mut byte).cast(), 1, address as *const _) };
    u32::from(byte) & kern_sock_bit() != 0
}

/// Whether who calls is in the root cgroup, as kernel threads are.
#[inline(always)]
fn is_root_calling() -> bool {
    // SAFETY: the helper takes nothing and touches nothing.
    unsafe { bpf_get_current_cgroup_id() == ROOT_CGROUP }
}

/// Whether it is a subflow of MPTCP.
#[inline(always)]
fn is_subflow(ctx: &SockAddrContext) -> bool {
    // SAFETY: the socket of the context is valid; its subflow is compared to null only.
    can_tell_mptcp() && unsafe { !bpf_skc_to_mptcp_sock(ctx::socket(ctx).cast()).is_null() }
}
