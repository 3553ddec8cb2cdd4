//! Picks: how an endpoint is found for a packet, and the chains that do it.
//!
//! The one rule: a pick is a number, which says all that its chains depend on; so they serve every Service that has it.

use model::Family;

use crate::{
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

    /// The map of service ports whose clients keep their endpoints.
    pub(super) fn service_ports(self) -> Map {
        self.or(Map::ServicePorts, Map::NodeServicePorts)
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

    /// The name of the chain that does it.
    pub(super) fn chain_name(self) -> String {
        let by = self.by.or("pick", "node-pick");
        let affinity = match self.affinity {
            0 => String::new(),
            seconds => format!("-for-{seconds}"),
        };
        format!("{by}-{}-of-{}{affinity}", self.set, self.count)
    }

    /// The element that leads to its chain.
    pub(super) fn element(self, family: Family) -> (Element, Value) {
        let element = Element::new(family, self.by.picks(), Bytes::new().number(self.word()));
        (element, Value::Verdict(Verdict::Goto(self.chain_name())))
    }

    /// Its chain.
    pub(super) fn chain(self, family: Family) -> Chain {
        Chain { name: self.chain_name(), hook: None, rules: self.rules(family) }
    }

    fn rules(self, family: Family) -> Vec<Rule> {
        let at = Registers::new(family);
        let mut rules = vec![Rule::new(family, "the number has arrived").carry_number(0)];
        if self.affinity > 0 {
            rules.extend(self.keeping_rules(family));
        }
        rules.push(self.any(Rule::new(family, "one of them")).translate(at.next, at.port_after()));
        rules
    }

    /// For a client that keeps its endpoint: the one it has, while that may be used here, or else a new one.
    ///
    /// Whether it may is asked of what changes together with the endpoints, so that no packet goes to one that is gone.
    fn keeping_rules(self, family: Family) -> [Rule; 3] {
        let at = Registers::new(family);
        let members = Map::members(self.set);
        let client =
            |rule: Rule| rule.look_up(self.by.service_ports(), at.key(self.by), at.address).source(at.client);
        let kept = |comment| {
            client(key(Rule::new(family, comment), self.by, at)).look_up(Map::Affinity, at.client, at.next)
        };
        let note = |rule: Rule| rule.remember(Map::Affinity, at.client, at.next, self.affinity);
        [
            note(kept("the endpoint that this client has").if_in(members, at.address))
                .translate(at.next, at.port_after()),
            kept("one that is not among them any more").if_not_in(members, at.address).forget(
                Map::Affinity,
                at.client,
                at.next,
            ),
            // Who connects twice at a time is noted once: what is noted counts. Where there is no room, nothing is.
            note(client(self.any(Rule::new(family, "one of them, which it keeps"))))
                .look_up(Map::Affinity, at.client, at.next)
                .if_in(members, at.address)
                .translate(at.next, at.port_after()),
        ]
    }

    /// Reads where the packet goes, and an endpoint for it.
    fn any(self, rule: Rule) -> Rule {
        let at = Registers::new(rule.family());
        key(rule, self.by, at).random(at.next, self.count, self.set << SET_SHIFT).look_up(
            self.by.endpoints(),
            at.key(self.by),
            at.next,
        )
    }
}

/// Where things are in the registers: the client, then an address with protocol and port, which may be the packet's
/// destination or name a service port, and then what comes after it: a slot, an endpoint, or a source.
///
/// So client and service port are one key, and service port and endpoint another.
#[derive(Clone, Copy, Debug)]
pub(super) struct Registers {
    /// How many an address takes.
    pub(super) width: u32,
    /// The client's address.
    pub(super) client: Register,
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
            client: Register(0),
            address: Register(width),
            protocol: Register(2 * width),
            port: Register(2 * width + 1),
            next: Register(2 * width + 2),
        }
    }

    /// Where a key begins that a frontend is looked up by.
    pub(super) fn key(self, by: By) -> Register {
        by.or(self.address, self.protocol)
    }

    /// The port of an endpoint that comes after them.
    fn port_after(self) -> Register {
        Register(self.next.0 + self.width)
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
