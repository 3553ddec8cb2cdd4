//! The rules of a port, as text: names stand for their digests.

use std::time::Duration;

use proxy_contract::backend::{Frontend, FrontendAddress};

use super::*;

const CONFIG: Config = Config {
    masquerade_mark: 0x4000,
    masquerade_all: false,
    inside: Vec::new(),
    node_port_addresses: Vec::new(),
    has_random_fully: true,
    has_bpf: true,
};

fn config() -> Config {
    Config { inside: vec!["10.0.0.0/8".parse().unwrap(), "fd00::/8".parse().unwrap()], ..CONFIG }
}

fn endpoints(texts: &[&str]) -> Vec<SocketAddr> {
    texts.iter().map(|it| it.parse().unwrap()).collect()
}

fn at(address: FrontendAddress, port: u16) -> Frontend {
    Frontend { address, port, sources: None }
}

fn cluster_ip(ip: &str) -> Frontend {
    at(FrontendAddress::Cluster(ip.parse().unwrap()), 80)
}

fn external_ip(ip: &str) -> Frontend {
    at(FrontendAddress::External(ip.parse().unwrap()), 80)
}

fn port(frontends: &[Frontend], [internal, cluster, external]: [&[&str]; 3]) -> ServedPort {
    ServedPort {
        name: "http".to_owned(),
        family: Family::V4,
        protocol: Protocol::Tcp,
        frontends: frontends.to_vec(),
        internal: endpoints(internal),
        cluster: endpoints(cluster),
        external: endpoints(external),
        other_serving: Vec::new(),
        affinity: None,
        drops: false,
        keeps_source: false,
    }
}

/// The rules of a port of the Service ns/web, without the parts of names that stand for it.
fn written(config: &Config, port: ServedPort) -> String {
    let chains = of_service(config, "ns/web", &[port]);
    let mut text = String::new();
    for (id, rules) in &chains {
        assert!(id.name.len() <= 28, "{id:?}");
        for rule in rules.lines() {
            let _ = writeln!(text, "{} {rule}", id.table);
        }
    }
    let protocols = ["tcp", "udp", "sctp"].iter().flat_map(|it| [80, 30080].map(|port| (it, port)));
    let ids: Vec<String> = protocols.map(|(it, port)| hash(&format!("ns/web {it} {port}"))).collect();
    for id in ids {
        for endpoint in ["10.1.0.1:8080", "10.1.0.2:8080"] {
            text = text.replace(&hash(&format!("{id} {endpoint}")), endpoint);
        }
        for frontend in [None, Some(IpAddr::from([192, 0, 2, 1]))] {
            text = text.replace(&hash(&format!("{id} {frontend:?}")), "ID");
        }
        text = text.replace(&id, "ID");
    }
    text.replace("-m comment --comment \"ns/web:http\" ", "")
}

fn written_frame(family: Family) -> String {
    let config = Config { node_port_addresses: vec!["192.0.2.0/24".parse().unwrap()], ..config() };
    let service_cidrs = ["10.96.0.0/12".parse().unwrap(), "fd00::/108".parse().unwrap()];
    let chains = frame(&config, &service_cidrs, family);
    let lines = chains.iter().flat_map(|(id, rules)| rules.lines().map(|it| format!("{} {it}\n", id.table)));
    lines.collect()
}

const BOTH: &[&str] = &["10.1.0.1:8080", "10.1.0.2:8080"];
const ONE: &[&str] = &["10.1.0.1:8080"];

/// Cases with their rules in a file, each under its name.
#[test]
fn ports_and_the_frame_have_these_rules() {
    let external = [external_ip("192.0.2.1")];
    let inside = [at(FrontendAddress::Node, 30080), cluster_ip("10.96.0.10")];
    let all = [&inside[..], &external].concat();
    let sources = Some(vec!["203.0.113.0/24".parse().unwrap()]);
    let restricted = [Frontend { sources, ..external_ip("192.0.2.1") }];
    let local = ServedPort { keeps_source: true, ..port(&inside, [BOTH, BOTH, ONE]) };
    let elsewhere = ServedPort { drops: true, ..port(&external, [&[], ONE, &[]]) };
    let affinity = Some(Duration::from_secs(60));
    let of_clients = port(&[cluster_ip("10.96.0.10")], [BOTH; 3]);
    let of_clients = ServedPort { affinity, protocol: Protocol::Udp, ..of_clients };
    let cases = [
        (
            "an endpoint is selected at random, and outside traffic masqueraded",
            written(&config(), port(&all, [BOTH; 3])),
        ),
        (
            "the policy Local keeps the source, and gives inside traffic all endpoints",
            written(&config(), local),
        ),
        ("without an endpoint here, outside traffic alone gets to filter", written(&config(), elsewhere)),
        ("session affinity looks for the endpoint of the client first", written(&CONFIG, of_clients)),
        ("other sources than the ranges are dropped", written(&config(), port(&restricted, [ONE; 3]))),
        (
            "without endpoints, sources in the ranges are refused",
            written(&config(), port(&restricted, [&[]; 3])),
        ),
        ("the frame has the jumps, and what does not depend on Services", written_frame(Family::V4)),
    ];
    let expected = include_str!("rules.txt").strip_prefix("# ").unwrap().split("\n# ");
    let mut expected: BTreeMap<_, _> = expected.map(|it| it.split_once('\n').unwrap()).collect();
    for (name, found) in cases {
        let expected = expected.remove(name).unwrap_or_else(|| panic!("there is no case {name}"));
        assert!(found == expected, "{name}: found:\n{found}\nexpected:\n{expected}");
    }
    assert!(expected.is_empty(), "{expected:?}");
}

#[test]
fn what_is_masqueraded_at_a_cluster_ip_depends_on_the_configuration() {
    // The first rule of its chain.
    let cases = [
        (Config { masquerade_all: true, ..config() }, "-d 10.96.0.10 -j KPI-MARK-MASQ"),
        (CONFIG, "-p tcp -j DNAT --to-destination 10.1.0.1:8080"),
        (Config { has_bpf: false, ..CONFIG }, "-s 10.1.0.1 -j KPI-MARK-MASQ"),
    ];
    for (config, first) in cases {
        let text = written(&config, port(&[cluster_ip("10.96.0.10")], [ONE; 3]));
        assert!(text.lines().nth(1).is_some_and(|it| it.ends_with(first)), "{text}");
    }
}

#[test]
fn a_port_without_endpoints_is_refused_or_dropped() {
    let [v4, v6] = ["10.96.0.10", "fd00::10"];
    let cases = [
        (Protocol::Tcp, v4, false, "tcp -m tcp --dport 80 -j REJECT --reject-with tcp-reset"),
        (Protocol::Udp, v4, false, "udp -m udp --dport 80 -j REJECT --reject-with icmp-port-unreachable"),
        (Protocol::Sctp, v6, false, "sctp -m sctp --dport 80 -j REJECT --reject-with icmp6-port-unreachable"),
        (Protocol::Tcp, v6, true, "tcp -m tcp --dport 80 -j DROP"),
    ];
    for (protocol, ip, drops, expected) in cases {
        let family = Family::of(ip.parse().unwrap());
        let it = ServedPort { protocol, family, drops, ..port(&[cluster_ip(ip)], [&[], &[], &[]]) };
        assert_eq!(written(&config(), it), format!("filter -A KPI-SERVICES -d {ip} -p {expected}\n"));
    }
}

#[test]
fn without_a_range_every_source_is_dropped() {
    let none = [Frontend { sources: Some(Vec::new()), ..external_ip("192.0.2.1") }];
    let text = written(&config(), port(&none, [ONE, ONE, ONE]));
    assert!(text.contains("filter -A KPI-SERVICES -d 192.0.2.1 -p tcp -m tcp --dport 80 -j DROP"), "{text}");
    assert!(!text.contains("nat -A KPI-SERVICES"), "{text}");
}

#[test]
fn a_name_cannot_end_a_comment() {
    let it = ServedPort {
        name: "x\"\n-A INPUT -j ACCEPT".to_owned(),
        ..port(&[cluster_ip("10.96.0.10")], [ONE; 3])
    };
    let chains = of_service(&config(), "ns/web\" -j DROP", &[it]);
    let rules: String = chains.values().map(String::as_str).collect();
    assert!(rules.contains("--comment \"ns/web-jDROP:x-AINPUT-jACCEPT\" -j KPI-SVC-"), "{rules}");
    assert_eq!(rules.lines().count(), 3, "{rules}");
}

#[test]
fn the_frame_of_ipv6_has_its_addresses() {
    let v6 = written_frame(Family::V6);
    for expected in [
        "filter -A KPI-SERVICES -d ::1 -j RETURN\nfilter -A KPI-SERVICES -m addrtype --dst-type LOCAL -j KPI-NODEPORTS\n",
        "filter -A KPI-SERVICES -d fd00::/108 -j DROP\n",
        "nat -A KPI-MARK-OUTSIDE -s fd00::/8 -j RETURN\n",
        "--bytecode \"18,32 0 0 8,7 0 0 0,32 0 0 24,29 0 13 0,32 0 0 12,7 0 0 0,32 0 0 28,29 0 9 0,32 0 0 16,7 0 0 0,\
         32 0 0 32,29 0 5 0,32 0 0 20,7 0 0 0,32 0 0 36,29 0 1 0,6 0 0 1,6 0 0 0\"",
    ] {
        assert!(v6.contains(expected), "{v6}");
    }
}
