//! Conversion of Kubernetes' objects.

#![expect(clippy::needless_pass_by_value, reason = "the values are created for the call")]

use std::{collections::BTreeMap, fmt::Debug, num::NonZeroU32};

use model::{
    Effect, RequestedMetadata, ServiceName, cluster,
    state::{Algorithm, LoadBalancing, PassiveHealth, ServiceKind, SocketLb, TargetPort, TrafficPolicy},
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::{Converted, add_metadata, endpoint_slice, missing_field, node, pod, service, service_cidr};

/// The object, and the rejected fields.
fn read<K: DeserializeOwned, T>(
    convert: impl Fn(&K) -> Converted<T>,
    value: Value,
) -> (Option<T>, Vec<String>) {
    let converted = convert(&serde_json::from_value(value).unwrap());
    (converted.object, converted.rejected.iter().map(|it| it.item.clone()).collect())
}

/// The object with more fields.
fn with(mut object: Value, fields: Value) -> Value {
    object.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    object
}

fn slice(fields: Value) -> Value {
    let labels = json!({"kubernetes.io/service-name": "web"});
    with(json!({"metadata": {"name": "web-1", "labels": labels}, "addressType": "IPv4"}), fields)
}

/// Checks a field of a Service with this spec, and the rejected fields.
#[track_caller]
fn check<T: PartialEq + Debug>(
    spec: Value,
    field: impl Fn(&cluster::Service) -> T,
    expect: T,
    rejected: &[&str],
) {
    let spec = with(json!({"clusterIP": "10.96.0.1", "ports": [{"port": 80}]}), spec);
    let (object, fields) = read(service, json!({"metadata": {"name": "web"}, "spec": spec}));
    assert_eq!(field(&object.unwrap()), expect);
    let rejected: Vec<_> = rejected.iter().map(|it| format!("Service default/web: {it}")).collect();
    assert_eq!(fields, rejected);
}

#[test]
fn missing_and_unknown_values_become_the_default() {
    let kind = Some(ServiceKind::ClusterIp);
    check(json!({}), |it| (it.kind, it.internal_policy), (kind, TrafficPolicy::Cluster), &[]);
    check(json!({"type": "Magic"}), |it| it.kind, kind, &["spec.type"]);
    let policy = json!({"internalTrafficPolicy": "Near"});
    check(policy, |it| it.internal_policy, TrafficPolicy::Cluster, &["spec.internalTrafficPolicy"]);
    check(json!({"sessionAffinity": "Cookie"}), |it| it.affinity, None, &["spec.sessionAffinity"]);
}

#[test]
fn a_service_without_addresses_or_ports_is_rejected() {
    let ports = json!([{"port": 80, "nodePort": 30_080}]);
    let cluster_ip = ["Service default/np: spec.clusterIP"].as_slice();
    let label = |it: &str| json!({"name": "np", "labels": {it: "x"}});
    for (metadata, spec, expect) in [
        (json!({"name": "np"}), json!(null), cluster_ip),
        (json!({"name": "np"}), json!({"type": "NodePort", "ports": ports}), cluster_ip),
        (json!({"name": "np"}), json!({"clusterIP": "", "ports": ports}), cluster_ip),
        (
            json!({"name": "np"}),
            json!({"clusterIP": "10.96.0.1", "prots": ports}),
            &["Service default/np: spec.ports"],
        ),
        // Services that this proxy does not serve may lack them.
        (json!({"name": "np"}), json!({"clusterIP": "None"}), &[]),
        (json!({"name": "np"}), json!({"clusterIPs": ["None"], "ports": ports}), &[]),
        (json!({"name": "np"}), json!({"type": "ExternalName", "externalName": "db.example.com"}), &[]),
        (label("service.kubernetes.io/headless"), json!({"ports": ports}), &[]),
        (label("service.kubernetes.io/service-proxy-name"), json!({"ports": ports}), &[]),
    ] {
        let value = json!({"metadata": metadata, "spec": spec});
        assert_eq!(read(service, value.clone()).1, expect, "{value}");
    }
}

#[test]
fn a_slice_without_a_service_or_ports_is_rejected_in_a_manifest() {
    let no_label = json!({"name": "web-1"});
    let headless = json!({"kubernetes.io/service-name": "peers", "service.kubernetes.io/headless": ""});
    let endpoints = json!([{"addresses": ["10.1.0.1"]}]);
    let ports = json!([{"port": 80}]);
    for (fields, expect) in [
        (
            json!({"metadata": no_label, "endpoints": endpoints, "ports": ports}),
            Some("metadata.labels[kubernetes.io/service-name]"),
        ),
        (json!({"endpoints": endpoints, "prots": ports}), Some("ports")),
        (json!({"endpoints": endpoints, "ports": ports}), None),
        // As a cluster's controllers write them: without endpoints, without ports, and with names.
        (json!({"endpoints": [], "ports": null}), None),
        (json!({"metadata": {"name": "web-1", "labels": headless}, "endpoints": endpoints}), None),
        (json!({"metadata": no_label, "addressType": "FQDN", "endpoints": endpoints}), None),
    ] {
        let missing = missing_field(&serde_json::from_value(slice(fields.clone())).unwrap());
        let expect = expect.map(|it| format!("EndpointSlice default/web-1: {it}"));
        assert_eq!(missing.map(|it| it.item), expect, "{fields}");
    }
}

#[test]
fn the_creation_time_of_a_service_is_read() {
    for (time, micros) in [(json!("1970-01-01T00:00:02Z"), Some(2_000_000)), (json!(null), None)] {
        let metadata = json!({"name": "web", "creationTimestamp": time});
        let (object, rejected) = read(service, json!({"metadata": metadata, "spec": {"clusterIP": "None"}}));
        assert_eq!(object.unwrap().created.map(model::Timestamp::as_micros), micros);
        assert!(rejected.is_empty());
    }
}

#[test]
fn cluster_ips_take_precedence_over_cluster_ip_and_a_headless_service_has_none() {
    let rows: [(_, &str, &[&str]); 5] = [
        (json!({"clusterIP": "None", "clusterIPs": ["None"]}), "", &[]),
        (json!({"clusterIP": ""}), "", &["spec.clusterIP"]),
        (json!({"clusterIP": "10.0.0.1"}), "10.0.0.1", &[]),
        (json!({"clusterIP": "10.0.0.1", "clusterIPs": ["fd00::1", "10.0.0.2"]}), "fd00::1 10.0.0.2", &[]),
        (
            json!({"clusterIPs": ["10.0.0.1", "10.0.0.2", "x"]}),
            "10.0.0.1",
            &["spec.clusterIPs[1]", "spec.clusterIPs[2]"],
        ),
    ];
    for (spec, expect, rejected) in rows {
        let ips = |it: &cluster::Service| it.cluster_ips.iter().map(ToString::to_string).collect::<Vec<_>>();
        check(spec, |it| ips(it).join(" "), expect.to_owned(), rejected);
    }
}

#[test]
fn addresses_that_are_not_unicast_are_rejected() {
    for text in ["0.0.0.0", "224.0.0.1", "255.255.255.255", "::", "ff02::1", "10.0.0.1/32"] {
        check(json!({"externalIPs": [text]}), |it| it.external_ips.len(), 0, &["spec.externalIPs[0]"]);
    }
}

#[test]
fn an_invalid_target_port_does_not_reject_the_port() {
    let spec = json!({"ports": [{"port": 80, "targetPort": 70_000}]});
    let target = |it: &cluster::Service| it.ports[0].target_port.clone();
    check(spec, target, TargetPort::Number(80.try_into().unwrap()), &["spec.ports[0].targetPort"]);
    let named = json!({"ports": [{"port": 80, "targetPort": "web"}]});
    check(named, target, TargetPort::Name("web".into()), &[]);
}

#[test]
fn an_invalid_affinity_time_out_becomes_three_hours() {
    let field = "spec.sessionAffinityConfig.clientIP.timeoutSeconds";
    for (given, used) in [(86_400, 86_400), (-1, 10_800), (0, 10_800), (86_401, 10_800)] {
        let config = json!({"clientIP": {"timeoutSeconds": given}});
        let spec = json!({"sessionAffinity": "ClientIP", "sessionAffinityConfig": config});
        let rejected = if given == used { &[][..] } else { &[field] };
        check(spec, |it| it.affinity.map(|it| it.timeout_seconds.get()), Some(used as u32), rejected);
    }
}

/// Checks the load balancing of a Service with these annotations of our prefix, and the rejected ones with the reasons.
#[track_caller]
fn check_load_balancing(annotations: Value, expect: LoadBalancing, rejected: &[(&str, &str)]) {
    let named = annotations.as_object().unwrap().iter();
    let named: Value = named.map(|(name, it)| (format!("kube-proxy-ebpf.io/{name}"), it.clone())).collect();
    let spec = json!({"clusterIP": "10.96.0.1", "ports": [{"port": 80}]});
    let value = json!({"metadata": {"name": "web", "annotations": named}, "spec": spec});
    let converted = service(&serde_json::from_value(value).unwrap());
    assert_eq!(converted.object.unwrap().load_balancing, expect, "{annotations}");
    let found: Vec<_> = converted.rejected.iter().map(|it| (it.item.as_str(), it.reason.as_str())).collect();
    let items: Vec<_> = rejected
        .iter()
        .map(|(name, reason)| {
            (format!("Service default/web: metadata.annotations[kube-proxy-ebpf.io/{name}]"), *reason)
        })
        .collect();
    assert_eq!(found, items.iter().map(|(item, reason)| (item.as_str(), *reason)).collect::<Vec<_>>());
    let web = ServiceName { namespace: "default".into(), name: "web".into() };
    let effect = Effect::AnnotationIgnored(web);
    assert!(converted.rejected.iter().all(|it| it.effect == effect && it.log_line() == it.to_string()));
}

#[test]
fn an_unknown_annotation_is_ignored_and_reported_with_the_nearest_name() {
    let drain = NonZeroU32::new(30);
    let some = LoadBalancing { drain, ..LoadBalancing::default() };
    for (name, remedy) in [
        ("drian", "did you mean kube-proxy-ebpf.io/drain?"),
        ("Drain", "did you mean kube-proxy-ebpf.io/drain?"),
        ("passive_health", "did you mean kube-proxy-ebpf.io/passive-health?"),
        ("loadbalancing", "did you mean kube-proxy-ebpf.io/load-balancing?"),
        ("slow-starts", "did you mean kube-proxy-ebpf.io/slow-start?"),
        ("timeout", "there are kube-proxy-ebpf.io/{load-balancing,passive-health,slow-start,drain,udp}"),
    ] {
        let reason = format!("is unknown, and ignored; {remedy}");
        check_load_balancing(json!({name: "60s", "drain": "30s"}), some, &[(name, &reason)]);
    }
}

#[test]
fn annotations_say_how_connections_are_spread() {
    let default = LoadBalancing::default();
    for value in [json!(""), json!(null)] {
        let all = json!({
            "load-balancing": value, "passive-health": value, "slow-start": value, "drain": value, "udp": value
        });
        check_load_balancing(all, default, &[]);
    }
    check_load_balancing(json!({"load-balancing": "random"}), default, &[]);
    let algorithm = Algorithm::LeastConnections;
    let least = LoadBalancing { algorithm, ..default };
    check_load_balancing(json!({"load-balancing": "least-connections"}), least, &[]);
    for (text, seconds) in [("1s", 1), ("30s", 30), ("1m30s", 90), ("1h", 3_600)] {
        let slow_start = LoadBalancing { slow_start: Some(seconds.try_into().unwrap()), ..default };
        check_load_balancing(json!({"slow-start": text}), slow_start, &[]);
    }
    for (text, seconds) in [("1s", 1), ("2h", 7_200), ("24h", 86_400)] {
        let drain = LoadBalancing { drain: Some(seconds.try_into().unwrap()), ..default };
        check_load_balancing(json!({"drain": text}), drain, &[]);
    }
    for (text, udp_to_packets) in [("sockets", false), ("packets", true)] {
        check_load_balancing(json!({"udp": text}), LoadBalancing { udp_to_packets, ..default }, &[]);
    }
}

/// Checks the annotation `passive-health`: whether it is on, the failures, the percent; and the rejected items.
#[track_caller]
fn check_passive_health(text: &str, expect: (Option<bool>, u8, u8), rejected: &[&str]) {
    let (enabled, failures, percent) = expect;
    let passive_health = PassiveHealth {
        enabled,
        failures: failures.try_into().ok(),
        max_ejected_percent: percent.try_into().ok(),
    };
    let expect = LoadBalancing { passive_health, ..LoadBalancing::default() };
    let rejected: Vec<_> = rejected.iter().map(|it| ("passive-health", *it)).collect();
    check_load_balancing(json!({"passive-health": text}), expect, &rejected);
}

#[test]
fn passive_health_is_on_or_off_and_has_thresholds() {
    check_passive_health("on", (Some(true), 0, 0), &[]);
    check_passive_health("off", (Some(false), 0, 0), &[]);
    check_passive_health("failures=1", (None, 1, 0), &[]);
    check_passive_health("failures=50, max-ejected=100%", (None, 50, 100), &[]);
    check_passive_health("on,max-ejected=50%,", (Some(true), 0, 50), &[]);
}

#[test]
fn an_invalid_item_of_passive_health_is_rejected_alone() {
    let items = "is ignored; use on, off, failures=5 or max-ejected=50%";
    let failures = "is ignored; the default is used; use failures=1 to failures=50";
    let max_ejected = "is ignored; the default is used; use max-ejected=1% to max-ejected=100%";
    for text in ["On", "true", "failures", "failures:5", "fail=5", "on=5"] {
        let rejected = [format!("{text:?} {items}")];
        check_passive_health(&format!("{text},max-ejected=50%"), (None, 0, 50), &[&rejected[0]]);
    }
    for text in ["failures=0", "failures=51", "failures=256", "failures=-1", "failures=5%", "failures="] {
        let rejected = [format!("{text:?} {failures}")];
        check_passive_health(&format!("on,{text}"), (Some(true), 0, 0), &[&rejected[0]]);
    }
    for text in ["max-ejected=0%", "max-ejected=101%", "max-ejected=50", "max-ejected=half"] {
        let rejected = [format!("{text:?} {max_ejected}")];
        check_passive_health(&format!("failures=5,{text}"), (None, 5, 0), &[&rejected[0]]);
    }
    let twice = |it: &str| format!("{it:?} is ignored; an earlier item sets the same; keep one");
    check_passive_health("off,on", (Some(false), 0, 0), &[&twice("on")]);
    check_passive_health("failures=5,failures=6", (None, 5, 0), &[&twice("failures=6")]);
}

#[test]
fn an_invalid_word_or_duration_is_rejected_and_means_the_default() {
    let default = LoadBalancing::default();
    let reason = "\"round-robin\" is unknown, random is used; use one of random, least-connections";
    check_load_balancing(json!({"load-balancing": "round-robin"}), default, &[("load-balancing", reason)]);
    let reason = "\"off\" is unknown, sockets is used; use one of sockets, packets";
    check_load_balancing(json!({"udp": "off"}), default, &[("udp", reason)]);
    for (name, max) in [("slow-start", "1h"), ("drain", "24h")] {
        // A manifest may contain numbers and booleans, which an API server would refuse.
        for value in [
            json!("0s"),
            json!("-1s"),
            json!("500ms"),
            json!("1.5s"),
            json!("25h"),
            json!("9999999999h"),
            json!("soon"),
            json!("30"),
            json!(30),
            json!(true),
            json!(["30s"]),
        ] {
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            let reason = format!(
                "{text:?} is not a duration of whole seconds from 1s to {max}, the default, none, is used; write it as 30s"
            );
            check_load_balancing(json!({name: value}), default, &[(name, &reason)]);
        }
    }
    let drain = LoadBalancing { drain: Some(7_200.try_into().unwrap()), ..default };
    let reason = "\"2h\" is not a duration of whole seconds from 1s to 1h, the default, none, is used; write it as 30s";
    check_load_balancing(json!({"slow-start": "2h", "drain": "2h"}), drain, &[("slow-start", reason)]);
}

#[test]
fn an_invalid_name_rejects_the_object() {
    for name in ["", "a/b", "a|b", "A", "ä"] {
        let value = json!({"metadata": {"name": name}});
        let (object, rejected) = read(service, value.clone());
        assert_eq!((object, rejected.len()), (None, 1));
        let (object, rejected) = read(node, value);
        assert_eq!((object, rejected.len()), (None, 1));
    }
}

#[test]
fn a_nodes_addresses_and_cidrs_are_validated_one_by_one() {
    let address = |kind: &str, it: &str| json!({"type": kind, "address": it});
    let addresses = [
        address("Hostname", "n1.example"),
        address("InternalIP", "192.0.2.1"),
        address("ExternalIP", "n1"),
        address("ExternalIP", "2001:db8::1"),
        address("InternalIP", "192.0.2.2"),
    ];
    let cidrs = ["10.1.0.0/24", "fd00:1::/64", "10.1.0.0"];
    let spec = json!({"podCIDR": "10.1.0.0/24", "podCIDRs": cidrs});
    let value = json!({"metadata": {"name": "n1"}, "spec": spec, "status": {"addresses": addresses}});
    let (read, rejected) = read(node, value);
    let info = read.unwrap().info;
    assert_eq!(format!("{:?}", info.addresses), "[192.0.2.1, 192.0.2.2, 2001:db8::1]");
    assert_eq!(format!("{:?}", info.pod_cidrs), "[10.1.0.0/24, fd00:1::/64]");
    assert_eq!(rejected, ["Node n1: status.addresses[2].address", "Node n1: spec.podCIDRs[2]"]);
}

#[test]
fn the_ranges_of_a_service_cidr_are_validated_one_by_one() {
    let check = |cidrs: &[&str], expect: &str, rejected: &[&str]| {
        let value = json!({"metadata": {"name": "kubernetes"}, "spec": {"cidrs": cidrs}});
        let (object, fields) = read(service_cidr, value);
        assert_eq!(format!("{:?}", object.unwrap().cidrs), expect);
        let rejected: Vec<_> = rejected.iter().map(|it| format!("ServiceCIDR kubernetes: {it}")).collect();
        assert_eq!(fields, rejected);
    };
    check(&["10.96.0.0/16", "fd00:96::/112"], "[10.96.0.0/16, fd00:96::/112]", &[]);
    check(&["10.96.0.0", "fd00:96::/112"], "[fd00:96::/112]", &["spec.cidrs[0]"]);
    check(&["10.96.0.0/16", "10.97.0.0/16", "10.98.0.0/16"], "[10.96.0.0/16, 10.97.0.0/16]", &["spec.cidrs"]);
    assert_eq!(
        read(service_cidr, json!({"metadata": {"name": "a/b"}})).1,
        ["ServiceCIDR a/b: metadata.name"]
    );
}

#[test]
fn a_node_is_being_deleted_with_a_deletion_timestamp_or_the_autoscalers_taint() {
    let taint = |key: &str| json!({"spec": {"taints": [{"key": key, "effect": "NoSchedule"}]}});
    let deleted = json!({"metadata": {"name": "n1", "deletionTimestamp": "2030-01-01T00:00:00Z"}});
    for (fields, expect) in [
        (taint("node.kubernetes.io/unschedulable"), false),
        (taint("ToBeDeletedByClusterAutoscaler"), true),
        (deleted, true),
    ] {
        let (object, _) = read(node, with(json!({"metadata": {"name": "n1"}}), fields.clone()));
        assert_eq!(object.unwrap().info.is_being_deleted, expect, "{fields}");
    }
}

#[test]
fn slices_of_names_and_slices_without_a_service_are_ignored() {
    for (fields, rejected) in [
        (json!({"addressType": "FQDN"}), &[][..]),
        (json!({"metadata": {"name": "web-1"}}), &[]),
        (json!({"addressType": "IPv5"}), &["EndpointSlice default/web-1: addressType".to_owned()]),
    ] {
        assert_eq!(read(endpoint_slice, slice(fields)), (None, rejected.to_vec()));
    }
}

#[test]
fn conditions_that_are_not_set_have_defaults_and_only_a_pod_names_an_endpoint() {
    let endpoint = |kind: &str| {
        let target = json!({"kind": kind, "name": "p"});
        json!({"addresses": ["10.1.0.1"], "conditions": {"ready": false}, "targetRef": target})
    };
    let (slice, _) = read(endpoint_slice, slice(json!({"endpoints": [endpoint("Pod"), endpoint("Node")]})));
    let endpoints = slice.unwrap().endpoints;
    let conditions = endpoints[0].conditions;
    assert_eq!((conditions.ready, conditions.serving, conditions.terminating), (false, true, false));
    let pods: Vec<_> = endpoints.into_iter().map(|it| it.pod).collect();
    assert_eq!(pods, [Some("p".into()), None]);
}

#[test]
fn only_the_first_address_is_used_and_it_must_be_of_the_slices_family() {
    let endpoints = [&["10.1.0.1", "x"][..], &["fd00::1"], &[]].map(|it| json!({"addresses": it}));
    let (slice, rejected) = read(endpoint_slice, slice(json!({"endpoints": endpoints})));
    assert_eq!(slice.unwrap().endpoints.len(), 1);
    assert_eq!(rejected.len(), 2);
}

#[test]
fn slice_ports_without_a_number_are_valid_and_invalid_ones_are_rejected() {
    let ports = json!([{"name": "a"}, {"port": 0}, {"port": 80, "protocol": "TCP"}]);
    let (slice, rejected) = read(endpoint_slice, slice(json!({"ports": ports})));
    assert_eq!(slice.unwrap().ports.len(), 1);
    assert_eq!(rejected, ["EndpointSlice default/web-1: ports[1].port"]);
}

#[test]
fn the_trigger_time_is_read_and_an_invalid_one_rejected() {
    let annotation = "endpoints.kubernetes.io/last-change-trigger-time";
    let field = format!("EndpointSlice default/web-1: metadata.annotations[{annotation}]");
    for (time, micros, rejected) in [
        ("1970-01-01T00:00:01.5Z", Some(1_500_000), None),
        ("1970-01-01T01:00:00.000000001+01:00", Some(0), None),
        ("", None, None),
        ("yesterday", None, Some(field)),
    ] {
        let mut value = slice(json!({}));
        value["metadata"]["annotations"] = json!({annotation: time});
        let (object, fields) = read(endpoint_slice, value);
        assert_eq!(object.unwrap().trigger_time.map(model::Timestamp::as_micros), micros, "{time}");
        assert_eq!(fields, Vec::from_iter(rejected));
    }
}

#[test]
fn a_message_quotes_only_the_start_of_a_long_value() {
    let long = "ä".repeat(5_000_000);
    let spec = json!({"type": long, "clusterIP": "None", "externalIPs": [long]});
    for (value, count) in [
        (json!({"metadata": {"name": "web"}, "spec": spec}), 2),
        (json!({"metadata": {"name": long, "namespace": long}}), 1),
    ] {
        let rejected = service(&serde_json::from_value(value).unwrap()).rejected;
        assert_eq!(rejected.len(), count);
        assert!(rejected.iter().all(|it| it.to_string().len() < 600), "{rejected:.1000?}");
    }
}

#[test]
fn addresses_that_every_host_has_or_that_mean_another_family_are_rejected() {
    for text in ["127.0.0.1", "::1", "169.254.169.254", "fe80::1", "::ffff:127.0.0.1"] {
        check(json!({"externalIPs": [text]}), |it| it.external_ips.len(), 0, &["spec.externalIPs[0]"]);
        let family = if text.contains(':') { "IPv6" } else { "IPv4" };
        for family in [family, "IPv4"] {
            let endpoints = json!([{"addresses": [text]}]);
            let (object, rejected) =
                read(endpoint_slice, slice(json!({"addressType": family, "endpoints": endpoints})));
            assert_eq!((object.unwrap().endpoints.len(), rejected.len()), (0, 1), "{text}");
        }
    }
    for text in ["127.0.0.1", "::1", "::ffff:127.0.0.1", "0.0.0.0"] {
        check(json!({"clusterIP": text}), |it| it.cluster_ips.len(), 0, &["spec.clusterIP"]);
    }
    // The cluster administrator's range, which an API server does not restrict.
    check(json!({"clusterIP": "169.254.20.10"}), |it| it.cluster_ips.len(), 1, &[]);
}

#[test]
fn addresses_in_other_notations_are_read_as_kube_proxy_reads_them_and_reported() {
    let texts = |it: &[std::net::IpAddr]| it.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
    for text in ["10.096.0.11", "::ffff:10.96.0.11"] {
        let expect = "10.96.0.11".to_owned();
        check(json!({"clusterIP": text}), |it| texts(&it.cluster_ips), expect.clone(), &["spec.clusterIP"]);
        let external = json!({"externalIPs": [text, "192.0.2.1"]});
        let both = format!("{expect} 192.0.2.1");
        check(external, |it| texts(&it.external_ips), both, &["spec.externalIPs[0]"]);
        let endpoints = json!([{"addresses": [text]}]);
        let (object, rejected) = read(endpoint_slice, slice(json!({"endpoints": endpoints})));
        assert_eq!(texts(&object.unwrap().endpoints.iter().map(|it| it.address).collect::<Vec<_>>()), expect);
        assert_eq!(rejected, ["EndpointSlice default/web-1: endpoints[0].addresses[0]"]);
    }
    // The rules of a slice hold for the address that is meant.
    let endpoints = json!([{"addresses": ["::ffff:10.1.0.1"]}]);
    let (object, _) = read(endpoint_slice, slice(json!({"addressType": "IPv6", "endpoints": endpoints})));
    assert_eq!(object.unwrap().endpoints, []);
}

#[test]
fn an_address_with_an_unknown_ip_mode_is_left_to_the_load_balancer() {
    let ingress = [None, Some("VIP"), Some("Proxy"), Some("Tunnel"), Some("")].into_iter().zip(1..);
    let ingress: Vec<_> =
        ingress.map(|(mode, n)| json!({"ip": format!("192.0.2.{n}"), "ipMode": mode})).collect();
    let (object, rejected) = read(
        service,
        json!({
            "metadata": {"name": "web"}, "spec": {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]},
            "status": {"loadBalancer": {"ingress": ingress}},
        }),
    );
    let served: Vec<_> = object.unwrap().load_balancer_ips.iter().map(ToString::to_string).collect();
    assert_eq!(served, ["192.0.2.1", "192.0.2.2"]);
    assert_eq!(
        rejected,
        [3, 4].map(|it| format!("Service default/web: status.loadBalancer.ingress[{it}].ipMode"))
    );
}

#[test]
fn a_source_range_of_mapped_addresses_restricts_ipv4() {
    for text in ["::ffff:10.1.2.3/104", "010.1.2.3/8"] {
        let spec = json!({"loadBalancerSourceRanges": [text]});
        let ranges = |it: &cluster::Service| it.source_ranges.iter().map(ToString::to_string).collect();
        check(spec, ranges, vec!["10.0.0.0/8".to_owned()], &[]);
    }
}

#[test]
fn a_load_balancer_ip_whose_source_ranges_cannot_be_read_is_not_open_to_everyone() {
    let served = |ranges: &[&str]| {
        let (object, rejected) = read(
            service,
            json!({
                "metadata": {"name": "web"},
                "spec": {
                    "clusterIP": "10.96.0.1", "ports": [{"port": 80}], "loadBalancerSourceRanges": ranges,
                    "externalIPs": ["192.0.2.1", "198.51.100.1"],
                },
                "status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}, {"ip": "2001:db8::1"}]}},
            }),
        );
        let object = object.unwrap();
        assert!(rejected.iter().all(|it| it.contains("spec.loadBalancerSourceRanges")), "{rejected:?}");
        let ips: Vec<_> = object.load_balancer_ips.iter().map(ToString::to_string).collect();
        let is_external = object.external_ips.len() == 2;
        assert_eq!(
            is_external,
            ips.first().is_some_and(|it| it == "192.0.2.1"),
            "not by another list either"
        );
        (ips.join(" "), rejected.len())
    };
    let both = "192.0.2.1 2001:db8::1";
    assert_eq!(served(&[]), (both.into(), 0));
    assert_eq!(served(&["10.0.0.0/8"]), (both.into(), 0), "a family without a range is open");
    assert_eq!(
        served(&["10.0.0.5"]),
        (String::new(), 2),
        "it is not known of which family it was meant to be"
    );
    assert_eq!(served(&["10.0.0.5", "10.1.0.0/16"]), ("192.0.2.1".into(), 2));
    assert_eq!(served(&["10.0.0.5", "10.1.0.0/16", "fd00::/8"]), (both.into(), 1));
}

#[test]
fn lists_that_are_longer_than_an_api_server_allows_are_cut() {
    let endpoints: Vec<_> =
        (0..1_010).map(|it| json!({"addresses": [format!("10.1.{}.{}", it / 250, it % 250)]})).collect();
    let ports: Vec<_> =
        (0..100_000).map(|it| json!({"name": format!("p{it}"), "port": it % 60_000 + 1})).collect();
    let hints: Vec<_> = (0..9).map(|it| json!({"name": format!("z{it}")})).collect();
    let (object, rejected) = read(endpoint_slice, slice(json!({"endpoints": endpoints, "ports": ports})));
    let object = object.unwrap();
    assert_eq!((object.endpoints.len(), object.ports.len()), (1_000, 20_000));
    assert_eq!(rejected, ["ports", "endpoints"].map(|it| format!("EndpointSlice default/web-1: {it}")));
    let endpoints = json!([{"addresses": ["10.1.0.1"], "hints": {"forZones": hints, "forNodes": hints}}]);
    let (object, rejected) = read(endpoint_slice, slice(json!({"endpoints": endpoints})));
    let endpoints = object.unwrap().endpoints;
    assert_eq!((endpoints[0].zone_hints().len(), endpoints[0].node_hints().len(), rejected.len()), (8, 8, 2));
    check(json!({"ports": ports}), |it| it.ports.len(), 20_000, &["spec.ports"]);
}

#[test]
fn a_list_of_rejections_is_bounded() {
    let ports: Vec<_> = (0..20_000).map(|_| json!({"port": 0})).collect();
    let (object, rejected) = read(endpoint_slice, slice(json!({"ports": ports})));
    assert_eq!((object.unwrap().ports.len(), rejected.len()), (0, 101));
}

/// Names that no API server accepts, as they would act on a terminal or a log.
const UNPRINTABLE: [&str; 6] =
    ["a\u{1b}]0;x\u{7}", "a\nERROR forged", "a\u{9b}2J", "\u{202e}a", "a\u{2028}b", "a b"];

#[test]
fn a_name_that_cannot_be_printed_is_rejected_where_it_occurs_and_escaped_in_the_message() {
    for name in UNPRINTABLE {
        let assert_printable = |rejected: &[model::Rejected], count: usize| {
            assert_eq!(rejected.len(), count, "{name:?}: {rejected:#?}");
            for it in rejected {
                let text = it.to_string();
                assert_eq!(model::escaped_line(&text), text);
            }
        };
        let metadata = json!({"name": "web", "namespace": name});
        assert_printable(
            &service(&serde_json::from_value(json!({"metadata": metadata})).unwrap()).rejected,
            1,
        );
        let ports = json!([{"port": 80, "name": name}, {"port": 81, "targetPort": name}]);
        let spec = json!({"clusterIP": "10.96.0.1", "ports": ports, "type": name, "externalIPs": [name]});
        let converted =
            service(&serde_json::from_value(json!({"metadata": {"name": "web"}, "spec": spec})).unwrap());
        assert_eq!(converted.object.unwrap().ports.len(), 1);
        assert_printable(&converted.rejected, 4);
        let label = json!({"name": "web", "labels": {"service.kubernetes.io/service-proxy-name": name}});
        let converted = service(&serde_json::from_value(json!({"metadata": label})).unwrap());
        assert_eq!(converted.object, None);
        assert_printable(&converted.rejected, 1);

        let hints = json!({"forZones": [{"name": name}], "forNodes": [{"name": name}]});
        let endpoint = json!({
            "addresses": ["10.1.0.1"], "nodeName": name, "hostname": name, "hints": hints,
            "targetRef": {"kind": "Pod", "name": name},
        });
        let value = slice(json!({"ports": [{"name": name, "port": 80}], "endpoints": [endpoint]}));
        let converted = endpoint_slice(&serde_json::from_value(value).unwrap());
        let object = converted.object.unwrap();
        assert_eq!(object.endpoints, [cluster::Endpoint::new([10, 1, 0, 1].into())]);
        assert_eq!(object.ports, []);
        assert_printable(&converted.rejected, 6);

        let labels = json!({"topology.kubernetes.io/zone": name});
        let address = json!([{"type": "InternalIP", "address": name}]);
        let value = json!({"metadata": {"name": "n1", "labels": labels}, "status": {"addresses": address}});
        let converted = node(&serde_json::from_value(value).unwrap());
        assert_eq!(converted.object.unwrap().zone, None);
        assert_printable(&converted.rejected, 2);
    }
}

#[test]
fn requested_labels_and_annotations_are_kept_and_invalid_ones_rejected_alone() {
    let labels = json!({"app": "web", "tier": "a b", "count": 7});
    let annotations = json!({"note": "any \u{1b} text", "b\u{202e}d": "", "other": null});
    let metadata = json!({"name": "web", "labels": labels, "annotations": annotations});
    let object = json!({"metadata": metadata, "spec": {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]}});
    let read_with = |requested| {
        let convert = |it: &_| {
            let mut converted = service(it);
            add_metadata(&mut converted, &requested, &object);
            converted
        };
        let (service, rejected) = read(convert, object.clone());
        (service.unwrap().metadata, rejected)
    };
    assert_eq!(read_with(RequestedMetadata::default()), (None, Vec::new()));
    let (found, rejected) = read_with(RequestedMetadata::everything());
    let found = found.unwrap();
    let items =
        |it: &BTreeMap<String, String>| it.iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>();
    assert_eq!(items(&found.labels), ["app=web", "count=7"]);
    assert_eq!(items(&found.annotations), ["note=any \u{1b} text", "other="]);
    let fields = ["labels[tier]", "annotations[b\\u{202e}d]"];
    assert_eq!(rejected, fields.map(|it| format!("Service default/web: metadata.{it}")));
}

/// Checks what a Pod with these annotations of our prefix is, and the rejected parts.
#[track_caller]
fn check_pod(annotations: Value, metadata: Value, expect: Option<(&str, SocketLb)>, rejected: &[&str]) {
    let named = annotations.as_object().unwrap().iter();
    let named: Value = named.map(|(name, it)| (format!("kube-proxy-ebpf.io/{name}"), it.clone())).collect();
    let mut object = with(json!({"name": "vpn", "uid": "3f2a8d1c", "annotations": {}}), metadata);
    object["annotations"] = with(named, object["annotations"].clone());
    let value = json!({"metadata": object, "spec": {"nodeName": "n1"}});
    let converted = pod(&serde_json::from_value(value).unwrap());
    let found = converted.object.as_ref().map(|it| {
        assert_eq!(&*it.name, "default/vpn");
        (&*it.uid, it.socket_lb)
    });
    assert_eq!(found, expect, "{annotations}");
    let found: Vec<_> = converted.rejected.iter().map(ToString::to_string).collect();
    assert_eq!(found, rejected.iter().map(|it| format!("Pod default/vpn: {it}")).collect::<Vec<_>>());
}

#[test]
fn an_annotation_of_a_pod_says_which_of_its_sockets_are_served() {
    let off = Some(("3f2a8d1c", SocketLb::Off));
    check_pod(json!({"socket-lb": "off"}), json!({}), off, &[]);
    check_pod(json!({"socket-lb": "tcp-only"}), json!({}), Some(("3f2a8d1c", SocketLb::TcpOnly)), &[]);
    for value in [json!("on"), json!(""), json!(null)] {
        check_pod(json!({"socket-lb": value}), json!({}), None, &[]);
    }
    check_pod(json!({}), json!({"uid": null, "name": null}), None, &[]);
    let mirror = json!({"annotations": {"kubernetes.io/config.mirror": "0123abcd"}});
    check_pod(json!({"socket-lb": "off"}), mirror, Some(("0123abcd", SocketLb::Off)), &[]);
    let missing = "metadata.uid: is missing; a pod's cgroup is found by it";
    check_pod(json!({"socket-lb": "off"}), json!({"uid": ""}), None, &[missing]);
}

#[test]
fn an_invalid_annotation_of_a_pod_is_reported_and_means_the_default() {
    let field = "metadata.annotations[kube-proxy-ebpf.io/socket-lb]";
    let unknown = |it: &str| format!("{field}: {it:?} is unknown, on is used; use one of on, off, tcp-only");
    // YAML reads `off` without quotes as a boolean.
    for value in [json!("host"), json!(false)] {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        check_pod(json!({"socket-lb": value}), json!({}), None, &[&unknown(&text)]);
    }
    let remedy = "is unknown, and ignored; did you mean kube-proxy-ebpf.io/socket-lb?";
    let named = format!("metadata.annotations[kube-proxy-ebpf.io/socketlb]: {remedy}");
    let off = Some(("3f2a8d1c", SocketLb::Off));
    check_pod(json!({"socketlb": "off"}), json!({}), None, &[&named]);
    let remedy = "is unknown, and ignored; that of a Pod is kube-proxy-ebpf.io/socket-lb";
    let named = format!("metadata.annotations[kube-proxy-ebpf.io/drain]: {remedy}");
    check_pod(json!({"drain": "5m", "socket-lb": "off"}), json!({}), off, &[&named]);
}
