//! The rows of frontends, shared by those with the same nodes and the same history.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use model::state::NodeShare;
use proxy_common::forward::{NO_NODE, NodeNumber, Row, RowPair};

use super::nodes::ForwardNodes;
use crate::tables::{
    layout::ranges::{Range, RangeAllocator},
    maglev,
    map_updates::MapUpdates,
    store::Table,
};

/// Identifies rows; never used twice.
pub(super) type RowsId = u64;

#[derive(Debug, Default)]
pub(super) struct RowSets {
    sets: HashMap<RowsId, Rows>,
    next_id: RowsId,
    /// Rows of these nodes, whatever came before.
    by_nodes: HashMap<Arc<[NodeShare]>, RowsId>,
    /// What follows rows when their nodes become others.
    successors: HashMap<(RowsId, Arc<[NodeShare]>), RowsId>,
    ranges: RangeAllocator,
    /// How many pairs of rows have a position.
    placed: usize,
}

#[derive(Debug)]
struct Rows {
    /// None if the packets are translated.
    nodes: Arc<[NodeShare]>,
    rows: Vec<Row>,
    owners: HashSet<NodeNumber>,
    /// Where their pairs are.
    range: Range,
    /// How many ports use them.
    users: usize,
}

impl RowSets {
    /// Adds rows, which have no position and no users.
    pub(super) fn add(&mut self, nodes: Arc<[NodeShare]>, rows: Vec<Row>) -> RowsId {
        let owners = rows.iter().map(|it| it.owner()).filter(|it| *it != NO_NODE).collect();
        let id = self.next_id;
        self.next_id += 1;
        self.sets.insert(id, Rows { nodes, rows, owners, range: Range::default(), users: 0 });
        id
    }

    /// Adds a user to rows. The first one gives them a position.
    pub(super) fn keep(&mut self, id: RowsId, updates: &mut MapUpdates) {
        let Some(rows) = self.sets.get_mut(&id) else { return };
        rows.users += 1;
        if rows.users == 1 {
            let pairs = rows.pairs().len();
            rows.range = self.ranges.allocate(pairs as u32);
            rows.write(updates);
            self.placed += rows.range.size as usize;
        }
    }

    /// The rows of these nodes that follow those before; for no nodes, one without an owner. They have a user more.
    pub(super) fn acquire(
        &mut self,
        before: Option<RowsId>,
        serving: &Arc<[NodeShare]>,
        nodes: &mut ForwardNodes,
        updates: &mut MapUpdates,
    ) -> RowsId {
        let old = before.and_then(|it| Some((it, self.sets.get(&it)?)));
        let known = match old {
            Some((before, rows)) if rows.nodes == *serving && rows.users > 0 => Some(before),
            Some((before, _)) => self.successors.get(&(before, Arc::clone(serving))).copied(),
            None => self.by_nodes.get(serving).copied(),
        };
        let id = match known {
            Some(known) => known,
            None => {
                let numbers: Vec<_> = serving.iter().map(|it| nodes.number(&it.node)).collect();
                let rows = follow(old.map(|(_, it)| &*it.rows).unwrap_or_default(), &numbers, serving);
                let id = self.add(Arc::clone(serving), rows);
                self.by_nodes.insert(Arc::clone(serving), id);
                if let Some(before) = before {
                    self.successors.insert((before, Arc::clone(serving)), id);
                }
                id
            }
        };
        self.keep(id, updates);
        id
    }

    /// Removes rows of an earlier process that nobody keeps.
    pub(super) fn remove_unused(&mut self) {
        self.sets.retain(|_, rows| rows.users > 0);
    }

    /// Gives rows up; without users they are gone.
    pub(super) fn release(&mut self, id: RowsId) {
        let Some(rows) = self.sets.get_mut(&id) else { return };
        rows.users -= 1;
        if rows.users > 0 {
            return;
        }
        if let Some(Rows { nodes, range, .. }) = self.sets.remove(&id) {
            self.placed -= range.size as usize;
            self.ranges.release(range);
            if self.by_nodes.get(&nodes) == Some(&id) {
                self.by_nodes.remove(&nodes);
            }
        }
        let sets = &self.sets;
        self.successors.retain(|(before, _), it| sets.contains_key(before) && sets.contains_key(it));
    }

    /// The owners of rows; none if the packets are translated.
    pub(super) fn owners(&self, id: RowsId) -> Option<&HashSet<NodeNumber>> {
        self.sets.get(&id).map(|it| &it.owners)
    }

    /// The position of the first of some rows, and their number minus one.
    pub(super) fn place(&self, id: RowsId) -> Option<(u32, u32)> {
        self.sets.get(&id).map(|it| (it.range.first * 2, it.rows.len() as u32 - 1))
    }

    /// How many pairs of rows there are; a single row is a pair, too.
    pub(super) fn pairs(&self) -> usize {
        self.placed
    }

    /// How many pairs the table must have room for.
    pub(super) fn end(&self) -> u32 {
        self.ranges.end()
    }

    pub(super) fn full_table(&self, updates: &mut MapUpdates) {
        self.sets.values().for_each(|it| it.write(updates));
    }
}

impl Rows {
    /// The rows as the kernel has them.
    fn pairs(&self) -> impl ExactSizeIterator<Item = RowPair> {
        self.rows.chunks(2).map(|it| RowPair::new(it[0], it.get(1).copied().unwrap_or_default()))
    }

    fn write(&self, updates: &mut MapUpdates) {
        let pairs = (self.range.first..).zip(self.pairs());
        pairs.for_each(|(number, it)| updates.set(Table::ForwardRows, &number, Some(&it)));
    }
}

/// The rows of these nodes; one with another owner than before has that one as its second.
fn follow(old: &[Row], numbers: &[NodeNumber], serving: &[NodeShare]) -> Vec<Row> {
    if serving.is_empty() {
        return vec![Row::default()];
    }
    let row = |(owner, old): (NodeNumber, Option<&Row>)| match old {
        Some(old) if old.owner() == owner => *old,
        Some(old) if old.owner() != NO_NODE => Row::new(owner, old.owner()),
        _ => Row::new(owner, NO_NODE),
    };
    let owners = maglev::owners(serving).into_iter().map(|it| numbers[usize::from(it)]);
    let old = old.iter().map(Some).cycle().chain(std::iter::repeat(None));
    owners.zip(old).map(row).collect()
}
