//! Transactions: the messages that bring a table into the desired state.
//!
//! Invariant: an object is created after what it refers to, and deleted before it.

use std::{collections::BTreeSet, hash::Hasher as _, iter, mem};

use model::Family;
use nix::errno::Errno;
use twox_hash::XxHash64;

use crate::{
    apply::snapshot::Snapshot,
    encode::{
        chain::Chain,
        elements::{Changes, Element, Elements, Value},
        expressions::protocol_family,
        schema::{Bytes, Map, MapData, length, list_name},
        tables::{
            TRIAL_TABLE, counters, delete_chain, delete_list, delete_table, elements, in_table, new_chain,
            new_owned_table, new_rule, new_set, new_table,
        },
    },
    error::Error,
    plan::{
        affinity,
        affinity_numbers::seconds_of,
        endpoint_selector::{MatchKey, Selector},
        forwarding,
        rules::TableConfig,
        source_list,
        watch::Watch,
    },
};
use netlink::{Batch, Message, Netfilter, Refused, uapi::*};

/// How many elements are made before they are encoded, to a third of their size.
const MAX_IN_MEMORY: usize = 10_000;

#[derive(Clone, Debug)]
pub(crate) struct DesiredTable {
    /// What its constant chains depend on.
    pub(crate) config_: TableConfig,
    /// Whether this process owns it, so that no other can change it.
    pub(crate) is_owned: bool,
    /// The contents of its sets but for what leads to endpoints. Each selector and each list of source ranges among them has a
    /// chain.
    pub(crate) elements: Elements,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Difference {
    /// The message that adopts the table, if this process should own it; for a transaction before that of the others.
    pub(crate) adopt: Option<Message>,
    /// Lists of source ranges whose sets are created.
    pub(crate) new_lists: BTreeSet<u32>,
    /// Lists of source ranges whose sets are deleted, with their elements.
    pub(crate) old_lists: BTreeSet<u32>,
    pub(crate) new_chains: Vec<Chain>,
    pub(crate) old_chains: Vec<String>,
    pub(crate) changes: Changes,
}

/// The comment of a table with these chains: a table of another version, or for other flags, has another comment.
pub(crate) fn comment(config_: &TableConfig) -> String {
    let mut hasher = XxHash64::with_seed(0);
    let mut chains = config_.chains();
    chains.extend(derived_chains(&samples(config_.family)));
    let messages = sets_and_chains(config_.family, [0], &chains);
    // The messages define the layout; any text form of them does, if different messages have different texts.
    hasher.write(format!("{messages:?}").as_bytes());
    format!("layout {:016x}", hasher.finish())
}

/// Chains with their rules, and the sets that they use, which come first.
fn sets_and_chains(family: Family, lists: impl IntoIterator<Item = u32>, chains: &[Chain]) -> Vec<Message> {
    let sets = (1..).zip(Map::all()).map(|(id, map)| new_set(family, map, id));
    let lists = lists.into_iter().map(|it| new_set(family, Map::SourceRanges, it));
    sets.chain(lists).chain(create(family, chains)).collect()
}

/// Creates chains, then their rules, which may refer to other chains.
fn create(family: Family, chains: &[Chain]) -> Vec<Message> {
    let create = chains.iter().map(|it| new_chain(family, &it.name, it.hook));
    let rules =
        chains.iter().flat_map(|chain| chain.rules.iter().map(|it| new_rule(family, &chain.name, it)));
    create.chain(rules).collect()
}

/// Adds elements, and first the counters among them.
fn add(family: Family, all: &Elements) -> Vec<Message> {
    let mut messages = counters(NFT_MSG_NEWOBJ, family, counters_among(all));
    messages.extend(of_sets(NFT_MSG_NEWSETELEM, family, all));
    messages
}

/// Deletes elements, and then the counters among them.
fn delete(family: Family, all: &Elements) -> Vec<Message> {
    let mut messages = of_sets(NFT_MSG_DELSETELEM, family, all);
    messages.extend(counters(NFT_MSG_DELOBJ, family, counters_among(all)));
    messages
}

fn counters_among(all: &Elements) -> impl Iterator<Item = &Bytes> {
    all.keys().filter(|it| it.map.is_counters()).map(|it| &it.key)
}

/// Adds or deletes those that are not counters.
fn of_sets(command: u16, family: Family, all: &Elements) -> Vec<Message> {
    elements(command, family, all.iter().filter(|(it, _)| it.family == family && !it.map.is_counters()))
}

impl DesiredTable {
    /// The difference to an existing table of the same structure; `endpoints` are the elements that lead to endpoints.
    pub(crate) fn difference(
        &self,
        mut existing: Snapshot,
        endpoints: impl Iterator<Item = (Element, Value)>,
    ) -> Difference {
        // What is not desired is deleted. So there is no third copy of what both have.
        let mut changes = Changes { delete: mem::take(&mut existing.elements), add: Elements::new() };
        for (element, value) in self.elements.clone().into_iter().chain(endpoints) {
            changes.add(element, value);
        }
        let mut own: BTreeSet<_> = self.config_.chains().into_iter().map(|it| it.name).collect();
        own.extend(derived_chains(&self.elements).map(|it| it.name));
        let lists: BTreeSet<_> = source_list::among(&self.elements).collect();
        // If it is ours already, this changes nothing; if it is another process's, that refuses the transaction.
        let adopt = || new_owned_table(self.config_.family, &existing.comment);
        let mut difference = Difference {
            adopt: self.is_owned.then(adopt),
            new_lists: lists.difference(&existing.lists()).copied().collect(),
            old_lists: existing.lists().difference(&lists).copied().collect(),
            new_chains: derived_chains(&self.elements)
                .filter(|it| !existing.chains.contains_key(&it.name))
                .collect(),
            old_chains: existing.chains_from_the_hooks().filter(|it| !own.contains(*it)).cloned().collect(),
            changes,
        };
        difference.skip_deleted_lists();
        difference
    }

    /// Whether only elements and selector chains differ. Otherwise the table must be replaced.
    pub(crate) fn has_same_structure(&self, existing: &Snapshot) -> bool {
        let family = self.config_.family;
        let size = |fields| u32::try_from(length(fields, family)).unwrap_or_default();
        let lists: Vec<_> = existing.lists().into_iter().map(list_name).collect();
        let sets_fit = existing.sets.len() == Map::all().count() + lists.len()
            && lists.iter().all(|it| existing.sets[it].0 == size(Map::SourceRanges.key()))
            && Map::all().all(|map| {
                let fits = |(key, data)| match map.data() {
                    MapData::Fields(fields) => key == size(map.key()) && data == size(fields),
                    // The kernel decides about the size of a verdict.
                    MapData::None | MapData::Verdict | MapData::Counter => key == size(map.key()),
                };
                existing.sets.get(map.name()).is_some_and(|it| fits(*it))
            });
        let fits = |chain: &Chain| {
            let comments = chain.rules.iter().map(|it| &it.comment);
            existing.chains.get(&chain.name).is_some_and(|it| it.iter().eq(comments))
        };
        sets_fit
            // Others may have made the table dormant, or changed the policy of a chain.
            && existing.flags & !NFT_TABLE_F_OWNER == if self.is_owned { NFT_TABLE_F_PERSIST } else { 0 }
            && existing.policies.values().all(|it| *it == NF_ACCEPT.cast_unsigned())
            && existing.comment == comment(&self.config_)
            && self.config_.chains().iter().all(fits)
            && derived_chains(&self.elements).all(|it| !existing.chains.contains_key(&it.name) || fits(&it))
    }

    /// The messages that create the table, and replace an existing one. `endpoints` are the elements that lead to endpoints.
    pub(crate) fn replace(
        &self,
        endpoints: impl Iterator<Item = (Element, Value)>,
    ) -> impl Iterator<Item = Message> {
        self.fill(endpoints).chain(self.hooks())
    }

    /// The messages that create or replace the table, without base chains: no packet meets it yet.
    pub(crate) fn fill(
        &self,
        endpoints: impl Iterator<Item = (Element, Value)>,
    ) -> impl Iterator<Item = Message> {
        let family = self.config_.family;
        let mut chains = self.config_.chains();
        chains.retain(|it| it.hook.is_none());
        chains.extend(derived_chains(&self.elements));
        let comment = comment(&self.config_);
        // Deleting a table that does not exist fails, so it is created first.
        let new = if self.is_owned { new_owned_table } else { new_table };
        let mut messages = vec![new_table(family, &comment), delete_table(family), new(family, &comment)];
        messages.extend(sets_and_chains(family, source_list::among(&self.elements), &chains));
        messages.extend(add(family, &self.elements));
        let mut endpoints = endpoints.peekable();
        let next = move || {
            endpoints.peek()?;
            Some(add(family, &endpoints.by_ref().take(MAX_IN_MEMORY).collect()))
        };
        messages.into_iter().chain(iter::from_fn(next).flatten())
    }

    /// The messages that create its base chains, by which packets meet it.
    pub(crate) fn hooks(&self) -> Vec<Message> {
        let mut chains = self.config_.chains();
        chains.retain(|it| it.hook.is_some());
        create(self.config_.family, &chains)
    }
}

impl Difference {
    /// These changes, with the chains of what is among them.
    pub(crate) fn new(changes: Changes) -> Self {
        let mut difference = Self {
            adopt: None,
            new_lists: source_list::among(&changes.add).collect(),
            old_lists: source_list::among(&changes.delete).collect(),
            new_chains: derived_chains(&changes.add).collect(),
            old_chains: derived_chains(&changes.delete).map(|it| it.name).collect(),
            changes,
        };
        difference.skip_deleted_lists();
        difference
    }

    /// The elements of a set that is deleted go with it.
    fn skip_deleted_lists(&mut self) {
        if !self.old_lists.is_empty() {
            let is_gone = |it: &Element| it.map == Map::SourceRanges && self.old_lists.contains(&it.list);
            self.changes.delete.retain(|it, _| !is_gone(it));
        }
    }

    /// The messages that apply it, once the table is adopted.
    pub(crate) fn messages(&self, family: Family) -> Vec<Message> {
        let lists = self.new_lists.iter().map(|it| new_set(family, Map::SourceRanges, *it));
        let mut messages: Vec<_> = lists.collect();
        messages.extend(create(family, &self.new_chains));
        messages.extend(delete(family, &self.changes.delete));
        messages.extend(add(family, &self.changes.add));
        messages.extend(self.old_chains.iter().map(|it| delete_chain(family, it)));
        messages.extend(self.old_lists.iter().map(|it| delete_list(family, *it)));
        messages
    }
}

fn derived_chains(elements: &Elements) -> impl Iterator<Item = Chain> {
    elements.keys().filter_map(chains_of).flatten()
}

/// The chains of a selector, a list of source ranges, a timeout of session affinity, or a watch: each before those that it
/// refers to.
fn chains_of(element: &Element) -> Option<Vec<Chain>> {
    let (family, number) = (element.family, element.parts().number()?);
    Some(match element.map {
        Map::Selectors => vec![Selector::of(MatchKey::Address, number)?.chain(family)],
        Map::NodeSelectors => vec![Selector::of(MatchKey::NodePort, number)?.chain(family)],
        Map::SourceChains => vec![source_list::chain(family, number)],
        Map::AffinityTimeouts => vec![affinity::chain(family, seconds_of(number))],
        Map::Watches => Watch::of(number)?.chains(family),
        _ => return None,
    })
}

/// An element of each kind that has chains.
pub(crate) fn samples(family: Family) -> Elements {
    let selector = |(by, affinity)| Selector { by, set: 0, count: 1, affinity }.element(family);
    let selectors = MatchKey::ALL.into_iter().flat_map(|by| [(by, 0), (by, 1)]).map(selector);
    let others = [source_list::chain_element(family, 0), affinity::timeout(family, 1)];
    selectors.chain(others).chain(Watch::ALL.map(|it| it.element(family))).collect()
}

/// Applies all messages atomically, or none.
pub(crate) fn commit(
    netfilter: &mut Netfilter,
    messages: impl IntoIterator<Item = Message>,
) -> Result<(), Error> {
    let mut batch = Batch::transaction();
    batch.extend(messages);
    commit_batch(netfilter, batch)
}

pub(crate) fn commit_batch(netfilter: &mut Netfilter, batch: Batch) -> Result<(), Error> {
    // It has only its beginning.
    if batch.len() == 1 {
        return Ok(());
    }
    let failed = |errno| Error::Refused { what: "the change".to_owned(), errno };
    let (batch, refused) = netfilter.transact(batch).map_err(failed)?;
    match refused.first() {
        None => Ok(()),
        Some(it) => Err(Error::Refused { what: describe_refused(&batch, it), errno: it.errno }),
    }
}

pub(crate) fn describe_refused(batch: &Batch, refused: &Refused) -> String {
    let message = refused.message.and_then(|it| batch.message(it));
    message.as_ref().map_or_else(|| "the change".to_owned(), describe)
}

/// The messages that create a table with its base chains only, without rules: while a family has them, connections that are
/// translated already stay so.
pub(crate) fn base_chains(config_: &TableConfig) -> Vec<Message> {
    let family = config_.family;
    let chains: Vec<_> = config_.chains().into_iter().filter(|it| it.hook.is_some()).collect();
    let mut messages = vec![new_table(family, "base chains only")];
    messages.extend(chains.iter().map(|it| new_chain(family, &it.name, it.hook)));
    messages
}

/// Whether the kernel has tables that belong to a process and survive it: from Linux 6.9 on. Nothing is changed.
pub(crate) fn can_own_tables(netfilter: &mut Netfilter) -> bool {
    trial(netfilter, Family::V4, [new_owned_table(Family::V4, "")]).is_ok()
}

/// Whether the kernel can send copies of packets of a family to other hosts, see [`forwarding`]. Nothing is changed.
pub(crate) fn can_duplicate(netfilter: &mut Netfilter, family: Family) -> bool {
    let chain = Chain { hook: None, ..forwarding::second_chance(family) };
    let messages = [new_table(family, "")].into_iter().chain(create(family, &[chain]));
    trial(netfilter, family, messages).is_ok()
}

/// Whether the kernel can count by an element: `nft_objref` was a module before Linux 6.2. Nothing is changed.
pub(crate) fn can_count(netfilter: &mut Netfilter) -> bool {
    let family = Family::V4;
    let set = new_set(family, Map::Counted, 1);
    let chain = create(family, &[TableConfig::counting(family)]);
    trial(netfilter, family, [new_table(family, ""), set].into_iter().chain(chain)).is_ok()
}

/// Tries messages that make a table, under another name, without effect: the kernel validates them all, and must refuse the last one.
pub(crate) fn trial(
    netfilter: &mut Netfilter,
    family: Family,
    messages: impl IntoIterator<Item = Message>,
) -> Result<(), Error> {
    let under_its_name = |it| in_table(TRIAL_TABLE, it);
    let mut batch = Batch::transaction();
    batch.extend(messages.into_iter().map(under_its_name));
    let last = batch.len();
    batch.push(&under_its_name(delete_chain(family, "does-not-exist")));
    let failed = |what, errno| Error::Refused { what, errno };
    let (batch, refused) = netfilter.transact(batch).map_err(|it| failed("the transaction".into(), it))?;
    match refused.first() {
        Some(it) if it.message == Some(last) && it.errno == Errno::ENOENT => Ok(()),
        Some(it) => Err(failed(describe_refused(&batch, it), it.errno)),
        // It accepted what it must refuse.
        None => Err(failed("to refuse an invalid transaction".into(), Errno::UnknownErrno)),
    }
}

/// Describes a message, for errors.
pub(crate) fn describe(message: &Message) -> String {
    let said = |desired: u16| {
        message.attributes.iter().find(|it| it.kind == desired).map(|it| netlink::text(&it.value))
    };
    let named = |what: &str, name| format!("{what} {}", said(name).unwrap_or_default());
    let family = if message.family == protocol_family(Family::V4) { "IPv4" } else { "IPv6" };
    let what = match message.kind.wrapping_sub(NFNL_SUBSYS_NFTABLES << 8) {
        NFT_MSG_NEWTABLE | NFT_MSG_DELTABLE => "the table itself".to_owned(),
        NFT_MSG_NEWCHAIN | NFT_MSG_DELCHAIN => named("the chain", NFTA_CHAIN_NAME),
        NFT_MSG_NEWRULE => named("a rule of the chain", NFTA_RULE_CHAIN),
        NFT_MSG_NEWSET | NFT_MSG_DELSET => named("the set", NFTA_SET_NAME),
        NFT_MSG_NEWSETELEM => named("new elements of the set", NFTA_SET_NAME),
        NFT_MSG_DELSETELEM => named("to delete elements of the set", NFTA_SET_NAME),
        NFT_MSG_NEWOBJ | NFT_MSG_DELOBJ => named("the counter", NFTA_OBJ_NAME),
        _ => return "the transaction".to_owned(),
    };
    format!("{what}, in our table of {family}")
}
