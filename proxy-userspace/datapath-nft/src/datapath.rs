//! The packet path of this node: everything between a state in hand and packets that obey it.
//!
//! The one rule: what was written is remembered, and read again only when somebody else has changed it.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use datapath::{ApplyReport, error_chain};
use model::{Family, Protocol, Rejected, state::NodeState};
use netlink::{
    ChangeFlag, Message, MulticastListener, NFGENMSG, Netfilter,
    flow_cleanup::{FlowRules, delete_stale_flows},
};
use nix::sys::socket::SockProtocol;

use crate::{
    TABLE,
    compile::{PortImage, ServiceImage},
    config::{Config, Host},
    elements::{Changes, Element, Elements, Value},
    endpoint_selector::Pick,
    error::Error,
    layout::{Changed, Hints, Layout, Update},
    rules::Setting,
    schema::{Bytes, Map, number},
    snapshot::Snapshot,
    tables::{SUBSYSTEM, TABLE_NAME, delete_table},
    transaction::{Difference, Plan, Wanted, commit},
};

/// Both families, in the order in which they are written.
pub(super) const FAMILIES: [Family; 2] = [Family::V4, Family::V6];
/// `NFNLGRP_NFTABLES`, as a mask.
const NFTABLES_NEWS: u32 = 1 << (7 - 1);

/// How packets are to be treated.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The name of this node's Node object.
    pub node_name: String,
    /// What a user can choose.
    pub config: Config,
}

/// The packet path of this node. It goes on serving when this value is dropped.
#[derive(Debug)]
pub struct Datapath {
    node_name: String,
    config: Config,
    netfilter: Netfilter,
    layout: Layout,
    host: Host,
    /// What was written last; none if what is there is not known.
    written: Option<Written>,
    /// Whether the state could not be brought into force yet.
    behind: bool,
    /// Whether some state was in force before.
    was_in_force: bool,
    /// Whether a table that cannot be corrected is to be written anew.
    anew: bool,
    /// The families that the kernel does not translate, and why.
    without: BTreeMap<Family, String>,
    /// Where flows may go, of what has changed since they were looked at.
    destinations: FlowRules,
    heard: Arc<ChangeFlag>,
    _news: MulticastListener,
}

/// What was written, apart from what the layout says.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Written {
    settings: Vec<Setting>,
    node_port_addresses: BTreeSet<IpAddr>,
}

impl Datapath {
    /// Opens the way to nftables. Nothing is changed before the first state is applied, and what an earlier instance left
    /// goes on serving its last state.
    ///
    /// # Errors
    ///
    /// If the kernel has no nftables, or does not let us.
    pub fn start(options: &Options) -> Result<Self, Error> {
        let mut netfilter = Netfilter::open().map_err(Error::Open)?;
        // Whoever may not read them may not write them.
        Snapshot::find(&mut netfilter, Family::V4)?;
        let heard = Arc::new(ChangeFlag::default());
        let port = netfilter.port();
        let news = MulticastListener::start(
            SockProtocol::NetlinkNetFilter,
            NFTABLES_NEWS,
            Arc::clone(&heard),
            move |header, payload| {
                let name = payload.get(NFGENMSG..).and_then(|it| netlink::find(it, TABLE_NAME));
                header.message_type >> 8 == SUBSYSTEM
                    && header.port_number != port
                    && name.is_some_and(|it| netlink::text(it) == TABLE)
            },
        );
        let news = news.map_err(Error::Open)?;
        Ok(Self {
            node_name: options.node_name.clone(),
            config: options.config.clone(),
            netfilter,
            layout: Layout::default(),
            host: Host::default(),
            written: None,
            behind: true,
            was_in_force: false,
            anew: false,
            without: BTreeMap::new(),
            destinations: FlowRules::default(),
            heard,
            _news: news,
        })
    }

    /// Tells which addresses the host's interfaces have; counts from the next [`Datapath::apply`] on.
    pub fn set_interfaces(&mut self, addresses: BTreeSet<IpAddr>) {
        self.host.interfaces = addresses;
    }

    /// Brings a state into force, at one moment for all packets.
    ///
    /// # Errors
    ///
    /// What was in force stays in force; the next call tries everything again.
    pub fn apply(&mut self, state: &NodeState) -> Result<ApplyReport, Error> {
        self.behind = true;
        self.host.node = state.nodes.get(self.node_name.as_str()).cloned().unwrap_or_default();
        // Where endpoints are now, they should stay.
        let snapshots = if self.written.is_none() { Some(self.read()?) } else { None };
        let mut hints: Hints =
            snapshots.iter().flat_map(BTreeMap::values).flat_map(Snapshot::slots).collect();
        let update = self.layout.update(state, &self.host.node.addresses, &mut hints);
        self.note(&update);
        let changed_services = update.services.len();
        let wanted = self.wanted();
        let mut whole = true;
        let entries = match (&self.written, snapshots) {
            (Some(written), _) if written.settings == wanted.settings => {
                whole = false;
                self.change(update, wanted)?
            }
            (_, snapshots) => {
                // It is as large as the state, and everything is looked at anyway.
                drop(update);
                // If it is not the first time: the addresses of pods are others.
                self.written = None;
                let snapshots = snapshots.map_or_else(|| self.read(), Ok)?;
                self.correct(&snapshots, wanted)?
            }
        };
        self.behind = false;
        self.was_in_force = true;
        Ok(ApplyReport {
            changed_services,
            services: self.layout.services(),
            entries,
            flipped: entries > 0,
            is_full: whole,
            tables: Vec::new(),
            rejected: self.rejected(),
        })
    }

    /// Sees to it that what was written is there: puts back what somebody else has changed. Does nothing before the first
    /// state.
    ///
    /// # Errors
    ///
    /// What is there stays; the next call tries again.
    pub fn repair(&mut self) -> Result<(), Error> {
        let heard = self.heard.take();
        // What is not laid out yet is brought into force by `apply`.
        if self.behind || (!heard && self.written.is_some()) {
            return Ok(());
        }
        self.written = None;
        let wanted = self.wanted();
        let snapshots = self.read()?;
        let corrected = self.correct(&snapshots, wanted)?;
        if corrected > 0 {
            tracing::error!(
                "somebody has changed the nftables tables {TABLE}, which are ours: put back {corrected} entries"
            );
        }
        Ok(())
    }

    /// Ends the flows that no longer go where they should; of what has changed since the last call.
    ///
    /// # Errors
    ///
    /// The flows that are left end by themselves, or with the next call.
    pub fn finish_generation(&mut self) -> Result<(), Error> {
        if self.destinations.is_empty() {
            return Ok(());
        }
        let own = self.host.node_port_addresses(&self.config.node_port_addresses);
        let deleted = delete_stale_flows(&self.destinations, &own).map_err(Error::Flows)?;
        self.destinations = FlowRules::default();
        if deleted > 0 {
            tracing::info!("deleted {deleted} conntrack entries to removed endpoints");
        }
        Ok(())
    }

    /// Waits until there is something for [`Datapath::uphold`] to do.
    pub async fn changed_externally(&self) {
        self.heard.wait().await;
    }

    /// Which of our tables are as they were written, as far as the kernel has told; nothing before the first state is in
    /// force.
    pub fn tables(&self) -> Vec<(&'static str, bool)> {
        // A change that fails leaves them as they were.
        let is_in_effect = self.behind || self.written.is_some();
        FAMILIES
            .into_iter()
            .filter(|it| self.was_in_force && !self.without.contains_key(it))
            .map(|it| (if it == Family::V4 { "nftables-ip" } else { "nftables-ip6" }, is_in_effect))
            .collect()
    }

    fn rejected(&self) -> Vec<Rejected> {
        let without = self.without.iter().map(|(family, reason)| Rejected {
            item: format!("all packets of {}", named(*family)),
            reason: reason.clone(),
        });
        without.chain(self.layout.rejected()).collect()
    }

    fn read(&mut self) -> Result<BTreeMap<Family, Snapshot>, Error> {
        let mut snapshots = BTreeMap::new();
        for family in FAMILIES {
            if let Some(snapshot) = Snapshot::read(&mut self.netfilter, family)? {
                snapshots.insert(family, snapshot);
            }
        }
        Ok(snapshots)
    }

    fn wanted(&self) -> Written {
        let Config { node_port_addresses, detect_local, masquerade_all, .. } = &self.config;
        let setting = |family| Setting {
            family,
            mark: self.config.mark(),
            masquerade_all: *masquerade_all,
            pods: self.host.pods(detect_local, family),
            inside: self.host.inside(detect_local, family),
        };
        Written {
            settings: FAMILIES.map(setting).to_vec(),
            node_port_addresses: self.host.node_port_addresses(node_port_addresses),
        }
    }

    /// Writes a difference to what was written last.
    fn change(&mut self, update: Update, wanted: Written) -> Result<usize, Error> {
        let mut changes = update.changes;
        if let Some(written) = self.written.take() {
            let before = addresses(&written.node_port_addresses);
            let addresses = Changes::between(&before, &addresses(&wanted.node_port_addresses));
            changes.delete.extend(addresses.delete);
            changes.add.extend(addresses.add);
        }
        let mut messages: Vec<Message> = Vec::new();
        for family in FAMILIES.into_iter().filter(|it| !self.without.contains_key(it)) {
            let of = |picks: &BTreeSet<(Family, Pick)>| -> Vec<Pick> {
                picks.iter().filter(|(it, _)| *it == family).map(|(_, pick)| *pick).collect()
            };
            let (new_picks, old_picks) = (of(&update.new_picks), of(&update.old_picks));
            let mut own = Changes::default();
            own.add.extend(new_picks.iter().map(|it| it.element(family)));
            own.delete.extend(old_picks.iter().map(|it| it.element(family)));
            let is_own = |(it, _): &(&Element, &Value)| it.family == family;
            let copy = |(element, value): (&Element, &Value)| (element.clone(), value.clone());
            own.add.extend(changes.add.iter().filter(is_own).map(copy));
            own.delete.extend(changes.delete.iter().filter(is_own).map(copy));
            let new_chains = new_picks.iter().map(|it| it.chain(family)).collect();
            let old_chains = old_picks.iter().map(|it| it.chain_name()).collect();
            messages.extend(Difference { new_chains, old_chains, changes: own }.messages(family));
        }
        // Until it is known to be written, nothing is known.
        commit(&mut self.netfilter, messages)?;
        self.written = Some(wanted);
        Ok(changes.len())
    }

    /// Makes what is there what it should be, and touches nothing that is so already.
    fn correct(&mut self, there: &BTreeMap<Family, Snapshot>, wanted: Written) -> Result<usize, Error> {
        let mut tables = Vec::new();
        let mut messages = Vec::new();
        let mut entries = 0;
        let mut all_anew = true;
        let mut rest = self.layout.elements();
        let picks = self.layout.picks();
        for setting in &wanted.settings {
            let family = setting.family;
            let mut elements: Elements = rest.extract_if(.., |it, _| it.family == family).collect();
            elements.extend(setting.elements());
            elements.extend(
                addresses(&wanted.node_port_addresses).into_iter().filter(|(it, _)| it.family == family),
            );
            let picks: BTreeSet<_> =
                picks.iter().filter(|(it, _)| *it == family).map(|(_, pick)| *pick).collect();
            elements.extend(picks.iter().map(|it| it.element(family)));
            let table = Wanted { setting: setting.clone(), picks, elements };
            match if self.anew { Plan::Replace } else { table.plan(there.get(&family)) } {
                Plan::Replace => {
                    entries += table.elements.len();
                    messages.extend(table.replace());
                }
                Plan::Change(it) => {
                    all_anew = false;
                    entries += it.changes.len() + it.old_chains.len() + it.new_chains.len();
                    if !it.is_empty() {
                        messages.extend(it.messages(family));
                    }
                }
            }
            tables.push(table);
        }
        self.anew = true;
        self.without.clear();
        match commit(&mut self.netfilter, messages) {
            Ok(()) => {}
            Err(error) if all_anew && error.is_for_want_of_something() => {
                entries = self.one_by_one(&tables, error)?;
            }
            Err(error) => return Err(error),
        }
        self.anew = false;
        self.written = Some(wanted);
        Ok(entries)
    }

    /// Serves one family where the kernel does not have the other.
    fn one_by_one(&mut self, tables: &[Wanted], both: Error) -> Result<usize, Error> {
        let mut written = 0;
        for table in tables {
            match commit(&mut self.netfilter, table.replace()) {
                Ok(()) => written += table.elements.len(),
                Err(error) if error.is_for_want_of_something() => {
                    self.without.insert(table.setting.family, error_chain(&error));
                }
                Err(error) => return Err(error),
            }
        }
        if self.without.len() == FAMILIES.len() { Err(Error::Incapable(Box::new(both))) } else { Ok(written) }
    }

    /// Notes where the flows to what has changed may go from now on.
    fn note(&mut self, update: &Update) {
        // To look at flows is to look at all that the host has. What is noted already has to be brought up to date.
        let is_fresh = self.destinations.is_empty();
        let kept = |one: &PortImage, others: &ServiceImage, is_before: bool| {
            let other = others.ports.iter().find(|it| it.identity == one.identity);
            let (before, after) = if is_before { (Some(one), other) } else { (other, Some(one)) };
            is_fresh && before.zip(after).is_some_and(|(before, after)| after.keeps_flows_of(before))
        };
        let ports = update.services.iter().flat_map(|Changed { before, after }| {
            let old = before.ports.iter().filter(|it| !kept(it, after, true));
            old.chain(after.ports.iter().filter(|it| !kept(it, before, false)))
        });
        // Whoever has an address now need not be who had it, nor have changed.
        let ports = ports.filter(|it| it.identity.protocol != Protocol::Tcp);
        for it in ports.flat_map(|port| &port.frontends).map(|it| it.address) {
            let protocol = number(it.protocol);
            match self.layout.owner(&it) {
                Some((_, port)) => self.destinations.allow(protocol, it.address, port.allowed()),
                None => self.destinations.withdraw(protocol, it.address),
            }
        }
    }
}

/// The name of a family.
pub(super) fn named(family: Family) -> &'static str {
    match family {
        Family::V4 => "IPv4",
        Family::V6 => "IPv6",
    }
}

fn addresses(addresses: &BTreeSet<IpAddr>) -> Elements {
    let element = |it: &IpAddr| {
        (Element::new(Family::of(*it), Map::NodeAddresses, Bytes::new().address(*it)), Value::None)
    };
    addresses.iter().map(element).collect()
}

/// Takes our tables away, and returns whether there were any. Connections that are translated stay so.
///
/// # Errors
///
/// If they cannot be taken away. Nothing else is ever touched.
pub fn cleanup() -> Result<bool, Error> {
    let mut netfilter = Netfilter::open().map_err(Error::Open)?;
    let mut messages = Vec::new();
    for family in FAMILIES {
        if Snapshot::find(&mut netfilter, family)?.is_some() {
            messages.push(delete_table(family));
        }
    }
    let were_there = !messages.is_empty();
    commit(&mut netfilter, messages)?;
    Ok(were_there)
}
