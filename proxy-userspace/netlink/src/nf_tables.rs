//! The chains and rules of nf_tables in this network namespace, of all programs; iptables (nft) writes such ones, too.
//!
//! The numbers are those of linux/netfilter/nf_tables.h.

use std::io;

use nix::errno::Errno;

use crate::{
    attribute::{Attribute, each, find, text, u32},
    netfilter::{Message, Netfilter},
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

/// Every chain of IP packets; none if the kernel has no nf_tables.
///
/// # Errors
///
/// If the kernel refuses to list them.
pub fn chains() -> io::Result<Vec<Chain>> {
    list(GET_CHAIN, |family, it| {
        let hook = find(it, 4);
        Some(Chain {
            family,
            table: text(find(it, 1)?),
            name: text(find(it, 3)?),
            hook: hook.and_then(|it| u32(find(it, 1)?)),
            policy: find(it, 5).and_then(u32),
        })
    })
}

/// Every rule of the chains of IP packets; none if the kernel has no nf_tables.
///
/// # Errors
///
/// If the kernel refuses to list them.
pub fn rules() -> io::Result<Vec<Rule>> {
    list(GET_RULE, |family, it| {
        let handle = find(it, 3)?.try_into().ok().map(u64::from_be_bytes)?;
        let expressions = find(it, 4).unwrap_or_default();
        let target = each(expressions).find_map(|(_, it)| target(it));
        Some(Rule { family, table: text(find(it, 1)?), chain: text(find(it, 2)?), handle, target })
    })
}

/// The chain that an expression jumps or goes to.
fn target(expression: &[u8]) -> Option<String> {
    // The verdict is a value that is loaded into the verdict register.
    let is_immediate = text(find(expression, 1)?) == "immediate";
    let data = find(expression, 2).filter(|_| is_immediate)?;
    let verdict = find(find(data, 2)?, 2)?;
    find(verdict, 2).map(text)
}

fn list<T>(kind: u16, parse: impl Fn(u8, &[u8]) -> Option<T>) -> io::Result<Vec<T>> {
    let mut netfilter = match Netfilter::open() {
        Err(error) if error.raw_os_error() == Some(Errno::EPROTONOSUPPORT as i32) => return Ok(Vec::new()),
        netfilter => netfilter?,
    };
    let mut attempts = ATTEMPTS;
    loop {
        attempts -= 1;
        let mut all = Vec::new();
        let result = FAMILIES.into_iter().try_for_each(|family| {
            let attributes: Vec<Attribute> = Vec::new();
            let request = Message { kind, flags: 0, family, attributes };
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
