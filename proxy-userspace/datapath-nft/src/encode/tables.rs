//! Messages to nf_tables: tables, chains, rules, sets and elements.
//!
//! Invariant: every message names a table of ours.
//! The numbers are those of linux/netfilter/nf_tables.h.

use model::Family;
use netlink_packet_core::{NLM_F_ACK, NLM_F_APPEND, NLM_F_CREATE};

use crate::encode::{
    chain::Hook,
    elements::{Element, Value},
    expressions::Rule,
    schema::{Field, Map, MapData, length, list_name},
    verdict::{DATA_VALUE, DATA_VERDICT, ELEMENT},
};
use netlink::{Attribute, Message, Netfilter};

/// `NFNL_SUBSYS_NFTABLES`.
pub(crate) const SUBSYSTEM: u16 = 10;
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;

/// A command, or the notification of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    NewTable = 0,
    GetTable = 1,
    DeleteTable = 2,
    NewChain = 3,
    GetChain = 4,
    DeleteChain = 5,
    NewRule = 6,
    GetRule = 7,
    NewSet = 9,
    GetSet = 10,
    DeleteSet = 11,
    NewElements = 12,
    GetElements = 13,
    DeleteElements = 14,
    GetGeneration = 16,
}

impl Command {
    pub(crate) fn kind(self) -> u16 {
        SUBSYSTEM << 8 | self as u16
    }
}

/// `NFTA_GEN_ID`.
const GENERATION_ID: u16 = 1;

/// How many transactions have taken effect in this network namespace; it begins anew beyond 32 bits.
pub(crate) fn generation(netfilter: &mut Netfilter) -> Option<u32> {
    let message = Message {
        kind: Command::GetGeneration.kind(),
        // The kernel sends one answer, and then the acknowledgement.
        flags: NLM_F_ACK,
        family: 0,
        attributes: Vec::new(),
    };
    let mut id = None;
    netfilter.dump(&message, |it| id = netlink::find(it, GENERATION_ID).and_then(netlink::u32)).ok()?;
    id
}

/// The name of our tables, one in the family `ip` and one in `ip6`. Tables of other names are never touched.
pub const TABLE: &str = "kube-proxy-ebpf";
/// The name of the table of transactions that must be refused, to learn what the kernel can do.
pub(crate) const TRIAL_TABLE: &str = "kube-proxy-ebpf-check";
/// `NFTA_TABLE_FLAGS`.
pub(crate) const TABLE_FLAGS: u16 = 2;
/// `NFT_TABLE_F_DORMANT`: it gets no packets.
pub(crate) const TABLE_IS_DORMANT: u32 = 1;
/// `NFT_TABLE_F_OWNER` (Linux 5.12): only the socket that made it can change it, and a flush by others passes it by.
pub(crate) const TABLE_IS_OWNED: u32 = 2;
/// `NFT_TABLE_F_PERSIST` (Linux 6.9): it stays when its owner ends, until another process adopts it.
pub(crate) const TABLE_PERSISTS: u32 = 4;
/// `NFTA_TABLE_USERDATA`.
pub(crate) const TABLE_USERDATA: u16 = 6;
/// `NFTA_RULE_USERDATA`.
pub(crate) const RULE_USERDATA: u16 = 7;
/// `NFTA_TABLE_NAME`, and the attribute that names the table in all other messages.
pub(crate) const TABLE_NAME: u16 = 1;
/// `NFTA_CHAIN_NAME`.
pub(crate) const CHAIN_NAME: u16 = 3;
/// `NFTA_CHAIN_POLICY`.
pub(crate) const CHAIN_POLICY: u16 = 5;
/// `NF_ACCEPT`.
pub(crate) const ACCEPT: u32 = 1;
/// `NFTA_RULE_CHAIN`.
pub(crate) const RULE_CHAIN: u16 = 2;
/// `NFTA_SET_NAME`, and `NFTA_SET_ELEM_LIST_SET`.
pub(crate) const SET_NAME: u16 = 2;
/// `NFTA_SET_KEY_LEN`.
pub(crate) const SET_KEY_LENGTH: u16 = 5;
/// `NFTA_SET_DATA_LEN`.
pub(crate) const SET_DATA_LENGTH: u16 = 7;
/// `NFTA_SET_ELEM_LIST_ELEMENTS`.
pub(crate) const ELEMENTS: u16 = 3;
/// `NFTA_SET_ELEM_KEY`.
pub(crate) const ELEMENT_KEY: u16 = 1;
/// `NFTA_SET_ELEM_DATA`.
pub(crate) const ELEMENT_DATA: u16 = 2;
/// `NFTA_SET_ELEM_TIMEOUT`.
const ELEMENT_TIMEOUT: u16 = 4;
/// `NFTA_SET_ELEM_FLAGS`.
pub(crate) const ELEMENT_FLAGS: u16 = 3;
/// `NFT_SET_ELEM_INTERVAL_END`.
pub(crate) const INTERVAL_END: u32 = 1;

const SET_INTERVAL: u32 = 0x4;
const SET_MAP: u32 = 0x8;
const SET_TIMEOUT: u32 = 0x10;
const SET_DYNAMIC: u32 = 0x20;
/// `NFTA_SET_TIMEOUT`.
const SET_DEFAULT_TIMEOUT: u16 = 11;
/// `NFTA_SET_USERDATA`.
const SET_USERDATA: u16 = 13;
/// `NFT_DATA_VERDICT`.
const VERDICT_TYPE: u32 = 0xffff_ff00;

/// The maximum size of a list of elements in bytes: attributes have lengths of 16 bits.
const MAX_LIST_SIZE: usize = 60_000;
/// The capacity of each map of clients with session affinity; while it is full, new clients have none.
pub(crate) const AFFINITY_SIZE: u32 = 1 << 20;

/// Both families, in the order of writing.
pub(crate) const FAMILIES: [Family; 2] = [Family::V4, Family::V6];

/// The number of a family in messages (`NFPROTO_…`).
pub(crate) fn protocol(family: Family) -> u8 {
    match family {
        Family::V4 => 2,
        Family::V6 => 10,
    }
}

/// A message about our table of a family.
pub(crate) fn message(
    command: Command,
    flags: u16,
    family: Family,
    attributes: impl IntoIterator<Item = Attribute>,
) -> Message {
    let mut all = vec![Attribute::text(TABLE_NAME, TABLE)];
    all.extend(attributes);
    Message { kind: command.kind(), flags, family: protocol(family), attributes: all }
}

/// The same message about another table.
pub(crate) fn in_table(name: &str, message: Message) -> Message {
    let attributes = message.attributes.into_iter().map(|it| match it {
        Attribute::Value(TABLE_NAME, _) => Attribute::text(TABLE_NAME, name),
        other => other,
    });
    Message { attributes: attributes.collect(), ..message }
}

/// The message that begins a batch.
pub(crate) fn begin() -> Message {
    Message { kind: BATCH_BEGIN, flags: 0, family: 0, attributes: Vec::new() }
}

/// The message that ends a batch.
pub(crate) fn end() -> Message {
    Message { kind: BATCH_END, flags: 0, family: 0, attributes: Vec::new() }
}

/// Creates the table if it does not exist.
pub(crate) fn new_table(family: Family, comment: &str) -> Message {
    message(Command::NewTable, NLM_F_CREATE, family, [userdata(TABLE_USERDATA, comment)])
}

/// The same, owned by the socket that sends it; an existing table that persists and has no owner is adopted.
pub(crate) fn new_owned_table(family: Family, comment: &str) -> Message {
    let flags = Attribute::u32(TABLE_FLAGS, TABLE_IS_OWNED | TABLE_PERSISTS);
    message(Command::NewTable, NLM_F_CREATE, family, [userdata(TABLE_USERDATA, comment), flags])
}

/// Deletes the table with its contents.
pub(crate) fn delete_table(family: Family) -> Message {
    message(Command::DeleteTable, 0, family, [])
}

/// Creates a chain.
pub(crate) fn new_chain(family: Family, name: &str, hook: Option<Hook>) -> Message {
    let mut attributes = vec![Attribute::text(CHAIN_NAME, name)];
    if let Some(hook) = hook {
        let (kind, number, priority) = hook.place();
        let place = [Attribute::u32(1, number), Attribute::bytes(2, priority.to_be_bytes())];
        attributes.extend([Attribute::nested(4, place), Attribute::text(7, kind)]);
    }
    message(Command::NewChain, NLM_F_CREATE, family, attributes)
}

/// Deletes a chain with its rules; nothing may refer to it any more.
pub(crate) fn delete_chain(family: Family, name: &str) -> Message {
    message(Command::DeleteChain, 0, family, [Attribute::text(CHAIN_NAME, name)])
}

/// Appends a rule to a chain.
pub(crate) fn new_rule(family: Family, chain: &str, rule: &Rule) -> Message {
    let attributes = [
        Attribute::text(RULE_CHAIN, chain),
        Attribute::nested(4, rule.expressions()),
        userdata(RULE_USERDATA, &rule.comment),
    ];
    message(Command::NewRule, NLM_F_CREATE | NLM_F_APPEND, family, attributes)
}

/// The name of a map or a set.
pub(crate) fn set_name(map: Map, list: u32) -> String {
    if map.has_ranges() { list_name(list) } else { map.name().to_owned() }
}

/// Deletes the set of a list with its elements; nothing may refer to it any more.
pub(crate) fn delete_list(family: Family, list: u32) -> Message {
    let name = set_name(Map::SourceRanges, list);
    message(Command::DeleteSet, 0, family, [Attribute::text(SET_NAME, &name)])
}

/// Creates the set of a list of source ranges.
pub(crate) fn new_list(family: Family, list: u32) -> Message {
    new_set_named(family, Map::SourceRanges, &set_name(Map::SourceRanges, list), list)
}

/// Creates a map or a set, the `id`th of the batch.
pub(crate) fn new_set(family: Family, map: Map, id: u32) -> Message {
    new_set_named(family, map, map.name(), id)
}

fn new_set_named(family: Family, map: Map, name: &str, id: u32) -> Message {
    let kind = |fields: &[Field]| fields.iter().fold(0, |kind, it| kind << 6 | it.kind(family));
    let size = |fields: &[Field]| u32::try_from(length(fields, family)).unwrap_or_default();
    let mut flags = 0;
    let mut attributes = vec![
        Attribute::text(SET_NAME, name),
        Attribute::u32(4, kind(map.key())),
        Attribute::u32(SET_KEY_LENGTH, size(map.key())),
        Attribute::u32(10, id),
    ];
    match map.data() {
        MapData::None => {}
        MapData::Fields(fields) => {
            flags |= SET_MAP;
            attributes.push(Attribute::u32(6, kind(fields)));
            attributes.push(Attribute::u32(SET_DATA_LENGTH, size(fields)));
        }
        MapData::Verdict => {
            flags |= SET_MAP;
            attributes.push(Attribute::u32(6, VERDICT_TYPE));
            attributes.push(Attribute::u32(SET_DATA_LENGTH, 0));
        }
    }
    let mut description = Vec::new();
    if map.is_dynamic() {
        flags |= SET_TIMEOUT | SET_DYNAMIC;
        description.push(Attribute::u32(1, AFFINITY_SIZE));
    }
    if map.has_ranges() {
        flags |= SET_INTERVAL;
    }
    attributes.push(Attribute::u32(3, flags));
    attributes
        .extend(map.default_timeout().map(|it| Attribute::u64(SET_DEFAULT_TIMEOUT, u64::from(it) * 1000)));
    attributes.push(Attribute::bytes(SET_USERDATA, set_userdata(map)));
    if !description.is_empty() {
        attributes.push(Attribute::nested(9, description));
    }
    message(Command::NewSet, NLM_F_CREATE, family, attributes)
}

/// Adds or deletes elements of one map, in as few messages as possible.
pub(crate) fn elements<'a>(
    command: Command,
    family: Family,
    set: (Map, u32),
    elements: impl IntoIterator<Item = (&'a Element, &'a Value)>,
) -> Vec<Message> {
    elements_with(command, family, set, elements.into_iter().map(|it| element_attribute(it, command)))
}

/// Adds elements that expire.
pub(crate) fn expiring_elements<'a>(
    family: Family,
    map: Map,
    elements: impl IntoIterator<Item = &'a Element>,
    seconds: u32,
) -> Vec<Message> {
    let timeout = Attribute::u64(ELEMENT_TIMEOUT, u64::from(seconds) * 1000);
    let expiring = elements.into_iter().map(|it| {
        let key = [Attribute::bytes(DATA_VALUE, &*it.key.0)];
        Attribute::nested(ELEMENT, [Attribute::nested(ELEMENT_KEY, key), timeout.clone()])
    });
    elements_with(Command::NewElements, family, (map, 0), expiring)
}

fn elements_with(
    command: Command,
    family: Family,
    (map, list): (Map, u32),
    elements: impl Iterator<Item = Attribute>,
) -> Vec<Message> {
    let flags = if command == Command::NewElements { NLM_F_CREATE } else { 0 };
    let name = Attribute::text(SET_NAME, &set_name(map, list));
    let mut messages = Vec::new();
    let mut some = Vec::new();
    let mut flush = |some: &mut Vec<u8>| {
        if !some.is_empty() {
            let some = Attribute::encoded(ELEMENTS, std::mem::take(some));
            messages.push(message(command, flags, family, [name.clone(), some]));
        }
    };
    for it in elements {
        if some.len() + it.length() > MAX_LIST_SIZE {
            flush(&mut some);
        }
        it.append(&mut some);
    }
    flush(&mut some);
    messages
}

fn element_attribute((element, value): (&Element, &Value), command: Command) -> Attribute {
    let data = |bytes: &[u8]| [Attribute::bytes(DATA_VALUE, bytes)];
    let mut attributes = vec![Attribute::nested(ELEMENT_KEY, data(&element.key.0))];
    match value {
        // It is a part of the key.
        Value::RangeEnd => attributes.push(Attribute::u32(ELEMENT_FLAGS, INTERVAL_END)),
        _ if command == Command::DeleteElements => {}
        Value::None => {}
        Value::Data(it) => attributes.push(Attribute::nested(ELEMENT_DATA, data(&it.0))),
        Value::Verdict(it) => {
            let verdict = Attribute::nested(DATA_VERDICT, it.attributes());
            attributes.push(Attribute::nested(ELEMENT_DATA, [verdict]));
        }
    }
    Attribute::nested(ELEMENT, attributes)
}

/// A comment as nft writes it (`NFTNL_UDATA_…_COMMENT`): its type, its length, and the text with a zero byte.
fn userdata(kind: u16, comment: &str) -> Attribute {
    let text = comment.as_bytes();
    let text = &text[..text.len().min(120)];
    let length = u8::try_from(text.len() + 1).unwrap_or(u8::MAX);
    Attribute::bytes(kind, [&[0, length], text, &[0]].concat())
}

/// What nft notes of a set (`NFTNL_UDATA_SET_…`), without which it lists numbers in the wrong byte order: the byte orders of key
/// and data, and that ranges are not merged; each with type, length, and value.
fn set_userdata(map: Map) -> Vec<u8> {
    let order = |fields: &[Field]| match fields {
        [only] => only.byte_order(),
        _ => Field::Address.byte_order(),
    };
    let data = match map.data() {
        MapData::Fields(fields) => Some((1, order(fields))),
        MapData::None | MapData::Verdict => None,
    };
    let all = [(0, order(map.key()))].into_iter().chain(data).chain([(2, 0)]);
    all.flat_map(|(kind, value): (u8, u32)| [&[kind, 4][..], &value.to_ne_bytes()].concat()).collect()
}

/// The comment in what [`userdata`] wrote.
pub(crate) fn comment(userdata: &[u8]) -> String {
    netlink::text(userdata.get(2..).unwrap_or_default())
}
