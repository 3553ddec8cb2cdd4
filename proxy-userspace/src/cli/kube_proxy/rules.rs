//! What a kube-proxy, running or removed, has in the kernel: found for `check`, awaited by `cleanup`, and removed by
//! `cleanup --kube-proxy`.
//!
//! Invariant: a chain is kube-proxy's only if it has a name that no other program uses. The kubelet's chains, and those of
//! network plugins whose names begin with `KUBE-` as well, are kept.

use std::{
    collections::BTreeSet,
    fs,
    io::{self, Write as _},
    path::Path,
    process::{Command, Stdio},
};

use datapath::Finding;
use netlink::{
    Attribute, Message, Netfilter, links,
    nf_tables::{self, Chain, Deletion, Rule},
};

/// The table of its nftables mode, in the families `ip` and `ip6`.
const TABLE: &str = "kube-proxy";
/// To this interface its IPVS mode assigns the addresses of Services.
const INTERFACE: &str = "kube-ipvs0";
/// The tables of iptables that it writes to.
const IPTABLES: [&str; 3] = ["nat", "filter", "mangle"];
/// `NFPROTO_IPV4` and `NFPROTO_IPV6`, with what the programs of iptables are called.
const FAMILIES: [(u8, &str, &str); 2] =
    [(2, "iptables", "ip_tables_names"), (10, "ip6tables", "ip6_tables_names")];

/// What shows whether kube-proxy translates the Services of an IP family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cli) enum Rules {
    Written,
    Missing,
    /// Legacy iptables has a table nat, and no program here can read it.
    Unreadable,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::cli) struct Removal {
    /// Each kind of rules that was removed.
    pub(in crate::cli) removed: Vec<String>,
    /// What may remain, with the command that removes it.
    pub(in crate::cli) remaining: Vec<String>,
}

/// Whether a chain of a table of iptables is kube-proxy's, of any version and mode.
fn is_chain(table: &str, name: &str) -> bool {
    const OF_SERVICES: [&str; 6] =
        ["KUBE-SVC-", "KUBE-SVL-", "KUBE-SEP-", "KUBE-FW-", "KUBE-EXT-", "KUBE-XLB-"];
    const OTHERS: [&str; 14] = [
        "KUBE-SERVICES",
        "KUBE-NODEPORTS",
        "KUBE-NODE-PORT",
        "KUBE-EXTERNAL-SERVICES",
        "KUBE-POSTROUTING",
        "KUBE-MARK-MASQ",
        "KUBE-MARK-DROP",
        "KUBE-FORWARD",
        "KUBE-PROXY-FIREWALL",
        "KUBE-PROXY-CANARY",
        "KUBE-LOAD-BALANCER",
        "KUBE-SOURCE-RANGES-FIREWALL",
        "KUBE-IPVS-FILTER",
        "KUBE-IPVS-OUT-FILTER",
    ];
    // In the table filter, a chain of this name is the kubelet's.
    let is_of_ipvs = (table, name) == ("nat", "KUBE-FIREWALL");
    is_of_ipvs || OTHERS.contains(&name) || OF_SERVICES.iter().any(|it| name.starts_with(it))
}

fn is_of_iptables(chain: &Chain) -> bool {
    FAMILIES.iter().any(|(it, ..)| *it == chain.family)
        && IPTABLES.contains(&&*chain.table)
        && is_chain(&chain.table, &chain.name)
}

/// Rules of kube-proxy, running or left behind, and whether they alone serve this node; `has_run` if the socket path was
/// ever on.
pub(in crate::cli) fn finding(has_run: bool) -> (Finding, bool) {
    const SUBJECT: &str = "kube-proxy's rules";
    let mut found = Vec::new();
    let mut unknown = Vec::new();
    let mut is_ours = has_run;
    match nf_tables::chains() {
        Ok(chains) => {
            is_ours |= chains.iter().any(|it| it.table == datapath_nft::TABLE);
            if chains.iter().any(|it| it.table == TABLE) {
                found.push("nftables: table kube-proxy");
            }
            if chains.iter().any(|it| it.name == "KUBE-SERVICES") {
                found.push("iptables (nft): chain KUBE-SERVICES");
            }
        }
        Err(error) => unknown.push(format!("nftables: {error}")),
    }
    match has_legacy_rules() {
        Some(true) => found.push("iptables (legacy): chain KUBE-SERVICES"),
        Some(false) => {}
        None => unknown.push(
            "iptables (legacy) has a nat table, and there is no iptables-legacy-save to read it".into(),
        ),
    }
    if Path::new("/sys/class/net").join(INTERFACE).exists() {
        found.push("ipvs: interface kube-ipvs0");
    }
    let found = found.join("; ");
    let finding = if !found.is_empty() && !is_ours {
        return (
            Finding::ok(SUBJECT, format!("{found}; it serves this node, and nothing of this program does")),
            true,
        );
    } else if !found.is_empty() {
        Finding::degraded(
            SUBJECT,
            format!(
                "{found}; ours come first and decide, but its filters of sources and its masquerading still apply to packets"
            ),
            "if kube-proxy runs, stop it; if it is gone, `cleanup --kube-proxy` removes them; where it is to serve again, \
             `cleanup` removes what this program has there",
        )
    } else if unknown.is_empty() {
        Finding::ok(SUBJECT, "there are none in nftables, iptables or ipvs")
    } else {
        Finding::degraded(
            SUBJECT,
            format!("cannot be read: {}", unknown.join("; ")),
            "run `check` as root, on the host",
        )
    };
    (finding, false)
}

/// The IP families that kube-proxy serves here, by name, each with its rules for Services, in whichever mode.
///
/// kube-proxy's chains are there before their rules, which it writes in one transaction per family; its IPVS mode writes them
/// after the services of IPVS. As kube-proxy does, this takes IPv6 for absent without `if_inet6`
/// (cmd/kube-proxy/app/server_linux.go).
pub(in crate::cli) fn rules() -> io::Result<Vec<(&'static str, Rules)>> {
    let has_ipv6 = Path::new("/proc/thread-self/net/if_inet6").exists();
    let families = ["IPv4", "IPv6"].into_iter().zip(FAMILIES).take(1 + usize::from(has_ipv6));
    families.map(|(name, family)| Ok((name, rules_of(family)?))).collect()
}

fn rules_of((family, program, names): (u8, &str, &str)) -> io::Result<Rules> {
    if nf_tables::has_rules(family, TABLE, "services")?
        || nf_tables::has_rules(family, "nat", "KUBE-SERVICES")?
    {
        return Ok(Rules::Written);
    }
    if !legacy_tables(names).contains(&"nat") {
        return Ok(Rules::Missing);
    }
    Ok(match legacy_rules(program, "nat") {
        Some(saved) if saved.contains("\n-A KUBE-SERVICES ") => Rules::Written,
        Some(_) => Rules::Missing,
        None => Rules::Unreadable,
    })
}

pub(in crate::cli) fn is_process_visible() -> bool {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut names = processes.filter_map(|it| fs::read_to_string(it.path().join("comm")).ok());
    names.any(|it| it.trim_end() == "kube-proxy")
}

/// Removes what kube-proxy has in the kernel, and nothing of others. After an error, what was removed before stays removed.
pub(in crate::cli) fn remove() -> io::Result<Removal> {
    let mut removal = Removal::default();
    remove_from_nf_tables(&mut removal)?;
    for (_, program, names) in FAMILIES {
        remove_legacy_rules(program, names, &mut removal)?;
    }
    if links::delete(INTERFACE)? {
        removal.removed.push(format!("interface {INTERFACE} (ipvs)"));
        remove_sets()?;
    }
    // Its first three lines are titles.
    let services =
        fs::read_to_string("/proc/thread-self/net/ip_vs").unwrap_or_default().lines().skip(3).count();
    if services > 0 {
        removal
            .remaining
            .push("services of ipvs: `ipvsadm --clear` removes all of them, those of others included".into());
    }
    Ok(removal)
}

/// What its nftables mode writes, and its other modes by way of iptables (nft), in one transaction.
fn remove_from_nf_tables(removal: &mut Removal) -> io::Result<()> {
    let (all, rules) = (nf_tables::chains()?, nf_tables::rules()?);
    let tables: BTreeSet<_> =
        all.iter().filter(|it| it.table == TABLE && it.family != 1).map(|it| it.family).collect();
    let chains: Vec<_> = all.iter().filter(|it| is_of_iptables(it)).collect();
    let removed: BTreeSet<_> = chains.iter().map(|it| (it.family, &*it.table, &*it.name)).collect();
    let is_removed = |rule: &Rule, chain: &str| removed.contains(&(rule.family, &*rule.table, chain));
    let jumps_to_removed = |it: &Rule| it.target.as_deref().is_some_and(|target| is_removed(it, target));
    let jumps = rules.iter().filter(|it| jumps_to_removed(it) && !is_removed(it, &it.chain));
    let jumps: Vec<_> = jumps.collect();
    let mut deletions: Vec<_> = tables.iter().map(|it| Deletion::Table(*it, TABLE)).collect();
    deletions.extend(jumps.iter().map(|it| Deletion::Rule(it)));
    // They refer to each other.
    deletions.extend(chains.iter().map(|it| Deletion::RulesOf(it)));
    deletions.extend(chains.iter().map(|it| Deletion::Chain(it)));
    nf_tables::delete(&deletions)?;
    if !tables.is_empty() {
        removal.removed.push("table kube-proxy (nftables)".into());
    }
    if !chains.is_empty() {
        let (chains, jumps) = (chains.len(), jumps.len());
        removal.removed.push(format!(
            "{}, and the rules that jump there: {jumps} (iptables, nft)",
            model::counted(chains, "chain")
        ));
    }
    Ok(())
}

/// Removes the sets of its IPVS mode, as far as no rule uses them.
fn remove_sets() -> io::Result<()> {
    /// `NFNL_SUBSYS_IPSET` with `IPSET_CMD_DESTROY`, and the protocol that every kernel knows (linux/netfilter/ipset/ip_set.h).
    const DESTROY: u16 = 6 << 8 | 3;
    const PROTOCOL: u8 = 6;
    const SETS: [&str; 16] = [
        "LOOP-BACK",
        "CLUSTER-IP",
        "EXTERNAL-IP",
        "EXTERNAL-IP-LOCAL",
        "LOAD-BALANCER",
        "LOAD-BALANCER-FW",
        "LOAD-BALANCER-LOCAL",
        "LOAD-BALANCER-SOURCE-IP",
        "LOAD-BALANCER-SOURCE-CIDR",
        "NODE-PORT-TCP",
        "NODE-PORT-LOCAL-TCP",
        "NODE-PORT-UDP",
        "NODE-PORT-LOCAL-UDP",
        "NODE-PORT-SCTP-HASH",
        "NODE-PORT-LOCAL-SCTP-HASH",
        "IPVS-IPS",
    ];
    let names = SETS.iter().flat_map(|it| [format!("KUBE-{it}"), format!("KUBE-6-{it}")]);
    let messages = names.map(|it| {
        let attributes = vec![Attribute::u8(1, PROTOCOL), Attribute::text(2, &it)];
        Message { kind: DESTROY, flags: 0, family: FAMILIES[0].0, attributes }
    });
    // Those that do not exist are refused.
    Netfilter::open()?.each(&messages.collect::<Vec<_>>())?;
    Ok(())
}

/// The tables of legacy iptables that exist in this network namespace.
fn legacy_tables(names: &str) -> Vec<&'static str> {
    let listed = fs::read_to_string(Path::new("/proc/thread-self/net").join(names)).unwrap_or_default();
    IPTABLES.into_iter().filter(|table| listed.lines().any(|it| it == *table)).collect()
}

/// What legacy iptables has in a table; `None` if that cannot be read.
fn legacy_rules(program: &str, table: &str) -> Option<String> {
    let saved = Command::new(format!("{program}-legacy-save")).args(["-t", table]).output().ok()?;
    saved.status.success().then(|| String::from_utf8_lossy(&saved.stdout).into_owned())
}

/// Whether kube-proxy has rules in legacy iptables; `None` if that cannot be determined.
fn has_legacy_rules() -> Option<bool> {
    let [(_, program, names), _] = FAMILIES;
    if !legacy_tables(names).contains(&"nat") {
        return Some(false);
    }
    legacy_rules(program, "nat").map(|it| it.contains(":KUBE-SERVICES"))
}

fn remove_legacy_rules(program: &str, names: &str, removal: &mut Removal) -> io::Result<()> {
    for table in legacy_tables(names) {
        let Some(saved) = legacy_rules(program, table) else {
            removal.remaining.push(format!(
                "table {table} of {program} (legacy) cannot be read without {program}-legacy-save: if kube-proxy used it, \
                 `kube-proxy --cleanup` (its own binary) removes its rules"
            ));
            continue;
        };
        let Some(input) = without_chains(table, &saved) else { continue };
        let mut restore = Command::new(format!("{program}-legacy-restore"))
            .arg("--noflush")
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        if let Some(mut stdin) = restore.stdin.take() {
            stdin.write_all(input.as_bytes())?;
        }
        let output = restore.wait_with_output()?;
        if !output.status.success() {
            let says = String::from_utf8_lossy(&output.stderr);
            return Err(io::Error::other(format!("{program}-legacy-restore: {}", says.trim())));
        }
        removal.removed.push(format!("its chains in table {table} ({program}, legacy)"));
    }
    Ok(())
}

/// A rule without its quoted texts, as comments are, which may contain what looks like a target.
fn unquoted(rule: &str) -> String {
    let without_escapes = rule.replace("\\\\", "").replace("\\\"", "");
    without_escapes.split('"').step_by(2).collect()
}

/// What `iptables-restore --noflush` reads to remove kube-proxy's chains, from what `iptables-save` wrote; `None` if there are
/// none.
fn without_chains(table: &str, saved: &str) -> Option<String> {
    let declared = saved.lines().filter_map(|it| it.strip_prefix(':')?.split(' ').next());
    let chains: BTreeSet<_> = declared.filter(|it| is_chain(table, it)).collect();
    if chains.is_empty() {
        return None;
    }
    let is_removed = |name: &str| chains.contains(name);
    let mut input = format!("*{table}\n");
    // To declare a chain flushes it.
    for it in &chains {
        input += &format!(":{it} - [0:0]\n");
    }
    for rule in saved.lines().filter_map(|it| it.strip_prefix("-A ")) {
        let chain = rule.split(' ').next().unwrap_or_default();
        let unquoted = unquoted(rule);
        let target = unquoted.split_once(" -j ").and_then(|(_, it)| it.split(' ').next());
        if !is_removed(chain) && target.is_some_and(is_removed) {
            input += &format!("-D {rule}\n");
        }
    }
    for it in &chains {
        input += &format!("-X {it}\n");
    }
    Some(input + "COMMIT\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comment_is_not_mistaken_for_a_target() {
        for (rule, expected) in [
            (r#"OUTPUT -m comment --comment "a b" -j X"#, r#"OUTPUT -m comment --comment  -j X"#),
            (r#"OUTPUT --comment "say \" -j Y \" to" -j X"#, "OUTPUT --comment  -j X"),
            (r#"OUTPUT --comment "ends with \\" -j X"#, "OUTPUT --comment  -j X"),
            ("OUTPUT -j X", "OUTPUT -j X"),
        ] {
            assert_eq!(unquoted(rule), expected);
        }
    }
}
