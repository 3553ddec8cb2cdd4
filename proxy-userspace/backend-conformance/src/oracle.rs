//! The expected answers: the rules of docs/contract.md, applied to a node's state.

use std::{
    collections::BTreeSet,
    fmt,
    net::{IpAddr, SocketAddr},
};

use ipnet::IpNet;
use model::{
    Family, Protocol,
    state::{NodeState, Scope, Service, ServicePort, ServiceState},
};

/// The sources that are inside the cluster.
pub const CLUSTER_CIDRS: &str = "10.0.0.0/8,fd00::/8";
/// The addresses of the node; none of them is in a scenario.
pub(crate) const NODE_ADDRESSES: [&str; 2] = ["172.31.255.1", "2001:db8:ffff::1"];
const INSIDE: [&str; 2] = ["10.255.0.9", "fd00:ffff::9"];
const OUTSIDE: [&str; 2] = ["172.30.0.9", "2001:db8:eeee::9"];

/// A question: where does a connection from here go?
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Lookup {
    pub(crate) source: IpAddr,
    pub(crate) destination: SocketAddr,
    pub(crate) protocol: Protocol,
}

impl fmt::Display for Lookup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { source, destination, protocol } = self;
        write!(f, "lookup {source} {} {} {protocol}", destination.ip(), destination.port())
    }
}

impl Lookup {
    pub(crate) fn new(source: IpAddr, destination: SocketAddr, protocol: Protocol) -> Self {
        Self { source, destination, protocol }
    }

    /// The features that a backend needs for the question, beyond TCP over IPv4 to addresses of Services.
    pub(crate) fn features(&self) -> impl Iterator<Item = &'static str> {
        let is_node_port = is_node(self.destination.ip());
        let all = [
            (self.destination.is_ipv6(), "ipv6"),
            (self.protocol == Protocol::Udp, "udp"),
            (self.protocol == Protocol::Sctp, "sctp"),
            (is_node_port, "node-ports"),
        ];
        all.into_iter().filter_map(|(is_needed, it)| is_needed.then_some(it))
    }

    /// Whether any other pod could have asked it.
    pub(crate) fn is_from_any_pod(&self) -> bool {
        parsed(INSIDE).contains(&self.source)
    }

    /// Whether any other client could have asked it that is inside if this one is.
    pub(crate) fn is_from_anyone(&self) -> bool {
        self.is_from_any_pod() || parsed(OUTSIDE).contains(&self.source)
    }

    /// This question, from a client outside the cluster.
    pub(crate) fn asked_from_outside(self) -> Self {
        Self { source: of_family(OUTSIDE, Family::of(self.destination.ip())), ..self }
    }

    fn is_inside(&self) -> bool {
        match self.source {
            IpAddr::V4(it) => it.octets()[0] == 10,
            IpAddr::V6(it) => it.octets()[0] == 0xfd,
        }
    }
}

fn parsed(addresses: [&str; 2]) -> [IpAddr; 2] {
    addresses.map(|it| it.parse().expect("it is an address"))
}

/// Whether an address is the node's own.
pub(crate) fn is_node(ip: IpAddr) -> bool {
    parsed(NODE_ADDRESSES).contains(&ip)
}

fn of_family(addresses: [&str; 2], family: Family) -> IpAddr {
    parsed(addresses)[usize::from(family == Family::V6)]
}

/// Answers that are right beside that of the contract.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tolerance {
    /// All connections have one client: with session affinity, one endpoint is enough.
    pub(crate) has_one_client: bool,
    /// Sockets cannot be left without an answer: what is dropped is refused.
    pub(crate) refuses_drops: bool,
    /// The node itself refuses what no Service has: it is asked at an address of its own.
    pub(crate) refuses_unmatched: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    /// The endpoints as texts, in whose order they are answered.
    pub(crate) endpoints: BTreeSet<String>,
    /// Whether each client has only one of them.
    pub(crate) has_affinity: bool,
    /// Without endpoints: `refuse`, `drop`, or nothing if no Service has it.
    verdict: &'static str,
    /// Whether the backend may answer as if no Service had it, and refuse or drop it for that. So it may if none has it, and
    /// the address is one of a Service or of a ServiceCIDR; and whatever the endpoints and the verdict are, if the Service lost
    /// the address at another port: a client that does not ask for `ConflictingAddresses` does not know that it has the
    /// address at all.
    may_be_unknown: bool,
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_unmatched() { f.write_str("an empty line") } else { f.write_str(&self.line()) }
    }
}

impl Answer {
    fn without_endpoints(verdict: &'static str, may_be_unknown: bool) -> Self {
        Self { endpoints: BTreeSet::new(), has_affinity: false, verdict, may_be_unknown }
    }

    fn line(&self) -> String {
        if self.endpoints.is_empty() { self.verdict.to_owned() } else { line(&self.endpoints) }
    }

    /// Whether no Service has it.
    pub(crate) fn is_unmatched(&self) -> bool {
        self.endpoints.is_empty() && self.verdict.is_empty()
    }

    pub(crate) fn accepts(&self, line: &str, tolerance: Tolerance) -> bool {
        let may_be_refused = tolerance.refuses_drops && self.verdict == "drop"
            || tolerance.refuses_unmatched && self.is_unmatched();
        self.line() == line
            || self.has_affinity && tolerance.has_one_client && self.endpoints.contains(line)
            || self.may_be_unknown && ["", "refuse", "drop"].contains(&line)
            || may_be_refused && line == "refuse"
    }
}

/// The answer that names these endpoints.
pub(crate) fn line(endpoints: &BTreeSet<String>) -> String {
    Vec::from_iter(endpoints.iter().map(String::as_str)).join(" ")
}

/// The questions about all Services.
pub(crate) fn all_lookups(state: &NodeState) -> BTreeSet<Lookup> {
    state.services.values().flat_map(|it| lookups(it)).collect()
}

/// The questions about a Service: each of its frontends, from inside, from outside, and from its source ranges.
pub(crate) fn lookups(state: &ServiceState) -> BTreeSet<Lookup> {
    let service = &state.service;
    let mut found = BTreeSet::new();
    for port in &service.ports {
        let addresses = service.addresses().map(|it| SocketAddr::new(it, port.port.get()));
        let families = service.cluster_ips.iter().map(|it| of_family(NODE_ADDRESSES, Family::of(*it)));
        let node_port = |it| Some(SocketAddr::new(it, port.node_port?.get()));
        for destination in addresses.chain(families.filter_map(node_port)) {
            let family = Family::of(destination.ip());
            let ranges = service.source_ranges.iter().map(IpNet::addr);
            let ranges = ranges.filter(|it| Family::of(*it) == family && !it.is_unspecified());
            for source in ranges.chain([of_family(INSIDE, family), of_family(OUTSIDE, family)]) {
                found.insert(Lookup::new(source, destination, port.protocol));
            }
        }
    }
    found
}

pub(crate) fn answer(state: &NodeState, lookup: &Lookup) -> Answer {
    let (ip, number) = (lookup.destination.ip(), lookup.destination.port());
    let from_outside = if lookup.is_inside() { Scope::Cluster } else { Scope::External };
    for it in state.services.values() {
        for (index, port) in it.service.ports.iter().enumerate() {
            if port.protocol != lookup.protocol {
                continue;
            }
            let is_own = port.port.get() == number && !port.conflicting_addresses.contains(&ip);
            let is_node_port = port.node_port.is_some_and(|it| it.get() == number) && is_node(ip);
            if is_own && it.service.cluster_ips.contains(&ip) {
                return selected(it, index, port, ip, Scope::Internal);
            }
            if is_own && it.service.load_balancer_ips.contains(&ip) && !is_allowed(&it.service, lookup.source)
            {
                return Answer::without_endpoints("drop", false);
            }
            if is_node_port && serves_family(&it.service, ip)
                || is_own && it.service.addresses().any(|it| it == ip)
            {
                return selected(it, index, port, ip, from_outside);
            }
        }
    }
    let is_of_service = || state.services.values().any(|it| it.service.addresses().any(|it| it == ip));
    let is_in_range = || state.service_cidrs.values().any(|it| it.cidrs.iter().any(|it| it.contains(&ip)));
    Answer::without_endpoints("", is_of_service() || is_in_range())
}

/// Whether the Service has a cluster IP of this family: only then its node ports are served.
fn serves_family(service: &Service, ip: IpAddr) -> bool {
    service.cluster_ips.iter().any(|it| Family::of(*it) == Family::of(ip))
}

fn is_allowed(service: &Service, source: IpAddr) -> bool {
    let mut ranges = service.source_ranges.iter().filter(|it| Family::of(it.addr()) == Family::of(source));
    ranges.clone().next().is_none() || ranges.any(|it| it.contains(&source))
}

fn selected(state: &ServiceState, index: usize, port: &ServicePort, ip: IpAddr, scope: Scope) -> Answer {
    let family = Family::of(ip);
    let may_be_unknown = state.service.ports.iter().any(|it| it.conflicting_addresses.contains(&ip));
    let endpoints: BTreeSet<_> = state.targets(index, family, scope).map(|it| it.to_string()).collect();
    let verdict = match (endpoints.is_empty(), *port.has_any_endpoint.of(family)) {
        (false, _) => "",
        (true, true) => "drop",
        (true, false) => "refuse",
    };
    let has_affinity = state.service.affinity.is_some();
    Answer { endpoints, has_affinity, verdict, may_be_unknown }
}
