//! Transactions: what is to be said to the kernel so that a table becomes what it should be.
//!
//! The one rule: what leads somewhere is made after it, and unmade before it.

use std::{collections::BTreeSet, hash::Hasher as _};

use model::Family;
use twox_hash::XxHash64;

use crate::{
    elements::{Changes, Elements},
    endpoint_selector::{By, Pick},
    error::Error,
    rules::{Chain, Setting},
    schema::{Leads, Map, length},
    snapshot::Snapshot,
    tables::{
        ACCEPT, CHAIN_NAME, Command, RULE_CHAIN, SET_NAME, SUBSYSTEM, begin, delete_chain, delete_table,
        elements, end, new_chain, new_rule, new_set, new_table, protocol,
    },
};
use netlink::{Attribute, Message, Netfilter, Refused};

/// What a table should be.
#[derive(Clone, Debug)]
pub(super) struct Wanted {
    /// What its chains depend on.
    pub(super) setting: Setting,
    /// The picks that there should be chains for.
    pub(super) picks: BTreeSet<Pick>,
    /// What should be in its sets.
    pub(super) elements: Elements,
}

/// What is to be done to a table.
#[derive(Clone, Debug)]
pub(super) enum Plan {
    /// All of it is written, and takes the place of what is there.
    Replace,
    /// What differs is written.
    Change(Difference),
}

/// How a table changes.
#[derive(Clone, Debug, Default)]
pub(super) struct Difference {
    /// The chains that come.
    pub(super) new_chains: Vec<Chain>,
    /// The chains that go.
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

/// The comment of a table with these chains: tables of other versions, or written for other flags, have another.
pub(super) fn comment(setting: &Setting) -> String {
    let mut hasher = XxHash64::with_seed(0);
    let mut chains = setting.chains();
    for (by, affinity) in By::ALL.into_iter().flat_map(|by| [(by, 0), (by, 1)]) {
        chains.push(Pick { by, set: 0, count: 1, affinity }.chain(setting.family));
    }
    let messages = skeleton(setting.family, &chains);
    // What is said to the kernel is the layout; how it is written down here does not matter as long as nothing is equal
    // that is not the same.
    hasher.write(format!("{messages:?}").as_bytes());
    format!("layout {:016x}", hasher.finish())
}

/// Chains with their rules, and the sets that they look at.
fn skeleton(family: Family, chains: &[Chain]) -> Vec<Message> {
    let sets = (1..).zip(Map::ALL).map(|(id, map)| new_set(family, map, id));
    sets.chain(make(family, chains)).collect()
}

/// Makes chains, and then their rules, which may lead from one to another.
fn make(family: Family, chains: &[Chain]) -> Vec<Message> {
    let make = chains.iter().map(|it| new_chain(family, &it.name, it.hook));
    let rules =
        chains.iter().flat_map(|chain| chain.rules.iter().map(|it| new_rule(family, &chain.name, it)));
    make.chain(rules).collect()
}

fn add(family: Family, all: &Elements) -> Vec<Message> {
    by_map(Command::NewElements, family, all)
}

fn by_map(command: Command, family: Family, all: &Elements) -> Vec<Message> {
    let of = |map| all.iter().filter(move |(it, _)| it.family == family && it.map == map);
    Map::ALL.into_iter().flat_map(|map| elements(command, family, map, of(map))).collect()
}

impl Wanted {
    /// What is to be done to a table that is like this.
    pub(super) fn plan(&self, there: Option<&Snapshot>) -> Plan {
        match there {
            Some(there) if self.has_the_shape_of(there) => Plan::Change(self.difference(there)),
            _ => Plan::Replace,
        }
    }

    /// Whether only elements and chains that pick differ.
    fn has_the_shape_of(&self, there: &Snapshot) -> bool {
        let family = self.setting.family;
        let size = |fields| u32::try_from(length(fields, family)).unwrap_or_default();
        let sets_fit = there.sets.len() == Map::ALL.len()
            && Map::ALL.iter().all(|map| {
                let fits = |(key, data)| match map.leads() {
                    Leads::To(fields) => key == size(map.key()) && data == size(fields),
                    // What it takes to hold a verdict is the kernel's affair.
                    Leads::Nowhere | Leads::ToChain => key == size(map.key()),
                };
                there.sets.get(map.name()).is_some_and(|it| fits(*it))
            });
        let fits = |chain: &Chain| {
            let comments = chain.rules.iter().map(|it| &it.comment);
            there.chains.get(&chain.name).is_some_and(|it| it.iter().eq(comments))
        };
        sets_fit
            // Somebody else may have put the table to sleep, or let a chain end in a drop.
            && there.flags == 0
            && there.policies.values().all(|it| *it == ACCEPT)
            && there.comment == comment(&self.setting)
            && self.setting.chains().iter().all(fits)
            && self.pick_chains().all(|it| !there.chains.contains_key(&it.name) || fits(&it))
    }

    fn pick_chains(&self) -> impl Iterator<Item = Chain> {
        self.picks.iter().map(|it| it.chain(self.setting.family))
    }

    fn difference(&self, there: &Snapshot) -> Difference {
        let mut own: BTreeSet<_> = self.setting.chains().into_iter().map(|it| it.name).collect();
        own.extend(self.pick_chains().map(|it| it.name));
        Difference {
            new_chains: self.pick_chains().filter(|it| !there.chains.contains_key(&it.name)).collect(),
            old_chains: there.chains.keys().filter(|it| !own.contains(*it)).cloned().collect(),
            changes: Changes::between(&there.elements, &self.elements),
        }
    }

    /// The messages that make the table, in the place of one that may be there.
    pub(super) fn replace(&self) -> Vec<Message> {
        let family = self.setting.family;
        let mut chains = self.setting.chains();
        chains.extend(self.pick_chains());
        let comment = comment(&self.setting);
        // One that is not there cannot be taken away, so it is made before.
        let mut messages =
            vec![new_table(family, &comment), delete_table(family), new_table(family, &comment)];
        messages.extend(skeleton(family, &chains));
        messages.extend(add(family, &self.elements));
        messages
    }
}

impl Difference {
    /// The messages that bring it about.
    pub(super) fn messages(&self, family: Family) -> Vec<Message> {
        let mut messages = make(family, &self.new_chains);
        messages.extend(by_map(Command::DeleteElements, family, &self.changes.delete));
        messages.extend(add(family, &self.changes.add));
        messages.extend(self.old_chains.iter().map(|it| delete_chain(family, it)));
        messages
    }
}

/// Does all of it at one moment, or nothing.
pub(super) fn commit(netfilter: &mut Netfilter, messages: Vec<Message>) -> Result<(), Error> {
    if messages.is_empty() {
        return Ok(());
    }
    let all = framed(messages);
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

/// The messages of a transaction, with what comes before and after them.
pub(super) fn framed(messages: Vec<Message>) -> Vec<Message> {
    let mut all = vec![begin()];
    all.extend(messages);
    all.push(end());
    all
}

/// What a message asks for, in words.
pub(super) fn describe(message: &Message) -> String {
    let said = |wanted: u16| {
        message.attributes.iter().find_map(|it| match it {
            Attribute::Value(kind, value) if *kind == wanted => Some(netlink::text(value)),
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

    /// A table, and what is there once it is written.
    fn written() -> (Wanted, Snapshot) {
        let setting =
            Setting { family: Family::V4, mark: 1, masquerade_all: false, pods: None, inside: None };
        let mut there = Snapshot { comment: comment(&setting), ..Snapshot::default() };
        for chain in setting.chains() {
            if chain.hook.is_some() {
                there.policies.insert(chain.name.clone(), ACCEPT);
            }
            there.chains.insert(chain.name, chain.rules.into_iter().map(|it| it.comment).collect());
        }
        for map in Map::ALL {
            let size = |fields| u32::try_from(length(fields, Family::V4)).unwrap();
            let data = if let Leads::To(fields) = map.leads() { size(fields) } else { 0 };
            there.sets.insert(map.name().to_owned(), (size(map.key()), data));
        }
        there.elements = setting.elements();
        let elements = setting.elements();
        (Wanted { setting, picks: BTreeSet::new(), elements }, there)
    }

    #[test]
    fn what_is_there_already_is_not_touched() {
        let (wanted, there) = written();
        assert!(matches!(wanted.plan(Some(&there)), Plan::Change(it) if it.is_empty()));
    }

    #[test]
    fn a_table_that_was_put_to_sleep_or_drops_what_it_should_not_is_replaced() {
        const DORMANT: u32 = 1;
        const DROP: u32 = 0;
        let (wanted, there) = written();
        let asleep = Snapshot { flags: DORMANT, ..there.clone() };
        let mut drops = there;
        drops.policies.insert("prerouting".into(), DROP);
        for there in [asleep, drops] {
            assert!(matches!(wanted.plan(Some(&there)), Plan::Replace));
        }
    }
}
