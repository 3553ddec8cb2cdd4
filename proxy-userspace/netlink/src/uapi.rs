//! Constants of the kernel by the kernel's names, with the types that attributes take: those of libc, and those that it lacks
//! (`include/uapi/linux/netfilter/nf_tables.h`, `nf_conntrack_common.h`, `nfnetlink_conntrack.h`, `rtnetlink.h`).

#![expect(clippy::cast_possible_truncation, reason = "libc has every constant as an int")]

use nix::libc;

/// Converts constants of libc.
macro_rules! libc {
    ($($kind:ident: $($name:ident)+;)+) => { $($(pub const $name: $kind = libc::$name as $kind;)+)+ };
}

libc! {
    u8: IPPROTO_TCP IPPROTO_UDP NFPROTO_INET NFPROTO_IPV4 NFPROTO_IPV6;
    u16: NFNL_MSG_BATCH_BEGIN NFNL_MSG_BATCH_END NFNL_SUBSYS_CTNETLINK NFNL_SUBSYS_NFTABLES
        NFT_MSG_NEWTABLE NFT_MSG_GETTABLE NFT_MSG_DELTABLE NFT_MSG_NEWCHAIN NFT_MSG_GETCHAIN NFT_MSG_DELCHAIN
        NFT_MSG_NEWRULE NFT_MSG_GETRULE NFT_MSG_NEWSET NFT_MSG_GETSET NFT_MSG_DELSET
        NFT_MSG_NEWSETELEM NFT_MSG_GETSETELEM NFT_MSG_DELSETELEM NFT_MSG_GETGEN NFT_MSG_DELRULE NFT_MSG_TRACE
        NFT_MSG_NEWOBJ NFT_MSG_GETOBJ NFT_MSG_DELOBJ;
    u32: NFT_BYTEORDER_HTON NFT_CMP_EQ NFT_CMP_GTE NFT_CMP_LT NFT_CMP_LTE NFT_CMP_NEQ
        NFT_CT_DIRECTION NFT_CT_DST_IP NFT_CT_DST_IP6 NFT_CT_PROTO_DST NFT_CT_SRC_IP NFT_CT_SRC_IP6 NFT_CT_STATE
        NFT_CT_STATUS NFT_DATA_VERDICT NFT_DYNSET_OP_ADD NFT_DYNSET_OP_UPDATE NFT_LOOKUP_F_INV
        NFT_META_IIF NFT_META_IIFNAME NFT_META_L4PROTO NFT_META_MARK NFT_META_NFTRACE NFT_META_OIFNAME
        NFT_META_PRIORITY NFT_NAT_DNAT NFT_NG_RANDOM NFT_PAYLOAD_NETWORK_HEADER NFT_PAYLOAD_TRANSPORT_HEADER
        NFT_REG32_00 NFT_REG_VERDICT NFT_REJECT_ICMP_UNREACH NFT_REJECT_TCP_RST NFT_SET_ELEM_INTERVAL_END
        NFT_SET_EVAL NFT_SET_INTERVAL NFT_SET_MAP NFT_SET_TIMEOUT NFNLGRP_NFTABLES NFNLGRP_NFTRACE RTN_LOCAL;
    i32: NFT_CONTINUE NFT_GOTO NFT_JUMP NFT_RETURN NF_ACCEPT NF_DROP;
}

/// Length of an interface name with its terminating zero byte.
pub const IFNAMSIZ: usize = libc::IFNAMSIZ;

/// Numbers the attributes of one nest, beginning with 1; `_` skips a number.
macro_rules! attributes {
    (@ $number:expr;) => {};
    (@ $number:expr; _ $($rest:tt)*) => { attributes!(@ $number + 1; $($rest)*); };
    (@ $number:expr; $name:ident $($rest:tt)*) => {
        pub const $name: u16 = $number;
        attributes!(@ $number + 1; $($rest)*);
    };
    ($($name:tt)+) => { attributes!(@ 1_u16; $($name)+); };
}

attributes! { NFTA_LIST_ELEM }
attributes! { NFTA_GEN_ID }
attributes! { NFTA_TABLE_NAME NFTA_TABLE_FLAGS _ _ _ NFTA_TABLE_USERDATA }
attributes! { _ _ NFTA_CHAIN_NAME NFTA_CHAIN_HOOK NFTA_CHAIN_POLICY _ NFTA_CHAIN_TYPE }
attributes! { NFTA_HOOK_HOOKNUM NFTA_HOOK_PRIORITY }
attributes! { _ NFTA_RULE_CHAIN NFTA_RULE_HANDLE NFTA_RULE_EXPRESSIONS _ _ NFTA_RULE_USERDATA }
attributes! {
    _ NFTA_SET_NAME NFTA_SET_FLAGS NFTA_SET_KEY_TYPE NFTA_SET_KEY_LEN NFTA_SET_DATA_TYPE NFTA_SET_DATA_LEN _
    NFTA_SET_DESC NFTA_SET_ID NFTA_SET_TIMEOUT _ NFTA_SET_USERDATA _ NFTA_SET_OBJ_TYPE
}
attributes! { NFTA_SET_DESC_SIZE }
attributes! { _ NFTA_SET_ELEM_LIST_SET NFTA_SET_ELEM_LIST_ELEMENTS }
attributes! {
    NFTA_SET_ELEM_KEY NFTA_SET_ELEM_DATA NFTA_SET_ELEM_FLAGS NFTA_SET_ELEM_TIMEOUT _ _ _ _ NFTA_SET_ELEM_OBJREF
}
attributes! { _ NFTA_OBJ_NAME NFTA_OBJ_TYPE NFTA_OBJ_DATA }
attributes! { _ _ NFTA_OBJREF_SET_SREG NFTA_OBJREF_SET_NAME }
attributes! { _ NFTA_COUNTER_PACKETS }
attributes! { NFTA_DATA_VALUE NFTA_DATA_VERDICT }
attributes! { NFTA_VERDICT_CODE NFTA_VERDICT_CHAIN }
attributes! { NFTA_EXPR_NAME NFTA_EXPR_DATA }
attributes! { NFTA_BITWISE_SREG NFTA_BITWISE_DREG NFTA_BITWISE_LEN NFTA_BITWISE_MASK NFTA_BITWISE_XOR }
attributes! {
    NFTA_BYTEORDER_SREG NFTA_BYTEORDER_DREG NFTA_BYTEORDER_OP NFTA_BYTEORDER_LEN NFTA_BYTEORDER_SIZE
}
attributes! { NFTA_CMP_SREG NFTA_CMP_OP NFTA_CMP_DATA }
attributes! { NFTA_CT_DREG NFTA_CT_KEY NFTA_CT_DIRECTION }
attributes! {
    NFTA_DYNSET_SET_NAME _ NFTA_DYNSET_OP NFTA_DYNSET_SREG_KEY NFTA_DYNSET_SREG_DATA NFTA_DYNSET_TIMEOUT
}
attributes! { NFTA_DUP_SREG_ADDR }
attributes! { NFTA_FIB_DREG NFTA_FIB_RESULT NFTA_FIB_FLAGS }
attributes! { NFTA_IMMEDIATE_DREG NFTA_IMMEDIATE_DATA }
attributes! { NFTA_LOOKUP_SET NFTA_LOOKUP_SREG NFTA_LOOKUP_DREG _ NFTA_LOOKUP_FLAGS }
attributes! { NFTA_MASQ_FLAGS NFTA_MASQ_REG_PROTO_MIN NFTA_MASQ_REG_PROTO_MAX }
attributes! { NFTA_META_DREG NFTA_META_KEY NFTA_META_SREG }
attributes! { NFTA_NAT_TYPE NFTA_NAT_FAMILY NFTA_NAT_REG_ADDR_MIN _ NFTA_NAT_REG_PROTO_MIN }
attributes! { NFTA_NG_DREG NFTA_NG_MODULUS NFTA_NG_TYPE NFTA_NG_OFFSET }
attributes! { NFTA_PAYLOAD_DREG NFTA_PAYLOAD_BASE NFTA_PAYLOAD_OFFSET NFTA_PAYLOAD_LEN }
attributes! { NFTA_REJECT_TYPE NFTA_REJECT_ICMP_CODE }
attributes! { NFTA_SOCKET_KEY NFTA_SOCKET_DREG }
attributes! {
    NFTA_TRACE_TABLE NFTA_TRACE_CHAIN _ _ NFTA_TRACE_VERDICT NFTA_TRACE_ID _ NFTA_TRACE_NETWORK_HEADER
    NFTA_TRACE_TRANSPORT_HEADER NFTA_TRACE_IIF _ _ _ _ _ NFTA_TRACE_POLICY
}

attributes! { CTA_TUPLE_ORIG CTA_TUPLE_REPLY _ CTA_PROTOINFO }
/// Linux 4.3.
pub const CTA_ZONE: u16 = 18;
/// Linux 5.8.
pub const CTA_FILTER: u16 = 25;
attributes! { CTA_TUPLE_IP CTA_TUPLE_PROTO }
attributes! { CTA_IP_V4_SRC CTA_IP_V4_DST CTA_IP_V6_SRC CTA_IP_V6_DST }
attributes! { CTA_PROTO_NUM CTA_PROTO_SRC_PORT CTA_PROTO_DST_PORT }
attributes! { CTA_FILTER_ORIG_FLAGS }
attributes! { CTA_PROTOINFO_TCP }
attributes! { CTA_PROTOINFO_TCP_STATE }
/// `enum tcp_conntrack` (`include/uapi/linux/netfilter/nf_conntrack_tcp.h`).
pub const TCP_CONNTRACK_SYN_SENT: u8 = 1;
pub const TCP_CONNTRACK_TIME_WAIT: u8 = 7;
pub const TCP_CONNTRACK_CLOSE: u8 = 8;
pub const IPCTNL_MSG_CT_GET: u16 = 1;
pub const IPCTNL_MSG_CT_DELETE: u16 = 2;
/// The bit of `CTA_PROTO_NUM` in `CTA_FILTER_ORIG_FLAGS` (`CTA_FILTER_FLAG`).
pub const CTA_FILTER_F_CTA_PROTO_NUM: u32 = 1 << 3;

/// The elements of the set name objects.
pub const NFT_SET_OBJECT: u32 = 1 << 6;
pub const NFT_OBJECT_COUNTER: u32 = 1;
/// Linux 5.0.
pub const NFT_META_IIFKIND: u32 = 26;
/// Linux 5.10.
pub const NFT_SOCKET_WILDCARD: u32 = 2;
/// Linux 5.6.
pub const NFT_DYNSET_OP_DELETE: u32 = 2;
pub const NFT_FIB_RESULT_ADDRTYPE: u32 = 3;
pub const NFTA_FIB_F_SADDR: u32 = 1 << 0;
pub const NFTA_FIB_F_DADDR: u32 = 1 << 1;
/// The table gets no packets.
pub const NFT_TABLE_F_DORMANT: u32 = 1 << 0;
/// Linux 5.12: only the socket that made the table can change it, and a flush by others passes it by.
pub const NFT_TABLE_F_OWNER: u32 = 1 << 1;
/// Linux 6.9: the table stays when its owner ends, until another process adopts it.
pub const NFT_TABLE_F_PERSIST: u32 = 1 << 2;

/// A packet that belongs to no connection, and begins none.
pub const NF_CT_STATE_INVALID_BIT: u32 = 1 << 0;
/// `NF_CT_STATE_BIT(IP_CT_NEW)`: the first packet of a connection.
pub const NF_CT_STATE_BIT_NEW: u32 = 1 << 3;
/// From the client.
pub const IP_CT_DIR_ORIGINAL: u8 = 0;
pub const IPS_SEEN_REPLY: u32 = 1 << 1;
/// Over TCP, the client has acknowledged the answer.
pub const IPS_ASSURED: u32 = 1 << 2;
/// A packet has passed all hooks.
pub const IPS_CONFIRMED: u32 = 1 << 3;
pub const IPS_DST_NAT: u32 = 1 << 5;
pub const NF_NAT_RANGE_PROTO_RANDOM_FULLY: u32 = 1 << 4;

pub const IFLA_IFNAME: u16 = 3;
pub const IFLA_MTU: u16 = 4;
pub const IFLA_XDP: u16 = 43;
attributes! { _ _ _ IFLA_XDP_PROG_ID IFLA_XDP_DRV_PROG_ID IFLA_XDP_SKB_PROG_ID IFLA_XDP_HW_PROG_ID }
attributes! { TCA_KIND TCA_OPTIONS }
attributes! { _ _ _ _ _ _ _ _ _ _ TCA_BPF_ID }
/// The handle of the qdisc clsact, `TC_H_MAKE(TC_H_CLSACT, 0)`, and its parent.
pub const TC_H_CLSACT: u32 = 0xffff_0000;
pub const TC_H_CLSACT_PARENT: u32 = 0xffff_fff1;
/// The parents of classifiers: `TC_H_MAKE(TC_H_CLSACT, TC_H_MIN_INGRESS)` and `…EGRESS`.
pub const TC_H_CLSACT_INGRESS: u32 = 0xffff_fff2;
pub const TC_H_CLSACT_EGRESS: u32 = 0xffff_fff3;
