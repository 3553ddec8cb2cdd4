//! Whether a socket belongs to a process or to the kernel (to a file system, or as a subflow of MPTCP).
//!
//! Invariant: the socket decides, not the caller: the kernel may connect a socket of its own on behalf of a process, and a
//! process may be in the root cgroup. Only where programs cannot read the kernel's sockets, the caller decides.
//! The release hook does not run for the kernel's own sockets: nothing is stored for them. Their TCP connections are
//! translated; what the kernel sends by UDP is left to the packet path, since a reply could not be translated back.

use aya_ebpf::{
    bindings::bpf_sock,
    helpers::generated::{
        bpf_get_current_cgroup_id, bpf_probe_read_kernel, bpf_skc_to_mptcp_sock, bpf_skc_to_tcp_sock,
    },
    programs::SockAddrContext,
};
use proxy_common::{kernel_functions::RDONLY_CAST, tables::TCP};

use crate::{
    config::{ANY_SOCK, KERN_SOCK_BIT, KERN_SOCK_BYTE, MPTCP, SOCK_TYPE, TCP_SOCK},
    ctx,
};

/// The id of the root of the cgroup2 hierarchy.
const ROOT_CGROUP: u64 = 1;

/// The owner of a socket.
#[derive(Clone, Copy)]
pub(crate) enum SockOwner {
    /// A process: the release hook will run.
    Process,
    /// The kernel, presumably.
    Kernel,
}

impl SockOwner {
    /// The owner of a TCP or UDP socket.
    #[inline(always)]
    pub(crate) fn of(ctx: &SockAddrContext) -> Self {
        let is_kernel = if SOCK_TYPE.load() != 0 {
            is_kernel_by_cast(ctx)
        } else if ctx::protocol(ctx) == TCP {
            match TCP_SOCK.load() {
                0 => is_subflow(ctx) || is_in_root_cgroup(),
                _ => is_kernel_tcp(ctx),
            }
        } else if ANY_SOCK.load() != 0 {
            is_kernel(ctx)
        } else {
            is_in_root_cgroup()
        };
        if is_kernel { Self::Kernel } else { Self::Process }
    }
}

/// Whether any socket is the kernel's own. The cast takes no instruction, and a read that faults gives 0.
#[inline(always)]
fn is_kernel_by_cast(ctx: &SockAddrContext) -> bool {
    // SAFETY: where `SOCK_TYPE` is set, the loader has replaced this number by the id of the kernel function; elsewhere the
    // verifier removes the call.
    let rdonly_cast: unsafe extern "C" fn(*const bpf_sock, u32) -> *const u8 =
        unsafe { core::mem::transmute(RDONLY_CAST as usize) };
    // SAFETY: as above, and the byte is one of the socket.
    let byte = unsafe {
        rdonly_cast(ctx::socket(ctx), SOCK_TYPE.load()).add(KERN_SOCK_BYTE.load() as usize).read_volatile()
    };
    u32::from(byte) & KERN_SOCK_BIT.load() != 0
}

/// Whether a TCP socket is the kernel's own.
#[inline(always)]
fn is_kernel_tcp(ctx: &SockAddrContext) -> bool {
    // SAFETY: the socket of the context is valid.
    let sk = unsafe { bpf_skc_to_tcp_sock(ctx::socket(ctx).cast()) };
    if sk.is_null() {
        return false;
    }
    // SAFETY: a `tcp_sock` begins with its `sock`, which contains this byte; the verifier checks that it may be read. The
    // offset is loaded after the null check, as nothing may be added to null.
    let byte = unsafe { sk.cast::<u8>().add(KERN_SOCK_BYTE.load() as usize).read_volatile() };
    u32::from(byte) & KERN_SOCK_BIT.load() != 0
}

/// Whether any socket is the kernel's own. Costs more than the other ways.
#[inline(always)]
fn is_kernel(ctx: &SockAddrContext) -> bool {
    // Negated twice, a pointer is a number to the verifier, which allows arithmetic on it. The compiler would optimise both
    // negations away.
    let mut address = ctx::socket(ctx) as u64;
    // SAFETY: nothing but that register is touched.
    unsafe { core::arch::asm!("{0} = -{0}", inout(reg) address) };
    let address = address.wrapping_neg().wrapping_add(u64::from(KERN_SOCK_BYTE.load()));
    let mut byte = 0_u8;
    // SAFETY: the helper writes one byte, for which there is room, and fails if it cannot read.
    unsafe { bpf_probe_read_kernel((&raw mut byte).cast(), 1, address as *const _) };
    u32::from(byte) & KERN_SOCK_BIT.load() != 0
}

/// Whether the caller is in the root cgroup, as kernel threads are.
#[inline(always)]
fn is_in_root_cgroup() -> bool {
    // SAFETY: the helper takes nothing and touches nothing.
    unsafe { bpf_get_current_cgroup_id() == ROOT_CGROUP }
}

/// Whether the socket is a subflow of MPTCP.
#[inline(always)]
pub(crate) fn is_subflow(ctx: &SockAddrContext) -> bool {
    // SAFETY: the socket of the context is valid; its subflow is compared to null only.
    MPTCP.load() != 0 && unsafe { !bpf_skc_to_mptcp_sock(ctx::socket(ctx).cast()).is_null() }
}
