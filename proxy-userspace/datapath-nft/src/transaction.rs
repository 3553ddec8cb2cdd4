//! Transactions: the messages that bring a table into the desired state.
//!
//! Invariant: an object is created after what it refers to, and deleted before it.

use std::{collections::BTreeSet, hash::Hasher as _};

use model::Family;
use twox_hash::XxHash64;

use crate::{
    chain::Chain,
    elements::{Changes, Elements},
    endpoint_selector::{MatchKey, Selector},
    error::Error,
    rules::TableConfig,
    schema::{Map, MapData, length},
    snapshot::Snapshot,
    tables::{
        ACCEPT, CHAIN_NAME, Command, RULE_CHAIN, SET_NAME, SUBSYSTEM, begin, delete_chain, delete_table,
        elements, end, new_chain, new_rule, new_set, new_table, protocol,
    },
};
use netlink::{Attribute, Message, Netfilter, Refused};

/// The desired state of a table.
#[derive(Clone, Debug)]
pub(super) struct DesiredTable {
    /// What its constant chains depend on.
    pub(super) config_: TableConfig,
    /// The contents of its sets. Each selector among them has a chain.
    pub(super) elements: Elements,
}

/// The difference of a table.
#[derive(Clone, Debug, Default)]
pub(super) struct Difference {
    /// Chains to create.
    pub(super) new_chains: Vec<Chain>,
    /// Chains to delete.
    pub(super) old_chains: Vec<String>,
    /// How the elements change.
    pub(super) changes: Changes,
}

impl Difference {
    /// Whether there is nothing to do.
    pub(super) fn is_empty(&self) -> bool {
        self.new_chains.is_empty() && self.old_chains.is_empty() && self.changes.len() == 0
    }
}

/// The comment of a table with these chains: a table of another version, or for other flags, has another comment.
pub(super) fn comment(config_: &TableConfig) -> String {
    let mut hasher = XxHash64::with_seed(0);
    let mut chains = config_.chains();
    for (by, affinity) in MatchKey::ALL.into_iter().flat_map(|by| [(by, 0), (by, 1)]) {
        chains.push(Selector { by, set: 0, count: 1, affinity }.chain(config_.family));
    }
    let messages = chains_and_sets(config_.family, &chains);
    // The messages define the layout; any text form of them does, if different messages have different texts.
    hasher.write(format!("{messages:?}").as_bytes());
    format!("layout {:016x}", hasher.finish())
}

/// Chains with their rules, and the sets that they use.
fn chains_and_sets(family: Family, chains: &[Chain]) -> Vec<Message> {
    let sets = (1..).zip(Map::all()).map(|(id, map)| new_set(family, map, id));
    sets.chain(create(family, chains)).collect()
}

/// Creates chains, then their rules, which may refer to other chains.
fn create(family: Family, chains: &[Chain]) -> Vec<Message> {
    let create = chains.iter().map(|it| new_chain(family, &it.name, it.hook));
    let rules =
        chains.iter().flat_map(|chain| chain.rules.iter().map(|it| new_rule(family, &chain.name, it)));
    create.chain(rules).collect()
}

fn add(family: Family, all: &Elements) -> Vec<Message> {
    by_map(Command::NewElements, family, all)
}

fn by_map(command: Command, family: Family, all: &Elements) -> Vec<Message> {
    let of = |map| all.iter().filter(move |(it, _)| it.family == family && it.map == map);
    Map::all().flat_map(|map| elements(command, family, map, of(map))).collect()
}

impl DesiredTable {
    /// The difference to an existing table; `None` if that must be replaced.
    pub(super) fn difference(&self, existing: &Snapshot) -> Option<Difference> {
        if !self.has_same_structure(existing) {
            return None;
        }
        let mut own: BTreeSet<_> = self.config_.chains().into_iter().map(|it| it.name).collect();
        own.extend(self.selector_chains().map(|it| it.name));
        Some(Difference {
            new_chains: self.selector_chains().filter(|it| !existing.chains.contains_key(&it.name)).collect(),
            old_chains: existing.chains.keys().filter(|it| !own.contains(*it)).cloned().collect(),
            changes: Changes::between(&existing.elements, &self.elements),
        })
    }

    /// Whether only elements and selector chains differ.
    fn has_same_structure(&self, existing: &Snapshot) -> bool {
        let family = self.config_.family;
        let size = |fields| u32::try_from(length(fields, family)).unwrap_or_default();
        let sets_fit = existing.sets.len() == Map::all().count()
            && Map::all().all(|map| {
                let fits = |(key, data)| match map.data() {
                    MapData::Fields(fields) => key == size(map.key()) && data == size(fields),
                    // The kernel decides about the size of a verdict.
                    MapData::None | MapData::Verdict => key == size(map.key()),
                };
                existing.sets.get(map.name()).is_some_and(|it| fits(*it))
            });
        let fits = |chain: &Chain| {
            let comments = chain.rules.iter().map(|it| &it.comment);
            existing.chains.get(&chain.name).is_some_and(|it| it.iter().eq(comments))
        };
        sets_fit
            // Others may have made the table dormant, or changed the policy of a chain.
            && existing.flags == 0
            && existing.policies.values().all(|it| *it == ACCEPT)
            && existing.comment == comment(&self.config_)
            && self.config_.chains().iter().all(fits)
            && self.selector_chains().all(|it| !existing.chains.contains_key(&it.name) || fits(&it))
    }

    fn selector_chains(&self) -> impl Iterator<Item = Chain> {
        Selector::among(&self.elements).map(|it| it.chain(self.config_.family))
    }

    /// The messages that create the table, and replace an existing one.
    pub(super) fn replace(&self) -> Vec<Message> {
        let family = self.config_.family;
        let mut chains = self.config_.chains();
        chains.extend(self.selector_chains());
        let comment = comment(&self.config_);
        // Deleting a table that does not exist fails, so it is created first.
        let mut messages =
            vec![new_table(family, &comment), delete_table(family), new_table(family, &comment)];
        messages.extend(chains_and_sets(family, &chains));
        messages.extend(add(family, &self.elements));
        messages
    }
}

impl Difference {
    /// These changes, with the chains of the selectors among them.
    pub(super) fn new(family: Family, changes: Changes) -> Self {
        Self {
            new_chains: Selector::among(&changes.add).map(|it| it.chain(family)).collect(),
            old_chains: Selector::among(&changes.delete).map(Selector::chain_name).collect(),
            changes,
        }
    }

    /// The messages that apply it.
    pub(super) fn messages(&self, family: Family) -> Vec<Message> {
        let mut messages = create(family, &self.new_chains);
        messages.extend(by_map(Command::DeleteElements, family, &self.changes.delete));
        messages.extend(add(family, &self.changes.add));
        messages.extend(self.old_chains.iter().map(|it| delete_chain(family, it)));
        messages
    }
}

/// Applies all messages atomically, or none.
pub(super) fn commit(netfilter: &mut Netfilter, messages: Vec<Message>) -> Result<(), Error> {
    if messages.is_empty() {
        return Ok(());
    }
    let all = batch(messages);
    let refused = match netfilter.transact(&all, SUBSYSTEM) {
        Ok(refused) => refused,
        Err(errno) => vec![Refused { message: None, errno }],
    };
    match refused.first() {
        None => Ok(()),
        Some(Refused { message, errno }) => {
            let what = message.and_then(|it| all.get(it)).map_or_else(|| "the change".to_owned(), describe);
            Err(Error::Refused { what, errno: *errno })
        }
    }
}

/// The messages of a transaction, with its begin and end.
pub(super) fn batch(messages: Vec<Message>) -> Vec<Message> {
    let mut all = vec![begin()];
    all.extend(messages);
    all.push(end());
    all
}

/// Describes a message, for errors.
pub(super) fn describe(message: &Message) -> String {
    let said = |desired: u16| {
        message.attributes.iter().find_map(|it| match it {
            Attribute::Value(kind, value) if *kind == desired => Some(netlink::text(value)),
            _ => None,
        })
    };
    let named = |what: &str, kind| format!("{what} {}", said(kind).unwrap_or_default());
    let family = if message.family == protocol(Family::V4) { "IPv4" } else { "IPv6" };
    let is = |command: Command| message.kind == command.kind();
    let what = if is(Command::NewTable) || is(Command::DeleteTable) {
        "the table itself".to_owned()
    } else if is(Command::NewChain) || is(Command::DeleteChain) {
        named("the chain", CHAIN_NAME)
    } else if is(Command::NewRule) {
        named("a rule of the chain", RULE_CHAIN)
    } else if is(Command::NewSet) {
        named("the set", SET_NAME)
    } else if is(Command::NewElements) {
        named("new elements of the set", SET_NAME)
    } else if is(Command::DeleteElements) {
        named("to delete elements of the set", SET_NAME)
    } else {
        return "the transaction".to_owned();
    };
    format!("{what}, in our table of {family}")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A table, and the snapshot of it once it is written.
    fn applied() -> (DesiredTable, Snapshot) {
        let config_ =
            TableConfig { family: Family::V4, mark: 1, masquerade_all: false, pods: None, internal: None };
        let mut existing = Snapshot { comment: comment(&config_), ..Snapshot::default() };
        for chain in config_.chains() {
            if chain.hook.is_some() {
                existing.policies.insert(chain.name.clone(), ACCEPT);
            }
            existing.chains.insert(chain.name, chain.rules.into_iter().map(|it| it.comment).collect());
        }
        for map in Map::all() {
            let size = |fields| u32::try_from(length(fields, Family::V4)).unwrap();
            let data = if let MapData::Fields(fields) = map.data() { size(fields) } else { 0 };
            existing.sets.insert(map.name().to_owned(), (size(map.key()), data));
        }
        existing.elements = config_.elements();
        let elements = config_.elements();
        (DesiredTable { config_, elements }, existing)
    }

    #[test]
    fn an_up_to_date_table_is_not_touched() {
        let (desired, existing) = applied();
        assert!(desired.difference(&existing).unwrap().is_empty());
    }

    #[test]
    fn a_dormant_table_or_one_with_a_drop_policy_is_replaced() {
        const DORMANT: u32 = 1;
        const DROP: u32 = 0;
        let (desired, existing) = applied();
        let asleep = Snapshot { flags: DORMANT, ..existing.clone() };
        let mut drops = existing;
        drops.policies.insert("prerouting".into(), DROP);
        for existing in [asleep, drops] {
            assert!(desired.difference(&existing).is_none());
        }
    }
}
