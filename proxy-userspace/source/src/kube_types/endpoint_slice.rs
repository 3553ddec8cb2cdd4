//! Converts `discovery.k8s.io/v1 EndpointSlice`.

use std::{
    collections::{BTreeSet, HashSet},
    fmt,
    sync::{Arc, LazyLock},
};

use parking_lot::Mutex;

use k8s_openapi::{api::discovery::v1::EndpointPort, jiff};
use model::{
    Family, NameForm, Rejected, ServiceName, Timestamp,
    address::AddressUse,
    cluster::{self, Conditions, Hints, SliceName, SlicePort},
    state::Memo,
};

use super::{
    MAX_PORTS,
    conversion::{Converted, names_of, timestamp, validator},
    objects::{self, Metadata},
    validation::{Validator, quoted},
};

const SERVICE_NAME: &str = "kubernetes.io/service-name";
/// Limits of Kubernetes.
const MAX_ENDPOINTS: usize = 1000;
const MAX_HINTS: usize = 8;
const TRIGGER_TIME: &str = "endpoints.kubernetes.io/last-change-trigger-time";

/// There is no object if the slice contains names (`FQDN`) or has no label with the name of its Service.
pub fn endpoint_slice(slice: &objects::EndpointSlice) -> Converted<cluster::EndpointSlice> {
    let mut validator = validator("EndpointSlice", &slice.metadata);
    let object = convert(slice, &mut validator);
    Converted { object, rejected: validator.into_rejected() }
}

/// A field that a slice in a manifest needs and lacks. In a cluster, slices of other controllers may lack it.
pub(super) fn missing_field(slice: &objects::EndpointSlice) -> Option<Rejected> {
    if !matches!(slice.address_type.as_deref(), Some("IPv4" | "IPv6")) {
        return None;
    }
    let mut validator = validator("EndpointSlice", &slice.metadata);
    let labels = slice.metadata.labels.as_ref();
    let has_items = |count: Option<usize>| count.is_some_and(|it| it > 0);
    if labels.and_then(|it| it.service_name.as_deref()).is_none_or(str::is_empty) {
        let reason =
            "the label is missing, so the slice belongs to no Service; set it to the name of the Service";
        validator.reject(format_args!("metadata.labels[{SERVICE_NAME}]"), reason);
    } else if has_items(slice.endpoints.as_ref().map(Vec::len))
        && !has_items(slice.ports.as_ref().map(Vec::len))
        && labels.is_none_or(|it| it.headless.is_none())
    {
        validator.reject("ports", "the slice has no ports, so no Service can use its endpoints; add them");
    }
    validator.into_rejected().pop()
}

fn convert(slice: &objects::EndpointSlice, validator: &mut Validator) -> Option<cluster::EndpointSlice> {
    let meta = &slice.metadata;
    let family = match slice.address_type.as_deref().unwrap_or("") {
        "IPv4" => Family::V4,
        "IPv6" => Family::V6,
        "FQDN" => return None,
        other => {
            validator.reject("addressType", format!("{} is unknown; use IPv4 or IPv6", quoted(other)));
            return None;
        }
    };
    let labels = meta.labels.as_ref()?;
    let service = labels.service_name.as_deref().filter(|it| !it.is_empty())?;
    let (namespace, name) = names_of(meta, NameForm::DnsSubdomain, validator)?;
    let label = format_args!("metadata.labels[{SERVICE_NAME}]");
    let service = validator.name(label, service, NameForm::DnsLabel)?;
    let ports = validator.limited("ports", slice.ports.as_deref(), MAX_PORTS).iter().enumerate();
    let endpoints = validator.limited("endpoints", slice.endpoints.as_deref(), MAX_ENDPOINTS);
    let endpoints = endpoints.iter().enumerate();
    let mut known_hints = BTreeSet::new();
    let mut endpoints: Vec<_> = endpoints
        .filter_map(|(index, it)| endpoint(index, it, family, &mut known_hints, validator))
        .collect();
    // The vector has grown by doubling, and is kept for long.
    endpoints.shrink_to_fit();
    Some(cluster::EndpointSlice {
        service: ServiceName { namespace: namespace.clone(), name: service },
        name: SliceName { namespace, name },
        headless: labels.headless.is_some(),
        family,
        ports: ports.filter_map(|(index, it)| port(index, it, validator)).collect(),
        endpoints,
        trigger_time: trigger_time(meta, validator),
        memo: Memo::default(),
    })
}

fn trigger_time(meta: &Metadata, validator: &mut Validator) -> Option<Timestamp> {
    let text = meta.annotations.as_ref()?.last_change_trigger_time.as_deref().filter(|it| !it.is_empty())?;
    match text.parse::<jiff::Timestamp>() {
        Ok(time) => Some(timestamp(time)),
        Err(_) => {
            let reason = format!("{} is not a time; write it as 2006-01-02T15:04:05.999Z", quoted(text));
            validator.reject(format_args!("metadata.annotations[{TRIGGER_TIME}]"), reason);
            None
        }
    }
}

/// A port without a number means all ports: it is valid, but not a target.
fn port(index: usize, port: &EndpointPort, validator: &mut Validator) -> Option<SlicePort> {
    let number = port.port?;
    let name = port.name.as_deref().unwrap_or_default();
    if !name.is_empty() {
        validator.name(format_args!("ports[{index}].name"), name, NameForm::DnsLabel)?;
    }
    Some(SlicePort {
        name: name.to_owned(),
        protocol: validator.protocol(format_args!("ports[{index}].protocol"), port.protocol.as_deref())?,
        port: validator.port(format_args!("ports[{index}].port"), number)?,
    })
}

fn endpoint(
    index: usize,
    endpoint: &objects::Endpoint,
    family: Family,
    known_hints: &mut BTreeSet<Arc<Hints>>,
    validator: &mut Validator,
) -> Option<cluster::Endpoint> {
    let field = format_args!("endpoints[{index}].addresses[0]");
    let Some(text) = endpoint.addresses.as_deref().and_then(<[_]>::first) else {
        validator.reject(field, "the endpoint has no address; add one");
        return None;
    };
    let address = validator.address(field, text, AddressUse::Endpoint)?;
    if Family::of(address) != family {
        let reason = format!("{} is not of the slice's addressType; use one slice per family", quoted(text));
        validator.reject(field, reason);
        return None;
    }
    let conditions = endpoint.conditions.as_ref();
    let hints = endpoint.hints.as_ref();
    let pod = endpoint.target_ref.as_ref().filter(|it| it.kind.as_deref() == Some("Pod"));
    let nodes = hint_names(
        format_args!("endpoints[{index}].hints.forNodes"),
        hints.and_then(|it| it.for_nodes.as_deref()),
        |it| &it.name,
        NameForm::DnsSubdomain,
        validator,
    );
    let zones = hint_names(
        format_args!("endpoints[{index}].hints.forZones"),
        hints.and_then(|it| it.for_zones.as_deref()),
        |it| &it.name,
        NameForm::QualifiedName,
        validator,
    );
    let mut name = |field: &str, name: Option<&str>, form| {
        validator.optional_name(format_args!("endpoints[{index}].{field}"), name, form)
    };
    Some(cluster::Endpoint {
        address,
        conditions: Conditions {
            ready: conditions.and_then(|it| it.ready).unwrap_or(true),
            serving: conditions.and_then(|it| it.serving).unwrap_or(true),
            terminating: conditions.and_then(|it| it.terminating).unwrap_or(false),
        },
        node: name("nodeName", endpoint.node_name.as_deref(), NameForm::DnsSubdomain).map(shared_node_name),
        pod: name("targetRef.name", pod.and_then(|it| it.name.as_deref()), NameForm::DnsSubdomain),
        hostname: name("hostname", endpoint.hostname.as_deref(), NameForm::DnsLabel)
            .map_or_else(Box::default, |it| it.as_ref().into()),
        hints: Hints { nodes, zones }.shared(known_hints),
    })
}

/// The names of hints, sorted.
fn hint_names<T>(
    field: fmt::Arguments<'_>,
    hints: Option<&[T]>,
    name: fn(&T) -> &str,
    form: NameForm,
    validator: &mut Validator,
) -> Vec<Arc<str>> {
    let hints = validator.limited(field, hints, MAX_HINTS).iter();
    let mut names: Vec<_> =
        hints.filter_map(|it| validator.optional_name(field, Some(name(it)), form)).collect();
    names.sort();
    names
}

/// The names of nodes, each in memory once: thousands of endpoints have the same. A name that no object has any more is dropped before
/// the memory for the names grows.
static NODE_NAMES: LazyLock<Mutex<HashSet<Arc<str>>>> = LazyLock::new(Mutex::default);

/// A name of a node, in the memory that other objects with the same name use already.
fn shared_node_name(name: Arc<str>) -> Arc<str> {
    let mut names = NODE_NAMES.lock();
    if let Some(known) = names.get(&name) {
        return Arc::clone(known);
    }
    if names.len() == names.capacity() {
        names.retain(|it| Arc::strong_count(it) > 1);
    }
    names.insert(Arc::clone(&name));
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_kept_once_while_an_object_has_it() {
        let [a, b] = [0, 1].map(|_| shared_node_name("a-node-of-this-test".into()));
        assert!(Arc::ptr_eq(&a, &b));
        drop(b);
        let count = |prefix: &str| {
            let names = NODE_NAMES.lock();
            names.iter().filter(|it| it.starts_with(prefix)).count()
        };
        for n in 0..1_000 {
            drop(shared_node_name(format!("gone-{n}").into()));
        }
        assert!(count("gone-") < 1_000, "those that are gone are dropped");
        assert_eq!(count("a-node-of-this-test"), 1);
    }
}
