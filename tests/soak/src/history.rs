//! The states that have been written, when each may have been active, and whether one explains a reply.
//! Invariant: a state is recorded before the proxy can read it, and obsolete only once a later one was seen active.

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    io,
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use tests::{Transport, manifest::Service};

use crate::random_cluster;

/// How long an obsolete state is kept: longer than any request takes.
const RETENTION: Duration = Duration::from_secs(20);

/// A Service's address and its protocol, `TCP` or `UDP`.
pub(crate) type FrontendKey = (SocketAddr, &'static str);

/// The times at which something began and ended.
type Period = (Instant, Instant);

/// The endpoints of a frontend, and whether it has session affinity.
#[derive(Debug)]
struct EndpointSet {
    endpoints: BTreeSet<IpAddr>,
    has_affinity: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    /// The endpoint that answered.
    From(IpAddr),
    /// The Service has no endpoints.
    Refused,
    /// Nothing was translated, and there is no route.
    Unreachable,
    /// An error that no state explains.
    Failed(String),
}

impl Reply {
    /// The result of a request, given the endpoint's name.
    pub(crate) fn of(result: io::Result<String>) -> Self {
        match result {
            Ok(name) => {
                name.parse().map_or_else(|_| Self::Failed(format!("reply from {name:?}")), Self::From)
            }
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Self::Refused,
            Err(error) if error.kind() == io::ErrorKind::NetworkUnreachable => Self::Unreachable,
            Err(error) => Self::Failed(error.to_string()),
        }
    }
}

/// The frontend that a request to an address reaches.
pub(crate) fn frontend(transport: Transport, address: SocketAddr) -> FrontendKey {
    let protocol = if transport == Transport::Tcp { "TCP" } else { "UDP" };
    (SocketAddr::new(address.ip().to_canonical(), address.port()), protocol)
}

/// The states, oldest first.
#[derive(Debug, Default)]
pub(crate) struct History {
    states: VecDeque<WrittenState>,
}

#[derive(Debug)]
struct WrittenState {
    number: u64,
    sets: HashMap<FrontendKey, EndpointSet>,
    written: Instant,
    obsolete: Option<Instant>,
}

impl History {
    /// Records a state that is about to be written.
    pub(crate) fn write(&mut self, number: u64, services: &[Service], written: Instant) {
        let is_expired =
            |it: &WrittenState| it.obsolete.is_some_and(|at| written.duration_since(at) > RETENTION);
        while self.states.front().is_some_and(is_expired) {
            self.states.pop_front();
        }
        self.states.push_back(WrittenState { number, sets: sets(services), written, obsolete: None });
    }

    /// Records that a state was seen active: all earlier ones are obsolete.
    pub(crate) fn active(&mut self, number: u64, at: Instant) {
        for state in self.states.iter_mut().take_while(|it| it.number < number) {
            state.obsolete.get_or_insert(at);
        }
    }

    pub(crate) fn newest(&self) -> u64 {
        self.states.back().map_or(0, |it| it.number)
    }

    /// Whether a state that may have been active in this period explains this reply.
    pub(crate) fn explains(&self, of: FrontendKey, reply: &Reply, period: Period) -> bool {
        self.within(period).any(|state| match (reply, state.sets.get(&of)) {
            (Reply::From(endpoint), Some(set)) => set.endpoints.contains(endpoint),
            (Reply::Refused, Some(set)) => set.endpoints.is_empty(),
            (Reply::Unreachable, None) => true,
            _ => false,
        })
    }

    /// Whether the frontend had this endpoint in every state that may have been active in this period.
    pub(crate) fn served_throughout(&self, of: FrontendKey, by: IpAddr, period: Period) -> bool {
        self.within(period).all(|it| it.sets.get(&of).is_some_and(|set| set.endpoints.contains(&by)))
    }

    /// Whether the frontend had this endpoint and session affinity in every state that may have been active in this period.
    pub(crate) fn kept_throughout(&self, of: FrontendKey, by: IpAddr, period: Period) -> bool {
        self.served_throughout(of, by, period)
            && self.within(period).all(|it| it.sets.get(&of).is_some_and(|set| set.has_affinity))
    }

    fn within(&self, (began, ended): Period) -> impl Iterator<Item = &WrittenState> {
        self.states.iter().filter(move |it| it.written <= ended && it.obsolete.is_none_or(|at| at >= began))
    }
}

fn sets(services: &[Service]) -> HashMap<FrontendKey, EndpointSet> {
    let mut sets = HashMap::new();
    for service in services {
        for (frontend, port) in service.frontends(random_cluster::node()) {
            let endpoints = service.ready_endpoints(frontend.ip()).collect();
            let set = EndpointSet { endpoints, has_affinity: service.affinity.is_some() };
            sets.insert((frontend, port.protocol), set);
        }
    }
    sets
}

#[cfg(test)]
mod tests_of_history {
    use super::*;

    fn web(endpoints: &[u8]) -> Vec<Service> {
        let web = Service::new("web", &[[10, 96, 0, 1].into()]).port("", "TCP", 80, 8080);
        vec![endpoints.iter().fold(web, |web, n| web.endpoint(&n.to_string(), &[[10, 244, 1, *n].into()]))]
    }

    #[test]
    fn a_reply_is_explained_only_by_a_state_of_its_time() {
        let web_frontend = (SocketAddr::from(([10, 96, 0, 1], 80)), "TCP");
        let zero = Instant::now();
        let at = |ms| zero + Duration::from_millis(ms);
        let mut history = History::default();
        history.write(1, &web(&[1, 2]), at(0));
        history.write(2, &web(&[2]), at(100));
        history.active(2, at(150));
        history.write(3, &web(&[]), at(200));
        history.write(4, &[], at(300));
        history.active(4, at(350));
        let explains =
            |reply: &Reply, began, ended| history.explains(web_frontend, reply, (at(began), at(ended)));
        let from = |n| Reply::From([10, 244, 1, n].into());

        assert!(explains(&from(1), 10, 20) && explains(&from(1), 140, 180));
        assert!(!explains(&from(1), 160, 180) && !explains(&from(3), 10, 400));
        assert!(explains(&from(2), 340, 345) && !explains(&from(2), 360, 370));
        assert!(explains(&Reply::Refused, 190, 210) && !explains(&Reply::Refused, 10, 190));
        assert!(explains(&Reply::Unreachable, 300, 310) && !explains(&Reply::Unreachable, 10, 290));
        assert!(!explains(&Reply::Failed("timed out".into()), 0, 400));

        let throughout = |n, began, ended| {
            history.served_throughout(web_frontend, [10, 244, 1, n].into(), (at(began), at(ended)))
        };
        assert!(throughout(2, 10, 190) && !throughout(2, 10, 210));
        assert!(throughout(1, 10, 90) && !throughout(1, 10, 110));
    }
}
