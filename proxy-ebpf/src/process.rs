//! Who makes the system call, as the decision asks it.

use aya_ebpf::{
    helpers::generated::{bpf_get_prandom_u32, bpf_ktime_get_ns},
    programs::SockAddrContext,
};
use proxy_common::{
    affinity::{Affinity, AffinityKey, Client},
    decide::Caller,
    net::V6,
};

use crate::{
    atomic, ctx,
    maps::{CAME, CLIENTS},
};

const BPF_ANY: u64 = 0;
const BPF_NOEXIST: u64 = 1;

/// The process, by the context of its system call.
pub(crate) struct Process<'a>(pub(crate) &'a SockAddrContext);

impl Caller for Process<'_> {
    #[inline(always)]
    fn random(&self) -> u32 {
        // SAFETY: the helper takes nothing and touches nothing.
        unsafe { bpf_get_prandom_u32() }
    }

    #[inline(always)]
    fn is_host(&self) -> bool {
        ctx::is_host(self.0)
    }

    #[inline(always)]
    fn client(&self) -> Client {
        let source = ctx::source(self.0);
        if source == V6::default() { Client::Namespace(ctx::netns(self.0)) } else { Client::Address(source) }
    }

    #[inline(always)]
    fn now(&self) -> u64 {
        // SAFETY: the helper takes nothing and touches nothing.
        unsafe { bpf_ktime_get_ns() }
    }

    #[inline(always)]
    fn affinity(&self, key: &AffinityKey) -> Affinity {
        // SAFETY: another connection of the client may write meanwhile; what is half of two backends is no member.
        unsafe { CLIENTS.get(key) }.copied().unwrap_or_default()
    }

    #[inline(always)]
    fn keep_affinity(&self, key: &AffinityKey, affinity: &Affinity) {
        if CLIENTS.insert(key, affinity, BPF_NOEXIST).is_ok() {
            if let Some(count) = CAME.get_ptr_mut(0) {
                atomic::add(count, 1);
            }
        } else {
            // Nothing else is to be done where even that fails: the connection goes on, and the next one is chosen anew.
            let _ = CLIENTS.insert(key, affinity, BPF_ANY);
        }
    }
}
