//! The numbers of service ports with session affinity, and of their members.
//!
//! Invariant: a member keeps its number while it is one, over changes and restarts.
//! A rule keeps one number at a time, in the packet's priority, so that of a member includes that of its service port.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    hash::Hasher as _,
    net::SocketAddr,
};

use datapath::FrontendAddress;
use twox_hash::XxHash64;

use crate::encode::{expressions::Rule, schema::Bytes};

/// The bits that all numbers have, see [`crate::encode::schema::Field::Number`].
const ALWAYS: u32 = 1 << 31 | 1;
const SERVICE_PORT_SHIFT: u32 = 15;
const MEMBER_SHIFT: u32 = 1;
const MAX_SERVICE_PORTS: u32 = (1 << (31 - SERVICE_PORT_SHIFT)) - 1;
/// More than the sets of a service port can have together.
const MEMBERS: u32 = (1 << (SERVICE_PORT_SHIFT - MEMBER_SHIFT)) - 1;
/// The service port in the number of a member.
pub(crate) const SERVICE_PORT_MASK: u32 = ALWAYS | MAX_SERVICE_PORTS << SERVICE_PORT_SHIFT;
/// Why a service port has no session affinity.
pub(crate) const TOO_MANY: &str = "too many service ports with session affinity; it is served without";

/// The numbers of a service port with session affinity and of its members.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Numbers {
    /// That of the service port, which no member has.
    pub(crate) service_port: u32,
    members: Vec<Option<SocketAddr>>,
}

impl Numbers {
    pub(crate) fn new(service_port: u32) -> Self {
        Self { service_port, members: Vec::new() }
    }

    /// Whether a number can be that of a service port.
    pub(crate) fn is_service_port(number: u32) -> bool {
        number & ALWAYS == ALWAYS && number & !SERVICE_PORT_MASK == 0
    }

    /// Gives new members the numbers of those that are gone. Clients of a removed member go to the one that replaces it.
    pub(crate) fn update(&mut self, members: &BTreeSet<SocketAddr>) {
        for it in &mut self.members {
            *it = it.filter(|it| members.contains(it));
        }
        let known: HashSet<_> = self.members.iter().flatten().copied().collect();
        let mut free = 0;
        for new in members.iter().filter(|it| !known.contains(it)) {
            while self.members.get(free).is_some_and(Option::is_some) {
                free += 1;
            }
            self.place(free, *new);
        }
        while self.members.last().is_some_and(Option::is_none) {
            self.members.pop();
        }
    }

    /// Takes over a member that has a number of this service port.
    pub(crate) fn restore(&mut self, number: u32, member: SocketAddr) {
        let position = (number & !SERVICE_PORT_MASK) >> MEMBER_SHIFT;
        if let Some(position) = position.checked_sub(1) {
            self.place(position as usize, member);
        }
    }

    fn place(&mut self, position: usize, member: SocketAddr) {
        if self.members.len() <= position {
            self.members.resize(position + 1, None);
        }
        self.members[position] = Some(member);
    }

    pub(crate) fn members(&self) -> HashMap<SocketAddr, u32> {
        let number = |position: u32| self.service_port | position << MEMBER_SHIFT;
        let numbered = (1..=MEMBERS).zip(&self.members);
        numbered.filter_map(|(position, it)| Some(((*it)?, number(position)))).collect()
    }
}

/// A number for a service port, which does not depend on others unless they have the same; `None` if all are taken.
pub(crate) fn free_number(identity: FrontendAddress, is_taken: impl Fn(u32) -> bool) -> Option<u32> {
    let mut hasher = XxHash64::with_seed(0);
    hasher.write(&Bytes::frontend(identity).0);
    let first = hasher.finish() as u32;
    let mut numbers = (0..=MAX_SERVICE_PORTS).map(|it| ALWAYS | first.wrapping_add(it) << SERVICE_PORT_SHIFT);
    numbers.find(|it| !is_taken(*it))
}

/// Continues if the packet's priority is the number of a member, and not only of a service port.
pub(crate) fn if_member(rule: Rule) -> Rule {
    rule.if_masked_priority_is_not(ALWAYS | MEMBERS << MEMBER_SHIFT, ALWAYS)
}

/// A timeout as a number.
pub(crate) fn seconds_word(seconds: u32) -> u32 {
    ALWAYS | seconds << MEMBER_SHIFT
}

/// The timeout in a number.
pub(crate) fn seconds_of(word: u32) -> u32 {
    (word & !ALWAYS) >> MEMBER_SHIFT
}
