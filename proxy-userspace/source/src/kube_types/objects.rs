//! Kubernetes' objects in JSON, reduced to the fields that are needed.
//!
//! Other fields, such as managed fields, other labels and the rest of a status, are skipped while decoding and take no
//! memory; `metadata` reads the labels and annotations that are requested. Small parts of which most fields are
//! needed have the types of `k8s_openapi`.

use std::{collections::BTreeMap, fmt};

use k8s_openapi::{
    api::{
        core::v1::{LoadBalancerStatus, NodeAddress, ServicePort, SessionAffinityConfig, Taint},
        discovery::v1::{EndpointConditions, EndpointHints, EndpointPort},
    },
    apimachinery::pkg::apis::meta::v1::Time,
};
use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, Visitor},
};
use serde_json::Value;

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Metadata {
    pub(crate) name: Option<String>,
    pub(crate) namespace: Option<String>,
    pub(crate) uid: Option<String>,
    pub(crate) creation_timestamp: Option<Time>,
    pub(crate) deletion_timestamp: Option<Time>,
    pub(crate) labels: Option<Labels>,
    pub(crate) annotations: Option<Annotations>,
    /// The version from which a watch continues.
    pub(crate) resource_version: Option<String>,
}

/// The labels that are evaluated.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Labels {
    #[serde(rename = "kubernetes.io/service-name")]
    pub(crate) service_name: Option<String>,
    #[serde(rename = "service.kubernetes.io/service-proxy-name")]
    pub(crate) service_proxy_name: Option<String>,
    #[serde(rename = "service.kubernetes.io/headless")]
    pub(crate) headless: Option<String>,
    #[serde(rename = "topology.kubernetes.io/zone")]
    pub(crate) zone: Option<String>,
}

/// The annotations that are evaluated.
#[derive(Debug, Default)]
pub(crate) struct Annotations {
    pub(crate) last_change_trigger_time: Option<String>,
    /// Marks the end of the list at the start of a watch (KEP-3157).
    pub(crate) initial_events_end: Option<String>,
    /// The hash of a static pod's manifest.
    pub(crate) config_mirror: Option<String>,
    /// All with our prefix, without it.
    pub(crate) ours: BTreeMap<String, String>,
}

/// The prefix of our annotations.
pub(crate) const PREFIX: &str = "kube-proxy-ebpf.io/";

impl<'de> Deserialize<'de> for Annotations {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(AnnotationsVisitor)
    }
}

struct AnnotationsVisitor;

impl<'de> Visitor<'de> for AnnotationsVisitor {
    type Value = Annotations;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a map of annotations")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Annotations, A::Error> {
        let mut found = Annotations::default();
        while let Some(name) = map.next_key::<String>()? {
            match name.as_str() {
                "endpoints.kubernetes.io/last-change-trigger-time" => {
                    found.last_change_trigger_time = map.next_value()?;
                }
                "k8s.io/initial-events-end" => found.initial_events_end = map.next_value()?,
                "kubernetes.io/config.mirror" => found.config_mirror = map.next_value()?,
                _ => match name.strip_prefix(PREFIX) {
                    Some(name) => {
                        found.ours.insert(name.to_owned(), any_text(map.next_value()?));
                    }
                    None => {
                        map.next_value::<IgnoredAny>()?;
                    }
                },
            }
        }
        Ok(found)
    }
}

#[derive(Debug, Default, Deserialize)]
pub struct Service {
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) metadata: Metadata,
    pub(crate) spec: Option<ServiceSpec>,
    pub(crate) status: Option<ServiceStatus>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ServiceSpec {
    #[serde(rename = "type")]
    pub(crate) type_: Option<String>,
    #[serde(rename = "clusterIP")]
    pub(crate) cluster_ip: Option<String>,
    #[serde(rename = "clusterIPs")]
    pub(crate) cluster_ips: Option<Vec<String>>,
    #[serde(rename = "externalIPs")]
    pub(crate) external_ips: Option<Vec<String>>,
    pub(crate) ports: Option<Vec<ServicePort>>,
    pub(crate) internal_traffic_policy: Option<String>,
    pub(crate) external_traffic_policy: Option<String>,
    pub(crate) session_affinity: Option<String>,
    pub(crate) session_affinity_config: Option<SessionAffinityConfig>,
    pub(crate) load_balancer_source_ranges: Option<Vec<String>>,
    pub(crate) health_check_node_port: Option<i32>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ServiceStatus {
    pub(crate) load_balancer: Option<LoadBalancerStatus>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EndpointSlice {
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) metadata: Metadata,
    pub(crate) address_type: Option<String>,
    pub(crate) ports: Option<Vec<EndpointPort>>,
    pub(crate) endpoints: Option<Vec<Endpoint>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Endpoint {
    pub(crate) addresses: Option<Vec<String>>,
    pub(crate) conditions: Option<EndpointConditions>,
    pub(crate) hostname: Option<String>,
    pub(crate) target_ref: Option<ObjectReference>,
    pub(crate) node_name: Option<String>,
    pub(crate) hints: Option<EndpointHints>,
}

#[derive(Debug, Default, Deserialize)]
pub(crate) struct ObjectReference {
    pub(crate) kind: Option<String>,
    pub(crate) name: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
pub struct Node {
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) metadata: Metadata,
    pub(crate) spec: Option<NodeSpec>,
    pub(crate) status: Option<NodeStatus>,
}

#[derive(Debug, Default, Deserialize)]
pub(crate) struct NodeSpec {
    #[serde(rename = "podCIDR")]
    pub(crate) pod_cidr: Option<String>,
    #[serde(rename = "podCIDRs")]
    pub(crate) pod_cidrs: Option<Vec<String>>,
    pub(crate) taints: Option<Vec<Taint>>,
}

#[derive(Debug, Default, Deserialize)]
pub(crate) struct NodeStatus {
    pub(crate) addresses: Option<Vec<NodeAddress>>,
}

/// The metadata of `v1 Pod`.
#[derive(Debug, Default, Deserialize)]
pub struct Pod {
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) metadata: Metadata,
}

#[derive(Debug, Default, Deserialize)]
pub struct ServiceCidr {
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) metadata: Metadata,
    pub(crate) spec: Option<ServiceCidrSpec>,
}

#[derive(Debug, Default, Deserialize)]
pub(crate) struct ServiceCidrSpec {
    pub(crate) cidrs: Option<Vec<String>>,
}

/// `null` means the same as a missing field.
pub(super) fn or_default<'de, T, D>(deserializer: D) -> Result<T, D::Error>
where
    T: Default + Deserialize<'de>,
    D: Deserializer<'de>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// A text; any other value as it is written in JSON. A manifest with `drain: 30`, which no API server accepts, is used
/// but for this value.
pub(super) fn any_text(value: Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text,
        other => other.to_string(),
    }
}
