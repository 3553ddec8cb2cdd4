//! Conversion of Kubernetes' objects.

#![expect(clippy::needless_pass_by_value, reason = "the values are created for the call")]

use std::fmt::Debug;

use model::{
    cluster,
    state::{ServiceKind, TargetPort, TrafficPolicy},
};
use serde_json::{Value, json};

use super::{Converted, endpoint_slice, missing_field, node, objects, service};

fn parts<T>(converted: Converted<T>) -> (Option<T>, Vec<String>) {
    (converted.object, converted.rejected.iter().map(|it| it.item.clone()).collect())
}

/// A Service with more fields in its spec, and the rejected fields.
fn read_service(spec: Value) -> (cluster::Service, Vec<String>) {
    let mut value = json!({
        "metadata": {"name": "web"}, "spec": {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]},
    });
    value["spec"].as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    let (object, rejected) = parts(service(&serde_json::from_value::<objects::Service>(value).unwrap()));
    (object.unwrap(), rejected)
}

fn read_slice(slice: Value) -> (Option<cluster::EndpointSlice>, Vec<String>) {
    let mut value = json!({
        "metadata": {"name": "web-1", "labels": {"kubernetes.io/service-name": "web"}}, "addressType": "IPv4",
    });
    value.as_object_mut().unwrap().extend(slice.as_object().unwrap().clone());
    parts(endpoint_slice(&serde_json::from_value::<objects::EndpointSlice>(value).unwrap()))
}

#[track_caller]
fn check<T: PartialEq + Debug>(
    spec: Value,
    field: impl Fn(&cluster::Service) -> T,
    expect: T,
    refused: &[&str],
) {
    let (service, rejected) = read_service(spec);
    assert_eq!(field(&service), expect);
    let refused: Vec<_> = refused.iter().map(|it| format!("Service default/web: {it}")).collect();
    assert_eq!(rejected, refused);
}

#[test]
fn missing_fields_of_a_service_have_defaults() {
    let (service, rejected) = read_service(json!({}));
    assert_eq!(service.kind, Some(ServiceKind::ClusterIp));
    assert_eq!(service.internal_policy, TrafficPolicy::Cluster);
    assert!(rejected.is_empty());
}

#[test]
fn a_service_without_addresses_or_ports_is_rejected() {
    let refused = |value: Value| parts(service(&serde_json::from_value(value).unwrap())).1;
    let fields = |field: &str| vec![format!("Service default/np: {field}")];
    let named = |spec: Value| json!({"metadata": {"name": "np"}, "spec": spec});
    let ports = json!([{"port": 80, "nodePort": 30_080}]);
    assert_eq!(refused(json!({"metadata": {"name": "np"}})), fields("spec.clusterIP"));
    assert_eq!(refused(named(json!({"type": "NodePort", "ports": ports}))), fields("spec.clusterIP"));
    assert_eq!(refused(named(json!({"clusterIP": "", "ports": ports}))), fields("spec.clusterIP"));
    assert_eq!(refused(named(json!({"clusterIP": "10.96.0.1", "prots": ports}))), fields("spec.ports"));
    // Services that this proxy does not serve may lack them.
    for spec in [
        json!({"clusterIP": "None"}),
        json!({"clusterIPs": ["None"], "ports": ports}),
        json!({"type": "ExternalName", "externalName": "db.example.com"}),
    ] {
        assert_eq!(refused(named(spec.clone())), Vec::<String>::new(), "{spec}");
    }
    for label in ["service.kubernetes.io/headless", "service.kubernetes.io/service-proxy-name"] {
        let labels = json!({"name": "np", "labels": {label: "x"}});
        assert_eq!(refused(json!({"metadata": labels, "spec": {"ports": ports}})), Vec::<String>::new());
    }
}

#[test]
fn a_slice_without_a_service_or_ports_is_rejected_in_a_manifest() {
    let missing = |labels: Value, slice: Value| {
        let mut value = json!({"metadata": {"name": "web-1", "labels": labels}, "addressType": "IPv4"});
        value.as_object_mut().unwrap().extend(slice.as_object().unwrap().clone());
        missing_field(&serde_json::from_value(value).unwrap()).map(|it| it.item)
    };
    let endpoints = json!([{"addresses": ["10.1.0.1"]}]);
    let whole = json!({"endpoints": endpoints, "ports": [{"port": 80}]});
    let of_web = || json!({"kubernetes.io/service-name": "web"});
    assert_eq!(
        missing(json!({}), whole.clone()).unwrap(),
        "EndpointSlice default/web-1: metadata.labels[kubernetes.io/service-name]"
    );
    assert_eq!(
        missing(of_web(), json!({"endpoints": endpoints, "prots": [{"port": 80}]})).unwrap(),
        "EndpointSlice default/web-1: ports"
    );
    assert_eq!(missing(of_web(), whole), None);
    // As a cluster's controllers write them: without endpoints, without ports, and with names.
    assert_eq!(missing(of_web(), json!({"endpoints": [], "ports": null})), None);
    let headless = json!({"kubernetes.io/service-name": "peers", "service.kubernetes.io/headless": ""});
    assert_eq!(missing(headless, json!({"endpoints": endpoints})), None);
    assert_eq!(missing(json!({}), json!({"addressType": "FQDN", "endpoints": endpoints})), None);
}

#[test]
fn the_creation_time_of_a_service_is_read() {
    let created = |metadata: Value| {
        let (object, rejected) = parts(service(
            &serde_json::from_value(json!({"metadata": metadata, "spec": {"clusterIP": "None"}})).unwrap(),
        ));
        assert!(rejected.is_empty());
        object.unwrap().created.map(model::Timestamp::as_micros)
    };
    assert_eq!(created(json!({"name": "web", "creationTimestamp": "1970-01-01T00:00:02Z"})), Some(2_000_000));
    assert_eq!(created(json!({"name": "web", "creationTimestamp": null})), None);
}

#[test]
fn a_headless_service_has_no_cluster_ip() {
    check(json!({"clusterIP": "None", "clusterIPs": ["None"]}), |it| it.cluster_ips.len(), 0, &[]);
    check(json!({"clusterIP": ""}), |it| it.cluster_ips.len(), 0, &["spec.clusterIP"]);
}

#[test]
fn cluster_ips_take_precedence_over_cluster_ip() {
    let ips =
        |it: &cluster::Service| it.cluster_ips.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
    check(json!({"clusterIP": "10.0.0.1"}), ips, "10.0.0.1".to_owned(), &[]);
    check(
        json!({"clusterIP": "10.0.0.1", "clusterIPs": ["fd00::1", "10.0.0.2"]}),
        ips,
        "fd00::1 10.0.0.2".into(),
        &[],
    );
    let twice = json!({"clusterIPs": ["10.0.0.1", "10.0.0.2", "x"]});
    check(twice, ips, "10.0.0.1".into(), &["spec.clusterIPs[1]", "spec.clusterIPs[2]"]);
}

#[test]
fn addresses_that_are_not_unicast_are_rejected() {
    let texts = ["0.0.0.0", "224.0.0.1", "255.255.255.255", "::", "ff02::1", "010.0.0.1", "10.0.0.1/32"];
    let refused: Vec<_> = (0..texts.len()).map(|it| format!("spec.externalIPs[{it}]")).collect();
    let refused: Vec<_> = refused.iter().map(String::as_str).collect();
    check(json!({"externalIPs": texts}), |it| it.external_ips.len(), 0, &refused);
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
fn unknown_enumeration_values_become_the_default() {
    check(json!({"type": "Magic"}), |it| it.kind, Some(ServiceKind::ClusterIp), &["spec.type"]);
    let policy = json!({"internalTrafficPolicy": "Near"});
    check(policy, |it| it.internal_policy, TrafficPolicy::Cluster, &["spec.internalTrafficPolicy"]);
    check(json!({"sessionAffinity": "Cookie"}), |it| it.affinity, None, &["spec.sessionAffinity"]);
}

#[test]
fn an_invalid_affinity_time_out_becomes_three_hours() {
    let seconds = |it: &cluster::Service| it.affinity.map(|it| it.timeout_seconds.get());
    let spec = |it: i32| json!({"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": it}}});
    let field = "spec.sessionAffinityConfig.clientIP.timeoutSeconds";
    check(spec(86_400), seconds, Some(86_400), &[]);
    for bad in [-1, 0, 86_401] {
        check(spec(bad), seconds, Some(10_800), &[field]);
    }
}

#[test]
fn an_invalid_name_rejects_the_object() {
    for name in ["", "a/b", "a|b", "A", "ä"] {
        let value = json!({"metadata": {"name": name}});
        let (object, rejected) =
            parts(service(&serde_json::from_value::<objects::Service>(value.clone()).unwrap()));
        assert_eq!((object, rejected.len()), (None, 1));
        let (object, rejected) = parts(node(&serde_json::from_value::<objects::Node>(value).unwrap()));
        assert_eq!((object, rejected.len()), (None, 1));
    }
}

#[test]
fn a_nodes_addresses_and_cidrs_are_validated_one_by_one() {
    let node = |value: Value| parts(node(&serde_json::from_value::<objects::Node>(value).unwrap()));
    let (read, rejected) = node(json!({
        "metadata": {"name": "n1"},
        "spec": {"podCIDR": "10.1.0.0/24", "podCIDRs": ["10.1.0.0/24", "fd00:1::/64", "10.1.0.0"]},
        "status": {"addresses": [
            {"type": "Hostname", "address": "n1.example"},
            {"type": "InternalIP", "address": "192.0.2.1"},
            {"type": "ExternalIP", "address": "n1"},
            {"type": "ExternalIP", "address": "2001:db8::1"},
        ]},
    }));
    let info = read.unwrap().info;
    assert_eq!(
        info.addresses.iter().map(ToString::to_string).collect::<Vec<_>>(),
        ["192.0.2.1", "2001:db8::1"]
    );
    assert_eq!(
        info.pod_cidrs.iter().map(ToString::to_string).collect::<Vec<_>>(),
        ["10.1.0.0/24", "fd00:1::/64"]
    );
    assert_eq!(rejected, ["Node n1: status.addresses[2].address", "Node n1: spec.podCIDRs[2]"]);
}

#[test]
fn a_node_is_being_deleted_with_a_deletion_timestamp_or_the_autoscalers_taint() {
    let is_being_deleted = |value: Value| {
        node(&serde_json::from_value::<objects::Node>(value).unwrap()).object.unwrap().info.is_being_deleted
    };
    let taint = |key: &str| json!({"metadata": {"name": "n1"}, "spec": {"taints": [{"key": key, "effect": "NoSchedule"}]}});
    assert!(!is_being_deleted(taint("node.kubernetes.io/unschedulable")));
    assert!(is_being_deleted(taint("ToBeDeletedByClusterAutoscaler")));
    assert!(is_being_deleted(
        json!({"metadata": {"name": "n1", "deletionTimestamp": "2030-01-01T00:00:00Z"}})
    ));
}

#[test]
fn slices_of_names_and_slices_without_a_service_are_ignored() {
    assert_eq!(read_slice(json!({"addressType": "FQDN"})), (None, vec![]));
    assert_eq!(read_slice(json!({"metadata": {"name": "web-1"}})), (None, vec![]));
    assert_eq!(read_slice(json!({"addressType": "IPv5"})).1, ["EndpointSlice default/web-1: addressType"]);
}

#[test]
fn conditions_that_are_not_set_have_defaults() {
    let slice = json!({"endpoints": [{"addresses": ["10.1.0.1"], "conditions": {"ready": false}}]});
    let conditions = read_slice(slice).0.unwrap().endpoints[0].conditions;
    assert_eq!((conditions.ready, conditions.serving, conditions.terminating), (false, true, false));
}

#[test]
fn only_the_first_address_is_used_and_it_must_be_of_the_slices_family() {
    let endpoint = |it: &[&str]| json!({"addresses": it});
    let slice = json!({"endpoints": [endpoint(&["10.1.0.1", "x"]), endpoint(&["fd00::1"]), endpoint(&[])]});
    let (slice, rejected) = read_slice(slice);
    assert_eq!(slice.unwrap().endpoints.len(), 1);
    assert_eq!(rejected.len(), 2);
}

#[test]
fn slice_ports_without_a_number_are_valid_and_invalid_ones_are_rejected() {
    let (slice, rejected) =
        read_slice(json!({"ports": [{"name": "a"}, {"port": 0}, {"port": 80, "protocol": "TCP"}]}));
    assert_eq!(slice.unwrap().ports.len(), 1);
    assert_eq!(rejected, ["EndpointSlice default/web-1: ports[1].port"]);
}

#[test]
fn the_trigger_time_is_read_and_an_invalid_one_rejected() {
    let slice = |time: &str| {
        let labels = json!({"kubernetes.io/service-name": "web"});
        let annotations = json!({"endpoints.kubernetes.io/last-change-trigger-time": time});
        read_slice(json!({"metadata": {"name": "web-1", "labels": labels, "annotations": annotations}}))
    };
    let time = |text: &str| slice(text).0.unwrap().trigger_time.map(model::Timestamp::as_micros);
    assert_eq!(time("1970-01-01T00:00:01.5Z"), Some(1_500_000));
    assert_eq!(time("1970-01-01T01:00:00.000000001+01:00"), Some(0));
    assert_eq!(time(""), None);
    let (object, rejected) = slice("yesterday");
    assert!(object.is_some());
    assert_eq!(
        rejected,
        [
            "EndpointSlice default/web-1: metadata.annotations[endpoints.kubernetes.io/last-change-trigger-time]"
        ]
    );
}

#[test]
fn a_message_quotes_only_the_start_of_a_long_value() {
    let long = "ä".repeat(5_000_000);
    let spec = json!({"type": long, "clusterIP": "None", "externalIPs": [long]});
    let value = json!({"metadata": {"name": "web"}, "spec": spec});
    let web = service(&serde_json::from_value::<objects::Service>(value).unwrap());
    let value = json!({"metadata": {"name": long, "namespace": long}});
    let nameless = service(&serde_json::from_value::<objects::Service>(value).unwrap());
    assert_eq!((web.rejected.len(), nameless.rejected.len()), (2, 1));
    for it in web.rejected.iter().chain(&nameless.rejected) {
        assert!(it.to_string().len() < 600, "{}", it.to_string().len());
    }
}

#[test]
fn only_a_pod_names_an_endpoint() {
    let endpoint = |kind: &str| json!({"addresses": ["10.1.0.1"], "targetRef": {"kind": kind, "name": "p"}});
    let (slice, _) = read_slice(json!({"endpoints": [endpoint("Pod"), endpoint("Node")]}));
    let pods: Vec<_> = slice.unwrap().endpoints.into_iter().map(|it| it.pod).collect();
    assert_eq!(pods, [Some("p".into()), None]);
}
