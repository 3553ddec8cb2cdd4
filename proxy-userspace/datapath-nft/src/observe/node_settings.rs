//! Settings of the node that translated packets depend on: findings for `check`.
//!
//! Invariant: nothing changes, and a setting is degraded only where it breaks something on this node.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use datapath::Finding;
use model::Family;
use netlink::{
    Netfilter,
    nf_tables::{self, Chain, Rule},
};

use crate::{
    apply::snapshot::Snapshot,
    encode::{elements::Element, schema::Map},
    plan::endpoint_selector::MatchKey,
};

/// What the settings are judged by.
#[derive(Clone, Debug)]
pub struct NodeSettings {
    /// Whether connections of pods are translated as packets, rather than at their sockets.
    pub packets_of_pods: bool,
    /// Where the kernel's file systems are mounted: the folder with `proc` and `sys`.
    root: PathBuf,
    /// The families in which Services are served; IPv4 alone before the first start.
    families: BTreeSet<Family>,
}

impl NodeSettings {
    /// The settings of this network namespace.
    pub fn new(packets_of_pods: bool) -> Self {
        let mut netfilter = Netfilter::open().ok();
        let is_frontend = |it: &Element| MatchKey::ALL.into_iter().any(|by| by.map(Map::Internal) == it.map);
        let mut is_served = |family: &Family| {
            let count = netfilter.as_mut().map(|it| Snapshot::count(it, *family, is_frontend));
            matches!(count, Some(Ok(Some((1.., _)))))
        };
        let mut families: BTreeSet<_> = Family::ALL.into_iter().filter(&mut is_served).collect();
        if families.is_empty() {
            families.insert(Family::V4);
        }
        Self { packets_of_pods, root: "/".into(), families }
    }

    pub fn check(&self) -> Vec<Finding> {
        let all = [
            self.conntrack(),
            Some(self.forwarding()),
            Some(self.forward_policy()),
            self.bridges(),
            self.reverse_path_filter(),
        ];
        all.into_iter().flatten().collect()
    }

    /// The value of a setting below /proc/sys/net; `None` if it does not exist.
    fn sysctl(&self, path: &str) -> Option<u64> {
        number(&self.root.join("proc/sys/net").join(path))
    }

    /// Whether there is room for more connections; `None` if connections are not tracked yet.
    fn conntrack(&self) -> Option<Finding> {
        const SUBJECT: &str = "conntrack table";
        let count = self.sysctl("netfilter/nf_conntrack_count")?;
        // 0: no limit.
        let max = self.sysctl("netfilter/nf_conntrack_max").filter(|it| *it > 0)?;
        let says = format!("{count} of {max} connections are tracked (nf_conntrack_max)");
        // The last tenth.
        Some(if count >= max - max / 10 {
            Finding::degraded(
                SUBJECT,
                format!("{says}; when it is full, the first packets of new connections are dropped"),
                format!(
                    "raise it, as with `sysctl -w net.netfilter.nf_conntrack_max={}`; `conntrack -S` counts what was \
                     dropped",
                    max.saturating_mul(2)
                ),
            )
        } else {
            Finding::ok(SUBJECT, says)
        })
    }

    fn forwarding(&self) -> Finding {
        const SUBJECT: &str = "forwarding";
        let setting = |family: &Family| match family {
            Family::V4 => "ipv4/ip_forward",
            Family::V6 => "ipv6/conf/all/forwarding",
        };
        let off = self.families.iter().map(setting).filter(|it| self.sysctl(it) == Some(0));
        let off: Vec<_> = off.map(|it| format!("net.{}", it.replace('/', "."))).collect();
        if off.is_empty() {
            return Finding::ok(SUBJECT, "packets are forwarded to endpoints");
        }
        Finding::degraded(
            SUBJECT,
            format!(
                "{} is 0: packets to Services that come from outside or from pods are translated, and then dropped",
                off.join(" and ")
            ),
            format!("switch it on: `sysctl -w {}`", switched_on(&off)),
        )
    }

    /// Whether a chain drops what is forwarded to endpoints.
    fn forward_policy(&self) -> Finding {
        const SUBJECT: &str = "FORWARD policy";
        let (chains, rules) = match nf_tables::chains().and_then(|it| Ok((it, nf_tables::rules()?))) {
            Ok(both) => both,
            Err(error) => {
                let says = format!("nftables cannot be read: {error}");
                return Finding::degraded(SUBJECT, says, "run `check` as root, on the host");
            }
        };
        let mut drops: Vec<_> = chains
            .iter()
            .filter(|it| it.drops_forwarded())
            .map(|chain| {
                let named = format!("chain {} of {}", chain.name, described_table(chain));
                (named, rules.iter().filter(|it| may_accept(it, chain)).count())
            })
            .collect();
        let legacy = self.legacy_forward_policy();
        if let Ok(Some(rules)) = legacy {
            drops.push(("chain FORWARD of iptables (legacy)".to_owned(), rules));
        }
        let dead: Vec<_> = drops.iter().filter(|(_, rules)| *rules == 0).map(|(it, _)| it.as_str()).collect();
        if !dead.is_empty() {
            return Finding::degraded(
                SUBJECT,
                format!(
                    "{} drops what is forwarded, and no rule of a network plugin in it accepts anything: packets to \
                     Services that come from outside or from pods are dropped on their way to the endpoint",
                    dead.join(" and ")
                ),
                "let the network plugin accept packets from and to pods there, or set the policy: `iptables -P FORWARD \
                 ACCEPT`, `ip6tables -P FORWARD ACCEPT`",
            );
        }
        let unknown = legacy.err().map_or(
            "",
            |()| "; iptables (legacy) has a filter table that cannot be read without iptables-legacy-save",
        );
        Finding::ok(
            SUBJECT,
            match drops.first() {
                None => format!("no chain drops what is forwarded by its policy{unknown}"),
                Some((named, rules)) => format!(
                    "{named} drops what is forwarded, unless a rule accepts it, of which it has {rules}: packets from and to pods must \
                 be among that{unknown}"
                ),
            },
        )
    }

    /// The number of rules in legacy iptables' FORWARD chain if there is one that drops by its policy; an error if it cannot be
    /// read.
    fn legacy_forward_policy(&self) -> Result<Option<usize>, ()> {
        let tables = fs::read_to_string(self.root.join("proc/thread-self/net/ip_tables_names"));
        if !tables.is_ok_and(|it| it.lines().any(|it| it == "filter")) {
            return Ok(None);
        }
        let saved = Command::new("iptables-legacy-save").args(["-t", "filter"]).output().ok();
        let saved = saved.filter(|it| it.status.success()).ok_or(())?;
        let saved = String::from_utf8_lossy(&saved.stdout);
        let rules = saved.lines().filter_map(|it| it.strip_prefix("-A FORWARD "));
        let others = rules.filter(|it| !it.split(' ').any(is_of_others)).count();
        Ok(saved.contains(":FORWARD DROP").then_some(others))
    }

    /// Whether packets between two pods of a bridge are translated on their way back; `None` where no bridge holds pods.
    fn bridges(&self) -> Option<Finding> {
        const SUBJECT: &str = "bridged packets";
        let interfaces = self.root.join("sys/class/net");
        let has_pods = |bridge: &String| {
            let ports = names(&interfaces.join(bridge).join("brif"));
            bridge != "docker0" && ports.iter().any(|it| is_pair(&interfaces, it))
        };
        let bridges: Vec<_> = names(&interfaces).into_iter().filter(has_pods).collect();
        if bridges.is_empty() {
            return None;
        }
        let says = format!("a bridge holds pods ({})", bridges.join(", "));
        let setting = |family: &Family| match family {
            Family::V4 => ("bridge-nf-call-iptables", "nf_call_iptables"),
            Family::V6 => ("bridge-nf-call-ip6tables", "nf_call_ip6tables"),
        };
        let is_on = |(all, one): &(&str, &str)| {
            // Without br_netfilter there is no such setting.
            let of_bridge = |it: &String| number(&interfaces.join(it).join("bridge").join(one)) == Some(1);
            self.sysctl(&format!("bridge/{all}")) == Some(1) || bridges.iter().all(of_bridge)
        };
        let off: Vec<_> = self.families.iter().map(setting).filter(|it| !is_on(it)).collect();
        Some(if off.is_empty() {
            Finding::ok(SUBJECT, format!("{says}, whose packets pass the host's netfilter"))
        } else if !self.packets_of_pods {
            Finding::ok(
                SUBJECT,
                format!(
                    "{says}, whose packets to each other do not pass the host's netfilter; their sockets are redirected, so \
                     that only SCTP, and calls left to packets, to a pod of the same bridge need it"
                ),
            )
        } else {
            let off: Vec<_> = off.iter().map(|(it, _)| format!("net.bridge.{it}")).collect();
            Finding::degraded(
                SUBJECT,
                format!(
                    "{says}, and {} is not 1: a pod that reaches a pod of the same bridge through a Service gets the reply \
                     from the pod's own address, and drops it",
                    off.join(" and ")
                ),
                format!("`modprobe br_netfilter; sysctl -w {}`", switched_on(&off)),
            )
        })
    }

    /// Whether packets from clients are dropped because the node would answer through another interface; `None` unless it has
    /// several default routes.
    fn reverse_path_filter(&self) -> Option<Finding> {
        const SUBJECT: &str = "rp_filter";
        const STRICT: u64 = 1;
        let routes = fs::read_to_string(self.root.join("proc/thread-self/net/route")).ok()?;
        // Interface, destination, gateway, flags, reference count, use, metric, mask.
        let mut gateways: Vec<(u32, &str)> = routes
            .lines()
            .skip(1)
            .filter_map(|line| {
                let fields: Vec<_> = line.split_whitespace().collect();
                let is_default = fields.get(1) == Some(&"00000000") && fields.get(7) == Some(&"00000000");
                Some((fields.get(6)?.parse().ok()?, *fields.first()?)).filter(|_| is_default)
            })
            .collect();
        gateways.sort_unstable();
        let (_, preferred) = *gateways.first()?;
        let others: BTreeSet<_> = gateways.iter().map(|(_, it)| *it).filter(|it| *it != preferred).collect();
        if others.is_empty() {
            return None;
        }
        // The larger one counts; 2 is loose.
        let of = |it: &str| self.sysctl(&format!("ipv4/conf/{it}/rp_filter")).unwrap_or_default();
        let strict: Vec<_> = others.into_iter().filter(|it| of("all").max(of(it)) == STRICT).collect();
        Some(if strict.is_empty() {
            Finding::ok(SUBJECT, "there are several default routes, and packets may arrive by any of them")
        } else {
            Finding::degraded(
                SUBJECT,
                format!(
                    "it is 1 (strict) at {}, and the preferred default route leads through {preferred}: packets to node \
                     ports and load balancer IPs that arrive there from other networks are dropped",
                    strict.join(", ")
                ),
                format!("make it loose: `sysctl -w net.ipv4.conf.{}.rp_filter=2`", strict[0]),
            )
        })
    }
}

/// Settings as arguments of `sysctl` that switch them on.
fn switched_on(settings: &[String]) -> String {
    settings.iter().map(|it| format!("{it}=1")).collect::<Vec<_>>().join(" ")
}

/// The table of a chain, as its users know it.
fn described_table(chain: &Chain) -> String {
    let family = match chain.family {
        2 => "ip",
        10 => "ip6",
        _ => "inet",
    };
    match (family, &*chain.table) {
        ("ip", "filter") => "iptables (nft)".to_owned(),
        ("ip6", "filter") => "ip6tables (nft)".to_owned(),
        (_, table) => format!("the nftables table {family} {table}"),
    }
}

/// Whether a rule of a chain may accept packets of pods.
fn may_accept(rule: &Rule, chain: &Chain) -> bool {
    let is_in = (rule.family, &rule.table, &rule.chain) == (chain.family, &chain.table, &chain.name);
    is_in && !rule.target.as_deref().is_some_and(is_of_others)
}

/// Whether a chain is one of Docker's or of kube-proxy's, which accept only their own packets.
fn is_of_others(chain: &str) -> bool {
    ["DOCKER", "KUBE-"].iter().any(|it| chain.starts_with(it))
}

/// Whether an interface below a `/sys/class/net` is an end of a pair, as those of pods are.
pub(crate) fn is_pair(interfaces: &Path, name: &str) -> bool {
    // Its other end is elsewhere, and it lies upon no other interface.
    let interface = interfaces.join(name);
    number(&interface.join("iflink")) != number(&interface.join("ifindex"))
        && !names(&interface).iter().any(|it| it.starts_with("lower_"))
}

fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// The names in a folder, sorted; none if it does not exist.
fn names(folder: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|it| it.file_name().to_string_lossy().into_owned()).collect()
}

#[cfg(test)]
mod tests {
    use datapath::Level;

    use super::*;
    use crate::in_netns::{in_netns, run};

    /// Judges files with these contents.
    fn with(
        files: &[(&str, &str)],
        packets_of_pods: bool,
        families: &[Family],
    ) -> (NodeSettings, tempfile::TempDir) {
        let folder = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let families = families.iter().copied().collect();
        (NodeSettings { packets_of_pods, root: folder.path().to_owned(), families }, folder)
    }

    #[track_caller]
    fn check(finding: &Finding, level: Level, texts: &[&str]) {
        assert_eq!(finding.level, level, "{finding:?}");
        let text = format!("{} {}", finding.says, finding.remedy.as_deref().unwrap_or_default());
        for it in texts {
            assert!(text.contains(it), "{it} is not in {text}");
        }
    }

    #[test]
    fn a_conntrack_table_that_is_nearly_full_is_degraded() {
        let of = |count: &str, max: &str| {
            let files = [
                ("proc/sys/net/netfilter/nf_conntrack_count", count),
                ("proc/sys/net/netfilter/nf_conntrack_max", max),
            ];
            with(&files, false, &[]).0.conntrack()
        };
        check(&of("89\n", "100\n").unwrap(), Level::Ok, &["89 of 100"]);
        check(
            &of("90\n", "100\n").unwrap(),
            Level::Degraded,
            &["90 of 100", "dropped", "nf_conntrack_max=200"],
        );
        assert_eq!(of("90\n", "0\n"), None, "there is no limit");
        assert_eq!(with(&[], false, &[]).0.conntrack(), None);
    }

    #[test]
    fn forwarding_is_required_in_the_families_of_services() {
        let files =
            [("proc/sys/net/ipv4/ip_forward", "1\n"), ("proc/sys/net/ipv6/conf/all/forwarding", "0\n")];
        check(&with(&files, false, &[Family::V4]).0.forwarding(), Level::Ok, &[]);
        let expected = ["net.ipv6.conf.all.forwarding is 0", "dropped", "net.ipv6.conf.all.forwarding=1"];
        check(&with(&files, false, &Family::ALL).0.forwarding(), Level::Degraded, &expected);
    }

    #[test]
    fn bridged_packets_must_pass_netfilter_where_pods_are_translated_as_packets() {
        const ON: (&str, &str) = ("proc/sys/net/bridge/bridge-nf-call-iptables", "1\n");
        let bridge = [
            ("sys/class/net/cni0/brif/veth1/port_no", "0x1"),
            ("sys/class/net/veth1/ifindex", "3\n"),
            ("sys/class/net/veth1/iflink", "2\n"),
        ];
        let of = |files: &[_], packets_of_pods| with(files, packets_of_pods, &[Family::V4]).0.bridges();
        assert_eq!(of(&[], true), None);
        let expected =
            ["cni0", "net.bridge.bridge-nf-call-iptables is not 1", "modprobe br_netfilter", "drops it"];
        check(&of(&bridge, true).unwrap(), Level::Degraded, &expected);
        check(&of(&bridge, false).unwrap(), Level::Ok, &["their sockets are redirected"]);
        check(&of(&[&bridge[..], &[ON]].concat(), true).unwrap(), Level::Ok, &["pass the host's netfilter"]);
        let of_bridge = ("sys/class/net/cni0/bridge/nf_call_iptables", "1\n");
        check(
            &of(&[&bridge[..], &[of_bridge]].concat(), true).unwrap(),
            Level::Ok,
            &["pass the host's netfilter"],
        );
    }

    #[test]
    fn a_strict_reverse_path_filter_matters_where_there_are_several_default_routes() {
        const HEAD: &str = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n";
        let of = |routes: &str, all: &str, eth1: &str| {
            let routes = format!("{HEAD}{routes}eth1 0000000A 00000000 0001 0 0 0 000000FF 0 0 0\n");
            let files = [
                ("proc/thread-self/net/route", &*routes),
                ("proc/sys/net/ipv4/conf/all/rp_filter", all),
                ("proc/sys/net/ipv4/conf/eth1/rp_filter", eth1),
            ];
            with(&files, false, &[]).0.reverse_path_filter()
        };
        let one = "eth0 00000000 0101A8C0 0003 0 0 100 00000000 0 0 0\n";
        let two = format!("{one}eth1 00000000 0102A8C0 0003 0 0 200 00000000 0 0 0\n");
        assert_eq!(of(one, "1\n", "1\n"), None);
        let expected = ["1 (strict) at eth1", "through eth0", "net.ipv4.conf.eth1.rp_filter=2"];
        check(&of(&two, "0\n", "1\n").unwrap(), Level::Degraded, &expected);
        check(&of(&two, "1\n", "0\n").unwrap(), Level::Degraded, &expected);
        check(&of(&two, "1\n", "2\n").unwrap(), Level::Ok, &[]);
        check(&of(&two, "0\n", "0\n").unwrap(), Level::Ok, &[]);
    }

    #[test]
    fn a_chain_that_drops_whatever_is_forwarded_is_degraded() {
        in_netns(|| {
            if Command::new("nft").arg("--version").output().is_err() {
                eprintln!("skipped: nft is not installed");
                return;
            }
            let policy = || NodeSettings::new(false).forward_policy();
            check(&policy(), Level::Ok, &["no chain drops"]);
            run(
                "nft add table ip filter; add chain ip filter FORWARD { type filter hook forward priority 0; policy accept; }",
            );
            check(&policy(), Level::Ok, &["no chain drops"]);
            run("nft add chain ip filter FORWARD { policy drop; }");
            check(
                &policy(),
                Level::Degraded,
                &["chain FORWARD of iptables (nft)", "iptables -P FORWARD ACCEPT"],
            );
            // Docker's chains accept nothing of pods.
            run("nft add chain ip filter DOCKER-USER; add rule ip filter FORWARD jump DOCKER-USER");
            check(&policy(), Level::Degraded, &["chain FORWARD of iptables (nft)"]);
            run("nft add chain ip filter FLANNEL-FWD; add rule ip filter FORWARD jump FLANNEL-FWD");
            check(&policy(), Level::Ok, &["unless a rule accepts it, of which it has 1"]);
            run(
                "nft add table inet fw; add chain inet fw f { type filter hook forward priority 1; policy drop; }",
            );
            check(&policy(), Level::Degraded, &["chain f of the nftables table inet fw"]);
        });
    }
}
