//! Objects that no API server would accept: every one gives a state, and none a panic.

#![expect(clippy::unwrap_used, reason = "a test")]

use std::net::IpAddr;

use brain::{Brain, Options, node_state};
use model::{
    address::{AddressUse, refusal},
    cluster::ClusterState,
    escaped_line,
    state::{Endpoint, NodeState},
};
use proptest::{collection::vec, option, prelude::*, sample::select};
use serde_json::{Value, json};
use source::file::{ParsedManifest, parse};

fn some_word() -> impl Strategy<Value = String> {
    let known = [
        "",
        "web",
        "api",
        "n1",
        "a",
        "Not A Name",
        "ä|ö",
        "a/b",
        "None",
        "TCP",
        "UDP",
        "SCTP",
        "ICMP",
        "Local",
        "Cluster",
        "ClusterIP",
        "NodePort",
        "LoadBalancer",
        "ExternalName",
        "ClientIP",
        "VIP",
        "Proxy",
        "-",
        ".",
        "..",
        "2006-01-02T15:04:05Z",
        "2006-13-02",
        "a\u{1b}[2J",
        "a\nERROR forged",
        "\u{202e}a",
    ];
    prop_oneof![
        9 => select(known.map(str::to_owned).to_vec()),
        1 => "[\\PC]{0,12}",
        1 => (0..400_usize).prop_map(|it| "x".repeat(it)),
    ]
}

fn some_address() -> impl Strategy<Value = String> {
    let known = [
        "10.96.0.1",
        "10.96.0.2",
        "fd00::1",
        "::ffff:10.96.0.1",
        "0.0.0.0",
        "::",
        "224.0.0.1",
        "255.255.255.255",
        "127.0.0.1",
        "300.1.1.1",
        "10.96.0.1/32",
        "010.0.0.1",
        "fe80::1%eth0",
        "fe80::1",
        "169.254.169.254",
        "",
        "None",
        "web.example.com",
        "10.0.0.0/8",
        "::/0",
    ];
    select(known.map(str::to_owned).to_vec())
}

fn some_port() -> impl Strategy<Value = Value> {
    let number = select(vec![0, 1, 80, 81, 8080, 65_535, 65_536, 70_000, -1, i32::MIN, i32::MAX]);
    prop_oneof![4 => number.prop_map(|it| json!(it)), 1 => Just(Value::Null)]
}

fn some_meta() -> impl Strategy<Value = Value> {
    let name = || prop_oneof![3 => select(vec!["web".to_owned(), "api".to_owned()]), 1 => some_word()];
    (name(), option::of(some_word()), name(), option::of(some_word()), option::of(some_word())).prop_map(
        |(name, namespace, service, time, proxy)| {
            let mut labels =
                json!({"kubernetes.io/service-name": service, "topology.kubernetes.io/zone": name});
            if let Some(proxy) = proxy {
                labels["service.kubernetes.io/service-proxy-name"] = json!(proxy);
            }
            json!({
                "name": name, "namespace": namespace, "labels": labels,
                "annotations": {"endpoints.kubernetes.io/last-change-trigger-time": time.unwrap_or_default()},
            })
        },
    )
}

fn some_service() -> impl Strategy<Value = Value> {
    let port = (some_word(), some_word(), [some_port(), some_port(), some_port()]).prop_map(
        |(name, protocol, [port, node_port, target])| {
            let port = if port.is_null() { json!(80) } else { port };
            json!({"name": name, "protocol": protocol, "port": port, "nodePort": node_port, "targetPort": target})
        },
    );
    let addresses = || vec(some_address(), 0..4);
    let words = [some_word(), some_word(), some_word(), some_word(), some_word()];
    (some_meta(), vec(port, 0..4), [addresses(), addresses(), addresses(), addresses()], words, some_port()).prop_map(
        |(metadata, ports, [cluster_ips, external_ips, ingress, ranges], [kind, internal, external, affinity, mode], number)| {
            let ingress: Vec<_> = ingress.into_iter().map(|it| json!({"ip": it, "ipMode": mode})).collect();
            json!({
                "apiVersion": "v1", "kind": "Service", "metadata": metadata,
                "spec": {
                    "type": kind, "clusterIPs": cluster_ips, "externalIPs": external_ips, "ports": ports,
                    "internalTrafficPolicy": internal, "externalTrafficPolicy": external, "sessionAffinity": affinity,
                    "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": number}},
                    "loadBalancerSourceRanges": ranges, "healthCheckNodePort": number,
                },
                "status": {"loadBalancer": {"ingress": ingress}},
            })
        },
    )
}

fn some_slice() -> impl Strategy<Value = Value> {
    let endpoint =
        (vec(some_address(), 0..3), [some_word(), some_word(), some_word()], any::<[Option<bool>; 3]>())
            .prop_map(|(addresses, [node, pod, hint], [ready, serving, terminating])| {
                json!({
                    "addresses": addresses, "nodeName": node, "targetRef": {"kind": "Pod", "name": pod},
                    "conditions": {"ready": ready, "serving": serving, "terminating": terminating},
                    "hints": {"forZones": [{"name": hint}], "forNodes": [{"name": hint}]},
                })
            });
    let port = (some_word(), some_word(), some_port())
        .prop_map(|(name, protocol, port)| json!({"name": name, "protocol": protocol, "port": port}));
    let family = select(vec!["IPv4", "IPv6", "FQDN", "IPv5", ""]);
    (some_meta(), family, vec(port, 0..3), vec(endpoint, 0..4)).prop_map(|(metadata, family, ports, endpoints)| {
        json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": metadata, "addressType": family,
            "ports": ports, "endpoints": endpoints,
        })
    })
}

fn some_object() -> impl Strategy<Value = Value> {
    let node = some_meta().prop_map(|it| json!({"apiVersion": "v1", "kind": "Node", "metadata": it}));
    prop_oneof![some_service(), some_slice(), node]
}

fn read(objects: &[Value]) -> ParsedManifest {
    let list = json!({"apiVersion": "v1", "kind": "List", "items": objects});
    parse("hostile", list.to_string().as_bytes()).unwrap()
}

proptest! {
    #[test]
    fn every_input_gives_a_state(objects in vec(some_object(), 0..12)) {
        let parsed = read(&objects);
        for it in &parsed.rejected {
            let text = it.to_string();
            prop_assert!(text.len() < 1_500 && escaped_line(&text) == text, "{}", text);
        }
        let (mut brain, mut cluster) = (Brain::new(Options::default()), ClusterState::default());
        brain.start_serving("n1");
        for (_, object) in parsed.objects {
            brain.set(object.clone());
            cluster.set(object);
            brain.recompute();
        }
        brain.recompute();
        prop_assert_eq!(brain.state("n1"), Some(&node_state(&cluster, "n1", &Options::default())));
        for state in brain.state("n1").into_iter().flat_map(|it| it.services.values()) {
            let is_used = |it| refusal(it, AddressUse::Endpoint).is_none();
            prop_assert!(state.service.addresses().all(|it| refusal(it, AddressUse::Assigned).is_none()));
            let addresses = |it: &Endpoint| [it.v4.map(IpAddr::from), it.v6.map(IpAddr::from)];
            prop_assert!(state.endpoints.iter().flat_map(|it| addresses(it)).flatten().all(is_used));
            let names = state.service.ports.iter().map(|it| &*it.name);
            let mut names = names.chain(state.endpoints.iter().map(|it| &*it.hostname));
            prop_assert!(names.all(|it| it.is_ascii() && escaped_line(it) == *it));
        }
        prop_assert!(brain.state("n1").is_some_and(|it| it.diff(&NodeState::default()).count() == it.services.len()));
    }
}

#[test]
fn an_annotation_of_ten_megabytes_is_rejected_briefly() {
    let long = "x".repeat(10 << 20);
    let metadata = json!({
        "name": "web", "labels": {"kubernetes.io/service-name": "web"},
        "annotations": {"note": long, "endpoints.kubernetes.io/last-change-trigger-time": long},
    });
    let slice = json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": metadata, "addressType": "IPv4",
    });
    let parsed = read(&[slice]);
    assert_eq!((parsed.objects.len(), parsed.rejected.len()), (1, 1));
    assert!(parsed.rejected[0].to_string().len() < 400);
}
