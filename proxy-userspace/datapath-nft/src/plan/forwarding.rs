//! Packets that other nodes have forwarded whole to this one: they go to endpoints on this node, with their source.
//!
//! Invariant: a packet without the priority of forwarded ones ([`FORWARDED`]) is served as if these chains did not exist.
//!
//! The second chance: a packet in the middle of a TCP connection that conntrack does not know is given to the second node of its
//! priority, before anything of it gets into conntrack.

use model::Family;
use proxy_common::forward::{FORWARDED, FORWARDED_MASK, NO_SECOND};

use crate::{
    encode::{
        chain::{Chain, Hook},
        expressions::Rule,
        schema::Map,
        verdict::Verdict,
    },
    plan::endpoint_selector::{MatchKey, Registers, key},
};

const SYN: u8 = 0x02;
/// The lowest priority of a packet with a second node.
const WITH_SECOND: u32 = (FORWARDED | NO_SECOND as u32) + 1;

/// Leads the first packets of forwarded connections to the policies of [`Map::Forwarded`]. What these do not translate is looked up
/// like any other packet, in the next chain.
pub(crate) fn services(family: Family) -> Chain {
    let at = Registers::new(family);
    let rule = Rule::new(family, "forwarded to a Service address")
        .if_priority_in(FORWARDED | u32::from(NO_SECOND)..=FORWARDED | !FORWARDED_MASK);
    let rule = key(rule, MatchKey::Address, at).store_in_priority(Map::Forwarded, at.address);
    hooked("forwarded-prerouting", Hook::PreroutingForwarded, rule.verdict(&Verdict::Goto("dispatch".into())))
}

/// Gives packets in the middle of unknown connections to the second node: the way to the client leads through an uplink, where they
/// are wrapped for the node that their priority names.
pub(crate) fn second_chance(family: Family) -> Chain {
    let at = Registers::new(family);
    let rule = Rule::new(family, "the second node may know the connection")
        .if_priority_in(WITH_SECOND..=FORWARDED | !FORWARDED_MASK)
        .if_tcp()
        .if_tcp_flags(SYN, 0)
        .if_unknown()
        .source(at.address)
        .duplicate_to(at.address)
        .verdict(&Verdict::Drop);
    hooked("second-chance-prerouting", Hook::PreroutingEach, rule)
}

fn hooked(name: &str, hook: Hook, rule: Rule) -> Chain {
    Chain { name: name.to_owned(), hook: Some(hook), rules: vec![rule] }
}
