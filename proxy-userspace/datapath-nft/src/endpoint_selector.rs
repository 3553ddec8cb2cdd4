//! Selectors: how an endpoint is chosen for a packet, and the chains that do it.
//!
//! Invariant: a selector is a number that encodes everything its chain depends on, so one chain serves every Service with the
//! same selector.

use model::Family;

use crate::{
    chain::Chain,
    elements::{Element, Elements, Value},
    expressions::{Register, Rule},
    schema::{Bytes, Map, Parts},
    verdict::Verdict,
};

/// How an endpoint is selected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Selector {
    /// How the frontend is matched.
    pub(super) by: MatchKey,
    /// Which set of the service port, 0 to 2.
    pub(super) set: u32,
    /// The number of endpoints in the set, up to [`Selector::max_count`].
    pub(super) count: u32,
    /// The timeout of session affinity in seconds; 0 without affinity.
    pub(super) affinity: u32,
}

/// What of the destination identifies the service port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum MatchKey {
    /// Address, protocol and port.
    Address,
    /// Protocol and port, at any address of this host where node ports are served.
    NodePort,
}

impl MatchKey {
    /// Both.
    pub(super) const ALL: [Self; 2] = [Self::Address, Self::NodePort];

    /// Selects a value by variant.
    pub(super) fn or<T>(self, address: T, node_port: T) -> T {
        match self {
            Self::Address => address,
            Self::NodePort => node_port,
        }
    }

    /// The map of policies.
    pub(super) fn frontends(self) -> Map {
        self.or(Map::Frontends, Map::NodeFrontends)
    }

    /// The map of selectors for internal traffic.
    pub(super) fn internal(self) -> Map {
        self.or(Map::Internal, Map::NodeInternal)
    }

    /// The map of selectors for external traffic.
    pub(super) fn external(self) -> Map {
        self.or(Map::External, Map::NodeExternal)
    }

    /// The map of endpoints.
    pub(super) fn endpoints(self) -> Map {
        self.or(Map::Endpoints, Map::NodeEndpoints)
    }

    /// The map of service ports with session affinity.
    pub(super) fn service_ports(self) -> Map {
        self.or(Map::ServicePorts, Map::NodeServicePorts)
    }

    /// The verdict map from selectors to their chains.
    pub(super) fn selectors(self) -> Map {
        self.or(Map::Selectors, Map::NodeSelectors)
    }
}

/// The position of the set number in a slot.
pub(super) const SET_SHIFT: u32 = 24;
/// A selector as a word: two bits for the set, one for session affinity, then the count, or timeout and count.
const SELECTOR_SET_SHIFT: u32 = 30;
const HAS_AFFINITY: u32 = 1 << 29;
const AFFINITY_COUNT_BITS: u32 = 12;
/// Instead of a selector: rejected, there is no endpoint.
pub(super) const REFUSE: u32 = 3 << SELECTOR_SET_SHIFT;
/// Instead of a selector: dropped, the policy allows no endpoint here.
pub(super) const DROP: u32 = REFUSE | 1;
/// The longest affinity that fits into a selector; longer than Kubernetes allows.
pub(super) const MAX_AFFINITY_SECONDS: u32 = HAS_AFFINITY >> AFFINITY_COUNT_BITS;

/// How long an unanswered client keeps its endpoint: about as long as it takes to connect with a few repetitions.
const UNANSWERED_SECONDS: u32 = 30;
/// How many of the last bits of an address tell unanswered clients apart: a service port has up to 4096 entries of them.
const UNANSWERED_BITS: u32 = 12;

impl Selector {
    /// The largest number of endpoints that fits into a selector.
    pub(super) fn max_count(affinity: u32) -> usize {
        if affinity > 0 { (1 << AFFINITY_COUNT_BITS) - 1 } else { (1 << SET_SHIFT) - 1 }
    }

    /// Its encoding.
    pub(super) fn word(self) -> u32 {
        let set = self.set << SELECTOR_SET_SHIFT;
        match self.affinity {
            0 => set | self.count,
            seconds => set | HAS_AFFINITY | (seconds - 1) << AFFINITY_COUNT_BITS | self.count,
        }
    }

    /// Decodes a word.
    pub(super) fn of(by: MatchKey, word: u32) -> Option<Self> {
        let set = word >> SELECTOR_SET_SHIFT;
        let rest = word & (HAS_AFFINITY - 1);
        let (affinity, count) = match word & HAS_AFFINITY {
            0 => (0, rest),
            _ => ((rest >> AFFINITY_COUNT_BITS) + 1, rest & ((1 << AFFINITY_COUNT_BITS) - 1)),
        };
        (set < 3).then_some(Self { by, set, count, affinity })
    }

    /// The name of its chain.
    pub(super) fn chain_name(self) -> String {
        let by = self.by.or("select", "node-select");
        let affinity = match self.affinity {
            0 => String::new(),
            seconds => format!("-for-{seconds}"),
        };
        format!("{by}-{}-of-{}{affinity}", self.set, self.count)
    }

    /// The element that maps it to its chain.
    pub(super) fn element(self, family: Family) -> (Element, Value) {
        let element = Element::new(family, self.by.selectors(), Bytes::new().number(self.word()));
        (element, Value::Verdict(Verdict::Goto(self.chain_name())))
    }

    /// The selectors among elements, of one table.
    pub(super) fn among(elements: &Elements) -> impl Iterator<Item = Self> {
        elements.keys().filter_map(|it| {
            let by = MatchKey::ALL.into_iter().find(|by| by.selectors() == it.map)?;
            Self::of(by, Parts::of(&it.key, it.family).number()?)
        })
    }

    /// Its chain.
    pub(super) fn chain(self, family: Family) -> Chain {
        Chain { name: self.chain_name(), hook: None, rules: self.rules(family) }
    }

    fn rules(self, family: Family) -> Vec<Rule> {
        let at = Registers::new(family);
        let mut rules = vec![Rule::new(family, "restore the priority").store_number_in_priority(0)];
        if self.affinity > 0 {
            rules.extend(self.affinity_rules(family));
        }
        rules.push(self.any(Rule::new(family, "random endpoint")).translate(at.next, at.port_after()));
        rules
    }

    /// Session affinity: the endpoint that the client has, while it is a member of the set, else a new one, which it keeps if it
    /// answers, see [`crate::affinity`].
    ///
    /// Membership changes in the same transaction as the endpoints, so that no packet goes to a removed one.
    fn affinity_rules(self, family: Family) -> [Rule; 4] {
        let at = Registers::new(family);
        let members = Map::members(self.set);
        let client =
            |rule: Rule| rule.look_up(self.by.service_ports(), at.key(self.by), at.address).source(at.client);
        let known = |comment| client(key(Rule::new(family, comment), self.by, at));
        let kept = |comment| known(comment).look_up(Map::Affinity, at.client, at.next);
        let unanswered = Map::AffinityUnanswered;
        [
            kept("affinity: the endpoint of this client")
                .if_in(members, at.address)
                .insert(Map::Affinity, at.client, at.next, self.affinity)
                .translate(at.next, at.port_after()),
            kept("affinity: no member any more").if_not_in(members, at.address).remove(
                Map::Affinity,
                at.client,
                at.next,
            ),
            group(known("affinity: no member any more, unanswered"), at)
                .look_up(unanswered, at.client, at.next)
                .if_not_in(members, at.address)
                .remove(unanswered, at.client, at.next),
            // Concurrent connections of one client insert once, and all use what was inserted. A full set inserts nothing.
            group(client(self.any(Rule::new(family, "affinity: random endpoint"))), at)
                .insert_new(unanswered, at.client, at.next, self.affinity.min(UNANSWERED_SECONDS))
                .look_up(unanswered, at.client, at.next)
                .if_in(members, at.address)
                .translate(at.next, at.port_after()),
        ]
    }

    /// Reads the destination and a random endpoint for it.
    fn any(self, rule: Rule) -> Rule {
        let at = Registers::new(rule.family);
        key(rule, self.by, at).random(at.next, self.count, self.set << SET_SHIFT).look_up(
            self.by.endpoints(),
            at.key(self.by),
            at.next,
        )
    }
}

/// The register allocation: the client, then an address with protocol and port (the destination, or the identity of a service
/// port), then what follows: a slot, an endpoint, or a source.
///
/// So client and service port are adjacent and form one key, as do service port and endpoint.
#[derive(Clone, Copy, Debug)]
pub(super) struct Registers {
    /// The number of registers of an address.
    pub(super) width: u32,
    /// The client's address.
    pub(super) client: Register,
    /// The address.
    pub(super) address: Register,
    /// The protocol.
    pub(super) protocol: Register,
    /// The port.
    pub(super) port: Register,
    /// What follows them.
    pub(super) next: Register,
}

impl Registers {
    /// For addresses of a family.
    pub(super) fn new(family: Family) -> Self {
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
    pub(super) fn key(self, by: MatchKey) -> Register {
        by.or(self.address, self.protocol)
    }

    /// The port of an endpoint at `next`.
    pub(super) fn port_after(self) -> Register {
        Register(self.next.0 + self.width)
    }
}

/// Reduces the client's address to the part that tells unanswered clients apart.
pub(super) fn group(rule: Rule, at: Registers) -> Rule {
    rule.last_bits(at.client, UNANSWERED_BITS)
}

/// Reads the destination as a frontend key.
pub(super) fn key(rule: Rule, by: MatchKey, at: Registers) -> Rule {
    let rule = match by {
        MatchKey::Address => rule.destination(at.address),
        MatchKey::NodePort => rule,
    };
    rule.protocol(at.protocol).destination_port(at.port)
}
