//! Deletes stale conntrack entries of protocols without connections (UDP, SCTP).
//!
//! Invariant: one pass over conntrack per change, however much has changed.
//! The kernel translates a flow as it translated its first packet, for as long as packets come. Without a cleanup, a UDP
//! client that keeps sending would never leave a removed endpoint, nor find the first endpoint of an address that had none.

use std::{
    collections::{BTreeSet, HashMap},
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use nix::errno::Errno;
use tokio::time::Instant;

use crate::conntrack::{self, Flow};

/// Where flows may lead, by protocol and destination; flows to other destinations are kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FlowRules(HashMap<(u8, SocketAddr), AllowedBackends>);

/// Where flows to one destination may lead.
#[derive(Clone, Debug, PartialEq, Eq)]
enum AllowedBackends {
    /// To one of these endpoints.
    Only(BTreeSet<SocketAddr>),
    /// To the destination itself, untranslated.
    Untranslated,
}

impl FlowRules {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Flows to this address may lead to these endpoints only; to none if there is none.
    ///
    /// The protocol is the number of UDP (17) or SCTP (132). The unspecified address stands for all of this host's.
    pub fn allow(&mut self, protocol: u8, address: SocketAddr, endpoints: BTreeSet<SocketAddr>) {
        self.0.insert((protocol, address), AllowedBackends::Only(endpoints));
    }

    /// No Service has the address any more: flows that were translated are stale.
    pub fn withdraw(&mut self, protocol: u8, address: SocketAddr) {
        self.0.insert((protocol, address), AllowedBackends::Untranslated);
    }

    fn is_stale(&self, flow: &Flow, own: &BTreeSet<IpAddr>) -> bool {
        let allowed = self.0.get(&(flow.protocol, flow.destination)).or_else(|| {
            let any: IpAddr = match flow.destination {
                SocketAddr::V4(_) => [0; 4].into(),
                SocketAddr::V6(_) => [0; 16].into(),
            };
            let any = SocketAddr::new(any, flow.destination.port());
            self.0.get(&(flow.protocol, any)).filter(|_| own.contains(&flow.destination.ip()))
        });
        match allowed {
            None => false,
            Some(AllowedBackends::Only(endpoints)) => !endpoints.contains(&flow.reply_source),
            Some(AllowedBackends::Untranslated) => flow.reply_source != flow.destination,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowPass {
    pub is_ipv6: bool,
    pub took: Duration,
    pub deleted: usize,
}

/// Lists all flows once, family by family, and deletes the stale ones. `own` are this host's addresses.
///
/// # Errors
///
/// If the kernel refuses to list or delete entries. Those that were deleted stay deleted.
pub fn delete_stale_flows(rules: &FlowRules, own: &BTreeSet<IpAddr>) -> Result<[FlowPass; 2], Errno> {
    let protocols: BTreeSet<_> = rules.0.keys().map(|(protocol, _)| *protocol).collect();
    let pass = |is_ipv6| {
        let begin = Instant::now();
        let deleted = conntrack::delete_stale(is_ipv6, &protocols, |flow| rules.is_stale(flow, own))?;
        Ok(FlowPass { is_ipv6, took: begin.elapsed(), deleted })
    };
    Ok([pass(false)?, pass(true)?])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn a_flow_is_stale_if_no_endpoint_of_its_destination_answers_it() {
        let mut rules = FlowRules::default();
        let endpoints = BTreeSet::from([at("10.244.0.1:53")]);
        rules.allow(17, at("10.96.0.10:53"), endpoints.clone());
        rules.allow(17, at("0.0.0.0:30053"), endpoints);
        rules.withdraw(17, at("10.96.0.11:53"));
        let cases = [
            ("a serving endpoint", "10.96.0.10:53", "10.244.0.1:53", false),
            ("a removed endpoint", "10.96.0.10:53", "10.244.0.2:53", true),
            ("untranslated, and there is an endpoint", "10.96.0.10:53", "10.96.0.10:53", true),
            ("a node port of this host", "192.168.0.1:30053", "10.244.0.2:53", true),
            ("a node port of another host", "192.168.0.2:30053", "10.244.0.2:53", false),
            ("another address", "8.8.8.8:53", "8.8.8.8:53", false),
            ("another port", "10.96.0.10:54", "10.244.0.2:53", false),
            ("a withdrawn address", "10.96.0.11:53", "10.244.0.1:53", true),
            ("a withdrawn address, never translated", "10.96.0.11:53", "10.96.0.11:53", false),
        ];
        let own = BTreeSet::from([IpAddr::from([192, 168, 0, 1])]);
        for (about, destination, reply_source, is_stale) in cases {
            let flow = Flow { protocol: 17, destination: at(destination), reply_source: at(reply_source) };
            assert_eq!(rules.is_stale(&flow, &own), is_stale, "{about}");
        }
    }
}
