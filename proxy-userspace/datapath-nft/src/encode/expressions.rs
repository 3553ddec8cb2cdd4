//! Rules as lists of expressions that read and write registers.
//!
//! Invariant: a rule writes a register before it reads it. The kernel refuses anything else, since registers do not outlive a
//! rule.

mod connection;

use std::ops::RangeInclusive;

use ipnet::IpNet;
use model::Family;

use crate::encode::schema::{Bytes, Field, Map, list_name};
use netlink::{Attribute, uapi::*};

/// A register of four bytes, 0 to 15. A longer value occupies the following ones, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Register(pub(crate) u32);

/// The register of values that are compared or written right after they were read.
const SCRATCH: Register = Register(0);

impl Register {
    fn number(self) -> u32 {
        NFT_REG32_00 + self.0
    }
}

/// A rule under construction: its methods read to registers, act, or are conditions (`if_…`), which end the rule if they are
/// not met.
#[derive(Clone, Debug)]
pub(crate) struct Rule {
    /// Its purpose, shown by `nft list`.
    pub(crate) comment: String,
    /// Its expressions, as encoded attributes.
    pub(crate) expressions: Vec<u8>,
    pub(crate) family: Family,
}

impl Rule {
    pub(crate) fn new(family: Family, comment: impl Into<String>) -> Self {
        Self { comment: comment.into(), expressions: Vec::new(), family }
    }

    fn push(mut self, name: &str, data: Vec<Attribute>) -> Self {
        let it = [Attribute::text(NFTA_EXPR_NAME, name), Attribute::nested(NFTA_EXPR_DATA, data)];
        Attribute::nested(NFTA_LIST_ELEM, it).append(&mut self.expressions);
        self
    }

    fn payload(self, base: u32, offset: u32, length: u32, to: Register) -> Self {
        let data = vec![
            Attribute::u32(NFTA_PAYLOAD_DREG, to.number()),
            Attribute::u32(NFTA_PAYLOAD_BASE, base),
            Attribute::u32(NFTA_PAYLOAD_OFFSET, offset),
            Attribute::u32(NFTA_PAYLOAD_LEN, length),
        ];
        self.push("payload", data)
    }

    pub(crate) fn source(self, to: Register) -> Self {
        match self.family {
            Family::V4 => self.payload(NFT_PAYLOAD_NETWORK_HEADER, 12, 4, to),
            Family::V6 => self.payload(NFT_PAYLOAD_NETWORK_HEADER, 8, 16, to),
        }
    }

    pub(crate) fn destination(self, to: Register) -> Self {
        match self.family {
            Family::V4 => self.payload(NFT_PAYLOAD_NETWORK_HEADER, 16, 4, to),
            Family::V6 => self.payload(NFT_PAYLOAD_NETWORK_HEADER, 24, 16, to),
        }
    }

    pub(crate) fn destination_port(self, to: Register) -> Self {
        self.payload(NFT_PAYLOAD_TRANSPORT_HEADER, 2, 2, to)
    }

    pub(crate) fn protocol(self, to: Register) -> Self {
        self.meta(NFT_META_L4PROTO, to)
    }

    fn meta(self, key: u32, to: Register) -> Self {
        self.push(
            "meta",
            vec![Attribute::u32(NFTA_META_DREG, to.number()), Attribute::u32(NFTA_META_KEY, key)],
        )
    }

    fn set_meta(self, key: u32, from: Register) -> Self {
        let data = vec![Attribute::u32(NFTA_META_KEY, key), Attribute::u32(NFTA_META_SREG, from.number())];
        self.push("meta", data)
    }

    fn load(self, to: Register, value: impl Into<Vec<u8>>) -> Self {
        self.immediate(to.number(), Attribute::bytes(NFTA_DATA_VALUE, value))
    }

    fn immediate(self, to: u32, value: Attribute) -> Self {
        let value = Attribute::nested(NFTA_IMMEDIATE_DATA, [value]);
        self.push("immediate", vec![Attribute::u32(NFTA_IMMEDIATE_DREG, to), value])
    }

    fn compare(self, operation: u32, value: impl Into<Vec<u8>>) -> Self {
        let data = vec![
            Attribute::u32(NFTA_CMP_SREG, SCRATCH.number()),
            Attribute::u32(NFTA_CMP_OP, operation),
            Attribute::nested(NFTA_CMP_DATA, [Attribute::bytes(NFTA_DATA_VALUE, value)]),
        ];
        self.push("cmp", data)
    }

    fn bitwise(self, register: Register, mask: Vec<u8>, xor: Vec<u8>) -> Self {
        let length = u32::try_from(mask.len()).unwrap_or_default();
        let data = vec![
            Attribute::u32(NFTA_BITWISE_SREG, register.number()),
            Attribute::u32(NFTA_BITWISE_DREG, register.number()),
            Attribute::u32(NFTA_BITWISE_LEN, length),
            Attribute::nested(NFTA_BITWISE_MASK, [Attribute::bytes(NFTA_DATA_VALUE, mask)]),
            Attribute::nested(NFTA_BITWISE_XOR, [Attribute::bytes(NFTA_DATA_VALUE, xor)]),
        ];
        self.push("bitwise", data)
    }

    pub(crate) fn if_protocol(self, protocol: u8) -> Self {
        self.protocol(SCRATCH).compare(NFT_CMP_EQ, [protocol])
    }

    pub(crate) fn if_tcp(self) -> Self {
        self.if_protocol(IPPROTO_TCP)
    }

    pub(crate) fn if_udp(self) -> Self {
        self.if_protocol(IPPROTO_UDP)
    }

    pub(crate) fn if_not_udp(self) -> Self {
        self.protocol(SCRATCH).compare(NFT_CMP_NEQ, [IPPROTO_UDP])
    }

    /// Sends a copy of the packet to a host, which conntrack does not see. The copy keeps its addresses and its priority.
    pub(crate) fn duplicate_to(self, address: Register) -> Self {
        self.push("dup", vec![Attribute::u32(NFTA_DUP_SREG_ADDR, address.number())])
    }

    pub(crate) fn if_from(self, net: IpNet) -> Self {
        self.source(SCRATCH).within(net)
    }

    fn within(self, net: IpNet) -> Self {
        let octets = |it| Bytes::new().address(it).0.to_vec();
        let mask = octets(net.netmask());
        let zeros = vec![0; mask.len()];
        self.bitwise(SCRATCH, mask, zeros).compare(NFT_CMP_EQ, octets(net.network()))
    }

    pub(crate) fn if_to(self, net: IpNet) -> Self {
        self.destination(SCRATCH).within(net)
    }

    pub(crate) fn if_source_port_at_least(self, port: u16) -> Self {
        self.payload(NFT_PAYLOAD_TRANSPORT_HEADER, 0, 2, SCRATCH).compare(NFT_CMP_GTE, port.to_be_bytes())
    }

    pub(crate) fn if_destination_port_at_least(self, port: u16) -> Self {
        self.destination_port(SCRATCH).compare(NFT_CMP_GTE, port.to_be_bytes())
    }

    pub(crate) fn if_destination_port(self, port: u16) -> Self {
        self.destination_port(SCRATCH).compare(NFT_CMP_EQ, port.to_be_bytes())
    }

    /// Has the kernel report each rule that the packet matches from here on (`nft monitor trace`).
    pub(crate) fn trace(self) -> Self {
        self.load(SCRATCH, [1]).set_meta(NFT_META_NFTRACE, SCRATCH)
    }

    /// Continues if the packet is for a socket of this host that has an address of its own: it is connected, or listens at
    /// one address (`NFT_SOCKET_WILDCARD`, Linux 5.10).
    pub(crate) fn if_for_connected_socket(self) -> Self {
        let data = vec![
            Attribute::u32(NFTA_SOCKET_KEY, NFT_SOCKET_WILDCARD),
            Attribute::u32(NFTA_SOCKET_DREG, SCRATCH.number()),
        ];
        self.push("socket", data).compare(NFT_CMP_EQ, [0])
    }

    /// Keeps conntrack away from the packet.
    pub(crate) fn do_not_track(self) -> Self {
        self.push("notrack", Vec::new())
    }

    pub(crate) fn if_outgoing_interface_is_not(self, interface: &str) -> Self {
        self.meta(NFT_META_OIFNAME, SCRATCH).compare(NFT_CMP_NEQ, interface_name(interface))
    }

    pub(crate) fn if_interface(self, interface: &str) -> Self {
        self.meta(NFT_META_IIFNAME, SCRATCH).compare(NFT_CMP_EQ, interface_name(interface))
    }

    pub(crate) fn if_interface_prefix(self, prefix: &str) -> Self {
        let mut name = prefix.as_bytes().to_vec();
        name.truncate(IFNAMSIZ - 1);
        self.meta(NFT_META_IIFNAME, SCRATCH).compare(NFT_CMP_EQ, name)
    }

    /// Continues if the packet arrived at an interface of a kind (`rtnl_link_ops.kind`), as `veth`.
    pub(crate) fn if_interface_kind(self, kind: &str) -> Self {
        self.meta(NFT_META_IIFKIND, SCRATCH).compare(NFT_CMP_EQ, interface_name(kind))
    }

    /// Loads the number of the interface at which the packet arrived.
    pub(crate) fn interface_number(self, to: Register) -> Self {
        self.meta(NFT_META_IIF, to)
    }

    pub(crate) fn if_from_local_address(self) -> Self {
        self.if_local(NFTA_FIB_F_SADDR)
    }

    pub(crate) fn if_to_local_address(self) -> Self {
        self.if_local(NFTA_FIB_F_DADDR)
    }

    fn if_local(self, which: u32) -> Self {
        let data = vec![
            Attribute::u32(NFTA_FIB_DREG, SCRATCH.number()),
            Attribute::u32(NFTA_FIB_RESULT, NFT_FIB_RESULT_ADDRTYPE),
            Attribute::u32(NFTA_FIB_FLAGS, which),
        ];
        self.push("fib", data).compare(NFT_CMP_EQ, RTN_LOCAL.to_ne_bytes())
    }

    /// Keeps some bits of the last four bytes of an address.
    pub(crate) fn last_bits(self, address: Register, bits: u32) -> Self {
        let length = Field::Address.length(self.family);
        let mut mask = vec![0; length];
        mask[length - 4..].copy_from_slice(&((1 << bits) - 1_u32).to_be_bytes());
        self.bitwise(address, mask, vec![0; length])
    }

    pub(crate) fn set_mark(self, bit: u32) -> Self {
        self.change_mark((!bit).to_ne_bytes().into(), bit.to_ne_bytes().into())
    }

    /// Continues if a bit of the packet mark is set, and clears it.
    pub(crate) fn take_mark(self, bit: u32) -> Self {
        self.meta(NFT_META_MARK, SCRATCH)
            .bitwise(SCRATCH, bit.to_ne_bytes().into(), vec![0; 4])
            .compare(NFT_CMP_EQ, bit.to_ne_bytes())
            .change_mark((!bit).to_ne_bytes().into(), vec![0; 4])
    }

    fn change_mark(self, mask: Vec<u8>, xor: Vec<u8>) -> Self {
        self.meta(NFT_META_MARK, SCRATCH).bitwise(SCRATCH, mask, xor).set_meta(NFT_META_MARK, SCRATCH)
    }

    fn set_priority(self, from: Register) -> Self {
        self.set_meta(NFT_META_PRIORITY, from)
    }

    /// Looks up the key, stores its data in the packet's priority, and continues if the key exists.
    pub(crate) fn store_in_priority(self, map: Map, key: Register) -> Self {
        self.look_up(map, key, SCRATCH).set_priority(SCRATCH)
    }

    pub(crate) fn store_number_in_priority(self, number: u32) -> Self {
        self.load(SCRATCH, number.to_ne_bytes()).set_priority(SCRATCH)
    }

    /// Stores a random number between `offset` and `offset + count` in the packet's priority.
    pub(crate) fn store_random_in_priority(self, count: u32, offset: u32) -> Self {
        self.random(SCRATCH, count, offset).set_priority(SCRATCH)
    }

    pub(crate) fn mask_priority(self, mask: u32) -> Self {
        self.masked_priority(SCRATCH, mask).set_priority(SCRATCH)
    }

    pub(crate) fn priority(self, to: Register) -> Self {
        self.meta(NFT_META_PRIORITY, to)
    }

    pub(crate) fn masked_priority(self, to: Register, mask: u32) -> Self {
        self.priority(to).bitwise(to, mask.to_ne_bytes().into(), vec![0; 4])
    }

    pub(crate) fn if_masked_priority_is_not(self, mask: u32, number: u32) -> Self {
        self.masked_priority(SCRATCH, mask).compare(NFT_CMP_NEQ, number.to_ne_bytes())
    }

    pub(crate) fn if_priority_at_least(self, number: u32) -> Self {
        self.priority(SCRATCH).compare_numbers(NFT_CMP_GTE, number)
    }

    pub(crate) fn if_priority_in(self, numbers: RangeInclusive<u32>) -> Self {
        self.if_priority_at_least(*numbers.start())
            .priority(SCRATCH)
            .compare_numbers(NFT_CMP_LTE, *numbers.end())
    }

    /// Continues with a probability of `limit / count`.
    pub(crate) fn if_random_below(self, limit: u32, count: u32) -> Self {
        self.random(SCRATCH, count, 0).compare_numbers(NFT_CMP_LT, limit)
    }

    /// The kernel compares bytes, so a number must be in network byte order.
    fn compare_numbers(self, operation: u32, number: u32) -> Self {
        let data = vec![
            Attribute::u32(NFTA_BYTEORDER_SREG, SCRATCH.number()),
            Attribute::u32(NFTA_BYTEORDER_DREG, SCRATCH.number()),
            Attribute::u32(NFTA_BYTEORDER_OP, NFT_BYTEORDER_HTON),
            Attribute::u32(NFTA_BYTEORDER_LEN, 4),
            Attribute::u32(NFTA_BYTEORDER_SIZE, 4),
        ];
        self.push("byteorder", data).compare(operation, number.to_be_bytes())
    }

    /// Looks up the packet's priority in a verdict map.
    pub(crate) fn dispatch(self, map: Map) -> Self {
        self.priority(SCRATCH).look_up_into(map, SCRATCH, NFT_REG_VERDICT)
    }

    /// Writes a random number between `offset` and `offset + count`.
    fn random(self, to: Register, count: u32, offset: u32) -> Self {
        let data = vec![
            Attribute::u32(NFTA_NG_DREG, to.number()),
            Attribute::u32(NFTA_NG_MODULUS, count),
            Attribute::u32(NFTA_NG_TYPE, NFT_NG_RANDOM),
            Attribute::u32(NFTA_NG_OFFSET, offset),
        ];
        self.push("numgen", data)
    }

    pub(crate) fn if_in(self, map: Map, key: Register) -> Self {
        self.find(map.name(), key, None)
    }

    /// Counts the packet by the counter of the key, and continues if there is one.
    pub(crate) fn count_by(self, map: Map, key: Register) -> Self {
        let data = vec![
            Attribute::u32(NFTA_OBJREF_SET_SREG, key.number()),
            Attribute::text(NFTA_OBJREF_SET_NAME, map.name()),
        ];
        self.push("objref", data)
    }

    /// Continues if the address is in a range of the list of a number.
    pub(crate) fn if_in_list(self, number: u32, address: Register) -> Self {
        self.find(&list_name(number), address, None)
    }

    pub(crate) fn if_priority(self, number: u32) -> Self {
        self.priority(SCRATCH).compare(NFT_CMP_EQ, number.to_ne_bytes())
    }

    /// Reads the data of the key, and continues if the key exists.
    pub(crate) fn look_up(self, map: Map, key: Register, to: Register) -> Self {
        self.look_up_into(map, key, to.number())
    }

    fn look_up_into(self, map: Map, key: Register, to: u32) -> Self {
        self.find(map.name(), key, Some(Attribute::u32(NFTA_LOOKUP_DREG, to)))
    }

    pub(crate) fn if_not_in(self, map: Map, key: Register) -> Self {
        self.find(map.name(), key, Some(Attribute::u32(NFTA_LOOKUP_FLAGS, NFT_LOOKUP_F_INV)))
    }

    fn find(self, set: &str, key: Register, how: Option<Attribute>) -> Self {
        let mut data =
            vec![Attribute::text(NFTA_LOOKUP_SET, set), Attribute::u32(NFTA_LOOKUP_SREG, key.number())];
        data.extend(how);
        self.push("lookup", data)
    }

    /// Inserts the key with a value and a timeout, or refreshes the timeout if the key exists; continues unless the set is
    /// full.
    pub(crate) fn insert(self, map: Map, key: Register, value: Register, seconds: u32) -> Self {
        self.write(map, NFT_DYNSET_OP_UPDATE, key, value, Some(seconds))
    }

    /// Inserts the key with a value and a timeout if it does not exist; continues unless the set is full.
    pub(crate) fn insert_new(self, map: Map, key: Register, value: Register, seconds: u32) -> Self {
        self.write(map, NFT_DYNSET_OP_ADD, key, value, Some(seconds))
    }

    /// Deletes a key. The kernel requires a value but ignores it.
    pub(crate) fn remove(self, map: Map, key: Register, value: Register) -> Self {
        self.write(map, NFT_DYNSET_OP_DELETE, key, value, None)
    }

    fn write(self, map: Map, operation: u32, key: Register, value: Register, seconds: Option<u32>) -> Self {
        let mut data = vec![
            Attribute::text(NFTA_DYNSET_SET_NAME, map.name()),
            Attribute::u32(NFTA_DYNSET_OP, operation),
            Attribute::u32(NFTA_DYNSET_SREG_KEY, key.number()),
            Attribute::u32(NFTA_DYNSET_SREG_DATA, value.number()),
        ];
        data.extend(seconds.map(|it| Attribute::u64(NFTA_DYNSET_TIMEOUT, u64::from(it) * 1000)));
        self.push("dynset", data)
    }

    pub(crate) fn translate(self, address: Register, port: Register) -> Self {
        let data = vec![
            Attribute::u32(NFTA_NAT_TYPE, NFT_NAT_DNAT),
            Attribute::u32(NFTA_NAT_FAMILY, protocol_family(self.family).into()),
            Attribute::u32(NFTA_NAT_REG_ADDR_MIN, address.number()),
            Attribute::u32(NFTA_NAT_REG_PROTO_MIN, port.number()),
        ];
        self.push("nat", data)
    }

    pub(crate) fn masquerade(self) -> Self {
        self.push("masq", vec![Attribute::u32(NFTA_MASQ_FLAGS, NF_NAT_RANGE_PROTO_RANDOM_FULLY)])
    }

    /// Masquerades with source ports in a range. The rule must have checked the protocol: `nft` asks for that.
    pub(crate) fn masquerade_from_ports(self, ports: RangeInclusive<u16>) -> Self {
        let [min, max] = [Register(0), Register(1)];
        self.load(min, ports.start().to_be_bytes()).load(max, ports.end().to_be_bytes()).push(
            "masq",
            vec![
                Attribute::u32(NFTA_MASQ_FLAGS, NF_NAT_RANGE_PROTO_RANDOM_FULLY),
                Attribute::u32(NFTA_MASQ_REG_PROTO_MIN, min.number()),
                Attribute::u32(NFTA_MASQ_REG_PROTO_MAX, max.number()),
            ],
        )
    }

    pub(crate) fn reset(self) -> Self {
        self.reject(NFT_REJECT_TCP_RST, 0)
    }

    /// Rejects with ICMP port unreachable.
    pub(crate) fn unreachable(self) -> Self {
        let code = match self.family {
            Family::V4 => 3,
            Family::V6 => 4,
        };
        self.reject(NFT_REJECT_ICMP_UNREACH, code)
    }

    fn reject(self, kind: u32, code: u8) -> Self {
        let data = vec![Attribute::u32(NFTA_REJECT_TYPE, kind), Attribute::u8(NFTA_REJECT_ICMP_CODE, code)];
        self.push("reject", data)
    }

    pub(crate) fn verdict(self, verdict: &Verdict) -> Self {
        self.immediate(NFT_REG_VERDICT, Attribute::nested(NFTA_DATA_VERDICT, verdict.attributes()))
    }
}

/// What is done with a packet.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Verdict {
    Drop,
    Jump(String),
    Goto(String),
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

/// The number of a family in messages.
pub(crate) fn protocol_family(family: Family) -> u8 {
    match family {
        Family::V4 => NFPROTO_IPV4,
        Family::V6 => NFPROTO_IPV6,
    }
}

/// An interface name as the kernel compares it.
fn interface_name(interface: &str) -> Vec<u8> {
    let mut name = interface.as_bytes().to_vec();
    name.truncate(IFNAMSIZ - 1);
    name.resize(IFNAMSIZ, 0);
    name
}
