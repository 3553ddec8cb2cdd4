//! The Services of a soak, and what happens to them.
//! The one rule: everything follows from the seed.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use fastrand::Rng;
use tests::{
    manifest::{Service, node_with_addresses},
    test_node::NODE,
};

/// How many endpoints there are servers for.
pub(crate) const ENDPOINTS: u8 = 10;
/// How many Services are under load.
const SERVICES: u8 = 6;
/// How many others there are at most: the maps grow several times on the way.
const OTHERS: usize = 300;
/// For how many seconds a client keeps its endpoint: longer than any soak.
const AFFINITY: u32 = 86_400;
/// States that the beacon can tell apart.
const BEACONS: u64 = 1 << 15;

/// What serves: the same number in both families.
pub(crate) fn endpoint(n: u8) -> [IpAddr; 2] {
    [Ipv4Addr::new(10, 244, 1, n).into(), Ipv6Addr::new(0xfd00, 0x10, 0x244, 0, 0, 0, 1, n.into()).into()]
}

/// The node's addresses, which no route leads to: what is not translated there is told from what is.
pub(crate) fn node() -> [IpAddr; 2] {
    [Ipv4Addr::new(198, 51, 100, 1).into(), Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into()]
}

/// The manifest of the node.
pub(crate) fn node_manifest() -> String {
    node_with_addresses(NODE, &node())
}

/// The Service whose only endpoint says which state is in force.
pub(crate) fn beacon() -> SocketAddr {
    SocketAddr::from(([10, 96, 255, 1], 80))
}

/// The state whose beacon leads to this address: one of the last [`BEACONS`] up to `newest`.
pub(crate) fn beacon_of(address: IpAddr, newest: u64) -> Option<u64> {
    let IpAddr::V4(address) = address else { return None };
    let [10, 244, high @ 128..=255, low] = address.octets() else { return None };
    let number = u64::from(high & 0x7f) << 8 | u64::from(low);
    newest.checked_sub((newest.wrapping_sub(number)) % BEACONS)
}

/// Every address that a Service under load may ever have.
pub(crate) fn addresses() -> Vec<SocketAddr> {
    let of = |n| [cluster_ip(n), cluster_ip6(n), external_ip(n)];
    let mapped = |n| match cluster_ip(n) {
        IpAddr::V4(it) => it.to_ipv6_mapped().into(),
        IpAddr::V6(it) => it.into(),
    };
    (1..=SERVICES)
        .flat_map(|n| {
            let ips = of(n).into_iter().chain([mapped(n)]);
            let at_ips = ips.map(|ip| SocketAddr::new(ip, 80));
            at_ips.chain(node().map(|ip| SocketAddr::new(ip, node_port(n))))
        })
        .collect()
}

/// Where Services may have affinity, and where a client that comes again can tell.
pub(crate) fn cluster_addresses() -> Vec<SocketAddr> {
    (1..=SERVICES).map(|n| SocketAddr::new(cluster_ip(n), 80)).collect()
}

fn node_port(n: u8) -> u16 {
    30_000 + u16::from(n)
}

fn cluster_ip(n: u8) -> IpAddr {
    Ipv4Addr::new(10, 96, 0, n).into()
}

fn cluster_ip6(n: u8) -> IpAddr {
    Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 0, n.into()).into()
}

fn external_ip(n: u8) -> IpAddr {
    Ipv4Addr::new(203, 0, 113, n).into()
}

/// The cluster now.
#[derive(Clone, Debug)]
pub(crate) struct Cluster {
    services: Vec<Changing>,
    others: usize,
    turns: usize,
}

#[derive(Clone, Debug)]
struct Changing {
    is_there: bool,
    has_v6: bool,
    has_udp: bool,
    is_external: bool,
    is_node_port: bool,
    has_affinity: bool,
    endpoints: Vec<u8>,
}

impl Cluster {
    /// At first: everything is there.
    pub(crate) fn new() -> Self {
        let service = |n| Changing {
            is_there: true,
            has_v6: true,
            has_udp: true,
            is_external: n % 2 == 0,
            is_node_port: true,
            has_affinity: n % 3 == 0,
            endpoints: (1..=ENDPOINTS).filter(|it| it % 3 == n % 3).collect(),
        };
        Self { services: (1..=SERVICES).map(service).collect(), others: 0, turns: 0 }
    }

    /// Changes something, and says what.
    pub(crate) fn change(&mut self, rng: &mut Rng) -> String {
        let n = rng.usize(..self.services.len());
        let service = &mut self.services[n];
        let name = format!("s{}", n + 1);
        // What is taken away comes back soon.
        let is_usual = rng.u8(..4) != 0;
        match rng.u8(..20) {
            0 => {
                service.is_there = is_usual;
                format!("{name} is there: {}", service.is_there)
            }
            1 => {
                service.has_v6 = is_usual;
                format!("{name} is dual-stack: {}", service.has_v6)
            }
            2 => {
                service.has_udp = is_usual;
                format!("{name} has a UDP port: {}", service.has_udp)
            }
            3 => {
                service.is_external = is_usual;
                format!("{name} has an external IP: {}", service.is_external)
            }
            4 => {
                service.endpoints.clear();
                format!("{name} has no endpoints")
            }
            5 => self.resize(rng.usize(..=OTHERS)),
            6 => {
                service.is_node_port = is_usual;
                format!("{name} has node ports: {}", service.is_node_port)
            }
            7 => {
                service.has_affinity = rng.bool();
                format!("{name} has affinity: {}", service.has_affinity)
            }
            8..13 => {
                service.endpoints = some_endpoints(rng);
                format!("{name} has the endpoints {:?}", service.endpoints)
            }
            _ => {
                self.services.iter_mut().for_each(|it| it.endpoints = some_endpoints(rng));
                "every Service has other endpoints".to_owned()
            }
        }
    }

    /// Has every Service serve, with all the endpoints there are and with one of them in turn, and says so.
    ///
    /// What a set loses is what shows a program that reads it too late: the slot that it wants is not there any more.
    pub(crate) fn turn_over(&mut self) -> String {
        self.turns += 1;
        for (n, service) in self.services.iter_mut().enumerate() {
            (service.is_there, service.has_udp, service.has_v6) = (true, true, true);
            service.endpoints = if self.turns.is_multiple_of(2) {
                (1..=ENDPOINTS).collect()
            } else {
                vec![1 + ((self.turns / 2 + n) % usize::from(ENDPOINTS)) as u8]
            };
        }
        format!("every Service turns over, {} endpoints", self.services[0].endpoints.len())
    }

    /// Sets how many Services there are that nobody asks.
    pub(crate) fn resize(&mut self, others: usize) -> String {
        self.others = others.min(OTHERS);
        format!("{} other Services", self.others)
    }

    /// As large as it gets.
    pub(crate) fn grow(&mut self) -> String {
        self.resize(OTHERS)
    }

    /// As manifests, with the beacon of this state.
    pub(crate) fn services(&self, number: u64) -> Vec<Service> {
        let [.., high, low] = (number % BEACONS).to_be_bytes();
        let beacon = Service::new("beacon", &[beacon().ip()])
            .port("", "UDP", beacon().port(), 8080)
            .endpoint("state", &[Ipv4Addr::new(10, 244, 0x80 | high, low).into()]);
        let live = (1..).zip(&self.services).filter(|(_, it)| it.is_there).map(|(n, it)| it.service(n));
        let other = |n: usize| {
            let ip = Ipv4Addr::new(10, 97, (n / 250) as u8, 1 + (n % 250) as u8);
            Service::new(&format!("other-{n}"), &[ip.into()])
                .port("", "UDP", 53, 5353)
                .endpoint("e1", &[[10, 244, 2, 1].into()])
        };
        std::iter::once(beacon).chain(live).chain((0..self.others).map(other)).collect()
    }
}

/// Often one, or all: what a set loses and gains at a time is what is hard to get right.
fn some_endpoints(rng: &mut Rng) -> Vec<u8> {
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

impl Changing {
    fn service(&self, n: u8) -> Service {
        let mut ips = vec![cluster_ip(n)];
        ips.extend(self.has_v6.then(|| cluster_ip6(n)));
        let mut service = Service::new(&format!("s{n}"), &ips).port("tcp", "TCP", 80, 8080);
        if self.has_udp {
            service = service.port("udp", "UDP", 80, 8080);
        }
        if self.is_node_port {
            service.ports.iter_mut().for_each(|it| it.node_port = Some(node_port(n)));
        }
        if self.has_affinity {
            service = service.affinity(AFFINITY);
        }
        if self.is_external {
            service = service.external_ips(&[external_ip(n)]);
        }
        self.endpoints.iter().fold(service, |it, n| it.endpoint(&format!("e{n}"), &endpoint(*n)))
    }
}

#[cfg(test)]
mod tests_of_the_cluster {
    use super::*;

    #[test]
    fn a_beacon_tells_which_state_it_is_of() {
        let cluster = Cluster::new();
        for (number, newest) in [(1, 1), (1, 300), (300, 300), (32_768, 32_770), (70_000, 70_123)] {
            let services = cluster.services(number);
            let beacon = services.iter().find(|it| it.name == "beacon").unwrap();
            assert_eq!(beacon_of(beacon.endpoints[0].addresses[0], newest), Some(number));
        }
        assert_eq!(beacon_of([10, 244, 1, 1].into(), 300), None);
    }

    #[test]
    fn a_seed_gives_one_history() {
        let history = |seed| {
            let (mut rng, mut cluster) = (Rng::with_seed(seed), Cluster::new());
            (0..200).map(|_| cluster.change(&mut rng)).collect::<Vec<_>>()
        };
        assert_eq!(history(7), history(7));
        assert_ne!(history(7), history(8));
    }
}
