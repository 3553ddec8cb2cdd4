//! Encodes and decodes the nodes, the ServiceCIDRs and the pods of the cluster.

use std::sync::Arc;

use ipnet::IpNet;
use model::{
    NameForm,
    address::{AddressUse, canonical_range},
    state::{NodeInfo, Pod, ServiceCidr, SocketLb},
};
use proxy_contract::localv1::{self, pod};

use crate::reader::{Decoded, Reader};

pub fn node(name: &str, node: &NodeInfo) -> localv1::Node {
    localv1::Node {
        name: name.to_owned(),
        addresses: node.addresses.iter().map(ToString::to_string).collect(),
        pod_cidrs: node.pod_cidrs.iter().map(ToString::to_string).collect(),
        is_being_deleted: node.is_being_deleted,
    }
}

/// Decodes a node from the fields that the messages of both APIs share.
pub(crate) fn node_info(
    reader: &mut Reader,
    addresses: &[String],
    pod_cidrs: &[String],
    is_being_deleted: bool,
) -> NodeInfo {
    let addresses = reader.hosts("addresses", addresses, AddressUse::Assigned);
    let pod_cidrs = pod_cidrs.iter().filter_map(|it| reader.parse::<IpNet>("pod_cidrs", it));
    NodeInfo { addresses, pod_cidrs: pod_cidrs.map(canonical_range).collect(), is_being_deleted }
}

pub fn service_cidr(it: &ServiceCidr) -> localv1::ServiceCidr {
    localv1::ServiceCidr {
        name: it.name.to_string(),
        cidrs: it.cidrs.iter().map(ToString::to_string).collect(),
    }
}

/// Decodes a ServiceCIDR; none if its name is invalid.
pub(crate) fn decode_service_cidr(
    name: &Arc<str>,
    message: &localv1::ServiceCidr,
) -> Decoded<Option<ServiceCidr>> {
    let mut reader = Reader::new(&format!("ServiceCIDR {name}"));
    let is_named = reader.accepts("name", name, NameForm::DnsSubdomain);
    let cidrs = message.cidrs.iter().filter_map(|it| reader.parse::<IpNet>("cidrs", it));
    let cidrs = cidrs.map(canonical_range).collect();
    reader.finish(is_named.then(|| ServiceCidr { name: Arc::clone(name), cidrs }))
}

/// Encodes a pod whose annotation says how its sockets are served.
pub fn pod(it: &Pod) -> localv1::Pod {
    let (namespace, name) = it.name.split_once('/').unwrap_or_default();
    let socket_lb = match it.socket_lb {
        SocketLb::Off => pod::SocketLb::Off,
        SocketLb::TcpOnly => pod::SocketLb::TcpOnly,
    };
    localv1::Pod {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        uid: it.uid.to_string(),
        socket_lb: socket_lb.into(),
    }
}

/// Decodes the pod `namespace/name`; none if its name is invalid, or an unknown version's annotation is meant.
pub(crate) fn decode_pod(path: &Arc<str>, message: &localv1::Pod) -> Decoded<Option<Pod>> {
    let mut reader = Reader::new(&format!("pod {path}"));
    let (namespace, name) = path.split_once('/').unwrap_or_default();
    let is_named = reader.accepts("namespace", namespace, NameForm::DnsLabel)
        & reader.accepts("name", name, NameForm::DnsSubdomain)
        & reader.accepts("uid", &message.uid, NameForm::DnsLabel);
    let socket_lb = match pod::SocketLb::try_from(message.socket_lb) {
        Ok(pod::SocketLb::Off) => Some(SocketLb::Off),
        Ok(pod::SocketLb::TcpOnly) => Some(SocketLb::TcpOnly),
        Ok(pod::SocketLb::UnknownSockets) | Err(_) => {
            reader
                .reject("socket_lb", format!("unknown value {}; all sockets are served", message.socket_lb));
            None
        }
    };
    let pod = socket_lb.filter(|_| is_named).map(|socket_lb| Pod {
        name: Arc::clone(path),
        uid: message.uid.as_str().into(),
        socket_lb,
    });
    reader.finish(pod)
}
