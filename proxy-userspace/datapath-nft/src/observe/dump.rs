//! What is in our tables, in words: one line per entry, sorted, so that two equal states read the same.
//!
//! Slots are not shown, because they differ from history to history.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    mem,
    net::SocketAddr,
};

use model::Family;

use crate::{
    apply::snapshot::{Members, Snapshot, frontend_of, number_in, retried},
    encode::{
        elements::{Element, Elements, Value},
        schema::{Bytes, Map, Parts, list_name},
    },
    error::Error,
    plan::{
        affinity_numbers::SERVICE_PORT_MASK,
        endpoint_selector::{DROP, MatchKey, REFUSE, Selector, slot_of, slot_word},
        rules::FrontendPolicy,
    },
};
use datapath::{ActiveFrontend, FrontendAddress, SortedLines, unspecified};
use netlink::Netfilter;

/// Reads the tables and describes every entry in a line, in order; nothing if there are none.
pub fn dump(each: impl FnMut(&str)) -> Result<(), Error> {
    or_none(dump_tables(each))
}

fn dump_tables(mut each: impl FnMut(&str)) -> Result<(), Error> {
    let mut netfilter = Netfilter::open().map_err(Error::Open)?;
    let mut last = String::new();
    loop {
        let mut lines = retried(|| {
            let (mut names, mut lines) = (Names::default(), SortedLines::after(&last));
            let mut walk =
                |with: &mut dyn FnMut(Element, Value)| Snapshot::each_element(&mut netfilter, with);
            walk(&mut |element, value| names.learn(&element, &value))?;
            walk(&mut |element, value| {
                names.line(&element, &value).into_iter().for_each(|it| lines.add(&it));
            })?;
            Ok(lines)
        })?;
        lines.sorted().for_each(&mut each);
        if !lines.has_more() {
            return Ok(());
        }
        last = lines.sorted().next_back().unwrap_or_default().to_owned();
    }
}

/// Reads the addresses of all frontends for internal traffic, in no order; a node port has the unspecified address of its family.
pub fn frontend_addresses() -> Result<Vec<FrontendAddress>, Error> {
    let read = || {
        let mut netfilter = Netfilter::open().map_err(Error::Open)?;
        retried(|| {
            let mut found = Vec::new();
            let mut add = |element: Element, _| {
                if MatchKey::ALL.iter().any(|it| it.map(Map::Internal) == element.map) {
                    found.extend(frontend_of(&element, &mut element.parts()));
                }
            };
            Snapshot::each_element(&mut netfilter, &mut add)?;
            Ok(found)
        })
    };
    or_none(read())
}

/// Reads the frontends at these addresses, with their endpoints for internal traffic, in ascending order.
pub fn frontends_at(addresses: &HashSet<FrontendAddress>) -> Result<Vec<ActiveFrontend>, Error> {
    let is_of = |map: Map, by: MatchKey| {
        [Map::Internal, Map::Endpoints, Map::AffinityEndpoints].into_iter().any(|it| by.map(it) == map)
    };
    let tables = tables(|it| match it.map {
        Map::Members | Map::MembersExternal | Map::MembersInternal => true,
        map => {
            MatchKey::ALL.into_iter().any(|it| is_of(map, it))
                && frontend_of(it, &mut it.parts()).is_some_and(|it| addresses.contains(&it))
        }
    })?;
    let mut found: Vec<_> = tables.values().flat_map(|it| frontends(&it.elements)).collect();
    found.sort_unstable();
    Ok(found)
}

/// Every frontend among elements, with its endpoints for internal traffic.
pub(crate) fn frontends(elements: &Elements) -> Vec<ActiveFrontend> {
    let members = Members::of(elements);
    let frontend = |(element, value): (&Element, &Value)| {
        let by = MatchKey::ALL.into_iter().find(|it| it.map(Map::Internal) == element.map)?;
        let backends = match target((elements, &members), by, element, value)? {
            PacketTarget::Endpoints(endpoints) => endpoints,
            PacketTarget::Refused | PacketTarget::Dropped => Vec::new(),
        };
        let frontend = frontend_of(element, &mut element.parts())?.to_string();
        Some(ActiveFrontend { frontend, backends, port: None })
    };
    elements.iter().filter_map(frontend).collect()
}

/// Where packets to a frontend go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PacketTarget {
    /// To these endpoints, in ascending order.
    Endpoints(Vec<SocketAddr>),
    Refused,
    Dropped,
}

/// What the tables have for a destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lookup {
    /// Where packets of this node and its pods go; none if they are not translated.
    pub internal: Option<PacketTarget>,
    /// Where packets from elsewhere go; none if they are not translated.
    pub external: Option<PacketTarget>,
    /// Where packets go that another node has forwarded whole; none if they go where others from elsewhere go.
    pub forwarded: Option<PacketTarget>,
    /// Whether the port is a node port, which this node may serve at other addresses only.
    pub has_node_port: bool,
}

/// Reads what packets to a destination meet in the tables; `None` if there are none.
pub fn lookup(destination: &FrontendAddress) -> Result<Option<Lookup>, Error> {
    let family = destination.family();
    let ip = destination.address.ip();
    let node_port = FrontendAddress {
        address: SocketAddr::new(unspecified(family), destination.address.port()),
        ..*destination
    };
    // Of a large table, little concerns the destination.
    let mut tables = tables(|it| match it.map {
        Map::NodeAddresses | Map::Members | Map::MembersExternal | Map::MembersInternal => true,
        _ => frontend_of(it, &mut it.parts()).is_some_and(|it| it == *destination || it == node_port),
    })?;
    if tables.is_empty() {
        return Ok(None);
    }
    let elements = tables.remove(&family).unwrap_or_default().elements;
    let members = Members::of(&elements);
    let is_node = elements.contains_key(&Element::new(family, Map::NodeAddresses, Bytes::new().address(ip)));
    let at = |by: MatchKey, map: Map, address: &FrontendAddress| {
        let is_it = |it: &Element| {
            it.map == by.map(map) && frontend_of(it, &mut it.parts()).as_ref() == Some(address)
        };
        let (element, value) = elements.iter().find(|(it, _)| is_it(it))?;
        target((&elements, &members), by, element, value)
    };
    let of_node_port = |map| at(MatchKey::NodePort, map, &node_port);
    let find = |map| {
        let own = at(MatchKey::Address, map, destination);
        own.or_else(|| is_node.then(|| of_node_port(map))?)
    };
    let internal = find(Map::Internal);
    let has_node_port = of_node_port(Map::Internal).is_some();
    // Only a frontend with the policy Local, or a forwarded one, has a selector of its own for external traffic.
    let external = find(Map::External);
    let is_forwarded =
        elements.contains_key(&Element::new(family, Map::Forwarded, Bytes::frontend(*destination)));
    let (external, forwarded) = if is_forwarded { (None, external) } else { (external, None) };
    let external = external.or_else(|| internal.clone());
    Ok(Some(Lookup { internal, external, forwarded, has_node_port }))
}

/// The existing tables with the elements that are wanted; none if the kernel has no nftables.
fn tables(is_wanted: impl Fn(&Element) -> bool) -> Result<BTreeMap<Family, Snapshot>, Error> {
    let netfilter = Netfilter::open().map_err(Error::Open);
    or_none(netfilter.and_then(|mut it| Snapshot::read(&mut it, is_wanted)))
}

/// What was read, or nothing if the kernel has no nftables.
fn or_none<T: Default>(read: Result<T, Error>) -> Result<T, Error> {
    match read {
        Err(error) if error.is_nftables_missing() => Ok(T::default()),
        read => read,
    }
}

/// Where an element of a map of selectors sends packets.
fn target(
    (elements, members): (&Elements, &Members),
    by: MatchKey,
    from: &Element,
    value: &Value,
) -> Option<PacketTarget> {
    let selector = match number_in(value, from.family)? {
        REFUSE => return Some(PacketTarget::Refused),
        DROP => return Some(PacketTarget::Dropped),
        word => Selector::of(by, word)?,
    };
    let map = by.map(if selector.affinity > 0 { Map::AffinityEndpoints } else { Map::Endpoints });
    let endpoint = |slot| {
        let slot = slot_word(selector.set, slot);
        let element = Element::new(from.family, map, Bytes(from.key.0.clone()).number(slot));
        members.endpoint(&element, elements.get(&element)?)
    };
    let mut endpoints: Vec<_> = (0..selector.count).filter_map(endpoint).collect();
    endpoints.sort_unstable();
    Some(PacketTarget::Endpoints(endpoints))
}

/// A line per element that depends on the state.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn lines(elements: &Elements) -> Vec<String> {
    let mut names = Names::default();
    elements.iter().for_each(|(element, value)| names.learn(element, value));
    elements.iter().filter_map(|(element, value)| names.line(element, value)).collect()
}

/// What the numbers in elements stand for.
#[derive(Default)]
struct Names {
    members: Members,
    /// The keys of frontends at cluster IPs.
    cluster_ips: HashSet<(Family, Bytes)>,
    /// The service ports by number, each with whether that is a cluster IP.
    identities: HashMap<(Family, u32), (bool, String)>,
}

impl Names {
    /// Learns from each element, in their order: frontends come before the numbers of service ports. A cluster IP identifies its
    /// service port; where it has none, its last address does.
    fn learn(&mut self, element: &Element, value: &Value) {
        self.members.add(element, value);
        let Some(number) = number_in(value, element.family) else { return };
        let key = || (element.family, element.key.clone());
        match element.map {
            Map::Frontends if number == FrontendPolicy::ClusterIp as u32 => {
                self.cluster_ips.insert(key());
            }
            Map::ServicePorts | Map::NodeServicePorts => {
                let Some(frontend) = frontend(element, &mut element.parts()) else { return };
                let is_cluster_ip = element.map == Map::ServicePorts && self.cluster_ips.contains(&key());
                let identity = self.identities.entry((element.family, number)).or_default();
                *identity = mem::take(identity).max((is_cluster_ip, frontend));
            }
            _ => {}
        }
    }

    /// The line of an element; none if it is a constant one.
    fn line(&self, element: &Element, value: &Value) -> Option<String> {
        let line = line(self, element, value);
        line.unwrap_or_else(|| Some(format!("packets unknown {element:?} {value:?}")))
    }
}

/// The line of an element. The outer `None` stands for a malformed element, the inner one for a constant one.
fn line(names: &Names, element: &Element, value: &Value) -> Option<Option<String>> {
    let family = element.family;
    let mut key = element.parts();
    let number = || number_in(value, family);
    let endpoint = || names.members.endpoint(element, value);
    let service_port =
        |number: u32| names.identities.get(&(family, number & SERVICE_PORT_MASK)).map(|(_, it)| it);
    let mut at = || frontend(element, &mut key);
    let line = match element.map {
        Map::Frontends | Map::NodeFrontends => format!("packets frontend {} {}", at()?, policy(number()?)?),
        Map::Internal | Map::NodeInternal => format!("packets internal {} {}", at()?, selector(number()?)?),
        Map::External | Map::NodeExternal => format!("packets external {} {}", at()?, selector(number()?)?),
        Map::Forwarded => format!("packets forwarded {} {}", at()?, policy(number()?)?),
        Map::Endpoints | Map::AffinityEndpoints | Map::NodeEndpoints | Map::NodeAffinityEndpoints => {
            format!("packets endpoint {} {} -> {}", at()?, named(slot_of(key.number()?).0), endpoint()?)
        }
        Map::ServicePorts | Map::NodeServicePorts => {
            format!("packets service-port {} of {}", at()?, service_port(number()?)?)
        }
        Map::Members | Map::MembersExternal | Map::MembersInternal => {
            let number = (0..=2).find(|it| Map::members(*it) == element.map)?;
            let service_port = key.protocol().and_then(|_| service_port(key.number()?))?;
            format!("packets member {service_port} {} {}", named(number), endpoint()?)
        }
        Map::SourceLists => format!("packets sources {} in {}", at()?, list_name(number()?)),
        Map::SourceRanges => {
            let boundary = if *value == Value::RangeEnd { "before" } else { "from" };
            format!("packets {} {boundary} {}", list_name(element.list), key.address()?)
        }
        Map::NodeAddresses => format!("packets node-address {}", key.address()?),
        Map::ClusterIps => format!("packets cluster-ip {}", key.address()?),
        Map::Hairpin => format!("packets hairpin {}", key.address()?),
        Map::Policies
        | Map::Selectors
        | Map::NodeSelectors
        | Map::SourceChains
        | Map::Affinity
        | Map::AffinityUnanswered
        // The selectors tell it, too.
        | Map::AffinitySeconds
        | Map::AffinityTimeouts
        | Map::AffinityFull
        | Map::RemovedUdp
        | Map::Uplinks
        | Map::Watches
        | Map::Counted
        | Map::NodeCounted
        | Map::Counters => return Some(None),
    };
    Some(Some(line))
}

/// The frontend at the beginning of an element's key, in words: the address of a node port is `node`.
fn frontend(element: &Element, key: &mut Parts<'_>) -> Option<String> {
    let frontend = frontend_of(element, key)?;
    let (ip, text) = (frontend.address.ip(), frontend.to_string());
    Some(if ip.is_unspecified() { text.replacen(&ip.to_string(), "node", 1) } else { text })
}

fn policy(word: u32) -> Option<&'static str> {
    FrontendPolicy::ALL.into_iter().find(|(it, _)| *it as u32 == word).map(|(_, chain)| chain)
}

fn named(set: u32) -> &'static str {
    match set {
        0 => "any",
        1 => "external",
        _ => "internal",
    }
}

fn selector(word: u32) -> Option<String> {
    Some(match word {
        REFUSE => "refused".into(),
        DROP => "dropped".into(),
        word => {
            let Selector { set, count, affinity, .. } = Selector::of(MatchKey::Address, word)?;
            let affinity = if affinity > 0 { format!(" for {affinity} s") } else { String::new() };
            format!("endpoints={count} {}{affinity}", named(set))
        }
    })
}
