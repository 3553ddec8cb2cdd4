//! Session affinity: which clients keep their endpoint, and how many of a service port can.
//!
//! Invariant: only a client that has shown that it got an answer is kept for the timeout of the Service.
//! Anybody can send packets with the source of anybody else. Such a client shares an entry with all that have the same last bits
//! in their address, for a moment, and so takes no room from others.
//!
//! A chain that sees every packet ([`crate::watch`]) while a Service has session affinity moves clients from one map to the other.

use model::Family;

use crate::{
    chain::Chain,
    elements::{Element, Elements, Value},
    endpoint_selector::{MatchKey, Registers, group},
    expressions::{Direction, Rule},
    schema::{Bytes, Map, Parts},
    verdict::Verdict,
};

/// The element that leads from a timeout to its chain.
pub(super) fn timeout(family: Family, seconds: u32) -> (Element, Value) {
    let element = Element::new(family, Map::AffinityTimeouts, Bytes::new().number(seconds));
    (element, Value::Verdict(Verdict::Goto(chain_name(seconds))))
}

/// The timeouts among elements, of one table.
pub(super) fn among(elements: &Elements) -> impl Iterator<Item = u32> {
    let timeouts = elements.keys().filter(|it| it.map == Map::AffinityTimeouts);
    timeouts.filter_map(|it| Parts::of(&it.key, it.family).number())
}

/// The name of the chain of a timeout.
pub(super) fn chain_name(seconds: u32) -> String {
    format!("answered-for-{seconds}")
}

/// The chain of a timeout: it keeps the client of a connection.
pub(super) fn chain(family: Family, seconds: u32) -> Chain {
    let at = Registers::new(family);
    let keep = |by| {
        // Both directions know the endpoint, whichever of them this packet belongs to.
        client(service_port(Rule::new(family, "keep the client"), by, at), at)
            .if_not_in(Map::AffinityFull, at.address)
            .connection_source(Direction::Reply, at.next)
            .connection_source_port(Direction::Reply, at.port_after())
            .insert_new(Map::Affinity, at.client, at.next, seconds)
    };
    Chain { name: chain_name(seconds), hook: None, rules: MatchKey::ALL.map(keep).into() }
}

/// The rules for every packet of every connection: they find those of clients that were answered a moment ago.
pub(super) fn answered(family: Family) -> Vec<Rule> {
    let at = Registers::new(family);
    let back = |rule: Rule| rule.verdict(&Verdict::Return);
    let rule = |comment| Rule::new(family, comment);
    let dispatch = |by| {
        group(client(service_port(rule("an answered client"), by, at), at), at)
            .if_in(Map::AffinityUnanswered, at.client)
            .look_up(Map::AffinitySeconds, at.address, at.next)
            .dispatch_by(Map::AffinityTimeouts, at.next)
    };
    let mut rules = vec![
        back(rule("no answer to a translated connection").if_not_translated_and_answered()),
        // Over UDP the answer itself is enough: most clients send a single packet.
        back(rule("the client may not have got the answer").if_not_udp().if_not_assured()),
    ];
    rules.extend(MatchKey::ALL.map(dispatch));
    rules
}

/// Reads the service port of a connection.
fn service_port(rule: Rule, by: MatchKey, at: Registers) -> Rule {
    let rule = rule.connection_destination(at.address);
    let rule = match by {
        MatchKey::Address => rule,
        MatchKey::NodePort => rule.if_in(Map::NodeAddresses, at.address),
    };
    rule.protocol(at.protocol).connection_destination_port(at.port).look_up(
        by.service_ports(),
        at.key(by),
        at.address,
    )
}

/// Reads the client of a connection.
fn client(rule: Rule, at: Registers) -> Rule {
    rule.connection_source(Direction::Original, at.client)
}
