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
use proptest::{
    collection::vec,
    prelude::*,
    sample::{Index, select},
};
use serde_json::{Value, json};
use source::file::{ParsedManifest, parse};

/// Texts that are valid, that have a meaning in another field, or that no field accepts.
const TEXTS: &str = "web api n1 ä|ö a/b None TCP UDP SCTP ICMP Local Cluster ClusterIP NodePort LoadBalancer ExternalName \
                     ClientIP VIP Proxy - . .. 2006-01-02T15:04:05Z 2006-13-02 a\u{1b}[2J \u{202e}a on off 25h 10.96.0.1 \
                     10.96.0.2 fd00::1 ::ffff:10.96.0.1 0.0.0.0 :: 224.0.0.1 255.255.255.255 127.0.0.1 300.1.1.1 \
                     10.96.0.1/32 010.0.0.1 fe80::1%eth0 fe80::1 169.254.169.254 web.example.com 10.0.0.0/8 ::/0";
const TEXTS_WITH_BLANKS: [&str; 3] = ["", "Not A Name", "a\nERROR forged"];
const NUMBERS: [i32; 11] = [0, 1, 80, 81, 8080, 65_535, 65_536, 70_000, -1, i32::MIN, i32::MAX];

/// A Service, an EndpointSlice and a Node with a value in every field.
fn valid() -> Vec<Value> {
    serde_saphyr::from_str(include_str!("hostile.yaml")).unwrap()
}

/// The paths of all values in a value.
fn paths(at: &str, value: &Value, found: &mut Vec<String>) {
    let children: Vec<(String, &Value)> = match value {
        Value::Object(fields) => fields.iter().map(|(name, it)| (name.replace('/', "~1"), it)).collect(),
        Value::Array(items) => items.iter().enumerate().map(|(index, it)| (index.to_string(), it)).collect(),
        _ => Vec::new(),
    };
    for (name, child) in children.into_iter().filter(|(name, _)| !["apiVersion", "kind"].contains(&&**name)) {
        let at = format!("{at}/{name}");
        paths(&at, child, found);
        found.push(at);
    }
}

/// A change of an object: a value becomes another one of its type, or goes.
#[derive(Clone, Debug)]
struct Mutation {
    at: Index,
    removes: bool,
    text: String,
    number: i32,
}

impl Mutation {
    fn apply(&self, object: &mut Value) {
        let mut all = Vec::new();
        paths("", object, &mut all);
        if all.is_empty() {
            return;
        }
        let path = self.at.get(&all);
        let (parent, name) = path.rsplit_once('/').unwrap();
        match object.pointer_mut(if self.removes { parent } else { path }).unwrap() {
            Value::Object(fields) if self.removes => drop(fields.remove(&name.replace("~1", "/"))),
            Value::Array(items) if self.removes => drop(items.remove(name.parse().unwrap())),
            Value::String(text) => text.clone_from(&self.text),
            Value::Bool(it) => *it = !*it,
            it @ Value::Number(_) => *it = self.number.into(),
            _ => {}
        }
    }
}

fn some_mutation() -> impl Strategy<Value = Mutation> {
    let text = prop_oneof![
        9 => select(TEXTS.split(' ').chain(TEXTS_WITH_BLANKS).collect::<Vec<_>>()).prop_map(str::to_owned),
        1 => "[\\PC]{0,12}",
        1 => (0..400_usize).prop_map(|it| "x".repeat(it)),
    ];
    (any::<Index>(), prop::bool::weighted(0.2), text, select(&NUMBERS[..]))
        .prop_map(|(at, removes, text, number)| Mutation { at, removes, text, number })
}

fn some_object() -> impl Strategy<Value = Value> {
    (select(valid()), vec(some_mutation(), 0..12)).prop_map(|(mut object, mutations)| {
        mutations.iter().for_each(|it| it.apply(&mut object));
        object
    })
}

fn read(objects: &[Value]) -> ParsedManifest {
    let list = json!({"apiVersion": "v1", "kind": "List", "items": objects});
    parse(list.to_string().as_bytes()).unwrap()
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
            brain.cluster_mut().set(object.clone());
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
