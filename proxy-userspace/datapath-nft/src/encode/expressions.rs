//! Rules as lists of expressions that read and write registers.
//!
//! Invariant: a rule writes a register before it reads it. The kernel refuses anything else, since registers do not outlive a
//! rule.
//! The numbers are those of linux/netfilter/nf_tables.h.

use std::{net::IpAddr, ops::RangeInclusive};

use ipnet::IpNet;
use model::Family;

use crate::encode::{
    schema::{Map, list_name},
    verdict::{DATA_VALUE, DATA_VERDICT, ELEMENT, Verdict},
};
use netlink::Attribute;

/// A register of four bytes, 0 to 15. A longer value occupies the following ones, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Register(pub(crate) u32);

impl Register {
    /// The register that holds the verdict.
    const VERDICT: u32 = 0;
    /// `NFT_REG32_00`.
    const FIRST: u32 = 8;

    fn number(self) -> u32 {
        Self::FIRST + self.0
    }
}

/// A rule under construction.
#[derive(Clone, Debug)]
pub(crate) struct Rule {
    /// Its purpose, shown by `nft list`.
    pub(crate) comment: String,
    expressions: Vec<Attribute>,
    /// The family of its table.
    pub(crate) family: Family,
}

const NAME: u16 = 1;
const DATA: u16 = 2;

const META_PRIORITY: u32 = 2;
const META_MARK: u32 = 3;
const META_IIF: u32 = 4;
const META_IIFNAME: u32 = 6;
const META_OIFNAME: u32 = 7;
const META_TRACED: u32 = 12;
const META_L4PROTO: u32 = 16;
/// `NFT_META_IIFKIND`, Linux 5.0.
const META_IIFKIND: u32 = 26;
const NETWORK_HEADER: u32 = 1;
const TRANSPORT_HEADER: u32 = 2;
const EQUAL: u32 = 0;
const NOT_EQUAL: u32 = 1;
const LESS: u32 = 2;
const AT_LEAST: u32 = 5;
const HOST_TO_NETWORK: u32 = 1;
const CT_STATE: u32 = 0;
const CT_DIRECTION: u32 = 1;
const CT_STATUS: u32 = 2;
const CT_DESTINATION_PORT: u32 = 12;
const CT_SOURCE_V4: u32 = 19;
const CT_DESTINATION_V4: u32 = 20;
const CT_SOURCE_V6: u32 = 21;
const CT_DESTINATION_V6: u32 = 22;
/// The first packet of a connection (`NF_CT_STATE_BIT(IP_CT_NEW)`).
const NEW: u32 = 1 << 3;
/// `IP_CT_DIR_ORIGINAL`: from the client.
const ORIGINAL: u8 = 0;
/// `IPS_SEEN_REPLY`.
const ANSWERED: u32 = 1 << 1;
/// `IPS_CONFIRMED`: a packet has passed all hooks.
const CONFIRMED: u32 = 1 << 3;
/// `IPS_ASSURED`: over TCP, the client has acknowledged the answer.
const ASSURED: u32 = 1 << 2;
/// `IPS_DST_NAT`.
const DESTINATION_TRANSLATED: u32 = 1 << 5;
const FIB_ADDRESS_TYPE: u32 = 3;
const FIB_SOURCE: u32 = 1;
const FIB_DESTINATION: u32 = 2;
/// `RTN_LOCAL`.
const LOCAL: u32 = 2;
const NUMGEN_RANDOM: u32 = 1;
const NAT_DESTINATION: u32 = 1;
/// `NF_NAT_RANGE_PROTO_RANDOM_FULLY`.
const FULLY_RANDOM: u32 = 1 << 4;
const REJECT_ICMP: u32 = 0;
const REJECT_RESET: u32 = 1;
/// `NFPROTO_…`; the same as the address families'.
const PROTO_V4: u32 = 2;
const PROTO_V6: u32 = 10;
const TCP: u8 = 6;
const UDP: u8 = 17;
/// The length of an interface name including the terminating zero byte (`IFNAMSIZ`).
const INTERFACE_NAME: usize = 16;

/// `NFT_SOCKET_WILDCARD`.
const SOCKET_WILDCARD: u32 = 2;
/// `NFT_LOOKUP_F_INV`.
const INVERTED: u32 = 1;
/// `NFT_DYNSET_OP_ADD`.
const ADD: u32 = 0;
/// `NFT_DYNSET_OP_UPDATE`.
const UPDATE: u32 = 1;
/// `NFT_DYNSET_OP_DELETE`.
const DELETE: u32 = 2;

impl Rule {
    /// A rule without a condition.
    pub(crate) fn new(family: Family, comment: impl Into<String>) -> Self {
        Self { comment: comment.into(), expressions: Vec::new(), family }
    }

    /// The list of its expressions.
    pub(crate) fn expressions(&self) -> Vec<Attribute> {
        self.expressions.clone()
    }

    fn push(mut self, name: &str, data: Vec<Attribute>) -> Self {
        let it = [Attribute::text(NAME, name), Attribute::nested(DATA, data)];
        self.expressions.push(Attribute::nested(ELEMENT, it));
        self
    }

    fn payload(self, base: u32, offset: u32, length: u32, to: Register) -> Self {
        let data = [to.number(), base, offset, length];
        self.push("payload", (1..).zip(data).map(|(kind, it)| Attribute::u32(kind, it)).collect())
    }

    /// Reads the source address.
    pub(crate) fn source(self, to: Register) -> Self {
        match self.family {
            Family::V4 => self.payload(NETWORK_HEADER, 12, 4, to),
            Family::V6 => self.payload(NETWORK_HEADER, 8, 16, to),
        }
    }

    /// Reads the destination address.
    pub(crate) fn destination(self, to: Register) -> Self {
        match self.family {
            Family::V4 => self.payload(NETWORK_HEADER, 16, 4, to),
            Family::V6 => self.payload(NETWORK_HEADER, 24, 16, to),
        }
    }

    /// Reads the destination port.
    pub(crate) fn destination_port(self, to: Register) -> Self {
        self.payload(TRANSPORT_HEADER, 2, 2, to)
    }

    /// Reads the transport protocol.
    pub(crate) fn protocol(self, to: Register) -> Self {
        self.meta(META_L4PROTO, to)
    }

    fn meta(self, key: u32, to: Register) -> Self {
        self.push("meta", vec![Attribute::u32(1, to.number()), Attribute::u32(2, key)])
    }

    fn compare(self, register: Register, operation: u32, value: impl Into<Vec<u8>>) -> Self {
        let data = vec![
            Attribute::u32(1, register.number()),
            Attribute::u32(2, operation),
            Attribute::nested(3, [Attribute::bytes(DATA_VALUE, value)]),
        ];
        self.push("cmp", data)
    }

    fn bitwise(self, register: Register, mask: Vec<u8>, xor: Vec<u8>) -> Self {
        let length = u32::try_from(mask.len()).unwrap_or_default();
        let data = vec![
            Attribute::u32(1, register.number()),
            Attribute::u32(2, register.number()),
            Attribute::u32(3, length),
            Attribute::nested(4, [Attribute::bytes(DATA_VALUE, mask)]),
            Attribute::nested(5, [Attribute::bytes(DATA_VALUE, xor)]),
        ];
        self.push("bitwise", data)
    }

    fn if_protocol(self, operation: u32, protocol: u8) -> Self {
        let scratch = Register(0);
        self.protocol(scratch).compare(scratch, operation, [protocol])
    }

    /// Continues if the protocol has this number.
    pub(crate) fn if_protocol_is(self, protocol: u8) -> Self {
        self.if_protocol(EQUAL, protocol)
    }

    /// Continues if the protocol is TCP.
    pub(crate) fn if_tcp(self) -> Self {
        self.if_protocol(EQUAL, TCP)
    }

    /// Continues if the protocol is UDP.
    pub(crate) fn if_udp(self) -> Self {
        self.if_protocol(EQUAL, UDP)
    }

    /// Continues if the protocol is not UDP.
    pub(crate) fn if_not_udp(self) -> Self {
        self.if_protocol(NOT_EQUAL, UDP)
    }

    /// Continues if the source address lies within a prefix.
    pub(crate) fn if_from(self, net: IpNet) -> Self {
        self.source(Register(0)).within(net)
    }

    fn within(self, net: IpNet) -> Self {
        let scratch = Register(0);
        self.bitwise(scratch, octets(net.netmask()), zeros(net.netmask())).compare(
            scratch,
            EQUAL,
            octets(net.network()),
        )
    }

    /// Continues if the destination address lies within a prefix.
    pub(crate) fn if_to(self, net: IpNet) -> Self {
        self.destination(Register(0)).within(net)
    }

    /// Continues if the source port is this one or a greater one.
    pub(crate) fn if_source_port_at_least(self, port: u16) -> Self {
        self.payload(TRANSPORT_HEADER, 0, 2, Register(0)).compare(Register(0), AT_LEAST, port.to_be_bytes())
    }

    /// Continues if the destination port is this one or a greater one.
    pub(crate) fn if_destination_port_at_least(self, port: u16) -> Self {
        self.destination_port(Register(0)).compare(Register(0), AT_LEAST, port.to_be_bytes())
    }

    /// Continues if the destination port is this one.
    pub(crate) fn if_destination_port(self, port: u16) -> Self {
        self.destination_port(Register(0)).compare(Register(0), EQUAL, port.to_be_bytes())
    }

    /// Has the kernel report each rule that the packet matches from here on (`nft monitor trace`).
    pub(crate) fn trace(self) -> Self {
        let value = Attribute::nested(2, [Attribute::bytes(DATA_VALUE, [1])]);
        let register = Register(0).number();
        self.push("immediate", vec![Attribute::u32(1, register), value])
            .push("meta", vec![Attribute::u32(2, META_TRACED), Attribute::u32(3, register)])
    }

    /// Continues if the packet is for a socket of this host that has an address of its own: it is connected, or listens at
    /// one address (`NFT_SOCKET_WILDCARD`, Linux 5.10).
    pub(crate) fn if_for_connected_socket(self) -> Self {
        let data = [SOCKET_WILDCARD, Register(0).number()];
        let rule = self.push("socket", (1..).zip(data).map(|(kind, it)| Attribute::u32(kind, it)).collect());
        rule.compare(Register(0), EQUAL, [0])
    }

    /// Keeps conntrack away from the packet.
    pub(crate) fn do_not_track(self) -> Self {
        self.push("notrack", Vec::new())
    }

    /// Continues unless the packet leaves by an interface.
    pub(crate) fn if_outgoing_interface_is_not(self, interface: &str) -> Self {
        self.meta(META_OIFNAME, Register(0)).compare(Register(0), NOT_EQUAL, interface_name(interface))
    }

    /// Continues if the packet arrived at an interface.
    pub(crate) fn if_interface(self, interface: &str) -> Self {
        self.meta(META_IIFNAME, Register(0)).compare(Register(0), EQUAL, interface_name(interface))
    }

    /// Continues if the packet arrived at an interface whose name has this prefix.
    pub(crate) fn if_interface_prefix(self, prefix: &str) -> Self {
        let mut name = prefix.as_bytes().to_vec();
        name.truncate(INTERFACE_NAME - 1);
        self.meta(META_IIFNAME, Register(0)).compare(Register(0), EQUAL, name)
    }

    /// Continues if the packet arrived at an interface of a kind (`rtnl_link_ops.kind`), as `veth`.
    pub(crate) fn if_interface_kind(self, kind: &str) -> Self {
        self.meta(META_IIFKIND, Register(0)).compare(Register(0), EQUAL, interface_name(kind))
    }

    /// Loads the number of the interface at which the packet arrived.
    pub(crate) fn interface_number(self, to: Register) -> Self {
        self.meta(META_IIF, to)
    }

    /// Continues if the source address is one of this host's.
    pub(crate) fn if_from_local_address(self) -> Self {
        self.if_local(FIB_SOURCE)
    }

    /// Continues if the destination address is one of this host's.
    pub(crate) fn if_to_local_address(self) -> Self {
        self.if_local(FIB_DESTINATION)
    }

    fn if_local(self, which: u32) -> Self {
        let scratch = Register(0);
        let data = [scratch.number(), FIB_ADDRESS_TYPE, which];
        self.push("fib", (1..).zip(data).map(|(kind, it)| Attribute::u32(kind, it)).collect()).compare(
            scratch,
            EQUAL,
            LOCAL.to_ne_bytes(),
        )
    }

    /// Continues if the packet is the first one of a connection.
    pub(crate) fn if_new(self) -> Self {
        self.bits_of(CT_STATE, NEW).compare(Register(0), NOT_EQUAL, [0; 4])
    }

    /// Continues if the destination was translated.
    pub(crate) fn if_translated(self) -> Self {
        self.status(DESTINATION_TRANSLATED).compare(Register(0), NOT_EQUAL, [0; 4])
    }

    /// Continues unless the packet belongs to a translated connection that was answered.
    pub(crate) fn if_not_translated_and_answered(self) -> Self {
        let both = DESTINATION_TRANSLATED | ANSWERED;
        self.status(both).compare(Register(0), NOT_EQUAL, both.to_ne_bytes())
    }

    /// Continues if an earlier packet of the connection has passed, answered or not.
    pub(crate) fn if_passed_before(self) -> Self {
        self.status(CONFIRMED).compare(Register(0), NOT_EQUAL, [0; 4])
    }

    /// Continues if the client may not have got the answer: it has not shown that it has.
    pub(crate) fn if_not_assured(self) -> Self {
        self.status(ASSURED).compare(Register(0), EQUAL, [0; 4])
    }

    /// Reads bits of the status of the connection.
    fn status(self, bits: u32) -> Self {
        self.bits_of(CT_STATUS, bits)
    }

    /// Reads bits of a key of the connection.
    fn bits_of(self, key: u32, bits: u32) -> Self {
        let scratch = Register(0);
        self.push("ct", vec![Attribute::u32(1, scratch.number()), Attribute::u32(2, key)]).bitwise(
            scratch,
            bits.to_ne_bytes().into(),
            vec![0; 4],
        )
    }

    /// Reads something of the direction from the client.
    fn connection(self, key: u32, to: Register) -> Self {
        let data = vec![Attribute::u32(1, to.number()), Attribute::u32(2, key), Attribute::u8(3, ORIGINAL)];
        self.push("ct", data)
    }

    /// Reads the client's address.
    pub(crate) fn connection_source(self, to: Register) -> Self {
        let key = match self.family {
            Family::V4 => CT_SOURCE_V4,
            Family::V6 => CT_SOURCE_V6,
        };
        self.connection(key, to)
    }

    /// Reads the destination address that the client used.
    pub(crate) fn connection_destination(self, to: Register) -> Self {
        let key = match self.family {
            Family::V4 => CT_DESTINATION_V4,
            Family::V6 => CT_DESTINATION_V6,
        };
        self.connection(key, to)
    }

    /// Reads the destination port that the client used. The rule must have checked the protocol: `nft` has no type for it
    /// otherwise.
    pub(crate) fn connection_destination_port(self, to: Register) -> Self {
        self.connection(CT_DESTINATION_PORT, to)
    }

    /// Continues if the packet is from the client of its connection.
    pub(crate) fn if_from_client(self) -> Self {
        let scratch = Register(0);
        self.push("ct", vec![Attribute::u32(1, scratch.number()), Attribute::u32(2, CT_DIRECTION)]).compare(
            scratch,
            EQUAL,
            [ORIGINAL],
        )
    }

    /// Keeps some bits of the last four bytes of an address.
    pub(crate) fn last_bits(self, address: Register, bits: u32) -> Self {
        let length = match self.family {
            Family::V4 => 4,
            Family::V6 => 16,
        };
        let mut mask = vec![0; length];
        mask[length - 4..].copy_from_slice(&((1 << bits) - 1_u32).to_be_bytes());
        self.bitwise(address, mask, vec![0; length])
    }

    /// Sets a bit of the packet mark.
    pub(crate) fn set_mark(self, bit: u32) -> Self {
        self.change_mark((!bit).to_ne_bytes().into(), bit.to_ne_bytes().into())
    }

    /// Continues if a bit of the packet mark is set, and clears it.
    pub(crate) fn take_mark(self, bit: u32) -> Self {
        let scratch = Register(0);
        self.meta(META_MARK, scratch)
            .bitwise(scratch, bit.to_ne_bytes().into(), vec![0; 4])
            .compare(scratch, EQUAL, bit.to_ne_bytes())
            .change_mark((!bit).to_ne_bytes().into(), vec![0; 4])
    }

    fn change_mark(self, mask: Vec<u8>, xor: Vec<u8>) -> Self {
        let scratch = Register(0);
        let set = vec![Attribute::u32(2, META_MARK), Attribute::u32(3, scratch.number())];
        self.meta(META_MARK, scratch).bitwise(scratch, mask, xor).push("meta", set)
    }

    fn set_priority(self, from: Register) -> Self {
        self.push("meta", vec![Attribute::u32(2, META_PRIORITY), Attribute::u32(3, from.number())])
    }

    /// Looks up the key, stores its data in the packet's priority, and continues if the key exists.
    pub(crate) fn store_in_priority(self, map: Map, key: Register) -> Self {
        self.look_up(map, key, Register(0)).set_priority(Register(0))
    }

    /// Stores a number in the packet's priority.
    pub(crate) fn store_number_in_priority(self, number: u32) -> Self {
        let value = Attribute::nested(2, [Attribute::bytes(DATA_VALUE, number.to_ne_bytes())]);
        self.push("immediate", vec![Attribute::u32(1, Register(0).number()), value]).set_priority(Register(0))
    }

    /// Stores a random number between `offset` and `offset + count` in the packet's priority.
    pub(crate) fn store_random_in_priority(self, count: u32, offset: u32) -> Self {
        self.random(Register(0), count, offset).set_priority(Register(0))
    }

    /// Keeps these bits of the packet's priority.
    pub(crate) fn mask_priority(self, mask: u32) -> Self {
        self.masked_priority(Register(0), mask).set_priority(Register(0))
    }

    /// Reads the packet's priority.
    pub(crate) fn priority(self, to: Register) -> Self {
        self.meta(META_PRIORITY, to)
    }

    /// Reads these bits of the packet's priority.
    pub(crate) fn masked_priority(self, to: Register, mask: u32) -> Self {
        self.priority(to).bitwise(to, mask.to_ne_bytes().into(), vec![0; 4])
    }

    /// Continues if these bits of the packet's priority are not this number.
    pub(crate) fn if_masked_priority_is_not(self, mask: u32, number: u32) -> Self {
        let scratch = Register(0);
        self.masked_priority(scratch, mask).compare(scratch, NOT_EQUAL, number.to_ne_bytes())
    }

    /// Continues if the packet's priority is this number or a greater one.
    pub(crate) fn if_priority_at_least(self, number: u32) -> Self {
        let scratch = Register(0);
        self.priority(scratch).compare_numbers(scratch, AT_LEAST, number)
    }

    /// Continues with a probability of `limit / count`.
    pub(crate) fn if_random_below(self, limit: u32, count: u32) -> Self {
        self.random(Register(0), count, 0).compare_numbers(Register(0), LESS, limit)
    }

    /// The kernel compares bytes, so a number must be in network byte order.
    fn compare_numbers(self, register: Register, operation: u32, number: u32) -> Self {
        let data = [register.number(), register.number(), HOST_TO_NETWORK, 4, 4];
        self.push("byteorder", (1..).zip(data).map(|(kind, it)| Attribute::u32(kind, it)).collect()).compare(
            register,
            operation,
            number.to_be_bytes(),
        )
    }

    /// Looks up the packet's priority in a verdict map.
    pub(crate) fn dispatch(self, map: Map) -> Self {
        self.priority(Register(0)).look_up_into(map, Register(0), Register::VERDICT)
    }

    /// Writes a random number between `offset` and `offset + count`.
    fn random(self, to: Register, count: u32, offset: u32) -> Self {
        let data = [to.number(), count, NUMGEN_RANDOM, offset];
        self.push("numgen", (1..).zip(data).map(|(kind, it)| Attribute::u32(kind, it)).collect())
    }

    /// Continues if the key is an element of the set.
    pub(crate) fn if_in(self, map: Map, key: Register) -> Self {
        self.push("lookup", vec![Attribute::text(1, map.name()), Attribute::u32(2, key.number())])
    }

    /// Continues if the address is in a range of the list of a number.
    pub(crate) fn if_in_list(self, number: u32, address: Register) -> Self {
        let name = list_name(number);
        self.push("lookup", vec![Attribute::text(1, &name), Attribute::u32(2, address.number())])
    }

    /// Continues if the packet's priority is this number.
    pub(crate) fn if_priority(self, number: u32) -> Self {
        self.priority(Register(0)).compare(Register(0), EQUAL, number.to_ne_bytes())
    }

    /// Reads the data of the key, and continues if the key exists.
    pub(crate) fn look_up(self, map: Map, key: Register, to: Register) -> Self {
        self.look_up_into(map, key, to.number())
    }

    fn look_up_into(self, map: Map, key: Register, to: u32) -> Self {
        let data =
            vec![Attribute::text(1, map.name()), Attribute::u32(2, key.number()), Attribute::u32(3, to)];
        self.push("lookup", data)
    }

    /// Continues if the key is not an element of the set.
    pub(crate) fn if_not_in(self, map: Map, key: Register) -> Self {
        let data = vec![
            Attribute::text(1, map.name()),
            Attribute::u32(2, key.number()),
            Attribute::u32(5, INVERTED),
        ];
        self.push("lookup", data)
    }

    /// Inserts the key with a value and a timeout, or refreshes the timeout if the key exists; continues unless the set is
    /// full.
    pub(crate) fn insert(self, map: Map, key: Register, value: Register, seconds: u32) -> Self {
        self.write(map, UPDATE, key, value, vec![Attribute::u64(6, u64::from(seconds) * 1000)])
    }

    /// Inserts the key with a value and a timeout if it does not exist; continues unless the set is full.
    pub(crate) fn insert_new(self, map: Map, key: Register, value: Register, seconds: u32) -> Self {
        self.write(map, ADD, key, value, vec![Attribute::u64(6, u64::from(seconds) * 1000)])
    }

    /// Deletes a key. The kernel requires a value but ignores it.
    pub(crate) fn remove(self, map: Map, key: Register, value: Register) -> Self {
        self.write(map, DELETE, key, value, Vec::new())
    }

    fn write(self, map: Map, operation: u32, key: Register, value: Register, others: Vec<Attribute>) -> Self {
        let mut data = vec![
            Attribute::text(1, map.name()),
            Attribute::u32(3, operation),
            Attribute::u32(4, key.number()),
            Attribute::u32(5, value.number()),
        ];
        data.extend(others);
        self.push("dynset", data)
    }

    /// Translates the destination to an address and a port.
    pub(crate) fn translate(self, address: Register, port: Register) -> Self {
        let family = match self.family {
            Family::V4 => PROTO_V4,
            Family::V6 => PROTO_V6,
        };
        let data = vec![
            Attribute::u32(1, NAT_DESTINATION),
            Attribute::u32(2, family),
            Attribute::u32(3, address.number()),
            Attribute::u32(5, port.number()),
        ];
        self.push("nat", data)
    }

    /// Masquerades the connection.
    pub(crate) fn masquerade(self) -> Self {
        self.push("masq", vec![Attribute::u32(1, FULLY_RANDOM)])
    }

    /// The same with source ports in a range. The rule must have checked the protocol: `nft` asks for that.
    pub(crate) fn masquerade_from_ports(self, ports: RangeInclusive<u16>) -> Self {
        let [min, max] = [Register(0), Register(1)];
        self.immediate_port(min, *ports.start()).immediate_port(max, *ports.end()).push(
            "masq",
            vec![
                Attribute::u32(1, FULLY_RANDOM),
                Attribute::u32(2, min.number()),
                Attribute::u32(3, max.number()),
            ],
        )
    }

    fn immediate_port(self, to: Register, port: u16) -> Self {
        let value = Attribute::nested(2, [Attribute::bytes(DATA_VALUE, port.to_be_bytes())]);
        self.push("immediate", vec![Attribute::u32(1, to.number()), value])
    }

    /// Rejects with a TCP reset.
    pub(crate) fn reset(self) -> Self {
        self.push("reject", vec![Attribute::u32(1, REJECT_RESET), Attribute::u8(2, 0)])
    }

    /// Rejects with ICMP port unreachable.
    pub(crate) fn unreachable(self) -> Self {
        let code = match self.family {
            Family::V4 => 3,
            Family::V6 => 4,
        };
        self.push("reject", vec![Attribute::u32(1, REJECT_ICMP), Attribute::u8(2, code)])
    }

    /// Ends the rule with a verdict.
    pub(crate) fn verdict(self, verdict: &Verdict) -> Self {
        let verdict = Attribute::nested(DATA_VERDICT, verdict.attributes());
        let data = vec![Attribute::u32(1, Register::VERDICT), Attribute::nested(2, [verdict])];
        self.push("immediate", data)
    }
}

/// An interface name as the kernel compares it.
fn interface_name(interface: &str) -> Vec<u8> {
    let mut name = interface.as_bytes().to_vec();
    name.truncate(INTERFACE_NAME - 1);
    name.resize(INTERFACE_NAME, 0);
    name
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(it) => it.octets().to_vec(),
        IpAddr::V6(it) => it.octets().to_vec(),
    }
}

fn zeros(address: IpAddr) -> Vec<u8> {
    vec![0; octets(address).len()]
}
