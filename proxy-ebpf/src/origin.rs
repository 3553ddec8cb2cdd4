//! What the program of a socket has chosen of the source and the way of its packets.
//!
//! Called through a function that is not inlined: the verifier checks it once, as `side::choose4`. Most sockets need no call.

use aya_ebpf::{bindings::bpf_sock_addr, programs::SockAddrContext};
use proxy_common::{
    decide::{SocketOrigin, only_packets_reach},
    net::V6,
    tables::{TCP, UDP},
};

use crate::{
    config::{PORT_LOCK_BIT, PORT_LOCK_BYTE},
    ctx,
    kernel_sock::{has_bit, has_unicast_interface},
    side::Side,
};

pub(crate) struct Origin<'a> {
    pub(crate) ctx: &'a SockAddrContext,
}

impl Origin<'_> {
    /// [`only_packets_reach`], with the node addresses of a side.
    #[inline(always)]
    pub(crate) fn is_reached_by_packets_only(&self, side: u32, protocol: u8, to_loopback: bool) -> bool {
        // A TCP socket whose program has chosen nothing, as most are.
        if protocol == TCP && !ctx::is_bound(self.ctx) {
            return false;
        }
        reached_by_packets_only(self.ctx.sock_addr, side.into(), to_loopback.into()) != 0
    }
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn reached_by_packets_only(ctx: *mut bpf_sock_addr, side: u64, to_loopback: u64) -> u64 {
    let ctx = &SockAddrContext::new(ctx);
    // Node addresses of both families are in one table, by their IPv6 form.
    only_packets_reach(&Side::<V6>::of(side as u32), &Origin { ctx }, ctx::protocol(ctx), to_loopback != 0)
        .into()
}

impl SocketOrigin for Origin<'_> {
    /// By `SO_BINDTODEVICE`, or of a UDP socket by `IP_UNICAST_IF` or `IPV6_UNICAST_IF`.
    #[inline(always)]
    fn has_chosen_interface(&self, protocol: u8) -> bool {
        ctx::bound_device(self.ctx) != 0 || (protocol == UDP && has_unicast_interface(self.ctx))
    }

    /// A port that the kernel has selected is none. Where that is not known, a bound TCP socket counts as bound to a
    /// certain port.
    #[inline(always)]
    fn has_chosen_port(&self) -> bool {
        ctx::local_port(self.ctx) != 0
            && (PORT_LOCK_BIT.load() == 0
                || has_bit(self.ctx, PORT_LOCK_BYTE.load(), PORT_LOCK_BIT.load()).unwrap_or(true))
    }

    /// A connected UDP socket always has a source address, and the kernel does not report who selected it. It counts as
    /// selected by the kernel, since hardly any program binds an address and connects twice: one that does is the client of
    /// its namespace from the second connect on, and when it sends to another Service than its peer.
    #[inline(always)]
    fn bound_address(&self) -> V6 {
        if ctx::is_connected(self.ctx) { V6::default() } else { ctx::source(self.ctx) }
    }

    #[inline(always)]
    fn is_in_host_netns(&self) -> bool {
        ctx::is_in_host_netns(self.ctx)
    }
}
