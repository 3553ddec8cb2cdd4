//! What is in our tables, in words: one line per entry, sorted, so that two equal states read the same.
//!
//! Slots are not shown, because they differ from history to history.

use std::net::SocketAddr;

use model::Family;

use crate::{
    compile::unspecified,
    datapath::FAMILIES,
    elements::{Element, Elements, Value},
    endpoint_selector::{By, DROP, Pick, REFUSE, SET_SHIFT},
    error::Error,
    rules::Behaviour,
    schema::{Bytes, Map, Parts},
    snapshot::{self, Snapshot, endpoint, protocol_of},
};
use datapath::ActiveFrontend;
use netlink::Netfilter;

/// Reads the tables, and describes every entry; nothing if they are not there.
///
/// # Errors
///
/// If the kernel does not let us.
pub fn dump() -> Result<Vec<String>, Error> {
    let mut lines: Vec<_> = snapshots()?.iter().flat_map(|it| lines(&it.elements)).collect();
    lines.sort_unstable();
    Ok(lines)
}

/// Reads the tables: every address that leads somewhere, and where traffic from inside goes, in ascending order; a node
/// port has the unspecified address of its family.
///
/// # Errors
///
/// If the kernel does not let us.
pub fn active_frontends() -> Result<Vec<ActiveFrontend>, Error> {
    let mut all = Vec::new();
    for Snapshot { elements, .. } in &snapshots()? {
        all.extend(elements.iter().filter_map(|(element, value)| {
            let by = By::ALL.into_iter().find(|it| it.inside() == element.map)?;
            active_frontend(elements, by, element, value)
        }));
    }
    all.sort_unstable();
    Ok(all)
}

/// The tables that there are; none where the kernel has no nftables.
fn snapshots() -> Result<Vec<Snapshot>, Error> {
    let read = || -> Result<Vec<_>, Error> {
        let mut netfilter = Netfilter::open().map_err(Error::Open)?;
        let tables = FAMILIES.map(|it| Snapshot::read(&mut netfilter, it).transpose());
        tables.into_iter().flatten().collect()
    };
    match read() {
        Err(error) if error.is_for_want_of_nftables() => Ok(Vec::new()),
        read => read,
    }
}

fn active_frontend(elements: &Elements, by: By, from: &Element, value: &Value) -> Option<ActiveFrontend> {
    let family = from.family;
    let mut key = Parts::of(&from.key, family);
    let address = match by {
        By::Address => key.address()?,
        By::NodePort => unspecified(family),
    };
    let (protocol, port) = (protocol_of(key.protocol()?)?, key.port()?);
    let Value::Data(word) = value else { return None };
    let pick = Pick::of(by, Parts::of(word, family).number()?);
    let mut backends: Vec<_> = pick
        .into_iter()
        .flat_map(|pick| (0..pick.count).map(move |slot| pick.set << SET_SHIFT | slot))
        .filter_map(|slot| {
            let key = Bytes(from.key.0.clone()).number(slot);
            match elements.get(&Element::new(family, by.endpoints(), key))? {
                Value::Data(it) => endpoint(it, family),
                _ => None,
            }
        })
        .collect();
    backends.sort_unstable();
    Some(ActiveFrontend {
        frontend: format!("{}/{protocol}", SocketAddr::new(address, port)),
        backends,
        port: None,
    })
}

/// A line for each element that depends on the state.
pub(super) fn lines(elements: &Elements) -> Vec<String> {
    let line = |(element, value): (&Element, &Value)| {
        line(element, value).unwrap_or_else(|| Some(format!("packets unknown {element:?} {value:?}")))
    };
    elements.iter().filter_map(line).collect()
}

/// The outer `None` is for what makes no sense, the inner one for what is always there.
fn line(element: &Element, value: &Value) -> Option<Option<String>> {
    let family = element.family;
    let mut key = Parts::of(&element.key, family);
    let number = || match value {
        Value::Data(it) => Parts::of(it, family).number(),
        _ => None,
    };
    let endpoint = || match value {
        Value::Data(it) => endpoint(it, family),
        _ => None,
    };
    let service_port = || match value {
        Value::Data(it) => frontend(&mut Parts::of(it, family)),
        _ => None,
    };
    let line = match element.map {
        Map::Frontends => format!("packets frontend {} {}", frontend(&mut key)?, behaviour(number()?)?),
        Map::NodeFrontends => {
            format!("packets frontend {} {}", port(&mut key, family)?, behaviour(number()?)?)
        }
        Map::Inside => format!("packets inside {} {}", frontend(&mut key)?, pick(number()?)?),
        Map::NodeInside => format!("packets inside {} {}", port(&mut key, family)?, pick(number()?)?),
        Map::Outside => format!("packets outside {} {}", frontend(&mut key)?, pick(number()?)?),
        Map::NodeOutside => format!("packets outside {} {}", port(&mut key, family)?, pick(number()?)?),
        Map::Endpoints => {
            let frontend = frontend(&mut key)?;
            format!("packets endpoint {frontend} {} -> {}", set(key.number()?), endpoint()?)
        }
        Map::NodeEndpoints => {
            let port = port(&mut key, family)?;
            format!("packets endpoint {port} {} -> {}", set(key.number()?), endpoint()?)
        }
        Map::ServicePorts => {
            format!("packets service-port {} of {}", frontend(&mut key)?, service_port()?)
        }
        Map::NodeServicePorts => {
            format!("packets service-port {} of {}", port(&mut key, family)?, service_port()?)
        }
        Map::Members | Map::MembersExternal | Map::MembersInternal => {
            let number = (0..=2).find(|it| Map::members(*it) == element.map)?;
            let frontend = frontend(&mut key)?;
            let endpoint = SocketAddr::new(key.address()?, key.port()?);
            format!("packets member {frontend} {} {endpoint}", named(number))
        }
        Map::Sources => {
            let frontend = frontend(&mut key)?;
            let mut end = Parts::of(element.end.as_ref()?, family);
            snapshot::frontend(&mut end)?;
            format!("packets source {frontend} from {} to {}", key.address()?, end.address()?)
        }
        Map::NodeAddresses => format!("packets node-address {}", key.address()?),
        Map::ClusterIps => format!("packets cluster-ip {}", key.address()?),
        Map::Hairpin => format!("packets hairpin {}", key.address()?),
        Map::Behaviours | Map::Picks | Map::NodePicks | Map::Affinity => return Some(None),
    };
    Some(Some(line))
}

fn frontend(key: &mut Parts<'_>) -> Option<String> {
    snapshot::frontend(key).map(|it| it.to_string())
}

fn port(key: &mut Parts<'_>, family: Family) -> Option<String> {
    let protocol = protocol_of(key.protocol()?)?;
    let any = match family {
        Family::V4 => "node",
        Family::V6 => "[node]",
    };
    Some(format!("{any}:{}/{protocol}", key.port()?))
}

fn behaviour(word: u32) -> Option<&'static str> {
    Behaviour::of(word).map(Behaviour::chain)
}

/// The set of a slot.
fn set(slot: u32) -> &'static str {
    named(slot >> SET_SHIFT)
}

fn named(set: u32) -> &'static str {
    match set {
        0 => "any",
        1 => "external",
        _ => "internal",
    }
}

fn pick(word: u32) -> Option<String> {
    Some(match word {
        REFUSE => "refused".into(),
        DROP => "dropped".into(),
        word => {
            let Pick { set, count, affinity, .. } = Pick::of(By::Address, word)?;
            let affinity = if affinity > 0 { format!(" for {affinity} s") } else { String::new() };
            format!("endpoints={count} {}{affinity}", named(set))
        }
    })
}
