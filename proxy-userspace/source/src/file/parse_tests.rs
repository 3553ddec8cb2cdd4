//! Parsing of files.

use model::{
    cluster::Object,
    state::{LoadBalancing, PassiveHealth},
};
use proptest::{collection::vec, prelude::*};

use super::{ParsedManifest, parse};

const MANIFESTS: &str = include_str!("../../tests/manifests.yaml");

#[track_caller]
fn check(text: &str, expect: &[&str]) -> ParsedManifest {
    let parsed = parse("file", text.as_bytes()).unwrap();
    assert_eq!(names(&parsed), expect);
    parsed
}

fn names(parsed: &ParsedManifest) -> Vec<String> {
    let name = |object: &Object| match object {
        Object::Service(it) => format!("Service {}", it.name),
        Object::EndpointSlice(it) => format!("EndpointSlice {}", it.name),
        Object::Node(it) => format!("Node {}", it.name),
        Object::ServiceCidr(it) => format!("ServiceCIDR {} {:?}", it.name, it.cidrs),
        Object::Pod(it) => format!("Pod {} {} {:?}", it.name, it.uid, it.socket_lb),
    };
    parsed.objects.iter().map(|(_, it)| name(it)).collect()
}

#[track_caller]
fn check_broken(text: &str, expect: &str) {
    let error = parse("file", text.as_bytes()).unwrap_err().to_string();
    assert!(error.starts_with(expect), "{error}");
}

#[test]
fn a_stream_of_documents_is_read() {
    let parsed =
        check(MANIFESTS, &["Service shop/web", "EndpointSlice shop/web-1", "Node n1", "Service default/api"]);
    let at: Vec<_> = parsed.objects.iter().map(|(at, _)| at.document).collect();
    assert_eq!(at, [1, 2, 4, 5]);
    assert_eq!(parsed.ignored.len(), 1);
    assert_eq!(parsed.ignored[0].1, "apps/v1 Deployment");
}

#[test]
fn lists_are_read_and_items_of_typed_lists_may_omit_the_kind() {
    let text = "apiVersion: v1\nkind: ServiceList\nitems:\n- metadata: {name: a}\n- metadata: {name: b}\n";
    check(text, &["Service default/a", "Service default/b"]);
    let text = "apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: Node, metadata: {name: n}}\n";
    check(text, &["Node n"]);
    check("apiVersion: v1\nkind: List\nitems:\n", &[]);
}

#[test]
fn json_is_read_as_a_stream_too() {
    let text = "{\"apiVersion\":\"v1\",\"kind\":\"Node\",\"metadata\":{\"name\":\"a\"}}\n\n\
                {\"apiVersion\":\"v1\",\"kind\":\"Node\",\"metadata\":{\"name\":\"b\"}}\n";
    let parsed = parse("file", text.as_bytes()).unwrap();
    assert_eq!(names(&parsed), ["Node a", "Node b"]);
    assert_eq!(parsed.objects[1].0.line, 3);
    let one = text.lines().next().unwrap();
    check(one, &["Node a"]);
    check_broken(&format!("{text}{{"), "file: document 3, line ");
}

#[test]
fn json_is_recognized_by_its_content() {
    let json = r#"{"apiVersion": "v1", "kind": "Node", "metadata": {"name": "a"}}"#;
    check(&format!("---\n{json}\n---\n{json}\n"), &["Node a", "Node a"]);
    // Mappings of YAML look alike.
    check("{apiVersion: v1, kind: Node, metadata: {name: a}}", &["Node a"]);
    check(&json.replace("}}", "},} # a comment"), &["Node a"]);
    check_broken(&json[..40], "file: document 1, line 1: EOF while parsing");
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
        let parsed = parse("file", text.as_bytes()).unwrap();
        assert_eq!((parsed.rejected, parsed.ignored), (Vec::new(), Vec::new()));
        parsed.objects.into_iter().map(|(_, it)| it).collect::<Vec<_>>()
    };
    let forms = forms();
    assert_eq!(objects(&forms[0]).len(), 20);
    assert!(forms.iter().all(|it| objects(it) == objects(&forms[0])));
}

#[test]
fn the_items_of_a_list_have_their_own_lines() {
    let text = "apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: Node, metadata: {name: a}}\n\n# b\n- apiVersion: v1\n  \
                kind: Node\n  metadata: {name: b}\n";
    let parsed = check(text, &["Node a", "Node b"]);
    let lines: Vec<_> = parsed.objects.iter().map(|(at, _)| at.line).collect();
    assert_eq!(lines, [4, 7]);
    check_broken(&format!("{text}- foo: bar\n"), "file: document 1, line 10: items[2]: ");
    check_broken(&format!("{text}- [\n"), "file: document 1, line 1");
    let json = "{\"apiVersion\":\"v1\",\"kind\":\"List\",\"items\":[\n{},\n{}]}";
    check_broken(json, "file: document 1, line 2: items[0]: ");
}

#[test]
fn a_list_whose_items_refer_to_each_other_is_read_as_a_whole() {
    let text = "apiVersion: v1\nkind: List\nitems:\n- &a\n  apiVersion: v1\n  kind: Node\n  metadata: {name: a}\n- *a\n- <<: *a\n  \
                metadata: {name: b}\n";
    check(text, &["Node a", "Node a", "Node b"]);
}

#[test]
fn only_the_field_items_of_a_list_has_objects() {
    for (text, expect) in [
        // A field of another kind.
        ("apiVersion: v1\nkind: ConfigMap\nitems:\n- a\n- b\n", &[][..]),
        // Elements inside of a scalar, and inside of an element.
        (
            "apiVersion: v1\nkind: List\nnote: |\n  items:\n  - a\nitems:\n- apiVersion: v1\n  kind: Node\n  metadata: {name: a}\n  \
          note: |\n   - b\n   items:\n",
            &["Node a"],
        ),
        (
            "apiVersion: v1\nkind: List\nitems:\n  - apiVersion: v1\n    kind: Node\n    metadata:\n      name: a\n    list:\n    - \
          b\n  # c\n  -\n    apiVersion: v1\n    kind: Node\n    metadata: {name: d}\n",
            &["Node a", "Node d"],
        ),
        // A directive, and the end of a document.
        (
            "%YAML 1.2\n---\napiVersion: v1\nkind: Node\nmetadata: {name: a}\n...\n---\napiVersion: v1\nkind: Node\nmetadata: {name: \
          b}\n",
            &["Node a", "Node b"],
        ),
        (
            "apiVersion: v1\r\nkind: List\r\nitems:\r\n- apiVersion: v1\r\n  kind: Node\r\n  metadata: {name: a}\r\n---\r\n",
            &["Node a"],
        ),
    ] {
        check(text, expect);
    }
}

#[test]
fn errors_name_document_and_line_and_a_value_of_the_wrong_type() {
    for (text, expect) in [
        ("a: [", "document 1, line 1: "),
        ("# comment\n---\nkind: x\napiVersion: y\n---\nfoo: bar\n", "document 2, line 6: "),
        ("a: 1\nb: }\n", "document 1, line 2: "),
        ("a: 1\na: 2\n", "document 1, line 2: "),
        (
            "apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec: {ports: [{port: http}]}\n",
            "document 1, line 1: Service a: spec.ports[0].port: invalid type: string \"http\"",
        ),
    ] {
        check_broken(text, &format!("file: {expect}"));
    }
}

#[test]
fn an_invalid_part_is_rejected_alone() {
    let text = "apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec:\n  clusterIP: 10.96.0.1\n  externalIPs: [x]\n  \
                ports: [{port: 0}, {port: 70000}, {port: 80, protocol: ICMP}, {port: 81}, {port: 81}]\n";
    let parsed = check(text, &["Service default/a"]);
    let rejected: Vec<_> = parsed.rejected.iter().map(ToString::to_string).collect();
    assert_eq!(
        rejected,
        [
            "Service default/a: spec.externalIPs[0]: \"x\" is not an IP address; write it as 192.0.2.1 or 2001:db8::1",
            "Service default/a: spec.ports[0].port: 0 is not a port; use a number from 1 to 65535",
            "Service default/a: spec.ports[1].port: 70000 is not a port; use a number from 1 to 65535",
            "Service default/a: spec.ports[2].protocol: \"ICMP\" is not a protocol; use TCP, UDP or SCTP",
            "Service default/a: spec.ports[4]: 81/TCP is listed twice; keep one",
        ]
    );
    let Object::Service(service) = &parsed.objects[0].1 else { panic!() };
    assert_eq!(service.ports.len(), 1);
}

#[test]
fn missing_fields_of_a_manifest_are_reported_once_each() {
    let text = "apiVersion: v1\nkind: Service\nmetadata: {name: np}\nspec: {type: NodePort, ports: [{port: 80}]}\n---\n\
                apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: np-1}\naddressType: IPv4\n\
                ports: [{port: 80}]\nendpoints: [{addresses: [10.1.0.1]}]\n";
    let rejected: Vec<_> =
        check(text, &["Service default/np"]).rejected.iter().map(ToString::to_string).collect();
    assert_eq!(
        rejected,
        [
            "Service default/np: spec.clusterIP: the cluster IP is missing, and without one the Service is not served, \
             not even its node ports; set it as an API server does, or to None for a headless Service",
            "EndpointSlice default/np-1: metadata.labels[kubernetes.io/service-name]: the label is missing, so the \
             slice belongs to no Service; set it to the name of the Service",
        ]
    );
}

#[test]
fn alias_expansion_is_limited() {
    let mut text = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
    for level in 1..12 {
        let before = level - 1;
        let list = vec![format!("*a{before}"); 10].join(", ");
        text.push_str(&format!("a{level}: &a{level} [{list}]\n"));
    }
    check_broken(&text, "file: document 1, line ");
}

#[test]
fn deep_nesting_is_rejected() {
    for text in ["[", "- ", "{\"a\":", "{a: "] {
        check_broken(&text.repeat(100_000), "file: document 1, line 1: ");
    }
}

#[test]
fn a_manifest_of_a_whole_cluster_is_read() {
    let one = MANIFESTS.split("---\n").nth(1).unwrap();
    let text: String = (0..3000).map(|it| one.replace("web-1", &format!("web-{it}")) + "---\n").collect();
    assert_eq!(parse("file", text.as_bytes()).unwrap().objects.len(), 3000);
}

proptest! {
    #[test]
    fn arbitrary_bytes_do_not_panic(bytes in vec(any::<u8>(), 0..300)) {
        let _ = parse("file", &bytes);
        let _ = parse("file", &bytes);
    }
}

#[test]
fn service_cidrs_are_read_alone_and_in_lists() {
    let one = "apiVersion: networking.k8s.io/v1\nkind: ServiceCIDR\nmetadata: {name: a}\nspec: {cidrs: [10.96.0.0/16, x]}\n";
    let parsed = check(one, &["ServiceCIDR a [10.96.0.0/16]"]);
    assert_eq!(parsed.rejected[0].item, "ServiceCIDR a: spec.cidrs[1]");
    let list = "apiVersion: networking.k8s.io/v1\nkind: ServiceCIDRList\nitems:\n- {metadata: {name: b}}\n";
    check(list, &["ServiceCIDR b []"]);
}

#[test]
fn pods_with_our_annotation_are_read_and_others_are_no_remark() {
    let pod = "apiVersion: v1\nkind: Pod\nmetadata:\n  name: vpn\n  uid: 3f2a8d1c\n  annotations: \
               {kube-proxy-ebpf.io/socket-lb: \"off\"}\nspec: {nodeName: n1}\n";
    check(pod, &["Pod default/vpn 3f2a8d1c Off"]);
    let list = "apiVersion: v1\nkind: PodList\nitems:\n- {metadata: {name: a}}\n- {metadata: {name: b, uid: u, annotations: \
                {kube-proxy-ebpf.io/socket-lb: tcp-only}}}\n";
    assert_eq!(check(list, &["Pod default/b u TcpOnly"]).ignored, []);
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
        let parsed = check(text, &["Service default/a"]);
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
