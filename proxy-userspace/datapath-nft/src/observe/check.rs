//! Whether the packet path can run on this node, and whether it does: findings for `check`.
//!
//! Invariant: nothing changes. The kernel gets everything that a start would send, for a dormant table of another name, in a
//! transaction that ends with a message it must refuse: all of it is validated, and nothing takes effect.

use std::{
    collections::BTreeSet,
    fs, iter,
    net::{Ipv4Addr, Ipv6Addr},
    path::{Path, PathBuf},
};

use datapath::{Finding, Level};
use ipnet::{Ipv4Net, Ipv6Net};
use model::Family;
use netlink::{
    Attribute, Message, Netfilter,
    uapi::{NFNL_SUBSYS_NFTABLES, NFT_MSG_NEWTABLE, NFT_TABLE_F_DORMANT, NFTA_TABLE_FLAGS},
};

use crate::{
    apply::{
        snapshot::Snapshot,
        transaction::{DesiredTable, can_count, samples, trial},
    },
    encode::tables::TABLE,
    error::Error,
    observe::node_settings::is_pair,
    plan::{
        config::{Config, Host},
        rules::TableConfig,
        watch::Watch,
    },
};

const RULES: &str = "nftables";
const TABLES: &str = "packets";
/// Networks that no cluster uses (RFC 5737, RFC 3849), as the trial's ServiceCIDRs.
const DOCUMENTATION: (Ipv4Net, Ipv6Net) = (
    Ipv4Net::new_assert(Ipv4Addr::new(192, 0, 2, 0), 24),
    Ipv6Net::new_assert(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0), 32),
);

/// Whether the kernel accepts our tables; `if_not` is the level if it does not.
pub fn host(config: &Config, if_not: Level) -> Finding {
    let mut netfilter = match Netfilter::open().map_err(Error::Open) {
        Ok(netfilter) => netfilter,
        Err(error) => return Finding::failed(RULES, if_not, &error),
    };
    let host = &trial_host(!can_count(&mut netfilter));
    let error = |family| {
        let table = trial_table(config, host, family);
        let messages = table.replace(iter::empty()).map(without_packets);
        Some((family, trial(&mut netfilter, family, messages).err()?))
    };
    let missing: Vec<_> = Family::ALL.into_iter().filter_map(error).collect();
    match &*missing {
        [] => Finding::ok(RULES, "the kernel accepts every rule, for IPv4 and IPv6"),
        [(family, error)] => {
            let says = model::error_chain(error);
            Finding::degraded(
                RULES,
                format!("{family} packets cannot be translated: {says}"),
                "ignore this if that family is not used",
            )
        }
        [(_, error), ..] => Finding::failed(RULES, if_not, error),
    }
}

/// Whether our tables exist; if they do not, `has_run` says whether they should.
///
/// # Errors
///
/// If the kernel refuses to list them, or has no nftables.
pub fn tables(has_run: bool) -> Result<Finding, Error> {
    let mut netfilter = Netfilter::open().map_err(Error::Open)?;
    let counts = Family::ALL.map(|it| Snapshot::count(&mut netfilter, it, |_| true).transpose());
    let counts = counts.into_iter().flatten().collect::<Result<Vec<_>, Error>>()?;
    let entries: usize = counts.iter().map(|(entries, _)| entries).sum();
    Ok(match counts.len() {
        0 if !has_run => {
            Finding::ok(TABLES, "there is no nftables table of ours: never started here, or cleaned up")
        }
        0 => Finding::degraded(
            TABLES,
            "there is no nftables table of ours: packets are not translated",
            "start `run` or `agent`; its log says why it does not write them",
        ),
        1 => Finding::degraded(
            TABLES,
            format!("only one of our two nftables tables exists; elements in it: {entries}"),
            "see the log of `run` or `agent`",
        ),
        _ if counts.iter().any(|(_, is_met)| !is_met) => Finding::degraded(
            TABLES,
            format!(
                "our nftables tables are not complete: packets are not translated; elements in them: {entries}"
            ),
            "wait until `run` or `agent` has written them; if it ends before, see its log",
        ),
        _ => Finding::ok(TABLES, format!("our nftables tables exist; elements in them: {entries}")),
    })
}

/// Like [`tables`], with errors as findings.
pub fn installation(has_run: bool) -> Finding {
    tables(has_run).unwrap_or_else(|error| Finding::failed(TABLES, Level::Degraded, &error))
}

/// Files with rulesets, which services of distributions load, or folders of such files: Debian and Arch, Fedora, Gentoo.
const RULESETS: [&str; 6] = [
    "etc/nftables.conf",
    "etc/nftables",
    "etc/nftables.d",
    "etc/sysconfig/nftables.conf",
    "etc/sysconfig/nftables",
    "var/lib/nftables/rules-save",
];

/// The saved ruleset below one of these roots that has our tables, if there is one: while the proxy runs, the kernel lets no
/// other process change them, and `nft -f` fails as a whole.
pub fn saved_rulesets<const N: usize>(roots: [&Path; N]) -> Option<Finding> {
    let paths = roots.into_iter().flat_map(|root| RULESETS.map(|it| root.join(it)));
    let files = paths.flat_map(|path| match fs::read_dir(&path) {
        Ok(entries) => entries.flatten().map(|it| it.path()).collect(),
        Err(_) => vec![path],
    });
    let names_ours = |path: &PathBuf| {
        let text = fs::read_to_string(path).unwrap_or_default();
        text.lines().any(|line| line.trim_start().starts_with("table ") && line.contains(TABLE))
    };
    let found = files.into_iter().find(names_ours)?;
    Some(Finding::degraded(
        "saved ruleset",
        format!(
            "{} has our tables {TABLE}: `nft -f` of it fails as a whole while the proxy runs, since the kernel lets no other \
             process change them",
            found.display()
        ),
        "remove our tables from the file: the proxy writes them itself",
    ))
}

/// Whether packets of pods pass the host's netfilter, as far as the interfaces below a `/sys/class/net` tell.
///
/// Only there are pods told that the endpoint of a connected UDP socket was removed, see [`crate::plan::removed_udp`].
pub fn pods(interfaces: &Path) -> Finding {
    const SUBJECT: &str = "packets of pods";
    const EFFECT: &str = "their connected UDP sockets may stay connected to an endpoint that was removed";
    const REMEDY: &str = "give the proxy CAP_SYS_ADMIN, CAP_SYS_PTRACE and hostPID, or ignore this if no pod keeps UDP sockets \
                          connected to Services";
    let names = match fs::read_dir(interfaces) {
        Ok(entries) => entries.flatten().map(|it| it.file_name().to_string_lossy().into_owned()),
        Err(error) => {
            let says = format!("{} cannot be read: {error}", interfaces.display());
            return Finding::degraded(SUBJECT, says, "mount /sys in the container");
        }
    };
    let names: BTreeSet<_> = names.collect();
    if names.contains("cilium_host") {
        return Finding::degraded(
            SUBJECT,
            format!(
                "Cilium is here: with eBPF host routing they do not pass the host's netfilter, and {EFFECT}"
            ),
            format!("set Cilium's `bpf.hostLegacyRouting`; or {REMEDY}"),
        );
    }
    match names.iter().filter(|it| is_pair(interfaces, it)).count() {
        0 => Finding::ok(
            SUBJECT,
            format!("no interface leads to a pod; where pods use ipvlan, macvlan or SR-IOV, {EFFECT}"),
        ),
        pairs => Finding::ok(
            SUBJECT,
            format!("they pass the host's netfilter through {}", model::counted(pairs, "interface")),
        ),
    }
}

/// A host with everything that a cluster may need.
fn trial_host(cannot_count: bool) -> Host {
    let service_cidrs = vec![DOCUMENTATION.0.into(), DOCUMENTATION.1.into()];
    Host { service_cidrs, cannot_count, ..Host::default() }
}

/// The table of a family with everything that a cluster may need.
fn trial_table(config: &Config, host: &Host, family: Family) -> DesiredTable {
    let config_ = TableConfig::new(family, config, host);
    let mut elements = config_.elements();
    elements.extend(samples(family));
    // A kernel that cannot give a second chance serves everything else.
    elements.remove(&Watch::SecondChance.element(family).0);
    DesiredTable { config_, is_owned: false, elements }
}

/// Makes the table of a message dormant: it gets no packets.
fn without_packets(mut message: Message) -> Message {
    if message.kind == NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_NEWTABLE {
        message.attributes.push(Attribute::u32(NFTA_TABLE_FLAGS, NFT_TABLE_F_DORMANT));
    }
    message
}

#[cfg(test)]
mod tests {
    use netlink::Batch;

    use super::*;
    use crate::apply::transaction::describe;

    /// A folder like `/sys/class/net`: each interface with its number, the number it is linked to, and what it lies upon.
    fn interfaces(all: &[(&str, u32, u32, Option<&str>)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, index, link, lower) in all {
            let interface = folder.path().join(name);
            fs::create_dir(&interface).unwrap();
            fs::write(interface.join("ifindex"), format!("{index}\n")).unwrap();
            fs::write(interface.join("iflink"), format!("{link}\n")).unwrap();
            if let Some(lower) = lower {
                fs::create_dir(interface.join(format!("lower_{lower}"))).unwrap();
            }
        }
        folder
    }

    #[test]
    fn a_saved_ruleset_with_our_tables_is_found() {
        let root = tempfile::tempdir().unwrap();
        let find = || saved_rulesets([root.path()]).map(|it| it.says);
        assert_eq!(find(), None);
        let folder = root.path().join("etc/nftables.d");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("theirs.nft"), "table inet filter {\n# kube-proxy-ebpf\n}\n").unwrap();
        assert_eq!(find(), None);
        fs::write(folder.join("saved.nft"), "table inet filter {}\ntable ip kube-proxy-ebpf {\n}\n").unwrap();
        assert!(find().unwrap().contains("etc/nftables.d/saved.nft"));
    }

    #[test]
    fn the_trial_has_the_chains_of_service_cidrs() {
        for family in Family::ALL {
            let mut batch = Batch::transaction();
            batch.extend(trial_table(&Config::default(), &trial_host(false), family).replace(iter::empty()));
            let messages = (0..batch.len()).filter_map(|it| batch.message(it));
            let all: Vec<_> = messages.map(|it| describe(&it)).collect();
            assert_eq!(all.len(), batch.len());
            for name in ["unassigned-forward", "unassigned-output"] {
                assert!(all.iter().any(|it| it.contains(&format!("a rule of the chain {name},"))), "{all:?}");
            }
        }
    }

    #[test]
    fn where_packets_of_pods_may_bypass_netfilter_that_is_found() {
        const LO: (&str, u32, u32, Option<&str>) = ("lo", 1, 1, None);
        const ETH: (&str, u32, u32, Option<&str>) = ("eth0", 2, 2, None);
        const POD: (&str, u32, u32, Option<&str>) = ("veth1", 3, 2, None);
        let found = |all: &[_]| pods(interfaces(all).path());
        assert_eq!(found(&[LO, ETH, POD]).level, Level::Ok);
        let vlan = ("eth0.7", 3, 2, Some("eth0"));
        assert!(found(&[LO, ETH, vlan]).says.contains("no interface leads to a pod"));
        assert_eq!(found(&[LO, ETH, POD, ("cilium_host", 4, 5, None)]).level, Level::Degraded);
    }
}
