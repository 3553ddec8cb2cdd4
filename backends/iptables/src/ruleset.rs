//! The rules that were written, what differs from them, and the input of `iptables-restore` for that.
//!
//! Invariant: pure. A chain whose rules are the same is not written; a chain of others is never named, but for own jumps.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    sync::Arc,
};

use proxy_contract::backend::Family;

use crate::rules::{ChainId, Chains, PREFIX, Table};

/// The part of the rules of a Service; in shared chains, the frame's rules are last.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Owner {
    Service(Arc<str>),
    Frame(Family),
}

/// New rules by chain; `None` deletes the chain.
pub(crate) type Difference = BTreeMap<ChainId, Option<String>>;

/// All rules that were written.
#[derive(Debug, Default)]
pub(crate) struct Ruleset(BTreeMap<Owner, Chains>);

impl Ruleset {
    /// Replaces parts; returns the chains that differ, with all their rules.
    pub(crate) fn update(&mut self, parts: impl IntoIterator<Item = (Owner, Chains)>) -> Difference {
        let mut difference = Difference::new();
        for (owner, new) in parts {
            let old = self.0.remove(&owner).unwrap_or_default();
            for id in old.keys().chain(new.keys()).filter(|it| old.get(it) != new.get(it)) {
                difference.insert(id.clone(), new.get(id).cloned());
            }
            if !new.is_empty() {
                self.0.insert(owner, new);
            }
        }
        for (id, rules) in difference.iter_mut().filter(|(it, _)| it.is_shared()) {
            *rules = Some(self.0.values().filter_map(|it| it.get(id)).map(String::as_str).collect());
        }
        difference
    }

    pub(crate) fn services(&self) -> impl Iterator<Item = &Arc<str>> {
        self.0.keys().filter_map(|it| if let Owner::Service(name) = it { Some(name) } else { None })
    }

    fn counts(&self) -> BTreeMap<&ChainId, usize> {
        let mut counts = BTreeMap::new();
        for (id, rules) in self.0.values().flatten() {
            *counts.entry(id).or_default() += rules.lines().count();
        }
        counts
    }

    /// Whether a listing has these chains, each with as many rules, and no others.
    pub(crate) fn is_listed(&self, listing: &Listing) -> bool {
        self.counts().into_iter().eq(listing.chains.iter().map(|(id, it)| (id, it.count)))
    }
}

/// The input of `iptables-restore` for what differs in a family; empty if nothing does.
pub(crate) fn input(family: Family, difference: &Difference) -> String {
    let mut input = String::new();
    for table in Table::ALL {
        let chains = || difference.iter().filter(move |(it, _)| it.family == family && it.table == table);
        if chains().next().is_none() {
            continue;
        }
        let _ = writeln!(input, "*{table}");
        for (id, _) in chains().filter(|(it, _)| it.is_own()) {
            let _ = writeln!(input, ":{} - [0:0]", id.name);
        }
        input.extend(chains().filter_map(|(_, rules)| rules.as_deref()));
        for (id, _) in chains().filter(|(_, rules)| rules.is_none()) {
            let _ = writeln!(input, "-X {}", id.name);
        }
        input.push_str("COMMIT\n");
    }
    input
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ListedRules {
    count: usize,
    digest: u64,
}

/// What `iptables-save` lists of this backend's chains, and of jumps to them.
#[derive(Debug, Default)]
pub(crate) struct Listing {
    pub(crate) chains: BTreeMap<ChainId, ListedRules>,
    /// The lines that delete the jumps, by chain.
    jumps: BTreeMap<ChainId, String>,
    table: Option<Table>,
}

impl Listing {
    /// Takes a line of a family's listing.
    pub(crate) fn take(&mut self, family: Family, line: &str) {
        if let Some(name) = line.strip_prefix('*') {
            self.table = Table::ALL.into_iter().find(|it| it.to_string() == name);
        }
        let Some(table) = self.table else { return };
        let id = |name: &str| ChainId { family, table, name: name.to_owned() };
        if let Some(chain) = line.strip_prefix(':') {
            let id = id(chain.split(' ').next().unwrap_or_default());
            if id.is_own() {
                self.chains.entry(id).or_default();
            }
        } else if let Some(rule) = line.strip_prefix("-A ") {
            let id = id(rule.split(' ').next().unwrap_or_default());
            if !id.is_own() && !is_own_jump(rule) {
                return;
            }
            if !id.is_own() {
                let _ = writeln!(self.jumps.entry(id.clone()).or_default(), "-D {rule}");
            }
            let listed = self.chains.entry(id).or_default();
            let mut hasher = DefaultHasher::new();
            (listed.digest, rule).hash(&mut hasher);
            *listed = ListedRules { count: listed.count + 1, digest: hasher.finish() };
        }
    }

    /// Makes a difference from nothing one from what is listed: jumps are made anew, and other own chains deleted.
    pub(crate) fn replace_by(&self, mut new: Difference) -> Difference {
        for id in self.chains.keys().filter(|it| it.is_own()) {
            new.entry(id.clone()).or_default();
        }
        for (id, deletions) in &self.jumps {
            let rules = new.entry(id.clone()).or_default().get_or_insert_default();
            rules.insert_str(0, deletions);
        }
        new
    }
}

/// Whether a rule ends with a jump to an own chain.
fn is_own_jump(rule: &str) -> bool {
    let mut words = rule.rsplit(' ');
    let is_own = |it: &str| it.starts_with(PREFIX) && !it.ends_with('"');
    words.next().is_some_and(is_own) && words.next().is_some_and(|it| it == "-j" || it == "-g")
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWNED: &str = include_str!("ruleset/listing.txt");

    fn listing(text: &str) -> Listing {
        let mut listing = Listing::default();
        text.lines().for_each(|it| listing.take(Family::V4, it));
        listing
    }

    fn chains(rules: &[(&str, &str)]) -> Chains {
        let id = |name: &str| ChainId { family: Family::V4, table: Table::Nat, name: name.to_owned() };
        rules.iter().map(|(name, rules)| (id(name), (*rules).to_owned())).collect()
    }

    fn service(name: &str, rules: &[(&str, &str)]) -> (Owner, Chains) {
        (Owner::Service(name.into()), chains(rules))
    }

    /// Two Services and the frame, as they are written first.
    fn written() -> (Ruleset, Difference) {
        let mut ruleset = Ruleset::default();
        let parts = [
            (
                Owner::Frame(Family::V4),
                chains(&[("KPI-SERVICES", "last\n"), ("PREROUTING", "-I PREROUTING\n")]),
            ),
            service("b", &[("KPI-SERVICES", "to b\n"), ("KPI-SVC-B", "b\n")]),
            service("a", &[("KPI-SERVICES", "to a\n"), ("KPI-SVC-A", "a\n")]),
        ];
        let difference = ruleset.update(parts);
        (ruleset, difference)
    }

    #[test]
    fn only_chains_that_differ_are_written() {
        let cases = [
            (service("a", &[("KPI-SERVICES", "to a\n"), ("KPI-SVC-A", "a\n")]), ""),
            (
                service("a", &[("KPI-SERVICES", "to a\n"), ("KPI-SVC-A", "a2\n")]),
                "*nat\n:KPI-SVC-A - [0:0]\na2\nCOMMIT\n",
            ),
            (
                service("a", &[]),
                "*nat\n:KPI-SERVICES - [0:0]\n:KPI-SVC-A - [0:0]\nto b\nlast\n-X KPI-SVC-A\nCOMMIT\n",
            ),
            (
                service("aa", &[("KPI-SERVICES", "to aa\n")]),
                "*nat\n:KPI-SERVICES - [0:0]\nto a\nto aa\nto b\nlast\nCOMMIT\n",
            ),
        ];
        for (part, expected) in cases {
            let difference = written().0.update([part]);
            assert_eq!(input(Family::V4, &difference), expected);
            assert_eq!(input(Family::V6, &difference), "");
        }
    }

    #[test]
    fn everything_replaces_own_chains_and_jumps_alone() {
        let (_, difference) = written();
        assert_eq!(
            input(Family::V4, &listing(OWNED).replace_by(difference)),
            "*nat\n:KPI-SERVICES - [0:0]\n:KPI-SVC-A - [0:0]\n:KPI-SVC-B - [0:0]\n:KPI-SVC-OLD - [0:0]\n\
             to a\nto b\nlast\na\nb\n-D PREROUTING -j KPI-SERVICES\n-I PREROUTING\n-X KPI-SVC-OLD\nCOMMIT\n"
        );
        assert_eq!(
            input(Family::V4, &listing(OWNED).replace_by(Difference::new())),
            "*nat\n:KPI-SERVICES - [0:0]\n:KPI-SVC-OLD - [0:0]\n-D PREROUTING -j KPI-SERVICES\n\
             -X KPI-SERVICES\n-X KPI-SVC-OLD\nCOMMIT\n"
        );
    }

    #[test]
    fn a_listing_shows_what_others_did() {
        let mut ruleset = Ruleset::default();
        let rules = [("PREROUTING", "-I\n"), ("KPI-SERVICES", "-A\n"), ("KPI-SVC-OLD", "")];
        ruleset.update([(Owner::Frame(Family::V4), chains(&rules))]);
        let before = listing(OWNED).chains;
        let rule = "-A KPI-SERVICES -d 10.96.0.1/32 -j KPI-SVC-OLD\n";
        // What was changed; whether the number of rules shows it, and whether the listing does.
        let cases = [
            ("-A CNI-X -s 10.0.0.1/32 -j RETURN\n", "", [false, false]),
            (rule, "", [true, true]),
            (rule, "-A KPI-SERVICES -d 10.96.0.2/32 -j KPI-SVC-OLD\n", [false, true]),
            ("-A PREROUTING -j KPI-SERVICES\n", "", [true, true]),
            ("COMMIT\n*raw", "-A OUTPUT -j KPI-SERVICES\nCOMMIT\n*raw", [true, true]),
            (":KPI-SVC-OLD - [0:0]\n", "", [true, true]),
        ];
        for (from, to, expected) in cases {
            assert!(OWNED.contains(from), "{from}");
            let listing = listing(&OWNED.replacen(from, to, 1));
            assert_eq!([!ruleset.is_listed(&listing), listing.chains != before], expected, "{from} to {to}");
        }
    }
}
