//! Packets that other nodes have forwarded whole to this one: they go to endpoints on this node, with their source.
//!
//! Invariant: a packet without the priority of forwarded ones ([`FORWARDED`]) is served as if these chains did not exist.
//!
//! The second chance: a packet of a TCP connection that conntrack does not know, or an ICMP error about one, is given to the second
//! node of its priority, before anything of it gets into conntrack.

use std::ops::RangeInclusive;

use model::Family;
use netlink::uapi::IPPROTO_TCP;
use proxy_common::forward::{FORWARDED, FORWARDED_MASK, ICMP, ICMPV6, NO_SECOND};

use crate::{
    encode::{
        chain::{Chain, Hook},
        expressions::{Rule, Verdict},
        schema::Map,
    },
    plan::endpoint_selector::{MatchKey, Registers, key},
};

/// The priorities of packets with a second node: those in the middle of connections, and while forwarding begins, all.
pub(crate) const WITH_SECOND: RangeInclusive<u32> =
    (FORWARDED | NO_SECOND as u32) + 1..=FORWARDED | !FORWARDED_MASK;

/// Leads the first packets of forwarded connections to the policies of [`Map::Forwarded`]. What these do not translate is looked up
/// like any other packet, in the next chain.
pub(crate) fn services(family: Family) -> Chain {
    let at = Registers::new(family);
    let rule = Rule::new(family, "forwarded to a Service address")
        .if_priority_in(FORWARDED | u32::from(NO_SECOND)..=FORWARDED | !FORWARDED_MASK);
    let rule = key(rule, MatchKey::Address, at).store_in_priority(Map::Forwarded, at.address);
    let rule = rule.verdict(&Verdict::Goto("dispatch".into()));
    Chain::base("forwarded-prerouting", Hook::PREROUTING_FORWARDED, [rule])
}

/// Gives packets of unknown connections to the second node, and ICMP errors about them: the way to their source
/// leads through an uplink, where they are wrapped for the node that their priority names.
pub(crate) fn second_chance(family: Family) -> Chain {
    let at = Registers::new(family);
    let to_second = |comment: &str, protocol| {
        let rule = Rule::new(family, comment).if_priority_in(WITH_SECOND).if_protocol(protocol).if_unknown();
        rule.source(at.address).duplicate_to(at.address).verdict(&Verdict::Drop)
    };
    let icmp = match family {
        Family::V4 => ICMP,
        Family::V6 => ICMPV6,
    };
    let rules = [
        Rule::new(family, "a connection that is not answered yet is known")
            .if_priority_in(WITH_SECOND)
            .if_passed_before()
            .verdict(&Verdict::Return),
        to_second("the second node may know the connection", IPPROTO_TCP),
        to_second("or that of an ICMP error", icmp),
    ];
    Chain::base("second-chance-prerouting", Hook::PREROUTING_EACH, rules)
}
