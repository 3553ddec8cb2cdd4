//! Chains with their hooks.

use crate::encode::expressions::Rule;

/// A chain and its rules.
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

    /// A base chain.
    pub(crate) fn base(name: &str, hook: Hook, rules: impl Into<Vec<Rule>>) -> Self {
        Self { hook: Some(hook), ..Self::new(name, rules) }
    }
}

/// A netfilter hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hook {
    /// Packets that arrive, before routing.
    Prerouting,
    /// Packets of local processes.
    Output,
    /// [`Hook::Prerouting`] before that, for packets that another node has forwarded whole.
    PreroutingForwarded,
    /// [`Hook::Prerouting`] once more, for packets that were not translated there.
    PreroutingRetry,
    /// [`Hook::Output`] once more, for packets that were not translated there.
    OutputRetry,
    /// Packets that are forwarded, after translation.
    Forward,
    /// Packets of local processes, after translation.
    OutputFilter,
    /// Packets that leave, after routing.
    Postrouting,
    /// Every packet that arrives, not only the first one of a connection, before it is translated.
    PreroutingEach,
    /// Every packet of local processes, before it is translated.
    OutputEach,
    /// Every packet that arrives, before conntrack.
    PreroutingRaw,
    /// Every packet of local processes, before conntrack.
    OutputRaw,
    /// Every packet for local processes, after everything else.
    InputLast,
    /// Every packet that leaves, after everything else.
    PostroutingLast,
}

impl Hook {
    /// The type of its chains, `NF_INET_…`, and the priority.
    ///
    /// The first chain that translates a connection decides, so ours come before those of others, as kube-proxy's, at
    /// `NF_IP_PRI_NAT_DST` (-100) and `NF_IP_PRI_NAT_SRC` (100). For other packets that is `NF_IP_PRI_MANGLE`: after
    /// conntrack, `NF_IP_PRI_RAW`: before it, `NF_IP_PRI_FILTER`: after translation, or `NF_IP_PRI_LAST`.
    pub(crate) fn place(self) -> (&'static str, u32, i32) {
        match self {
            Self::Prerouting => ("nat", 0, -102),
            Self::Output => ("nat", 3, -102),
            Self::PreroutingForwarded => ("nat", 0, -103),
            Self::PreroutingRetry => ("nat", 0, -101),
            Self::OutputRetry => ("nat", 3, -101),
            Self::Forward => ("filter", 2, 0),
            Self::OutputFilter => ("filter", 3, 0),
            Self::Postrouting => ("nat", 4, 99),
            Self::PreroutingEach => ("filter", 0, -150),
            Self::OutputEach => ("filter", 3, -150),
            Self::PreroutingRaw => ("filter", 0, -300),
            Self::OutputRaw => ("filter", 3, -300),
            Self::InputLast => ("filter", 1, i32::MAX),
            Self::PostroutingLast => ("filter", 4, i32::MAX),
        }
    }
}
