//! The chains and rules of nf_tables in this network namespace, of all programs; iptables (nft) writes such ones, too.
//!
//! The numbers are those of linux/netfilter/nf_tables.h.

use std::{fmt, io};

use nix::errno::Errno;

use crate::{
    attribute::{Attribute, each, find, text, u32},
    netfilter::{Batch, Message, Netfilter},
    uapi::*,
};

/// The families whose packets are IP packets.
const FAMILIES: [u8; 3] = [NFPROTO_INET, NFPROTO_IPV4, NFPROTO_IPV6];
/// How often to start over because something changed while it was listed.
const ATTEMPTS: usize = 5;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// Its family (`NFPROTO_…`).
    pub family: u8,
    pub table: String,
    pub name: String,
    /// Its hook (`NF_INET_…`), if it is a base chain.
    pub hook: Option<u32>,
    /// Its policy (`NF_…`), if it is a base chain.
    pub policy: Option<u32>,
}

impl Chain {
    pub(crate) fn parse(family: u8, it: &[u8]) -> Option<Self> {
        let hook = find(it, NFTA_CHAIN_HOOK);
        Some(Self {
            family,
            table: text(find(it, NFTA_TABLE_NAME)?),
            name: text(find(it, NFTA_CHAIN_NAME)?),
            hook: hook.and_then(|it| u32(find(it, NFTA_HOOK_HOOKNUM)?)),
            policy: find(it, NFTA_CHAIN_POLICY).and_then(u32),
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

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Its family (`NFPROTO_…`).
    pub family: u8,
    pub table: String,
    pub chain: String,
    pub handle: u64,
    /// The chain that it jumps or goes to.
    pub target: Option<String>,
}

impl Rule {
    pub(crate) fn parse(family: u8, it: &[u8]) -> Option<Self> {
        let handle = find(it, NFTA_RULE_HANDLE)?.try_into().ok().map(u64::from_be_bytes)?;
        let expressions = find(it, NFTA_RULE_EXPRESSIONS).unwrap_or_default();
        let target = each(expressions).find_map(|(_, it)| target(it));
        Some(Self {
            family,
            table: text(find(it, NFTA_TABLE_NAME)?),
            chain: text(find(it, NFTA_RULE_CHAIN)?),
            handle,
            target,
        })
    }
}

/// Every chain of IP packets; none if the kernel has no nf_tables.
pub fn chains() -> io::Result<Vec<Chain>> {
    list(NFT_MSG_GETCHAIN, &FAMILIES, &[], Chain::parse)
}

/// Every rule of the chains of IP packets; none if the kernel has no nf_tables.
pub fn rules() -> io::Result<Vec<Rule>> {
    list(NFT_MSG_GETRULE, &FAMILIES, &[], Rule::parse)
}

/// Whether a chain of a family (`NFPROTO_…`) exists and has a rule.
pub fn has_rules(family: u8, table: &str, chain: &str) -> io::Result<bool> {
    let names = [Attribute::text(NFTA_TABLE_NAME, table), Attribute::text(NFTA_RULE_CHAIN, chain)];
    let is_in = |it: &Rule| it.table == table && it.chain == chain;
    Ok(list(NFT_MSG_GETRULE, &[family], &names, Rule::parse)?.iter().any(is_in))
}

/// The chain that an expression jumps or goes to.
fn target(expression: &[u8]) -> Option<String> {
    // The verdict is a value that is loaded into the verdict register.
    let is_immediate = text(find(expression, NFTA_EXPR_NAME)?) == "immediate";
    let data = find(expression, NFTA_EXPR_DATA).filter(|_| is_immediate)?;
    let verdict = find(find(data, NFTA_IMMEDIATE_DATA)?, NFTA_DATA_VERDICT)?;
    find(verdict, NFTA_VERDICT_CHAIN).map(text)
}

/// The objects of a kind in some families. Attributes restrict the list, as far as the kernel knows them.
fn list<T>(
    command: u16,
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
            let request = Message::nf_tables(command, family, attributes);
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
    Rule(&'a Rule),
    RulesOf(&'a Chain),
    /// A chain, to which nothing may refer any more.
    Chain(&'a Chain),
}

impl Deletion<'_> {
    fn message(&self) -> Message {
        let rules_of = |chain: &str| vec![Attribute::text(NFTA_RULE_CHAIN, chain)];
        let (command, family, table, mut attributes) = match self {
            Self::Table(family, name) => (NFT_MSG_DELTABLE, *family, *name, Vec::new()),
            Self::Rule(it) => {
                let mut rule = rules_of(&it.chain);
                rule.push(Attribute::u64(NFTA_RULE_HANDLE, it.handle));
                (NFT_MSG_DELRULE, it.family, &*it.table, rule)
            }
            Self::RulesOf(it) => (NFT_MSG_DELRULE, it.family, &*it.table, rules_of(&it.name)),
            Self::Chain(it) => {
                (NFT_MSG_DELCHAIN, it.family, &*it.table, vec![Attribute::text(NFTA_CHAIN_NAME, &it.name)])
            }
        };
        attributes.insert(0, Attribute::text(NFTA_TABLE_NAME, table));
        Message::nf_tables(command, family, attributes)
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
    if deletions.is_empty() {
        return Ok(());
    }
    let mut batch = Batch::transaction();
    batch.extend(deletions.iter().map(Deletion::message));
    let (_, refused) = Netfilter::open()?.transact(batch)?;
    let Some(it) = refused.first() else { return Ok(()) };
    let what = it.message.and_then(|it| deletions.get(it.checked_sub(1)?));
    let what = what.map_or_else(|| "the transaction".to_owned(), ToString::to_string);
    let error = io::Error::from(it.errno);
    Err(io::Error::new(error.kind(), format!("{what}: {error}")))
}
