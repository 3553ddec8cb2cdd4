//! The chains of a table and their rules: what is done with a packet, whichever Services there are.
//!
//! The one rule: no chain knows a Service.
//! A chain looks the packet's destination up, and what it finds there says which chain goes on.
//!
//! Between two rules a number travels in the packet's priority (`skb->priority`), since registers do not outlive a rule,
//! and a map that leads to chains by itself would cost the kernel a walk through all of it at every change.
//! Only the first packet of a connection comes this way, and it leaves with the priority 0, which is what it came with
//! unless somebody had set it.

use model::Family;

use crate::{
    config::Pods,
    elements::{Element, Elements, Value},
    endpoint_selector::{By, DROP, REFUSE, Registers, key},
    expressions::{Register, Rule},
    schema::{Bytes, Map},
    tables::{Hook, Verdict},
};

/// What is done with packets to a frontend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Behaviour {
    /// It is a cluster IP.
    ClusterIp = 1,
    /// It can be reached from outside, and any endpoint will do.
    External = 2,
    /// It can be reached from outside, and traffic from there stays on this node and keeps its source.
    ExternalLocal = 3,
    /// Like [`Behaviour::External`], for chosen sources.
    Guarded = 4,
    /// Like [`Behaviour::ExternalLocal`], for chosen sources.
    GuardedLocal = 5,
    /// It is a node port; else like [`Behaviour::External`].
    NodePort = 6,
    /// It is a node port; else like [`Behaviour::ExternalLocal`].
    NodePortLocal = 7,
}

impl Behaviour {
    /// All of them.
    pub(super) const ALL: [Self; 7] = [
        Self::ClusterIp,
        Self::External,
        Self::ExternalLocal,
        Self::Guarded,
        Self::GuardedLocal,
        Self::NodePort,
        Self::NodePortLocal,
    ];

    /// How it is written down.
    pub(super) fn word(self) -> u32 {
        self as u32
    }

    /// The behaviour that was written down as a word.
    pub(super) fn of(word: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|it| it.word() == word)
    }

    /// Whether traffic from outside goes another way than traffic from inside.
    pub(super) fn is_local(self) -> bool {
        matches!(self, Self::ExternalLocal | Self::GuardedLocal | Self::NodePortLocal)
    }

    /// The chain that does it.
    pub(super) fn chain(self) -> &'static str {
        match self {
            Self::ClusterIp => "cluster-ip",
            Self::External => "external",
            Self::ExternalLocal => "external-local",
            Self::Guarded => "guarded",
            Self::GuardedLocal => "guarded-local",
            Self::NodePort => "node-port",
            Self::NodePortLocal => "node-port-local",
        }
    }
}

/// A chain and its rules.
#[derive(Clone, Debug)]
pub(super) struct Chain {
    /// Its name.
    pub(super) name: String,
    /// Where packets come to it, unless another chain sends them.
    pub(super) hook: Option<Hook>,
    /// Its rules.
    pub(super) rules: Vec<Rule>,
}

/// What the chains of a table depend on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Setting {
    /// The family of the table.
    pub(super) family: Family,
    /// The bit of the packet mark that says "masquerade".
    pub(super) mark: u32,
    /// Whether all traffic to cluster IPs is masqueraded.
    pub(super) masquerade_all: bool,
    /// Whose traffic to cluster IPs is not masqueraded; none if nobody's is.
    pub(super) pods: Option<Pods>,
    /// Whose traffic to external addresses comes from inside.
    pub(super) inside: Option<Pods>,
}

impl Setting {
    /// The chains that are always there.
    pub(super) fn chains(&self) -> Vec<Chain> {
        let named = |name: &str, rules| Chain { name: name.to_owned(), hook: None, rules };
        let dispatch = |map, comment: &str| vec![self.rule(comment).dispatch(map)];
        let mut chains = vec![
            named("refuse", self.refuse()),
            named("mark", vec![self.rule("this node will be its source").set_mark(self.mark)]),
            named("pick", dispatch(Map::Picks, "by the number of endpoints")),
            named("node-pick", dispatch(Map::NodePicks, "by the number of endpoints")),
            named("cluster-ip", self.cluster_ip()),
            named("external", self.external(By::Address)),
            named("external-local", self.external_local(By::Address)),
            named("guarded", self.guarded("external")),
            named("guarded-local", self.guarded("external-local")),
            named("node-port", self.external(By::NodePort)),
            named("node-port-local", self.external_local(By::NodePort)),
            named("behave", dispatch(Map::Behaviours, "by what the address is")),
            named("services", self.services()),
        ];
        let hooked = |name: &str, hook, rules| Chain { name: name.to_owned(), hook: Some(hook), rules };
        let services = || vec![self.to("services to all", Verdict::Jump("services".into()))];
        chains.extend([
            hooked("prerouting", Hook::Prerouting, services()),
            hooked("output", Hook::Output, services()),
            // The kernel takes the rules as they are when a packet comes to a base chain, but the sets as they are at each
            // lookup. A packet that is on its way through while a change is committed may meet rules of before and sets of
            // after, find nothing, and leave as it came; and its connection would stay untranslated for good.
            // NAT asks one base chain after the other until one translates: the next one starts with the rules of after.
            hooked("prerouting-again", Hook::PreroutingAgain, services()),
            hooked("output-again", Hook::OutputAgain, services()),
            hooked("postrouting", Hook::Postrouting, self.postrouting()),
        ]);
        chains
    }

    /// The elements that are always there.
    pub(super) fn elements(&self) -> Elements {
        let goto = |chain: &str| Value::Verdict(Verdict::Goto(chain.into()));
        let mut elements = Elements::new();
        for it in Behaviour::ALL {
            let key = Bytes::new().number(it.word());
            elements.insert(Element::new(self.family, Map::Behaviours, key), goto(it.chain()));
        }
        for by in By::ALL {
            for (word, value) in [(REFUSE, goto("refuse")), (DROP, Value::Verdict(Verdict::Drop))] {
                let key = Bytes::new().number(word);
                elements.insert(Element::new(self.family, by.picks(), key), value);
            }
        }
        elements
    }

    fn rule(&self, comment: &str) -> Rule {
        Rule::new(self.family, comment)
    }

    fn to(&self, comment: &str, verdict: Verdict) -> Rule {
        self.rule(comment).verdict(&verdict)
    }

    fn mark(&self, rule: Rule) -> Rule {
        rule.verdict(&Verdict::Jump("mark".into()))
    }

    /// A condition for each way to be a pod; any of them will do.
    fn from(&self, pods: Option<&Pods>, comment: &str) -> Vec<Rule> {
        match pods {
            None => Vec::new(),
            Some(Pods::Within(nets)) => nets.iter().map(|net| self.rule(comment).if_from(*net)).collect(),
            Some(Pods::Interface(name)) => vec![self.rule(comment).came_by(name)],
            Some(Pods::Prefix(prefix)) => vec![self.rule(comment).came_by_prefix(prefix)],
        }
    }

    fn services(&self) -> Vec<Rule> {
        let at = Registers::new(self.family);
        let behave = |rule: Rule, by: By| {
            key(rule, by, at).carry(by.frontends(), at.key(by)).verdict(&Verdict::Goto("behave".into()))
        };
        let node_port =
            self.rule("a node port").destination(at.address).if_in(Map::NodeAddresses, at.address);
        vec![
            behave(self.rule("an address of a Service"), By::Address),
            behave(node_port, By::NodePort),
            self.rule("a port that the Service does not have")
                .destination(at.address)
                .if_in(Map::ClusterIps, at.address)
                .verdict(&Verdict::Goto("refuse".into())),
        ]
    }

    fn refuse(&self) -> Vec<Rule> {
        vec![self.rule("over TCP").if_tcp().reset(), self.rule("over anything else").unreachable()]
    }

    fn inside(&self, rule: Rule, by: By) -> Rule {
        self.pick(rule, by, by.inside())
    }

    fn pick(&self, rule: Rule, by: By, map: Map) -> Rule {
        let at = Registers::new(self.family);
        let rule = key(rule, by, at).carry(map, at.key(by));
        rule.verdict(&Verdict::Goto(by.or("pick", "node-pick").into()))
    }

    fn cluster_ip(&self) -> Vec<Rule> {
        let mut rules = Vec::new();
        if self.masquerade_all {
            rules.push(self.mark(self.rule("whoever it comes from")));
        } else if self.pods.is_some() {
            for it in self.from(self.pods.as_ref(), "from a pod") {
                rules.push(self.inside(it, By::Address));
            }
            rules.push(self.mark(self.rule("not from a pod")));
        }
        rules.push(self.inside(self.rule("to an endpoint"), By::Address));
        rules
    }

    fn external(&self, by: By) -> Vec<Rule> {
        vec![
            self.mark(self.rule("it may leave for another node")),
            self.inside(self.rule("to an endpoint"), by),
        ]
    }

    fn external_local(&self, by: By) -> Vec<Rule> {
        let mut rules: Vec<_> = self
            .from(self.inside.as_ref(), "from a pod: the policy is for others")
            .into_iter()
            .map(|it| self.inside(it, by))
            .collect();
        rules.push(self.mark(self.rule("from this node").if_from_here()));
        rules.push(self.inside(self.rule("from this node: the policy is for others").if_from_here(), by));
        rules.push(self.pick(self.rule("from outside, to an endpoint on this node"), by, by.outside()));
        rules
    }

    fn guarded(&self, then: &str) -> Vec<Rule> {
        let at = Registers::new(self.family);
        let source = key(self.rule("from a source that may use it"), By::Address, at).source(at.next);
        vec![
            source.if_in(Map::Sources, at.address).verdict(&Verdict::Goto(then.into())),
            self.to("from any other source", Verdict::Drop),
        ]
    }

    fn postrouting(&self) -> Vec<Rule> {
        let at = Registers::new(self.family);
        let destination = Register(at.width);
        vec![
            self.rule("marked").take_mark(self.mark).masquerade(),
            self.rule("from an endpoint to itself")
                .if_translated()
                .source(Register(0))
                .destination(destination)
                .if_in(Map::Hairpin, Register(0))
                .masquerade(),
        ]
    }
}
