//! The raw accesses to a `bpf_sock_addr`: read and rewrite its address, and refuse.

use aya_ebpf::{
    EbpfContext as _,
    bindings::bpf_sock,
    helpers::generated::{bpf_get_netns_cookie, bpf_set_retval},
    programs::{SockAddrContext, SockContext},
};
use proxy_common::{
    net::{Be16, V4, V6},
    socket::Address,
    tables::TCP,
};

use crate::{
    DENY, PASS,
    maps::{can_set_retval, host_netns},
};

const ECONNREFUSED: i32 = 111;
const ENOBUFS: i32 = 105;
const EADDRINUSE: i32 = 98;
/// `TCP_ESTABLISHED`, which is also the state of a connected UDP socket.
const ESTABLISHED: u32 = 1;
const AF_INET: u32 = 2;

/// Reads a field of the context; volatile, so that the compiler keeps the width the verifier expects.
macro_rules! read {
    ($ctx:expr, $($field:tt)+) => {
        // SAFETY: the kernel hands over a valid context, and the verifier checks every access to it.
        unsafe { core::ptr::addr_of!((*$ctx.sock_addr).$($field)+).read_volatile() }
    };
}

/// Writes a field of the context.
macro_rules! write {
    ($ctx:expr, $value:expr, $($field:tt)+) => {
        // SAFETY: as for `read!`.
        unsafe { core::ptr::addr_of_mut!((*$ctx.sock_addr).$($field)+).write_volatile($value) }
    };
}

/// The IP protocol number of the socket; what does not fit is nobody's (MPTCP's 262 becomes 0, not 6).
#[inline(always)]
pub(crate) fn protocol(ctx: &SockAddrContext) -> u8 {
    u8::try_from(read!(ctx, protocol)).unwrap_or(0)
}

/// The same of a socket that is closed.
#[inline(always)]
pub(crate) fn protocol_of(ctx: &SockContext) -> u8 {
    // SAFETY: as for `read!`.
    let protocol = unsafe { core::ptr::addr_of!((*ctx.sock).protocol).read_volatile() };
    u8::try_from(protocol).unwrap_or(0)
}

/// The port the program named, or the sender's.
#[inline(always)]
pub(crate) fn port(ctx: &SockAddrContext) -> Be16 {
    Be16::from_raw(read!(ctx, user_port) as u16)
}

/// The address in a v4 hook.
#[inline(always)]
pub(crate) fn ip4(ctx: &SockAddrContext) -> V4 {
    V4::from_raw(read!(ctx, user_ip4))
}

/// The address in a v6 hook, v4-mapped ones included.
#[inline(always)]
pub(crate) fn ip6(ctx: &SockAddrContext) -> V6 {
    V6::from_raw([
        read!(ctx, user_ip6[0]),
        read!(ctx, user_ip6[1]),
        read!(ctx, user_ip6[2]),
        read!(ctx, user_ip6[3]),
    ])
}

/// Rewrites address and port in a v4 hook.
#[inline(always)]
pub(crate) fn rewrite4(ctx: &SockAddrContext, ip: V4, port: Be16) {
    write!(ctx, ip.raw(), user_ip4);
    write!(ctx, u32::from(port.raw()), user_port);
}

/// Rewrites address and port in a v6 hook.
#[inline(always)]
pub(crate) fn rewrite6(ctx: &SockAddrContext, ip: V6, port: Be16) {
    let [a, b, c, d] = ip.raw();
    write!(ctx, a, user_ip6[0]);
    write!(ctx, b, user_ip6[1]);
    write!(ctx, c, user_ip6[2]);
    write!(ctx, d, user_ip6[3]);
    write!(ctx, u32::from(port.raw()), user_port);
}

/// The socket.
#[inline(always)]
pub(crate) fn socket(ctx: &SockAddrContext) -> *mut bpf_sock {
    read!(ctx, __bindgen_anon_1.sk)
}

/// Whether the socket is connected.
#[inline(always)]
pub(crate) fn is_connected(ctx: &SockAddrContext) -> bool {
    let sk = socket(ctx);
    // SAFETY: checked for null as the verifier asks; `bpf_sock::state` is readable since Linux 5.1.
    !sk.is_null() && unsafe { core::ptr::addr_of!((*sk).state).read_volatile() } == ESTABLISHED
}

/// Whether it is a TCP socket that was connected to nothing yet, as most are when they connect: the kernel leaves the peer's
/// address in place when a connection ends. (One whose connect found no route has none either, and then a Service's name
/// may outlast that in `getpeername`, if the next connect goes straight to the very backend that had no route.)
#[inline(always)]
pub(crate) fn was_never_connected(ctx: &SockAddrContext) -> bool {
    let sk = socket(ctx);
    if sk.is_null() || protocol(ctx) != TCP {
        return false;
    }
    // SAFETY: checked for null as the verifier asks; these fields of `bpf_sock` are readable since Linux 5.1.
    unsafe {
        core::ptr::addr_of!((*sk).dst_ip4).read_volatile() == 0
            && core::ptr::addr_of!((*sk).dst_ip6[0]).read_volatile() == 0
            && core::ptr::addr_of!((*sk).dst_ip6[1]).read_volatile() == 0
            && core::ptr::addr_of!((*sk).dst_ip6[2]).read_volatile() == 0
            && core::ptr::addr_of!((*sk).dst_ip6[3]).read_volatile() == 0
    }
}

/// Whether a connected socket's packets really go there.
#[inline(always)]
pub(crate) fn is_peer(ctx: &SockAddrContext, address: &Address) -> bool {
    let sk = socket(ctx);
    if sk.is_null() {
        return false;
    }
    // SAFETY: checked for null as the verifier asks; these fields of `bpf_sock` are readable since Linux 5.1.
    unsafe {
        if Be16::from_raw(core::ptr::addr_of!((*sk).dst_port).read_volatile()) != address.port {
            return false;
        }
        // All are read in any case: of two places to read from the compiler would make one with a varying offset, which
        // the verifier does not allow.
        let ip4 = V4::from_raw(core::ptr::addr_of!((*sk).dst_ip4).read_volatile());
        let ip6 = V6::from_raw([
            core::ptr::addr_of!((*sk).dst_ip6[0]).read_volatile(),
            core::ptr::addr_of!((*sk).dst_ip6[1]).read_volatile(),
            core::ptr::addr_of!((*sk).dst_ip6[2]).read_volatile(),
            core::ptr::addr_of!((*sk).dst_ip6[3]).read_volatile(),
        ]);
        let family = core::ptr::addr_of!((*sk).family).read_volatile();
        address.ip == if family == AF_INET { ip4.mapped() } else { ip6 }
    }
}

/// Ends a connect in a v4 hook with ECONNREFUSED.
/// Before `bpf_set_retval` (5.18), loopback port 0 gives the same to a TCP client and to a UDP one at its second send.
#[inline(always)]
pub(crate) fn refuse_connect4(ctx: &SockAddrContext) -> i32 {
    if can_set_retval() {
        return refuse();
    }
    rewrite4(ctx, V4::LOOPBACK, Be16::new(0));
    PASS
}

/// Ends a connect in a v6 hook with ECONNREFUSED, as [`refuse_connect4`] does.
#[inline(always)]
pub(crate) fn refuse_connect6(ctx: &SockAddrContext, mapped: bool) -> i32 {
    if can_set_retval() {
        return refuse();
    }
    rewrite6(ctx, if mapped { V4::LOOPBACK.mapped() } else { V6::LOOPBACK }, Be16::new(0));
    PASS
}

/// Ends the system call with ECONNREFUSED; with EPERM where the kernel cannot be told.
#[inline(always)]
pub(crate) fn refuse() -> i32 {
    deny(ECONNREFUSED)
}

/// Ends the system call with ENOBUFS (or EPERM): the socket has no memory left to remember a translation in, and
/// without it the reply would come from a stranger.
#[inline(always)]
pub(crate) fn no_memory() -> i32 {
    deny(ENOBUFS)
}

/// Ends a bind with EADDRINUSE (or EPERM).
#[inline(always)]
pub(crate) fn refuse_bind() -> i32 {
    deny(EADDRINUSE)
}

#[inline(always)]
fn deny(errno: i32) -> i32 {
    if can_set_retval() {
        // SAFETY: bind, connect and sendmsg hooks may call it (Linux b44123b4a3dc).
        unsafe { bpf_set_retval(-errno) };
    }
    DENY
}

/// The source address of the socket, v4 ones v4-mapped; the unspecified one of IPv6 if it has none. It is the address that
/// the program has bound it to, or, of a socket that is connected, perhaps one that the kernel has chosen.
#[inline(always)]
pub(crate) fn source(ctx: &SockAddrContext) -> V6 {
    let sk = socket(ctx);
    if sk.is_null() {
        return V6::default();
    }
    // SAFETY: checked for null as the verifier asks; these fields of `bpf_sock` are readable since Linux 5.1.
    unsafe {
        if core::ptr::addr_of!((*sk).family).read_volatile() == AF_INET {
            let source = V4::from_raw(core::ptr::addr_of!((*sk).src_ip4).read_volatile());
            return if source == V4::default() { V6::default() } else { source.mapped() };
        }
        let source = V6::from_raw([
            core::ptr::addr_of!((*sk).src_ip6[0]).read_volatile(),
            core::ptr::addr_of!((*sk).src_ip6[1]).read_volatile(),
            core::ptr::addr_of!((*sk).src_ip6[2]).read_volatile(),
            core::ptr::addr_of!((*sk).src_ip6[3]).read_volatile(),
        ]);
        // To be bound to `::ffff:0.0.0.0` is to be bound to any address of IPv4.
        if source == V4::default().mapped() { V6::default() } else { source }
    }
}

/// The cookie of the socket's network namespace.
#[inline(always)]
pub(crate) fn netns(ctx: &SockAddrContext) -> u64 {
    // SAFETY: the kernel hands over a valid context.
    unsafe { bpf_get_netns_cookie(ctx.as_ptr()) }
}

/// Whether the socket is in the node's own network namespace.
#[inline(always)]
pub(crate) fn is_host(ctx: &SockAddrContext) -> bool {
    let host = match host_netns() {
        // Not known: then it is the first one of all.
        // SAFETY: without a context the helper answers for that.
        0 => unsafe { bpf_get_netns_cookie(core::ptr::null_mut()) },
        known => known,
    };
    netns(ctx) == host
}
