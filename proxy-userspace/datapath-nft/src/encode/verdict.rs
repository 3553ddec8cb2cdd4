//! Verdicts.

use netlink::{Attribute, uapi::*};

/// What is done with a packet.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Verdict {
    Drop,
    /// Continue in another chain, then return to this one.
    Jump(String),
    /// Continue in another chain.
    Goto(String),
    /// Return to the calling chain.
    Return,
}

impl Verdict {
    pub(crate) fn attributes(&self) -> Vec<Attribute> {
        let (code, chain) = match self {
            Self::Drop => (NF_DROP, None),
            Self::Jump(chain) => (NFT_JUMP, Some(chain)),
            Self::Goto(chain) => (NFT_GOTO, Some(chain)),
            Self::Return => (NFT_RETURN, None),
        };
        let mut attributes = vec![Attribute::bytes(NFTA_VERDICT_CODE, code.to_be_bytes())];
        attributes.extend(chain.map(|it| Attribute::text(NFTA_VERDICT_CHAIN, it)));
        attributes
    }

    /// From the attributes of the kernel.
    pub(crate) fn of(code: u32, chain: Option<String>) -> Option<Self> {
        match (code.cast_signed(), chain) {
            (NF_DROP, _) => Some(Self::Drop),
            (NFT_JUMP, Some(chain)) => Some(Self::Jump(chain)),
            (NFT_GOTO, Some(chain)) => Some(Self::Goto(chain)),
            (NFT_RETURN, _) => Some(Self::Return),
            _ => None,
        }
    }
}
