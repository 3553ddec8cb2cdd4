//! Messages to nf_tables: tables, chains, rules, sets and elements.
//!
//! Invariant: every message names a table of ours.

use model::Family;
use netlink_packet_core::{NLM_F_ACK, NLM_F_APPEND, NLM_F_CREATE};

use crate::encode::{
    chain::Hook,
    elements::{Element, Value},
    expressions::{Rule, protocol_family},
    schema::{Bytes, Field, Map, MapData, length, list_name},
};
use netlink::{Attribute, Message, Netfilter, uapi::*};

/// How many transactions have taken effect in this network namespace; it begins anew beyond 32 bits.
pub(crate) fn generation(netfilter: &mut Netfilter) -> Option<u32> {
    // The kernel sends one answer, and then the acknowledgment.
    let message = Message { flags: NLM_F_ACK, ..Message::nf_tables(NFT_MSG_GETGEN, 0, []) };
    let mut id = None;
    netfilter.dump(&message, |it| id = netlink::find(it, NFTA_GEN_ID).and_then(netlink::u32)).ok()?;
    id
}

/// The name of our tables, one in the family `ip` and one in `ip6`. Tables of other names are never touched.
pub const TABLE: &str = "kube-proxy-ebpf";
/// The name of the table of transactions that must be refused, to learn what the kernel can do.
pub(crate) const TRIAL_TABLE: &str = "kube-proxy-ebpf-check";
/// The maximum size of a list of elements in bytes: attributes have lengths of 16 bits.
const MAX_LIST_SIZE: usize = 60_000;
/// The capacity of each map of clients with session affinity; while it is full, new clients have none.
pub(crate) const AFFINITY_SIZE: u32 = 1 << 20;

/// A message about our table of a family.
pub(crate) fn message(
    command: u16,
    flags: u16,
    family: Family,
    attributes: impl IntoIterator<Item = Attribute>,
) -> Message {
    let mut all = vec![Attribute::text(NFTA_TABLE_NAME, TABLE)];
    all.extend(attributes);
    Message { flags, ..Message::nf_tables(command, protocol_family(family), all) }
}

/// Has a message be about another table.
pub(crate) fn in_table(name: &str, mut message: Message) -> Message {
    for it in message.attributes.iter_mut().filter(|it| it.kind == NFTA_TABLE_NAME) {
        *it = Attribute::text(NFTA_TABLE_NAME, name);
    }
    message
}

/// Creates the table if it does not exist.
pub(crate) fn new_table(family: Family, comment: &str) -> Message {
    message(NFT_MSG_NEWTABLE, NLM_F_CREATE, family, [userdata(NFTA_TABLE_USERDATA, comment)])
}

/// Creates the table, owned by the socket that sends the message; an existing table that persists and has no owner is adopted.
pub(crate) fn new_owned_table(family: Family, comment: &str) -> Message {
    let flags = Attribute::u32(NFTA_TABLE_FLAGS, NFT_TABLE_F_OWNER | NFT_TABLE_F_PERSIST);
    message(NFT_MSG_NEWTABLE, NLM_F_CREATE, family, [userdata(NFTA_TABLE_USERDATA, comment), flags])
}

pub(crate) fn delete_table(family: Family) -> Message {
    message(NFT_MSG_DELTABLE, 0, family, [])
}

pub(crate) fn new_chain(family: Family, name: &str, hook: Option<Hook>) -> Message {
    let mut attributes = vec![Attribute::text(NFTA_CHAIN_NAME, name)];
    if let Some(Hook { kind, number, priority }) = hook {
        let place = [
            Attribute::u32(NFTA_HOOK_HOOKNUM, number),
            Attribute::bytes(NFTA_HOOK_PRIORITY, priority.to_be_bytes()),
        ];
        attributes
            .extend([Attribute::nested(NFTA_CHAIN_HOOK, place), Attribute::text(NFTA_CHAIN_TYPE, kind)]);
    }
    message(NFT_MSG_NEWCHAIN, NLM_F_CREATE, family, attributes)
}

/// Deletes a chain with its rules; nothing may refer to it any more.
pub(crate) fn delete_chain(family: Family, name: &str) -> Message {
    message(NFT_MSG_DELCHAIN, 0, family, [Attribute::text(NFTA_CHAIN_NAME, name)])
}

pub(crate) fn new_rule(family: Family, chain: &str, rule: &Rule) -> Message {
    let attributes = [
        Attribute::text(NFTA_RULE_CHAIN, chain),
        Attribute::encoded(NFTA_RULE_EXPRESSIONS, rule.expressions.clone()),
        userdata(NFTA_RULE_USERDATA, &rule.comment),
    ];
    message(NFT_MSG_NEWRULE, NLM_F_CREATE | NLM_F_APPEND, family, attributes)
}

pub(crate) fn set_name(map: Map, list: u32) -> String {
    if map.has_ranges() { list_name(list) } else { map.name().to_owned() }
}

/// Deletes the set of a list with its elements; nothing may refer to it any more.
pub(crate) fn delete_list(family: Family, list: u32) -> Message {
    let name = set_name(Map::SourceRanges, list);
    message(NFT_MSG_DELSET, 0, family, [Attribute::text(NFTA_SET_NAME, &name)])
}

/// Creates a map or a set. Its number in the batch is `id`; a set of source ranges has that of its list.
pub(crate) fn new_set(family: Family, map: Map, id: u32) -> Message {
    let kind = |fields: &[Field]| fields.iter().fold(0, |kind, it| kind << 6 | it.kind(family));
    let size = |fields: &[Field]| u32::try_from(length(fields, family)).unwrap_or_default();
    let mut flags = 0;
    let mut attributes = vec![
        Attribute::text(NFTA_SET_NAME, &set_name(map, id)),
        Attribute::u32(NFTA_SET_KEY_TYPE, kind(map.key())),
        Attribute::u32(NFTA_SET_KEY_LEN, size(map.key())),
        Attribute::u32(NFTA_SET_ID, id),
    ];
    match map.data() {
        MapData::None => {}
        MapData::Fields(fields) => {
            flags |= NFT_SET_MAP;
            attributes.push(Attribute::u32(NFTA_SET_DATA_TYPE, kind(fields)));
            attributes.push(Attribute::u32(NFTA_SET_DATA_LEN, size(fields)));
        }
        MapData::Verdict => {
            flags |= NFT_SET_MAP;
            attributes.push(Attribute::u32(NFTA_SET_DATA_TYPE, NFT_DATA_VERDICT));
            attributes.push(Attribute::u32(NFTA_SET_DATA_LEN, 0));
        }
        MapData::Counter => {
            flags |= NFT_SET_OBJECT;
            attributes.push(Attribute::u32(NFTA_SET_OBJ_TYPE, NFT_OBJECT_COUNTER));
        }
    }
    if map.is_dynamic() {
        flags |= NFT_SET_TIMEOUT | NFT_SET_EVAL;
    }
    if map.has_ranges() {
        flags |= NFT_SET_INTERVAL;
    }
    attributes.push(Attribute::u32(NFTA_SET_FLAGS, flags));
    attributes.extend(map.default_timeout().map(|it| Attribute::u64(NFTA_SET_TIMEOUT, u64::from(it) * 1000)));
    attributes.push(Attribute::bytes(NFTA_SET_USERDATA, set_userdata(map)));
    if map.is_dynamic() {
        attributes
            .push(Attribute::nested(NFTA_SET_DESC, [Attribute::u32(NFTA_SET_DESC_SIZE, AFFINITY_SIZE)]));
    }
    message(NFT_MSG_NEWSET, NLM_F_CREATE, family, attributes)
}

/// Adds or deletes elements, which are sorted by set, in as few messages as possible.
pub(crate) fn elements<'a>(
    command: u16,
    family: Family,
    elements: impl IntoIterator<Item = (&'a Element, &'a Value)>,
) -> Vec<Message> {
    let flags = if command == NFT_MSG_NEWSETELEM { NLM_F_CREATE } else { 0 };
    // The content of each message, with the set that it is about.
    let mut contents: Vec<((Map, u32), Vec<u8>)> = Vec::new();
    for (element, value) in elements {
        let set = (element.map, element.list);
        let attribute = element_attribute((element, value), command);
        match contents.last_mut() {
            Some((same, some)) if *same == set && some.len() + attribute.length() <= MAX_LIST_SIZE => {
                attribute.append(some);
            }
            _ => {
                let mut some = Vec::new();
                attribute.append(&mut some);
                contents.push((set, some));
            }
        }
    }
    let message = |((map, list), some)| {
        let name = Attribute::text(NFTA_SET_ELEM_LIST_SET, &set_name(map, list));
        message(command, flags, family, [name, Attribute::encoded(NFTA_SET_ELEM_LIST_ELEMENTS, some)])
    };
    contents.into_iter().map(message).collect()
}

/// Creates counters, those that do not exist, or deletes them; nothing may refer to these any more.
pub(crate) fn counters<'a>(
    command: u16,
    family: Family,
    names: impl IntoIterator<Item = &'a Bytes>,
) -> Vec<Message> {
    let flags = if command == NFT_MSG_NEWOBJ { NLM_F_CREATE } else { 0 };
    let counter = |name: &Bytes| {
        let attributes = [
            Attribute::bytes(NFTA_OBJ_NAME, terminated(name)),
            Attribute::u32(NFTA_OBJ_TYPE, NFT_OBJECT_COUNTER),
            Attribute::nested(NFTA_OBJ_DATA, []),
        ];
        message(command, flags, family, attributes)
    };
    names.into_iter().map(counter).collect()
}

/// A name with its zero byte.
fn terminated(name: &Bytes) -> Vec<u8> {
    [&name.0[..], &[0]].concat()
}

fn element_attribute((element, value): (&Element, &Value), command: u16) -> Attribute {
    let data = |bytes: &[u8]| [Attribute::bytes(NFTA_DATA_VALUE, bytes)];
    let mut attributes = vec![Attribute::nested(NFTA_SET_ELEM_KEY, data(&element.key.0))];
    match value {
        // It is a part of the key.
        Value::RangeEnd => attributes.push(Attribute::u32(NFTA_SET_ELEM_FLAGS, NFT_SET_ELEM_INTERVAL_END)),
        _ if command == NFT_MSG_DELSETELEM => {}
        Value::None => {}
        Value::Expiring(seconds) => {
            attributes.push(Attribute::u64(NFTA_SET_ELEM_TIMEOUT, u64::from(*seconds) * 1000));
        }
        Value::Data(it) => attributes.push(Attribute::nested(NFTA_SET_ELEM_DATA, data(&it.0))),
        Value::Verdict(it) => {
            let verdict = Attribute::nested(NFTA_DATA_VERDICT, it.attributes());
            attributes.push(Attribute::nested(NFTA_SET_ELEM_DATA, [verdict]));
        }
        Value::Counter(name) => attributes.push(Attribute::bytes(NFTA_SET_ELEM_OBJREF, terminated(name))),
    }
    Attribute::nested(NFTA_LIST_ELEM, attributes)
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
        MapData::None | MapData::Verdict | MapData::Counter => None,
    };
    let all = [(0, order(map.key()))].into_iter().chain(data).chain([(2, 0)]);
    all.flat_map(|(kind, value): (u8, u32)| [&[kind, 4][..], &value.to_ne_bytes()].concat()).collect()
}

/// The comment in what [`userdata`] wrote.
pub(crate) fn comment(userdata: &[u8]) -> String {
    netlink::text(userdata.get(2..).unwrap_or_default())
}
