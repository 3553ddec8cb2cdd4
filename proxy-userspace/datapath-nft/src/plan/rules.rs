//! The chains of a table and their rules.
//!
//! Invariant: no chain depends on a Service.
//! A chain looks up the destination of a packet, and the result selects the next chain.
//!
//! Between two rules a number is kept in the packet's priority (`skb->priority`), because registers do not outlive a rule, because
//! `nft` has no words for a key that was looked up, and because the kernel validates all elements of a verdict map at every change.
//! Only the first packet of a connection gets here, and it leaves the host with priority 0, the default.
//!
//! `nft` can list every rule, and load again what it lists: administrators' programs depend on it.

use std::ops::RangeInclusive;

use ipnet::IpNet;
use model::Family;

use crate::{
    encode::{
        chain::{Chain, Hook},
        elements::{Element, Elements, Value},
        expressions::{Register, Rule, Verdict},
        schema::{Bytes, Map},
    },
    plan::{
        config::{Config, Host, Pods, of_family},
        endpoint_selector::{DROP, FIRST_NUMBER_OF_A_TRANSLATED_PACKET, MatchKey, REFUSE, Registers, key},
        source_list::ALLOWED,
        untracked,
    },
};

/// The chain that refuses packets to Services without endpoints.
pub(crate) const REFUSE_CHAIN: &str = "refuse";

/// The ports from which UDP is masqueraded: above the default range of node ports (30000-32767).
const UDP_SOURCE_PORTS: RangeInclusive<u16> = 32_768..=65_535;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum FrontendPolicy {
    ClusterIp = 0x0001_0001,
    /// Reachable from outside, with external traffic policy Cluster.
    External = 0x0001_0002,
    /// Reachable from outside, with external traffic policy Local: traffic stays on this node and keeps its source.
    ExternalLocal = 0x0001_0003,
    /// Like [`FrontendPolicy::External`], restricted by source ranges.
    SourceRanges = 0x0001_0004,
    /// Like [`FrontendPolicy::ExternalLocal`], restricted by source ranges.
    SourceRangesLocal = 0x0001_0005,
    /// A node port; otherwise like [`FrontendPolicy::External`].
    NodePort = 0x0001_0006,
    /// A node port; otherwise like [`FrontendPolicy::ExternalLocal`].
    NodePortLocal = 0x0001_0007,
    /// For packets that another node has forwarded whole: they stay on this node and keep their source, wherever they are from.
    Forwarded = 0x0001_0008,
    /// Like [`FrontendPolicy::Forwarded`], restricted by source ranges.
    SourceRangesForwarded = 0x0001_0009,
}

// As every number of an element: `nft` cannot load one with a half of zero.
const _: () = {
    let mut at = 0;
    while at < FrontendPolicy::ALL.len() {
        let number = FrontendPolicy::ALL[at].0 as u32;
        assert!(number & 0xffff != 0 && number >> 16 != 0);
        at += 1;
    }
};

impl FrontendPolicy {
    /// All of them, each with its chain.
    pub(crate) const ALL: [(Self, &'static str); 9] = [
        (Self::ClusterIp, "cluster-ip"),
        (Self::External, "external"),
        (Self::ExternalLocal, "external-local"),
        (Self::SourceRanges, "source-ranges"),
        (Self::SourceRangesLocal, "source-ranges-local"),
        (Self::NodePort, "node-port"),
        (Self::NodePortLocal, "node-port-local"),
        (Self::Forwarded, "forwarded"),
        (Self::SourceRangesForwarded, "source-ranges-forwarded"),
    ];

    /// The policy for packets that another node has forwarded whole.
    pub(crate) fn forwarded(is_restricted: bool) -> Self {
        if is_restricted { Self::SourceRangesForwarded } else { Self::Forwarded }
    }

    /// Whether external traffic is routed differently from internal traffic.
    pub(crate) fn is_local(self) -> bool {
        matches!(self, Self::ExternalLocal | Self::SourceRangesLocal | Self::NodePortLocal)
    }
}

/// What the constant chains of a table depend on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TableConfig {
    pub(crate) family: Family,
    /// The bit of the packet mark that requests masquerading.
    pub(crate) mark: u32,
    pub(crate) masquerade_all: bool,
    pub(crate) cannot_count: bool,
    /// Whose traffic to cluster IPs is not masqueraded, and to external addresses counts as internal; `None` turns both off.
    pub(crate) pods: Option<Pods>,
    /// The pods to which connections of the host's own programs are not tracked.
    pub(crate) untracked: Vec<IpNet>,
    /// The ranges of cluster IPs: addresses in them that no Service has are dropped.
    pub(crate) service_cidrs: Vec<IpNet>,
}

impl TableConfig {
    pub(crate) fn new(family: Family, config: &Config, host: &Host) -> Self {
        Self {
            family,
            mark: 1 << (config.masquerade_bit & 31),
            masquerade_all: config.masquerade_all,
            cannot_count: host.cannot_count,
            pods: host.pods(&config.detect_local, family),
            untracked: of_family(&config.untracked, family),
            service_cidrs: of_family(&host.service_cidrs, family),
        }
    }

    pub(crate) fn chains(&self) -> Vec<Chain> {
        let dispatch = |map, comment: &str| [self.rule(comment).dispatch(map)];
        let mut chains = vec![
            Chain::new(REFUSE_CHAIN, self.refuse()),
            Chain::new("mark-for-masquerade", [self.rule("request masquerading").set_mark(self.mark)]),
            Chain::new("select", dispatch(Map::Selectors, "by selector")),
            Chain::new("node-select", dispatch(Map::NodeSelectors, "by selector")),
            Chain::new("cluster-ip", self.cluster_ip()),
            Chain::new("external", self.external(MatchKey::Address)),
            Chain::new("external-local", self.external_local(MatchKey::Address)),
            Chain::new("sources", dispatch(Map::SourceChains, "by list")),
            Chain::new("source-ranges", self.source_ranges("external")),
            Chain::new("source-ranges-local", self.source_ranges("external-local")),
            Chain::new("forwarded", [self.to_endpoint_here(MatchKey::Address)]),
            Chain::new("source-ranges-forwarded", self.source_ranges("forwarded")),
            Chain::new("node-port", self.external(MatchKey::NodePort)),
            Chain::new("node-port-local", self.external_local(MatchKey::NodePort)),
            Chain::new("dispatch", dispatch(Map::Policies, "by policy")),
            Chain::new("services", self.services()),
            Chain::new("translated", self.translated()),
        ];
        let services = || [self.rule("translate Services").verdict(&Verdict::Jump("services".into()))];
        chains.extend([
            Chain::base("prerouting", Hook::PREROUTING, services()),
            Chain::base("output", Hook::OUTPUT, services()),
            // The kernel uses the rules as of the packet's entry into a base chain, but the sets as of each lookup. A packet in
            // flight while a change is committed may meet old rules and new sets, match nothing, and pass untranslated; its
            // connection would then stay untranslated. NAT tries one base chain after the other until one translates: the
            // second one starts with the new rules.
            Chain::base("prerouting-retry", Hook::PREROUTING_RETRY, services()),
            Chain::base("output-retry", Hook::OUTPUT_RETRY, services()),
            Chain::base("postrouting", Hook::POSTROUTING, self.postrouting()),
        ]);
        chains.extend(untracked::chains(self.family, &self.untracked));
        chains.extend(self.unassigned());
        chains
    }

    pub(crate) fn elements(&self) -> Elements {
        let goto = |chain: &str| Value::Verdict(Verdict::Goto(chain.into()));
        let mut elements = Elements::new();
        for (policy, chain) in FrontendPolicy::ALL {
            let key = Bytes::new().number(policy as u32);
            elements.insert(Element::new(self.family, Map::Policies, key), goto(chain));
        }
        for by in MatchKey::ALL {
            for (word, value) in [(REFUSE, goto(REFUSE_CHAIN)), (DROP, Value::Verdict(Verdict::Drop))] {
                let key = Bytes::new().number(word);
                elements.insert(Element::new(self.family, by.map(Map::Selectors), key), value);
            }
        }
        elements
    }

    fn rule(&self, comment: &str) -> Rule {
        Rule::new(self.family, comment)
    }

    fn mark(&self, rule: Rule) -> Rule {
        rule.verdict(&Verdict::Jump("mark-for-masquerade".into()))
    }

    /// One rule per condition that identifies a pod; any of them matches.
    fn from(&self, comment: &str) -> Vec<Rule> {
        match &self.pods {
            None => Vec::new(),
            Some(Pods::Within(nets)) => nets.iter().map(|net| self.rule(comment).if_from(*net)).collect(),
            Some(Pods::Interface(name)) => vec![self.rule(comment).if_interface(name)],
            Some(Pods::Prefix(prefix)) => vec![self.rule(comment).if_interface_prefix(prefix)],
        }
    }

    fn services(&self) -> Vec<Rule> {
        let at = Registers::new(self.family);
        let dispatch = |rule: Rule, by: MatchKey| {
            key(rule, by, at)
                .store_in_priority(by.map(Map::Frontends), at.key(by))
                .verdict(&Verdict::Goto("dispatch".into()))
        };
        let node_port = self.rule("node port").destination(at.address).if_in(Map::NodeAddresses, at.address);
        vec![
            dispatch(self.rule("Service address"), MatchKey::Address),
            dispatch(node_port, MatchKey::NodePort),
            self.rule("cluster IP without such a port")
                .destination(at.address)
                .if_in(Map::ClusterIps, at.address)
                .verdict(&Verdict::Goto("refuse".into())),
        ]
    }

    fn refuse(&self) -> Vec<Rule> {
        vec![self.rule("TCP").if_tcp().reset(), self.rule("other protocols").unreachable()]
    }

    fn internal(&self, rule: Rule, by: MatchKey) -> Rule {
        self.selector(rule, by, Map::Internal)
    }

    fn selector(&self, rule: Rule, by: MatchKey, map: Map) -> Rule {
        let at = Registers::new(self.family);
        let rule = key(rule, by, at).store_in_priority(by.map(map), at.key(by));
        rule.verdict(&Verdict::Goto(by.or("select", "node-select").into()))
    }

    fn cluster_ip(&self) -> Vec<Rule> {
        let mut rules = Vec::new();
        if self.masquerade_all {
            rules.push(self.mark(self.rule("any source")));
        } else if self.pods.is_some() {
            for it in self.from("from a pod") {
                rules.push(self.internal(it, MatchKey::Address));
            }
            rules.push(self.mark(self.rule("not from a pod")));
        }
        rules.push(self.internal(self.rule("to an endpoint"), MatchKey::Address));
        rules
    }

    /// Counts the connection, if the kernel can.
    fn count(&self, by: MatchKey) -> Option<Rule> {
        let at = Registers::new(self.family);
        let rule = || key(self.rule("count"), by, at).count_by(by.map(Map::Counted), at.key(by));
        (!self.cannot_count).then(rule)
    }

    /// A chain that counts, to try whether the kernel can.
    pub(crate) fn counting(family: Family) -> Chain {
        let (config_, by) = (Self::new(family, &Config::default(), &Host::default()), MatchKey::Address);
        Chain::new("count", Vec::from_iter(config_.count(by)))
    }

    fn external(&self, by: MatchKey) -> Vec<Rule> {
        let to_endpoint = [
            self.mark(self.rule("may leave for another node")),
            self.internal(self.rule("to an endpoint"), by),
        ];
        self.count(by).into_iter().chain(to_endpoint).collect()
    }

    fn external_local(&self, by: MatchKey) -> Vec<Rule> {
        let from_pods = self.from("from a pod: the local policy does not apply");
        let mut rules: Vec<_> = from_pods.into_iter().map(|it| self.internal(it, by)).collect();
        rules.push(self.mark(self.rule("from this node").if_from_local_address()));
        rules.push(self.internal(
            self.rule("from this node: the local policy does not apply").if_from_local_address(),
            by,
        ));
        rules.extend(self.count(by).into_iter().chain([self.to_endpoint_here(by)]));
        rules
    }

    fn to_endpoint_here(&self, by: MatchKey) -> Rule {
        self.selector(self.rule("external, to an endpoint on this node"), by, Map::External)
    }

    fn source_ranges(&self, then: &str) -> Vec<Rule> {
        let at = Registers::new(self.family);
        // The lookup in a list is a chain of its own, since a rule names its set; its result comes back as a priority.
        let list = key(self.rule("look up the source"), MatchKey::Address, at)
            .store_in_priority(Map::SourceLists, at.address);
        vec![
            list.verdict(&Verdict::Jump("sources".into())),
            self.rule("allowed source").if_priority(ALLOWED).verdict(&Verdict::Goto(then.into())),
            self.rule("any other source").verdict(&Verdict::Drop),
        ]
    }

    /// The chains that drop new connections to cluster IPs that no Service has, like kube-proxy's `cluster-ips-check`: they would
    /// leave by the default route. A packet to a Service never gets there: it was translated or refused before.
    fn unassigned(&self) -> Vec<Chain> {
        let drop = |net: &IpNet| {
            let rule = self.rule("a cluster IP that no Service has");
            // An address of the host itself is reached by this interface.
            rule.if_outgoing_interface_is_not("lo").if_to(*net).if_new().verdict(&Verdict::Drop)
        };
        let rules: Vec<_> = self.service_cidrs.iter().map(drop).collect();
        let hooks = [("unassigned-forward", Hook::FORWARD), ("unassigned-output", Hook::OUTPUT_FILTER)];
        let hooks = hooks.into_iter().filter(|_| !rules.is_empty());
        hooks.map(|(name, hook)| Chain::base(name, hook, rules.clone())).collect()
    }

    fn postrouting(&self) -> Vec<Rule> {
        let translated = self.rule("translated").if_translated().verdict(&Verdict::Goto("translated".into()));
        let mut rules = vec![translated];
        rules.extend(self.masquerade("marked", |it| it.take_mark(self.mark)));
        rules
    }

    /// Masquerades what meets a condition: of UDP from ports that are no node ports by default, since a reply could be taken for
    /// a datagram to a node port by proxies that redirect sockets.
    fn masquerade(&self, comment: &str, condition: impl Fn(Rule) -> Rule) -> [Rule; 2] {
        let udp = self.rule(&format!("{comment}, UDP")).if_udp();
        [condition(udp).masquerade_from_ports(UDP_SOURCE_PORTS), condition(self.rule(comment)).masquerade()]
    }

    fn translated(&self) -> Vec<Rule> {
        let at = Registers::new(self.family);
        let destination = Register(at.width);
        let restore = self
            .rule("restore the priority")
            .if_priority_at_least(FIRST_NUMBER_OF_A_TRANSLATED_PACKET)
            .store_number_in_priority(0);
        let mut rules = vec![restore];
        rules.extend(self.masquerade("marked", |it| it.take_mark(self.mark)));
        rules.extend(self.masquerade("hairpin: from an endpoint to itself", |it| {
            it.source(Register(0)).destination(destination).if_in(Map::Hairpin, Register(0))
        }));
        rules
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_the_module_no_rule_counts() {
        let counting = |cannot_count| {
            let host = Host { cannot_count, ..Host::default() };
            let chains = TableConfig::new(Family::V4, &Config::default(), &host).chains();
            chains.iter().flat_map(|it| &it.rules).filter(|it| it.comment == "count").count()
        };
        assert_eq!((counting(false), counting(true)), (4, 0));
    }

    #[test]
    fn cluster_ips_of_no_service_are_dropped_in_the_ranges_of_the_family_only() {
        let count = |family, ranges: &[&str]| {
            let service_cidrs = ranges.iter().map(|it| it.parse().expect("a range")).collect();
            let host = Host { service_cidrs, ..Host::default() };
            let chains = TableConfig::new(family, &Config::default(), &host).chains();
            let own = chains.iter().filter(|it| it.name.starts_with("unassigned-"));
            own.map(|it| it.rules.len()).collect::<Vec<_>>()
        };
        assert_eq!(count(Family::V4, &[]), [0; 0]);
        assert_eq!(count(Family::V6, &["10.96.0.0/16"]), [0; 0]);
        assert_eq!(count(Family::V4, &["10.96.0.0/16", "10.98.0.0/16", "fd00:96::/112"]), [2, 2]);
        // Overlapping ranges are one.
        assert_eq!(count(Family::V4, &["10.96.0.0/16", "10.96.0.0/24"]), [1, 1]);
    }
}
