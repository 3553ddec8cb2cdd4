//! The rendered text.

use std::{
    collections::BTreeMap,
    num::{NonZeroU16, NonZeroU32},
    sync::Arc,
};

use model::{
    Protocol, ServiceMetadata, ServiceName, escaped,
    state::{
        ClientIpAffinity, Endpoint, EndpointKey, EndpointPort, NodeInfo, NodeState, PerFamily, Scopes,
        Service, ServiceCidr, ServiceKind, ServicePort, ServiceState, TargetPort, TrafficPolicy,
    },
};

use publish::{PRINTED_EXTENSIONS, Published, json_parts};

use super::{Format, render, render_changes};

fn published() -> Published {
    let number = |port| NonZeroU16::new(port).unwrap();
    let port = |name: &str, port, node_port| ServicePort {
        name: name.into(),
        node_port,
        target_port: TargetPort::Number(number(8080)),
        has_any_endpoint: PerFamily { v4: name == "http", v6: false },
        ..ServicePort::new(Protocol::Tcp, number(port))
    };
    let name = ServiceName::new("shop", "y");
    let service = Service {
        kind: ServiceKind::NodePort,
        cluster_ips: vec!["10.96.0.10".parse().unwrap()],
        ports: vec![port("http", 80, Some(number(30080))), port("no", 81, None)],
        external_policy: TrafficPolicy::Local,
        ..Service::new(name.clone())
    };
    let endpoint = |last: u8, local| Endpoint {
        v4: Some([10, 1, 0, last].into()),
        local,
        ports: [EndpointPort {
            index: 0,
            port: number(8080),
            scopes: Scopes { internal: true, external: local, cluster: true },
        }]
        .into(),
        ..Endpoint::new(EndpointKey::Pod(format!("p{last}").into()))
    };
    let endpoints = (1..6).map(|last| endpoint(last, last == 1));
    let services = [(name, Arc::new(ServiceState::new(service, endpoints)))].into_iter().collect();
    Published::new(u64::MAX, 7, "n1", NodeState { services, ..NodeState::default() })
}

#[test]
fn json_is_one_object_on_one_line_also_of_the_empty_state() {
    let text = render(&published(), Format::Json).unwrap();
    assert_eq!(text.lines().count(), 1);
    let begin = r#"{"instanceId":"18446744073709551615","rev":"7","node":"n1","items":[{"service":{"namespace":"shop","name":"y","type":"NodePort","ips":{"clusterIps":{"v4":["10.96.0.10"]},"externalIps":{},"loadBalancerIps":{}},"ports":[{"name":"http","protocol":"TCP","port":80,"nodePort":30080,"targetPort":8080,"hasAnyEndpoint":{"v4":true}},"#;
    assert!(text.starts_with(begin), "{text}");
    let endpoint = r#""endpoints":[{"ips":{"v4":["10.1.0.1"]},"local":true,"portOverrides":[{"name":"http","port":8080,"index":0}],"scopes":{"internal":true,"external":true,"cluster":true},"podName":"p1"},"#;
    assert!(text.contains(endpoint), "{text}");
    let empty = Published::new(1, 7, "n1", NodeState::default());
    let text = render(&empty, Format::Json).unwrap();
    assert_eq!(text, "{\"instanceId\":\"1\",\"rev\":\"7\",\"node\":\"n1\",\"items\":[]}\n");
}

#[test]
fn the_table_has_a_row_per_port() {
    let text = render(&published(), Format::Table).unwrap();
    let expect = "\
node n1, revision 7 of instance ffffffffffffffff, 1 service
\x20SERVICE  TYPE      CLUSTER-IPS  PORT           EXPOSED          INTERNAL       EXTERNAL       SHORT-CIRCUIT
\x20shop/y   NodePort  10.96.0.10   80/TCP (http)  node port 30080  10.1.0.1:8080  10.1.0.1:8080  10.1.0.1:8080
                                                                 10.1.0.2:8080                 10.1.0.2:8080
                                                                 10.1.0.3:8080                 10.1.0.3:8080
                                                                 +2                            +2
\x20shop/y   NodePort  10.96.0.10   81/TCP (no)    -                refuse         -              -
";
    assert_eq!(text, expect);
}

/// The state with changes: a changed port and endpoint, an added and a removed endpoint, an added Service.
fn changed() -> Published {
    let mut after = published();
    let name = ServiceName::new("shop", "y");
    let mut state = ServiceState::clone(after.state.services.get(&name).unwrap());
    let mut service = Service::clone(&state.service);
    service.affinity = Some(ClientIpAffinity { timeout_seconds: NonZeroU32::new(600).unwrap() });
    service.ports[1].has_any_endpoint.v6 = true;
    state.service = Arc::new(service);
    let node = NodeInfo { addresses: vec!["192.0.2.2".parse().unwrap()], ..NodeInfo::default() };
    Arc::make_mut(&mut after.state.nodes).insert("n2".into(), node);
    let other = ServiceName::new("shop", "z");
    let new = Service { name: other, ..Service::clone(&state.service) };
    let new = ServiceState { service: Arc::new(new), ..state.clone() };
    state.endpoints.remove(1);
    let mut endpoint = Endpoint::clone(&state.endpoints[0]);
    Arc::make_mut(&mut endpoint.ports)[0].scopes.external = false;
    endpoint.key = EndpointKey::Pod("p9".into());
    state.endpoints.push(Arc::new(endpoint.clone()));
    endpoint.key = EndpointKey::Pod("p1".into());
    state.endpoints[0] = Arc::new(endpoint);
    after.rev += 1;
    after.state.services.insert(Arc::new(state));
    after.state.services.insert(Arc::new(new));
    after
}

#[test]
fn the_change_table_lists_what_changed() {
    let text = render_changes(Some(&published()), &changed(), Format::Table).unwrap();
    let expect = "\
node n1, revision 8 of instance ffffffffffffffff, 7 changes
\x20+  -       node n2      addresses: 192.0.2.2; name: n2
\x20~  shop/y  service      clientIp.timeoutSeconds: - → 600
\x20~  shop/y  port 81/TCP  hasAnyEndpoint.v6: - → true
\x20~  shop/y  endpoint p1  scopes.external: true → -
\x20-  shop/y  endpoint p2  ips.v4: 10.1.0.2; podName: p2; portOverrides.0.index: 0; portOverrides.0.name: http; portOverrides.0.port: 8080; scopes.cluster: true; scopes.internal: true
\x20+  shop/y  endpoint p9  ips.v4: 10.1.0.1; local: true; podName: p9; portOverrides.0.index: 0; portOverrides.0.name: http; portOverrides.0.port: 8080; scopes.cluster: true; scopes.internal: true
\x20+  shop/z  service      clientIp.timeoutSeconds: 600
                         externalTrafficToLocal: true
                         ips.clusterIps.v4: 10.96.0.10
                         name: z
                         namespace: shop
                         type: NodePort
                         80/TCP (http): 10.1.0.1:8080, 10.1.0.2:8080, 10.1.0.3:8080, +2
                         81/TCP (no): drop
";
    assert_eq!(text, expect);
    let text = render_changes(Some(&changed()), &published(), Format::Table).unwrap();
    assert!(text.contains("\n -  shop/z  service      clientIp.timeoutSeconds: 600\n"), "{text}");
    let text = render_changes(None, &published(), Format::Table).unwrap();
    assert_eq!(text, render(&published(), Format::Table).unwrap());
}

/// Applies change lines as a consumer would.
fn apply(state: &mut BTreeMap<String, serde_json::Value>, lines: &str) {
    for line in lines.lines() {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        let path = format!("{} {} {}", line["kind"], line["service"], line["name"]);
        let before = line.get("before").cloned();
        let (was, change) = match line.get("after") {
            Some(after) => {
                (state.insert(path, after.clone()), if before.is_some() { "changed" } else { "added" })
            }
            None => (state.remove(&path), "removed"),
        };
        assert_eq!((was, line["change"].as_str().unwrap()), (before, change), "{line}");
        // Ports and endpoints exist only together with their Service.
        let is_independent = ["service", "node", "serviceCidr"].iter().any(|it| line["kind"] == *it);
        assert!(is_independent || state.contains_key(&format!("\"service\" {} null", line["service"])));
    }
}

#[test]
fn labels_and_annotations_are_printed_and_forge_no_line() {
    let (before, mut after) = (published(), published());
    let state = before.state.services.values().next().unwrap();
    let note = format!("a\u{1b}[2J\nb\u{9b}\u{202e}{}", "x".repeat(300));
    let metadata = ServiceMetadata {
        labels: [("app".into(), "web".into())].into(),
        annotations: [("note".into(), note.clone())].into(),
    };
    let service = Service { metadata: Some(Arc::new(metadata)), ..(*state.service).clone() };
    after.state.services.insert(ServiceState { service: Arc::new(service), ..(**state).clone() });
    // As a command prints every text.
    let printed = |format| escaped(&render(&after, format).unwrap()).into_owned();
    let json: serde_json::Value = serde_json::from_str(&printed(Format::Json)).unwrap();
    let yaml: serde_json::Value = serde_saphyr::from_str(&printed(Format::Yaml)).unwrap();
    let service = &json["items"][0]["service"];
    assert_eq!((&service["labels"]["app"], &service["annotations"]["note"]), (&"web".into(), &note.into()));
    assert_eq!(yaml, json);
    assert_eq!(printed(Format::Table), render(&before, Format::Table).unwrap());
    let table = render_changes(Some(&before), &after, Format::Table).unwrap();
    let lines: Vec<_> = table.lines().skip(1).map(str::trim).collect();
    let [note, label] = lines[..] else { panic!("{table}") };
    assert!(note.contains("annotations.note: - → a\\u001b[2J\\nb\\u009b\\u202exxx"), "{note}");
    assert!(note.ends_with("x…") && note.len() < 350, "{note}");
    assert_eq!(label, "labels.app: - → web");
}

#[test]
fn change_lines_lead_from_one_state_to_the_other() {
    let empty = Published::new(u64::MAX, 7, "n1", NodeState::default());
    fn render(before: Option<&Published>, after: &Published) -> String {
        render_changes(before, after, Format::Json).unwrap()
    }
    let mut state = BTreeMap::new();
    let mut ranges = changed();
    let cidr = ServiceCidr { name: "kubernetes".into(), cidrs: vec!["10.96.0.0/12".parse().unwrap()] };
    ranges.state.service_cidrs = Arc::new([(Arc::clone(&cidr.name), Arc::new(cidr))].into());
    let line = render(Some(&changed()), &ranges);
    assert!(line.contains(r#""change":"added","kind":"serviceCidr","name":"kubernetes""#), "{line}");
    let table = render_changes(Some(&changed()), &ranges, Format::Table).unwrap();
    assert!(table.contains("serviceCidr kubernetes") && table.contains("10.96.0.0/12"), "{table}");
    let history = [published(), changed(), ranges, changed(), changed(), empty, changed(), published()];
    let mut before = None;
    for after in &history {
        let lines = render(before, after);
        apply(&mut state, &lines);
        let mut afresh = BTreeMap::new();
        apply(&mut afresh, &render(None, after));
        assert_eq!(state, afresh);
        before = Some(after);
    }
    assert_eq!(render(Some(&changed()), &changed()), "");
    let yaml = render_changes(Some(&published()), &changed(), Format::Yaml).unwrap();
    assert_eq!(yaml.matches("---\n").count(), render(Some(&published()), &changed()).lines().count());
}

#[test]
fn the_parts_of_json_are_the_whole_object() {
    let mut published = changed();
    let state = &mut published.state;
    let cidr = |name: &str| ServiceCidr { name: name.into(), cidrs: vec!["10.96.0.0/16".parse().unwrap()] };
    let cidrs = ["a", "b"].map(|it| (it.into(), Arc::new(cidr(it))));
    state.service_cidrs = Arc::new(cidrs.into_iter().collect());
    Arc::make_mut(&mut state.nodes).insert("n3".into(), NodeInfo::default());
    fn json(it: &impl serde::Serialize) -> String {
        serde_json::to_string(it).unwrap()
    }
    let item = |it: &Arc<ServiceState>| {
        let service = json(&wire::service_with_extensions(it, PRINTED_EXTENSIONS));
        let endpoints = it.endpoints.iter().map(|endpoint| json(&wire::endpoint(&it.service, endpoint)));
        format!(r#"{{"service":{service},"endpoints":[{}]}}"#, endpoints.collect::<Vec<_>>().join(","))
    };
    let Published { instance_id, rev, node, state, .. } = &published;
    let items: Vec<_> = state.services.values().map(item).collect();
    let nodes: Vec<_> = state.nodes.iter().map(|(name, it)| wire::node(name, it)).collect();
    let service_cidrs: Vec<_> = state.service_cidrs.values().map(|it| wire::service_cidr(it)).collect();
    let expect = format!(
        "{{\"instanceId\":\"{instance_id}\",\"rev\":\"{rev}\",\"node\":\"{node}\",\"items\":[{}],\"nodes\":{},\"serviceCidrs\":{}}}\n",
        items.join(","),
        json(&nodes),
        json(&service_cidrs)
    );
    assert_eq!(render(&published, Format::Json).unwrap(), expect);
    let longest = json_parts(&published).map(|it| it.unwrap().len()).max();
    assert!(longest < Some(expect.len() / 3), "no part is the whole");
}
