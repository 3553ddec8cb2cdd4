//! Reads fields of the kernel's own sockets that `bpf_sock` does not show, at the offsets of this kernel.
//!
//! Invariant: where a kernel does not let programs read them, the answer is that it is not known.

use core::mem::MaybeUninit;

use aya_ebpf::{
    EbpfContext as _,
    bindings::bpf_sock,
    helpers::generated::{bpf_probe_read_kernel, bpf_skc_to_tcp_sock},
    programs::{SockAddrContext, SockContext},
};
use proxy_common::{kernel_functions::RDONLY_CAST, tables::TCP};

use crate::{
    config::{ANY_SOCK, PINET6, SOCK_TYPE, TCP_MSTAMP, TCP_SOCK, UNICAST_IF, UNICAST_IF6},
    ctx,
};

/// Whether a bit of `struct sock` is set; `None` if it cannot be read.
#[inline(always)]
pub(crate) fn has_bit(ctx: &SockAddrContext, byte: u32, mask: u32) -> Option<bool> {
    let byte: u8 = if SOCK_TYPE.load() != 0 {
        // SAFETY: the byte is one of the socket; a read that faults gives 0.
        unsafe { cast(ctx).add(byte as usize).read_volatile() }
    } else if ctx::protocol(ctx) == TCP {
        if TCP_SOCK.load() == 0 {
            return None;
        }
        // SAFETY: the socket of the context is valid.
        let sk = unsafe { bpf_skc_to_tcp_sock(ctx::socket(ctx).cast()) };
        if sk.is_null() {
            return Some(false);
        }
        // SAFETY: a `tcp_sock` begins with its `sock`, which contains this byte; the verifier checks that it may be read. The
        // offset is added after the null check, as nothing may be added to null.
        unsafe { sk.cast::<u8>().add(byte as usize).read_volatile() }
    } else if ANY_SOCK.load() != 0 {
        probe(address(ctx), byte)
    } else {
        return None;
    };
    Some(u32::from(byte) & mask != 0)
}

/// Whether the program has chosen the interface for packets of a UDP socket, by `IP_UNICAST_IF` or `IPV6_UNICAST_IF`.
/// Datagrams of an IPv6 socket to a v4-mapped address follow the former.
#[inline(always)]
pub(crate) fn has_unicast_interface(ctx: &SockAddrContext) -> bool {
    if UNICAST_IF.load() == 0 {
        return false;
    }
    // Each offset is loaded where it is used rather than kept on the stack, where there is little room.
    let has_six = || UNICAST_IF6.load() != 0 && ctx::is_v6(ctx);
    if SOCK_TYPE.load() != 0 {
        let sk = cast(ctx);
        // SAFETY: both are fields of an `inet_sock`, as every UDP socket is; a read that faults gives 0.
        let interface = unsafe { sk.add(UNICAST_IF.load() as usize).cast::<u32>().read_volatile() };
        if interface != 0 || !has_six() {
            return interface != 0;
        }
        // SAFETY: as above.
        let inet6 = unsafe { sk.add(PINET6.load() as usize).cast::<*const u8>().read_volatile() };
        if inet6.is_null() {
            return false;
        }
        // SAFETY: as above, of a `ipv6_pinfo`.
        return unsafe { inet6.add(UNICAST_IF6.load() as usize).cast::<u32>().read_volatile() } != 0;
    }
    if ANY_SOCK.load() == 0 {
        return false;
    }
    if probe::<u32>(address(ctx), UNICAST_IF.load()) != 0 {
        return true;
    }
    has_six() && probe::<u32>(probe(address(ctx), PINET6.load()), UNICAST_IF6.load()) != 0
}

/// How long ago a released TCP socket sent its first segment, if it has sent no other and received none, in microseconds; 0 if
/// that cannot be read.
#[inline(always)]
pub(crate) fn time_since_syn(ctx: &SockContext) -> u64 {
    if TCP_MSTAMP.load() == 0 {
        return 0;
    }
    // The context of such a program is the socket itself.
    let sent: u64 = probe(number(ctx.as_ptr() as u64), TCP_MSTAMP.load());
    (ctx::now() / 1000).saturating_sub(sent)
}

/// The socket as the kernel has it. The cast takes no instruction, and a read that faults gives 0.
#[inline(always)]
fn cast(ctx: &SockAddrContext) -> *const u8 {
    // SAFETY: where `SOCK_TYPE` is set, the loader has replaced this number by the id of the kernel function; elsewhere the
    // verifier removes the call.
    let rdonly_cast: unsafe extern "C" fn(*const bpf_sock, u32) -> *const u8 =
        unsafe { core::mem::transmute(RDONLY_CAST as usize) };
    // SAFETY: as above.
    unsafe { rdonly_cast(ctx::socket(ctx), SOCK_TYPE.load()) }
}

#[inline(always)]
fn address(ctx: &SockAddrContext) -> u64 {
    number(ctx::socket(ctx) as u64)
}

/// A pointer as a number: negated twice, it is one to the verifier, which allows arithmetic on it. The compiler would optimize
/// both negations away.
#[inline(always)]
fn number(mut address: u64) -> u64 {
    // SAFETY: nothing but that register is touched.
    unsafe { core::arch::asm!("{0} = -{0}", inout(reg) address) };
    address.wrapping_neg()
}

/// Reads a field at an address of the kernel. Costs more than the other ways.
#[inline(always)]
fn probe<T: Copy>(address: u64, offset: u32) -> T {
    let mut field = MaybeUninit::<T>::zeroed();
    let address = address.wrapping_add(u64::from(offset));
    // SAFETY: the helper writes as many bytes, for which there is room, and fails if it cannot read; every field here is an
    // integer.
    unsafe {
        bpf_probe_read_kernel(field.as_mut_ptr().cast(), size_of::<T>() as u32, address as *const _);
        field.assume_init()
    }
}
