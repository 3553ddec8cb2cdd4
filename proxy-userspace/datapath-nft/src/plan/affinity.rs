//! Session affinity: which clients keep their endpoint, and how many of a service port can.
//!
//! Invariant: only a client that has shown that it got an answer is kept for the timeout of the Service.
//! Anybody can send packets with the source of anybody else. Such a client shares an entry with all that have the same last bits
//! in their address, for a moment, and so takes no room from others.
//!
//! A chain that sees every packet ([`crate::plan::watch`]) while a Service has session affinity moves clients from one map to the other.

use model::Family;

use crate::{
    encode::{
        chain::Chain,
        elements::{Element, Value},
        expressions::{Rule, Verdict},
        schema::{Bytes, Map},
    },
    plan::{
        affinity_numbers::{SERVICE_PORT_MASK, seconds_word},
        endpoint_selector::{Registers, group, some_bits},
    },
};

/// The element that leads from a timeout to its chain.
pub(crate) fn timeout(family: Family, seconds: u32) -> (Element, Value) {
    let element = Element::new(family, Map::AffinityTimeouts, Bytes::new().number(seconds_word(seconds)));
    (element, Value::Verdict(Verdict::Goto(chain_name(seconds))))
}

fn chain_name(seconds: u32) -> String {
    format!("answered-for-{seconds}")
}

/// The chain of a timeout: it keeps the client of a connection.
pub(crate) fn chain(family: Family, seconds: u32) -> Chain {
    let at = Registers::new(family);
    let keep = |rule| {
        unanswered(rule, at)
            .masked_priority(at.client, SERVICE_PORT_MASK)
            .if_not_in(Map::AffinityFull, at.client)
            .connection_source(at.client)
            .masked_priority(at.address, SERVICE_PORT_MASK)
            .priority(at.next)
            .insert_new(Map::Affinity, at.client, at.next, seconds)
    };
    let rule = |comment| Rule::new(family, comment);
    let [udp, others] = both(family, "keep the client");
    let rules = [keep(udp), keep(others), rule("restore the priority").store_number_in_priority(0)];
    Chain::new(chain_name(seconds), rules)
}

/// The rules for every packet of every connection: they find those of clients that were answered a moment ago.
pub(crate) fn answered(family: Family) -> Vec<Rule> {
    let at = Registers::new(family);
    let back = |rule: Rule| rule.verdict(&Verdict::Return);
    let rule = |comment| Rule::new(family, comment);
    let mut rules = vec![
        back(rule("no answer to a translated connection").if_not_translated_and_answered()),
        // Over UDP the answer itself is enough: most clients send a single packet.
        back(rule("the client may not have got the answer").if_not_udp().if_not_assured()),
    ];
    let dispatch = Verdict::Goto(BY_TIMEOUT.into());
    rules.extend(both(family, "an answered client").map(|it| unanswered(it, at).verdict(&dispatch)));
    rules
}

/// The chain to which [`answered`] leads.
pub(crate) fn by_timeout(family: Family) -> Chain {
    let at = Registers::new(family).client;
    let rule = |comment| Rule::new(family, comment);
    let rules = [
        rule("by timeout")
            .masked_priority(at, SERVICE_PORT_MASK)
            .store_in_priority(Map::AffinitySeconds, at)
            .dispatch(Map::AffinityTimeouts),
        rule("restore the priority").store_number_in_priority(0),
    ];
    Chain::new(BY_TIMEOUT, rules)
}

/// The name of [`by_timeout`].
pub(crate) const BY_TIMEOUT: &str = "answered-by-timeout";

/// Reads the frontend of a connection and some bits of its client. The first rule is for UDP, in both directions. For other
/// protocols a packet from the client shows that it has got the answer, and `nft` has no type for the port of a connection whose
/// protocol is not known.
fn both(family: Family, comment: &str) -> [Rule; 2] {
    let at = Registers::new(family);
    let udp = some_bits(Rule::new(family, comment).if_udp().connection_source(at.client), at)
        .connection_destination(at.address)
        .protocol(at.protocol)
        .connection_destination_port(at.port);
    [udp, group(Rule::new(family, comment).if_not_udp().if_from_client(), at)]
}

/// Looks up the member of an unanswered client.
fn unanswered(rule: Rule, at: Registers) -> Rule {
    rule.store_in_priority(Map::AffinityUnanswered, at.client)
}
