//! Parsing of files.

use proptest::{collection::vec, prelude::*};

use super::{ManifestFormat, Object, ParsedManifest, parse};

const MANIFESTS: &str = include_str!("../../tests/manifests.yaml");

#[track_caller]
fn check(text: &str, expect: &[&str]) -> ParsedManifest {
    let parsed = parse("file", text.as_bytes(), ManifestFormat::Yaml).unwrap();
    assert_eq!(names(&parsed), expect);
    parsed
}

fn names(parsed: &ParsedManifest) -> Vec<String> {
    let name = |object: &Object| match object {
        Object::Service(it) => format!("Service {}", it.name),
        Object::EndpointSlice(it) => format!("EndpointSlice {}", it.name),
        Object::Node(it) => format!("Node {}", it.name),
    };
    parsed.objects.iter().map(|(_, it)| name(it)).collect()
}

#[track_caller]
fn check_broken(text: &str, format: ManifestFormat, expect: &str) {
    let error = parse("file", text.as_bytes(), format).unwrap_err().to_string();
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
    let parsed = parse("file", text.as_bytes(), ManifestFormat::Json).unwrap();
    assert_eq!(names(&parsed), ["Node a", "Node b"]);
    assert_eq!(parsed.objects[1].0.line, 3);
    let one = text.lines().next().unwrap();
    check(one, &["Node a"]);
    check_broken(&format!("{text}{{"), ManifestFormat::Json, "file: document 3, line ");
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
        check_broken(text, ManifestFormat::Yaml, &format!("file: {expect}"));
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
            "Service default/a: spec.externalIPs[0]: \"x\" is not an IP address; write it as 192.0.2.1 (no leading \
             zeros) or 2001:db8::1",
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
    check_broken(&text, ManifestFormat::Yaml, "file: document 1, line ");
}

#[test]
fn deep_nesting_is_rejected() {
    for format in [ManifestFormat::Yaml, ManifestFormat::Json] {
        check_broken(&"[".repeat(100_000), format, "file: document 1, line 1: ");
    }
    check_broken(&"- ".repeat(100_000), ManifestFormat::Yaml, "file: document 1, line 1: ");
}

#[test]
fn a_manifest_of_a_whole_cluster_is_read() {
    let one = MANIFESTS.split("---\n").nth(1).unwrap();
    let text: String = (0..3000).map(|it| one.replace("web-1", &format!("web-{it}")) + "---\n").collect();
    assert_eq!(parse("file", text.as_bytes(), ManifestFormat::Yaml).unwrap().objects.len(), 3000);
}

proptest! {
    #[test]
    fn arbitrary_bytes_do_not_panic(bytes in vec(any::<u8>(), 0..300)) {
        let _ = parse("file", &bytes, ManifestFormat::Yaml);
        let _ = parse("file", &bytes, ManifestFormat::Json);
    }

    #[test]
    fn mutated_manifests_do_not_panic(
        edits in vec((any::<prop::sample::Index>(), 0_usize..12, "[\\PC\\n\\t]{0,8}"), 1..6),
        end in any::<prop::sample::Index>(),
    ) {
        let mut text: Vec<char> = MANIFESTS.chars().collect();
        for (at, length, insert) in edits {
            let at = at.index(text.len());
            let end = (at + length).min(text.len());
            text.splice(at..end, insert.chars());
        }
        let cut: String = text.iter().take(end.index(text.len() + 1).max(text.len() / 2)).collect();
        let _ = parse("file", cut.as_bytes(), ManifestFormat::Yaml);
    }

    #[test]
    fn arbitrary_numbers_and_words_do_not_panic(
        port in any::<i32>(), word in "[\\PC]{0,12}", other in "[\\PC]{0,12}",
    ) {
        let json = serde_json::json!({
            "apiVersion": "v1", "kind": "Service",
            "metadata": {"name": word, "namespace": other},
            "spec": {
                "type": word, "clusterIPs": [word, other], "externalIPs": [other], "sessionAffinity": "ClientIP",
                "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": port}},
                "ports": [{"port": port, "nodePort": port, "targetPort": port, "protocol": other}],
                "loadBalancerSourceRanges": [word], "healthCheckNodePort": port,
            },
        });
        prop_assert!(parse("file", json.to_string().as_bytes(), ManifestFormat::Json).is_ok());
    }
}
