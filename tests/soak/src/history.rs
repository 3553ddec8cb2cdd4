//! Every state there was, from when to when it may have been in force, and whether it explains an answer.
//! The one rule: a state is known here before the proxy can know it, and is gone only when its successor was seen.

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use tests::{Transport, manifest::Service};

use crate::cluster;

/// How long a state is remembered that is gone: longer than any question takes.
const REMEMBERED: Duration = Duration::from_secs(20);

/// A Service's address and a protocol, `TCP` or `UDP`.
pub(crate) type Frontend = (SocketAddr, &'static str);

/// What every frontend leads to.
type Sets = HashMap<Frontend, Arc<Set>>;

/// The endpoints of a frontend, and whether a client keeps the one it was given.
#[derive(Debug)]
struct Set {
    endpoints: BTreeSet<IpAddr>,
    is_affine: bool,
}

/// What a question came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The endpoint that answered.
    By(IpAddr),
    /// Nobody serves there.
    Refused,
    /// Nothing is translated, and no route leads there.
    Unreachable,
    /// What no state explains.
    Failed(String),
}

impl Answer {
    /// What a question to a Service came to.
    pub(crate) fn of(result: io::Result<String>) -> Self {
        match result {
            Ok(name) => name.parse().map_or_else(|_| Self::Failed(format!("answered by {name:?}")), Self::By),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Self::Refused,
            Err(error) if error.kind() == io::ErrorKind::NetworkUnreachable => Self::Unreachable,
            Err(error) => Self::Failed(error.to_string()),
        }
    }
}

/// The frontend that is asked at an address in this way.
pub(crate) fn frontend(transport: Transport, address: SocketAddr) -> Frontend {
    let protocol = if transport == Transport::Tcp { "TCP" } else { "UDP" };
    (SocketAddr::new(address.ip().to_canonical(), address.port()), protocol)
}

/// The states, oldest first.
#[derive(Debug, Default)]
pub(crate) struct History {
    states: VecDeque<State>,
}

#[derive(Debug)]
struct State {
    number: u64,
    sets: Sets,
    written: Instant,
    gone: Option<Instant>,
}

impl History {
    /// Notes a state that is about to be written.
    pub(crate) fn write(&mut self, number: u64, services: &[Service]) {
        self.write_at(number, services, Instant::now());
    }

    fn write_at(&mut self, number: u64, services: &[Service], written: Instant) {
        let is_over = |it: &State| it.gone.is_some_and(|gone| written.duration_since(gone) > REMEMBERED);
        while self.states.front().is_some_and(is_over) {
            self.states.pop_front();
        }
        self.states.push_back(State { number, sets: sets(services), written, gone: None });
    }

    /// Notes that a state was seen in force, so that all before it are gone.
    pub(crate) fn seen(&mut self, number: u64) {
        self.seen_at(number, Instant::now());
    }

    fn seen_at(&mut self, number: u64, at: Instant) {
        for state in self.states.iter_mut().take_while(|it| it.number < number) {
            state.gone.get_or_insert(at);
        }
    }

    /// The newest state.
    pub(crate) fn newest(&self) -> u64 {
        self.states.back().map_or(0, |it| it.number)
    }

    /// Whether a state that may have been in force between the two moments gives this answer.
    pub(crate) fn explains(&self, of: Frontend, answer: &Answer, began: Instant, ended: Instant) -> bool {
        self.between(began, ended).any(|state| match (answer, state.sets.get(&of)) {
            (Answer::By(endpoint), Some(set)) => set.endpoints.contains(endpoint),
            (Answer::Refused, Some(set)) => set.endpoints.is_empty(),
            (Answer::Unreachable, None) => true,
            _ => false,
        })
    }

    /// Whether the endpoint served in every state that may have been in force between the two moments.
    pub(crate) fn served_throughout(&self, of: Frontend, by: IpAddr, began: Instant, ended: Instant) -> bool {
        self.throughout(of, began, ended, |it| it.endpoints.contains(&by))
    }

    /// Whether, besides, a client keeps its endpoint in all of them.
    pub(crate) fn kept_throughout(&self, of: Frontend, by: IpAddr, began: Instant, ended: Instant) -> bool {
        self.throughout(of, began, ended, |it| it.is_affine && it.endpoints.contains(&by))
    }

    fn throughout(&self, of: Frontend, began: Instant, ended: Instant, holds: impl Fn(&Set) -> bool) -> bool {
        self.between(began, ended).all(|state| state.sets.get(&of).is_some_and(|set| holds(set)))
    }

    fn between(&self, began: Instant, ended: Instant) -> impl Iterator<Item = &State> {
        self.states.iter().filter(move |it| it.written <= ended && it.gone.is_none_or(|gone| gone >= began))
    }
}

fn sets(services: &[Service]) -> Sets {
    let mut sets = Sets::new();
    for service in services {
        let Service { cluster_ips, external_ips, load_balancer_ips, ports, endpoints, .. } = service;
        let of_node = cluster::node();
        let of_node = of_node.iter().filter(|it| cluster_ips.iter().any(|ip| ip.is_ipv4() == it.is_ipv4()));
        let at_ports = cluster_ips.iter().chain(external_ips).chain(load_balancer_ips).map(|it| (it, false));
        for (ip, is_of_node) in at_ports.chain(of_node.map(|it| (it, true))) {
            let addresses = endpoints.iter().filter(|it| it.ready).flat_map(|it| &it.addresses);
            let set: BTreeSet<_> = addresses.filter(|it| it.is_ipv4() == ip.is_ipv4()).copied().collect();
            let set = Arc::new(Set { endpoints: set, is_affine: service.affinity.is_some() });
            for port in ports {
                let number = if is_of_node { port.node_port } else { Some(port.port) };
                if let Some(number) = number {
                    sets.insert((SocketAddr::new(*ip, number), port.protocol), Arc::clone(&set));
                }
            }
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
    fn an_answer_is_explained_by_a_state_of_its_time_only() {
        let web_frontend = (SocketAddr::from(([10, 96, 0, 1], 80)), "TCP");
        let zero = Instant::now();
        let at = |ms| zero + Duration::from_millis(ms);
        let mut history = History::default();
        history.write_at(1, &web(&[1, 2]), at(0));
        history.write_at(2, &web(&[2]), at(100));
        history.seen_at(2, at(150));
        history.write_at(3, &web(&[]), at(200));
        history.write_at(4, &[], at(300));
        history.seen_at(4, at(350));
        let explains =
            |answer: &Answer, began, ended| history.explains(web_frontend, answer, at(began), at(ended));
        let by = |n| Answer::By([10, 244, 1, n].into());

        assert!(explains(&by(1), 10, 20) && explains(&by(1), 140, 180));
        assert!(!explains(&by(1), 160, 180) && !explains(&by(3), 10, 400));
        assert!(explains(&by(2), 340, 345) && !explains(&by(2), 360, 370));
        assert!(explains(&Answer::Refused, 190, 210) && !explains(&Answer::Refused, 10, 190));
        assert!(explains(&Answer::Unreachable, 300, 310) && !explains(&Answer::Unreachable, 10, 290));
        assert!(!explains(&Answer::Failed("timed out".into()), 0, 400));

        let throughout = |n, began, ended| {
            history.served_throughout(web_frontend, [10, 244, 1, n].into(), at(began), at(ended))
        };
        assert!(throughout(2, 10, 190) && !throughout(2, 10, 210));
        assert!(throughout(1, 10, 90) && !throughout(1, 10, 110));
    }
}
