//! The tables of a side, whose look-ups are lines of log.
//!
//! Invariant: every answer is that of the side. What is not found is a value until the line is said: after it, the payload of an
//! `Option` would be an undefined word, which the verifier rejects (before Linux 6.3).

use aya_ebpf::programs::SockAddrContext;
use proxy_common::{
    choice::{Choice, NO_POSITION},
    counters::{CounterIndex, NO_COUNTER},
    decide::Tables,
    net::Be16,
    tables::{Family, Frontend, NodeAddrScope, Prefilter},
    trace::{EJECTED_AVOIDED, EJECTED_TRIED},
};

use crate::{
    log,
    side::{FamilyTables, Side},
};

const NO_SET: u32 = u32::MAX;

/// A side, and the call whose lines are said.
pub(crate) struct LoggedSide<'a, F> {
    pub(crate) side: &'a Side<F>,
    pub(crate) ctx: &'a SockAddrContext,
}

impl<F: FamilyTables> Tables for LoggedSide<'_, F> {
    type Ip = F;

    #[inline(always)]
    fn side(&self) -> u32 {
        self.side.side()
    }

    #[inline(always)]
    fn prefilter(&self) -> Option<&Prefilter> {
        self.side.prefilter()
    }

    #[inline(always)]
    fn may_be_frontend(&self, ip: F) -> bool {
        let is_hit = self.side.may_be_frontend(ip);
        match is_hit {
            true => log::prefilter_hit(self.ctx),
            false => log::prefilter_miss(self.ctx),
        }
        is_hit
    }

    #[inline(always)]
    fn frontend(&self, ip: F, port: Be16, protocol: u8) -> Option<Frontend> {
        let found = self.side.frontend(ip, port, protocol);
        let it = found.unwrap_or(Frontend { set: NO_SET, ..Frontend::default() });
        log::frontend(self.ctx, it.set != NO_SET, it.set, it.backend_count);
        (it.set != NO_SET).then_some(it)
    }

    #[inline(always)]
    fn node_port(&self, port: Be16, protocol: u8) -> Option<Frontend> {
        let found = self.side.node_port(port, protocol);
        let it = found.unwrap_or(Frontend { set: NO_SET, ..Frontend::default() });
        log::node_port(self.ctx, it.set != NO_SET, it.set, it.backend_count);
        (it.set != NO_SET).then_some(it)
    }

    #[inline(always)]
    fn node_addr_scope(&self, ip: F) -> Option<NodeAddrScope> {
        let found = self.side.node_addr_scope(ip);
        let scope = found.unwrap_or(NodeAddrScope(0));
        log::node_address(self.ctx, scope.0);
        (scope.0 != 0).then_some(scope)
    }

    #[inline(always)]
    fn backend(&self, position: u32) -> Option<(F::Backend, CounterIndex)> {
        log::endpoint(self.ctx, position);
        self.side.backend(position)
    }

    #[inline(always)]
    fn member(&self, set: u32, backend: <Self::Ip as Family>::Backend) -> Option<CounterIndex> {
        let counter = self.side.member(set, backend).unwrap_or(NO_COUNTER);
        log::member(self.ctx, set, counter != NO_COUNTER);
        (counter != NO_COUNTER).then_some(counter)
    }

    #[inline(always)]
    fn choose(&self, choice: Choice, first: CounterIndex) -> u32 {
        let position = self.side.choose(choice, first);
        let has = |note| self.side.notes.get() & note != 0;
        // The backend that takes the place of an ejected one is noted as tried, too.
        let (avoided, tried) = (has(EJECTED_AVOIDED), has(EJECTED_TRIED) && !has(EJECTED_AVOIDED));
        match position {
            NO_POSITION => log::kept(self.ctx, choice.count, tried),
            _ => log::chosen(self.ctx, position, choice.count, avoided, tried),
        }
        position
    }
}
