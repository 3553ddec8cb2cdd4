//! UDP endpoints that were removed and to which sockets are still connected: who still sends to one gets ICMP port unreachable.
//!
//! Invariant: an endpoint that serves again is reachable with the transaction that makes it serve, and to new flows before. One
//! that is there and does not serve is never refused: flows to it may belong to no Service.
//!
//! The sockets of pods are connected to their endpoint by the socket path, so neither conntrack nor a new rule can redirect them,
//! and a proxy that may not enter the pods' network namespaces cannot end them. Their program gets ECONNREFUSED at its next call,
//! and connects again.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use model::{Family, Protocol};

use crate::{
    encode::{
        elements::{Element, Elements, Value},
        expressions::{Rule, Verdict},
        schema::{Bytes, Map},
        tables,
    },
    plan::{
        compile::{PortImage, ServiceImage},
        endpoint_selector::Registers,
    },
};
use netlink::{
    Message,
    uapi::{NFT_MSG_DELSETELEM, NFT_MSG_NEWSETELEM},
};

/// For how long after its removal an endpoint may be refused. Flows to it without a Service that began before are refused as
/// well, so not for long.
const SECONDS: u32 = 30;
/// How long it is not refused again: a user who may write endpoints could refuse flows to any address forever.
const REPEAT_INTERVAL: Duration = Duration::from_secs(600);
/// How many endpoints that is remembered of; beyond that no further one is refused.
const MAX_REFUSED: usize = 65_536;

/// The removed endpoints of the last moments, and those of them that are refused: to which sockets are still connected.
#[derive(Debug, Default)]
pub(crate) struct RemovedUdp {
    /// The endpoints, each with the time until which it may be refused.
    removed: BTreeMap<SocketAddr, Instant>,
    refused: BTreeSet<SocketAddr>,
    /// The endpoints that the kernel may refuse.
    sent: BTreeSet<SocketAddr>,
    /// Whether `refused` and `sent` may differ.
    is_changed: bool,
    /// When each endpoint was refused last.
    history: BTreeMap<SocketAddr, Instant>,
}

impl RemovedUdp {
    /// Takes over the changes of Services, each with its two images, and what else may have been removed. `known` are those that
    /// an earlier process has removed and the kernel refuses. `ports` are all ports after the changes.
    pub(crate) fn update<'a>(
        &mut self,
        changes: &[(&ServiceImage, &ServiceImage)],
        others: impl IntoIterator<Item = SocketAddr>,
        mut known: BTreeSet<SocketAddr>,
        ports: impl Iterator<Item = &'a PortImage>,
    ) {
        let mut removed: BTreeSet<_> = others.into_iter().collect();
        for (before, _) in changes {
            removed.extend(udp(before.ports.iter()).flat_map(present));
        }
        for port in changes.iter().flat_map(|(_, after)| udp(after.ports.iter())) {
            take_present(port, &mut removed);
            for it in present_among(port, self.removed.keys(), |it| self.removed.contains_key(it)) {
                self.removed.remove(&it);
                self.is_changed |= self.refused.remove(&it);
            }
        }
        self.is_changed |= !known.is_empty();
        self.sent.extend(&known);
        // Another Service may have the same endpoint.
        if !removed.is_empty() || !known.is_empty() {
            for port in udp(ports) {
                take_present(port, &mut removed);
                take_present(port, &mut known);
            }
        }
        let now = Instant::now();
        let is_recent = |it: &SocketAddr| {
            self.history.get(it).is_some_and(|at| now.duration_since(*at) < REPEAT_INTERVAL)
        };
        let room = MAX_REFUSED.saturating_sub(self.history.len() + self.removed.len());
        let removed: Vec<_> = removed.into_iter().filter(|it| !is_recent(it)).take(room).collect();
        let until = now + Duration::from_secs(SECONDS.into());
        self.removed.extend(removed.into_iter().map(|it| (it, until)));
        for it in known {
            self.removed.entry(it).or_insert(until);
            self.refused.insert(it);
            self.history.entry(it).or_insert(now);
        }
    }

    /// Leaves out those with such an address.
    pub(crate) fn except(&mut self, is_excepted: impl Fn(IpAddr) -> bool) {
        self.removed.retain(|it, _| !is_excepted(it.ip()));
        let count = self.refused.len();
        self.refused.retain(|it| !is_excepted(it.ip()));
        self.is_changed |= self.refused.len() != count;
    }

    /// The endpoints that were removed in the last moments.
    pub(crate) fn removed(&self) -> BTreeSet<SocketAddr> {
        self.removed.keys().copied().collect()
    }

    /// Refuses those to which sockets are still connected, and forgets those whose time is over. Returns whether the kernel has to
    /// know of it.
    pub(crate) fn select(&mut self, in_use: &BTreeSet<SocketAddr>) -> bool {
        let now = Instant::now();
        self.removed.retain(|_, until| now < *until);
        self.refused = in_use.iter().filter(|it| self.removed.contains_key(it)).copied().collect();
        self.is_changed = self.refused != self.sent;
        self.is_changed
    }

    /// The refused endpoints that the kernel does not know yet.
    fn unsent(&self) -> BTreeSet<SocketAddr> {
        if self.is_changed { &self.refused - &self.sent } else { BTreeSet::new() }
    }

    /// The endpoints that are not refused any more, and that the kernel may still know.
    fn restored(&self) -> BTreeSet<SocketAddr> {
        if self.is_changed { &self.sent - &self.refused } else { BTreeSet::new() }
    }

    pub(crate) fn is_refusing(&self) -> bool {
        !self.refused.is_empty()
    }

    /// The messages that bring the kernel's set of a family up to date; if it may have been emptied, that is `anew`.
    pub(crate) fn messages(&self, family: Family, anew: bool) -> Vec<Message> {
        let elements = |all: &BTreeSet<SocketAddr>| -> Elements {
            let element = |it: &SocketAddr| Element::new(family, Map::RemovedUdp, Bytes::endpoint(*it));
            let own = all.iter().filter(|it| Family::of(it.ip()) == family);
            own.map(|it| (element(it), Value::Expiring(SECONDS))).collect()
        };
        let restored = elements(&self.restored());
        let refused = if anew { elements(&self.refused) } else { elements(&self.unsent()) };
        // One that has expired cannot be deleted, and that would refuse the whole transaction.
        let all = [
            (NFT_MSG_NEWSETELEM, &restored),
            (NFT_MSG_DELSETELEM, &restored),
            (NFT_MSG_NEWSETELEM, &refused),
        ];
        all.into_iter().flat_map(|(command, all)| tables::elements(command, family, all)).collect()
    }

    /// The messages have taken effect.
    pub(crate) fn on_committed(&mut self) {
        let (now, unsent) = (Instant::now(), self.unsent());
        if !unsent.is_empty() {
            self.history.retain(|_, at| now.duration_since(*at) < REPEAT_INTERVAL);
            self.history.extend(unsent.into_iter().map(|it| (it, now)));
        }
        if mem::take(&mut self.is_changed) {
            self.sent.clone_from(&self.refused);
        }
    }
}

fn udp<'a>(ports: impl Iterator<Item = &'a PortImage>) -> impl Iterator<Item = &'a PortImage> {
    ports.filter(|it| it.identity.protocol == Protocol::Udp)
}

/// The kinds of interfaces through which the packets of pods arrive. Those of other hosts arrive through other kinds, or through
/// an interface with an address of the node ([`Map::Uplinks`]).
pub(crate) const POD_INTERFACES: [&str; 4] = ["veth", "netkit", "bridge", "openvswitch"];

/// The rule for every packet that arrives from a pod: it finds those to removed endpoints.
///
/// Not the first of a flow: the socket path may have chosen the endpoint just before it was removed, or since it serves again,
/// which the socket path knows a moment earlier. Nor those of the host to itself, whose first packet has left when it arrives.
pub(crate) fn rule(family: Family) -> Rule {
    let at = Registers::new(family);
    let port = at.protocol;
    Rule::new(family, "UDP to a removed endpoint")
        .if_udp()
        .if_passed_before()
        .destination(at.address)
        .destination_port(port)
        .if_in(Map::RemovedUdp, at.address)
        .interface_number(port)
        .if_not_in(Map::Uplinks, port)
        .verdict(&Verdict::Goto("refuse".into()))
}

/// The endpoints that are there, whether they serve or not, some of them more than once.
fn present(port: &PortImage) -> impl Iterator<Item = SocketAddr> {
    port.endpoints().chain(&port.not_serving).copied()
}

/// The endpoints of a port that are there, among others. What it costs depends on the fewer of both.
fn present_among<'a>(
    port: &PortImage,
    others: impl ExactSizeIterator<Item = &'a SocketAddr>,
    is_other: impl Fn(&SocketAddr) -> bool,
) -> Vec<SocketAddr> {
    if present(port).count() < others.len() {
        present(port).filter(|it| is_other(it)).collect()
    } else {
        others.filter(|it| port.allows(it) || port.not_serving.contains(it)).copied().collect()
    }
}

/// Takes the endpoints of a port that are there out of others.
fn take_present(port: &PortImage, others: &mut BTreeSet<SocketAddr>) {
    for it in present_among(port, others.iter(), |it| others.contains(it)) {
        others.remove(&it);
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use datapath::FrontendAddress;
    use model::state::Scope;

    use super::*;

    fn endpoint(n: u8) -> SocketAddr {
        (IpAddr::from([10, 244, 0, n]), 8080).into()
    }

    /// A Service with one port.
    fn service(protocol: Protocol, endpoints: &[u8]) -> ServiceImage {
        let address = (IpAddr::from([10, 96, 0, 1]), 80).into();
        let port = PortImage {
            is_forwarded: false,
            counter: None,
            index: 0,
            identity: FrontendAddress { address, protocol },
            frontends: Vec::new(),
            sets: vec![(Scope::Cluster, endpoints.iter().map(|it| endpoint(*it)).collect())],
            scopes: vec![(Scope::Cluster, Some(Scope::Cluster))],
            is_unique: true,
            affinity: 0,
            unselected: Vec::new(),
            not_serving: Vec::new(),
        };
        ServiceImage { ports: vec![port], ..ServiceImage::default() }
    }

    /// Changes one of two Services, with sockets connected to all endpoints; returns what is to be sent to the kernel: restored,
    /// then refused.
    fn change(
        state: &mut RemovedUdp,
        protocol: Protocol,
        [before, after]: [&[u8]; 2],
        other: &[u8],
    ) -> [Vec<SocketAddr>; 2] {
        let [before, after] = [before, after].map(|it| service(protocol, it));
        let other = service(Protocol::Udp, other);
        state.update(&[(&before, &after)], [], BTreeSet::new(), other.ports.iter());
        state.select(&state.removed());
        let sent = [state.restored(), state.unsent()].map(|it| it.into_iter().collect());
        state.on_committed();
        sent
    }

    #[test]
    fn a_removed_endpoint_is_refused_until_it_serves_again() {
        let mut state = RemovedUdp::default();
        let udp = Protocol::Udp;
        assert_eq!(change(&mut state, udp, [&[1, 2], &[2]], &[]), [vec![], vec![endpoint(1)]]);
        assert_eq!(change(&mut state, udp, [&[2], &[2, 3]], &[]), [vec![], vec![]]);
        assert!(!state.select(&[endpoint(1)].into()) && state.is_refusing());
        assert_eq!(change(&mut state, udp, [&[2, 3], &[1, 2, 3]], &[]), [vec![endpoint(1)], vec![]]);
        assert!(!state.select(&[endpoint(1)].into()) && !state.is_refusing());
        // Not again at once, but later.
        assert_eq!(change(&mut state, udp, [&[1, 2], &[2]], &[]), [vec![], vec![]]);
        change(&mut state, udp, [&[2], &[1, 2]], &[]);
        state.history.values_mut().for_each(|at| *at -= REPEAT_INTERVAL);
        assert_eq!(change(&mut state, udp, [&[1, 2], &[2]], &[]), [vec![], vec![endpoint(1)]]);
    }

    #[test]
    fn what_an_earlier_process_has_removed_is_refused_until_it_serves_again() {
        let mut state = RemovedUdp::default();
        let known = || BTreeSet::from([endpoint(1), endpoint(2), endpoint(3)]);
        let (empty, service) = (ServiceImage::default(), service(Protocol::Udp, &[1, 4]));
        let changes = [(&empty, &service)];
        // Also where the transaction fails, and the next one makes no change.
        for changes in [&changes[..], &[]] {
            state.update(changes, [], known(), service.ports.iter());
            state.except(|it| it == endpoint(3).ip());
            assert_eq!(state.restored(), [endpoint(1), endpoint(3)].into());
            assert_eq!(state.removed(), [endpoint(2)].into());
            assert_eq!(state.refused, [endpoint(2)].into());
        }
        state.on_committed();
        // Nor does a restart make it possible to refuse one again at once.
        assert_eq!(change(&mut state, Protocol::Udp, [&[], &[2]], &[]), [vec![endpoint(2)], vec![]]);
        assert_eq!(change(&mut state, Protocol::Udp, [&[2], &[]], &[]), [vec![], vec![]]);
    }

    #[test]
    fn an_endpoint_of_another_service_or_protocol_is_none_that_was_removed() {
        let mut state = RemovedUdp::default();
        assert_eq!(change(&mut state, Protocol::Udp, [&[1], &[]], &[1]), [vec![], vec![]]);
        assert_eq!(change(&mut state, Protocol::Tcp, [&[1], &[]], &[]), [vec![], vec![]]);
    }

    #[test]
    fn an_endpoint_is_refused_while_a_socket_is_connected_to_it_and_not_for_longer_than_a_moment() {
        let mut state = RemovedUdp::default();
        let [before, after] = [&[1, 2, 3][..], &[3]].map(|it| service(Protocol::Udp, it));
        state.update(&[(&before, &after)], [], BTreeSet::new(), after.ports.iter());
        assert!(!state.select(&BTreeSet::new()), "no socket is connected");
        assert!(state.select(&[1, 3].map(endpoint).into()));
        assert_eq!(state.unsent(), [endpoint(1)].into());
        state.on_committed();
        // A socket connected just before the flip is found later.
        assert!(state.select(&[1, 2].map(endpoint).into()));
        assert_eq!(state.unsent(), [endpoint(2)].into());
        state.on_committed();
        assert!(state.select(&[endpoint(2)].into()), "the last socket of the first one has gone");
        assert_eq!((state.restored(), &state.refused), ([endpoint(1)].into(), &[endpoint(2)].into()));
        state.on_committed();
        state.removed.values_mut().for_each(|until| *until = Instant::now());
        assert!(state.select(&[endpoint(2)].into()), "its time is over");
        assert_eq!((state.restored(), state.is_refusing()), ([endpoint(2)].into(), false));
    }

    #[test]
    fn an_endpoint_that_is_there_and_does_not_serve_is_refused_once_it_has_gone() {
        let mut state = RemovedUdp::default();
        let not_serving = |endpoints: &[u8]| {
            let mut it = service(Protocol::Udp, &[2]);
            it.ports[0].not_serving = endpoints.iter().map(|it| endpoint(*it)).collect();
            it
        };
        let states = [service(Protocol::Udp, &[1, 2]), not_serving(&[1]), not_serving(&[])];
        let expected = [vec![], vec![endpoint(1)]];
        for (states, expected) in states.windows(2).zip(expected) {
            state.update(&[(&states[0], &states[1])], [], BTreeSet::new(), states[1].ports.iter());
            assert_eq!(state.removed(), expected.into_iter().collect());
        }
    }

    #[test]
    fn of_many_endpoints_at_once_only_so_many_are_refused() {
        let mut service = service(Protocol::Udp, &[]);
        let all =
            || (0..MAX_REFUSED as u32 + 10).map(|n| SocketAddr::from((Ipv4Addr::from(0x0af4_0000 + n), 53)));
        service.ports[0].sets = vec![(Scope::Cluster, all().collect())];
        let mut state = RemovedUdp::default();
        state.update(&[(&service, &ServiceImage::default())], [], BTreeSet::new(), [].iter());
        state.select(&state.removed());
        assert_eq!(state.unsent().len(), MAX_REFUSED);
        state.on_committed();
        // Those that serve again are not, whether they are fewer than the others or not.
        let again = |count| {
            let mut some = service.clone();
            let set = &mut some.ports[0].sets[0].1;
            *set = set[..count].into();
            some
        };
        for (before, after) in [(0, 5), (5, 10), (10, MAX_REFUSED + 10)] {
            let [before, after] = [before, after].map(again);
            state.update(&[(&before, &after)], [], BTreeSet::new(), after.ports.iter());
            assert_eq!(state.refused.len(), MAX_REFUSED.saturating_sub(after.ports[0].sets[0].1.len()));
        }
    }

    #[test]
    fn an_endpoint_that_comes_and_goes_before_the_kernel_knows_is_removed() {
        let mut state = RemovedUdp::default();
        for (before, after) in [(&[1][..], &[][..]), (&[], &[1]), (&[1], &[])] {
            let [before, after] = [before, after].map(|it| service(Protocol::Udp, it));
            state.update(&[(&before, &after)], [], BTreeSet::new(), [].iter());
            state.select(&[endpoint(1)].into());
        }
        assert_eq!((state.unsent().len(), state.restored().len()), (1, 0));
    }
}
