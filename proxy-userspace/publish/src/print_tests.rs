//! What people and programs see.

use std::{num::NonZeroU16, sync::Arc};

use model::{
    Protocol, ServiceName,
    state::{
        Endpoint, EndpointKey, EndpointPort, NodeState, PerFamily, Scopes, Service, ServiceKind, ServicePort,
        ServiceState, TargetPort, TrafficPolicy,
    },
};

use super::{Format, render};
use crate::Published;

fn published() -> Published {
    let number = |port| NonZeroU16::new(port).unwrap();
    let port = |name: &str, port, node_port| ServicePort {
        name: name.into(),
        protocol: Protocol::Tcp,
        port: number(port),
        node_port,
        target_port: TargetPort::Number(number(8080)),
        lost: Vec::new(),
        usable: PerFamily { v4: name == "http", v6: false },
    };
    let name = ServiceName::new("shop", "y");
    let service = Service {
        name: name.clone(),
        kind: ServiceKind::NodePort,
        cluster_ips: vec!["10.96.0.10".parse().unwrap()],
        external_ips: Vec::new(),
        load_balancer_ips: Vec::new(),
        ports: vec![port("http", 80, Some(number(30080))), port("no", 81, None)],
        internal_policy: TrafficPolicy::Cluster,
        external_policy: TrafficPolicy::Local,
        affinity: None,
        source_ranges: Vec::new(),
        health_check_node_port: None,
    };
    let endpoint = |last: u8, local| Endpoint {
        key: EndpointKey::Pod(format!("p{last}")),
        hostname: String::new(),
        v4: Some([10, 1, 0, last].into()),
        v6: None,
        local,
        ports: vec![EndpointPort {
            index: 0,
            port: number(8080),
            scopes: Scopes { internal: true, external: local, cluster: true },
        }],
    };
    let endpoints = (1..6).map(|last| endpoint(last, last == 1));
    let services = [(name, Arc::new(ServiceState::new(service, endpoints)))].into_iter().collect();
    Published {
        instance_id: u64::MAX,
        rev: 7,
        node: "n1".into(),
        state: NodeState { services, ..NodeState::default() },
    }
}

#[test]
fn json_is_one_object_on_one_line() {
    let text = render(&published(), Format::Json).unwrap();
    assert_eq!(text.lines().count(), 1);
    let begin = r#"{"instanceId":"18446744073709551615","rev":"7","node":"n1","items":[{"service":{"namespace":"shop","name":"y","type":"NodePort","ips":{"clusterIps":{"v4":["10.96.0.10"]},"externalIps":{},"loadBalancerIps":{}},"ports":[{"name":"http","protocol":"TCP","port":80,"nodePort":30080,"targetPort":8080,"usable":{"v4":true}},"#;
    assert!(text.starts_with(begin), "{text}");
    let endpoint = r#""endpoints":[{"ips":{"v4":["10.1.0.1"]},"local":true,"portOverrides":[{"name":"http","port":8080,"index":0}],"scopes":{"internal":true,"external":true,"cluster":true},"podName":"p1"},"#;
    assert!(text.contains(endpoint), "{text}");
}

#[test]
fn the_empty_state_is_an_empty_list() {
    let published = Published { state: NodeState::default(), instance_id: 1, ..published() };
    let text = render(&published, Format::Json).unwrap();
    assert_eq!(text, "{\"instanceId\":\"1\",\"rev\":\"7\",\"node\":\"n1\",\"items\":[]}\n");
}

#[test]
fn yaml_says_what_json_says() {
    let published = published();
    let yaml = render(&published, Format::Yaml).unwrap();
    let yaml: serde_json::Value = serde_saphyr::from_str(&yaml).unwrap();
    let json: serde_json::Value = serde_json::from_str(&render(&published, Format::Json).unwrap()).unwrap();
    assert_eq!(yaml, json);
}

#[test]
fn the_table_is_for_people() {
    let text = render(&published(), Format::Table).unwrap();
    let expect = "\
node n1, revision 7 of instance ffffffffffffffff, 1 services
\x20SERVICE  TYPE      CLUSTER-IPS  PORT           OUTSIDE          INTERNAL       EXTERNAL       SHORT-CIRCUIT
\x20shop/y   NodePort  10.96.0.10   80/TCP (http)  node port 30080  10.1.0.1:8080  10.1.0.1:8080  10.1.0.1:8080
                                                                 10.1.0.2:8080                 10.1.0.2:8080
                                                                 10.1.0.3:8080                 10.1.0.3:8080
                                                                 and 2 more                    and 2 more
\x20shop/y   NodePort  10.96.0.10   81/TCP (no)    -                none (refuse)  -              -
";
    assert_eq!(text, expect);
}
