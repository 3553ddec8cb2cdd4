//! Lists of source ranges, each written once however many frontends it restricts.
//!
//! Invariant: a list is found by its content. Equal lists have one number, one set and one chain, and different lists never
//! share a number, even if their hashes do.

use std::{
    collections::HashMap,
    hash::{Hash, Hasher},
    net::IpAddr,
    sync::Arc,
};

use ipnet::IpNet;
use model::Family;
use twox_hash::XxHash64;

use crate::{
    encode::{
        chain::Chain,
        elements::{Element, Elements, Value},
        expressions::{Rule, Verdict},
        schema::{Bytes, Map, list_name},
    },
    plan::endpoint_selector::Registers,
};

/// In the packet's priority: the source is allowed. No list has this number, nor does it encode a policy or a selector.
pub(crate) const ALLOWED: u32 = u32::MAX;
/// The bits that all numbers of lists have, see [`crate::encode::schema::Field::Number`].
const ALWAYS: u32 = 1 << 31 | 1;

/// Ranges of addresses in ascending order, which neither overlap nor touch, so that equal sets of addresses are equal lists.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SourceList {
    hash: u64,
    ranges: Vec<(IpAddr, IpAddr)>,
}

impl Hash for SourceList {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.hash.hash(state);
    }
}

impl SourceList {
    /// The addresses in these networks, of one family.
    pub(crate) fn new(nets: impl IntoIterator<Item = IpNet>) -> Self {
        Self::merged(nets.into_iter().map(|it| (it.network(), it.broadcast())).collect())
    }

    /// This list with one more address.
    pub(crate) fn with(&self, address: IpAddr) -> Self {
        Self::merged([&self.ranges[..], &[(address, address)]].concat())
    }

    fn merged(mut all: Vec<(IpAddr, IpAddr)>) -> Self {
        all.sort_unstable();
        let mut ranges: Vec<(IpAddr, IpAddr)> = Vec::new();
        for (first, last) in all {
            match ranges.last_mut() {
                Some((_, end)) if next(*end).is_none_or(|it| first <= it) => *end = last.max(*end),
                _ => ranges.push((first, last)),
            }
        }
        let mut hasher = XxHash64::with_seed(0);
        for (first, last) in &ranges {
            hasher.write(&Bytes::new().address(*first).address(*last).0);
        }
        Self { hash: hasher.finish(), ranges }
    }

    pub(crate) fn contains(&self, address: IpAddr) -> bool {
        let after = self.ranges.partition_point(|(first, _)| *first <= address);
        after.checked_sub(1).is_some_and(|it| address <= self.ranges[it].1)
    }

    fn family(&self) -> Family {
        self.ranges.first().map_or(Family::V4, |(first, _)| Family::of(*first))
    }

    /// The elements of its set, two per range (the kernel marks where a range begins, and where the next address is outside),
    /// and the one that leads to its chain.
    fn elements(&self, number: u32) -> Elements {
        let family = self.family();
        let boundary = |it: IpAddr| Element {
            list: number,
            ..Element::new(family, Map::SourceRanges, Bytes::new().address(it))
        };
        let mut elements = Elements::from([chain_element(family, number)]);
        for (first, last) in &self.ranges {
            elements.insert(boundary(*first), Value::None);
            elements.extend(next(*last).map(|it| (boundary(it), Value::RangeEnd)));
        }
        elements
    }
}

/// The address after this one; none after the last one of its family.
fn next(address: IpAddr) -> Option<IpAddr> {
    match address {
        IpAddr::V4(it) => it.to_bits().checked_add(1).map(|it| IpAddr::V4(it.into())),
        IpAddr::V6(it) => it.to_bits().checked_add(1).map(|it| IpAddr::V6(it.into())),
    }
}

/// The element that leads from a number to its chain.
pub(crate) fn chain_element(family: Family, number: u32) -> (Element, Value) {
    let element = Element::new(family, Map::SourceChains, Bytes::new().number(number));
    (element, Value::Verdict(Verdict::Goto(list_name(number))))
}

/// The numbers of the lists whose chains are among elements, of one table.
pub(crate) fn among(elements: &Elements) -> impl Iterator<Item = u32> {
    let chains = elements.keys().filter(|it| it.map == Map::SourceChains);
    chains.filter_map(|it| it.parts().number())
}

/// The chain that tells whether a packet's source is in a list.
pub(crate) fn chain(family: Family, number: u32) -> Chain {
    let at = Registers::new(family).next;
    let rule =
        Rule::new(family, "in a range").source(at).if_in_list(number, at).store_number_in_priority(ALLOWED);
    Chain::new(list_name(number), [rule])
}

#[derive(Debug, Default)]
pub(crate) struct SourceLists {
    /// The number of each, and how many Services use it.
    numbers: HashMap<Arc<SourceList>, (u32, usize)>,
    lists: HashMap<u32, Arc<SourceList>>,
}

impl SourceLists {
    /// The number of a list in use.
    pub(crate) fn number(&self, list: &Arc<SourceList>) -> Option<u32> {
        self.numbers.get(list).map(|(number, _)| *number)
    }

    /// Counts a use; returns what to add for the first one.
    pub(crate) fn acquire(&mut self, list: &Arc<SourceList>) -> Elements {
        if let Some((_, uses)) = self.numbers.get_mut(list) {
            *uses += 1;
            return Elements::new();
        }
        // What of the hash fits; the next free number if another list has it.
        let mut number = list.hash as u32 | ALWAYS;
        while number == ALLOWED || self.lists.contains_key(&number) {
            number = number.wrapping_add(2) | ALWAYS;
        }
        self.lists.insert(number, Arc::clone(list));
        self.numbers.insert(Arc::clone(list), (number, 1));
        list.elements(number)
    }

    /// Ends a use; returns what to delete after the last one.
    pub(crate) fn release(&mut self, list: &Arc<SourceList>) -> Elements {
        let Some((number, uses)) = self.numbers.get_mut(list) else { return Elements::new() };
        *uses -= 1;
        if *uses > 0 {
            return Elements::new();
        }
        let number = *number;
        self.numbers.remove(list);
        self.lists.remove(&number);
        list.elements(number)
    }

    pub(crate) fn elements(&self) -> impl Iterator<Item = (Element, Value)> {
        self.lists.iter().flat_map(|(number, list)| list.elements(*number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(nets: &[&str]) -> SourceList {
        SourceList::new(nets.iter().map(|it| it.parse().unwrap()))
    }

    #[track_caller]
    fn check(nets: &[&str], expect: &[(&str, &str)]) {
        let expect: Vec<_> = expect.iter().map(|(a, b)| (a.parse().unwrap(), b.parse().unwrap())).collect();
        assert_eq!(list(nets).ranges, expect);
    }

    #[test]
    fn overlapping_touching_and_equal_ranges_are_merged() {
        check(
            &["10.0.2.0/24", "10.0.1.0/24", "10.0.1.7/32", "10.0.1.0/24", "10.0.4.0/24"],
            &[("10.0.1.0", "10.0.2.255"), ("10.0.4.0", "10.0.4.255")],
        );
        check(&["255.0.0.0/8", "255.255.255.255/32"], &[("255.0.0.0", "255.255.255.255")]);
    }

    #[test]
    fn the_last_address_has_no_end_mark() {
        assert_eq!(list(&["ffff::/16"]).elements(1).len(), 2);
        assert_eq!(list(&["fffe::/16"]).elements(1).len(), 3);
    }

    #[test]
    fn an_address_is_found_in_its_range_only() {
        let list = list(&["10.0.1.0/24", "10.0.3.0/24"]);
        for (address, expect) in
            [("10.0.0.255", false), ("10.0.1.0", true), ("10.0.1.255", true), ("10.0.2.0", false)]
        {
            assert_eq!(list.contains(address.parse().unwrap()), expect, "{address}");
        }
    }

    #[test]
    fn lists_whose_hashes_collide_get_numbers_of_their_own() {
        let mut lists = SourceLists::default();
        let [a, b] = ["10.0.0.0/8", "11.0.0.0/8"].map(|it| Arc::new(SourceList { hash: 7, ..list(&[it]) }));
        assert_eq!((lists.acquire(&a).len(), lists.acquire(&b).len(), lists.acquire(&a).len()), (3, 3, 0));
        assert_eq!([&a, &b].map(|it| lists.number(it)), [Some(0x8000_0007), Some(0x8000_0009)]);
        assert_eq!((lists.release(&a).len(), lists.release(&a).len()), (0, 3));
        assert_eq!([&a, &b].map(|it| lists.number(it)), [None, Some(0x8000_0009)]);
    }
}
