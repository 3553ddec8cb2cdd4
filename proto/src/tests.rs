//! The wire format and the JSON form.

use prost::Message;

use crate::localv1::{
    self, Endpoint, EndpointScopes, IpSet, OpItem, PortName, Service, WatchReq, op_item::Op,
};

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|it| format!("{it:02x}")).collect()
}

fn set(set: localv1::Set, path: &str, bytes: Vec<u8>) -> OpItem {
    let reference = localv1::Ref { set: set.into(), path: path.to_owned() };
    OpItem { op: Some(Op::Set(localv1::Value { r#ref: Some(reference), bytes: bytes.into() })) }
}

#[test]
fn a_recorded_exchange_has_the_same_bytes() {
    let request = WatchReq { node_name: "n1".into(), ..WatchReq::default() };
    assert_eq!(hex(&request.encode_to_vec()), "0a026e31");
    let reset = OpItem { op: Some(Op::Reset(localv1::EmptyOp::default())) };
    assert_eq!(hex(&reset.encode_to_vec()), "2200");
    let endpoint = Endpoint {
        ips: Some(IpSet::of(["10.0.1.2"])),
        local: true,
        scopes: Some(EndpointScopes { internal: true, external: true, cluster: None }),
        ..Endpoint::default()
    };
    let item = set(localv1::Set::EndpointsSet, "default/itp-local/p-a", endpoint.encode_to_vec());
    assert_eq!(
        hex(&item.encode_to_vec()),
        "12310a190802121564656661756c742f6974702d6c6f63616c2f702d611214120a0a0831302e302e312e3218012a0408011001"
    );
    let sync = OpItem { op: Some(Op::Sync(localv1::EmptyOp::default())) };
    assert_eq!(hex(&sync.encode_to_vec()), "0a00");
}

#[test]
fn json_is_lower_camel_case_with_names_of_enum_values() {
    let port = localv1::PortMapping {
        protocol: localv1::Protocol::Udp.into(),
        node_port: 30053,
        ..Default::default()
    };
    let service = Service { map_ip: true, ports: vec![port], ..Service::default() };
    let json = serde_json::to_string(&service).unwrap();
    assert_eq!(json, r#"{"mapIp":true,"ports":[{"protocol":"UDP","nodePort":30053}]}"#);
    let filter = crate::localnetv1::NextFilter { instance_id: u64::MAX, rev: 1, ..Default::default() };
    assert_eq!(serde_json::to_string(&filter).unwrap(), r#"{"instanceId":"18446744073709551615","rev":"1"}"#);
    let name = PortName { index: Some(0), ..PortName::default() };
    assert_eq!(serde_json::from_str::<PortName>(r#"{"index":0}"#).unwrap(), name);
}
