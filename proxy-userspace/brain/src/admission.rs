//! What of each Service is served: which fit into their namespaces, and which Service owns which frontend.
//!
//! A namespace may have a number of *entries*: the frontends of its Services, for each slice its endpoints times its different
//! target ports, and what the rows take of those that are forwarded. Of a namespace with more the older Services are served (then
//! the first by name), each if it fits beside those before it; one that fits only without its rows is translated. So nothing that one
//! tenant writes takes the place of another one's Services.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    mem,
    sync::Arc,
};

use model::{
    Effect, Family, Rejected, ServiceName, Timestamp,
    cluster::{ClusterState, EndpointSlice, Service},
    conflicts::{FrontendKey, FrontendOwners},
    state::forwarding_rows,
};

use crate::{Options, forwarding::is_forwarded, frontends::claim};

/// What of each Service is served; kept up to date as Services and slices change.
#[derive(Debug, Default)]
pub(crate) struct Admission {
    pub(crate) owners: FrontendOwners,
    namespaces: HashMap<Arc<str>, Namespace>,
    /// The namespaces by their entries, those that are refused included.
    pub(crate) sizes: BTreeSet<(u64, Arc<str>)>,
    /// The Services that were refused or admitted since they were taken.
    changed: BTreeSet<ServiceName>,
}

#[derive(Debug, Default)]
struct Namespace {
    entries: u64,
    services: BTreeMap<ServiceName, Entries>,
    without_room: BTreeMap<ServiceName, NoRoom>,
}

/// What becomes of a Service that does not fit into its namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NoRoom {
    Refused,
    /// It fits without its rows.
    Translated,
}

/// What of a Service is served.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Admitted<'a> {
    /// The frontends that another Service owns.
    pub(crate) conflicting: Option<&'a BTreeSet<FrontendKey>>,
    /// Whether it is translated, as there is no room for rows.
    pub(crate) is_translated: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Entries {
    created: Option<Timestamp>,
    frontends: u64,
    endpoints: u64,
    /// For the rows of packets that are forwarded.
    rows: u64,
}

/// How many rows take as much memory as an endpoint.
const ROWS_PER_ENTRY: u64 = 64;

impl Entries {
    fn all(&self) -> u64 {
        self.frontends + self.endpoints + self.rows
    }
}

impl Admission {
    pub(crate) fn of(cluster: &ClusterState, options: &Options) -> Self {
        let mut admission = Self::default();
        let services = cluster.services.keys().cloned().collect();
        admission.update(cluster, options, &services, &BTreeSet::new());
        admission
    }

    /// A Service, unless it does not fit into its namespace.
    pub(crate) fn service<'a>(
        &self,
        cluster: &'a ClusterState,
        name: &ServiceName,
    ) -> Option<&'a Arc<Service>> {
        cluster.services.get(name).filter(|_| !self.is_refused(name))
    }

    /// What of a Service that is served is not.
    pub(crate) fn admitted(&self, name: &ServiceName) -> Admitted<'_> {
        let is_translated = self.no_room(name) == Some(NoRoom::Translated);
        Admitted { conflicting: self.owners.conflicting(name), is_translated }
    }

    pub(crate) fn is_refused(&self, name: &ServiceName) -> bool {
        self.no_room(name) == Some(NoRoom::Refused)
    }

    fn no_room(&self, name: &ServiceName) -> Option<NoRoom> {
        self.namespaces.get(&name.namespace)?.without_room.get(name).copied()
    }

    /// Takes over changes of Services, and of slices of Services; returns the Services of which other parts are served than
    /// before.
    pub(crate) fn update(
        &mut self,
        cluster: &ClusterState,
        options: &Options,
        services: &BTreeSet<ServiceName>,
        with_slices: &BTreeSet<ServiceName>,
    ) -> BTreeSet<ServiceName> {
        let claim_of = |name: &_| {
            cluster.services.get(name).map(|it| claim(it, options)).filter(|it| !it.frontends.is_empty())
        };
        let mut claims: BTreeMap<_, _> = services.iter().map(|it| (it.clone(), claim_of(it))).collect();
        let mut touched = BTreeSet::new();
        for name in services.union(with_slices) {
            let namespace = self.namespaces.entry(Arc::clone(&name.namespace)).or_default();
            let before = namespace.services.get(name).copied();
            let own = match claims.get(name) {
                Some(claim) => claim.as_ref().map(|claim| Entries {
                    created: cluster.services.get(name).and_then(|it| it.created),
                    frontends: claim.frontends.len() as u64,
                    ..Entries::default()
                }),
                None => before,
            };
            let endpoints = || cluster.slices_of(name).map(|it| entries(it)).sum();
            let now =
                own.map(|it| Entries { endpoints: endpoints(), rows: rows(cluster, options, name), ..it });
            // A namespace without Services was added above, and is removed below unless it gets one.
            if now != before || namespace.services.is_empty() {
                touched.insert(Arc::clone(&name.namespace));
                self.sizes.remove(&(namespace.entries, Arc::clone(&name.namespace)));
                namespace.set(name, now);
                self.sizes.insert((namespace.entries, Arc::clone(&name.namespace)));
            }
        }
        for name in touched {
            let Some(namespace) = self.namespaces.get_mut(&name) else { continue };
            for it in namespace.refuse(options.max_namespace_entries) {
                claims.entry(it.clone()).or_insert_with(|| claim_of(&it));
                self.changed.insert(it);
            }
            if namespace.services.is_empty() {
                self.namespaces.remove(&name);
                self.sizes.remove(&(0, name));
            }
        }
        // Of those that stay refused the reason may differ.
        let has_no_room = |it: &&ServiceName| self.no_room(it).is_some();
        let without_room: Vec<_> = services.union(with_slices).filter(has_no_room).cloned().collect();
        self.changed.extend(without_room);
        let mut affected = BTreeSet::new();
        for (name, claim) in claims {
            let claim = claim.unwrap_or_default();
            let claim = if self.is_refused(&name) { claim.of_cluster_ips() } else { claim };
            affected.extend(self.owners.set(&name, claim));
            affected.insert(name);
        }
        affected
    }

    /// The Services for which [`rejected_of`](Self::rejected_of) may have changed since the last call.
    pub(crate) fn take_changed(&mut self) -> BTreeSet<ServiceName> {
        let mut changed = self.owners.take_changed();
        changed.append(&mut self.changed);
        changed
    }

    /// What of a Service is not served, and why.
    pub(crate) fn rejected_of(&self, cluster: &ClusterState, name: &ServiceName, max: u64) -> Vec<Rejected> {
        let without_room = self
            .namespaces
            .get(&name.namespace)
            .and_then(|namespace| Some((namespace.without_room.get(name)?, namespace.services.get(name)?)));
        let Some((no_room, entries)) = without_room else { return self.owners.rejected_of(name) };
        let fit = format!(
            "do not fit beside those of the older Services of namespace {}, which may have {max} (--max-namespace-entries)",
            name.namespace
        );
        let item = format!("Service {name}");
        match no_room {
            NoRoom::Translated => {
                let rows = entries.rows;
                let reason =
                    format!("the {rows} entries of its rows {fit}: it is not forwarded, but translated");
                let translated = Rejected::served(item, reason);
                self.owners.rejected_of(name).into_iter().chain([translated]).collect()
            }
            NoRoom::Refused => {
                let rows = if entries.rows > 0 { ", rows of forwarding" } else { "" };
                let all = entries.all();
                let reason = format!("its {all} entries (frontends, endpoints times ports{rows}) {fit}");
                let endpoints = cluster.slices_of(name).flat_map(|it| &it.endpoints);
                let node = endpoints.filter_map(|it| it.node.clone()).min();
                let effect = Effect::OverLimit { service: name.clone(), node };
                vec![Rejected { item, reason, effect }]
            }
        }
    }
}

impl Namespace {
    /// Sets the entries of a Service; none if it is not served.
    fn set(&mut self, name: &ServiceName, entries: Option<Entries>) {
        let before = match entries {
            Some(it) => self.services.insert(name.clone(), it),
            None => self.services.remove(name),
        };
        self.entries += entries.unwrap_or_default().all();
        self.entries -= before.unwrap_or_default().all();
    }

    /// Refuses the Services that do not fit, or their rows; returns those of which other parts are served now.
    fn refuse(&mut self, max: u64) -> BTreeSet<ServiceName> {
        let now = if self.entries > max { self.find_without_room(max) } else { BTreeMap::new() };
        let before = mem::replace(&mut self.without_room, now);
        let now = &self.without_room;
        let all = before.keys().chain(now.keys());
        all.filter(|it| before.get(*it) != now.get(*it)).cloned().collect()
    }

    fn find_without_room(&self, max: u64) -> BTreeMap<ServiceName, NoRoom> {
        let mut services: Vec<_> = self.services.iter().collect();
        services.sort_by_key(|(_, it)| (it.created.is_none(), it.created));
        let (mut room, mut without_room) = (max, BTreeMap::new());
        for (name, it) in services {
            if let Some(left) = room.checked_sub(it.all()) {
                room = left;
            } else if let Some(left) = room.checked_sub(it.all() - it.rows).filter(|_| it.rows > 0) {
                room = left;
                without_room.insert(name.clone(), NoRoom::Translated);
            } else {
                without_room.insert(name.clone(), NoRoom::Refused);
            }
        }
        without_room
    }
}

/// What the rows of a Service take, if it is forwarded: each port in each family of its addresses may have rows of its own.
fn rows(cluster: &ClusterState, options: &Options, name: &ServiceName) -> u64 {
    let Some(service) = cluster.services.get(name).filter(|it| is_forwarded(it, options)) else { return 0 };
    let endpoints = cluster.slices_of(name).flat_map(|it| &it.endpoints);
    let nodes: BTreeSet<_> = endpoints.filter_map(|it| it.node.as_deref()).collect();
    let ips = service.load_balancer_ips.iter().chain(&service.external_ips);
    let families: BTreeSet<_> = ips.map(|it| Family::of(*it)).collect();
    let ports = (service.ports.len() * families.len()) as u64;
    ports * u64::from(forwarding_rows(nodes.len())) / ROWS_PER_ENTRY
}

fn entries(slice: &EndpointSlice) -> u64 {
    if slice.headless {
        return 0;
    }
    let mut targets: Vec<_> = slice.ports.iter().map(|it| it.port).collect();
    targets.sort_unstable();
    targets.dedup();
    (targets.len() * slice.endpoints.len()) as u64
}
