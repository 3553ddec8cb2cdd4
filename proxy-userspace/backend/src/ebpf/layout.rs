//! Lays a state out in tables: gives sets their ids and backends their slots, and finds what differs from before.
//!
//! The one rule: a change costs what it touches.
//! A Service that is as it was is not looked at again, a set keeps its id, and a backend that goes leaves its slot to one
//! that comes, or to the last one.

mod rows;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::{IpAddr, SocketAddr},
};

use model::{Family, ServiceName, state::NodeState};
use proxy_common::{
    counters::Cell,
    tables::{BackendKey, Frontend as Row, OWN_ADDRESSES_ONLY, Place, Span},
};

use self::rows::{
    backend_table, delete_frontend, delete_member, delete_place, frontend_table, member_table, put_backend,
    put_frontend, put_member, put_place,
};
use super::{
    changes::Changes,
    compile::{Frontend, FrontendAddress, ServiceImage, SetImage, compile},
    counters::{Counters, Owner},
    store::Table,
};
use crate::claim::Claim;
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
    /// Whose the addresses of nodes are.
    places: Places,
    /// What of single Services is not served.
    rejected: BTreeMap<ServiceName, Vec<Rejected>>,
    ids: Ids,
    /// Who counts where.
    counters: Counters,
    rows: [u32; Table::COUNT],
}

/// Whose the addresses of nodes are.
pub(super) type Places = BTreeMap<IpAddr, Place>;

/// A Service that is laid out.
#[derive(Debug, Default)]
struct Known {
    frontends: Vec<Frontend>,
    sets: Vec<Set>,
}

/// A set with its id; the position of a backend is its slot.
#[derive(Debug)]
struct Set {
    id: u32,
    /// The service port whose set it is.
    service: u64,
    family: Family,
    /// Whether its backends are listed as members.
    is_listed: bool,
    slots: Vec<Slot>,
}

/// A backend, and where its connections are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Slot {
    backend: SocketAddr,
    cell: Cell,
}

impl Set {
    fn key(&self, slot: usize) -> BackendKey {
        // A set has far fewer than 2^32 backends: each is one of that many addresses in memory.
        BackendKey { set: self.id, slot: u32::try_from(slot).unwrap_or(u32::MAX) }
    }

    /// Whether it can become what `image` says by a change of its backends alone.
    fn is_like(&self, image: &SetImage) -> bool {
        (self.service, self.family, self.is_listed) == (image.service, image.family, image.is_listed)
    }

    fn owner(&self, backend: SocketAddr) -> Owner {
        Owner::backend(self.service, backend)
    }
}

/// Who wants a frontend, and why; the first has it.
#[derive(Debug, Default)]
struct Claims {
    /// With its position in [`Known::frontends`].
    services: BTreeMap<(Claim, ServiceName), usize>,
    row: Option<Row>,
}

/// Ids of sets, used again when they are free.
#[derive(Debug, Default)]
struct Ids {
    next: u32,
    free: Vec<u32>,
}

impl Ids {
    fn take(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            self.next += 1;
            self.next
        })
    }
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
        let mut writer =
            Writer { changes: Changes::default(), counters: &mut self.counters, rows: &mut self.rows };
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
            let known = writer.relay(&mut self.ids, known, image);
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
            if frontend_table(address) == Table::NodePorts {
                count(&mut self.node_ports, address.address.port(), claims.row.is_some(), row.is_some());
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
            Table::Places => {
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
                    for (slot, it) in (0..).zip(&set.slots) {
                        put_backend(&mut changes, BackendKey { set: set.id, slot }, it.backend, it.cell);
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

    /// Between which ports the node ports lie.
    pub(super) fn span(&self) -> Span {
        match (self.node_ports.first_key_value(), self.node_ports.last_key_value()) {
            (Some((&least, _)), Some((&greatest, _))) => Span { least, greatest },
            _ => Span::NOTHING,
        }
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
                reason: format!("it is a {claim} of {winner} already; give one of them another"),
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
    let count = u32::try_from(set.slots.len()).ok()?;
    Some(Row {
        set: set.id,
        count,
        flags: if frontend.own_addresses_only { OWN_ADDRESSES_ONLY } else { 0 },
        affinity: frontend.affinity,
        service: frontend.service,
        cell: counters.cell_of(Owner::port(frontend.service)),
        zero: 0,
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

/// Gathers changes and keeps count of the rows.
struct Writer<'a> {
    changes: Changes,
    counters: &'a mut Counters,
    rows: &'a mut [u32; Table::COUNT],
}

impl Writer<'_> {
    /// Brings a Service from its old sets to its new ones. A set belongs to the first frontend that uses it, and keeps
    /// its id while that frontend is there.
    fn relay(&mut self, ids: &mut Ids, old: Known, image: ServiceImage) -> Known {
        let old_at: HashMap<FrontendAddress, usize> =
            old.frontends.iter().map(|it| (it.address, it.set)).collect();
        let mut old_sets: Vec<_> = old.sets.into_iter().map(Some).collect();
        let mut new_sets: Vec<(Option<Set>, SetImage)> =
            image.sets.into_iter().map(|it| (None, it)).collect();
        for it in &image.frontends {
            if let Some((kept @ None, image)) = new_sets.get_mut(it.set) {
                let old = old_at.get(&it.address).and_then(|at| old_sets.get_mut(*at));
                *kept = old.and_then(|it| it.take_if(|it| it.is_like(image)));
            }
        }
        // What is left over goes first, so that a new set may take its id.
        for set in old_sets.into_iter().flatten() {
            self.clear(&set);
            ids.free.push(set.id);
        }
        let sets = new_sets.into_iter().map(|(kept, image)| {
            let mut set = kept.unwrap_or_else(|| Set {
                id: ids.take(),
                service: image.service,
                family: image.family,
                is_listed: image.is_listed,
                slots: Vec::new(),
            });
            self.fill(&mut set, &image.backends);
            set
        });
        Known { sets: sets.collect(), frontends: image.frontends }
    }

    /// Brings a set from its old backends to these, which are sorted: who stays keeps its slot, who comes takes the slot of one that goes,
    /// and the last ones close the gaps that are left.
    fn fill(&mut self, set: &mut Set, backends: &[SocketAddr]) {
        let mut old: Vec<_> = set.slots.iter().map(|it| it.backend).collect();
        old.sort_unstable();
        let mut coming = backends.iter().filter(|it| old.binary_search(it).is_err());
        let goes = |it: &Slot| backends.binary_search(&it.backend).is_err();
        let mut slots = Vec::with_capacity(backends.len().max(set.slots.len()));
        slots.extend_from_slice(&set.slots);
        let mut gaps = Vec::new();
        for (slot, it) in slots.iter_mut().enumerate().filter(|(_, it)| goes(it)) {
            self.go(set, *it);
            match coming.next() {
                Some(next) => *it = self.come(set, *next),
                None => gaps.push(slot),
            }
        }
        for slot in gaps.into_iter().rev() {
            slots.swap_remove(slot);
        }
        for backend in coming {
            slots.push(self.come(set, *backend));
        }
        // A slot is written or deleted once, whatever moved through it on the way.
        for (slot, it) in slots.iter().enumerate() {
            let before = set.slots.get(slot);
            if before == Some(it) {
                continue;
            }
            if before.is_none() {
                self.rows[backend_table(set.family).index()] += 1;
            }
            put_backend(&mut self.changes, set.key(slot), it.backend, it.cell);
        }
        for slot in slots.len()..set.slots.len() {
            self.delete_slot(set, slot);
        }
        set.slots = slots;
    }

    /// Takes a whole set out.
    fn clear(&mut self, set: &Set) {
        for (slot, it) in set.slots.iter().enumerate() {
            self.delete_slot(set, slot);
            self.go(set, *it);
        }
    }

    /// A backend comes into a set: it is counted, and listed.
    fn come(&mut self, set: &Set, backend: SocketAddr) -> Slot {
        let cell = self.counters.take_backend(set.owner(backend));
        if set.is_listed {
            self.rows[member_table(set.family).index()] += 1;
            put_member(&mut self.changes, set.id, backend, cell);
        }
        Slot { backend, cell }
    }

    /// A backend goes out of a set.
    fn go(&mut self, set: &Set, it: Slot) {
        self.counters.give_back(set.owner(it.backend));
        if set.is_listed {
            self.rows[member_table(set.family).index()] -= 1;
            delete_member(&mut self.changes, set.id, it.backend);
        }
    }

    fn delete_slot(&mut self, set: &Set, slot: usize) {
        let table = backend_table(set.family);
        self.rows[table.index()] -= 1;
        self.changes.delete(table, &set.key(slot));
    }

    fn places(&mut self, old: &Places, new: &Places) {
        for address in old.keys().filter(|it| !new.contains_key(it)) {
            self.rows[Table::Places.index()] -= 1;
            delete_place(&mut self.changes, *address);
        }
        for (address, place) in new {
            match old.get(address) {
                Some(before) if before == place => continue,
                Some(_) => {}
                None => self.rows[Table::Places.index()] += 1,
            }
            put_place(&mut self.changes, *address, *place);
        }
    }

    fn frontend(&mut self, address: FrontendAddress, old: Option<Row>, new: Option<Row>) {
        let table = frontend_table(address);
        match (old, new) {
            (None, None) => {}
            (Some(old), Some(new)) if old == new => {}
            (old, Some(row)) => {
                if old.is_none() {
                    self.rows[table.index()] += 1;
                }
                put_frontend(&mut self.changes, address, &row);
            }
            (Some(_), None) => {
                self.rows[table.index()] -= 1;
                delete_frontend(&mut self.changes, address);
            }
        }
    }
}
