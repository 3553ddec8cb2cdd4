//! The contents of our tables: listed at a start, and when others have changed them.
//!
//! Invariant: rules are compared by their comments, elements by their bytes.
//! A rule can only be changed by deleting or replacing it, and then its comment is gone.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use datapath::{FrontendAddress, unspecified};
use model::{Family, Protocol};
use nix::errno::Errno;

use crate::{
    encode::{
        elements::{Element, Elements, Value},
        expressions::{Verdict, protocol_family},
        schema::{Bytes, Field, Map, Parts, list_of},
        tables::{TABLE, comment, message, set_name},
    },
    error::{Error, TABLES},
    plan::{
        affinity_numbers::{Numbers, SERVICE_PORT_MASK},
        endpoint_selector::slot_of,
        layout::PreviousSlots,
    },
};
use netlink::{Attribute, Message, Netfilter, each, find, text, u32, uapi::*};

/// How often to start over because the table changed while it was listed.
const ATTEMPTS: usize = 20;

/// The table of one family.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Snapshot {
    pub(crate) comment: String,
    /// Its flags (`NFT_TABLE_F_…`).
    pub(crate) flags: u32,
    /// The policies of its base chains (`NF_…`).
    pub(crate) policies: BTreeMap<String, u32>,
    /// Its chains, each with the comments of its rules.
    pub(crate) chains: BTreeMap<String, Vec<String>>,
    /// Its sets, each with the lengths of keys and values.
    pub(crate) sets: BTreeMap<String, (u32, u32)>,
    /// The elements of known sets.
    pub(crate) elements: Elements,
    /// The UDP endpoints that were removed in the last moments.
    pub(crate) removed_udp: BTreeSet<SocketAddr>,
}

pub(crate) fn retried<T>(mut attempt: impl FnMut() -> Result<T, Error>) -> Result<T, Error> {
    for _ in 1..ATTEMPTS {
        match attempt() {
            Err(Error::Read { errno: Errno::EINTR | Errno::ENOENT, .. }) => {}
            result => return result,
        }
    }
    attempt()
}

impl Snapshot {
    /// Reads the tables that exist, of their elements only those that are wanted.
    pub(crate) fn read(
        netfilter: &mut Netfilter,
        is_wanted: impl Fn(&Element) -> bool,
    ) -> Result<BTreeMap<Family, Self>, Error> {
        let mut tables = BTreeMap::new();
        for family in Family::ALL {
            let found = retried(|| {
                let mut elements = Elements::new();
                let found = Self::walk(netfilter, family, &mut |it, value| {
                    if is_wanted(&it) {
                        elements.insert(it, value);
                    }
                })?;
                Ok(found.map(|it| Self { elements, ..it }))
            })?;
            tables.extend(found.map(|it| (family, it)));
        }
        Ok(tables)
    }

    /// Counts elements of the table of a family, and keeps none; also whether packets meet the table, by base chains. `None` if it
    /// does not exist.
    pub(crate) fn count(
        netfilter: &mut Netfilter,
        family: Family,
        is_counted: impl Fn(&Element) -> bool,
    ) -> Result<Option<(usize, bool)>, Error> {
        retried(|| {
            let mut count = 0;
            let found = Self::walk(netfilter, family, &mut |it, _| count += usize::from(is_counted(&it)))?;
            Ok(found.map(|it| (count, !it.policies.is_empty())))
        })
    }

    /// The comment and the flags of the table of a family; `None` if it does not exist.
    pub(crate) fn find(netfilter: &mut Netfilter, family: Family) -> Result<Option<(String, u32)>, Error> {
        let mut found = None;
        let all = Message::nf_tables(NFT_MSG_GETTABLE, protocol_family(family), []);
        let read = netfilter.dump(&all, |it| {
            if find(it, NFTA_TABLE_NAME).is_some_and(|it| text(it) == TABLE) {
                let flags = find(it, NFTA_TABLE_FLAGS).and_then(u32).unwrap_or_default();
                found = Some((find(it, NFTA_TABLE_USERDATA).map(comment).unwrap_or_default(), flags));
            }
        });
        match read {
            // Tables changed while they were listed; those that were listed are valid.
            Ok(()) | Err(Errno::EINTR) => Ok(found),
            Err(errno) => Err(Error::Read { what: TABLES, errno }),
        }
    }

    /// Hands on the elements of known sets of both tables, of which none is kept; an error if they change meanwhile.
    pub(crate) fn each_element(
        netfilter: &mut Netfilter,
        with: &mut dyn FnMut(Element, Value),
    ) -> Result<(), Error> {
        Family::ALL.into_iter().try_for_each(|it| Self::walk(netfilter, it, with).map(drop))
    }

    /// Reads everything but the elements of known sets, which are handed on.
    fn walk(
        netfilter: &mut Netfilter,
        family: Family,
        with: &mut dyn FnMut(Element, Value),
    ) -> Result<Option<Self>, Error> {
        let Some((comment, flags)) = Self::find(netfilter, family)? else { return Ok(None) };
        let mut snapshot = Self { comment, flags, ..Self::default() };
        // Lists the objects of our table of a kind, each with its attribute that names a chain or a set.
        let mut list = |command, what, name, each: &mut dyn FnMut(String, &[u8])| {
            let listed = each_object(netfilter, &message(command, 0, family, []), name, each);
            listed.map_err(|errno| Error::Read { what, errno })
        };
        list(NFT_MSG_GETCHAIN, "chains", NFTA_CHAIN_NAME, &mut |name, it| {
            if let Some(policy) = find(it, NFTA_CHAIN_POLICY).and_then(u32) {
                snapshot.policies.insert(name.clone(), policy);
            }
            snapshot.chains.entry(name).or_default();
        })?;
        list(NFT_MSG_GETRULE, "rules", NFTA_RULE_CHAIN, &mut |chain, it| {
            let comment = find(it, NFTA_RULE_USERDATA).map(self::comment).unwrap_or_default();
            snapshot.chains.entry(chain).or_default().push(comment);
        })?;
        list(NFT_MSG_GETSET, "sets", NFTA_SET_NAME, &mut |name, it| {
            let length = |kind| find(it, kind).and_then(u32).unwrap_or_default();
            snapshot.sets.insert(name, (length(NFTA_SET_KEY_LEN), length(NFTA_SET_DATA_LEN)));
        })?;
        walk_counters(netfilter, family, |name, _| {
            with(Element::new(family, Map::Counters, Bytes::name(&name)), Value::None);
        })
        .map_err(|errno| Error::Read { what: "counters", errno })?;
        for map in Map::all().filter(|it| !it.is_dynamic()) {
            if snapshot.sets.contains_key(map.name()) {
                walk_elements(netfilter, family, (map, 0), with)?;
            }
        }
        if snapshot.sets.contains_key(Map::RemovedUdp.name()) {
            walk_elements(netfilter, family, (Map::RemovedUdp, 0), &mut |it, _| {
                snapshot.removed_udp.extend(endpoint(&it.key, family));
            })?;
        }
        for list in snapshot.lists() {
            walk_elements(netfilter, family, (Map::SourceRanges, list), with)?;
        }
        Ok(Some(snapshot))
    }

    /// Its chains, each before those that its rules name: base chains first, and of the others a name begins with that of the one
    /// that leads there.
    pub(crate) fn chains_from_the_hooks(&self) -> impl Iterator<Item = &String> {
        let is_base = |it: &&String| self.policies.contains_key(*it);
        let others = self.chains.keys().filter(move |it| !is_base(it));
        self.chains.keys().filter(is_base).chain(others)
    }

    /// The lists of source ranges that have a set.
    pub(crate) fn lists(&self) -> BTreeSet<u32> {
        self.sets.keys().filter_map(|it| list_of(it)).collect()
    }

    /// The slot of each endpoint, and the numbers of session affinity.
    pub(crate) fn previous(&self, previous: &mut PreviousSlots) {
        let members = Members::of(&self.elements);
        let mut slots: BTreeMap<(FrontendAddress, u32), BTreeMap<u32, SocketAddr>> = BTreeMap::new();
        for (element, value) in &self.elements {
            let mut key = element.parts();
            match element.map {
                Map::Endpoints | Map::AffinityEndpoints | Map::NodeEndpoints | Map::NodeAffinityEndpoints => {
                    if let Some(port) = frontend_of(element, &mut key)
                        && let Some(slot) = key.number()
                        && let Some(endpoint) = members.endpoint(element, value)
                    {
                        let (set, slot) = slot_of(slot);
                        slots.entry((port, set)).or_default().insert(slot, endpoint);
                    }
                }
                Map::ServicePorts | Map::NodeServicePorts => {
                    if let Some(frontend) = frontend_of(element, &mut key)
                        && let Some(number) = number_in(value, element.family)
                        // A table of another layout may have anything there.
                        && Numbers::is_service_port(number)
                    {
                        let mut numbers = Numbers::new(number);
                        for (number, endpoint) in members.of_service_port(element.family, number) {
                            numbers.restore(number, endpoint);
                        }
                        previous.taken.insert((element.family, number));
                        previous.numbers.insert(frontend, numbers);
                    }
                }
                _ => {}
            }
        }
        previous.slots.extend(slots.into_iter().map(|(key, slots)| (key, slots.into_values().collect())));
    }

    /// The endpoints of UDP ports.
    pub(crate) fn udp_endpoints(&self) -> Vec<SocketAddr> {
        let members = Members::of(&self.elements);
        let udp = self.elements.iter().filter_map(|(element, value)| {
            let (Map::Endpoints | Map::AffinityEndpoints | Map::NodeEndpoints | Map::NodeAffinityEndpoints) =
                element.map
            else {
                return None;
            };
            let frontend = frontend_of(element, &mut element.parts())?;
            if frontend.protocol == Protocol::Udp { members.endpoint(element, value) } else { None }
        });
        udp.collect()
    }
}

/// The members of service ports with session affinity, among elements.
#[derive(Debug, Default)]
pub(crate) struct Members {
    /// By the number of the service port and that of the member.
    all: BTreeMap<(Family, u32, u32), SocketAddr>,
}

impl Members {
    pub(crate) fn of(elements: &Elements) -> Self {
        let mut members = Self::default();
        elements.iter().for_each(|(element, value)| members.add(element, value));
        members
    }

    /// Adds an element, if it is a member.
    pub(crate) fn add(&mut self, element: &Element, value: &Value) {
        let Value::Data(it) = value else { return };
        if !matches!(element.map, Map::Members | Map::MembersExternal | Map::MembersInternal) {
            return;
        }
        let mut key = element.parts();
        let number = key.protocol().and_then(|_| key.number());
        if let Some((number, endpoint)) = number.zip(endpoint(it, element.family)) {
            self.all.insert((element.family, number & SERVICE_PORT_MASK, number), endpoint);
        }
    }

    /// Those of a service port, each with its number.
    fn of_service_port(&self, family: Family, number: u32) -> impl Iterator<Item = (u32, SocketAddr)> {
        let range = (family, number, 0)..=(family, number, u32::MAX);
        self.all.range(range).map(|((.., number), endpoint)| (*number, *endpoint))
    }

    /// The endpoint in a slot.
    pub(crate) fn endpoint(&self, element: &Element, value: &Value) -> Option<SocketAddr> {
        let Value::Data(it) = value else { return None };
        match element.map {
            Map::AffinityEndpoints | Map::NodeAffinityEndpoints => {
                let number = Parts::of(it, element.family).number()?;
                self.all.get(&(element.family, number & SERVICE_PORT_MASK, number)).copied()
            }
            _ => endpoint(it, element.family),
        }
    }
}

pub(crate) fn number_in(value: &Value, family: Family) -> Option<u32> {
    match value {
        Value::Data(it) => Parts::of(it, family).number(),
        _ => None,
    }
}

/// Lists a set.
fn walk_elements(
    netfilter: &mut Netfilter,
    family: Family,
    (map, list): (Map, u32),
    with: &mut dyn FnMut(Element, Value),
) -> Result<(), Error> {
    let listed = each_element(netfilter, family, (map, list), |key, element| {
        with(Element { family, map, list, key: Bytes(key.into()) }, value(element));
    });
    listed.map_err(|errno| Error::Read { what: "elements", errno })
}

/// The data of an element, from its attributes.
pub(crate) fn value(element: &[u8]) -> Value {
    let flags = find(element, NFTA_SET_ELEM_FLAGS).and_then(u32).unwrap_or_default();
    let data = || find(find(element, NFTA_SET_ELEM_DATA)?, NFTA_DATA_VALUE);
    let verdict = || {
        let verdict = find(find(element, NFTA_SET_ELEM_DATA)?, NFTA_DATA_VERDICT)?;
        let chain = find(verdict, NFTA_VERDICT_CHAIN).map(text);
        Verdict::of(find(verdict, NFTA_VERDICT_CODE).and_then(u32)?, chain)
    };
    if let Some(name) = find(element, NFTA_SET_ELEM_OBJREF) {
        return Value::Counter(Bytes::name(&text(name)));
    }
    match data() {
        Some(data) => Value::Data(Bytes(data.into())),
        None if flags & NFT_SET_ELEM_INTERVAL_END != 0 => Value::RangeEnd,
        None => verdict().map_or(Value::None, Value::Verdict),
    }
}

/// Lists the counters of a table: calls back for each, with its name and its attributes.
pub(crate) fn walk_counters(
    netfilter: &mut Netfilter,
    family: Family,
    with: impl FnMut(String, &[u8]),
) -> Result<(), Errno> {
    let counters = Attribute::u32(NFTA_OBJ_TYPE, NFT_OBJECT_COUNTER);
    each_object(netfilter, &message(NFT_MSG_GETOBJ, 0, family, [counters]), NFTA_OBJ_NAME, with)
}

/// Lists objects of our table: calls back for each, with its attribute of the kind `name`, and with all.
fn each_object(
    netfilter: &mut Netfilter,
    request: &Message,
    name: u16,
    mut with: impl FnMut(String, &[u8]),
) -> Result<(), Errno> {
    netfilter.dump(request, |it| {
        if find(it, NFTA_TABLE_NAME).is_some_and(|it| text(it) == TABLE)
            && let Some(name) = find(it, name)
        {
            with(text(name), it);
        }
    })
}

/// Lists a set: calls back for each element, with its key and its attributes.
pub(crate) fn each_element(
    netfilter: &mut Netfilter,
    family: Family,
    (map, list): (Map, u32),
    mut with: impl FnMut(&[u8], &[u8]),
) -> Result<(), Errno> {
    let name = Attribute::text(NFTA_SET_NAME, &set_name(map, list));
    let request = message(NFT_MSG_GETSETELEM, 0, family, [name]);
    netfilter.dump(&request, |it| keys(it).for_each(|(key, element)| with(key, element)))
}

/// The elements in a message, each with its key.
pub(crate) fn keys(message: &[u8]) -> impl Iterator<Item = (&[u8], &[u8])> {
    let elements = find(message, NFTA_SET_ELEM_LIST_ELEMENTS).into_iter().flat_map(each);
    elements.filter_map(|(_, it)| Some((find(find(it, NFTA_SET_ELEM_KEY)?, NFTA_DATA_VALUE)?, it)))
}

/// The frontend at the beginning of an element's key; a node port is one at the unspecified address.
pub(crate) fn frontend_of(element: &Element, key: &mut Parts<'_>) -> Option<FrontendAddress> {
    let is_node_port = element.map.key().first() == Some(&Field::Protocol);
    let ip = if is_node_port { unspecified(element.family) } else { key.address()? };
    let protocol = Protocol::of_number(key.protocol()?)?;
    Some(FrontendAddress { address: SocketAddr::new(ip, key.port()?), protocol })
}

pub(crate) fn endpoint(value: &Bytes, family: Family) -> Option<SocketAddr> {
    let mut parts = Parts::of(value, family);
    let address: IpAddr = parts.address()?;
    Some(SocketAddr::new(address, parts.port()?))
}
