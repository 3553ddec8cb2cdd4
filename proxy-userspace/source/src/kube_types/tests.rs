//! Conversion of Kubernetes' objects: by the cases in `cases.yaml`, and what does not fit into them.

#![expect(clippy::needless_pass_by_value, reason = "the values are created for the call")]

use std::{collections::BTreeMap, fmt::Debug};

use model::{
    Effect, Rejected, RequestedMetadata, ServiceName, escaped_line,
    state::{Algorithm, LoadBalancing},
};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value, json};

use super::{
    Converted, endpoint_slice, endpoint_slice::missing_field, metadata::add_metadata, node, pod::pod,
    service, service_cidr,
};

/// An object, and what it is converted to; `cases.yaml` describes the fields.
#[derive(Deserialize)]
struct Case {
    about: String,
    has: Option<Vec<String>>,
    loads: Option<Value>,
    #[serde(default)]
    rejected: Vec<String>,
    count: Option<usize>,
    missing: Option<String>,
    #[serde(flatten)]
    object: BTreeMap<String, Value>,
}

/// The values for which a case stands, each put into it.
fn expanded(mut case: Map<String, Value>) -> Vec<Value> {
    let Some(Value::Array(values)) = case.remove("each") else { return vec![case.into()] };
    values.iter().map(|it| with_value(&Value::Object(case.clone()), it)).collect()
}

/// The template with a value for `$`.
fn with_value(template: &Value, value: &Value) -> Value {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let put = |it: &str| it.replace("$?", &format!("{text:?}")).replace('$', &text);
    match template {
        Value::String(it) if it == "$" => value.clone(),
        Value::String(it) => put(it).into(),
        Value::Array(items) => items.iter().map(|it| with_value(it, value)).collect(),
        Value::Object(fields) => fields.iter().map(|(name, it)| (put(name), with_value(it, value))).collect(),
        other => other.clone(),
    }
}

/// A valid object of a kind.
fn valid(kind: &str) -> Value {
    match kind {
        "Service" => {
            json!({"metadata": {"name": "web"}, "spec": {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]}})
        }
        "EndpointSlice" => slice(json!({})),
        "Node" => json!({"metadata": {"name": "n1"}}),
        "ServiceCIDR" => json!({"metadata": {"name": "kubernetes"}}),
        "Pod" => json!({"metadata": {"name": "vpn", "uid": "3f2a8d1c"}, "spec": {"nodeName": "n1"}}),
        other => panic!("unknown kind {other:?}"),
    }
}

/// The object of a case: all of it, or fields that are added to those of a valid one.
fn object_of(kind: &str, fields: &Value) -> Value {
    if let Some(all) = fields.get("all_of") {
        return all.clone();
    }
    let mut object = valid(kind);
    for (name, it) in fields.as_object().unwrap() {
        match name.as_str() {
            "annotations" => object["metadata"]["annotations"] = it.clone(),
            "spec" if kind == "Service" => object["spec"] = with(object["spec"].clone(), it.clone()),
            _ => object[name] = it.clone(),
        }
    }
    object
}

/// The converted object as Rust prints it, what is not the default in how its connections are spread, and what is rejected.
type Printed = (Option<String>, Option<LoadBalancing>, Vec<Rejected>);

fn print<K: DeserializeOwned, T: Debug>(convert: fn(&K) -> Converted<T>, value: &Value) -> Printed {
    let converted = convert(&serde_json::from_value(value.clone()).unwrap());
    (converted.object.map(|it| format!("{it:?}")), None, converted.rejected)
}

fn convert(kind: &str, value: &Value) -> Printed {
    match kind {
        "Service" => {
            let converted = service(&serde_json::from_value(value.clone()).unwrap());
            let loads = converted.object.as_ref().map(|it| it.load_balancing);
            (converted.object.map(|it| format!("{it:?}")), loads, converted.rejected)
        }
        "EndpointSlice" => print(endpoint_slice, value),
        "Node" => print(node, value),
        "ServiceCIDR" => print(service_cidr, value),
        _ => print(pod, value),
    }
}

/// How connections are spread, without what is the default.
fn describe(it: LoadBalancing) -> Value {
    let health = it.passive_health;
    let fields = [
        ("leastConnections", (it.algorithm == Algorithm::LeastConnections).then_some(json!(true))),
        ("passiveHealth", health.enabled.map(Value::from)),
        ("failures", health.failures.map(|it| json!(it))),
        ("maxEjectedPercent", health.max_ejected_percent.map(|it| json!(it))),
        ("slowStart", it.slow_start.map(|it| json!(it))),
        ("drain", it.drain.map(|it| json!(it))),
        ("udpToPackets", it.udp_to_packets.then_some(json!(true))),
        ("externalForwarding", it.external_forwarding.map(|it| json!(format!("{it:?}")))),
    ];
    fields.into_iter().filter_map(|(name, it)| Some((name.to_owned(), it?))).collect()
}

fn check(case: Value) {
    let Case { about, has, loads, rejected, count, missing, object } = Case::deserialize(&case).unwrap();
    let [(kind, fields)] = &object.iter().collect::<Vec<_>>()[..] else { panic!("{about}: {object:?}") };
    let value = object_of(kind, fields);
    let about = format!("{about}: {value}");
    let (printed, spread, found) = convert(kind, &value);
    match (&has, &printed) {
        (Some(parts), Some(printed)) => {
            parts.iter().for_each(|it| assert!(printed.contains(it), "{about}: {it} is not in {printed}"));
        }
        (None, None) => {}
        // Without expectations of the object.
        (None, Some(_)) if case.get("has").is_none() => {}
        _ => panic!("{about}: {printed:?} instead of {has:?}"),
    }
    assert_eq!(found.len(), count.unwrap_or(rejected.len()), "{about}: {found:#?}");
    let texts: Vec<_> = found.iter().map(ToString::to_string).collect();
    assert!(texts.iter().all(|it| escaped_line(it) == *it), "{about}: all messages are printable: {texts:?}");
    for (expect, it) in rejected.iter().zip(&found) {
        assert!([&it.item, &it.to_string()].contains(&expect), "{about}: {it} instead of {expect}");
    }
    if let Some(expect) = loads {
        assert_eq!(spread.map(describe), Some(expect), "{about}");
        let effect = Effect::AnnotationIgnored(ServiceName::new("default", "web"));
        assert!(found.iter().all(|it| it.effect == effect && it.is_served()), "{about}");
    }
    if let Some(expect) = missing {
        let missing = missing_field(&serde_json::from_value(value).unwrap());
        assert_eq!(missing.map_or_else(String::new, |it| it.item), expect, "{about}");
    }
}

#[test]
fn each_object_is_converted_or_rejected_as_its_case_says() {
    let cases: Vec<Map<String, Value>> = serde_saphyr::from_str(include_str!("cases.yaml")).unwrap();
    let cases: Vec<_> = cases.into_iter().flat_map(expanded).collect();
    assert_eq!(cases.len(), 213, "no case is skipped unnoticed");
    cases.into_iter().for_each(check);
}

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
    let spec = json!({"clusterIP": "10.96.0.1", "ports": ports});
    let (object, rejected) = read(service, json!({"metadata": {"name": "web"}, "spec": spec}));
    assert_eq!(
        (object.unwrap().ports.len(), rejected),
        (20_000, vec!["Service default/web: spec.ports".into()])
    );
}

#[test]
fn a_list_of_rejections_is_bounded() {
    let ports: Vec<_> = (0..20_000).map(|_| json!({"port": 0})).collect();
    let (object, rejected) = read(endpoint_slice, slice(json!({"ports": ports})));
    assert_eq!((object.unwrap().ports.len(), rejected.len()), (0, 101));
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
