//! Lays a state out in tables: gives sets their ids and backends their slots, and finds what differs from before.
//!
//! The one rule: a change costs what it touches.
//! A Service that is as it was is not looked at again, a set keeps its id and mostly its place, and a backend that goes
//! leaves its slot to one that comes, or to the last one.

mod ranges;
mod rows;
mod writer;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
};

use model::{
    Family, ServiceName,
    state::{NodeState, PerFamily},
};
use proxy_common::tables::{
    Frontend as Row, LOCAL_ADDRESSES_ONLY, Network, NodeAddrScope, PortRange, Prefilter,
};

use self::{
    ranges::Ranges,
    rows::{
        backend_table, frontend_table, member_table, network, put_backend, put_frontend, put_member,
        put_place,
    },
    writer::{Ids, Set, Writer, count_of},
};
use crate::{
    compile::{Frontend, FrontendAddress, compile},
    counter_alloc::{Counters, Owner},
    map_updates::Changes,
    store::Table,
};
use datapath::FrontendKind;
use model::Rejected;

/// Everything that should be in the tables of a generation.
#[derive(Debug, Default)]
pub(super) struct Layout {
    state: NodeState,
    services: HashMap<ServiceName, Known>,
    frontends: HashMap<FrontendAddress, Claims>,
    /// The frontends that more than one Service claims.
    contested: BTreeSet<FrontendAddress>,
    /// The node ports that are laid out, each as often as there are transports and families.
    node_ports: BTreeMap<u16, usize>,
    /// The networks in which frontends are laid out, each as often as there are some.
    networks: PerFamily<BTreeMap<Network, usize>>,
    /// Whose the addresses of nodes are.
    places: Places,
    /// What of single Services is not served.
    rejected: BTreeMap<ServiceName, Vec<Rejected>>,
    ids: Ids,
    /// Where the sets are.
    ranges: PerFamily<Ranges>,
    /// Who counts where.
    counters: Counters,
    rows: [u32; Table::COUNT],
}

/// Whose the addresses of nodes are.
pub(super) type Places = BTreeMap<IpAddr, NodeAddrScope>;

/// A Service that is laid out.
#[derive(Debug, Default)]
struct Known {
    frontends: Vec<Frontend>,
    sets: Vec<Set>,
}

/// Who wants a frontend, and why; the first has it.
#[derive(Debug, Default)]
struct Claims {
    /// With its position in [`Known::frontends`].
    services: BTreeMap<(FrontendKind, ServiceName), usize>,
    row: Option<Row>,
}

/// What an update found.
#[derive(Debug, Default)]
pub(super) struct Update {
    /// What is to be written.
    pub changes: Changes,
    /// How many Services are new, changed or gone.
    pub services: usize,
}

impl Layout {
    /// Takes the state of the node, and whose the addresses of nodes are, and returns how the tables change.
    pub(super) fn update(&mut self, state: &NodeState, places: &Places) -> Update {
        let before = std::mem::replace(&mut self.state, state.clone());
        let (gone, there): (Vec<_>, Vec<_>) =
            state.diff(&before).map(|(name, _, now)| (name, now)).partition(|(_, now)| now.is_none());
        let new = there.iter().filter(|(name, _)| !self.services.contains_key(*name)).filter_map(|it| it.1);
        self.counters.reserve(new.map(|it| it.endpoints.len() + it.service.ports.len()).sum());
        let mut writer = Writer {
            changes: Changes::default(),
            ids: &mut self.ids,
            ranges: &mut self.ranges,
            counters: &mut self.counters,
            rows: &mut self.rows,
        };
        let mut touched = BTreeSet::new();
        let services = gone.len() + there.len();
        // What goes comes first, so that its ids can be used again.
        for (name, now) in gone.into_iter().chain(there) {
            let mut image = now.map(|it| compile(it)).unwrap_or_default();
            let rejected = std::mem::take(&mut image.rejected);
            if rejected.is_empty() {
                self.rejected.remove(name);
            } else {
                self.rejected.insert(name.clone(), rejected);
            }
            let known = self.services.remove(name).unwrap_or_default();
            for it in &known.frontends {
                if let Some(claims) = self.frontends.get_mut(&it.address) {
                    claims.services.remove(&(it.claim, name.clone()));
                }
                touched.insert(it.address);
            }
            // Taken before they are given back, so that who stays keeps its cells.
            for it in &image.frontends {
                writer.counters.take_port(Owner::port(it.service));
            }
            for it in &known.frontends {
                writer.counters.give_back(Owner::port(it.service));
            }
            let known = writer.relay(known, image);
            for (position, it) in known.frontends.iter().enumerate() {
                let claims = &mut self.frontends.entry(it.address).or_default().services;
                claims.insert((it.claim, name.clone()), position);
                touched.insert(it.address);
            }
            if now.is_some() {
                self.services.insert(name.clone(), known);
            }
        }
        for address in touched {
            let Some(claims) = self.frontends.get_mut(&address) else { continue };
            if claims.services.len() > 1 {
                self.contested.insert(address);
            } else {
                self.contested.remove(&address);
            }
            let first = claims.services.first_key_value();
            let row = first.and_then(|((_, owner), position)| {
                let owner = self.services.get(owner)?;
                row(owner, owner.frontends.get(*position)?, writer.counters)
            });
            writer.frontend(address, claims.row, row);
            let (was, is) = (claims.row.is_some(), row.is_some());
            if frontend_table(address) == Table::NodePorts {
                count(&mut self.node_ports, address.address.port(), was, is);
            } else {
                let ip = address.address.ip();
                count(self.networks.of_mut(Family::of(ip)), network(ip), was, is);
            }
            claims.row = row;
            if claims.services.is_empty() {
                self.frontends.remove(&address);
            }
        }
        if *places != self.places {
            writer.places(&self.places, places);
            self.places.clone_from(places);
        }
        Update { changes: writer.changes, services }
    }

    /// Every entry of one table.
    pub(super) fn whole(&self, table: Table) -> Changes {
        let mut changes = Changes::default();
        match table {
            Table::NodeAddrs => {
                for (address, place) in &self.places {
                    put_place(&mut changes, *address, *place);
                }
            }
            Table::Frontends4 | Table::Frontends6 | Table::NodePorts => {
                for (address, claims) in &self.frontends {
                    if let Some(row) = &claims.row
                        && frontend_table(*address) == table
                    {
                        put_frontend(&mut changes, *address, row);
                    }
                }
            }
            Table::Backends4 | Table::Backends6 => {
                for set in self.sets().filter(|set| backend_table(set.family) == table) {
                    for (position, it) in (set.range.first..).zip(&set.slots) {
                        put_backend(&mut changes, position, it.backend, it.cell);
                    }
                }
            }
            Table::Members4 | Table::Members6 => {
                for set in self.sets().filter(|set| set.is_listed && member_table(set.family) == table) {
                    for it in &set.slots {
                        put_member(&mut changes, set.id, it.backend, it.cell);
                    }
                }
            }
        }
        changes
    }

    /// Who counts where.
    pub(super) fn counters(&mut self) -> &mut Counters {
        &mut self.counters
    }

    /// A layout of nothing, in which those who counted before keep their cells.
    pub(super) fn new(counters: Counters) -> Self {
        Self { counters, ..Self::default() }
    }

    /// How many entries a table has.
    pub(super) fn rows(&self, table: Table) -> u32 {
        self.rows[table.index()]
    }

    /// Whether there is nothing in any table.
    pub(super) fn is_empty(&self) -> bool {
        self.rows.iter().all(|it| *it == 0)
    }

    /// How many entries a table must have room for.
    pub(super) fn need(&self, table: Table) -> u32 {
        match table {
            Table::Backends4 => self.ranges.of(Family::V4).end(),
            Table::Backends6 => self.ranges.of(Family::V6).end(),
            _ => self.rows(table),
        }
    }

    /// Where the frontends may be.
    pub(super) fn prefilter(&self) -> Prefilter {
        let mut prefilter = Prefilter::EMPTY;
        if let (Some((&min, _)), Some((&max, _))) =
            (self.node_ports.first_key_value(), self.node_ports.last_key_value())
        {
            prefilter.node_ports = PortRange { min, max };
        }
        self.networks.of(Family::V4).keys().for_each(|it| prefilter.networks4.insert(*it));
        self.networks.of(Family::V6).keys().for_each(|it| prefilter.networks6.insert(*it));
        prefilter
    }

    /// How many Services there are.
    pub(super) fn services(&self) -> usize {
        self.services.len()
    }

    /// What is not served, and why.
    pub(super) fn rejected(&self) -> Vec<Rejected> {
        let own = self.rejected.values().flatten().cloned();
        let contested = self.contested.iter().filter_map(|address| self.frontends.get_key_value(address));
        let lost = contested.filter_map(|(address, claims)| {
            let mut all = claims.services.keys();
            let (claim, winner) = all.next()?;
            Some(all.map(move |(lost, loser)| Rejected {
                item: format!("{loser} {lost} {address}"),
                reason: format!("it is {winner}'s {claim} already; give one of them another"),
            }))
        });
        own.chain(lost.flatten()).collect()
    }

    fn sets(&self) -> impl Iterator<Item = &Set> {
        self.services.values().flat_map(|it| &it.sets)
    }
}

/// The row of a frontend that belongs to `owner`.
fn row(owner: &Known, frontend: &Frontend, counters: &Counters) -> Option<Row> {
    let set = owner.sets.get(frontend.set)?;
    Some(Row {
        set: set.id,
        backend_count: count_of(&set.slots),
        flags: if frontend.own_addresses_only { LOCAL_ADDRESSES_ONLY } else { 0 },
        affinity_timeout: frontend.affinity,
        service_port: frontend.service,
        counter: counters.cell_of(Owner::port(frontend.service)),
        backend_offset: set.range.first,
        #[cfg(feature = "next-layout")]
        other_layout: u64::MAX,
    })
}

/// Keeps count of something that is there as often as others say so.
fn count(counts: &mut BTreeMap<u16, usize>, key: u16, was: bool, is: bool) {
    match (was, is) {
        (false, true) => *counts.entry(key).or_default() += 1,
        (true, false) => match counts.get_mut(&key) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(counts.remove(&key)),
        },
        _ => {}
    }
}
