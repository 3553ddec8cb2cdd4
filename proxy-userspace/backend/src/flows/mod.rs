//! Ends flows that lead nowhere: those of protocols without connections, whose endpoint is gone.
//!
//! The one rule: one look at all flows for each change, however much has changed.
//! The kernel translates a flow as its first packet was, for as long as packets come. So a client of UDP that goes on
//! sending would never learn that its endpoint is gone, or that an address where nobody was has an endpoint now.

mod conntrack;

use std::{
    collections::{BTreeSet, HashMap},
    net::{IpAddr, SocketAddr},
};

use nix::errno::Errno;

use self::conntrack::Flow;

/// Where flows to some addresses may go.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Destinations(HashMap<(u8, SocketAddr), May>);

/// Where flows to one address may go.
#[derive(Clone, Debug, PartialEq, Eq)]
enum May {
    /// To one of these endpoints.
    GoTo(BTreeSet<SocketAddr>),
    /// Where they would go if the address were nobody's.
    GoUntranslated,
}

/// What a look at the flows came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cleaned {
    /// How many flows were ended.
    pub ended: usize,
}

impl Destinations {
    /// Whether nothing is said of any address.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Flows to this address may go to these endpoints only; to none, if there is none.
    ///
    /// The protocol is the number of UDP (17) or SCTP (132). The unspecified address stands for all of this host's.
    pub fn allow(&mut self, protocol: u8, address: SocketAddr, endpoints: BTreeSet<SocketAddr>) {
        self.0.insert((protocol, address), May::GoTo(endpoints));
    }

    /// The address is nobody's any more: flows that were translated must end.
    pub fn withdraw(&mut self, protocol: u8, address: SocketAddr) {
        self.0.insert((protocol, address), May::GoUntranslated);
    }

    /// Whether a flow goes where it must not go.
    fn is_wrong(&self, flow: &Flow, own: &BTreeSet<IpAddr>) -> bool {
        let may = self.0.get(&(flow.protocol, flow.destination)).or_else(|| {
            let any: IpAddr = match flow.destination {
                SocketAddr::V4(_) => [0; 4].into(),
                SocketAddr::V6(_) => [0; 16].into(),
            };
            let any = SocketAddr::new(any, flow.destination.port());
            self.0.get(&(flow.protocol, any)).filter(|_| own.contains(&flow.destination.ip()))
        });
        match may {
            None => false,
            Some(May::GoTo(endpoints)) => !endpoints.contains(&flow.answered_by),
            Some(May::GoUntranslated) => flow.answered_by != flow.destination,
        }
    }
}

/// Looks at all flows once, and ends those that go where they must not go. `own` are this host's addresses.
///
/// # Errors
///
/// If the kernel does not list its flows, or does not let us end one. Those that were ended stay so.
pub fn clean(destinations: &Destinations, own: &BTreeSet<IpAddr>) -> Result<Cleaned, Errno> {
    let protocols: BTreeSet<_> = destinations.0.keys().map(|(protocol, _)| *protocol).collect();
    conntrack::end(&protocols, |flow| destinations.is_wrong(flow, own))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    #[track_caller]
    fn check(destinations: &Destinations, destination: &str, answered_by: &str, is_wrong: bool) {
        let flow = Flow { protocol: 17, destination: at(destination), answered_by: at(answered_by) };
        assert_eq!(
            destinations.is_wrong(&flow, &["192.168.0.1".parse().expect("an address")].into()),
            is_wrong
        );
    }

    fn one() -> Destinations {
        let mut one = Destinations::default();
        one.allow(17, at("10.96.0.10:53"), BTreeSet::from([at("10.244.0.1:53")]));
        one.allow(17, at("0.0.0.0:30053"), BTreeSet::from([at("10.244.0.1:53")]));
        one
    }

    #[test]
    fn a_flow_to_an_endpoint_that_serves_goes_on() {
        check(&one(), "10.96.0.10:53", "10.244.0.1:53", false);
    }

    #[test]
    fn a_flow_to_an_endpoint_that_is_gone_ends() {
        check(&one(), "10.96.0.10:53", "10.244.0.2:53", true);
    }

    #[test]
    fn a_flow_from_before_there_was_an_endpoint_ends() {
        check(&one(), "10.96.0.10:53", "10.96.0.10:53", true);
    }

    #[test]
    fn flows_to_a_node_port_are_judged_at_this_hosts_addresses_only() {
        check(&one(), "192.168.0.1:30053", "10.244.0.2:53", true);
        check(&one(), "192.168.0.2:30053", "10.244.0.2:53", false);
    }

    #[test]
    fn flows_to_what_is_not_ours_go_on() {
        check(&one(), "8.8.8.8:53", "8.8.8.8:53", false);
        check(&one(), "10.96.0.10:54", "10.244.0.2:53", false);
    }

    #[test]
    fn an_address_that_is_nobodys_any_more_keeps_the_flows_that_were_never_translated() {
        let mut destinations = one();
        destinations.withdraw(17, at("10.96.0.10:53"));
        check(&destinations, "10.96.0.10:53", "10.244.0.1:53", true);
        check(&destinations, "10.96.0.10:53", "10.96.0.10:53", false);
    }
}
