//! Raw access to a `bpf_sock_addr`: reads and rewrites its address, and fails its system call.

use aya_ebpf::{
    EbpfContext,
    bindings::bpf_sock,
    helpers::generated::{bpf_get_netns_cookie, bpf_get_socket_cookie, bpf_ktime_get_ns, bpf_set_retval},
    programs::{SockAddrContext, SockContext, SockOpsContext},
};
use proxy_common::{
    net::{Be16, SockAddr, V4, V6},
    tables::{Family, TCP},
};

use crate::config::{HOST_NETNS, SET_RETVAL};

/// The system call proceeds.
pub(crate) const PASS: i32 = 1;
/// The system call fails, with the errno given to `bpf_set_retval`, or else EPERM.
const DENY: i32 = 0;

/// A Service has no backends.
pub(crate) const ECONNREFUSED: i32 = 111;
/// A socket has no memory left for a translation, without which the reply would show the backend as its source.
pub(crate) const ENOBUFS: i32 = 105;
/// A node port is bound.
pub(crate) const EADDRINUSE: i32 = 98;
/// The state of an established connection, and of a connected UDP socket.
pub(crate) const TCP_ESTABLISHED: u32 = 1;
/// The connection is not answered yet.
pub(crate) const TCP_SYN_SENT: u32 = 2;
pub(crate) const TCP_CLOSE: u32 = 7;
const AF_INET: u32 = 2;

/// Reads a field of a context, or of a socket that was checked for null, as the verifier requires; volatile, so that the
/// compiler keeps the width the verifier expects.
macro_rules! read {
    ($from:expr, $($field:tt)+) => {
        // SAFETY: the kernel passes a valid context, and the verifier checks every access to it.
        // The fields of `bpf_sock` are readable since Linux 5.1.
        unsafe { (&raw const (*$from).$($field)+).read_volatile() }
    };
}
pub(crate) use read;

/// Reads an IPv6 address, a word at a time.
macro_rules! read_v6 {
    ($from:expr, $field:ident) => {
        V6::from_raw([
            read!($from, $field[0]),
            read!($from, $field[1]),
            read!($from, $field[2]),
            read!($from, $field[3]),
        ])
    };
}

macro_rules! set {
    ($to:expr, $value:expr, $($field:tt)+) => {
        // SAFETY: as for `read!`.
        unsafe { (&raw mut (*$to).$($field)+).write_volatile($value) }
    };
}
pub(crate) use set;

pub(crate) trait HookFamily: Family {
    /// The address in the context: the destination, or the sender's.
    fn address(ctx: &SockAddrContext) -> Self;
    fn rewrite(ctx: &SockAddrContext, address: Self, port: Be16);
}

impl HookFamily for V4 {
    #[inline(always)]
    fn address(ctx: &SockAddrContext) -> Self {
        Self::from_raw(read!(ctx.sock_addr, user_ip4))
    }

    #[inline(always)]
    fn rewrite(ctx: &SockAddrContext, address: Self, port: Be16) {
        set!(ctx.sock_addr, address.raw(), user_ip4);
        set!(ctx.sock_addr, u32::from(port.raw()), user_port);
    }
}

/// v4-mapped addresses included.
impl HookFamily for V6 {
    #[inline(always)]
    fn address(ctx: &SockAddrContext) -> Self {
        read_v6!(ctx.sock_addr, user_ip6)
    }

    #[inline(always)]
    fn rewrite(ctx: &SockAddrContext, address: Self, port: Be16) {
        let [a, b, c, d] = address.raw();
        set!(ctx.sock_addr, a, user_ip6[0]);
        set!(ctx.sock_addr, b, user_ip6[1]);
        set!(ctx.sock_addr, c, user_ip6[2]);
        set!(ctx.sock_addr, d, user_ip6[3]);
        set!(ctx.sock_addr, u32::from(port.raw()), user_port);
    }
}

/// The IP protocol number of the socket; 0 if it does not fit, so that MPTCP's 262 is not taken for TCP's 6.
#[inline(always)]
pub(crate) fn protocol(ctx: &SockAddrContext) -> u8 {
    u8::try_from(read!(ctx.sock_addr, protocol)).unwrap_or(0)
}

/// The IP protocol number of a socket that is released; 0 if it does not fit.
#[inline(always)]
pub(crate) fn released_protocol(ctx: &SockContext) -> u8 {
    u8::try_from(read!(ctx.sock, protocol)).unwrap_or(0)
}

/// The state of a TCP socket that is released.
#[inline(always)]
pub(crate) fn released_state(ctx: &SockContext) -> u32 {
    read!(ctx.sock, state)
}

/// The port in the context: of the destination, or the sender's.
#[inline(always)]
pub(crate) fn port(ctx: &SockAddrContext) -> Be16 {
    Be16::from_raw(read!(ctx.sock_addr, user_port) as u16)
}

#[inline(always)]
pub(crate) fn sock_addr<F: HookFamily>(ctx: &SockAddrContext) -> SockAddr {
    SockAddr::new(F::address(ctx).mapped(), port(ctx))
}

/// Rewrites address and port in a hook of the family; none if the address is of the other family.
#[inline(always)]
pub(crate) fn rewrite<F: HookFamily>(ctx: &SockAddrContext, to: &SockAddr) -> Option<()> {
    F::rewrite(ctx, F::from_mapped(to.ip)?, to.port);
    Some(())
}

#[inline(always)]
pub(crate) fn socket(ctx: &SockAddrContext) -> *mut bpf_sock {
    read!(ctx.sock_addr, __bindgen_anon_1.sk)
}

/// What a `sock_ops` program is called for.
#[inline(always)]
pub(crate) fn operation(ctx: &SockOpsContext) -> u32 {
    read!(ctx.ops, op)
}

/// Whether the TCP connection that a `sock_ops` program is called for is one to this address.
#[inline(always)]
pub(crate) fn is_remote(ctx: &SockOpsContext, address: &SockAddr) -> bool {
    // The port is in the upper half of the word on a little-endian machine.
    let port = read!(ctx.ops, remote_port);
    let port = if cfg!(target_endian = "little") { port >> 16 } else { port };
    // Both are always read, as in `is_peer`.
    let ip4 = V4::from_raw(read!(ctx.ops, remote_ip4));
    let ip6 = read_v6!(ctx.ops, remote_ip6);
    Be16::from_raw(port as u16) == address.port
        && address.ip == if read!(ctx.ops, family) == AF_INET { ip4.mapped() } else { ip6 }
}

/// The state of the TCP connection that a `sock_ops` program is called for.
#[inline(always)]
pub(crate) fn tcp_state(ctx: &SockOpsContext) -> u32 {
    read!(ctx.ops, state)
}

/// The state that the TCP connection changes to, where that is what a `sock_ops` program is called for.
#[inline(always)]
pub(crate) fn next_tcp_state(ctx: &SockOpsContext) -> u32 {
    read!(ctx.ops, __bindgen_anon_1.args[1])
}

/// Whether the TCP connection has received a segment.
#[inline(always)]
pub(crate) fn has_received(ctx: &SockOpsContext) -> bool {
    read!(ctx.ops, segs_in) != 0
}

/// The socket's cookie, which is never reused.
#[inline(always)]
pub(crate) fn cookie(ctx: &impl EbpfContext) -> u64 {
    // SAFETY: the kernel passes a valid context.
    unsafe { bpf_get_socket_cookie(ctx.as_ptr()) }
}

/// The monotonic clock in nanoseconds.
#[inline(always)]
pub(crate) fn now() -> u64 {
    // SAFETY: the helper takes nothing and touches nothing.
    unsafe { bpf_ktime_get_ns() }
}

#[inline(always)]
pub(crate) fn is_connected(ctx: &SockAddrContext) -> bool {
    let sk = socket(ctx);
    !sk.is_null() && read!(sk, state) == TCP_ESTABLISHED
}

/// Whether it is a TCP socket that never was connected, as most are when they connect: the kernel keeps the peer's address
/// when a connection ends. (It clears the address when a connect finds no route, and then `getpeername` may show a stale
/// Service, if the next connect goes directly to the very backend that had no route.)
#[inline(always)]
pub(crate) fn was_never_connected(ctx: &SockAddrContext) -> bool {
    let sk = socket(ctx);
    if sk.is_null() || protocol(ctx) != TCP {
        return false;
    }
    read!(sk, dst_ip4) == 0
        && read!(sk, dst_ip6[0]) == 0
        && read!(sk, dst_ip6[1]) == 0
        && read!(sk, dst_ip6[2]) == 0
        && read!(sk, dst_ip6[3]) == 0
}

/// Whether the kernel has connected the socket to this address.
#[inline(always)]
pub(crate) fn is_peer(ctx: &SockAddrContext, address: &SockAddr) -> bool {
    let sk = socket(ctx);
    if sk.is_null() || Be16::from_raw(read!(sk, dst_port)) != address.port {
        return false;
    }
    // Both are always read: the compiler would merge two alternative reads into one with a variable offset, which the
    // verifier rejects.
    let ip4 = V4::from_raw(read!(sk, dst_ip4));
    let ip6 = read_v6!(sk, dst_ip6);
    address.ip == if read!(sk, family) == AF_INET { ip4.mapped() } else { ip6 }
}

/// Fails a connect with ECONNREFUSED.
/// Before `bpf_set_retval` (5.18), port 0 of the loopback address has the same effect on a TCP client, and on a UDP one at
/// its second send.
#[inline(always)]
pub(crate) fn refuse_connect<F: HookFamily>(ctx: &SockAddrContext, loopback: F) -> i32 {
    if SET_RETVAL.load() != 0 {
        return fail(ECONNREFUSED);
    }
    F::rewrite(ctx, loopback, Be16::new(0));
    PASS
}

/// Fails the system call; before `bpf_set_retval` with EPERM.
#[inline(always)]
pub(crate) fn fail(errno: i32) -> i32 {
    if SET_RETVAL.load() != 0 {
        // SAFETY: bind, connect and sendmsg hooks may call it (Linux b44123b4a3dc).
        unsafe { bpf_set_retval(-errno) };
    }
    DENY
}

/// The source address of the socket, IPv4 as v4-mapped; the unspecified IPv6 address if it has none. The program has bound
/// the socket to it or, if the socket is connected, the kernel may have selected it.
#[inline(always)]
pub(crate) fn source(ctx: &SockAddrContext) -> V6 {
    let sk = socket(ctx);
    if sk.is_null() {
        return V6::default();
    }
    if read!(sk, family) == AF_INET {
        let source = V4::from_raw(read!(sk, src_ip4));
        return if source == V4::default() { V6::default() } else { source.mapped() };
    }
    let source = read_v6!(sk, src_ip6);
    // Bound to `::ffff:0.0.0.0` means bound to any IPv4 address.
    if source == V4::default().mapped() { V6::default() } else { source }
}

/// The port that the socket is bound to, in host byte order; 0 if it has none yet.
#[inline(always)]
pub(crate) fn local_port(ctx: &SockAddrContext) -> u32 {
    let sk = socket(ctx);
    if sk.is_null() { 0 } else { read!(sk, src_port) }
}

/// The index of the interface that the socket is bound to (`SO_BINDTODEVICE`), or 0.
#[inline(always)]
pub(crate) fn bound_device(ctx: &SockAddrContext) -> u32 {
    let sk = socket(ctx);
    if sk.is_null() { 0 } else { read!(sk, bound_dev_if) }
}

/// Whether the socket has an address, a port or an interface before it is connected.
#[inline(always)]
pub(crate) fn is_bound(ctx: &SockAddrContext) -> bool {
    source(ctx) != V6::default() || local_port(ctx) != 0 || bound_device(ctx) != 0
}

/// Whether it is an IPv6 socket, which may send to IPv4 addresses, too.
#[inline(always)]
pub(crate) fn is_v6(ctx: &SockAddrContext) -> bool {
    let sk = socket(ctx);
    !sk.is_null() && read!(sk, family) != AF_INET
}

#[inline(always)]
pub(crate) fn netns(ctx: &impl EbpfContext) -> u64 {
    // SAFETY: the kernel passes a valid context.
    unsafe { bpf_get_netns_cookie(ctx.as_ptr()) }
}

#[inline(always)]
pub(crate) fn is_in_host_netns(ctx: &SockAddrContext) -> bool {
    let host = match HOST_NETNS.load() {
        // Unknown: assume the initial network namespace.
        // SAFETY: without a context the helper returns the cookie of that.
        0 => unsafe { bpf_get_netns_cookie(core::ptr::null_mut()) },
        known => known,
    };
    netns(ctx) == host
}
