//! `discovery.k8s.io/v1 EndpointSlice` to a fact.

use std::sync::Arc;

use k8s_openapi::jiff;
use model::{
    Family, ServiceName, Timestamp,
    cluster::{self, Conditions, Rejected, SliceName, SlicePort},
};

use super::{
    Converted, label_of, names_of,
    objects::{self, Hint, Metadata},
    timestamp,
    validation::{Validator, shown},
};

const SERVICE_NAME: &str = "kubernetes.io/service-name";
const TRIGGER_TIME: &str = "endpoints.kubernetes.io/last-change-trigger-time";

/// Reads an EndpointSlice.
///
/// There is no object if the slice lists names (`FQDN`) or no label says to which Service it belongs.
pub fn endpoint_slice(slice: &objects::EndpointSlice) -> Converted<cluster::EndpointSlice> {
    let mut refuse = Validator::new(label_of("EndpointSlice", &slice.metadata));
    let object = read(slice, &mut refuse);
    Converted { object, rejected: refuse.into_rejected() }
}

/// What a slice lacks that is written in a manifest. In a cluster there are such for others than Services.
pub fn incomplete(slice: &objects::EndpointSlice) -> Option<Rejected> {
    if !matches!(slice.address_type.as_deref(), Some("IPv4" | "IPv6")) {
        return None;
    }
    let mut refuse = Validator::new(label_of("EndpointSlice", &slice.metadata));
    let labels = slice.metadata.labels.as_ref();
    let has = |list: Option<usize>| list.is_some_and(|it| it > 0);
    if labels.and_then(|it| it.service_name.as_deref()).is_none_or(str::is_empty) {
        let reason = "there is none, so the slice belongs to no Service; write the name of one";
        refuse.push(format_args!("metadata.labels[{SERVICE_NAME}]"), reason);
    } else if has(slice.endpoints.as_ref().map(Vec::len))
        && !has(slice.ports.as_ref().map(Vec::len))
        && labels.is_none_or(|it| it.headless.is_none())
    {
        refuse.push("ports", "there are none, so no Service leads to these endpoints; write them");
    }
    refuse.into_rejected().pop()
}

fn read(slice: &objects::EndpointSlice, refuse: &mut Validator) -> Option<cluster::EndpointSlice> {
    let meta = &slice.metadata;
    let family = match slice.address_type.as_deref().unwrap_or("") {
        "IPv4" => Family::V4,
        "IPv6" => Family::V6,
        "FQDN" => return None,
        other => {
            refuse.push("addressType", format!("{} is not known; write IPv4 or IPv6", shown(other)));
            return None;
        }
    };
    let labels = meta.labels.as_ref()?;
    let service = labels.service_name.as_deref().filter(|it| !it.is_empty())?;
    let (namespace, name) = names_of(meta, refuse)?;
    let service = refuse.name(format_args!("metadata.labels[{SERVICE_NAME}]"), service)?;
    let ports = slice.ports.iter().flatten().enumerate();
    let endpoints = slice.endpoints.iter().flatten().enumerate();
    let mut endpoints: Vec<_> =
        endpoints.filter_map(|(index, it)| endpoint(index, it, family, refuse)).collect();
    // It has grown by doubling, and stays for long.
    endpoints.shrink_to_fit();
    Some(cluster::EndpointSlice {
        service: ServiceName { namespace: namespace.clone(), name: service },
        name: SliceName { namespace, name },
        headless: labels.headless.is_some(),
        family,
        ports: ports.filter_map(|(index, it)| port(index, it, refuse)).collect(),
        endpoints,
        trigger_time: trigger_time(meta, refuse),
    })
}

fn trigger_time(meta: &Metadata, refuse: &mut Validator) -> Option<Timestamp> {
    let text = meta.annotations.as_ref()?.last_change_trigger_time.as_deref().filter(|it| !it.is_empty())?;
    match text.parse::<jiff::Timestamp>() {
        Ok(time) => Some(timestamp(time)),
        Err(_) => {
            let reason = format!("{} is not a time; write it as 2006-01-02T15:04:05.999Z", shown(text));
            refuse.push(format_args!("metadata.annotations[{TRIGGER_TIME}]"), reason);
            None
        }
    }
}

/// A port without a number stands for all ports: it is no target, and nothing is wrong with it.
fn port(index: usize, port: &objects::EndpointPort, refuse: &mut Validator) -> Option<SlicePort> {
    let number = port.port?;
    Some(SlicePort {
        name: port.name.clone().unwrap_or_default(),
        protocol: refuse.protocol(format_args!("ports[{index}].protocol"), port.protocol.as_deref())?,
        port: refuse.port(format_args!("ports[{index}].port"), number)?,
    })
}

fn endpoint(
    index: usize,
    endpoint: &objects::Endpoint,
    family: Family,
    refuse: &mut Validator,
) -> Option<cluster::Endpoint> {
    let field = format!("endpoints[{index}].addresses[0]");
    let Some(text) = endpoint.addresses.as_deref().and_then(<[_]>::first) else {
        refuse.push(field, "there is no address; write one");
        return None;
    };
    let address = refuse.address(&field, text)?;
    if Family::of(address) != family {
        let reason = format!("{} is not of the slice's addressType; give each family a slice", shown(text));
        refuse.push(field, reason);
        return None;
    }
    let conditions = endpoint.conditions.as_ref();
    let hints = endpoint.hints.as_ref();
    let pod = endpoint.target_ref.as_ref().filter(|it| it.kind.as_deref() == Some("Pod"));
    let pod = pod.and_then(|it| it.name.as_deref()).filter(|it| !it.is_empty());
    Some(cluster::Endpoint {
        address,
        conditions: Conditions {
            ready: conditions.and_then(|it| it.ready).unwrap_or(true),
            serving: conditions.and_then(|it| it.serving).unwrap_or(true),
            terminating: conditions.and_then(|it| it.terminating).unwrap_or(false),
        },
        node: endpoint.node_name.as_deref().filter(|it| !it.is_empty()).map(Arc::from),
        pod: pod.and_then(|it| refuse.name(format_args!("endpoints[{index}].targetRef.name"), it)),
        hostname: endpoint.hostname.clone().unwrap_or_default(),
        node_hints: names(hints.and_then(|it| it.for_nodes.as_deref())),
        zone_hints: names(hints.and_then(|it| it.for_zones.as_deref())),
    })
}

/// The names in a list of hints, sorted.
fn names(hints: Option<&[Hint]>) -> Vec<Arc<str>> {
    let mut names: Vec<Arc<str>> =
        hints.unwrap_or_default().iter().map(|it| it.name.as_str().into()).collect();
    names.sort();
    names
}
