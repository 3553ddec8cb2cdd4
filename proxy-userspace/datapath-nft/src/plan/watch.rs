//! Chains that see every packet, not only the first one of a connection.
//!
//! Invariant: they exist only while there is something to see, so that other traffic does not pay for it.

use model::Family;

use crate::{
    encode::{
        chain::{Chain, Hook},
        elements::{Element, Elements, Value},
        expressions::Rule,
        schema::{Bytes, Map, Parts},
        verdict::Verdict,
    },
    plan::{affinity, removed_udp},
};

/// What to look for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Watch {
    /// Clients that were answered, see [`crate::plan::affinity`].
    Answered = 0x0001_0001,
    /// Packets to removed endpoints, see [`crate::plan::removed_udp`].
    RemovedUdp = 0x0001_0002,
}

impl Watch {
    /// All of them.
    pub(crate) const ALL: [Self; 2] = [Self::Answered, Self::RemovedUdp];

    /// The element that says that it is on.
    pub(crate) fn element(self, family: Family) -> (Element, Value) {
        (Element::new(family, Map::Watches, Bytes::new().number(self as u32)), Value::None)
    }

    /// Those among elements, of one table.
    pub(crate) fn among(elements: &Elements) -> impl Iterator<Item = Self> {
        let numbers = elements.keys().filter(|it| it.map == Map::Watches);
        let numbers = numbers.filter_map(|it| Parts::of(&it.key, it.family).number());
        numbers.filter_map(|number| Self::ALL.into_iter().find(|it| *it as u32 == number))
    }

    /// The names of its chains, each before those that it refers to.
    pub(crate) fn chain_names(self) -> impl Iterator<Item = String> {
        self.chains(Family::V4).map(|it| it.name)
    }

    /// Its chains, each before those that it refers to.
    pub(crate) fn chains(self, family: Family) -> impl Iterator<Item = Chain> {
        let rules = match self {
            Self::Answered => affinity::answered(family),
            Self::RemovedUdp => vec![removed_udp::rule(family)],
        };
        let jump = |rule: Rule| rule.verdict(&Verdict::Jump(self.name().into()));
        let jumps = match self {
            Self::Answered => vec![jump(Rule::new(family, "every packet"))],
            Self::RemovedUdp => removed_udp::POD_INTERFACES
                .map(|kind| jump(Rule::new(family, format!("packets of {kind}")).if_interface_kind(kind)))
                .into(),
        };
        let hooked = move |(name, hook): &(&str, Hook)| Chain {
            name: (*name).to_owned(),
            hook: Some(*hook),
            rules: jumps.clone(),
        };
        let own = Chain { name: self.name().to_owned(), hook: None, rules };
        let next = (self == Self::Answered).then(|| affinity::by_timeout(family));
        self.hooks().iter().map(hooked).chain([own]).chain(next)
    }

    fn name(self) -> &'static str {
        match self {
            Self::Answered => "answered",
            Self::RemovedUdp => "removed-udp",
        }
    }

    fn hooks(self) -> &'static [(&'static str, Hook)] {
        match self {
            Self::Answered => {
                &[("answered-prerouting", Hook::PreroutingEach), ("answered-output", Hook::OutputEach)]
            }
            // Sockets of the host's network are terminated.
            Self::RemovedUdp => &[("removed-udp-prerouting", Hook::PreroutingEach)],
        }
    }
}
