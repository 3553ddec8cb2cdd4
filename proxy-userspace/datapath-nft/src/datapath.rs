//! The packet path of this node: applies a state to nftables.
//!
//! Invariant: what was written is remembered, and listed again only when others have changed it.

mod flows;
mod forwarding;
mod notices;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, mem,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use datapath::{ApplyReport, AvoidedEndpoints, PacketAffinity};
use model::{Family, Rejected, error_chain, state::NodeState};
use netlink::{Batch, Netfilter, flow_cleanup::FlowRules};

use self::notices::Notices;
use crate::{
    apply::{
        affinity_usage::count_clients,
        conntrack_settings::ConntrackSettings,
        snapshot::Snapshot,
        transaction::{
            DesiredTable, Difference, base_chains, can_count, can_own_tables, commit, commit_batch,
        },
    },
    encode::{
        elements::{Changes, Element, Elements, Value},
        schema::{Bytes, Map},
        tables::{TABLE, delete_table},
    },
    error::Error,
    observe::{kube_proxy, trace},
    plan::{
        config::{Config, Host},
        layout::{Layout, PreviousSlots, Update},
        removed_udp::RemovedUdp,
        rules::TableConfig,
        watch::Watch,
    },
};

/// The most bytes of a transaction of those that fill a new table. A single one would take all of them twice, in this process and in
/// the kernel: more than 100 MB for a million endpoints.
const FILLING: usize = if cfg!(test) { 64 << 10 } else { 8 << 20 };

#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The name of this node's Node object.
    pub node_name: String,
    pub config: Config,
    /// The settings of connection tracking; [`ConntrackSettings::apply`] applies them.
    pub conntrack: ConntrackSettings,
    /// Whether the socket path serves, too: then sockets of pods are connected to endpoints.
    pub is_beside_sockets: bool,
    /// The families in which an earlier process has forwarded packets from outside.
    pub forwarded_families: Vec<Family>,
    /// Is called for each pass over the conntrack entries of a family.
    pub on_flow_pass: FlowPassObserver,
}

/// Receives the passes over conntrack: the family, how long it took, how many entries were deleted.
#[derive(Clone)]
pub struct FlowPassObserver(pub Arc<dyn Fn(Family, Duration, usize) + Send + Sync>);

impl Default for FlowPassObserver {
    fn default() -> Self {
        Self(Arc::new(|_, _, _| {}))
    }
}

impl fmt::Debug for FlowPassObserver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FlowPassObserver")
    }
}

/// The packet path of this node. It continues to serve when this value is dropped.
#[derive(Debug)]
pub struct Datapath {
    options: Options,
    netfilter: Netfilter,
    layout: Layout,
    host: Host,
    removed_udp: RemovedUdp,
    /// The families in which packets can be given to a second node; `None` before that is asked for.
    second_chance: Option<Vec<Family>>,
    /// Those in which a Service is, or was, forwarded.
    forwarded_families: BTreeSet<Family>,
    /// What was applied last; `None` if the contents of the tables are not known.
    applied: Option<AppliedConfig>,
    /// Whether the newest state is not applied yet.
    is_pending: bool,
    /// Whether a state was active before.
    was_active: bool,
    /// Whether the tables are owned, so that no other process can change them while this process lives.
    is_owner: bool,
    /// Whether the tables must be replaced, because they could not be repaired.
    must_replace: bool,
    /// The families that the kernel does not support, and why.
    unsupported: BTreeMap<Family, String>,
    /// Where flows may lead, for what has changed since the last second pass over conntrack.
    flow_rules: FlowRules,
    /// Whether some of these rules are new since the last pass.
    has_new_flow_rules: bool,
    notices: Notices,
}

/// What was applied, apart from the layout.
#[derive(Clone, Debug, PartialEq, Eq)]
struct AppliedConfig {
    configs: Vec<TableConfig>,
    /// The elements that belong to no Service.
    elements: Elements,
}

impl Datapath {
    /// Opens nftables. Nothing changes before the first state is applied, and what an earlier instance left serves its last
    /// state until then.
    ///
    /// # Errors
    ///
    /// If the kernel has no nftables, or denies access.
    pub fn start(options: &Options) -> Result<Self, Error> {
        let mut netfilter = Netfilter::open().map_err(Error::Open)?;
        // A process that may not list tables may not write them.
        Snapshot::find(&mut netfilter, Family::V4)?;
        trace::remove(&mut netfilter);
        let is_owner = can_own_tables(&mut netfilter);
        let cannot_count = !can_count(&mut netfilter);
        if cannot_count {
            tracing::info!("connections from outside are not counted: nftables lacks nft_objref");
        }
        let notices = Notices::start(&netfilter).map_err(Error::Open)?;
        Ok(Self {
            options: options.clone(),
            netfilter,
            layout: Layout::default(),
            host: Host { cannot_count, ..Host::default() },
            removed_udp: RemovedUdp::default(),
            second_chance: None,
            forwarded_families: options.forwarded_families.iter().copied().collect(),
            applied: None,
            is_pending: true,
            was_active: false,
            is_owner,
            must_replace: false,
            unsupported: BTreeMap::new(),
            flow_rules: FlowRules::default(),
            has_new_flow_rules: false,
            notices,
        })
    }

    /// Sets the addresses of the host's interfaces, for the next [`Datapath::apply`].
    pub fn set_interfaces(&mut self, addresses: BTreeSet<IpAddr>) {
        self.host.interfaces = addresses;
    }

    /// Sets the endpoints that packets avoid, for the next [`Datapath::apply`]. Their flows continue.
    pub fn set_avoided(&mut self, avoided: &AvoidedEndpoints) {
        self.layout.set_avoided(avoided);
    }

    /// Makes a state active, at one moment for all packets.
    ///
    /// # Errors
    ///
    /// The previous state stays active; the next call retries.
    pub fn apply(&mut self, state: &NodeState) -> Result<ApplyReport, Error> {
        self.is_pending = true;
        self.host.node = state.nodes.get(self.options.node_name.as_str()).cloned().unwrap_or_default();
        let cidrs = state.service_cidrs.values();
        self.host.service_cidrs = cidrs.flat_map(|it| it.cidrs.iter().copied()).collect();
        // Endpoints keep their existing slots.
        let snapshots = if self.applied.is_none() { Some(self.read()?) } else { None };
        let previous = snapshots.as_ref().map(|it| {
            let mut previous = PreviousSlots::default();
            it.values().for_each(|it| it.previous(&mut previous));
            previous
        });
        let update = self.layout.update(state, &self.host.node.addresses, previous);
        self.record_flow_rules(&update);
        if self.options.is_beside_sockets {
            let known =
                snapshots.iter().flat_map(BTreeMap::values).flat_map(|it| it.removed_udp.iter().copied());
            let before = snapshots.iter().flat_map(BTreeMap::values).flat_map(Snapshot::udp_endpoints);
            let changes: Vec<_> = update.services.iter().map(|it| (&*it.before, &*it.after)).collect();
            self.removed_udp.update(&changes, before, known.collect(), self.layout.ports());
            // Where nothing serves, the host itself answers.
            let host = &self.host;
            self.removed_udp.except(|it| host.interfaces.contains(&it) || host.node.addresses.contains(&it));
        }
        let changed_services = update.services.len();
        let desired = self.desired();
        // After the first time, this means that the addresses of pods or the ServiceCIDRs have changed.
        let is_full = self.applied.as_ref().is_none_or(|it| it.configs != desired.configs);
        let entries = if is_full {
            // Everything is compared.
            drop(update);
            self.applied = None;
            let snapshots = snapshots.map_or_else(|| self.read(), Ok)?;
            self.repair_tables(snapshots, desired)?
        } else {
            self.change(update, desired)?
        };
        self.is_pending = false;
        self.was_active = true;
        Ok(ApplyReport {
            changed_services,
            services: self.layout.services(),
            entries,
            flipped: entries > 0,
            is_full,
            tables: Vec::new(),
            rejected: self.rejected(),
        })
    }

    /// Restores the base chains of tables that others have deleted: without them, the kernel translates no packet of existing
    /// connections either. To be called at once; [`Datapath::repair`] restores everything else, which takes longer.
    ///
    /// # Errors
    ///
    /// [`Datapath::repair`] tries again.
    pub fn restore_base_chains(&mut self) -> Result<(), Error> {
        let Some(applied) = &self.applied else { return Ok(()) };
        let mut messages = Vec::new();
        for config_ in applied.configs.iter().filter(|it| !self.unsupported.contains_key(&it.family)) {
            if Snapshot::find(&mut self.netfilter, config_.family)?.is_none() {
                messages.extend(base_chains(config_));
            }
        }
        commit(&mut self.netfilter, messages)
    }

    /// Restores what others have changed. Does nothing before the first state.
    ///
    /// # Errors
    ///
    /// The tables stay as they are; the next call retries.
    pub fn repair(&mut self) -> Result<(), Error> {
        let changed = self.notices.changed.take();
        // A pending state is written by `apply`.
        if self.is_pending || (!changed && self.applied.is_some()) {
            return Ok(());
        }
        self.applied = None;
        let desired = self.desired();
        let snapshots = self.read()?;
        let corrected = self.repair_tables(snapshots, desired)?;
        if corrected > 0 {
            tracing::error!(
                table = TABLE,
                entries = corrected,
                "the tables were changed externally; restored"
            );
        }
        Ok(())
    }

    /// Counts the clients with session affinity, and lets service ports with too many get no more for a while; `None` if no
    /// Service has session affinity. To be called from time to time.
    ///
    /// # Errors
    ///
    /// The next call tries again.
    pub fn count_affinity(&mut self) -> Result<Option<PacketAffinity>, Error> {
        if self.applied.is_none() || !self.layout.has_affinity() {
            return Ok(None);
        }
        let families = Family::ALL.into_iter().filter(|it| !self.unsupported.contains_key(it));
        count_clients(&mut self.netfilter, families).map(Some)
    }

    /// Whether kube-proxy has rules beside ours, which come first. Legacy iptables is not looked at.
    pub fn has_kube_proxy_rules(&mut self) -> Result<bool, Error> {
        kube_proxy::has_rules(&mut self.netfilter)
    }

    /// The UDP endpoints that were removed in the last moments.
    pub fn removed_udp(&self) -> BTreeSet<SocketAddr> {
        self.removed_udp.removed()
    }

    /// Refuses flows from pods to those of them to which sockets are still connected, `in_use`, and to no others. To be called
    /// after a change, and from time to time.
    ///
    /// # Errors
    ///
    /// [`Datapath::repair`] tries again.
    pub fn refuse_removed_udp(&mut self, in_use: &BTreeSet<SocketAddr>) -> Result<(), Error> {
        if self.is_pending || self.applied.is_none() || !self.removed_udp.select(in_use) {
            return Ok(());
        }
        let desired = self.desired();
        self.change(Update::default(), desired).map(|_| ())
    }

    /// Waits until [`Datapath::repair`] may have something to do.
    pub async fn changed_externally(&self) {
        self.notices.changed.wait().await;
    }

    /// Which of our tables are as they were written, as far as the kernel has notified; empty before the first state is active.
    pub fn tables(&self) -> Vec<(&'static str, bool)> {
        // A failed transaction leaves them as they were.
        let is_in_effect = self.is_pending || self.applied.is_some();
        Family::ALL
            .into_iter()
            .filter(|it| self.was_active && !self.unsupported.contains_key(it))
            .map(|it| (if it == Family::V4 { "nftables-ip" } else { "nftables-ip6" }, is_in_effect))
            .collect()
    }

    fn rejected(&self) -> Vec<Rejected> {
        let unsupported = self
            .unsupported
            .iter()
            .map(|(family, reason)| Rejected::not_served(format!("all {family} packets"), reason.clone()));
        unsupported.chain(self.layout.rejected()).collect()
    }

    fn read(&mut self) -> Result<BTreeMap<Family, Snapshot>, Error> {
        Snapshot::read(&mut self.netfilter, |_| true)
    }

    fn desired(&mut self) -> AppliedConfig {
        let element = |family, map, key| (Element::new(family, map, key), Value::None);
        let mut elements = self.forwarding_elements();
        for it in self.host.node_port_addresses(&self.options.config.node_port_addresses) {
            elements.extend([element(Family::of(it), Map::NodeAddresses, Bytes::new().address(it))]);
        }
        if self.removed_udp.is_refusing() {
            let uplinks = self.uplinks();
            for family in Family::ALL {
                let keys = uplinks.iter().map(|it| Bytes::new().number(*it));
                elements.extend(keys.map(|it| element(family, Map::Uplinks, it)));
                elements.extend([Watch::RemovedUdp.element(family)]);
            }
        }
        let configs = Family::ALL.map(|it| TableConfig::new(it, &self.options.config, &self.host)).to_vec();
        AppliedConfig { configs, elements }
    }

    /// The interfaces with an address of the node: packets that arrive there come from other hosts.
    fn uplinks(&self) -> BTreeSet<u32> {
        let addresses = &self.host.node.addresses;
        netlink::host_addresses::interfaces_with(|it| addresses.contains(&it)).unwrap_or_else(|error| {
            tracing::warn!(%error, "interfaces cannot be listed; flows from outside may be refused briefly");
            BTreeSet::new()
        })
    }

    fn change(&mut self, update: Update, desired: AppliedConfig) -> Result<usize, Error> {
        let mut changes = update.changes;
        if let Some(applied) = self.applied.take() {
            let own = Changes::between(&applied.elements, &desired.elements);
            if own.delete.keys().chain(own.add.keys()).any(|it| it.map == Map::NodeAddresses) {
                // Flows to an address that came before its node ports were served there.
                self.record_all_flow_rules(|it| it.address.ip().is_unspecified());
            }
            changes.delete.extend(own.delete);
            changes.add.extend(own.add);
        }
        let entries = changes.len();
        let mut messages = Batch::transaction();
        for family in Family::ALL {
            let own = changes.take(family);
            if !self.unsupported.contains_key(&family) {
                messages.extend(Difference::new(own).messages(family));
                messages.extend(self.removed_udp.messages(family, false));
            }
        }
        // Until the commit succeeds, the contents are unknown.
        self.notices.commit(&mut self.netfilter, messages, entries)?;
        self.removed_udp.on_committed();
        self.applied = Some(desired);
        Ok(entries)
    }

    /// Brings the tables into the desired state, and touches nothing that is up to date.
    fn repair_tables(
        &mut self,
        mut existing: BTreeMap<Family, Snapshot>,
        desired: AppliedConfig,
    ) -> Result<usize, Error> {
        // The kernel refuses to add a hook in the transaction that adopts a table.
        let mut adoptions = Vec::new();
        let mut messages = Batch::transaction();
        let mut entries = 0;
        let mut hooks = Vec::new();
        let mut all_replaced = true;
        // What no packet meets need not change at one moment.
        let is_unused = existing.values().all(|it| it.policies.is_empty());
        let tables = self.desired_tables(&desired);
        let must_replace = mem::replace(&mut self.must_replace, true);
        let mut filled = Ok(());
        'tables: for table in tables {
            let family = table.config_.family;
            let existing = existing.remove(&family).filter(|_| !must_replace);
            let endpoints = self.layout.endpoint_elements(family);
            match existing.filter(|it| table.has_same_structure(it)) {
                None => {
                    entries += table.elements.len();
                    for it in table.fill(endpoints.inspect(|_| entries += 1)) {
                        messages.push(&it);
                        if is_unused && messages.size() > FILLING {
                            let full = mem::replace(&mut messages, Batch::transaction());
                            filled = self.notices.commit_many(&mut self.netfilter, full);
                            if filled.is_err() {
                                break 'tables;
                            }
                        }
                    }
                    hooks.extend(table.hooks());
                }
                Some(it) => {
                    let it = table.difference(it, endpoints);
                    all_replaced = false;
                    entries += it.changes.len() + it.old_chains.len() + it.new_chains.len();
                    messages.extend(it.messages(family));
                    adoptions.extend(it.adopt);
                }
            }
            messages.extend(self.removed_udp.messages(family, true));
        }
        messages.extend(hooks);
        self.unsupported.clear();
        let adopted = filled.and_then(|()| commit(&mut self.netfilter, adoptions));
        match adopted.and_then(|()| self.notices.commit(&mut self.netfilter, messages, entries)) {
            Ok(()) => self.removed_udp.on_committed(),
            Err(error) if all_replaced && error.is_feature_missing() => {
                if is_unused {
                    // What was filled serves nobody; there may be nothing.
                    for family in Family::ALL {
                        let _ = commit(&mut self.netfilter, [delete_table(family)]);
                    }
                }
                entries = self.write_one_by_one(&desired, error)?;
            }
            Err(error) => {
                // A table that another process owns may well be as it should be.
                self.must_replace = !error.is_denied();
                return Err(error);
            }
        }
        self.must_replace = false;
        if entries > 0 {
            // Flows that began while something was missing are not translated.
            self.record_all_flow_rules(|_| true);
        }
        self.applied = Some(desired);
        Ok(entries)
    }

    /// The tables as they should be, without the elements that lead to endpoints.
    fn desired_tables(&self, desired: &AppliedConfig) -> Vec<DesiredTable> {
        let mut rest = self.layout.other_elements();
        rest.extend(desired.elements.clone());
        let table = |config_: &TableConfig| {
            let mut elements: Elements = rest.extract_if(.., |it, _| it.family == config_.family).collect();
            elements.extend(config_.elements());
            DesiredTable { config_: config_.clone(), is_owned: self.is_owner, elements }
        };
        desired.configs.iter().map(table).collect()
    }

    /// Writes the families one by one, for a kernel that supports only one.
    fn write_one_by_one(&mut self, desired: &AppliedConfig, both: Error) -> Result<usize, Error> {
        let mut applied = 0;
        for table in self.desired_tables(desired) {
            let family = table.config_.family;
            let endpoints = self.layout.endpoint_elements(family);
            let mut entries = table.elements.len();
            let mut batch = Batch::transaction();
            batch.extend(table.replace(endpoints.inspect(|_| entries += 1)));
            match commit_batch(&mut self.netfilter, batch) {
                Ok(()) => applied += entries,
                Err(error) if error.is_feature_missing() => {
                    self.unsupported.insert(family, error_chain(&error));
                }
                Err(error) => return Err(error),
            }
        }
        if self.unsupported.len() == Family::ALL.len() {
            Err(Error::Incapable(Box::new(both)))
        } else {
            Ok(applied)
        }
    }
}

/// Deletes our tables; returns whether there were any. Translated connections stay translated.
///
/// # Errors
///
/// If they cannot be deleted. Nothing else is ever touched.
pub fn cleanup() -> Result<bool, Error> {
    let mut netfilter = Netfilter::open().map_err(Error::Open)?;
    let mut messages = Vec::new();
    for family in Family::ALL {
        if Snapshot::find(&mut netfilter, family)?.is_some() {
            messages.push(delete_table(family));
        }
    }
    let were_there = !messages.is_empty();
    trace::remove(&mut netfilter);
    commit(&mut netfilter, messages)?;
    Ok(were_there)
}

#[cfg(test)]
mod tests;
