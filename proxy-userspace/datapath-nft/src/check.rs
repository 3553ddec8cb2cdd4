//! Whether packets can be translated on this node, and whether they are: findings for `check`.
//!
//! The one rule: nothing changes. The kernel is told all that it would be told at a start, about a table of another name
//! that is dormant, in a transaction that ends with what it must refuse; so that all of it is tried, and nothing is done.

use std::collections::BTreeSet;

use datapath::{Finding, Level};
use model::Family;
use netlink::{Attribute, Message, Netfilter};
use nix::errno::Errno;

use crate::{
    config::{Config, Host},
    datapath::{FAMILIES, named},
    endpoint_selector::{By, Pick},
    error::Error,
    rules::Setting,
    snapshot::Snapshot,
    tables::{Command, SUBSYSTEM, TABLE_FLAGS, TABLE_IS_DORMANT, TABLE_NAME, delete_chain},
    transaction::{Wanted, describe, framed},
};

/// The name of the table that is tried.
const TRIED: &str = "kube-proxy-ebpf-check";
const RULES: &str = "nftables";
const TABLES: &str = "packets";

/// Whether the kernel takes our tables. What it is worth if it does not, depends on who else serves.
pub fn host(config: &Config, if_not: Level) -> Finding {
    let mut netfilter = match Netfilter::open().map_err(Error::Open) {
        Ok(netfilter) => netfilter,
        Err(error) => return Finding::failed(RULES, if_not, &error),
    };
    let errors: Vec<_> =
        FAMILIES.into_iter().map(|it| (it, attempt(&mut netfilter, config, it).err())).collect();
    let lacking: Vec<_> =
        errors.iter().filter_map(|(family, it)| it.as_ref().map(|it| (family, it))).collect();
    match &*lacking {
        [] => Finding::ok(RULES, "the kernel takes every rule, for IPv4 and IPv6"),
        [(family, error)] => {
            let says = datapath::error_chain(*error);
            Finding::degraded(
                RULES,
                format!("packets of {} cannot be translated: {says}", named(**family)),
                "nothing, where that family is not used",
            )
        }
        [(_, error), ..] => Finding::failed(RULES, if_not, *error),
    }
}

/// Whether our tables are in place; where they may be missing, whether anything has run that wants them.
///
/// # Errors
///
/// If the kernel does not let us see, or has no nftables.
pub fn tables(has_run: bool) -> Result<Finding, Error> {
    let mut netfilter = Netfilter::open().map_err(Error::Open)?;
    let snapshots = FAMILIES.map(|it| Snapshot::read(&mut netfilter, it));
    let found = snapshots.into_iter().collect::<Result<Vec<_>, Error>>()?;
    let entries: usize = found.iter().flatten().map(|it| it.elements.len()).sum();
    Ok(match found.iter().flatten().count() {
        0 if !has_run => {
            Finding::ok(TABLES, "there is no nftables table of ours: it has not run here, or was cleaned up")
        }
        0 => Finding::degraded(
            TABLES,
            "there is no nftables table of ours: packets are not translated",
            "start `run` or `agent`; see its log if it does not write them",
        ),
        1 => Finding::degraded(
            TABLES,
            format!("one nftables table of ours of two is in place, with {entries} entries"),
            "see the log of `run` or `agent`",
        ),
        _ => Finding::ok(TABLES, format!("our nftables tables are in place, with {entries} entries")),
    })
}

/// The same as one finding, whatever comes of it.
pub fn installation(has_run: bool) -> Finding {
    tables(has_run).unwrap_or_else(|error| Finding::failed(TABLES, Level::Degraded, &error))
}

/// Tells the kernel what it takes to translate packets of a family.
fn attempt(netfilter: &mut Netfilter, config: &Config, family: Family) -> Result<(), Error> {
    let host = Host::default();
    let setting = Setting {
        family,
        mark: config.mark(),
        masquerade_all: config.masquerade_all,
        pods: host.pods(&config.detect_local, family),
        inside: host.inside(&config.detect_local, family),
    };
    let picks =
        By::ALL.into_iter().flat_map(|by| [0, 1].map(|affinity| Pick { by, set: 0, count: 1, affinity }));
    let picks: BTreeSet<_> = picks.collect();
    let mut elements = setting.elements();
    elements.extend(picks.iter().map(|it| it.element(family)));
    let wanted = Wanted { setting, picks, elements };
    let mut messages = wanted.replace();
    messages.push(delete_chain(family, "there-is-none"));
    let all = framed(messages.into_iter().map(tried).collect());
    let last = all.len() - 2;
    let failed = |what, errno| Error::Refused { what, errno };
    let refused = netfilter.transact(&all, SUBSYSTEM).map_err(|it| failed("the transaction".into(), it))?;
    match refused.first() {
        Some(it) if it.message == Some(last) && it.errno == Errno::ENOENT => Ok(()),
        Some(it) => {
            let what = it.message.and_then(|it| all.get(it)).map_or_else(|| "the change".into(), describe);
            Err(failed(what, it.errno))
        }
        // It has done what cannot be done.
        None => Err(failed("to refuse what makes no sense".into(), Errno::UnknownErrno)),
    }
}

/// The same about the table that is tried.
fn tried(mut message: Message) -> Message {
    for it in &mut message.attributes {
        if let Attribute::Value(TABLE_NAME, _) = it {
            *it = Attribute::text(TABLE_NAME, TRIED);
        }
    }
    if message.kind == Command::NewTable.kind() {
        message.attributes.push(Attribute::u32(TABLE_FLAGS, TABLE_IS_DORMANT));
    }
    message
}
