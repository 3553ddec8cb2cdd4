//! Encodes and decodes which ports are forwarded whole.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::Arc,
};

use model::{
    Family, NameForm,
    address::AddressUse,
    state::{ForwardedPort, NodeShare},
};
use proxy_contract::localv1;

use crate::reader::{Reader, shown};

const FIELD: &str = "ports.forwarded";

/// Adds the ports that are forwarded to the messages of the ports.
pub(crate) fn encode(forwarded: &[ForwardedPort], ports: &mut [localv1::PortMapping]) {
    for it in forwarded {
        let Some(port) = ports.get_mut(usize::from(it.index)) else { continue };
        let share =
            |it: &NodeShare| localv1::NodeShare { node: it.node.to_string(), endpoints: it.endpoints };
        let message = localv1::FamilyForwarding {
            nodes: it.nodes.iter().map(share).collect(),
            targets: it.targets.iter().map(ToString::to_string).collect(),
        };
        let families = port.forwarded.get_or_insert_default();
        match it.family {
            Family::V4 => families.v4 = Some(message),
            Family::V6 => families.v6 = Some(message),
        }
    }
}

/// Decodes the ports that are forwarded, in ascending order of index and family. `positions` are those of the ports in the
/// Service; none of one that was rejected.
pub(crate) fn decode(
    reader: &mut Reader,
    ports: &[localv1::PortMapping],
    positions: &[Option<u16>],
) -> Arc<[ForwardedPort]> {
    let mut found = Vec::new();
    for (message, position) in ports.iter().zip(positions) {
        let (Some(index), Some(families)) = (*position, &message.forwarded) else { continue };
        for (family, message) in [(Family::V4, &families.v4), (Family::V6, &families.v6)] {
            let Some(message) = message else { continue };
            let Some(nodes) = nodes(reader, family, &message.nodes) else { continue };
            found.push(ForwardedPort {
                index,
                family,
                nodes,
                targets: targets(reader, family, &message.targets),
            });
        }
    }
    if found.is_empty() { Arc::default() } else { found.into() }
}

/// The nodes; none if one is invalid: its endpoints would get no connections.
fn nodes(reader: &mut Reader, family: Family, messages: &[localv1::NodeShare]) -> Option<Arc<[NodeShare]>> {
    let mut found = BTreeMap::new();
    let mut reject =
        |problem| reader.reject(FIELD, format!("{problem}; the port is not forwarded over {family}"));
    for localv1::NodeShare { node, endpoints } in messages {
        let problem = match () {
            () if !NameForm::DnsSubdomain.accepts(node) => "is not the name of a node",
            () if *endpoints == 0 => "has no endpoint",
            () if found.insert(node.as_str(), *endpoints).is_some() => "is listed twice",
            () => continue,
        };
        reject(format!("\"{}\" {problem}", shown(node)));
        return None;
    }
    if found.is_empty() {
        reject("there is no node".to_owned());
        return None;
    }
    Some(found.into_iter().map(|(node, endpoints)| NodeShare { node: node.into(), endpoints }).collect())
}

fn targets(reader: &mut Reader, family: Family, texts: &[String]) -> Arc<[SocketAddr]> {
    let mut target = |text| {
        let target: SocketAddr = reader.parse(FIELD, text)?;
        if Family::of(target.ip()) != family {
            reader.reject(FIELD, format!("{target} is not a target of {family}"));
            return None;
        }
        reader.is_usable(FIELD, target.ip(), AddressUse::Endpoint).then_some(target)
    };
    let targets: BTreeSet<_> = texts.iter().filter_map(|it| target(it)).collect();
    targets.into_iter().collect()
}
