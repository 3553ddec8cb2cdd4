//! The Services of a soak and their random changes.
//! Invariant: the seed decides everything.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use fastrand::Rng;
use tests::manifest::{Service, endpoint};

/// How many endpoints have servers.
pub(crate) const ENDPOINTS: u8 = 10;
const SERVICES: u8 = 6;
/// The maximum number of other Services: the maps grow several times on the way there.
pub(crate) const MAX_OTHERS: usize = 300;
/// The timeout of session affinity in seconds: longer than any soak.
const AFFINITY: u32 = 86_400;
/// How many states the marker distinguishes.
const MARKERS: u64 = 1 << 15;

/// The node's addresses. No route leads to them: a connect that is not translated fails.
pub(crate) fn node() -> [IpAddr; 2] {
    [Ipv4Addr::new(198, 51, 100, 1).into(), Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into()]
}

/// The marker: a Service whose only endpoint encodes the number of the active state.
pub(crate) fn marker() -> SocketAddr {
    SocketAddr::from(([10, 96, 255, 1], 80))
}

/// The state whose marker has this endpoint: one of the last [`MARKERS`] up to `newest`.
pub(crate) fn state_of_marker(address: IpAddr, newest: u64) -> Option<u64> {
    let IpAddr::V4(address) = address else { return None };
    let [10, 244, high @ 128..=255, low] = address.octets() else { return None };
    let number = u64::from(high & 0x7f) << 8 | u64::from(low);
    newest.checked_sub((newest.wrapping_sub(number)) % MARKERS)
}

/// Every address that a Service under load may have.
pub(crate) fn addresses() -> Vec<SocketAddr> {
    let at_ips = |n| {
        let mapped = cluster_ip(n).to_ipv6_mapped();
        [cluster_ip(n).into(), cluster_ip6(n), external_ip(n), mapped.into()]
            .map(|ip| SocketAddr::new(ip, 80))
    };
    let at_node = |n| node().map(|ip| SocketAddr::new(ip, node_port(n)));
    (1..=SERVICES).flat_map(|n| at_ips(n).into_iter().chain(at_node(n))).collect()
}

/// The cluster IPs, where Services may have session affinity.
pub(crate) fn cluster_addresses() -> Vec<SocketAddr> {
    (1..=SERVICES).map(|n| SocketAddr::from((cluster_ip(n), 80))).collect()
}

fn node_port(n: u8) -> u16 {
    30_000 + u16::from(n)
}

fn cluster_ip(n: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 96, 0, n)
}

fn cluster_ip6(n: u8) -> IpAddr {
    Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 0, n.into()).into()
}

fn external_ip(n: u8) -> IpAddr {
    Ipv4Addr::new(203, 0, 113, n).into()
}

#[derive(Clone, Debug)]
pub(crate) struct RandomCluster {
    services: Vec<RandomService>,
    others: usize,
    turnovers: usize,
}

#[derive(Clone, Debug)]
struct RandomService {
    exists: bool,
    has_v6: bool,
    has_udp: bool,
    has_external_ip: bool,
    has_node_port: bool,
    has_affinity: bool,
    endpoints: Vec<u8>,
}

impl RandomCluster {
    /// The initial state: every Service exists.
    pub(crate) fn new() -> Self {
        let service = |n| RandomService {
            exists: true,
            has_v6: true,
            has_udp: true,
            has_external_ip: n % 2 == 0,
            has_node_port: true,
            has_affinity: n % 3 == 0,
            endpoints: (1..=ENDPOINTS).filter(|it| it % 3 == n % 3).collect(),
        };
        Self { services: (1..=SERVICES).map(service).collect(), others: 0, turnovers: 0 }
    }

    pub(crate) fn change(&mut self, rng: &mut Rng) -> String {
        let n = rng.usize(..self.services.len());
        let service = &mut self.services[n];
        let name = format!("s{}", n + 1);
        // What is removed returns soon.
        let is_usual = rng.u8(..4) != 0;
        let set = |flag: &mut bool, what: &str, value: bool| {
            *flag = value;
            format!("{name} {what}: {value}")
        };
        match rng.u8(..20) {
            0 => set(&mut service.exists, "exists", is_usual),
            1 => set(&mut service.has_v6, "is dual-stack", is_usual),
            2 => set(&mut service.has_udp, "has a UDP port", is_usual),
            3 => set(&mut service.has_external_ip, "has an external IP", is_usual),
            4 => {
                service.endpoints.clear();
                format!("{name} has no endpoints")
            }
            5 => self.resize(rng.usize(..=MAX_OTHERS)),
            6 => set(&mut service.has_node_port, "has node ports", is_usual),
            7 => set(&mut service.has_affinity, "has affinity", rng.bool()),
            8..13 => {
                service.endpoints = random_endpoints(rng);
                format!("{name} has the endpoints {:?}", service.endpoints)
            }
            _ => {
                self.services.iter_mut().for_each(|it| it.endpoints = random_endpoints(rng));
                "every Service has other endpoints".to_owned()
            }
        }
    }

    /// Gives every Service alternately all endpoints and a single one, and returns a description. A set that shrinks exposes a
    /// program that reads it too late: the entry that it wants no longer exists.
    pub(crate) fn turn_over(&mut self) -> String {
        self.turnovers += 1;
        for (n, service) in self.services.iter_mut().enumerate() {
            (service.exists, service.has_udp, service.has_v6) = (true, true, true);
            service.endpoints = if self.turnovers.is_multiple_of(2) {
                (1..=ENDPOINTS).collect()
            } else {
                vec![1 + ((self.turnovers / 2 + n) % usize::from(ENDPOINTS)) as u8]
            };
        }
        format!("every Service has {} endpoints", self.services[0].endpoints.len())
    }

    pub(crate) fn resize(&mut self, others: usize) -> String {
        self.others = others;
        format!("{} other Services", self.others)
    }

    /// The manifests, with the marker of this state.
    pub(crate) fn services(&self, number: u64) -> Vec<Service> {
        let [.., high, low] = (number % MARKERS).to_be_bytes();
        let marker = Service::new("marker", &[marker().ip()])
            .port("", "UDP", marker().port(), 8080)
            .endpoint("state", &[Ipv4Addr::new(10, 244, 0x80 | high, low).into()]);
        let live = (1..).zip(&self.services).filter(|(_, it)| it.exists).map(|(n, it)| it.manifest(n));
        let other = |n: usize| {
            let ip = Ipv4Addr::new(10, 97, (n / 250) as u8, 1 + (n % 250) as u8);
            Service::new(&format!("other-{n}"), &[ip.into()])
                .port("", "UDP", 53, 5353)
                .endpoint("e1", &[[10, 244, 2, 1].into()])
        };
        std::iter::once(marker).chain(live).chain((0..self.others).map(other)).collect()
    }
}

/// Often one or all: sets that shrink and grow the most are the most likely to expose an error.
fn random_endpoints(rng: &mut Rng) -> Vec<u8> {
    let count = match rng.u8(..4) {
        0 => 1,
        1 => ENDPOINTS.into(),
        _ => rng.usize(1..=ENDPOINTS.into()),
    };
    let mut endpoints: Vec<_> = (1..=ENDPOINTS).collect();
    rng.shuffle(&mut endpoints);
    endpoints.truncate(count);
    endpoints
}

impl RandomService {
    fn manifest(&self, n: u8) -> Service {
        let mut ips = vec![cluster_ip(n).into()];
        ips.extend(self.has_v6.then(|| cluster_ip6(n)));
        let mut service = Service::new(&format!("s{n}"), &ips).port("tcp", "TCP", 80, 8080);
        if self.has_udp {
            service = service.port("udp", "UDP", 80, 8080);
        }
        if self.has_node_port {
            service.ports.iter_mut().for_each(|it| it.node_port = Some(node_port(n)));
        }
        if self.has_affinity {
            service = service.affinity(AFFINITY);
        }
        if self.has_external_ip {
            service = service.external_ips(&[external_ip(n)]);
        }
        self.endpoints.iter().fold(service, |it, n| it.endpoint(&format!("e{n}"), &endpoint(*n)))
    }
}

#[cfg(test)]
mod tests_of_random_cluster {
    use super::*;

    #[test]
    fn a_marker_identifies_its_state() {
        let cluster = RandomCluster::new();
        for (number, newest) in [(1, 1), (1, 300), (300, 300), (32_768, 32_770), (70_000, 70_123)] {
            let services = cluster.services(number);
            let marker = services.iter().find(|it| it.name == "marker").unwrap();
            assert_eq!(state_of_marker(marker.endpoints[0].addresses[0], newest), Some(number));
        }
        assert_eq!(state_of_marker([10, 244, 1, 1].into(), 300), None);
    }

    #[test]
    fn a_seed_gives_one_history() {
        let history = |seed| {
            let (mut rng, mut cluster) = (Rng::with_seed(seed), RandomCluster::new());
            (0..200).map(|_| cluster.change(&mut rng)).collect::<Vec<_>>()
        };
        assert_eq!(history(7), history(7));
        assert_ne!(history(7), history(8));
    }
}
