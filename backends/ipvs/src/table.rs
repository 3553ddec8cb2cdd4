//! The nftables table: its text, and what the kernel has of it.
//!
//! Invariant: a text is one transaction.

use std::{collections::BTreeMap, fmt::Write as _};

use ipnet::IpNet;
use serde_json::Value;

use crate::{
    marks::{BALANCED, DROP, Key, MASK, MASQUERADE, Masquerade, PREFIX, REFUSE},
    plan::Elements,
};

const TEXT: &str = include_str!("table.nft");
pub(crate) const NAME: &str = "inet kube-proxy-ipvs";

/// A text that deletes the table, if it is there.
pub(crate) fn deletion() -> String {
    format!("add table {NAME}\ndelete table {NAME}\n")
}

/// A text that replaces the table: sources inside the cluster, the node's ranges with node ports (all if there are none), and
/// the elements of all Services.
pub(crate) fn whole<'a>(
    sources: &[IpNet],
    nodes: &[IpNet],
    elements: impl Iterator<Item = &'a Elements>,
) -> String {
    let mut text = deletion();
    let masquerade = |it: Masquerade| BALANCED | it as u32;
    for (name, value) in [
        ("MASK", MASK),
        ("PREFIX", PREFIX),
        ("BALANCE", PREFIX ^ BALANCED),
        ("REFUSE", REFUSE),
        ("DROP", DROP),
        ("MASQUERADE", MASQUERADE),
        ("ALL", masquerade(Masquerade::All)),
        ("OUTSIDE", masquerade(Masquerade::Outside)),
    ] {
        let _ = writeln!(text, "define {name} = {value:#x}");
    }
    text += TEXT;
    let all = ["0.0.0.0/0", "::/0"].map(|it| it.parse().expect("it is a range"));
    let nodes = if nodes.is_empty() { &all[..] } else { nodes };
    let mut ranges = Elements::new();
    for (set, all) in [("sources", sources), ("nodes", nodes)] {
        for it in all {
            let family = if it.addr().is_ipv4() { 4 } else { 6 };
            ranges.insert((format!("{set}{family}"), it.trunc().to_string()), String::new());
        }
    }
    write(&mut text, "add", &ranges);
    write(&mut text, "add", &merged(elements));
    text
}

/// The elements of all Services; of two that claim a key, the first one has it.
fn merged<'a>(all: impl Iterator<Item = &'a Elements>) -> Elements {
    let mut merged = Elements::new();
    for (key, value) in all.flatten() {
        merged.entry(key.clone()).or_insert_with(|| value.clone());
    }
    merged
}

pub(crate) fn difference(deleted: &Elements, added: &Elements) -> String {
    let mut text = String::new();
    let keys = deleted.keys().map(|it| (it.clone(), String::new())).collect();
    write(&mut text, "delete", &keys);
    write(&mut text, "add", added);
    text
}

/// An element per line: an error of `nft` quotes its line.
fn write(text: &mut String, verb: &str, elements: &Elements) {
    let mut last = "";
    for ((set, key), value) in elements {
        if last == set {
            text.push_str(",\n");
        } else {
            text.push_str(if last.is_empty() { "" } else { " }\n" });
            let _ = writeln!(text, "{verb} element {NAME} {set} {{");
            last = set;
        }
        let _ = write!(text, "{key}{value}");
    }
    text.push_str(if last.is_empty() { "" } else { " }\n" });
}

/// The number of rules of the table: the lines of its chains.
fn rules() -> usize {
    let is_rule =
        |it: &&str| it.starts_with("\t\t") && !["\t\ttype ", "\t\t#"].iter().any(|no| it.starts_with(no));
    TEXT.lines().filter(is_rule).count()
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Listing {
    pub(crate) rules: usize,
    /// The number of elements of each set and map.
    pub(crate) elements: BTreeMap<String, usize>,
    pub(crate) marks: BTreeMap<Key, u32>,
}

impl Listing {
    /// What `nft --json --numeric list table` prints.
    pub(crate) fn parse(json: &str) -> Result<Self, serde_json::Error> {
        let all: Value = serde_json::from_str(json)?;
        let mut listing = Self::default();
        for it in all["nftables"].as_array().into_iter().flatten() {
            listing.rules += usize::from(it.get("rule").is_some());
            let Some(set) = it.get("set").or_else(|| it.get("map")) else { continue };
            let name = set["name"].as_str().unwrap_or_default().to_owned();
            let elements = set["elem"].as_array().map_or(&[][..], Vec::as_slice);
            for it in elements.iter().filter_map(|it| it.as_array()) {
                let [key, value] = &it[..] else { continue };
                let Some(mark) = value.as_u64().and_then(|it| u32::try_from(it).ok()) else { continue };
                let parts = key["concat"].as_array().into_iter().flatten();
                let parts: Vec<_> =
                    parts.map(|it| it.as_str().map_or_else(|| it.to_string(), ToOwned::to_owned)).collect();
                listing.marks.insert((name.clone(), parts.join(" . ")), mark);
            }
            listing.elements.insert(name, elements.len());
        }
        Ok(listing)
    }

    /// Whether it has the rules of the table, and as many elements of Services as these.
    pub(crate) fn has<'a>(&self, elements: impl Iterator<Item = &'a Elements>) -> bool {
        let mut counts: BTreeMap<String, usize> = BTreeMap::new();
        for (set, _) in merged(elements).into_keys() {
            *counts.entry(set).or_default() += 1;
        }
        let is_of_services = |it: &str| !it.starts_with("sources") && !it.starts_with("nodes");
        let is_equal = |(set, count): (&String, &usize)| counts.get(set).unwrap_or(&0) == count;
        self.rules == rules() && self.elements.iter().filter(|(it, _)| is_of_services(it)).all(is_equal)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn elements(all: &[(&str, &str, &str)]) -> Elements {
        all.iter().map(|(set, key, value)| (((*set).into(), (*key).into()), (*value).into())).collect()
    }

    #[test]
    fn a_difference_deletes_before_it_adds() {
        let old = elements(&[("inside4", "10.96.0.1 . 6 . 80", " : 0x6b000009")]);
        let new = elements(&[
            ("inside4", "10.96.0.1 . 6 . 80", " : 0x6b000011"),
            ("inside4", "10.96.0.2 . 6 . 80", " : 0x6b000000"),
            ("filtered6", "fd00::1 . 17 . 53", ""),
        ]);
        assert_eq!(
            difference(&old, &new),
            "delete element inet kube-proxy-ipvs inside4 {\n10.96.0.1 . 6 . 80 }\n\
             add element inet kube-proxy-ipvs filtered6 {\nfd00::1 . 17 . 53 }\n\
             add element inet kube-proxy-ipvs inside4 {\n10.96.0.1 . 6 . 80 : 0x6b000011,\n\
             10.96.0.2 . 6 . 80 : 0x6b000000 }\n"
        );
        assert_eq!(difference(&Elements::new(), &Elements::new()), "");
    }

    #[test]
    fn the_whole_table_has_the_ranges_of_both_families() {
        let sources = ["10.1.2.3/8", "fd00::/8"].map(|it| it.parse().unwrap());
        let text = whole(&sources, &[], std::iter::empty());
        for expected in [
            "add table inet kube-proxy-ipvs\ndelete table inet kube-proxy-ipvs\n",
            "define MASK = 0xff000000\n",
            "sources4 {\n10.0.0.0/8 }\n",
            "sources6 {\nfd00::/8 }\n",
            "nodes4 {\n0.0.0.0/0 }\n",
            "nodes6 {\n::/0 }\n",
        ] {
            assert!(text.contains(expected), "{expected}");
        }
        let defined: Vec<_> =
            text.lines().filter_map(|it| it.strip_prefix("define ")?.split(' ').next()).collect();
        for used in
            TEXT.split('$').skip(1).filter_map(|it| it.split(|it: char| !it.is_ascii_uppercase()).next())
        {
            assert!(defined.contains(&used), "{used} is not defined");
        }
    }

    #[test]
    fn a_flushed_table_and_a_deleted_element_are_noticed() {
        let rule = r#"{"rule": {"chain": "inside"}}"#;
        let json = |rules: usize, elements: &str| {
            format!(
                r#"{{"nftables": [{{"metainfo": {{}}}}, {{"map": {{"name": "inside4", "elem": [{elements}]}}}},
                {{"set": {{"name": "sources4", "elem": ["10.0.0.0/8"]}}}}, {}]}}"#,
                vec![rule; rules].join(",")
            )
        };
        let element = r#"[{"concat": ["10.96.0.1", 6, 80]}, 1795162121]"#;
        let wanted = elements(&[("inside4", "10.96.0.1 . 6 . 80", " : 0x6b000009")]);
        let rules = rules();
        let listing = Listing::parse(&json(rules, element)).unwrap();
        assert_eq!(listing.marks, [(("inside4".into(), "10.96.0.1 . 6 . 80".into()), 0x6b00_0009)].into());
        for (rules, element, is_intact) in [(rules, element, true), (1, element, false), (rules, "", false)] {
            let listing = Listing::parse(&json(rules, element)).unwrap();
            assert_eq!(listing.has([&wanted].into_iter()), is_intact, "{rules} rules, {element:?}");
        }
        assert!(!Listing::default().has([&wanted].into_iter()));
        assert!(Listing::parse("no JSON").is_err());
    }
}
