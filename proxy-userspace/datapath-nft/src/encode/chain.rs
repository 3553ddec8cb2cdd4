//! Chains with their hooks.

use crate::encode::expressions::Rule;

#[derive(Clone, Debug)]
pub(crate) struct Chain {
    pub(crate) name: String,
    /// Its netfilter hook, if it is a base chain.
    pub(crate) hook: Option<Hook>,
    pub(crate) rules: Vec<Rule>,
}

impl Chain {
    /// A chain to which rules of others lead.
    pub(crate) fn new(name: impl Into<String>, rules: impl Into<Vec<Rule>>) -> Self {
        Self { name: name.into(), hook: None, rules: rules.into() }
    }

    pub(crate) fn base(name: &str, hook: Hook, rules: impl Into<Vec<Rule>>) -> Self {
        Self { hook: Some(hook), ..Self::new(name, rules) }
    }
}

/// The first chain that translates a connection decides, so ours come before those of others, as kube-proxy's, at
/// `NF_IP_PRI_NAT_DST` (-100) and `NF_IP_PRI_NAT_SRC` (100). For other packets that is `NF_IP_PRI_MANGLE`: after
/// conntrack, `NF_IP_PRI_RAW`: before it, `NF_IP_PRI_FILTER`: after translation, or `NF_IP_PRI_LAST`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hook {
    pub(crate) kind: &'static str,
    /// `NF_INET_…`.
    pub(crate) number: u32,
    pub(crate) priority: i32,
}

impl Hook {
    /// Packets that arrive, before routing.
    pub(crate) const PREROUTING: Self = Self { kind: "nat", number: 0, priority: -102 };
    /// Packets of local processes.
    pub(crate) const OUTPUT: Self = Self { kind: "nat", number: 3, priority: -102 };
    /// [`Self::PREROUTING`] before that, for packets that another node has forwarded whole.
    pub(crate) const PREROUTING_FORWARDED: Self = Self { kind: "nat", number: 0, priority: -103 };
    /// [`Self::PREROUTING`] once more, for packets that were not translated there.
    pub(crate) const PREROUTING_RETRY: Self = Self { kind: "nat", number: 0, priority: -101 };
    /// [`Self::OUTPUT`] once more, for packets that were not translated there.
    pub(crate) const OUTPUT_RETRY: Self = Self { kind: "nat", number: 3, priority: -101 };
    /// Packets that are forwarded, after translation.
    pub(crate) const FORWARD: Self = Self { kind: "filter", number: 2, priority: 0 };
    /// Packets of local processes, after translation.
    pub(crate) const OUTPUT_FILTER: Self = Self { kind: "filter", number: 3, priority: 0 };
    /// Packets that leave, after routing.
    pub(crate) const POSTROUTING: Self = Self { kind: "nat", number: 4, priority: 99 };
    /// Every packet that arrives, not only the first one of a connection, before it is translated.
    pub(crate) const PREROUTING_EACH: Self = Self { kind: "filter", number: 0, priority: -150 };
    /// Every packet of local processes, before it is translated.
    pub(crate) const OUTPUT_EACH: Self = Self { kind: "filter", number: 3, priority: -150 };
    /// Every packet that arrives, before conntrack.
    pub(crate) const PREROUTING_RAW: Self = Self { kind: "filter", number: 0, priority: -300 };
    /// Every packet of local processes, before conntrack.
    pub(crate) const OUTPUT_RAW: Self = Self { kind: "filter", number: 3, priority: -300 };
    /// Every packet for local processes, after everything else.
    pub(crate) const INPUT_LAST: Self = Self { kind: "filter", number: 1, priority: i32::MAX };
    /// Every packet that leaves, after everything else.
    pub(crate) const POSTROUTING_LAST: Self = Self { kind: "filter", number: 4, priority: i32::MAX };
}
