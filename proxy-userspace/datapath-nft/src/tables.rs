//! The requests to nftables: tables, chains, rules, sets and elements, as messages.
//!
//! The one rule: a message says one thing about one table of ours.
//! The numbers are those of linux/netfilter/nf_tables.h.

use model::Family;
use netlink_packet_core::{NLM_F_APPEND, NLM_F_CREATE};

use crate::{
    TABLE,
    elements::{Element, Value},
    expressions::Rule,
    schema::{Field, Leads, Map, length},
};
use netlink::{Attribute, Message};

/// `NFNL_SUBSYS_NFTABLES`.
pub(super) const SUBSYSTEM: u16 = 10;
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;

/// A request, or news of one that was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Command {
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
    NewElements = 12,
    GetElements = 13,
    DeleteElements = 14,
}

impl Command {
    pub(super) fn kind(self) -> u16 {
        SUBSYSTEM << 8 | self as u16
    }
}

/// `NFTA_LIST_ELEM`.
pub(super) const ELEMENT: u16 = 1;
/// `NFTA_DATA_VALUE`.
pub(super) const DATA_VALUE: u16 = 1;
/// `NFTA_DATA_VERDICT`.
pub(super) const DATA_VERDICT: u16 = 2;
/// `NFTA_TABLE_FLAGS`.
pub(super) const TABLE_FLAGS: u16 = 2;
/// `NFT_TABLE_F_DORMANT`: no packet comes to it.
pub(super) const TABLE_IS_DORMANT: u32 = 1;
/// `NFTA_TABLE_USERDATA`.
pub(super) const TABLE_USERDATA: u16 = 6;
/// `NFTA_RULE_USERDATA`.
pub(super) const RULE_USERDATA: u16 = 7;
/// The name of a table in messages about it, and the table's in all others.
pub(super) const TABLE_NAME: u16 = 1;
/// `NFTA_CHAIN_NAME`.
pub(super) const CHAIN_NAME: u16 = 3;
/// `NFTA_CHAIN_POLICY`.
pub(super) const CHAIN_POLICY: u16 = 5;
/// `NF_ACCEPT`.
pub(super) const ACCEPT: u32 = 1;
/// `NFTA_RULE_CHAIN`.
pub(super) const RULE_CHAIN: u16 = 2;
/// `NFTA_SET_NAME`, and `NFTA_SET_ELEM_LIST_SET`.
pub(super) const SET_NAME: u16 = 2;
/// `NFTA_SET_KEY_LEN`.
pub(super) const SET_KEY_LENGTH: u16 = 5;
/// `NFTA_SET_DATA_LEN`.
pub(super) const SET_DATA_LENGTH: u16 = 7;
/// `NFTA_SET_ELEM_LIST_ELEMENTS`.
pub(super) const ELEMENTS: u16 = 3;
/// `NFTA_SET_ELEM_KEY`.
pub(super) const ELEMENT_KEY: u16 = 1;
/// `NFTA_SET_ELEM_DATA`.
pub(super) const ELEMENT_DATA: u16 = 2;
/// `NFTA_SET_ELEM_KEY_END`.
pub(super) const ELEMENT_KEY_END: u16 = 10;
/// `NFTA_VERDICT_CODE`.
pub(super) const VERDICT_CODE: u16 = 1;
/// `NFTA_VERDICT_CHAIN`.
pub(super) const VERDICT_CHAIN: u16 = 2;

/// `NF_DROP`.
const DROP: i32 = 0;
/// `NFT_JUMP`.
const JUMP: i32 = -3;
/// `NFT_GOTO`.
const GOTO: i32 = -4;
/// `NFT_RETURN`.
const RETURN: i32 = -5;

const SET_INTERVAL: u32 = 0x4;
const SET_MAP: u32 = 0x8;
const SET_TIMEOUT: u32 = 0x10;
const SET_DYNAMIC: u32 = 0x20;
const SET_CONCATENATION: u32 = 0x80;
/// `NFT_DATA_VERDICT`.
const VERDICT_TYPE: u32 = 0xffff_ff00;

/// The most that a list of elements may take: attributes have lengths of 16 bits.
const LIST: usize = 60_000;
/// How many clients are remembered at a time; those that come later are not, until others are forgotten.
const AFFINITY_SIZE: u32 = 1 << 20;

/// What is done with a packet.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Verdict {
    /// It is lost.
    Drop,
    /// Another chain goes on with it, and then this one.
    Jump(String),
    /// Another chain goes on with it.
    Goto(String),
    /// The chain that came here goes on.
    Return,
}

impl Verdict {
    /// As the kernel takes it.
    pub(super) fn attributes(&self) -> Vec<Attribute> {
        let (code, chain) = match self {
            Self::Drop => (DROP, None),
            Self::Jump(chain) => (JUMP, Some(chain)),
            Self::Goto(chain) => (GOTO, Some(chain)),
            Self::Return => (RETURN, None),
        };
        let mut attributes = vec![Attribute::bytes(VERDICT_CODE, code.to_be_bytes())];
        attributes.extend(chain.map(|it| Attribute::text(VERDICT_CHAIN, it)));
        attributes
    }

    /// From what the kernel says.
    pub(super) fn of(code: u32, chain: Option<String>) -> Option<Self> {
        match (code.cast_signed(), chain) {
            (DROP, _) => Some(Self::Drop),
            (JUMP, Some(chain)) => Some(Self::Jump(chain)),
            (GOTO, Some(chain)) => Some(Self::Goto(chain)),
            (RETURN, _) => Some(Self::Return),
            _ => None,
        }
    }
}

/// Where packets come to a chain from the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hook {
    /// From outside, before it is known where they go.
    Prerouting,
    /// From a program on this host.
    Output,
    /// [`Hook::Prerouting`] once more, for packets that nobody has translated there.
    PreroutingAgain,
    /// [`Hook::Output`] once more, for packets that nobody has translated there.
    OutputAgain,
    /// On their way out.
    Postrouting,
}

impl Hook {
    /// The type of its chains, `NF_INET_…`, and the priority (`NF_IP_PRI_NAT_DST`, `NF_IP_PRI_NAT_SRC`).
    fn place(self) -> (&'static str, u32, i32) {
        match self {
            Self::Prerouting => ("nat", 0, -100),
            Self::Output => ("nat", 3, -100),
            Self::PreroutingAgain => ("nat", 0, -99),
            Self::OutputAgain => ("nat", 3, -99),
            Self::Postrouting => ("nat", 4, 100),
        }
    }
}

/// The number of a family in messages (`NFPROTO_…`).
pub(super) fn protocol(family: Family) -> u8 {
    match family {
        Family::V4 => 2,
        Family::V6 => 10,
    }
}

/// A message about our table of a family.
pub(super) fn message(
    command: Command,
    flags: u16,
    family: Family,
    attributes: impl IntoIterator<Item = Attribute>,
) -> Message {
    let mut all = vec![Attribute::text(TABLE_NAME, TABLE)];
    all.extend(attributes);
    Message { kind: command.kind(), flags, family: protocol(family), attributes: all }
}

/// What comes before the messages of a transaction.
pub(super) fn begin() -> Message {
    Message { kind: BATCH_BEGIN, flags: 0, family: 0, attributes: Vec::new() }
}

/// What comes after the messages of a transaction.
pub(super) fn end() -> Message {
    Message { kind: BATCH_END, flags: 0, family: 0, attributes: Vec::new() }
}

/// Makes the table, if it is not there.
pub(super) fn new_table(family: Family, comment: &str) -> Message {
    message(Command::NewTable, NLM_F_CREATE, family, [userdata(TABLE_USERDATA, comment)])
}

/// Takes the table away with all that is in it.
pub(super) fn delete_table(family: Family) -> Message {
    message(Command::DeleteTable, 0, family, [])
}

/// Makes a chain.
pub(super) fn new_chain(family: Family, name: &str, hook: Option<Hook>) -> Message {
    let mut attributes = vec![Attribute::text(CHAIN_NAME, name)];
    if let Some(hook) = hook {
        let (kind, number, priority) = hook.place();
        let place = [Attribute::u32(1, number), Attribute::bytes(2, priority.to_be_bytes())];
        attributes.extend([Attribute::nested(4, place), Attribute::text(7, kind)]);
    }
    message(Command::NewChain, NLM_F_CREATE, family, attributes)
}

/// Takes a chain away with its rules; nothing may lead there any more.
pub(super) fn delete_chain(family: Family, name: &str) -> Message {
    message(Command::DeleteChain, 0, family, [Attribute::text(CHAIN_NAME, name)])
}

/// Adds a rule at the end of a chain.
pub(super) fn new_rule(family: Family, chain: &str, rule: &Rule) -> Message {
    let attributes = [
        Attribute::text(RULE_CHAIN, chain),
        Attribute::nested(4, rule.expressions()),
        userdata(RULE_USERDATA, &rule.comment),
    ];
    message(Command::NewRule, NLM_F_CREATE | NLM_F_APPEND, family, attributes)
}

/// Makes a map or a set, the `id`th of the transaction.
pub(super) fn new_set(family: Family, map: Map, id: u32) -> Message {
    let kind = |fields: &[Field]| fields.iter().fold(0, |kind, it| kind << 6 | it.kind(family));
    let size = |fields: &[Field]| u32::try_from(length(fields, family)).unwrap_or_default();
    let mut flags = 0;
    let mut attributes = vec![
        Attribute::text(SET_NAME, map.name()),
        Attribute::u32(4, kind(map.key())),
        Attribute::u32(SET_KEY_LENGTH, size(map.key())),
        Attribute::u32(10, id),
    ];
    match map.leads() {
        Leads::Nowhere => {}
        Leads::To(fields) => {
            flags |= SET_MAP;
            attributes.push(Attribute::u32(6, kind(fields)));
            attributes.push(Attribute::u32(SET_DATA_LENGTH, size(fields)));
        }
        Leads::ToChain => {
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
        flags |= SET_INTERVAL | SET_CONCATENATION;
        let field = |it: &Field| {
            let length = u32::try_from(it.length(family)).unwrap_or_default();
            Attribute::nested(ELEMENT, [Attribute::u32(1, length)])
        };
        description.push(Attribute::nested(2, map.key().iter().map(field).collect::<Vec<_>>()));
    }
    attributes.push(Attribute::u32(3, flags));
    if !description.is_empty() {
        attributes.push(Attribute::nested(9, description));
    }
    message(Command::NewSet, NLM_F_CREATE, family, attributes)
}

/// Adds elements, or takes them away; in as few messages as hold them.
pub(super) fn elements<'a>(
    command: Command,
    family: Family,
    map: Map,
    elements: impl IntoIterator<Item = (&'a Element, &'a Value)>,
) -> Vec<Message> {
    let flags = if command == Command::NewElements { NLM_F_CREATE } else { 0 };
    let mut messages = Vec::new();
    let mut list = Vec::new();
    let mut length = 0;
    let mut flush = |list: &mut Vec<Attribute>| {
        if !list.is_empty() {
            let list = Attribute::nested(ELEMENTS, std::mem::take(list));
            messages.push(message(command, flags, family, [Attribute::text(SET_NAME, map.name()), list]));
        }
    };
    for (element, value) in elements {
        let it = element_attribute(element, (command == Command::NewElements).then_some(value));
        length += it.length();
        if length > LIST {
            length = it.length();
            flush(&mut list);
        }
        list.push(it);
    }
    flush(&mut list);
    messages
}

fn element_attribute(element: &Element, value: Option<&Value>) -> Attribute {
    let data = |bytes: &[u8]| [Attribute::bytes(DATA_VALUE, bytes)];
    let mut attributes = vec![Attribute::nested(ELEMENT_KEY, data(&element.key.0))];
    attributes.extend(element.end.as_ref().map(|it| Attribute::nested(ELEMENT_KEY_END, data(&it.0))));
    match value {
        None | Some(Value::None) => {}
        Some(Value::Data(it)) => attributes.push(Attribute::nested(ELEMENT_DATA, data(&it.0))),
        Some(Value::Verdict(it)) => {
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

/// The comment in what [`userdata`] wrote.
pub(super) fn comment(userdata: &[u8]) -> String {
    netlink::text(userdata.get(2..).unwrap_or_default())
}
