//! The frontends whose packets are forwarded, as text: a line for each node that owns rows, or one that says that they are
//! translated.
//!
//! Seconds are left out, since they depend on the history.

use std::{
    collections::BTreeMap,
    iter,
    net::{IpAddr, SocketAddr},
};

use datapath::FrontendAddress;
use model::Protocol;
use proxy_common::{
    forward::{ESTABLISHED_ONLY, Forward, ForwardNode, KNOWN_FIRST, NO_NODE, NodeNumber, Row, RowPair},
    net::V4,
    tables::{FrontendKey6, UDP},
};

use crate::{
    error::Error,
    maps::{bpf_maps, pins::Pins},
    observe::active_frontends::{ActiveFrontends, Maps, ReadTables},
    tables::{layout::forwarding::PreviousRows, store::Table},
};

/// The tables of packets that are forwarded.
#[derive(Default)]
pub(crate) struct ForwardTables {
    pub(crate) forwards: Vec<(FrontendKey6, Forward)>,
    /// By position.
    pub(crate) rows: BTreeMap<u32, Row>,
    /// By number.
    pub(crate) nodes: BTreeMap<u32, ForwardNode>,
}

/// The rows that are active below a folder of pins, or were those of another version; none if no state is.
pub(crate) fn previous_rows(pins: &Pins) -> Result<PreviousRows, Error> {
    let others = pins.other_layouts()?.into_iter().map(|it| pins.of_layout(it));
    for pins in iter::once(pins.clone()).chain(others) {
        if bpf_maps::is_initialized(&pins)? {
            let (_, tables) = ActiveFrontends::of(pins)?.read(|maps| ForwardTables::read(maps))?;
            return Ok(tables.into());
        }
    }
    Ok(PreviousRows::default())
}

impl From<ForwardTables> for PreviousRows {
    fn from(tables: ForwardTables) -> Self {
        let mut previous = Self::default();
        for (number, ForwardNode { v4, v6 }) in &tables.nodes {
            let addresses = [v4.mapped().into(), (*v6).into()].map(|it: IpAddr| it.to_canonical());
            let known = addresses.into_iter().filter(|it| !it.is_unspecified());
            previous.numbers.extend(known.map(|it| (it, *number as NodeNumber)));
        }
        for (key, forward) in &tables.forwards {
            previous.frontends.insert(*key, *forward);
            let is_v4 = V4::from_mapped(key.address).is_some();
            previous.rows.entry(forward.first).or_insert_with(|| {
                let rows = tables.rows_of(*forward);
                rows.map(|it| [it.owner(), it.second()].map(|it| tables.address(it, is_v4))).collect()
            });
        }
        previous
    }
}

/// The rows of a pair, with their positions. A map of others may have any number.
pub(crate) fn rows_of((number, pair): (u32, RowPair)) -> [(u32, Row); 2] {
    let first = number.wrapping_mul(2);
    [first, first + 1].map(|it| (it, pair.row(it)))
}

impl ForwardTables {
    pub(crate) fn read(maps: &mut impl ReadTables) -> Result<Self, Error> {
        let mut tables = Self::default();
        maps.each(Table::Forwards, |key, it| tables.forwards.push((key, it)))?;
        if !tables.forwards.is_empty() {
            maps.each(Table::ForwardRows, |number: u32, it: RowPair| {
                tables.rows.extend(rows_of((number, it)));
            })?;
            maps.each(Table::ForwardNodes, |number: u32, it: ForwardNode| {
                tables.nodes.insert(number, it);
            })?;
        }
        Ok(tables)
    }

    /// The tables as far as they concern one frontend.
    pub(crate) fn read_one(maps: &mut Maps<'_>, frontend: FrontendKey6) -> Result<Self, Error> {
        let mut tables = Self::default();
        if let Some(forward) = maps.get::<_, Forward>(Table::Forwards, &frontend)? {
            tables.forwards.push((frontend, forward));
            let last = forward.first.saturating_add(forward.mask);
            for number in RowPair::of(forward.first)..=RowPair::of(last) {
                // A foreign map may claim rows beyond its end.
                let Some(pair) = maps.get(Table::ForwardRows, &number)? else { break };
                tables.rows.extend(rows_of((number, pair)));
            }
            maps.each(Table::ForwardNodes, |number: u32, it: ForwardNode| {
                tables.nodes.insert(number, it);
            })?;
        }
        Ok(tables)
    }

    pub(crate) fn rows_of(&self, forward: Forward) -> impl Iterator<Item = Row> {
        self.rows.range(forward.first..=forward.first.saturating_add(forward.mask)).map(|(_, it)| *it)
    }

    /// A line for each frontend and each owner of its rows, in no order.
    pub(crate) fn lines(&self) -> impl Iterator<Item = String> {
        self.forwards.iter().flat_map(|(key, forward)| {
            let address = SocketAddr::new(key.address.into(), key.port.get());
            let mut owners: BTreeMap<Option<IpAddr>, u32> = BTreeMap::new();
            for row in self.rows_of(*forward) {
                let owner = (row.owner() != NO_NODE).then(|| self.address(row.owner(), address.is_ipv4()));
                *owners.entry(owner).or_default() += 1;
            }
            let protocol = if key.protocol == UDP { Protocol::Udp } else { Protocol::Tcp };
            let name = FrontendAddress { address, protocol };
            let all = forward.mask.saturating_add(1);
            let stage = match forward.flags {
                flags if flags & ESTABLISHED_ONLY != 0 => " established-only",
                flags if flags & KNOWN_FIRST != 0 => " known-first",
                _ => "",
            };
            owners.into_iter().map(move |(owner, rows)| match owner {
                Some(owner) => format!("forward {name} -> {owner} rows={rows}/{all}{stage}"),
                None => format!("forward {name} -> translated"),
            })
        })
    }

    /// Where a node receives packets of a family; the unspecified address if nowhere.
    pub(crate) fn address(&self, number: NodeNumber, is_v4: bool) -> IpAddr {
        let node = self.nodes.get(&number.into()).copied().unwrap_or_default();
        if is_v4 { V4::mapped(node.v4).into() } else { node.v6.into() }
    }
}
