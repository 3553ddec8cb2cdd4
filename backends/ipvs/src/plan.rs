//! What a Service needs: virtual servers of IPVS, and elements of the nftables table.
//!
//! Invariant: pure, but for the marks, which are handed out by the caller.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use ipnet::IpNet;
use proxy_contract::{
    backend::{Family, Frontend, FrontendAddress, ServedPort, ports},
    client::ServiceEndpoints,
    localv1::{IpSet, Protocol},
};

use crate::{
    marks::{BALANCED, DROP, Id, Key, MASK, Marks, Masquerade, REFUSE},
    servers::Server,
};

/// The schedulers of the kernel, but for those of caches (`dh`: an endpoint per address of a Service) and of weights alone.
pub(crate) const SCHEDULERS: [&str; 8] = ["rr", "wrr", "lc", "wlc", "sh", "mh", "sed", "nq"];
/// The annotation of a Service with the name of its scheduler.
pub(crate) const SCHEDULER: &str = "kube-proxy-ebpf.io/ipvs-scheduler";
/// The scheduler that keeps a client's endpoint if ports are translated, by a hash of the source (Maglev): connections of a
/// persistent virtual server with a mark reach an endpoint at the port that the client used.
const BY_SOURCE: &str = "mh";

/// A set or map of the table, a key in it, and in a map `: VALUE`.
pub(crate) type Elements = BTreeMap<Key, String>;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) marks: BTreeMap<Id, u32>,
    pub(crate) servers: BTreeMap<u32, Server>,
    pub(crate) elements: Elements,
    /// What is not served, and why.
    pub(crate) not_served: Vec<String>,
}

#[derive(Clone, Debug)]
pub(crate) struct Defaults {
    pub(crate) scheduler: String,
    /// Schedulers that the kernel does not have.
    pub(crate) missing: BTreeSet<String>,
}

/// Plans a Service; `before` is its last plan.
pub(crate) fn plan(
    it: &ServiceEndpoints,
    defaults: &Defaults,
    marks: &mut Marks,
    before: Option<&Plan>,
) -> Plan {
    let mut plan = Plan::default();
    let scheduler = scheduler(it, defaults, &mut plan.not_served);
    let local = it.endpoints.values().filter(|it| it.local).filter_map(|it| it.ips.as_ref());
    let local: BTreeSet<IpAddr> = local.flat_map(IpSet::iter).filter_map(|it| it.parse().ok()).collect();
    for port in ports(it) {
        let mut targets: BTreeMap<(Masquerade, &[SocketAddr]), u32> = BTreeMap::new();
        let masquerade = if port.keeps_source { Masquerade::Never } else { Masquerade::All };
        // Traffic that shares endpoints: to cluster IPs, and to other addresses from inside and from outside.
        let traffic: [(bool, &[&str], Masquerade, &[SocketAddr]); 3] = [
            (true, &["inside", "outside"], Masquerade::Outside, &port.internal),
            (false, &["inside"], masquerade, &port.cluster),
            (false, &["outside"], masquerade, &port.external),
        ];
        for (number, (to_cluster_ips, sides, masquerade, endpoints)) in (0..).zip(traffic) {
            let keys = keys(&port, to_cluster_ips, sides);
            let Some(first) = keys.first() else { continue };
            let mark = match targets.get(&(masquerade, endpoints)) {
                Some(mark) => *mark,
                None if endpoints.is_empty() && port.drops => DROP,
                None if endpoints.is_empty() => REFUSE,
                None => {
                    let id = (port.protocol.into(), port.name.clone(), port.family, number, masquerade);
                    let before = before.and_then(|it| it.marks.get(&id)).copied();
                    let mark = before.unwrap_or_else(|| marks.allocate(&id, first));
                    plan.marks.insert(id, mark);
                    let is_translated =
                        port.frontends.iter().any(|at| endpoints.iter().any(|it| it.port() != at.port));
                    plan.add_server(mark, &port, endpoints, (scheduler, is_translated), &local, defaults);
                    targets.insert((masquerade, endpoints), mark);
                    mark
                }
            };
            plan.elements.extend(keys.into_iter().map(|it| (it, format!(" : {mark:#x}"))));
        }
        port.frontends.iter().for_each(|it| plan.add_sources(&port, it));
    }
    plan
}

impl Plan {
    fn add_server(
        &mut self,
        mark: u32,
        port: &ServedPort,
        endpoints: &[SocketAddr],
        (scheduler, is_translated): (&str, bool),
        local: &BTreeSet<IpAddr>,
        defaults: &Defaults,
    ) {
        let (mut scheduler, mut persistence) = (scheduler, port.affinity.map_or(0, |it| it.as_secs()));
        if persistence > 0 && is_translated {
            (scheduler, persistence) = (BY_SOURCE, 0);
            if defaults.missing.contains(BY_SOURCE) {
                scheduler = &defaults.scheduler;
                self.not_served.push("session affinity: load the kernel module ip_vs_mh".to_owned());
            }
        }
        for it in endpoints.iter().map(SocketAddr::ip).filter(|it| local.contains(it)) {
            let (set, mark) = (of_family("hairpin", port.family), mark & !MASK | BALANCED);
            self.elements.insert((set, format!("{mark:#x} . {it} . {it}")), String::new());
        }
        let weights = endpoints.iter().map(|it| (*it, 1)).collect();
        let server = Server { family: port.family, scheduler: scheduler.to_owned(), persistence, weights };
        self.servers.insert(mark, server);
    }

    fn add_sources(&mut self, port: &ServedPort, at: &Frontend) {
        let (Some(sources), Some(ip)) = (&at.sources, at.address.ip()) else { return };
        let key = key(port, at, Some(ip));
        // Ranges within others would be refused as overlapping.
        for it in IpNet::aggregate(sources) {
            let set = of_family("allowed", port.family);
            self.elements.insert((set, format!("{key} . {it}")), String::new());
        }
        self.elements.insert((of_family("filtered", port.family), key), String::new());
    }
}

/// The keys that lead traffic from these sides to its virtual server.
fn keys(port: &ServedPort, to_cluster_ips: bool, sides: &[&str]) -> Vec<Key> {
    let is_cluster_ip = |it: &&Frontend| matches!(it.address, FrontendAddress::Cluster(_));
    let at = port.frontends.iter().filter(|it| is_cluster_ip(it) == to_cluster_ips);
    at.flat_map(|it| {
        sides.iter().map(move |side| {
            let ip = it.address.ip();
            let map = if ip.is_some() { (*side).to_owned() } else { format!("{side}-node") };
            (of_family(&map, port.family), key(port, it, ip))
        })
    })
    .collect()
}

fn key(port: &ServedPort, at: &Frontend, ip: Option<IpAddr>) -> String {
    let number = match port.protocol {
        Protocol::Udp => 17,
        Protocol::Sctp => 132,
        _ => 6,
    };
    let ip = ip.map_or_else(String::new, |it| format!("{it} . "));
    format!("{ip}{number} . {}", at.port)
}

fn of_family(name: &str, family: Family) -> String {
    format!("{name}{}", if family == Family::V4 { 4 } else { 6 })
}

fn scheduler<'a>(it: &'a ServiceEndpoints, defaults: &'a Defaults, not_served: &mut Vec<String>) -> &'a str {
    let Some(wanted) = it.service.annotations.get(SCHEDULER) else { return &defaults.scheduler };
    if !SCHEDULERS.contains(&&**wanted) {
        not_served.push(format!("annotation {SCHEDULER}: {wanted:?} is none of {}", SCHEDULERS.join(", ")));
    } else if defaults.missing.contains(wanted) {
        not_served.push(format!("annotation {SCHEDULER}: load the kernel module ip_vs_{wanted}"));
    } else {
        return wanted;
    }
    &defaults.scheduler
}

/// The plans of Services, by `namespace/name`.
pub(crate) type Plans = BTreeMap<Arc<str>, Plan>;

#[cfg(test)]
mod tests {
    use proxy_contract::localv1::{
        ClientIpAffinity, Endpoint, EndpointScopes, FamilyFlags, IpFilter, PortMapping, PortName, Service,
        ServiceIPs, service::SessionAffinity,
    };

    use super::*;

    fn set(addresses: &[&str]) -> Option<IpSet> {
        Some(IpSet::of(addresses))
    }

    /// An endpoint at a port, on this node or another one; both serve traffic from inside, and only the first one from outside.
    fn endpoint(address: &str, port: i32, local: bool) -> (Arc<str>, Arc<Endpoint>) {
        let port = PortName { port, index: Some(0), ..PortName::default() };
        let endpoint = Endpoint {
            ips: set(&[address]),
            port_overrides: vec![port],
            scopes: Some(EndpointScopes { internal: true, external: local, cluster: Some(true) }),
            local,
            ..Endpoint::default()
        };
        (address.into(), Arc::new(endpoint))
    }

    fn service(addresses: &[&str], external: &[&str], endpoints: &[(&str, i32, bool)]) -> ServiceEndpoints {
        let service = Service {
            ips: Some(ServiceIPs {
                cluster_ips: set(addresses),
                load_balancer_ips: set(external),
                ..ServiceIPs::default()
            }),
            ports: vec![PortMapping { protocol: Protocol::Tcp.into(), port: 80, ..PortMapping::default() }],
            ..Service::default()
        };
        let endpoints = endpoints.iter().map(|(ip, port, local)| endpoint(ip, *port, *local)).collect();
        ServiceEndpoints { service, endpoints }
    }

    fn defaults() -> Defaults {
        Defaults { scheduler: "rr".into(), missing: ["sed".to_owned()].into() }
    }

    fn planned(it: &ServiceEndpoints) -> Plan {
        plan(it, &defaults(), &mut Marks::default(), None)
    }

    /// A plan as text: `MARK SCHEDULER PERSISTENCE ENDPOINTS` and `SET KEY VALUE`.
    fn text(it: &Plan) -> Vec<String> {
        let servers = it.servers.iter().map(|(mark, it)| {
            let endpoints: Vec<_> = it.weights.keys().map(ToString::to_string).collect();
            format!("{mark:#x} {} {} {}", it.scheduler, it.persistence, endpoints.join(" "))
        });
        servers.chain(it.elements.iter().map(|((set, key), value)| format!("{set} {key}{value}"))).collect()
    }

    /// Compares a plan with the text of a file, without its comments.
    #[track_caller]
    fn check(it: &Plan, expected: &str) {
        let expected: Vec<_> = expected.lines().filter(|it| !it.starts_with('#')).collect();
        assert_eq!(text(it), expected);
    }

    const TWO: [(&str, i32, bool); 2] = [("10.1.0.1", 8080, true), ("10.1.0.2", 8080, false)];

    #[test]
    fn a_cluster_ip_has_one_virtual_server_for_all_traffic() {
        let it = service(&["10.96.0.1", "fd00::1"], &[], &TWO);
        check(&planned(&it), include_str!("plan/cluster-ip.txt"));
    }

    #[test]
    fn traffic_from_outside_has_a_virtual_server_of_its_own_if_its_endpoints_differ() {
        let mut it = service(&["10.96.0.1"], &["192.0.2.1"], &TWO);
        it.service.ports[0].node_port = 30080;
        it.service.external_traffic_to_local = true;
        it.service.ip_filters = vec![IpFilter {
            target_ips: set(&["192.0.2.1"]),
            source_ranges: vec!["203.0.113.0/24".into(), "203.0.113.128/25".into()],
        }];
        check(&planned(&it), include_str!("plan/outside.txt"));
        // With all endpoints for all traffic, that from outside shares the virtual server; it is always masqueraded.
        it.service.external_traffic_to_local = false;
        it.endpoints = [endpoint("10.1.0.1", 8080, true)].into();
        assert_eq!(planned(&it).servers.keys().copied().collect::<Vec<_>>(), [0x6b00_0009, 0x6b00_0012]);
    }

    #[test]
    fn without_endpoints_traffic_is_refused_or_dropped() {
        let mut it = service(&["10.96.0.1"], &[], &[]);
        assert_eq!(text(&planned(&it))[0], "inside4 10.96.0.1 . 6 . 80 : 0x6b000000");
        it.service.ports[0].has_any_endpoint = Some(FamilyFlags { v4: true, v6: false });
        assert_eq!(text(&planned(&it))[0], "inside4 10.96.0.1 . 6 . 80 : 0x6b000001");
    }

    #[test]
    fn affinity_is_persistence_or_a_hash_if_ports_are_translated() {
        let cases = [
            (80, 0, "0x6b000009 rr 60 10.1.0.1:80 10.1.0.2:80"),
            (80, 30080, "0x6b000009 mh 0 10.1.0.1:80 10.1.0.2:80"),
            (8080, 0, "0x6b000009 mh 0 10.1.0.1:8080 10.1.0.2:80"),
        ];
        for (target, node_port, expected) in cases {
            let mut it =
                service(&["10.96.0.1"], &[], &[("10.1.0.1", target, false), ("10.1.0.2", 80, false)]);
            let affinity = ClientIpAffinity { timeout_seconds: 60 };
            it.service.session_affinity = Some(SessionAffinity::ClientIp(affinity));
            it.service.ports[0].node_port = node_port;
            assert_eq!(text(&planned(&it))[0], expected);
        }
    }

    #[test]
    fn an_annotation_names_the_scheduler() {
        let cases = [
            ("lc", "lc", ""),
            ("sed", "rr", "load the kernel module ip_vs_sed"),
            ("x; y", "rr", "\"x; y\" is none of rr,"),
        ];
        for (annotation, scheduler, reason) in cases {
            let mut it = service(&["10.96.0.1"], &[], &TWO);
            it.service.annotations.insert(SCHEDULER.into(), annotation.into());
            let plan = planned(&it);
            assert_eq!(plan.servers[&0x6b00_0009].scheduler, scheduler);
            assert_eq!(plan.not_served.len(), usize::from(!reason.is_empty()));
            assert!(plan.not_served.iter().all(|it| it.contains(reason)), "{:?}", plan.not_served);
        }
    }

    #[test]
    fn marks_stay_and_a_new_process_continues_those_of_the_former_one() {
        let it = service(&["10.96.0.1"], &["192.0.2.1"], &TWO);
        let mut marks = Marks::default();
        let first = plan(&it, &defaults(), &mut marks, None);
        let again = plan(&it, &defaults(), &mut marks, Some(&first));
        assert_eq!(first, again);

        let other = service(&["10.96.0.2"], &[], &TWO);
        let key = |it: &str| ("inside4".to_owned(), format!("{it} . 6 . 80"));
        let found = [
            (key("10.96.0.1"), 0x6b00_0109),
            (key("192.0.2.1"), 0x6b00_0112),
            // Of UDP, and of refused traffic: of no use.
            (key("10.96.0.2"), 0x6b00_0005),
        ];
        let taken = [0x6b00_0109, 0x6b00_0112, 0x6b00_0011].into();
        let mut marks = Marks::default();
        (marks.found, marks.taken) = (found.into(), taken);
        let servers = |it: &Plan| it.servers.keys().copied().collect::<Vec<_>>();
        let continued = plan(&it, &defaults(), &mut marks, None);
        // The one for traffic from outside is new.
        assert_eq!(servers(&continued), [0x6b00_000a, 0x6b00_0109, 0x6b00_0112]);
        assert_eq!(continued.elements[&key("192.0.2.1")], " : 0x6b000112");
        // The next number, 2, is taken.
        assert_eq!(servers(&plan(&other, &defaults(), &mut marks, None)), [0x6b00_0019]);
    }
}
