//! The rows that an earlier process has left, which ports take over.

use std::{mem, net::IpAddr};

use model::Family;
use proxy_common::{
    forward::{NO_NODE, Row},
    tables::FrontendKey6,
};

use super::{Forwarding, Placement, PreviousRows, rows::RowsId, stage::Stage};

impl Forwarding {
    /// Takes over the seconds of the rows of an earlier process, at the first [`Forwarding::update`].
    pub(crate) fn restore(&mut self, mut previous: PreviousRows) {
        self.nodes.restore(mem::take(&mut previous.numbers));
        self.previous = previous;
    }

    /// The families of what an earlier process has left.
    pub(crate) fn previous_families(&self) -> Vec<Family> {
        let has = |family| self.previous.frontends.keys().any(|it| Family::of(it.address.into()) == family);
        Family::ALL.into_iter().filter(|it| has(*it)).collect()
    }

    /// What an earlier process has left for a frontend.
    pub(super) fn restored(&mut self, frontend: &FrontendKey6) -> Option<Placement> {
        let forward = *self.previous.frontends.get(frontend)?;
        let rows = self.restored_rows(forward.first)?;
        let has_owners = self.rows.owners(rows).is_some_and(|it| !it.is_empty());
        let stage = Stage::of(forward.flags, has_owners);
        Some(Placement { rows, stage, by_client: forward.is_by_client() })
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
        let id = self.rows.add([].into(), rows);
        self.restored.insert(first, id);
        Some(id)
    }
}
