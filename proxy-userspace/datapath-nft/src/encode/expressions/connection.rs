//! What rules ask of connection tracking.

use model::Family;
use netlink::{Attribute, uapi::*};

use super::{Register, Rule, SCRATCH};

impl Rule {
    pub(crate) fn if_new(self) -> Self {
        self.bits_of(NFT_CT_STATE, NF_CT_STATE_BIT_NEW).compare(NFT_CMP_NEQ, [0; 4])
    }

    /// Continues if no earlier packet of a connection is known.
    pub(crate) fn if_unknown(self) -> Self {
        self.bits_of(NFT_CT_STATE, NF_CT_STATE_INVALID_BIT | NF_CT_STATE_BIT_NEW).compare(NFT_CMP_NEQ, [0; 4])
    }

    pub(crate) fn if_translated(self) -> Self {
        self.status(IPS_DST_NAT).compare(NFT_CMP_NEQ, [0; 4])
    }

    /// Continues unless the packet belongs to a translated connection that was answered.
    pub(crate) fn if_not_translated_and_answered(self) -> Self {
        let both = IPS_DST_NAT | IPS_SEEN_REPLY;
        self.status(both).compare(NFT_CMP_NEQ, both.to_ne_bytes())
    }

    /// Continues if an earlier packet of the connection has passed, answered or not.
    pub(crate) fn if_passed_before(self) -> Self {
        self.status(IPS_CONFIRMED).compare(NFT_CMP_NEQ, [0; 4])
    }

    /// Continues if the client may not have got the answer: it has not shown that it has.
    pub(crate) fn if_not_assured(self) -> Self {
        self.status(IPS_ASSURED).compare(NFT_CMP_EQ, [0; 4])
    }

    fn status(self, bits: u32) -> Self {
        self.bits_of(NFT_CT_STATUS, bits)
    }

    /// Reads bits of a key of the connection.
    fn bits_of(self, key: u32, bits: u32) -> Self {
        self.conntrack(key, SCRATCH).bitwise(SCRATCH, bits.to_ne_bytes().into(), vec![0; 4])
    }

    fn conntrack(self, key: u32, to: Register) -> Self {
        self.push("ct", vec![Attribute::u32(NFTA_CT_DREG, to.number()), Attribute::u32(NFTA_CT_KEY, key)])
    }

    /// Reads something of the direction from the client.
    fn connection(self, key: u32, to: Register) -> Self {
        let data = vec![
            Attribute::u32(NFTA_CT_DREG, to.number()),
            Attribute::u32(NFTA_CT_KEY, key),
            Attribute::u8(NFTA_CT_DIRECTION, IP_CT_DIR_ORIGINAL),
        ];
        self.push("ct", data)
    }

    /// Reads the client's address.
    pub(crate) fn connection_source(self, to: Register) -> Self {
        let key = match self.family {
            Family::V4 => NFT_CT_SRC_IP,
            Family::V6 => NFT_CT_SRC_IP6,
        };
        self.connection(key, to)
    }

    /// Reads the destination address that the client used.
    pub(crate) fn connection_destination(self, to: Register) -> Self {
        let key = match self.family {
            Family::V4 => NFT_CT_DST_IP,
            Family::V6 => NFT_CT_DST_IP6,
        };
        self.connection(key, to)
    }

    /// Reads the destination port that the client used. The rule must have checked the protocol: `nft` has no type for it
    /// otherwise.
    pub(crate) fn connection_destination_port(self, to: Register) -> Self {
        self.connection(NFT_CT_PROTO_DST, to)
    }

    pub(crate) fn if_from_client(self) -> Self {
        self.conntrack(NFT_CT_DIRECTION, SCRATCH).compare(NFT_CMP_EQ, [IP_CT_DIR_ORIGINAL])
    }
}
