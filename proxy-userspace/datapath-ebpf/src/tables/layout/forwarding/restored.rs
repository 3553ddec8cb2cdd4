//! What an earlier process has left: rows that ports take over, and ports that are forwarded no longer.

use std::{collections::HashSet, mem, net::IpAddr};

use model::{Family, state::ServiceState};
use proxy_common::{
    forward::{NO_NODE, Row},
    tables::FrontendKey6,
};

use super::{
    Before, Forwarding, MAX_PAIRS_OF_ENDED, PlacedPort, PreviousRows, acquire_counters, frontends, id_of,
    rows::RowsId, stage::Stage,
};
use crate::tables::{counter_alloc::CounterAllocator, map_updates::MapUpdates};

impl Forwarding {
    /// Takes over the seconds of the rows of an earlier process, at the first [`Forwarding::update`].
    pub(crate) fn restore(&mut self, mut previous: PreviousRows) {
        self.nodes.restore(mem::take(&mut previous.numbers));
        self.previous = previous;
    }

    /// The families of what an earlier process has left.
    pub(crate) fn previous_families(&self) -> Vec<Family> {
        let family = |it: &FrontendKey6| Family::of(IpAddr::from(it.address).to_canonical());
        let found: HashSet<_> = self.previous.frontends.keys().map(family).collect();
        Family::ALL.into_iter().filter(|it| found.contains(it)).collect()
    }

    /// What an earlier process has left for a frontend.
    pub(super) fn restored(&mut self, frontend: &FrontendKey6) -> Option<Before> {
        let forward = *self.previous.frontends.get(frontend)?;
        let rows = self.restored_rows(forward.first)?;
        let has_owners = self.rows.owners(rows).is_some_and(|it| !it.is_empty());
        Some(Before { rows, stage: Stage::of(forward.flags, has_owners), by_client: forward.is_by_client() })
    }

    /// The rows that began at a position.
    fn restored_rows(&mut self, first: u32) -> Option<RowsId> {
        if let Some(id) = self.restored.get(&first) {
            return Some(*id);
        }
        let previous = self.previous.rows.remove(&first)?;
        let names = self.nodes.names();
        let mut number = |it: &IpAddr| names.get(it).map_or(NO_NODE, |name| self.nodes.number(name));
        let rows = previous.iter().map(|[owner, second]| Row::new(number(owner), number(second))).collect();
        let id = self.rows.add_restored(rows);
        self.restored.insert(first, id);
        Some(id)
    }

    /// The ports, except those that are placed, that an earlier process forwarded.
    pub(super) fn restore_ended(
        &mut self,
        state: &ServiceState,
        placed: &[PlacedPort],
        counters: &mut CounterAllocator,
        updates: &mut MapUpdates,
    ) -> Vec<PlacedPort> {
        let mut ended = Vec::new();
        if self.previous.frontends.is_empty() {
            return ended;
        }
        let service = &state.service;
        for (it, family) in service.ports.iter().flat_map(|it| Family::ALL.map(|family| (it, family))) {
            let id = id_of(state, it, family);
            let mut frontends = frontends(service, it, family);
            frontends.retain(|it| self.previous.frontends.contains_key(it));
            let is_placed = placed.iter().any(|it| it.id() == id);
            let can_keep = self.can_keep(it.protocol, family) && self.rows.pairs() <= MAX_PAIRS_OF_ENDED;
            if is_placed || frontends.is_empty() || !can_keep {
                continue;
            }
            let Some(Before { rows, stage, by_client }) = self.restored(&frontends[0]) else { continue };
            if stage != Stage::Translated {
                self.rows.keep(rows, updates);
                ended.push(PlacedPort {
                    family,
                    nodes: [].into(),
                    frontends,
                    rows,
                    stage: Stage::Ended,
                    by_client,
                    counters: acquire_counters(counters, id.0),
                    port_id: id.0,
                });
            }
        }
        ended
    }
}
