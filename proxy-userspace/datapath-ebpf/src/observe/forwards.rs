//! Everything that is forwarded, as a summary and as text: a line for each node that owns rows of a frontend, or one that says
//! that its packets are translated.
//!
//! Seconds are left out of the text, since they depend on the history.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    iter,
    net::{IpAddr, SocketAddr},
    path::Path,
};

use datapath::FrontendAddress;
use model::Protocol;
use proxy_common::{
    forward::{
        ESTABLISHED_ONLY, Forward, ForwardNode, KNOWN_FIRST, NO_NODE, NodeNumber, Row, RowPair, THIS_NODE,
    },
    net::{V4, V6},
    tables::{FrontendKey6, UDP},
};
use serde::Serialize;

use crate::{
    error::Error,
    maps::{bpf_maps, pins::Pins},
    observe::active_frontends::{ActiveFrontends, Maps, ReadTables},
    programs::uplink_links,
    tables::{layout::forwarding::PreviousRows, store::Table},
};

/// The tables of packets that are forwarded.
#[derive(Default)]
pub(crate) struct ForwardTables {
    pub(crate) forwards: HashMap<FrontendKey6, Forward>,
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
        let (mut numbers, mut rows) = (HashMap::new(), HashMap::new());
        for (number, node) in &tables.nodes {
            numbers.extend(addresses(node).map(|it| (it, *number as NodeNumber)));
        }
        for (key, forward) in &tables.forwards {
            let is_v4 = V4::from_mapped(key.address).is_some();
            rows.entry(forward.first).or_insert_with(|| {
                let rows = tables.rows_of(*forward);
                rows.map(|it| [it.owner(), it.second()].map(|it| tables.address(it, is_v4))).collect()
            });
        }
        Self { frontends: tables.forwards, rows, numbers }
    }
}

/// Where a node receives packets.
fn addresses(&ForwardNode { v4, v6 }: &ForwardNode) -> impl Iterator<Item = IpAddr> {
    [v4.mapped(), v6].into_iter().map(IpAddr::from).filter(|it| !it.is_unspecified())
}

/// The rows of a pair, with their positions. A map of others may have any number.
fn rows_of(number: u32, pair: RowPair) -> [(u32, Row); 2] {
    let first = number.wrapping_mul(2);
    [first, first + 1].map(|it| (it, pair.row(it)))
}

impl ForwardTables {
    pub(crate) fn read(maps: &mut impl ReadTables) -> Result<Self, Error> {
        let mut tables = Self::default();
        maps.each(Table::Forwards, |key, it| {
            tables.forwards.insert(key, it);
        })?;
        if !tables.forwards.is_empty() {
            maps.each(Table::ForwardRows, |number, it| tables.rows.extend(rows_of(number, it)))?;
            maps.each(Table::ForwardNodes, |number, it| {
                tables.nodes.insert(number, it);
            })?;
        }
        Ok(tables)
    }

    /// The tables as far as they concern one frontend.
    pub(crate) fn read_one(maps: &mut Maps<'_>, frontend: FrontendKey6) -> Result<Self, Error> {
        let mut tables = Self::default();
        if let Some(forward) = maps.get::<_, Forward>(Table::Forwards, &frontend)? {
            tables.forwards.insert(frontend, forward);
            let last = forward.first.saturating_add(forward.mask);
            for number in RowPair::of(forward.first)..=RowPair::of(last) {
                // A foreign map may claim rows beyond its end.
                let Some(pair) = maps.get(Table::ForwardRows, &number)? else { break };
                tables.rows.extend(rows_of(number, pair));
            }
            maps.each(Table::ForwardNodes, |number, it| {
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

/// Everything that is forwarded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ForwardSummary {
    /// How many frontends are forwarded.
    pub frontends: usize,
    /// How many nodes own rows, this one included.
    pub nodes: usize,
    /// How many more are to be, and are translated because no node owns their rows.
    pub translated: usize,
    /// How many more are forwarded no longer, but for connections that exist.
    pub ended: usize,
    /// The addresses at which this node receives packets of other nodes.
    #[serde(skip)]
    pub own_addresses: BTreeSet<IpAddr>,
    /// The addresses of other nodes, with and without rows.
    #[serde(skip)]
    pub other_addresses: BTreeSet<IpAddr>,
    /// The names of the interfaces at which the programs are attached.
    pub uplinks: BTreeSet<String>,
}

impl ForwardSummary {
    /// Whether a Service is, was, or is to be, forwarded.
    pub fn is_used(&self) -> bool {
        self.frontends + self.translated + self.ended > 0
    }
}

/// Reads what is forwarded in the active generation, without more memory than its frontends take.
///
/// # Errors
///
/// As for [`dump`](crate::observe::dump); if a pinned link cannot be queried.
pub fn forward_summary(pin_dir: &Path) -> Result<ForwardSummary, Error> {
    let (_, mut summary) = ActiveFrontends::open(pin_dir)?.read(|maps| {
        let (mut frontends, mut ended) = (Vec::new(), 0);
        maps.each(Table::Forwards, |_: FrontendKey6, it: Forward| {
            frontends.push((it.first, it.mask));
            ended += usize::from(it.has_ended());
        })?;
        if frontends.is_empty() {
            return Ok(ForwardSummary::default());
        }
        // Rows of no frontend may be left over.
        let used: BTreeMap<_, _> = frontends.iter().copied().collect();
        let is_used = |position: u32| {
            let range = used.range(..=position).next_back();
            range.is_some_and(|(first, mask)| position - first <= *mask)
        };
        let (mut owners, mut without_owner) = (BTreeSet::new(), BTreeSet::new());
        maps.each(Table::ForwardRows, |number: u32, pair: RowPair| {
            for (position, row) in rows_of(number, pair) {
                match row.owner() {
                    _ if !is_used(position) => {}
                    NO_NODE => drop(without_owner.insert(position)),
                    owner => drop(owners.insert(owner)),
                }
            }
        })?;
        let mut other_addresses = BTreeSet::new();
        maps.each(Table::ForwardNumbers, |address: V6, number: u32| {
            if number != u32::from(THIS_NODE) {
                other_addresses.insert(address.into());
            }
        })?;
        let own = maps.get(Table::ForwardNodes, &u32::from(THIS_NODE))?.unwrap_or_default();
        let translated = frontends.iter().filter(|(first, _)| without_owner.contains(first)).count();
        Ok(ForwardSummary {
            frontends: frontends.len() - translated - ended,
            translated,
            ended,
            nodes: owners.len(),
            other_addresses,
            own_addresses: addresses(&own).collect(),
            uplinks: BTreeSet::new(),
        })
    })?;
    summary.uplinks = uplink_names(pin_dir)?;
    Ok(summary)
}

/// The names of the interfaces at which the programs are attached.
pub(crate) fn uplink_names(pin_dir: &Path) -> Result<BTreeSet<String>, Error> {
    Ok(uplink_links::attached(&Pins::new(pin_dir))?.into_values().collect())
}
