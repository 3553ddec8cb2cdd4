//! Parsing of files: by the cases in `parse_cases.yaml`, and what does not fit into them.

use model::{
    cluster::Object,
    state::{LoadBalancing, PassiveHealth},
};
use serde::Deserialize;

use super::parse;

const MANIFESTS: &str = include_str!("../../tests/manifests.yaml");

/// A file and its content; `parse_cases.yaml` describes the fields.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    about: String,
    text: String,
    #[serde(default)]
    objects: Vec<String>,
    lines: Option<Vec<u32>>,
    #[serde(default)]
    rejected: Vec<String>,
    #[serde(default)]
    ignored: Vec<String>,
    error: Option<String>,
}

fn name(object: &Object) -> String {
    match object {
        Object::Service(it) => {
            let ports = it.ports.iter().map(|it| format!(" {}/{}", it.port, it.protocol));
            format!("Service {}{}", it.name, ports.collect::<String>())
        }
        Object::EndpointSlice(it) => format!("EndpointSlice {}", it.name),
        Object::Node(it) => format!("Node {}", it.name),
        Object::ServiceCidr(it) => format!("ServiceCIDR {} {:?}", it.name, it.cidrs),
        Object::Pod(it) => format!("Pod {} {} {:?}", it.name, it.uid, it.socket_lb),
    }
}

#[test]
fn each_file_has_the_objects_of_its_case() {
    let cases: Vec<Case> = serde_saphyr::from_str(include_str!("parse_cases.yaml")).unwrap();
    assert_eq!(cases.len(), 32, "no case is skipped unnoticed");
    for Case { about, text, objects, lines, rejected, ignored, error } in cases {
        let parsed = match (parse(text.as_bytes()), error) {
            (Ok(parsed), None) => parsed,
            (Err(found), Some(expect)) if found.to_string().starts_with(&expect) => continue,
            (found, _) => panic!("{about}: {found:?}"),
        };
        assert_eq!(parsed.objects.iter().map(|(_, it)| name(it)).collect::<Vec<_>>(), objects, "{about}");
        let found: Vec<_> = parsed.objects.iter().map(|(at, _)| at.line).collect();
        assert!(lines.is_none_or(|it| it == found), "{about}: {found:?}");
        assert_eq!(parsed.rejected.iter().map(ToString::to_string).collect::<Vec<_>>(), rejected, "{about}");
        assert_eq!(parsed.ignored.iter().map(|(_, it)| it.as_str()).collect::<Vec<_>>(), ignored, "{about}");
    }
}

#[test]
fn a_stream_of_documents_is_read() {
    let parsed = parse(MANIFESTS.as_bytes()).unwrap();
    let found: Vec<_> = parsed.objects.iter().map(|(at, it)| (at.document, it.name().to_string())).collect();
    let expect = [
        (1, "Service shop/web"),
        (2, "EndpointSlice shop/web-1"),
        (4, "Node n1"),
        (5, "Service default/api"),
    ];
    assert_eq!(found, expect.map(|(document, name)| (document, name.to_owned())));
    assert_eq!(parsed.ignored.iter().map(|(_, it)| it).collect::<Vec<_>>(), ["apps/v1 Deployment"]);
}

#[track_caller]
fn check_broken(text: &str, expect: &str) {
    let error = parse(text.as_bytes()).unwrap_err().to_string();
    assert!(error.starts_with(expect), "{error}");
}

/// Many Services: as documents, as the items of lists, in YAML and JSON.
fn forms() -> [String; 5] {
    let objects: Vec<_> = (0..20)
        .map(|it| {
            serde_json::json!({
                "apiVersion": "v1", "kind": "Service", "metadata": {"name": format!("s{it}"), "namespace": "ns"},
                "spec": {"clusterIP": format!("10.96.0.{}", it + 1), "ports": [{"port": 80}, {"port": 1000 + it}]},
            })
        })
        .collect();
    let list = serde_json::json!({"apiVersion": "v1", "items": objects, "kind": "List", "metadata": {"resourceVersion": ""}});
    let yaml = |it| serde_saphyr::to_string(it).unwrap();
    [
        objects.iter().map(|it| format!("---\n{}", yaml(it))).collect(),
        objects.iter().map(|it| format!("{it:#}\n")).collect(),
        yaml(&list),
        list.to_string(),
        format!("{list:#}"),
    ]
}

#[test]
fn the_same_objects_are_read_in_every_form() {
    let objects = |text: &String| {
        let parsed = parse(text.as_bytes()).unwrap();
        assert_eq!((parsed.rejected, parsed.ignored), (Vec::new(), Vec::new()));
        parsed.objects.into_iter().map(|(_, it)| it).collect::<Vec<_>>()
    };
    let forms = forms();
    assert_eq!(objects(&forms[0]).len(), 20);
    assert!(forms.iter().all(|it| objects(it) == objects(&forms[0])));
}

#[test]
fn alias_expansion_is_limited() {
    let mut text = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
    for level in 1..12 {
        let before = level - 1;
        let list = vec![format!("*a{before}"); 10].join(", ");
        text.push_str(&format!("a{level}: &a{level} [{list}]\n"));
    }
    check_broken(&text, "document 1, line ");
}

#[test]
fn deep_nesting_is_rejected() {
    for text in ["[", "- ", "{\"a\":", "{a: "] {
        check_broken(&text.repeat(100_000), "document 1, line 1: ");
    }
}

#[test]
fn a_manifest_of_a_whole_cluster_is_read() {
    let one = MANIFESTS.split("---\n").nth(1).unwrap();
    let text: String = (0..3000).map(|it| one.replace("web-1", &format!("web-{it}")) + "---\n").collect();
    assert_eq!(parse(text.as_bytes()).unwrap().objects.len(), 3000);
}

#[test]
fn annotations_are_read_from_yaml_and_json_whatever_their_type() {
    let yaml = |annotation: &str| {
        format!(
            "apiVersion: v1\nkind: Service\nmetadata:\n  name: a\n  annotations:\n    kube-proxy-ebpf.io/{annotation}\n\
             spec: {{clusterIP: 10.96.0.1, ports: [{{port: 80}}]}}\n"
        )
    };
    let json = |name: &str, value: &str| {
        format!(
            "{{\"apiVersion\": \"v1\", \"kind\": \"Service\", \"metadata\": {{\"name\": \"a\", \"annotations\": \
             {{\"kube-proxy-ebpf.io/{name}\": {value}}}}}, \"spec\": {{\"clusterIP\": \"10.96.0.1\", \"ports\": [{{\"port\": 80}}]}}}}"
        )
    };
    let read = |text: &str| {
        let parsed = parse(text.as_bytes()).unwrap();
        let Object::Service(it) = &parsed.objects[0].1 else { panic!("not a Service") };
        (it.load_balancing, parsed.rejected.len())
    };
    for (enabled, text) in [(true, "on"), (false, "off")] {
        let passive_health = PassiveHealth { enabled: Some(enabled), ..PassiveHealth::default() };
        let expect = (LoadBalancing { passive_health, ..LoadBalancing::default() }, 0);
        // YAML 1.1 would read a boolean.
        assert_eq!(read(&yaml(&format!("passive-health: {text}"))), expect);
        assert_eq!(read(&yaml(&format!("passive-health: '{text}'"))), expect);
        assert_eq!(read(&json("passive-health", &format!("\"{text}\""))), expect);
    }
    // Only these values are rejected, not the file.
    for value in ["30", "true", "[30s]", "{s: 30}", "1.5"] {
        assert_eq!(read(&yaml(&format!("drain: {value}"))), (LoadBalancing::default(), 1), "{value}");
    }
    for value in ["30", "true", "[\"30s\"]", "{\"s\": 30}"] {
        assert_eq!(read(&json("drain", value)), (LoadBalancing::default(), 1), "{value}");
    }
    assert_eq!(read(&yaml("drain:")), (LoadBalancing::default(), 0));
}
