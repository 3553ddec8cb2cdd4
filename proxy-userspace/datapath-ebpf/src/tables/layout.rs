//! Lays a state out in tables: assigns ids to sets and positions to backends, and computes the difference to the last state.
//!
//! Invariant: a change costs what it touches.
//! Unchanged Services are not compiled again, a set keeps its id and mostly its range, and a removed backend leaves its slot
//! to a new one or to the last one.

mod entry_points;
pub(crate) mod forwarding;
mod ranges;
mod rows;
mod table_state;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    net::{IpAddr, SocketAddr},
};

use datapath::{EjectedEndpoint, FrontendAddress, PassiveHealthOptions};
use model::{
    Family, Rejected, ServiceName,
    state::{LoadBalancing, NodeState, PassiveHealth, PerFamily},
};
use proxy_common::{
    counters::CounterIndex,
    tables::{Frontend as Row, HealthPolicy, MAX_FAILURES, MAX_SLOW_START, Network, PortRange, Prefilter},
};

use self::{
    entry_points::EntryPoints,
    forwarding::Forwarding,
    rows::{
        backend_table, frontend_table, member_table, network, set_backend, set_frontend, set_member,
        set_node_address,
    },
    table_state::{ServiceLayout, Set, TableState, count_of},
};
use crate::tables::{
    compile::{Frontend, compile},
    counter_alloc::{CounterAllocator, CounterOwner},
    map_updates::MapUpdates,
    node_addresses::NodeAddresses,
    store::Table,
};

/// The clients that avoid an ejected endpoint.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct EjectingClients {
    pub(crate) clients: usize,
    /// Whether the node's own network namespace is one of them.
    pub(crate) has_node: bool,
}
/// The contents of all tables of a generation.
#[derive(Debug, Default)]
pub(crate) struct Layout {
    state: NodeState,
    /// When endpoints are ejected, unless their Service says otherwise; never if `None`. It is set before the first state.
    pub(crate) passive_health: Option<PassiveHealthOptions>,
    services: HashMap<ServiceName, ServiceLayout>,
    /// The row of each frontend. A frontend has one Service, because the state has no conflicts, see [`model::conflicts`].
    frontends: HashMap<FrontendAddress, Row>,
    /// The frontends that are no cluster IPs.
    entry_points: EntryPoints,
    /// How many frontends each node port has: one per protocol and family.
    node_ports: BTreeMap<u16, usize>,
    /// How many frontends each network has.
    networks: PerFamily<BTreeMap<Network, usize>>,
    node_addresses: NodeAddresses,
    /// The frontends whose packets from outside are forwarded.
    pub(crate) forwarding: Forwarding,
    /// The addresses of the host's interfaces, and the Services that they affect and that are not compiled again yet.
    host_addresses: BTreeSet<IpAddr>,
    affected: BTreeSet<ServiceName>,
    /// The cluster IPs that are left to the host, because it has them on an interface.
    pub(crate) left_to_host: BTreeMap<ServiceName, Vec<IpAddr>>,
    /// The parts of each Service that are not served.
    rejected: BTreeMap<ServiceName, Vec<Rejected>>,
    tables: TableState,
}

impl Layout {
    /// An empty layout, in which the allocated counters keep their owners.
    pub(crate) fn new(counters: CounterAllocator) -> Self {
        let mut layout = Self::default();
        layout.tables.counters = counters;
        layout
    }

    /// Replaces the addresses of the host's interfaces, for the next [`Layout::update`].
    pub(crate) fn set_host_addresses(&mut self, addresses: BTreeSet<IpAddr>) {
        let before = std::mem::replace(&mut self.host_addresses, addresses);
        let moved: BTreeSet<_> = before.symmetric_difference(&self.host_addresses).collect();
        let services = self.state.services.values().map(|it| &it.service);
        let affected = services.filter(|it| it.cluster_ips.iter().any(|ip| moved.contains(ip)));
        self.affected.extend(affected.map(|it| it.name.clone()));
    }

    /// Replaces the state and the node addresses. Returns how the tables change, and how many Services were added, changed or
    /// removed.
    pub(super) fn update(
        &mut self,
        state: &NodeState,
        node_addresses: &NodeAddresses,
    ) -> (MapUpdates, usize) {
        let before = std::mem::replace(&mut self.state, state.clone());
        let mut affected = std::mem::take(&mut self.affected);
        // Of those that are affected, nothing before counts.
        let (removed, mut changed): (Vec<_>, Vec<_>) = state
            .diff(&before)
            .map(|(name, before, now)| (name, before.filter(|_| !affected.remove(name)), now))
            .partition(|(.., now)| now.is_none());
        let affected = affected.iter().filter_map(|it| state.services.get(it));
        changed.extend(affected.map(|it| (&it.service.name, None, Some(it))));
        let new =
            changed.iter().filter(|(name, ..)| !self.services.contains_key(*name)).filter_map(|it| it.2);
        let tables = &mut self.tables;
        tables.counters.reserve(new.map(|it| it.endpoints.len() + it.service.ports.len()).sum());
        // The entry points that these Services had, and that they have. One that moves from a Service to another is both given up
        // and taken, in either order.
        let (mut given_up, mut taken) = (BTreeSet::new(), BTreeSet::new());
        let mut frontends = BTreeMap::new();
        // Of the Services of which only endpoints differ.
        let mut new_backends = HashMap::new();
        let names: BTreeSet<_> = removed.iter().chain(&changed).map(|it| it.0).collect();
        let services = names.len();
        // Removed Services come first, so that their ids can be reused.
        for (name, before, now) in removed.into_iter().chain(changed) {
            if let (Some(before), Some(now), Some(layout)) = (before, now, self.services.get_mut(name))
                && before.service == now.service
                && let Some(new) = tables.update_endpoints(layout, &now.endpoint_diff(before))
            {
                new_backends.insert(name, new);
                continue;
            }
            let mut image = now.map(|it| compile(it, &self.host_addresses)).unwrap_or_default();
            set_or_remove(&mut self.rejected, name, std::mem::take(&mut image.rejected));
            set_or_remove(&mut self.left_to_host, name, std::mem::take(&mut image.left_to_host));
            let old = self.services.remove(name).unwrap_or_default();
            // Acquired before the old ones are released, so that a port that stays keeps its counters.
            for it in &image.frontends {
                tables.counters.acquire_port(CounterOwner::port(it.port_id));
            }
            for it in &old.frontends {
                tables.counters.release(CounterOwner::port(it.port_id));
                frontends.insert(it.address, None);
            }
            given_up.extend(old.entry_points());
            let new = tables.update_service(old, image);
            taken.extend(new.entry_points());
            if now.is_some() {
                self.services.insert(name.clone(), new);
            }
        }
        let moved = self.entry_points.update(&given_up, &taken, &self.node_addresses, node_addresses);
        let others = (!moved.is_empty()).then(|| {
            self.services
                .iter()
                .filter(|(name, it)| !names.contains(name) && moved.concern(it, node_addresses))
        });
        let services_now = names.iter().filter_map(|it| self.services.get_key_value(*it));
        for (name, service) in services_now.chain(others.into_iter().flatten()) {
            let new_backends = new_backends.get(name).filter(|_| moved.is_empty());
            frontends.extend(service.frontends.iter().map(|it| {
                let health = policy(self.passive_health, it.health);
                let is_entry_point = |backend: SocketAddr| {
                    self.entry_points.contain(backend, it.address.protocol, node_addresses)
                };
                let was_left =
                    || self.frontends.get(&it.address).is_some_and(|it| it.options.is_to_packets());
                let is_translated_again = match new_backends {
                    Some(new) if !was_left() => {
                        new.get(it.set).into_iter().flatten().copied().any(is_entry_point)
                    }
                    _ => service.backends(it).any(is_entry_point),
                };
                (it.address, row(service, it, health, &tables.counters, is_translated_again))
            }));
        }
        for (address, row) in frontends {
            let old = match row {
                Some(row) => self.frontends.insert(address, row),
                None => self.frontends.remove(&address),
            };
            tables.update_frontend(address, old, row);
            let (was, is) = (old.is_some(), row.is_some());
            if frontend_table(address) == Table::NodePorts {
                count(&mut self.node_ports, address.address.port(), was, is);
            } else {
                let ip = address.address.ip();
                count(self.networks.of_mut(Family::of(ip)), network(ip), was, is);
            }
        }
        if *node_addresses != self.node_addresses {
            tables.update_node_addresses(&self.node_addresses, node_addresses);
            self.node_addresses.clone_from(node_addresses);
        }
        self.forwarding.update(&before, state, tables);
        for table in Table::FORWARDING {
            tables.rows[table.index()] = self.forwarding.entries(table);
        }
        (std::mem::take(&mut tables.updates), services)
    }

    pub(crate) fn full_table(&self, table: Table) -> MapUpdates {
        let mut updates = MapUpdates::default();
        match table {
            Table::NodeAddrs => {
                for (address, scope) in self.node_addresses.iter() {
                    set_node_address(&mut updates, *address, Some(scope));
                }
            }
            Table::Frontends4 | Table::Frontends6 | Table::NodePorts => {
                for (address, row) in &self.frontends {
                    if frontend_table(*address) == table {
                        set_frontend(&mut updates, *address, Some(row));
                    }
                }
            }
            Table::Backends4 | Table::Backends6 => {
                for set in self.sets().filter(|set| backend_table(set.family) == table) {
                    for (position, it) in (set.range.first..).zip(&set.slots) {
                        set_backend(&mut updates, set.family, position, Some((it.backend(), it.counter)));
                    }
                }
            }
            Table::Forwards | Table::ForwardRows | Table::ForwardNodes | Table::ForwardNumbers => {
                self.forwarding.full_table(table, &mut updates);
            }
            Table::Members4 | Table::Members6 => {
                for set in self.sets().filter(|set| set.has_members && member_table(set.family) == table) {
                    for it in &set.slots {
                        set_member(&mut updates, set.id, it.backend(), Some(it.counter));
                    }
                }
            }
        }
        updates
    }

    pub(crate) fn counters(&mut self) -> &mut CounterAllocator {
        &mut self.tables.counters
    }

    pub(crate) fn rows(&self, table: Table) -> u32 {
        self.tables.rows[table.index()]
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.tables.rows.iter().all(|it| *it == 0)
    }

    pub(crate) fn required_capacity(&self, table: Table) -> u32 {
        match table {
            Table::Backends4 => self.tables.ranges.of(Family::V4).end(),
            Table::Backends6 => self.tables.ranges.of(Family::V6).end(),
            Table::Forwards | Table::ForwardRows | Table::ForwardNodes | Table::ForwardNumbers => {
                self.forwarding.required_capacity(table)
            }
            _ => self.rows(table),
        }
    }

    pub(crate) fn prefilter(&self) -> Prefilter {
        let mut prefilter = Prefilter::EMPTY;
        if let (Some((&min, _)), Some((&max, _))) =
            (self.node_ports.first_key_value(), self.node_ports.last_key_value())
        {
            prefilter.node_ports = PortRange { min, max };
        }
        self.networks.of(Family::V4).keys().for_each(|it| prefilter.networks4.insert(*it));
        self.networks.of(Family::V6).keys().for_each(|it| prefilter.networks6.insert(*it));
        for ip in self.forwarding.frontends() {
            let networks = match Family::of(ip) {
                Family::V4 => &mut prefilter.networks4,
                Family::V6 => &mut prefilter.networks6,
            };
            networks.insert(network(ip));
        }
        prefilter
    }

    pub(crate) fn services(&self) -> usize {
        self.services.len()
    }

    pub(crate) fn rejected(&self) -> Vec<Rejected> {
        self.rejected.values().flatten().cloned().collect()
    }

    /// The endpoints whose connections are counted by these counters, each with who avoids it, sorted.
    pub(crate) fn ejected(&self, avoiders: &HashMap<CounterIndex, EjectingClients>) -> Vec<EjectedEndpoint> {
        let mut found = Vec::new();
        for (name, layout) in &self.services {
            for (index, set) in layout.sets.iter().enumerate() {
                for slot in &set.slots {
                    if let Some(&EjectingClients { clients, has_node }) = avoiders.get(&slot.counter)
                        && let Some(frontend) = layout.frontends.iter().find(|it| it.set == index)
                        && let Some(service) = self.state.services.get(name)
                        && let Some(port) = service.service.ports.get(frontend.port)
                    {
                        found.push(EjectedEndpoint {
                            service: name.clone(),
                            port: port.name.clone(),
                            endpoint: slot.backend(),
                            clients,
                            has_node,
                            max_ejected_percent: policy(self.passive_health, frontend.health).max_ejected,
                        });
                    }
                }
            }
        }
        // Sets of a service port may share an endpoint.
        found.sort_unstable();
        found.dedup();
        found
    }

    /// The endpoints whose connections are counted by these counters.
    pub(crate) fn endpoints_of(&self, counters: &HashSet<CounterIndex>) -> HashMap<CounterIndex, SocketAddr> {
        let slots = self.sets().flat_map(|it| &it.slots).filter(|it| counters.contains(&it.counter));
        slots.map(|it| (it.counter, it.backend())).collect()
    }

    fn sets(&self) -> impl Iterator<Item = &Set> {
        self.services.values().flat_map(|it| &it.sets)
    }
}

fn set_or_remove<T>(lists: &mut BTreeMap<ServiceName, Vec<T>>, name: &ServiceName, list: Vec<T>) {
    if list.is_empty() {
        lists.remove(name);
    } else {
        lists.insert(name.clone(), list);
    }
}

/// The row of a frontend of `owner`. If one of its backends is the address of a frontend, the frontend is left to packets: those
/// of a redirected socket would be translated once more.
fn row(
    owner: &ServiceLayout,
    frontend: &Frontend,
    health: HealthPolicy,
    counters: &CounterAllocator,
    is_translated_again: bool,
) -> Option<Row> {
    let set = owner.sets.get(frontend.set)?;
    let options = frontend.options;
    Some(Row {
        set: set.id,
        backend_count: count_of(&set.slots),
        options: if is_translated_again { options.to_packets() } else { options },
        health,
        affinity_timeout: frontend.affinity,
        service_port: frontend.port_id,
        counter: counters.counter_of(CounterOwner::port(frontend.port_id)),
        backend_offset: set.range.first,
        #[cfg(feature = "next-layout")]
        other_layout: u64::MAX,
    })
}

const _: () = assert!(PassiveHealth::MAX_FAILURES <= MAX_FAILURES);
const _: () = assert!(LoadBalancing::MAX_SLOW_START <= MAX_SLOW_START);

/// When the backends of a frontend are ejected: by what its Service says, item by item, else by the options of the node.
fn policy(options: Option<PassiveHealthOptions>, service: PassiveHealth) -> HealthPolicy {
    let Some(options) = options.filter(|it| service.enabled.unwrap_or(it.enabled)) else {
        return HealthPolicy::default();
    };
    HealthPolicy {
        failures: service.failures.unwrap_or(options.failures).get(),
        max_ejected: service.max_ejected_percent.unwrap_or(options.max_ejected_percent).get(),
    }
}

/// Updates a use count when one user appears or disappears.
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

#[cfg(test)]
mod tests;
