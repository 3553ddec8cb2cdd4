//! What a state means in elements, and what a change of it costs.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    num::NonZeroU16,
    sync::Arc,
};

use super::*;
use datapath::AvoidedEndpoint;
use model::{
    Protocol,
    state::{
        ClientIpAffinity, Endpoint, EndpointKey, EndpointPort, PerFamily, PortTarget, Scopes, Service,
        ServiceKind, ServicePort, ServiceState, TargetPort, TrafficPolicy,
    },
};

mod forwarding;
mod histories;

use crate::{
    encode::expressions::Verdict,
    fuzzing::{apply, left, sorted_lines, started},
};

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn number(it: u16) -> NonZeroU16 {
    NonZeroU16::new(it).unwrap()
}

/// The address of a pod.
fn pod_ip(n: u32) -> Ipv4Addr {
    Ipv4Addr::from(0x0af4_0000 + n)
}

/// A Service of UDP port 53 at `10.96.0.n`, with pods `10.244.0.x`; the first `local` of them are on this node.
#[derive(Clone, Debug, Default)]
struct Made {
    n: u8,
    pods: Vec<u32>,
    local: usize,
    external_local: bool,
    affinity: bool,
    node_port: Option<u16>,
    balancer: Option<u8>,
    ranges: Vec<&'static str>,
    /// The pods that serve what other nodes forward, if its packets are forwarded.
    forwarded: Option<Vec<u32>>,
    usable: bool,
}

impl Made {
    fn new(n: u8, pods: &[u32]) -> Self {
        Self { n, pods: pods.to_vec(), usable: !pods.is_empty(), ..Self::default() }
    }

    fn state(&self) -> ServiceState {
        let policy = |local| if local { TrafficPolicy::Local } else { TrafficPolicy::Cluster };
        let service = Service {
            kind: ServiceKind::LoadBalancer,
            cluster_ips: vec![IpAddr::from([10, 96, 0, self.n])],
            load_balancer_ips: self.balancer.map(|it| IpAddr::from([203, 0, 113, it])).into_iter().collect(),
            ports: vec![ServicePort {
                node_port: self.node_port.map(number),
                target_port: TargetPort::Number(number(5353)),
                has_any_endpoint: PerFamily { v4: self.usable, v6: false },
                ..ServicePort::new(Protocol::Udp, number(53))
            }],
            external_policy: policy(self.external_local),
            affinity: self.affinity.then(|| ClientIpAffinity { timeout_seconds: 60.try_into().unwrap() }),
            source_ranges: self.ranges.iter().map(|it| it.parse().unwrap()).collect(),
            ..Service::new(ServiceName::new("default", format!("service-{}", self.n)))
        };
        let endpoints = self.pods.iter().enumerate().map(|(position, pod)| {
            let local = position < self.local;
            let external = local || !self.external_local;
            Endpoint {
                v4: Some(pod_ip(*pod)),
                local,
                ports: [EndpointPort {
                    index: 0,
                    port: number(5353),
                    scopes: Scopes { internal: true, external, cluster: true },
                }]
                .into(),
                ..Endpoint::new(EndpointKey::Pod(format!("pod-{pod:06}").into()))
            }
        });
        let mut state = ServiceState::new(service, endpoints);
        state.forwarded = self.forwarded.iter().map(|pods| forwarding::port(pods)).collect();
        state
    }
}

fn state(services: &[Made]) -> NodeState {
    node(services.iter().map(Made::state))
}

fn node(services: impl IntoIterator<Item = ServiceState>) -> NodeState {
    NodeState { services: services.into_iter().map(Arc::new).collect(), ..NodeState::default() }
}

/// A layout of these Services alone.
fn laid_out(services: &[Made]) -> Layout {
    started(&state(services), PreviousSlots::default())
}

fn update(layout: &mut Layout, services: &[Made]) -> Update {
    layout.update(&state(services), &[], None)
}

/// Cases with the lines of their elements in a file, each under its name.
#[test]
fn services_have_these_elements() {
    let pods = &[1, 2];
    let local = Made { external_local: true, ..Made::new(1, &[1]) };
    // This node is in one of them, so that the load balancer IP is allowed as well.
    let ranges = vec!["10.0.0.0/8", "10.1.0.0/16", "192.168.0.0/24", "2001:db8::/32"];
    let cases = [
        ("a cluster IP selects its endpoints", Made::new(1, pods)),
        ("without any endpoint it is rejected", Made::new(1, &[])),
        (
            "a local policy drops external traffic without a local endpoint",
            Made { node_port: Some(30_053), ..local.clone() },
        ),
        (
            "a local policy has two sets and a local pod is a hairpin candidate",
            Made { balancer: Some(9), local: 1, pods: pods.to_vec(), ..local.clone() },
        ),
        (
            "session affinity is shared by all frontends of a port",
            Made { node_port: Some(30_053), affinity: true, local: 1, pods: pods.to_vec(), ..local },
        ),
        (
            "source ranges are merged, and session affinity keeps equal sets apart",
            Made { balancer: Some(9), ranges, affinity: true, ..Made::new(1, &[1]) },
        ),
        (
            "forwarded packets have a set of their own at external addresses only",
            Made { node_port: Some(30_053), ..forwarding::forwarded(&[1]) },
        ),
        (
            "forwarded packets are restricted by source ranges and have session affinity",
            Made { ranges: vec!["10.0.0.0/8"], affinity: true, ..forwarding::forwarded(&[2]) },
        ),
    ];
    let mut expected: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
    for case in include_str!("tests/elements.txt").strip_prefix("# ").unwrap().split("\n# ") {
        let (name, lines) = case.split_once('\n').unwrap();
        expected.insert(name, lines.lines().filter(|it| !it.is_empty()).collect());
    }
    for (name, made) in cases {
        let mut layout = Layout::default();
        layout.update(&state(&[made]), &[ip("192.168.0.1")], None);
        let lines = sorted_lines(&layout);
        let lines: BTreeSet<_> = lines.iter().map(|it| it.strip_prefix("packets ").unwrap()).collect();
        assert_eq!(Some(lines), expected.remove(name), "{name}");
    }
    assert!(expected.is_empty(), "{expected:?}");
}

#[test]
fn a_list_of_source_ranges_is_written_once_for_all_its_ports() {
    const PORTS: usize = 100;
    const RANGES: usize = 1_000;
    let service = |n: u8, ranges: usize| {
        let made = Made { balancer: Some(n), ..Made::new(n, &[1]) }.state();
        let mut service = (*made.service).clone();
        service.ports = (1..=PORTS as u16)
            .map(|it| ServicePort { port: number(it), ..service.ports[0].clone() })
            .collect();
        // Every second address of 10.0.0.0/8: nothing can be merged.
        let range = |n: usize| format!("10.0.{}.{}/32", n / 100, n % 100 * 2).parse().unwrap();
        service.source_ranges = (0..ranges).map(range).collect();
        ServiceState::new(service, [])
    };
    let mut layout = Layout::default();
    let mut elements = Elements::new();
    let mut take = |services: &[ServiceState]| {
        let changes = layout.update(&node(services.iter().cloned()), &[], None).changes;
        apply(&mut elements, &changes);
        let is_boundary = |it: &&Element| it.map == Map::SourceRanges;
        (changes.add.keys().filter(is_boundary).count(), changes.delete.keys().filter(is_boundary).count())
    };
    // Two marks per range.
    assert_eq!(take(&[service(1, RANGES)]), (2 * RANGES, 0));
    // Another Service with the same list adds nothing, and the list stays as long as one of them has it.
    assert_eq!(take(&[service(1, RANGES), service(2, RANGES)]), (0, 0));
    assert_eq!(take(&[service(2, RANGES)]), (0, 0));
    // Another list replaces it.
    assert_eq!(take(&[service(2, RANGES - 1)]), (2 * (RANGES - 1), 2 * RANGES));
    assert_eq!(take(&[]), (0, 2 * (RANGES - 1)));
}

#[test]
fn members_keep_their_numbers_over_changes_and_restarts() {
    let made = |pods: &[u32]| Made { affinity: true, ..Made::new(1, pods) };
    // The service port, and each endpoint with its number.
    let numbers = |it: &Layout| {
        let numbers = it.services.values().flat_map(|it| it.numbers.values()).next().unwrap();
        (numbers.service_port, numbers.members().into_iter().collect::<BTreeMap<_, _>>())
    };
    let at = |pod| SocketAddr::new(pod_ip(pod).into(), 5353);
    let mut layout = laid_out(&[made(&[1, 2, 3])]);
    let (service_port, before) = numbers(&layout);
    update(&mut layout, &[made(&[2, 3, 4])]);
    let (_, after) = numbers(&layout);
    assert_eq!((after[&at(2)], after[&at(3)]), (before[&at(2)], before[&at(3)]));
    assert_eq!(after[&at(4)], before[&at(1)], "the clients of the first one go to its successor");
    update(&mut layout, &[made(&[3, 4])]);

    let services = [Made { affinity: true, ..Made::new(7, &[9]) }, made(&[3, 4])];
    let restarted = started(&state(&services), left(layout.elements()));
    assert!(layout.elements().into_iter().all(|(it, value)| restarted.elements().get(&it) == Some(&value)));
    let mut numbers = restarted.services.values().flat_map(|it| it.numbers.values());
    assert!(numbers.any(|it| it.service_port == service_port));
}

#[test]
fn a_service_whose_cluster_ip_belongs_to_another_keeps_its_other_addresses() {
    for affinity in [false, true] {
        let lines = |made: Made| {
            let mut state = made.state();
            let service = Arc::make_mut(&mut state.service);
            service.ports[0].conflicting_addresses = service.cluster_ips.clone();
            sorted_lines(&started(&node([state]), PreviousSlots::default()))
        };
        let other = Made { affinity, balancer: Some(7), node_port: Some(30_053), ..Made::new(1, &[1]) };
        let found = lines(other);
        for address in ["203.0.113.7:53/UDP", "node:30053/UDP"] {
            let line = format!("packets endpoint {address} any -> 10.244.0.1:5353");
            assert!(found.contains(&line), "{line} is not in {found:#?}");
        }
        assert!(!found.iter().any(|it| it.contains("10.96.0.1:") || it.contains("unknown")), "{found:#?}");
        let none = lines(Made { affinity, ..Made::new(1, &[1]) });
        assert!(!none.iter().any(|it| it.contains("frontend")), "{none:#?}");
    }
}

#[test]
fn a_family_without_ranges_or_with_a_zero_prefix_is_open() {
    for ranges in [vec!["2001:db8::/32"], vec!["10.0.0.0/8", "0.0.0.0/0"]] {
        let lines = sorted_lines(&laid_out(&[Made { balancer: Some(9), ranges, ..Made::new(1, &[1]) }]));
        assert!(lines.contains(&"packets frontend 203.0.113.9:53/UDP external".to_owned()), "{lines:?}");
    }
}

#[test]
fn a_change_costs_what_it_touches() {
    let mut services: Vec<_> = (1..=200).map(|n| Made::new(n, &[1, 2, 3])).collect();
    let mut layout = laid_out(&services);
    // One endpoint in the place of another: its slot, and nothing else.
    services[7].pods = vec![4, 2, 3];
    let changes = update(&mut layout, &services).changes;
    assert_eq!((changes.delete.len(), changes.add.len()), (1, 1));
    // The first of three goes: the last one takes its slot, and there is another selector.
    services[9].pods = vec![2, 3];
    let changes = update(&mut layout, &services).changes;
    assert_eq!((changes.delete.len(), changes.add.len()), (3, 3));
    let selectors = changes.add.iter().filter(|(it, _)| it.map == Map::Selectors);
    let chains: Vec<_> = selectors.map(|(_, chain)| chain.clone()).collect();
    assert_eq!(chains, [Value::Verdict(Verdict::Goto("select-0-of-2".into()))]);
    let Update { changes, services } = update(&mut layout, &services);
    assert_eq!((changes, services.len()), (Changes::default(), 0));
}

#[test]
fn no_flow_cleanup_is_needed_while_every_endpoint_stays() {
    let balanced = |pods: &[u32]| Made { balancer: Some(9), usable: true, ..Made::new(1, pods) };
    let mut left = balanced(&[1, 2]).state();
    left.other_serving =
        [PortTarget { index: 0, target: SocketAddr::new([10, 244, 0, 3].into(), 5353) }].into();
    let of = |it: Made| it.state();
    let cases = [
        (of(balanced(&[1])), of(balanced(&[1, 2])), true),
        (of(balanced(&[1, 2, 3])), left.clone(), true),
        (left, of(balanced(&[1, 2])), false),
        (of(balanced(&[1, 2])), of(balanced(&[1])), false),
        (of(balanced(&[])), of(balanced(&[1])), false),
        (of(balanced(&[1])), of(Made::new(1, &[1])), false),
        (of(Made { external_local: true, ..balanced(&[1]) }), of(Made { local: 1, ..balanced(&[1]) }), false),
    ];
    for (before, after, keeps) in cases {
        let port = |it: &ServiceState| compile(it, &[], &BTreeSet::new()).ports.remove(0);
        assert_eq!(port(&after).keeps_flows_of(&port(&before)), keeps, "{before:?} {after:?}");
    }
}

#[test]
fn an_endpoint_keeps_its_existing_slot() {
    let identity = FrontendAddress { address: SocketAddr::new(ip("10.96.0.1"), 53), protocol: Protocol::Udp };
    let at = |pod| SocketAddr::new(pod_ip(pod).into(), 5353);
    let slots = HashMap::from([((identity, 0), Slots::from([at(3), at(9), at(1), at(3)]))]);
    let previous = PreviousSlots { slots, ..PreviousSlots::default() };
    let layout = started(&state(&[Made::new(1, &[1, 2, 3])]), previous);
    let known = &layout.services[&ServiceName::new("default", "service-1")];
    assert_eq!(known.slots, [[Slots::from([at(3), at(2), at(1)])]]);
}

#[test]
fn a_service_of_100_000_endpoints_comes_and_goes() {
    const MANY: u32 = 100_000;
    let of = |pods: std::ops::Range<u32>| {
        let mut service = Made::new(1, &pods.collect::<Vec<_>>()).state();
        // One address twice, one of a family that the Service does not have, and none at all.
        let bad = [(Some(pod_ip(MANY - 1)), None), (None, Some(Ipv6Addr::LOCALHOST)), (None, None)];
        let like = service.endpoints[0].clone();
        service.endpoints.extend(bad.map(|(v4, v6)| Arc::new(Endpoint { v4, v6, ..Endpoint::clone(&like) })));
        node([service])
    };
    let mut layout = Layout::default();
    // What the kernel has to do for this state: so many elements less, and so many more.
    let mut take = |state: &NodeState| {
        let Update { changes, .. } = layout.update(state, &[], None);
        (changes.delete.len(), changes.add.len(), layout.elements().len())
    };
    let all = MANY as usize;
    // Besides the endpoints: the cluster IP, its frontend, the number of its selector, and the selector.
    assert_eq!(take(&of(0..MANY)), (0, all + 4, all + 4));
    // One is removed: another takes its slot and frees its own, and there is another selector.
    assert_eq!(take(&of(1..MANY)), (4, 3, all + 3));
    assert_eq!(take(&of(MANY - 1..MANY)), (all, 2, 5));
    assert_eq!(take(&NodeState::default()), (5, 0, 0));
}

/// Avoids these pods, at most so many percent of a set.
fn avoid(pods: &[u32], max_percent: u8) -> AvoidedEndpoints {
    let avoided = |pod: &u32| {
        let endpoint = SocketAddr::new(pod_ip(*pod).into(), 5353);
        AvoidedEndpoint { port: String::new(), endpoint, max_percent }
    };
    [(ServiceName::new("default", "service-1"), pods.iter().map(avoided).collect())].into()
}

#[test]
fn packets_avoid_as_many_endpoints_as_they_may_and_never_all() {
    let of = |protocol| {
        let mut service = Made::new(1, &[1, 2, 3]).state();
        Arc::make_mut(&mut service.service).ports[0].protocol = protocol;
        node([service])
    };
    let tcp = of(Protocol::Tcp);
    let mut layout = Layout::default();
    let mut elements = Elements::new();
    // The pods that get new connections, and how many Services were looked at for that.
    let mut after = |state: &NodeState, avoided: &AvoidedEndpoints| {
        layout.set_avoided(avoided);
        let update = layout.update(state, &[], None);
        apply(&mut elements, &update.changes);
        assert_eq!(elements, layout.elements());
        let port = layout.ports().next().unwrap();
        assert_eq!(port.allowed().len(), 3, "flows to all of them continue");
        let pods = port.sets[0].1.iter().map(|it| (1..=3).find(|pod| it.ip() == pod_ip(*pod)).unwrap());
        (pods.collect::<Vec<_>>(), update.services.len())
    };
    let none = AvoidedEndpoints::new();
    assert_eq!(after(&tcp, &none), (vec![1, 2, 3], 1));
    assert_eq!(after(&tcp, &avoid(&[2], 100)), (vec![1, 3], 1));
    assert_eq!(after(&tcp, &avoid(&[2], 100)), (vec![1, 3], 0), "nothing has changed");
    assert_eq!(after(&tcp, &none), (vec![1, 2, 3], 1));
    assert_eq!(after(&tcp, &avoid(&[1, 2, 3], 100)), (vec![1, 2, 3], 1), "never all");
    assert_eq!(after(&tcp, &avoid(&[1, 2], 66)), (vec![2, 3], 1));
    assert_eq!(after(&tcp, &avoid(&[1, 2], 33)), (vec![1, 2, 3], 1), "less than one of three");
    assert_eq!(after(&tcp, &avoid(&[9], 100)), (vec![1, 2, 3], 1), "an endpoint that has left");
    // Connections say nothing of another protocol.
    assert_eq!(after(&of(Protocol::Udp), &avoid(&[2], 100)), (vec![1, 2, 3], 1));
}
