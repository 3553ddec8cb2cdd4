//! Chains that see every packet, not only the first one of a connection.
//!
//! Invariant: they exist only while there is something to see, so that other traffic does not pay for it.

use model::Family;

use crate::{
    encode::{
        chain::{Chain, Hook},
        elements::{Element, Value},
        expressions::{Rule, Verdict},
        schema::{Bytes, Map},
    },
    plan::{affinity, forwarding, removed_udp},
};

/// What to look for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Watch {
    /// Clients that were answered, see [`crate::plan::affinity`].
    Answered = 0x0001_0001,
    /// Packets to removed endpoints, see [`crate::plan::removed_udp`].
    RemovedUdp = 0x0001_0002,
    /// The first packets of connections that others have forwarded whole, see [`crate::plan::forwarding`].
    Forwarded = 0x0001_0003,
    /// Packets of unknown connections that others have forwarded whole.
    SecondChance = 0x0001_0004,
}

impl Watch {
    pub(crate) const ALL: [Self; 4] = [Self::Answered, Self::RemovedUdp, Self::Forwarded, Self::SecondChance];

    /// The element that says that it is on.
    pub(crate) fn element(self, family: Family) -> (Element, Value) {
        (Element::new(family, Map::Watches, Bytes::new().number(self as u32)), Value::None)
    }

    /// The one whose element has this number.
    pub(crate) fn of(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|it| *it as u32 == number)
    }

    /// Its chains, each before those that it refers to.
    pub(crate) fn chains(self, family: Family) -> Vec<Chain> {
        let to = |rule: Rule, chain: &str| rule.verdict(&Verdict::Jump(chain.into()));
        match self {
            Self::Answered => {
                let jump = || [to(Rule::new(family, "every packet"), "answered")];
                vec![
                    Chain::base("answered-prerouting", Hook::PREROUTING_EACH, jump()),
                    Chain::base("answered-output", Hook::OUTPUT_EACH, jump()),
                    Chain::new("answered", affinity::answered(family)),
                    affinity::by_timeout(family),
                ]
            }
            Self::RemovedUdp => {
                let from = |kind| Rule::new(family, format!("packets of {kind}")).if_interface_kind(kind);
                let jumps = removed_udp::POD_INTERFACES.map(|kind| to(from(kind), "removed-udp"));
                vec![
                    // Sockets of the host's network are terminated.
                    Chain::base("removed-udp-prerouting", Hook::PREROUTING_EACH, jumps),
                    Chain::new("removed-udp", [removed_udp::rule(family)]),
                ]
            }
            Self::Forwarded => vec![forwarding::services(family)],
            Self::SecondChance => vec![forwarding::second_chance(family)],
        }
    }
}
