//! Selectors: how an endpoint is chosen for a packet, and the chains that do it.
//!
//! Invariant: a selector is a number that encodes everything its chain depends on, so one chain serves every Service with the
//! same selector.

use model::Family;

use crate::{
    encode::{
        chain::Chain,
        elements::{Element, Value},
        expressions::{Register, Rule, Verdict},
        schema::{Bytes, Map, UNANSWERED_SECONDS},
    },
    plan::affinity_numbers::{SERVICE_PORT_MASK, if_member},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Selector {
    pub(crate) by: MatchKey,
    /// Which set of the service port, 0 to 2.
    pub(crate) set: u32,
    /// The number of endpoints in the set, up to [`Selector::max_count`].
    pub(crate) count: u32,
    /// The timeout of session affinity in seconds; 0 without affinity.
    pub(crate) affinity: u32,
}

/// What of the destination identifies the service port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum MatchKey {
    /// Address, protocol and port.
    Address,
    /// Protocol and port, at any address of this host where node ports are served.
    NodePort,
}

impl MatchKey {
    pub(crate) const ALL: [Self; 2] = [Self::Address, Self::NodePort];

    /// Selects a value by variant.
    pub(crate) fn or<T>(self, address: T, node_port: T) -> T {
        match self {
            Self::Address => address,
            Self::NodePort => node_port,
        }
    }

    /// This map, or that of the same for node ports.
    pub(crate) fn map(self, map: Map) -> Map {
        self.or(map, map.of_node_ports())
    }
}

/// A slot as a word: the set, the block, and the position in it from 1 on.
const SLOT: u32 = 1 << 31;
const SLOT_SET_SHIFT: u32 = 29;
const SLOT_BLOCK_SHIFT: u32 = 16;
/// How many slots are in a block: no slot has a half of zero, see [`crate::encode::schema::Field::Number`].
const BLOCK_SIZE: u32 = (1 << SLOT_BLOCK_SHIFT) - 1;
/// A selector with session affinity as a word: the set, the timeout, and the count.
const HAS_AFFINITY: u32 = 1 << 31;
const AFFINITY_SET_SHIFT: u32 = 29;
const AFFINITY_COUNT_BITS: u32 = 12;
/// One without: the set, the count, and a bit that is always set.
const NO_AFFINITY: u32 = 1 << 30 | 1;
const SET_SHIFT: u32 = 28;
const COUNT_SHIFT: u32 = 1;
const COUNT_BITS: u32 = 24;
/// Instead of a selector: rejected, there is no endpoint.
pub(crate) const REFUSE: u32 = NO_AFFINITY | 3 << SET_SHIFT;
/// Instead of a selector: dropped, the policy allows no endpoint here.
pub(crate) const DROP: u32 = REFUSE | 1 << COUNT_SHIFT;
/// The longest affinity that fits into a selector; longer than Kubernetes allows.
pub(crate) const MAX_AFFINITY_SECONDS: u32 = 1 << (AFFINITY_SET_SHIFT - AFFINITY_COUNT_BITS);
/// Slots and numbers of session affinity are not below it, and a packet that leaves with one had it from us.
pub(crate) const FIRST_NUMBER_OF_A_TRANSLATED_PACKET: u32 = SLOT | 1;

/// How many of the last bits of an address tell unanswered clients apart: a frontend has up to 4096 entries of them.
const UNANSWERED_BITS: u32 = 12;

pub(crate) fn slot_word(set: u32, slot: u32) -> u32 {
    let (block, position) = (slot / BLOCK_SIZE, slot % BLOCK_SIZE + 1);
    SLOT | set << SLOT_SET_SHIFT | block << SLOT_BLOCK_SHIFT | position
}

/// The set and the slot of a word.
pub(crate) fn slot_of(word: u32) -> (u32, u32) {
    let block = (word & ((1 << SLOT_SET_SHIFT) - 1)) >> SLOT_BLOCK_SHIFT;
    let position = word & BLOCK_SIZE;
    ((word & !SLOT) >> SLOT_SET_SHIFT, (block * BLOCK_SIZE + position).saturating_sub(1))
}

impl Selector {
    /// The largest number of endpoints that fits into a selector.
    pub(crate) fn max_count(affinity: u32) -> usize {
        (1 << if affinity > 0 { AFFINITY_COUNT_BITS } else { COUNT_BITS }) - 1
    }

    pub(crate) fn word(self) -> u32 {
        match self.affinity {
            0 => NO_AFFINITY | self.set << SET_SHIFT | self.count << COUNT_SHIFT,
            seconds => {
                HAS_AFFINITY
                    | self.set << AFFINITY_SET_SHIFT
                    | (seconds - 1) << AFFINITY_COUNT_BITS
                    | self.count
            }
        }
    }

    pub(crate) fn of(by: MatchKey, word: u32) -> Option<Self> {
        let bits = |shift: u32, count: u32| word >> shift & ((1 << count) - 1);
        let (set, affinity, count) = match word & HAS_AFFINITY {
            0 => (bits(SET_SHIFT, 2), 0, bits(COUNT_SHIFT, COUNT_BITS)),
            _ => (
                bits(AFFINITY_SET_SHIFT, 2),
                bits(AFFINITY_COUNT_BITS, AFFINITY_SET_SHIFT - AFFINITY_COUNT_BITS) + 1,
                bits(0, AFFINITY_COUNT_BITS),
            ),
        };
        (set < 3).then_some(Self { by, set, count, affinity })
    }

    fn chain_name(self) -> String {
        let by = self.by.or("select", "node-select");
        let affinity = match self.affinity {
            0 => String::new(),
            seconds => format!("-for-{seconds}"),
        };
        format!("{by}-{}-of-{}{affinity}", self.set, self.count)
    }

    /// The element that maps it to its chain.
    pub(crate) fn element(self, family: Family) -> (Element, Value) {
        let element = Element::new(family, self.by.map(Map::Selectors), Bytes::new().number(self.word()));
        (element, Value::Verdict(Verdict::Goto(self.chain_name())))
    }

    pub(crate) fn chain(self, family: Family) -> Chain {
        Chain::new(self.chain_name(), self.rules(family))
    }

    fn rules(self, family: Family) -> Vec<Rule> {
        let rule = |comment| Rule::new(family, comment);
        if self.affinity > 0 {
            return self.affinity_rules(family).into();
        }
        let at = Registers::new(family);
        let blocks = (0..self.count).step_by(BLOCK_SIZE as usize);
        let block = |first| {
            let rest = self.count - first;
            let rule = rule("random endpoint");
            let rule = if rest > BLOCK_SIZE { rule.if_random_below(BLOCK_SIZE, rest) } else { rule };
            let rule = rule.store_random_in_priority(rest.min(BLOCK_SIZE), slot_word(self.set, first));
            key(rule, self.by, at)
                .priority(at.next)
                .look_up(self.by.map(Map::Endpoints), at.key(self.by), at.next)
                .translate(at.next, at.port_after())
        };
        blocks.map(block).collect()
    }

    /// Session affinity: the endpoint that the client has, while it is a member of the set, else a new one, which it keeps if it
    /// answers, see [`crate::plan::affinity`].
    ///
    /// Membership changes in the same transaction as the endpoints, so that no packet goes to a removed one.
    fn affinity_rules(self, family: Family) -> [Rule; 7] {
        let at = Registers::new(family);
        let rule = |comment| Rule::new(family, comment);
        let unanswered = Map::AffinityUnanswered;
        let to_member = |rule: Rule| {
            rule.protocol(at.protocol)
                .priority(at.port)
                .look_up(Map::members(self.set), at.protocol, at.next)
                .translate(at.next, at.port_after())
        };
        let any = |rule: Rule| {
            key(rule.store_random_in_priority(self.count, slot_word(self.set, 0)), self.by, at)
                .priority(at.next)
                .store_in_priority(self.by.map(Map::AffinityEndpoints), at.key(self.by))
        };
        [
            key(rule("affinity: the member that this client has"), self.by, at)
                .store_in_priority(self.by.map(Map::ServicePorts), at.key(self.by))
                .source(at.client)
                .priority(at.address)
                .store_in_priority(Map::Affinity, at.client),
            to_member(client(if_member(rule("affinity: the endpoint of this client")), at).insert(
                Map::Affinity,
                at.client,
                at.next,
                self.affinity,
            )),
            client(if_member(rule("affinity: no member any more")), at)
                .remove(Map::Affinity, at.client, at.next)
                .mask_priority(SERVICE_PORT_MASK),
            to_member(
                group(rule("affinity: the endpoint of this client, unanswered"), at)
                    .store_in_priority(unanswered, at.client),
            ),
            group(if_member(rule("affinity: no member any more, unanswered")), at)
                .priority(at.next)
                .remove(unanswered, at.client, at.next),
            // Concurrent connections of one client insert once, and all use what was inserted. A full set inserts nothing.
            to_member(
                group(
                    group(any(rule("affinity: random endpoint")), at).priority(at.next).insert_new(
                        unanswered,
                        at.client,
                        at.next,
                        self.affinity.min(UNANSWERED_SECONDS),
                    ),
                    at,
                )
                .store_in_priority(unanswered, at.client),
            ),
            to_member(any(rule("random endpoint"))),
        ]
    }
}

/// The register allocation: the client, then the destination with protocol and port, then what follows: a slot, a member, an
/// endpoint, or a source.
///
/// So client and frontend are adjacent and form one key, as do frontend and slot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Registers {
    /// The number of registers of an address.
    pub(crate) width: u32,
    pub(crate) client: Register,
    pub(crate) address: Register,
    pub(crate) protocol: Register,
    pub(crate) port: Register,
    /// What follows them.
    pub(crate) next: Register,
}

impl Registers {
    pub(crate) fn new(family: Family) -> Self {
        let width = match family {
            Family::V4 => 1,
            Family::V6 => 4,
        };
        Self {
            width,
            client: Register(0),
            address: Register(width),
            protocol: Register(2 * width),
            port: Register(2 * width + 1),
            next: Register(2 * width + 2),
        }
    }

    /// The first register of a frontend key.
    pub(crate) fn key(self, by: MatchKey) -> Register {
        by.or(self.address, self.protocol)
    }

    /// The port of an endpoint at `next`.
    pub(crate) fn port_after(self) -> Register {
        Register(self.next.0 + self.width)
    }
}

/// Reads the client with the service port of the member in the packet's priority, and that member to `next`.
fn client(rule: Rule, at: Registers) -> Rule {
    rule.source(at.client).masked_priority(at.address, SERVICE_PORT_MASK).priority(at.next)
}

/// Reads the client, reduced to the part that tells unanswered ones apart, with the frontend.
pub(crate) fn group(rule: Rule, at: Registers) -> Rule {
    key(some_bits(rule.source(at.client), at), MatchKey::Address, at)
}

/// Reduces the client's address to the part that tells unanswered clients apart.
pub(crate) fn some_bits(rule: Rule, at: Registers) -> Rule {
    rule.last_bits(at.client, UNANSWERED_BITS)
}

/// Reads the destination as a frontend key.
pub(crate) fn key(rule: Rule, by: MatchKey, at: Registers) -> Rule {
    let rule = match by {
        MatchKey::Address => rule.destination(at.address),
        MatchKey::NodePort => rule,
    };
    rule.protocol(at.protocol).destination_port(at.port)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether `nft` can read what it writes of a number.
    fn is_readable(word: u32) -> bool {
        word & 0xffff != 0 && word >> 16 != 0
    }

    #[test]
    fn every_selector_and_every_slot_has_a_word_of_its_own() {
        for affinity in [0, 1, 10_800, MAX_AFFINITY_SECONDS] {
            let counts = [1, 2, 4095, 65_535, 65_536, (1 << COUNT_BITS) - 1];
            for (set, count) in (0..3).flat_map(|set| counts.map(|it| (set, it))) {
                if count as usize <= Selector::max_count(affinity) {
                    let selector = Selector { by: MatchKey::Address, set, count, affinity };
                    assert_eq!(Selector::of(MatchKey::Address, selector.word()), Some(selector));
                    assert!(is_readable(selector.word()), "{selector:?}");
                }
            }
        }
        for word in [REFUSE, DROP] {
            assert!(is_readable(word) && Selector::of(MatchKey::Address, word).is_none());
        }
        for (set, slot) in
            (0..3).flat_map(|set| [0, 1, 65_534, 65_535, 65_536, 16_777_215].map(|it| (set, it)))
        {
            let word = slot_word(set, slot);
            assert_eq!(slot_of(word), (set, slot));
            assert!(is_readable(word) && word >= FIRST_NUMBER_OF_A_TRANSLATED_PACKET, "{word:08x}");
        }
    }
}
