//! Which TCP connections are ended, and when: those to endpoints that left a Service that drains. Pure.
//!
//! Invariant: in doubt a connection continues. An endpoint has left once it serves the Service no longer, selected for this node
//! or not; one that returns in time has not left.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::Arc,
    time::Duration,
};

use datapath_ebpf::{BackendPair, as_node_port, frontends, pairs};
use model::{
    Family, Protocol, ServiceName,
    state::{NodeState, ServiceState},
};
use tokio::time::Instant;

/// When connections are listed to find endpoints that left unobserved: those that selected an endpoint just before are
/// connected by then.
const SEARCH_DELAY: Duration = Duration::from_secs(1);

/// The endpoints that left the Services that drain.
#[derive(Clone, Debug, Default)]
pub(crate) struct Draining {
    /// The active state.
    state: Option<NodeState>,
    /// The Services that endpoints have left.
    services: BTreeMap<ServiceName, DrainingService>,
    /// Since when endpoints count as having left that left before this process observed the Service.
    search: Option<Instant>,
}

#[derive(Clone, Debug)]
struct DrainingService {
    /// How long after its endpoint has left a connection is ended.
    after: Duration,
    left: BTreeMap<BackendPair, Instant>,
}

impl Draining {
    /// A state is active.
    pub(crate) fn update(&mut self, now: &NodeState, at: Instant) {
        let is_first = self.state.is_none();
        let before = self.state.replace(now.clone()).unwrap_or_default();
        for (name, before, now) in now.diff(&before) {
            let left = self.services.remove(name).map(|it| it.left);
            // The endpoints of a deleted Service have left, too.
            let Some(after) = now.or(before).and_then(drain) else { continue };
            let mut left = left.unwrap_or_default();
            left.extend(before.into_iter().flat_map(|it| pairs(it, Protocol::Tcp)).map(|it| (it, at)));
            let serving = now.map(|it| serving(it)).unwrap_or_default();
            left.retain(|(_, backend), _| !serving.contains(backend));
            if !left.is_empty() {
                self.services.insert(name.clone(), DrainingService { after, left });
            }
            if now.is_some() && (is_first || before.is_some_and(|it| drain(it).is_none())) {
                self.search.get_or_insert(at);
            }
        }
        if self.services.is_empty() {
            return;
        }
        // Another Service may have taken over an address with its endpoints.
        let changed = now.diff(&before).filter_map(|(_, _, now)| now);
        let served: BTreeSet<_> = changed.flat_map(|it| pairs(it, Protocol::Tcp)).collect();
        self.services.retain(|_, it| {
            it.left.retain(|pair, _| !served.contains(pair));
            !it.left.is_empty()
        });
    }

    /// Whether connections that would be ended now may continue in this state.
    pub(crate) fn is_shortened_by(&self, next: &NodeState) -> bool {
        if let (Some(state), Some(_)) = (&self.state, self.search)
            && next.diff(state).any(|(_, _, next)| next.is_some_and(|it| drain(it).is_some()))
        {
            return true;
        }
        if self.services.is_empty() {
            return false;
        }
        let mut then = self.clone();
        then.update(next, Instant::now());
        self.pairs()
            .any(|(name, pair)| !then.services.get(name).is_some_and(|it| it.left.contains_key(&pair)))
    }

    fn pairs(&self) -> impl Iterator<Item = (&ServiceName, BackendPair)> {
        self.services.iter().flat_map(|(name, it)| it.left.keys().map(move |pair| (name, *pair)))
    }

    /// When something is to be done next.
    pub(crate) fn next(&self) -> Option<Instant> {
        let deadlines = self.services.values().filter_map(DrainingService::next);
        deadlines.chain(self.search.map(|it| it + SEARCH_DELAY)).min()
    }

    /// Whose connections are to be ended.
    pub(crate) fn due(&self, at: Instant) -> BTreeSet<BackendPair> {
        self.services.values().flat_map(|it| it.due(at)).collect()
    }

    /// Whether connections are to be listed, for [`on_found`](Self::on_found).
    pub(crate) fn is_search_due(&self, at: Instant) -> bool {
        self.search.is_some_and(|it| it + SEARCH_DELAY <= at)
    }

    /// The connections to these were ended.
    pub(crate) fn on_ended(&mut self, pairs: &BTreeSet<BackendPair>, at: Instant) {
        self.services.retain(|_, it| {
            // What has left again meanwhile is due later.
            let ended: Vec<_> = it.due(at).filter(|it| pairs.contains(it)).collect();
            for pair in ended {
                it.left.remove(&pair);
            }
            !it.left.is_empty()
        });
    }

    /// Connections were found from these destinations to these backends.
    pub(crate) fn on_found(&mut self, connections: &BTreeSet<BackendPair>) {
        let (Some(state), Some(at)) = (&self.state, self.search.take()) else { return };
        for (name, service) in &state.services {
            let Some(after) = drain(service) else { continue };
            let (frontends, serving) = (frontends(service, Protocol::Tcp), serving(service));
            let gone = connections.iter().filter(|(_, backend)| !serving.contains(backend));
            let at_frontend = gone.filter_map(|(destination, backend)| {
                let frontend = [*destination, as_node_port(*destination)];
                let frontend = frontend.into_iter().find(|it| frontends.contains(it))?;
                Some((frontend, *backend))
            });
            for pair in at_frontend {
                let service = self.services.entry(name.clone());
                let service = service.or_insert_with(|| DrainingService { after, left: BTreeMap::new() });
                service.left.entry(pair).or_insert(at);
            }
        }
    }
}

impl DrainingService {
    fn next(&self) -> Option<Instant> {
        self.left.values().min().map(|it| *it + self.after)
    }

    fn due(&self, at: Instant) -> impl Iterator<Item = BackendPair> {
        self.left.iter().filter(move |(_, left)| **left + self.after <= at).map(|(pair, _)| *pair)
    }
}

fn drain(service: &Arc<ServiceState>) -> Option<Duration> {
    service.service.load_balancing.drain.map(|it| Duration::from_secs(it.get().into()))
}

/// The targets that serve any TCP port of a Service, selected for this node or not.
fn serving(service: &ServiceState) -> BTreeSet<SocketAddr> {
    let is_tcp = |index: u16| {
        service.service.ports.get(usize::from(index)).is_some_and(|it| it.protocol == Protocol::Tcp)
    };
    let others = service.other_serving.iter().filter(|it| is_tcp(it.index)).map(|it| it.target);
    let endpoints = service.endpoints.iter().flat_map(|endpoint| {
        let ports = endpoint.ports.iter().filter(|it| is_tcp(it.index));
        ports.flat_map(|port| {
            let addresses = Family::ALL.into_iter().filter_map(|family| endpoint.address(family));
            addresses.map(|it| SocketAddr::new(it, port.port.get()))
        })
    });
    endpoints.chain(others).collect()
}

#[cfg(test)]
mod tests {
    use std::num::{NonZeroU16, NonZeroU32};

    use model::state::{
        Endpoint, EndpointKey, EndpointPort, LoadBalancing, PortTarget, Scopes, Service, ServicePort,
    };

    use super::*;

    const WEB: &str = "10.96.0.1:80";

    fn seconds(it: u64) -> Duration {
        Duration::from_secs(it)
    }

    fn pair(destination: &str, backend: u8) -> BackendPair {
        (destination.parse().unwrap(), target(backend))
    }

    fn target(n: u8) -> SocketAddr {
        SocketAddr::from(([10, 1, 0, n], 8080))
    }

    fn number(it: u16) -> NonZeroU16 {
        it.try_into().unwrap()
    }

    /// A Service at 10.96.0.1:80 that drains for so long (not at all if 0), with these endpoints.
    fn web<const N: usize>(drain: u32, endpoints: [u8; N]) -> ServiceState {
        named("web", drain, endpoints)
    }

    fn named<const N: usize>(name: &str, drain: u32, endpoints: [u8; N]) -> ServiceState {
        let service = Service {
            cluster_ips: vec![[10, 96, 0, 1].into()],
            ports: vec![ServicePort::new(Protocol::Tcp, number(80))],
            load_balancing: LoadBalancing { drain: NonZeroU32::new(drain), ..LoadBalancing::default() },
            ..Service::new(ServiceName::new("default", name))
        };
        let scopes = Scopes { internal: true, ..Scopes::default() };
        let endpoint = |n| Endpoint {
            v4: Some([10, 1, 0, n].into()),
            ports: [EndpointPort { index: 0, port: number(8080), scopes }].into(),
            ..Endpoint::new(EndpointKey::Pod(format!("p{n}").into()))
        };
        ServiceState::new(service, endpoints.map(endpoint))
    }

    fn with_others<const N: usize>(mut service: ServiceState, others: [u8; N]) -> ServiceState {
        service.other_serving = others.map(|n| PortTarget { index: 0, target: target(n) }).into();
        service
    }

    fn state<const N: usize>(services: [ServiceState; N]) -> NodeState {
        NodeState { services: services.map(Arc::new).into_iter().collect(), ..NodeState::default() }
    }

    /// The state of one Service, and then the others, a second apart; and when the first one became active.
    fn after<const N: usize>(states: [NodeState; N]) -> (Draining, Instant) {
        let (mut draining, start) = (Draining::default(), Instant::now());
        for (second, it) in (0..).zip(&states) {
            draining.update(it, start + seconds(second));
            // Without connections to be found.
            draining.search = None;
        }
        (draining, start)
    }

    #[track_caller]
    fn is_idle(draining: &Draining) {
        assert_eq!(draining.next(), None, "{draining:?}");
    }

    #[test]
    fn connections_end_when_the_deadline_has_passed_since_their_endpoint_left() {
        let (mut draining, start) = after([state([web(30, [1, 2])]), state([web(30, [1])])]);
        let deadline = start + seconds(31);
        assert_eq!(draining.next(), Some(deadline));
        assert!(draining.due(deadline - seconds(1)).is_empty());
        let due = draining.due(deadline);
        assert_eq!(due, [pair(WEB, 2)].into());
        // It leaves once more while its connections are being ended.
        draining.update(&state([web(30, [1, 2])]), deadline);
        draining.update(&state([web(30, [1])]), deadline);
        draining.on_ended(&due, deadline);
        assert_eq!(draining.next(), Some(deadline + seconds(30)));
        draining.on_ended(&due, deadline + seconds(30));
        is_idle(&draining);
    }

    #[test]
    fn an_endpoint_that_serves_and_is_not_selected_has_not_left() {
        let unselected = || with_others(web(30, [1]), [2]);
        is_idle(&after([state([web(30, [1, 2])]), state([unselected()])]).0);
        // Nor is it lost when the Service begins to drain at the same time.
        is_idle(&after([state([web(0, [1, 2])]), state([unselected()])]).0);
        let (draining, start) = after([state([unselected()]), state([web(30, [1])])]);
        assert_eq!(draining.due(start + seconds(31)), [pair(WEB, 2)].into());
    }

    #[test]
    fn an_endpoint_that_returns_before_the_deadline_keeps_its_connections() {
        let (with, without) = (|| state([web(30, [1, 2])]), || state([web(30, [1])]));
        is_idle(&after([with(), without(), with()]).0);
        is_idle(&after([with(), without(), state([with_others(web(30, [1]), [2])])]).0);
        let (draining, start) = after([with(), without(), with(), without()]);
        assert_eq!(draining.next(), Some(start + seconds(33)), "it left anew");
        let (draining, _) = after([with(), without()]);
        assert!(draining.is_shortened_by(&with()));
        assert!(!draining.is_shortened_by(&without()) && !draining.is_shortened_by(&state([])));
    }

    #[test]
    fn only_a_service_with_the_annotation_drains() {
        is_idle(&after([state([web(0, [1, 2])]), state([web(0, [1])]), state([])]).0);
        let (mut draining, start) = after([state([web(30, [1, 2])]), state([web(30, [1])])]);
        draining.update(&state([web(10, [1])]), start + seconds(2));
        assert_eq!(draining.next(), Some(start + seconds(11)), "the deadline follows the annotation");
        assert!(draining.is_shortened_by(&state([web(0, [1])])));
        draining.update(&state([web(0, [1])]), start + seconds(3));
        is_idle(&draining);
    }

    #[test]
    fn the_endpoints_of_a_deleted_service_have_left() {
        let (mut draining, start) = after([state([web(30, [1, 2])]), state([])]);
        assert_eq!(draining.due(start + seconds(31)), [pair(WEB, 1), pair(WEB, 2)].into());
        // Another Service takes over its address and one of its endpoints, without draining.
        let other = state([named("other", 0, [2])]);
        assert!(draining.is_shortened_by(&other));
        draining.update(&other, start + seconds(2));
        assert_eq!(draining.due(start + seconds(31)), [pair(WEB, 1)].into());
        // The Service returns without the annotation.
        draining.update(&state([web(0, [])]), start + seconds(3));
        is_idle(&draining);
    }

    #[test]
    fn an_endpoint_that_left_before_the_start_is_drained_from_the_start_on() {
        let destinations = [WEB, "192.0.2.1:30080", "10.96.0.9:80"];
        let connections: BTreeSet<_> =
            destinations.iter().flat_map(|it| [1, 2, 3].map(|n| pair(it, n))).collect();
        let service = |drain| {
            let mut it = with_others(web(drain, [1]), [3]);
            Arc::make_mut(&mut it.service).ports[0].node_port = Some(number(30080));
            it
        };
        let start = Instant::now();
        let mut draining = Draining::default();
        draining.update(&state([service(30)]), start);
        let search = draining.next().unwrap();
        assert!(draining.is_search_due(search) && !draining.is_search_due(start));
        // What is found is judged by the state that is active by then.
        assert!(draining.is_shortened_by(&state([web(30, [2])])));
        assert!(!draining.is_shortened_by(&state([service(30), named("other", 0, [2])])));
        draining.on_found(&connections);
        assert_eq!(draining.next(), Some(start + seconds(30)));
        // Those of a Service without the annotation, or of none, continue.
        assert_eq!(draining.due(start + seconds(30)), [pair(WEB, 2), pair("0.0.0.0:30080", 2)].into());

        let mut draining = Draining::default();
        draining.update(&state([service(0)]), start);
        is_idle(&draining);
        // So are those that left before the annotation was added.
        draining.update(&state([service(30)]), start + seconds(5));
        draining.on_found(&connections);
        assert_eq!(draining.next(), Some(start + seconds(35)));
    }
}
