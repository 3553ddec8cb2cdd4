//! The tables of a side, whose look-ups are reported as the steps of a decision, in the traced variant of the programs.
//!
//! Invariant: every answer is that of the side.

use proxy_common::{
    choice::Choice,
    counters::{CounterIndex, NO_COUNTER},
    decide::Tables,
    net::Be16,
    tables::{Family, Frontend, NodeAddrScope, Prefilter},
    trace::{
        STEP_BACKEND, STEP_CHOICE, STEP_FRONTEND, STEP_MEMBER, STEP_NODE_ADDRESS, STEP_NODE_PORT, STEP_NONE,
    },
};

use crate::{
    notes::Notes,
    side::{FamilyTables, Side},
};

/// A side, and where its steps are noted.
pub(crate) struct Steps<'a, F> {
    pub(crate) side: &'a Side<F>,
    pub(crate) notes: &'a Notes,
}

impl<F> Steps<'_, F> {
    /// Reports whether a frontend was found.
    #[inline(always)]
    fn on_frontend(&self, what: u64, found: Option<&Frontend>) {
        let (set, count) = found.map_or((STEP_NONE, 0), |it| (it.set.into(), it.backend_count.into()));
        self.notes.step(what, set, count);
    }
}

impl<F: FamilyTables> Tables for Steps<'_, F> {
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
    fn frontend(&self, ip: F, port: Be16, protocol: u8) -> Option<Frontend> {
        let found = self.side.frontend(ip, port, protocol);
        self.on_frontend(STEP_FRONTEND, found.as_ref());
        found
    }

    #[inline(always)]
    fn node_port(&self, port: Be16, protocol: u8) -> Option<Frontend> {
        let found = self.side.node_port(port, protocol);
        self.on_frontend(STEP_NODE_PORT, found.as_ref());
        found
    }

    #[inline(always)]
    fn node_addr_scope(&self, ip: F) -> Option<NodeAddrScope> {
        let found = self.side.node_addr_scope(ip);
        self.notes.step(STEP_NODE_ADDRESS, found.map_or(0, |it| it.0.into()), 0);
        found
    }

    #[inline(always)]
    fn backend(&self, position: u32) -> Option<(F::Backend, CounterIndex)> {
        self.notes.step(STEP_BACKEND, position.into(), 0);
        self.side.backend(position)
    }

    #[inline(always)]
    fn member(&self, set: u32, backend: <Self::Ip as Family>::Backend) -> Option<CounterIndex> {
        // Without a value for "none", that would be an undefined word after the step, which the verifier rejects.
        let counter = self.side.member(set, backend).unwrap_or(NO_COUNTER);
        self.notes.step(STEP_MEMBER, set.into(), (counter != NO_COUNTER).into());
        (counter != NO_COUNTER).then_some(counter)
    }

    #[inline(always)]
    fn choose(&self, choice: Choice, first: CounterIndex) -> u32 {
        let position = self.side.choose(choice, first);
        self.notes.step(STEP_CHOICE, position.into(), choice.count.into());
        position
    }
}
