//! UDP endpoints that were removed: who still sends to one gets ICMP port unreachable.
//!
//! Invariant: an endpoint that serves again is reachable with the transaction that makes it serve, and to new flows before.
//!
//! The sockets of pods are connected to their endpoint by the socket path, so neither conntrack nor a new rule can redirect them,
//! and a proxy that may not enter the pods' network namespaces cannot end them. Their program gets ECONNREFUSED at its next call,
//! and connects again.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use model::{Family, Protocol};

use crate::{
    compile::{PortImage, ServiceImage},
    elements::{Element, Elements, Value},
    endpoint_selector::Registers,
    expressions::Rule,
    schema::{Bytes, Map},
    tables::{self, Command, expiring_elements},
    verdict::Verdict,
};
use netlink::Message;

/// How long an endpoint is refused. Flows to it without a Service that began before are refused as well, so not for long.
const SECONDS: u32 = 30;
/// How long it is not refused again: a user who may write endpoints could refuse flows to any address for ever.
const REPEAT_INTERVAL: Duration = Duration::from_secs(600);
/// How many endpoints that is remembered of; beyond that no further one is refused.
const MAX_REFUSED: usize = 65_536;

/// The removed endpoints of the last moments.
#[derive(Debug, Default)]
pub(super) struct RemovedUdp {
    /// Each with the time until which it is refused.
    until: BTreeMap<SocketAddr, Instant>,
    /// Those of them that the kernel does not know yet.
    unsent: BTreeSet<SocketAddr>,
    /// Those that serve again, and that the kernel may still know.
    restored: BTreeSet<SocketAddr>,
    /// When each was refused last.
    refused: BTreeMap<SocketAddr, Instant>,
}

impl RemovedUdp {
    /// Takes over the changes of Services, each with its two images, and what else may have been removed. `known` are those that
    /// an earlier process has removed and the kernel refuses. `ports` are all ports after the changes.
    pub(super) fn update<'a, P: Iterator<Item = &'a PortImage>>(
        &mut self,
        changes: &[(&ServiceImage, &ServiceImage)],
        others: impl IntoIterator<Item = SocketAddr>,
        mut known: BTreeSet<SocketAddr>,
        ports: impl Fn() -> P,
    ) {
        let mut removed: BTreeSet<_> = others.into_iter().collect();
        for (before, _) in changes {
            removed.extend(udp(before.ports.iter()).flat_map(PortImage::allowed));
        }
        for port in changes.iter().flat_map(|(_, after)| udp(after.ports.iter())) {
            take_allowed(port, &mut removed);
            for it in allowed(port, self.until.keys(), |it| self.until.contains_key(it)) {
                self.until.remove(&it);
                self.restored.insert(it);
            }
        }
        // Another Service may have the same endpoint.
        if !removed.is_empty() || !known.is_empty() {
            for port in udp(ports()) {
                take_allowed(port, &mut removed);
                self.restored.extend(take_allowed(port, &mut known));
            }
        }
        let now = Instant::now();
        let is_recent = |it: &SocketAddr| {
            self.refused.get(it).is_some_and(|at| now.duration_since(*at) < REPEAT_INTERVAL)
        };
        let room = MAX_REFUSED.saturating_sub(self.refused.len() + self.unsent.len());
        let removed: BTreeSet<_> = removed.into_iter().filter(|it| !is_recent(it)).take(room).collect();
        self.unsent.retain(|it| !self.restored.contains(it));
        self.restored.retain(|it| !removed.contains(it));
        let until = now + Duration::from_secs(SECONDS.into());
        self.until.extend(removed.iter().map(|it| (*it, until)));
        self.unsent.extend(removed);
        for it in known {
            self.until.entry(it).or_insert(until);
            self.refused.entry(it).or_insert(now);
        }
    }

    /// Leaves out those with such an address.
    pub(super) fn except(&mut self, is_excepted: impl Fn(IpAddr) -> bool) {
        for it in self.unsent.extract_if(.., |it| is_excepted(it.ip())) {
            self.until.remove(&it);
        }
        self.restored.extend(self.until.extract_if(.., |it, _| is_excepted(it.ip())).map(|(it, _)| it));
    }

    /// Forgets those whose time is over; returns whether any are left.
    pub(super) fn expire(&mut self) -> bool {
        let now = Instant::now();
        self.until.retain(|_, until| now < *until);
        !self.until.is_empty()
    }

    /// The messages that bring the kernel's set of a family up to date; if it may have been emptied, that is `anew`.
    pub(super) fn messages(&self, family: Family, anew: bool) -> Vec<Message> {
        let elements = |all: &mut dyn Iterator<Item = &SocketAddr>| -> Elements {
            let element = |it: &SocketAddr| {
                Element::new(family, Map::RemovedUdp, Bytes::new().address(it.ip()).port(it.port()))
            };
            let own = all.filter(|it| Family::of(it.ip()) == family);
            own.map(|it| (element(it), Value::None)).collect()
        };
        let restored = elements(&mut self.restored.iter());
        let removed = if anew { elements(&mut self.until.keys()) } else { elements(&mut self.unsent.iter()) };
        // One that has expired cannot be deleted, and that would refuse the whole transaction.
        let mut messages = expiring_elements(family, Map::RemovedUdp, restored.keys(), SECONDS);
        messages.extend(tables::elements(Command::DeleteElements, family, (Map::RemovedUdp, 0), &restored));
        messages.extend(expiring_elements(family, Map::RemovedUdp, removed.keys(), SECONDS));
        messages
    }

    /// The messages have taken effect.
    pub(super) fn on_committed(&mut self) {
        let now = Instant::now();
        if !self.unsent.is_empty() {
            self.refused.retain(|_, at| now.duration_since(*at) < REPEAT_INTERVAL);
            self.refused.extend(std::mem::take(&mut self.unsent).into_iter().map(|it| (it, now)));
        }
        self.restored.clear();
    }
}

fn udp<'a>(ports: impl Iterator<Item = &'a PortImage>) -> impl Iterator<Item = &'a PortImage> {
    ports.filter(|it| it.identity.protocol == Protocol::Udp)
}

/// The rule for every packet that arrives: it finds those to removed endpoints.
///
/// Not the first of a flow: the socket path may have chosen the endpoint just before it was removed, or since it serves again,
/// which the socket path knows a moment earlier. Nor those of the host to itself, whose first packet has left when it arrives.
pub(super) fn rule(family: Family) -> Rule {
    let at = Registers::new(family);
    let port = at.protocol;
    Rule::new(family, "UDP to a removed endpoint")
        .if_udp()
        .if_interface_is_not("lo")
        .if_passed_before()
        .destination(at.address)
        .destination_port(port)
        .if_in(Map::RemovedUdp, at.address)
        .verdict(&Verdict::Goto("refuse".into()))
}

/// The endpoints of a port that are among others. What it costs depends on the fewer of both.
fn allowed<'a>(
    port: &PortImage,
    others: impl ExactSizeIterator<Item = &'a SocketAddr>,
    is_other: impl Fn(&SocketAddr) -> bool,
) -> Vec<SocketAddr> {
    if port.endpoints().count() < others.len() {
        port.endpoints().filter(|it| is_other(it)).copied().collect()
    } else {
        others.filter(|it| port.allows(it)).copied().collect()
    }
}

/// Takes the endpoints of a port out of others.
fn take_allowed(port: &PortImage, others: &mut BTreeSet<SocketAddr>) -> Vec<SocketAddr> {
    let taken = allowed(port, others.iter(), |it| others.contains(it));
    for it in &taken {
        others.remove(it);
    }
    taken
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
            index: 0,
            identity: FrontendAddress { address, protocol },
            frontends: Vec::new(),
            sets: vec![(Scope::Cluster, endpoints.iter().map(|it| endpoint(*it)).collect())],
            affinity: 0,
            unselected: Vec::new(),
        };
        ServiceImage { ports: vec![port], ..ServiceImage::default() }
    }

    /// Changes one of two Services; returns what is to be sent to the kernel: restored, then removed.
    fn change(
        state: &mut RemovedUdp,
        protocol: Protocol,
        [before, after]: [&[u8]; 2],
        other: &[u8],
    ) -> [Vec<SocketAddr>; 2] {
        let [before, after] = [before, after].map(|it| service(protocol, it));
        let other = service(Protocol::Udp, other);
        state.update(&[(&before, &after)], [], BTreeSet::new(), || other.ports.iter());
        let sent = [state.restored.clone(), state.unsent.clone()].map(|it| it.into_iter().collect());
        state.on_committed();
        sent
    }

    #[test]
    fn a_removed_endpoint_is_refused_until_it_serves_again() {
        let mut state = RemovedUdp::default();
        let udp = Protocol::Udp;
        assert_eq!(change(&mut state, udp, [&[1, 2], &[2]], &[]), [vec![], vec![endpoint(1)]]);
        assert_eq!(change(&mut state, udp, [&[2], &[2, 3]], &[]), [vec![], vec![]]);
        assert!(state.expire());
        assert_eq!(change(&mut state, udp, [&[2, 3], &[1, 2, 3]], &[]), [vec![endpoint(1)], vec![]]);
        assert!(!state.expire());
        // Not again at once, but later.
        assert_eq!(change(&mut state, udp, [&[1, 2], &[2]], &[]), [vec![], vec![]]);
        change(&mut state, udp, [&[2], &[1, 2]], &[]);
        state.refused.values_mut().for_each(|at| *at -= REPEAT_INTERVAL);
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
            state.update(changes, [], known(), || service.ports.iter());
            state.except(|it| it == endpoint(3).ip());
            assert_eq!(state.restored, [endpoint(1), endpoint(3)].into());
            assert_eq!(state.until.keys().copied().collect::<Vec<_>>(), [endpoint(2)]);
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
    fn of_many_endpoints_at_once_only_so_many_are_refused() {
        let mut service = service(Protocol::Udp, &[]);
        let all =
            || (0..MAX_REFUSED as u32 + 10).map(|n| SocketAddr::from((Ipv4Addr::from(0x0af4_0000 + n), 53)));
        service.ports[0].sets = vec![(Scope::Cluster, all().collect())];
        let mut state = RemovedUdp::default();
        state.update(&[(&service, &ServiceImage::default())], [], BTreeSet::new(), || [].iter());
        assert_eq!(state.unsent.len(), MAX_REFUSED);
        state.on_committed();
        // Those that serve again are not, whether they are fewer than the others or not.
        let again = |count| {
            let mut some = service.clone();
            some.ports[0].sets[0].1.truncate(count);
            some
        };
        for (before, after) in [(0, 5), (5, 10), (10, MAX_REFUSED + 10)] {
            let [before, after] = [before, after].map(again);
            state.update(&[(&before, &after)], [], BTreeSet::new(), || after.ports.iter());
            assert_eq!(state.until.len(), MAX_REFUSED.saturating_sub(after.ports[0].sets[0].1.len()));
        }
    }

    #[test]
    fn an_endpoint_that_comes_and_goes_before_the_kernel_knows_is_removed() {
        let mut state = RemovedUdp::default();
        for (before, after) in [(&[1][..], &[][..]), (&[], &[1]), (&[1], &[])] {
            let [before, after] = [before, after].map(|it| service(Protocol::Udp, it));
            state.update(&[(&before, &after)], [], BTreeSet::new(), || [].iter());
        }
        assert_eq!((state.unsent.len(), state.restored.len()), (1, 0));
    }
}
