//! What the processes of a simulation share: the network, the truth, and what each consumer of states has.
//!
//! Invariant: whenever a consumer has a state, it is one that was true, and none that was true before the one that it had.
//!
//! There is one exception, which Kubernetes' API makes: the first list of a client may come from a server whose cache is behind.
//! So a brain that starts may have an older state than the one before; how much older is what the simulated server's cache
//! lacks. And it may start without the ServiceCIDRs, which are optional. A consumer goes back when the state of that brain
//! reaches it, which may be later than others of the brain before.

use std::{collections::BTreeMap, sync::Arc};

use api_server::ApiServer;
use parking_lot::Mutex;

use crate::{
    history,
    network::Network,
    truth::{Observed, Seen, Truth, Versions},
};

pub(crate) type Name = &'static str;

#[derive(Clone)]
pub(crate) struct World {
    pub(crate) network: Network,
    pub(crate) server: Arc<ApiServer>,
    pub(crate) state: Arc<Mutex<State>>,
}

pub(crate) struct State {
    truth: Truth,
    consumers: BTreeMap<Name, Consumer>,
    /// How many of the next attempts of datapaths to apply a state fail.
    pub(crate) failing_applies: u32,
    pub(crate) checked: u64,
}

struct Consumer {
    node: &'static str,
    seen: Seen,
    /// To which versions it may go back, once: a brain has started whose state it may not have yet.
    may_go_back: Option<Versions>,
    has: Option<Observed>,
}

impl World {
    pub(crate) fn new(network: Network, server: ApiServer, truth: Truth) -> Self {
        let state = State { truth, consumers: BTreeMap::new(), failing_applies: 0, checked: 0 };
        Self { network, server: Arc::new(server), state: Arc::new(Mutex::new(state)) }
    }

    pub(crate) fn change(&self) {
        let what = self.state.lock().truth.change(&self.server);
        history::note(what);
    }

    /// Adds a consumer of the states of a node; none older than `oldest` is expected.
    pub(crate) fn add_consumer(&self, name: Name, node: &'static str, oldest: Versions) {
        let consumer = Consumer { node, seen: Seen::from(oldest), may_go_back: None, has: None };
        self.state.lock().consumers.insert(name, consumer);
    }

    pub(crate) fn oldest_at_start(&self, list_lag: u64) -> Versions {
        self.state.lock().truth.oldest_at_start(list_lag)
    }

    /// A brain that watches the API server starts: states as old as `oldest` are no defect.
    pub(crate) fn go_back(&self, oldest: Versions) {
        for consumer in self.state.lock().consumers.values_mut() {
            let lower = |it: Versions| std::array::from_fn(|kind| oldest[kind].min(it[kind]));
            consumer.may_go_back = Some(consumer.may_go_back.map_or(oldest, lower));
        }
    }

    /// Checks the state that a consumer has from now on; ends the process if it is a defect.
    pub(crate) fn observe(&self, name: Name, observed: Observed) {
        let mut state = self.state.lock();
        let State { truth, consumers, checked, .. } = &mut *state;
        let Some(consumer) = consumers.get_mut(name) else { return };
        *checked += 1;
        let before = consumer.seen.clone();
        let mut is_true = truth.follow(&mut consumer.seen, consumer.node, &observed);
        if !is_true && let Some(oldest) = consumer.may_go_back.take() {
            consumer.seen.go_back(oldest);
            is_true = truth.follow(&mut consumer.seen, consumer.node, &observed);
        }
        if !is_true {
            let newest = truth.newest();
            history::fail(format_args!(
                "{name} has a state that was never true, or not any more: it had one of the versions {before:?} \
                 (of Services, EndpointSlices, Nodes, ServiceCIDRs; newest: {newest:?}), and now has\n{observed:#?}"
            ));
        }
        history::note(format_args!("{name} has {:?}", consumer.seen));
        consumer.has = Some(observed);
    }

    /// The consumers that do not have the newest state.
    pub(crate) fn behind(&self) -> Vec<Name> {
        let mut state = self.state.lock();
        let State { truth, consumers, .. } = &mut *state;
        let mut is_newest = |it: &Consumer| it.has.as_ref().is_some_and(|has| truth.is_newest(it.node, has));
        consumers.iter().filter(|(_, it)| !is_newest(it)).map(|(name, _)| *name).collect()
    }

    /// Whether an attempt to apply a state fails.
    pub(crate) fn fails(&self) -> bool {
        let failing = &mut self.state.lock().failing_applies;
        let fails = *failing > 0;
        *failing = failing.saturating_sub(1);
        fails
    }
}
