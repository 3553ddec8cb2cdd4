//! Verdicts, and the attributes that carry data and verdicts.

use netlink::Attribute;

/// `NFTA_LIST_ELEM`.
pub(crate) const ELEMENT: u16 = 1;
/// `NFTA_DATA_VALUE`.
pub(crate) const DATA_VALUE: u16 = 1;
/// `NFTA_DATA_VERDICT`.
pub(crate) const DATA_VERDICT: u16 = 2;
/// `NFTA_VERDICT_CODE`.
pub(crate) const VERDICT_CODE: u16 = 1;
/// `NFTA_VERDICT_CHAIN`.
pub(crate) const VERDICT_CHAIN: u16 = 2;

/// `NF_DROP`.
const DROP: i32 = 0;
/// `NFT_JUMP`.
const JUMP: i32 = -3;
/// `NFT_GOTO`.
const GOTO: i32 = -4;
/// `NFT_RETURN`.
const RETURN: i32 = -5;

/// What is done with a packet.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Verdict {
    /// Drop it.
    Drop,
    /// Continue in another chain, then return to this one.
    Jump(String),
    /// Continue in another chain.
    Goto(String),
    /// Return to the calling chain.
    Return,
}

impl Verdict {
    /// Its attributes.
    pub(crate) fn attributes(&self) -> Vec<Attribute> {
        let (code, chain) = match self {
            Self::Drop => (DROP, None),
            Self::Jump(chain) => (JUMP, Some(chain)),
            Self::Goto(chain) => (GOTO, Some(chain)),
            Self::Return => (RETURN, None),
        };
        let mut attributes = vec![Attribute::bytes(VERDICT_CODE, code.to_be_bytes())];
        attributes.extend(chain.map(|it| Attribute::text(VERDICT_CHAIN, it)));
        attributes
    }

    /// From the attributes of the kernel.
    pub(crate) fn of(code: u32, chain: Option<String>) -> Option<Self> {
        match (code.cast_signed(), chain) {
            (DROP, _) => Some(Self::Drop),
            (JUMP, Some(chain)) => Some(Self::Jump(chain)),
            (GOTO, Some(chain)) => Some(Self::Goto(chain)),
            (RETURN, _) => Some(Self::Return),
            _ => None,
        }
    }
}
