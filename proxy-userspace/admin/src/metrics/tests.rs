//! The page agrees with its documentation, and its values with the events.

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs,
    sync::Arc,
    time::{Duration, SystemTime},
};

use datapath::{
    EjectedEndpoint, ForwardCounts, HookBehavior, PacketCount, PortCounts, ProbeResult, RefusedNamespace,
    TableStats,
};
use grpc_server::Clients;
use hyper::Request;
use metrics::HELP;
use model::{Rejected, ServiceName};
use pipeline::{Observer as _, SyncStatus};
use publish::{CountedNodes, Publisher, SingleNode, followers::Followers};
use reconciler::{Observer as _, Step};
use source::kube::RequestMetrics;

use crate::{
    admin::Admin,
    fixtures::{FixedCounts, apply, attach_status, node, published, report, service},
    state::{RejectedBy, Role, seconds},
};

/// `run` or `brain`, with a value for every metric.
fn busy(role: Role) -> Admin {
    let admin = busy_alone(role);
    let publisher = Publisher::new("n1");
    let nodes = CountedNodes::new(Arc::new(SingleNode::new("n1", publisher.subscribe())));
    let mut registry = admin.registry();
    registry.register_collector(Box::new(nodes.watchers()));
    registry.register_collector(Box::new(Followers::default()));
    registry.register_collector(Box::new(Clients::default()));
    let requests = RequestMetrics::default();
    requests.begin(&Request::new(()))(None);
    requests.register(&mut registry);
    drop(registry);
    admin
}

/// A process that has applied a state, without a source that requests and without a gRPC server; a backend is `agent`.
fn busy_alone(role: Role) -> Admin {
    let admin = Admin::new("n1", role);
    let now = SystemTime::now();
    admin.source("file", SyncStatus { is_synced: true, last_contact: Some(now), ..SyncStatus::default() });
    if role == Role::Backend {
        reconciler::Metrics::new(&mut admin.registry());
    }
    let publisher = Publisher::new("n1");
    apply(&admin, &publisher, [service("a", 1, Some(seconds(now) + 1.0))]);
    admin.on_attach_checked(Ok(&attach_status(true)));
    admin.on_probed(&[ProbeResult { hook: "connect4", behavior: HookBehavior::Ok }]);
    let refused =
        ["/pod", "/pod"].map(|it| RefusedNamespace { netns: 1, cgroup: Some(it.into()), refused: 4 });
    let ejected = vec![EjectedEndpoint {
        service: ServiceName::new("default", "b"),
        port: String::new(),
        endpoint: ([10, 0, 0, 1], 80).into(),
        clients: 2,
        has_node: true,
        max_ejected_percent: 100,
    }];
    admin.on_table_stats(TableStats { refused: refused.into(), ejected, ..TableStats::default() });
    let count = |packets| PacketCount { packets, bytes: 100 * packets };
    let counts = PortCounts {
        connections: 7,
        no_backend: 2,
        denied: 1,
        left_to_packets: 3,
        external_connections: 5,
        forwarding: ForwardCounts {
            sent: count(11),
            served: count(12),
            received: count(13),
            second_chances: 14,
            dropped: 15,
        },
    };
    admin.set_readers(|it| {
        it.has_sockets = true;
        it.counters = Some(Arc::new(move || Some(Box::new(FixedCounts(vec![("a", counts)])))));
    });
    admin
}

/// The names on the page, with type and labels.
fn served(text: &str) -> BTreeMap<String, (String, BTreeSet<String>)> {
    let mut served = BTreeMap::new();
    for line in text.lines() {
        if let Some(header) = line.strip_prefix("# TYPE ") {
            let (name, kind) = header.split_once(' ').unwrap();
            let before = served.insert(name.to_owned(), (kind.to_owned(), BTreeSet::new()));
            assert_eq!(before, None, "{name} appears twice");
        } else if !line.starts_with("# HELP ") {
            let name = line.split(['{', ' ']).next().unwrap();
            let is_of = |family: &str| {
                let rest = name.strip_prefix(family);
                rest.is_some_and(|it| ["", "_bucket", "_sum", "_count"].contains(&it))
            };
            let family = served.iter_mut().find(|(family, _)| is_of(family));
            let (_, (_, labels)) = family.unwrap_or_else(|| panic!("{line} has no header"));
            let inner = line.split_once('{').map_or("", |(_, it)| it.split_once('}').unwrap().0);
            let names = inner.split(',').filter_map(|it| it.split_once('=')).map(|(it, _)| it.to_owned());
            labels.extend(names.filter(|it| it != "le"));
        }
    }
    served
}

const PAGE: &str = include_str!("../../../../docs/metrics.md");
/// The environment variable with which the generated part of the page is written instead of compared.
const UPDATE: &str = "KUBE_PROXY_EBPF_UPDATE_DOCUMENTS";
const BEGIN: &str = "<!-- Generated: cargo xtask docs -->\n";
const END: &str = "<!-- End of the generated part -->\n";

/// A line for each metric, by the processes that serve it.
fn reference() -> String {
    let processes = [busy(Role::Backend), busy(Role::Brain), busy_alone(Role::Backend)];
    let texts = processes.map(|it| it.metrics.text().unwrap());
    let [run, brain, agent] = texts.each_ref().map(|it| served(it));
    let help = |name: &str| {
        let lines = texts.iter().flat_map(|it| it.lines());
        lines
            .filter_map(|it| it.strip_prefix("# HELP ")?.split_once(' '))
            .find(|(it, _)| *it == name)
            .unwrap()
            .1
    };
    let list = |title: &str, is_listed: &dyn Fn(&str) -> bool| {
        let mut lines = String::new();
        let mut usual = Vec::new();
        for (name, (kind, labels)) in run.iter().filter(|(name, _)| is_listed(name)) {
            let labels: String = labels.iter().map(|it| format!(", `{it}`")).collect();
            if name.starts_with("kube_proxy_ebpf_") {
                lines += &format!("- `{name}` ({kind}{labels}): {}\n", help(name));
            } else {
                usual.push(format!("`{name}` ({kind}{labels})"));
            }
        }
        format!("\n### {title}\n\n{lines}- With the usual meaning: {}\n", usual.join(", "))
    };
    assert!([&brain, &agent].into_iter().flat_map(|it| it.keys()).all(|it| run.contains_key(it)));
    list("All processes", &|it| brain.contains_key(it) && agent.contains_key(it))
        + &list("run and brain", &|it| !agent.contains_key(it))
        + &list("run and agent", &|it| !brain.contains_key(it))
}

#[test]
fn the_table_of_help_texts_is_sorted_and_has_the_served_ones() {
    let texts = [Role::Backend, Role::Brain].map(|it| busy(it).metrics.text().unwrap());
    let lines = texts.iter().flat_map(|it| it.lines()).filter_map(|it| it.strip_prefix("# HELP "));
    assert!(lines.collect::<BTreeSet<_>>().into_iter().eq(HELP.lines()));
}

#[test]
fn the_page_of_metrics_is_generated() {
    let (before, rest) = PAGE.split_once(BEGIN).unwrap();
    let (documented, after) = rest.split_once(END).unwrap();
    let reference = reference();
    if env::var_os(UPDATE).is_some() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/metrics.md");
        fs::write(path, format!("{before}{BEGIN}{reference}\n{END}{after}")).unwrap();
    } else {
        // Not compared by `assert_eq`, which would print both.
        assert!(documented == format!("{reference}\n"), "`cargo xtask docs` writes docs/metrics.md again");
    }
}

/// The metrics of kube-proxy 1.36 in nftables mode, with their labels: its own, as `pkg/proxy/metrics` registers them, and those
/// of its libraries.
const KUBE_PROXY_METRICS: &str = include_str!("kube_proxy.txt");

#[test]
fn the_page_names_every_metric_of_kube_proxy_that_is_not_served_alike() {
    let absent = PAGE.split_once("## Compared with kube-proxy").unwrap().1;
    let served = served(&busy(Role::Backend).metrics.text().unwrap());
    for line in KUBE_PROXY_METRICS.lines() {
        let (name, labels) = line.split_once(' ').unwrap_or((line, ""));
        let labels = labels.split_whitespace().map(ToOwned::to_owned).collect::<BTreeSet<_>>();
        let is_same = served.get(name).is_some_and(|(_, it)| *it == labels);
        assert_eq!(!absent.contains(&format!("`{name}`")), is_same, "{name}");
        assert!(is_same || !name.starts_with("kubeproxy_"), "{name}");
    }
}

#[test]
fn samples_follow_the_events_and_zero_counters_have_none() {
    let admin = busy(Role::Backend);
    let check = |samples: &[(&str, f64)]| {
        for (sample, expect) in samples {
            let found = value(&admin, sample);
            assert!((found - expect).abs() < f64::EPSILON, "{sample} {found}");
        }
    };
    check(&[
        (r#"kubeproxy_sync_proxy_rules_duration_seconds_count{ip_family="IPv4"}"#, 1.0),
        (r#"kubeproxy_sync_proxy_rules_duration_seconds_count{ip_family="IPv6"}"#, 1.0),
        // Of two namespaces.
        (r#"kube_proxy_ebpf_socket_refused_by_cgroup{cgroup="/pod"}"#, 8.0),
        (r#"kube_proxy_ebpf_connections_total{namespace="default",service="a",port="",protocol="TCP"}"#, 7.0),
        (r#"kube_proxy_ebpf_program_attached{hook="connect4"}"#, 1.0),
    ]);
    admin.set_readers(|it| it.counters = Some(Arc::new(|| Some(FixedCounts::of(&[])))));
    assert!(!admin.metrics.text().unwrap().contains(r#"service="a""#));
    assert_eq!(admin.status().counters.map(|it| it.connections), Some(0));
    admin.on_attach_checked(Ok(&attach_status(false)));
    let rejected = |n: usize| (0..n).map(|n| Rejected::not_served(n.to_string(), "for a test"));
    admin.set_rejected(RejectedBy::Brain, rejected(3));
    admin.set_rejected(RejectedBy::Brain, rejected(2));
    check(&[
        (r#"kube_proxy_ebpf_program_attached{hook="connect4"}"#, 0.0),
        (r#"kube_proxy_ebpf_foreign_programs{hook="connect4"}"#, 1.0),
        (r#"kube_proxy_ebpf_rejected_items{by="brain"}"#, 2.0),
        (r#"kube_proxy_ebpf_rejected_items{by="backend"}"#, 1.0),
        (r#"kube_proxy_ebpf_rejected_items{by="source"}"#, 0.0),
    ]);
}

#[track_caller]
fn value(admin: &Admin, sample: &str) -> f64 {
    let text = admin.metrics.text().unwrap();
    let line = text.lines().find_map(|it| it.strip_prefix(sample)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("there is no {sample} in\n{text}")).parse().unwrap()
}

#[test]
fn changes_are_counted_when_they_are_published_and_not_by_a_retry_and_pending_until_they_are_active() {
    let (admin, publisher) = node();
    let count = |name: &str| value(&admin, &format!("kubeproxy_sync_proxy_rules_{name}"));
    let first = published(&publisher, [service("a", 2, None), service("b", 0, None)]);
    admin.on_dequeued(&first);
    assert_eq!((count("service_changes_total"), count("endpoint_changes_total")), (2.0, 1.0));
    assert_eq!((count("service_changes_pending"), count("endpoint_changes_pending")), (2.0, 1.0));
    admin.on_applied(&first, &report(), Duration::from_millis(1));
    assert_eq!((count("service_changes_pending"), count("endpoint_changes_pending")), (0.0, 0.0));
    // One Service is removed, and one gets another endpoint.
    let second = published(&publisher, [service("a", 3, None)]);
    admin.on_dequeued(&second);
    assert_eq!((count("service_changes_total"), count("endpoint_changes_total")), (3.0, 2.0));
    assert_eq!((count("service_changes_pending"), count("endpoint_changes_pending")), (1.0, 1.0));
    // A state that is dequeued twice is a retry, and no change.
    admin.on_failed(Step::Apply, "no room");
    admin.on_dequeued(&second);
    assert_eq!(value(&admin, "kube_proxy_ebpf_apply_retries_total"), 1.0);
    assert_eq!(count("service_changes_total"), 3.0);
}

#[test]
fn services_and_endpoints_are_those_of_the_active_state() {
    let (admin, publisher) = node();
    let mut numbers = Vec::new();
    for services in [vec![("a", 2), ("b", 0)], vec![("a", 1), ("b", 3), ("c", 1)], vec![("c", 0)]] {
        apply(&admin, &publisher, services.into_iter().map(|(name, n)| service(name, n, None)));
        let own = |name: &str| value(&admin, &format!("kube_proxy_ebpf_{name}"));
        let local = "kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family=\"IPv4\",traffic_policy=\"internal\"}";
        numbers.push((own("active_revision"), own("services"), own("endpoints"), value(&admin, local)));
    }
    assert_eq!(numbers, [(1.0, 2.0, 2.0, 1.0), (2.0, 3.0, 5.0, 0.0), (3.0, 1.0, 0.0, 1.0)]);
}

#[test]
fn the_delay_of_a_change_is_counted_once_and_only_if_it_happened_after_the_start() {
    let before = seconds(SystemTime::now()) - 1000.0;
    let (admin, publisher) = node();
    let after = seconds(SystemTime::now());
    let count = || value(&admin, "kubeproxy_network_programming_duration_seconds_count{ip_family=\"IPv4\"}");
    let mut counts = Vec::new();
    // Before the start; a new time; the same time, as after a change of the Service only; another time.
    for (endpoints, time) in [(1, before), (2, after), (3, after), (4, after + 0.001)] {
        apply(&admin, &publisher, [service("a", endpoints, Some(time))]);
        counts.push(count());
    }
    assert_eq!(counts, [0.0, 1.0, 1.0, 2.0]);
}
