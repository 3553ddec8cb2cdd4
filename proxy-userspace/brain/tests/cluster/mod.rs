//! A cluster around the Service ns/web, from a few fields.

use model::cluster::ClusterState;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use source::file::parse;

/// The Service ns/web has the cluster IPs 10.96.0.1 and fd00::1, port 80, and what is here; its slice is one of IPv4 with port
/// 8080. n1 is 192.0.2.1 in zone a, n2 is 192.0.2.2 in zone b.
#[derive(Deserialize)]
pub(crate) struct Cluster {
    /// Fields of its spec.
    #[serde(default)]
    service: Map<String, Value>,
    #[serde(default)]
    annotations: Map<String, Value>,
    /// The IPs of its load balancer.
    #[serde(default)]
    ingress: Vec<String>,
    slice_ports: Option<Value>,
    /// The endpoints of its slice, as [`endpoint`] reads them.
    #[serde(default)]
    endpoints: Vec<String>,
    #[serde(default)]
    objects: Vec<Value>,
}

impl Cluster {
    pub(crate) fn state(&self) -> ClusterState {
        let mut spec = json!({"clusterIPs": ["10.96.0.1", "fd00::1"], "ports": [{"port": 80}]});
        spec.as_object_mut().unwrap().extend(self.service.clone());
        let ingress: Vec<_> = self.ingress.iter().map(|it| json!({"ip": it})).collect();
        let node = |name, zone, address| {
            json!({
                "apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {"topology.kubernetes.io/zone": zone}},
                "status": {"addresses": [{"type": "InternalIP", "address": address}]},
            })
        };
        let mut objects = vec![
            json!({
                "apiVersion": "v1", "kind": "Service", "spec": spec, "status": {"loadBalancer": {"ingress": ingress}},
                "metadata": {"name": "web", "namespace": "ns", "annotations": self.annotations},
            }),
            json!({
                "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
                "metadata": {"name": "web-1", "namespace": "ns", "labels": {"kubernetes.io/service-name": "web"}},
                "ports": self.slice_ports.clone().unwrap_or_else(|| json!([{"port": 8080}])),
                "endpoints": self.endpoints.iter().map(|it| endpoint(it)).collect::<Vec<_>>(),
            }),
            node("n1", "a", "192.0.2.1"),
            node("n2", "b", "192.0.2.2"),
        ];
        objects.extend(self.objects.clone());
        let list = json!({"apiVersion": "v1", "kind": "List", "items": objects});
        let parsed = parse(list.to_string().as_bytes()).unwrap();
        assert_eq!(parsed.rejected, []);
        let mut cluster = ClusterState::default();
        parsed.objects.into_iter().for_each(|(_, it)| cluster.set(it));
        cluster
    }
}

/// An endpoint from its address and words; it is ready and on another node without any.
fn endpoint(text: &str) -> Value {
    let names = |text: &str| text.split(',').map(|it| json!({"name": it})).collect::<Value>();
    let conditions = |ready, serving, terminating| {
        ("conditions", json!({"ready": ready, "serving": serving, "terminating": terminating}))
    };
    let mut words = text.split(' ');
    let mut endpoint = json!({"addresses": [words.next()], "nodeName": "n2"});
    for word in words {
        let (key, value) = match word.split_once('=').unwrap_or((word, "")) {
            ("here", _) => ("nodeName", json!("n1")),
            ("nowhere", _) => ("nodeName", Value::Null),
            ("unready", _) => conditions(false, false, false),
            // As with publishNotReadyAddresses.
            ("ready-terminating", _) => conditions(true, true, true),
            ("terminating", _) => conditions(false, true, true),
            ("gone", _) => conditions(false, false, true),
            ("zones", zones) => ("hints", json!({"forZones": names(zones)})),
            ("nodes", nodes) => ("hints", json!({"forNodes": names(nodes)})),
            ("pod", name) => ("targetRef", json!({"kind": "Pod", "name": name})),
            _ => panic!("{text:?}: unknown word {word:?}"),
        };
        endpoint[key] = value;
    }
    endpoint
}
