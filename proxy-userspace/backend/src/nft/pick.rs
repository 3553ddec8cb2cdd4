//! Picks: how an endpoint is found for a packet, and the chains that do it.
//!
//! The one rule: a pick is a number, which says all that its chains depend on; so they serve every Service that has it.

use model::Family;

use super::{
    elements::{Element, Value},
    expressions::{Register, Rule},
    rules::Chain,
    schema::{Bytes, Map},
    tables::Verdict,
};

/// How an endpoint is picked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Pick {
    /// What the frontend is looked up by.
    pub(super) by: By,
    /// Which of the sets of its port it is, 0 to 2.
    pub(super) set: u32,
    /// One of so many endpoints, up to [`Pick::most`].
    pub(super) count: u32,
    /// For how many seconds a client keeps its endpoint; 0 if it does not.
    pub(super) affinity: u32,
}

/// What of the destination says which Service is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum By {
    /// Address, protocol and port.
    Address,
    /// Protocol and port, at any address of this host where node ports are served.
    NodePort,
}

impl By {
    /// Both.
    pub(super) const ALL: [Self; 2] = [Self::Address, Self::NodePort];

    /// The one or the other.
    pub(super) fn or<T>(self, address: T, node_port: T) -> T {
        match self {
            Self::Address => address,
            Self::NodePort => node_port,
        }
    }

    /// The map of behaviours.
    pub(super) fn frontends(self) -> Map {
        self.or(Map::Frontends, Map::NodeFrontends)
    }

    /// The map of picks for traffic from inside.
    pub(super) fn inside(self) -> Map {
        self.or(Map::Inside, Map::NodeInside)
    }

    /// The map of picks for traffic from outside.
    pub(super) fn outside(self) -> Map {
        self.or(Map::Outside, Map::NodeOutside)
    }

    /// The map of endpoints.
    pub(super) fn endpoints(self) -> Map {
        self.or(Map::Endpoints, Map::NodeEndpoints)
    }

    /// The map that leads to chains that pick.
    pub(super) fn picks(self) -> Map {
        self.or(Map::Picks, Map::NodePicks)
    }
}

/// Where the number of a set stands in a slot.
pub(super) const SET_SHIFT: u32 = 24;
/// A pick as it travels: two bits for the set, one that says whether there is an affinity, and then the count, or seconds and
/// count.
const PICK_SET_SHIFT: u32 = 30;
const IS_STICKY: u32 = 1 << 29;
const STICKY_COUNT_BITS: u32 = 12;
/// Instead of a pick: nobody serves it.
pub(super) const REFUSE: u32 = 3 << PICK_SET_SHIFT;
/// Instead of a pick: somebody serves it, but not here.
pub(super) const DROP: u32 = REFUSE | 1;
/// The longest affinity that a pick can hold, in seconds; longer than Kubernetes allows.
pub(super) const LONGEST_AFFINITY: u32 = IS_STICKY >> STICKY_COUNT_BITS;

impl Pick {
    /// How many endpoints one can be picked of.
    pub(super) fn most(affinity: u32) -> usize {
        if affinity > 0 { (1 << STICKY_COUNT_BITS) - 1 } else { (1 << SET_SHIFT) - 1 }
    }

    /// How it is written down.
    pub(super) fn word(self) -> u32 {
        let set = self.set << PICK_SET_SHIFT;
        match self.affinity {
            0 => set | self.count,
            seconds => set | IS_STICKY | (seconds - 1) << STICKY_COUNT_BITS | self.count,
        }
    }

    /// The pick that was written down as a word.
    pub(super) fn of(by: By, word: u32) -> Option<Self> {
        let set = word >> PICK_SET_SHIFT;
        let rest = word & (IS_STICKY - 1);
        let (affinity, count) = match word & IS_STICKY {
            0 => (0, rest),
            _ => ((rest >> STICKY_COUNT_BITS) + 1, rest & ((1 << STICKY_COUNT_BITS) - 1)),
        };
        (set < 3).then_some(Self { by, set, count, affinity })
    }

    /// The chain that does it.
    pub(super) fn chain(self) -> String {
        let by = self.by.or("pick", "node-pick");
        let affinity = match self.affinity {
            0 => String::new(),
            seconds => format!("-for-{seconds}"),
        };
        format!("{by}-{}-of-{}{affinity}", self.set, self.count)
    }

    /// The chain that notes whom a client keeps, if it does.
    fn remembering_chain(self) -> Option<String> {
        (self.affinity > 0).then(|| format!("remember-{}-of-{}-for-{}", self.set, self.count, self.affinity))
    }

    /// The elements that lead to its chains.
    pub(super) fn elements(self, family: Family) -> Vec<(Element, Value)> {
        let element = |map, chain| {
            let element = Element::new(family, map, Bytes::new().number(self.word()));
            (element, Value::Verdict(Verdict::Goto(chain)))
        };
        let mut elements = vec![element(self.by.picks(), self.chain())];
        // Where a connection went does not depend on how it was looked up; one chain will do.
        if self.by == By::Address {
            elements.extend(self.remembering_chain().map(|it| element(Map::Remembers, it)));
        }
        elements
    }

    /// Its chains.
    pub(super) fn chains(self, family: Family) -> Vec<Chain> {
        let mut chains = vec![Chain { name: self.chain(), hook: None, rules: self.rules(family) }];
        if self.by == By::Address {
            chains.extend(self.remembering_chain().map(|name| {
                let rules = self.remembering_rules(family);
                Chain { name, hook: None, rules }
            }));
        }
        chains
    }

    /// The map of those who keep an endpoint of this set.
    fn affinity_map(self) -> Map {
        Map::AFFINITY[(self.set as usize).min(Map::AFFINITY.len() - 1)]
    }

    fn rules(self, family: Family) -> Vec<Rule> {
        let at = Registers::new(family);
        let mut rules = Vec::new();
        if self.affinity > 0 {
            // It stays in the priority until the endpoint is noted.
            let kept = key(Rule::new(family, "the endpoint that this client has"), By::Address, at)
                .source(at.next)
                .look_up(self.affinity_map(), at.address, Register(0));
            rules.push(kept.translate(Register(0), at.after_address()));
        } else {
            rules.push(Rule::new(family, "the number has arrived").carry_number(0));
        }
        let any = key(Rule::new(family, "one of them"), self.by, at)
            .random(at.next, self.count, self.set << SET_SHIFT)
            .look_up(self.by.endpoints(), at.key(self.by), Register(0));
        rules.push(any.translate(Register(0), at.after_address()));
        rules
    }

    fn remembering_rules(self, family: Family) -> Vec<Rule> {
        let at = Registers::new(family);
        let note = Rule::new(family, "this client keeps its endpoint")
            .original_destination(at.address)
            .protocol(at.protocol)
            .original_port(at.port)
            .source(at.next)
            .destination(at.value())
            .destination_port(at.value_port())
            .remember(self.affinity_map(), at.address, at.value(), self.affinity);
        vec![Rule::new(family, "the number has arrived").carry_number(0), note]
    }
}

/// Where things are in the registers: first the destination's address, protocol and port, then what comes after them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Registers {
    /// How many an address takes.
    pub(super) width: u32,
    /// The address.
    pub(super) address: Register,
    /// The protocol.
    pub(super) protocol: Register,
    /// The port.
    pub(super) port: Register,
    /// What comes after them.
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
            address: Register(0),
            protocol: Register(width),
            port: Register(width + 1),
            next: Register(width + 2),
        }
    }

    /// Where a key begins that a frontend is looked up by.
    pub(super) fn key(self, by: By) -> Register {
        by.or(self.address, self.protocol)
    }

    /// What follows an address at the beginning.
    fn after_address(self) -> Register {
        Register(self.width)
    }

    /// What follows a key of a client and a frontend.
    fn value(self) -> Register {
        Register(self.next.0 + self.width)
    }

    fn value_port(self) -> Register {
        Register(self.value().0 + self.width)
    }
}

/// Reads where the packet goes.
pub(super) fn key(rule: Rule, by: By, at: Registers) -> Rule {
    let rule = match by {
        By::Address => rule.destination(at.address),
        By::NodePort => rule,
    };
    rule.protocol(at.protocol).destination_port(at.port)
}
