//! The chains and rules of nf_tables in this network namespace, of all programs; iptables (nft) writes such ones, too.
//!
//! The numbers are those of linux/netfilter/nf_tables.h.

use std::{fmt, io};

use nix::errno::Errno;

use crate::{
    attribute::{Attribute, each, find, text, u32},
    netfilter::{Batch, Message, Netfilter},
};

/// `NFNL_SUBSYS_NFTABLES`.
const SUBSYSTEM: u16 = 10;
const GET_CHAIN: u16 = SUBSYSTEM << 8 | 4;
const GET_RULE: u16 = SUBSYSTEM << 8 | 7;
/// `NFPROTO_INET`, `NFPROTO_IPV4` and `NFPROTO_IPV6`: the families whose packets are IP packets.
const FAMILIES: [u8; 3] = [1, 2, 10];
/// How often to start over because something changed while it was listed.
const ATTEMPTS: usize = 5;

/// A chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// Its family (`NFPROTO_…`).
    pub family: u8,
    /// Its table.
    pub table: String,
    /// Its name.
    pub name: String,
    /// Its hook (`NF_INET_…`), if it is a base chain.
    pub hook: Option<u32>,
    /// Its policy (`NF_…`), if it is a base chain.
    pub policy: Option<u32>,
}

impl Chain {
    /// The chain that a listed message describes.
    pub(crate) fn parse(family: u8, it: &[u8]) -> Option<Self> {
        let hook = find(it, 4);
        Some(Self {
            family,
            table: text(find(it, 1)?),
            name: text(find(it, 3)?),
            hook: hook.and_then(|it| u32(find(it, 1)?)),
            policy: find(it, 5).and_then(u32),
        })
    }

    /// Whether packets that are forwarded pass it, and are dropped unless a rule accepts them.
    pub fn drops_forwarded(&self) -> bool {
        /// `NF_INET_FORWARD` and `NF_DROP`.
        const FORWARD: u32 = 2;
        const DROP: u32 = 0;
        (self.hook, self.policy) == (Some(FORWARD), Some(DROP))
    }
}

/// A rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Its family (`NFPROTO_…`).
    pub family: u8,
    /// Its table.
    pub table: String,
    /// Its chain.
    pub chain: String,
    /// Its handle.
    pub handle: u64,
    /// The chain that it jumps or goes to.
    pub target: Option<String>,
}

impl Rule {
    /// The rule that a listed message describes.
    pub(crate) fn parse(family: u8, it: &[u8]) -> Option<Self> {
        let handle = find(it, 3)?.try_into().ok().map(u64::from_be_bytes)?;
        let expressions = find(it, 4).unwrap_or_default();
        let target = each(expressions).find_map(|(_, it)| target(it));
        Some(Self { family, table: text(find(it, 1)?), chain: text(find(it, 2)?), handle, target })
    }
}

/// Every chain of IP packets; none if the kernel has no nf_tables.
///
/// # Errors
///
/// If the kernel refuses to list them.
pub fn chains() -> io::Result<Vec<Chain>> {
    list(GET_CHAIN, &FAMILIES, &[], Chain::parse)
}

/// Every rule of the chains of IP packets; none if the kernel has no nf_tables.
///
/// # Errors
///
/// If the kernel refuses to list them.
pub fn rules() -> io::Result<Vec<Rule>> {
    list(GET_RULE, &FAMILIES, &[], Rule::parse)
}

/// Whether a chain of a family (`NFPROTO_…`) exists and has a rule.
///
/// # Errors
///
/// If the kernel refuses to list its rules.
pub fn has_rules(family: u8, table: &str, chain: &str) -> io::Result<bool> {
    let names = [Attribute::text(1, table), Attribute::text(2, chain)];
    let is_in = |it: &Rule| it.table == table && it.chain == chain;
    Ok(list(GET_RULE, &[family], &names, Rule::parse)?.iter().any(is_in))
}

/// The chain that an expression jumps or goes to.
fn target(expression: &[u8]) -> Option<String> {
    // The verdict is a value that is loaded into the verdict register.
    let is_immediate = text(find(expression, 1)?) == "immediate";
    let data = find(expression, 2).filter(|_| is_immediate)?;
    let verdict = find(find(data, 2)?, 2)?;
    find(verdict, 2).map(text)
}

/// The objects of a kind in some families. Attributes restrict the list, as far as the kernel knows them.
fn list<T>(
    kind: u16,
    families: &[u8],
    attributes: &[Attribute],
    parse: impl Fn(u8, &[u8]) -> Option<T>,
) -> io::Result<Vec<T>> {
    let mut netfilter = match Netfilter::open() {
        Err(error) if error.raw_os_error() == Some(Errno::EPROTONOSUPPORT as i32) => return Ok(Vec::new()),
        netfilter => netfilter?,
    };
    let mut attempts = ATTEMPTS;
    loop {
        attempts -= 1;
        let mut all = Vec::new();
        let result = families.iter().try_for_each(|&family| {
            let request = Message { kind, flags: 0, family, attributes: attributes.to_vec() };
            netfilter.dump(&request, |it| all.extend(parse(family, it)))
        });
        match result {
            Err(Errno::EINTR) if attempts > 0 => {}
            // EINTR: something was added or removed meanwhile; what was read is enough.
            Ok(()) | Err(Errno::EINTR | Errno::EINVAL | Errno::EOPNOTSUPP) => return Ok(all),
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// What is deleted in a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Deletion<'a> {
    /// A table with its contents: its family and its name.
    Table(u8, &'a str),
    /// A rule.
    Rule(&'a Rule),
    /// All rules of a chain.
    RulesOf(&'a Chain),
    /// A chain, to which nothing may refer any more.
    Chain(&'a Chain),
}

impl Deletion<'_> {
    fn message(&self) -> Message {
        const DELETE_TABLE: u16 = SUBSYSTEM << 8 | 2;
        const DELETE_CHAIN: u16 = SUBSYSTEM << 8 | 5;
        const DELETE_RULE: u16 = SUBSYSTEM << 8 | 8;
        let (kind, family, attributes) = match self {
            Self::Table(family, name) => (DELETE_TABLE, *family, vec![Attribute::text(1, name)]),
            Self::Rule(it) => {
                let names = [Attribute::text(1, &it.table), Attribute::text(2, &it.chain)];
                (DELETE_RULE, it.family, names.into_iter().chain([Attribute::u64(3, it.handle)]).collect())
            }
            Self::RulesOf(it) => {
                (DELETE_RULE, it.family, vec![Attribute::text(1, &it.table), Attribute::text(2, &it.name)])
            }
            Self::Chain(it) => {
                (DELETE_CHAIN, it.family, vec![Attribute::text(1, &it.table), Attribute::text(3, &it.name)])
            }
        };
        Message { kind, flags: 0, family, attributes }
    }
}

impl fmt::Display for Deletion<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Table(_, name) => write!(f, "delete table {name}"),
            Self::Rule(it) => write!(f, "delete rule {} of chain {} {}", it.handle, it.table, it.chain),
            Self::RulesOf(it) => write!(f, "flush chain {} {}", it.table, it.name),
            Self::Chain(it) => write!(f, "delete chain {} {}", it.table, it.name),
        }
    }
}

/// Deletes all of this, or nothing.
///
/// # Errors
///
/// What the kernel refused first, and why.
pub fn delete(deletions: &[Deletion<'_>]) -> io::Result<()> {
    const BATCH_BEGIN: u16 = 0x10;
    const BATCH_END: u16 = 0x11;
    if deletions.is_empty() {
        return Ok(());
    }
    let end = |kind| Message { kind, flags: 0, family: 0, attributes: Vec::new() };
    let mut batch = Batch::new(SUBSYSTEM);
    batch.push(&end(BATCH_BEGIN));
    batch.extend(deletions.iter().map(Deletion::message));
    batch.push(&end(BATCH_END));
    let refused = Netfilter::open()?.transact(&mut batch)?;
    let Some(it) = refused.first() else { return Ok(()) };
    let what = it.message.and_then(|it| deletions.get(it.checked_sub(1)?));
    let what = what.map_or_else(|| "the transaction".to_owned(), ToString::to_string);
    let error = io::Error::from(it.errno);
    Err(io::Error::new(error.kind(), format!("{what}: {error}")))
}
