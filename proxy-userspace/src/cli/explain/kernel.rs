//! What the kernel has for a connection, and where that differs from what the brain says.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    path::Path,
};

use brain::{ClientKind, Explanation, Verdict};
use datapath::FrontendAddress;
use datapath_ebpf as ebpf;
use datapath_nft::{self as nft, PacketTarget};
use model::{FrontendKind, Protocol};
use netlink::host_addresses;
use serde::Serialize;

use super::forwarding::Forwarding;

#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Kernel {
    /// The active generation of the eBPF maps; none if there are none, or they do not concern the connection.
    pub(super) generation: Option<u32>,
    /// The endpoints that eBPF redirects to; none if it does not redirect.
    pub(super) sockets: Option<BTreeSet<SocketAddr>>,
    /// Whether the port is a node port, which this node may serve at other addresses only.
    #[serde(skip)]
    has_node_port: bool,
    #[serde(skip)]
    is_own_address: bool,
    /// Whether the client's network namespace was found.
    pub(super) is_client_known: bool,
    pub(super) has_tables: bool,
    /// Where nftables sends packets; none if it does not translate them.
    pub(super) packets: Option<Packets>,
    /// The endpoints that the client avoids; those that any client avoids, if its network namespace is unknown.
    pub(super) ejected: Vec<Ejected>,
    /// The endpoint that the client keeps, if its network namespace is known.
    pub(super) affinity: Option<Kept>,
    /// What becomes of packets from outside; none if they are not forwarded, or if the client is not outside.
    pub(super) forwarding: Option<Forwarding>,
    /// What could not be read.
    pub(super) errors: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum Packets {
    Endpoints(BTreeSet<SocketAddr>),
    Refused,
    Dropped,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Ejected {
    pub(super) endpoint: SocketAddr,
    /// For how many clients, if the client's network namespace is unknown; it may be one of them.
    pub(super) clients: Option<usize>,
    /// For how long, at most.
    pub(super) seconds: u64,
    /// How many connections to it were not answered in time since its last success, over all of these clients.
    pub(super) timeouts: u32,
    /// How many were refused since then.
    pub(super) refusals: u32,
    /// How often it was ejected since then, at most for one of them.
    pub(super) ejections: u16,
}

impl Ejected {
    /// Why it is ejected, as in `5 timeouts and 1 refusal, ejected 3 times in a row`.
    pub(super) fn cause(&self) -> String {
        let failures = [(self.timeouts, "timeout"), (self.refusals, "refusal")];
        let failures = failures.into_iter().filter(|(number, _)| *number > 0);
        let failures = failures.map(|(number, name)| model::counted(number, name));
        let failures = failures.collect::<Vec<_>>().join(" and ");
        match self.ejections {
            0 | 1 => failures,
            ejections => format!("{failures}, ejected {ejections} times in a row"),
        }
    }
}

/// An endpoint that a client keeps by session affinity.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Kept {
    pub(super) endpoint: SocketAddr,
    /// For how long if it does not connect again.
    pub(super) seconds: u64,
}

/// Whose connections are asked about.
#[derive(Clone, Copy, Debug)]
pub(super) enum Asked<'a> {
    /// Those of one client, with its addresses if it is a pod.
    Client(ClientKind, &'a [IpAddr]),
    /// Those of all programs on this node.
    All,
}

impl Kernel {
    /// Reads what concerns connections to an address; of eBPF if there are pins. What cannot be read is an error in the result.
    pub(super) fn read(
        pin_dir: Option<&Path>,
        (address, protocol): (SocketAddr, Protocol),
        asked: Asked<'_>,
    ) -> Self {
        let is_own_address =
            address.ip().is_loopback() || host_addresses::read().is_ok_and(|it| it.contains(&address.ip()));
        let mut kernel = Self { is_own_address, ..Self::default() };
        let destination = FrontendAddress { address, protocol };
        let is_outside = matches!(asked, Asked::Client(ClientKind::Outside, _));
        match nft::lookup(&destination) {
            Ok(None) => {}
            Ok(Some(nft::Lookup { internal, external, has_node_port, .. })) => {
                kernel.has_tables = true;
                kernel.has_node_port = has_node_port;
                kernel.packets = if is_outside { external } else { internal }.map(Into::into);
            }
            Err(error) => kernel.error("nftables", error),
        }
        // No hook sees the sockets of other hosts, and none those of SCTP.
        if let Some(pin_dir) = pin_dir.filter(|_| !is_outside && protocol != Protocol::Sctp) {
            let netns = match asked {
                Asked::Client(ClientKind::Pod, addresses) => ebpf::client_namespace(Some(addresses)),
                Asked::Client(..) => ebpf::client_namespace(None),
                Asked::All => Ok(None),
            };
            let netns = netns.ok().flatten();
            kernel.is_client_known = netns.is_some();
            match ebpf::lookup(pin_dir, &destination, netns) {
                Ok(found) => kernel.add_sockets(found),
                // nftables may be the only datapath.
                Err(ebpf::Error::NotInitialized(_)) => {}
                Err(error) => kernel.error("eBPF", error),
            }
        }
        if address.ip().is_loopback()
            && matches!(asked, Asked::Client(ClientKind::Pod | ClientKind::Outside, _))
        {
            // Their loopback is not this node's.
            (kernel.sockets, kernel.packets) = (None, None);
        }
        kernel
    }

    /// The explanation by what the datapath decides and the brain does not know: at which addresses this node serves node
    /// ports, and whether sockets or nftables decide: sockets are refused, packets are dropped.
    pub(super) fn correct(&self, mut explanation: Explanation) -> Explanation {
        if explanation.client.kind != ClientKind::Outside && self.errors.is_empty() {
            let is_udp = explanation.protocol == "UDP";
            match explanation.verdict {
                Verdict::Dropped if is_udp && self.sockets.is_some() && !self.has_tables => {
                    explanation.verdict = Verdict::Refused;
                }
                Verdict::Refused if self.sockets.is_none() && self.packets == Some(Packets::Dropped) => {
                    explanation.verdict = Verdict::Dropped;
                }
                _ => {}
            }
        }
        let node_port = FrontendKind::NodePort.to_string();
        let is_node_port =
            explanation.rules.iter().any(|it| it.rule == "frontend" && it.says.starts_with(&node_port));
        let is_served = self.sockets.is_some() || self.packets.is_some();
        if !is_node_port || !self.has_node_port || is_served || !self.errors.is_empty() {
            return explanation;
        }
        let (ip, service) =
            (explanation.destination.ip(), explanation.service.as_deref().unwrap_or_default());
        let reason = match self.is_own_address {
            true => format!(
                "{service} has this node port, and node ports are not served at {ip} here (--backend, --nodeport-addresses)"
            ),
            false => format!(
                "{service} has this node port, and {ip} is no address of this node: the node that has it decides, ask there"
            ),
        };
        Explanation {
            verdict: Verdict::Untranslated,
            reason,
            service: None,
            port: None,
            rules: Vec::new(),
            endpoints: Vec::new(),
            ..explanation
        }
    }

    fn add_sockets(&mut self, found: ebpf::Lookup) {
        let ebpf::Lookup { generation, frontend, has_node_port, ejected, affinity } = found;
        self.has_node_port |= has_node_port;
        self.generation = Some(generation);
        self.sockets = frontend.map(|it| it.backends.into_iter().collect());
        let ejected = ejected.into_iter().map(|it| Ejected {
            endpoint: it.backend,
            clients: (!self.is_client_known).then_some(it.clients),
            seconds: it.remaining.as_secs(),
            timeouts: it.timeouts,
            refusals: it.refusals,
            ejections: it.ejections,
        });
        self.ejected = ejected.collect();
        self.affinity = affinity.map(|(endpoint, it)| Kept { endpoint, seconds: it.as_secs() });
    }

    pub(super) fn add_forwarding(&mut self, found: Result<Option<Forwarding>, ebpf::Error>) {
        match found {
            Ok(found) => self.forwarding = found,
            Err(error) => self.error("eBPF", error),
        }
    }

    fn error(&mut self, what: &str, error: impl Into<anyhow::Error>) {
        self.errors.push(format!("{what}: {:#}", error.into()));
    }

    /// Where the kernel differs from an explanation. nftables may lack the endpoints that packets avoid.
    pub(super) fn differences(
        &self,
        explanation: &Explanation,
        avoided: &BTreeSet<SocketAddr>,
    ) -> Vec<String> {
        if explanation.destination.ip().is_loopback() && explanation.client.kind != ClientKind::Node {
            // It stays with the client, whatever this node has for its own programs.
            return Vec::new();
        }
        let used = explanation.endpoints.iter().filter(|it| it.used).map(|it| it.endpoint);
        let expected: Option<BTreeSet<_>> = explanation.service.is_some().then(|| used.collect());
        let packets = self.packets.as_ref().map(|it| match it {
            Packets::Endpoints(endpoints) => {
                let avoided = avoided.iter().filter(|it| expected.iter().any(|all| all.contains(it)));
                endpoints.iter().chain(avoided).copied().collect()
            }
            Packets::Refused | Packets::Dropped => BTreeSet::new(),
        });
        let found = [("eBPF", self.sockets.as_ref()), ("nftables", packets.as_ref())];
        let found: Vec<_> = found.into_iter().filter_map(|(name, it)| Some((name, it?))).collect();
        // What no Service has is refused or dropped by nftables alone.
        let is_decided = expected.is_some() || explanation.verdict != Verdict::Untranslated;
        if found.is_empty() && is_decided && !self.has_tables && self.errors.is_empty() {
            return vec!["the kernel does nothing with it: there are no nftables tables".into()];
        }
        if found.is_empty() && expected.is_some() && self.errors.is_empty() {
            return vec!["the kernel does not translate it".into()];
        }
        found.into_iter().filter_map(|(name, it)| difference(name, expected.as_ref(), it)).collect()
    }
}

/// What a datapath has, if that is not what is expected of it.
fn difference(
    name: &str,
    expected: Option<&BTreeSet<SocketAddr>>,
    found: &BTreeSet<SocketAddr>,
) -> Option<String> {
    let list = |it: Vec<&SocketAddr>| it.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let Some(expected) = expected else {
        let to = if found.is_empty() { "nothing".into() } else { list(found.iter().collect()) };
        return Some(format!("{name} translates it to {to}"));
    };
    let missing: Vec<_> = expected.difference(found).collect();
    let extra: Vec<_> = found.difference(expected).collect();
    match (missing.is_empty(), extra.is_empty()) {
        (true, true) => None,
        (false, true) => Some(format!("{name} lacks {}", list(missing))),
        (true, false) => Some(format!("{name} also has {}", list(extra))),
        (false, false) => Some(format!("{name} lacks {} and has {}", list(missing), list(extra))),
    }
}

impl From<PacketTarget> for Packets {
    fn from(target: PacketTarget) -> Self {
        match target {
            PacketTarget::Endpoints(endpoints) => Self::Endpoints(endpoints.into_iter().collect()),
            PacketTarget::Refused => Self::Refused,
            PacketTarget::Dropped => Self::Dropped,
        }
    }
}

#[cfg(test)]
mod tests {
    use brain::AppliedRule;
    use serde_json::json;

    use super::*;

    fn endpoints(last: &[u8]) -> BTreeSet<SocketAddr> {
        last.iter().map(|it| SocketAddr::from(([10, 1, 0, *it], 80))).collect()
    }

    /// A Service with the endpoint 1, which is used, and 2, which is not.
    fn explanation(service: Option<&str>) -> Explanation {
        let verdict = if service.is_some() { Verdict::Redirected } else { Verdict::Untranslated };
        let explanation = json!({
            "node": "n1", "client": { "kind": "node", "addresses": [] }, "destination": "10.96.0.1:80",
            "protocol": "TCP", "verdict": verdict, "reason": "", "service": service, "rules": [],
            "endpoints": [
                { "endpoint": "10.1.0.1:80", "used": true, "reason": "" },
                { "endpoint": "10.1.0.2:80", "used": false, "reason": "" },
            ],
        });
        serde_json::from_value(explanation).unwrap()
    }

    #[track_caller]
    fn check(sockets: Option<&[u8]>, packets: Option<&[u8]>, expect: &[&str]) {
        let kernel = Kernel {
            sockets: sockets.map(endpoints),
            has_tables: true,
            packets: packets.map(|it| Packets::Endpoints(endpoints(it))),
            ..Kernel::default()
        };
        assert_eq!(kernel.differences(&explanation(Some("ns/web")), &endpoints(&[])), expect);
    }

    #[test]
    fn what_differs_is_named_unless_packets_avoid_the_endpoint() {
        check(Some(&[1]), Some(&[1]), &[]);
        check(Some(&[1]), None, &[]);
        check(None, Some(&[1]), &[]);
        check(None, None, &["the kernel does not translate it"]);
        check(Some(&[1, 3]), Some(&[]), &["eBPF also has 10.1.0.3:80", "nftables lacks 10.1.0.1:80"]);
        check(Some(&[2, 3]), None, &["eBPF lacks 10.1.0.1:80 and has 10.1.0.2:80, 10.1.0.3:80"]);
        let refused = Kernel { packets: Some(Packets::Refused), ..Kernel::default() };
        assert_eq!(
            refused.differences(&explanation(None), &endpoints(&[])),
            ["nftables translates it to nothing"]
        );
        assert!(Kernel::default().differences(&explanation(None), &endpoints(&[])).is_empty());
        let dropped = Explanation { verdict: Verdict::Dropped, ..explanation(None) };
        let nothing = "the kernel does nothing with it: there are no nftables tables";
        assert_eq!(Kernel::default().differences(&dropped, &endpoints(&[])), [nothing]);
        assert_eq!(Kernel::default().differences(&explanation(Some("ns/web")), &endpoints(&[])), [nothing]);
        let packets = Some(Packets::Endpoints(endpoints(&[])));
        let kernel = Kernel { has_tables: true, packets, ..Kernel::default() };
        let differences =
            |avoided: &[u8]| kernel.differences(&explanation(Some("ns/web")), &endpoints(avoided));
        assert_eq!(differences(&[1, 2]), [""; 0]);
        assert_eq!(differences(&[2]), ["nftables lacks 10.1.0.1:80"]);
    }

    #[test]
    fn sockets_are_refused_and_packets_dropped() {
        use Verdict::{Dropped, Refused};
        let udp = |verdict| Explanation { verdict, protocol: "UDP".into(), ..explanation(Some("ns/web")) };
        let tcp = |verdict| Explanation { verdict, ..explanation(Some("ns/web")) };
        let mut outside = udp(Dropped);
        outside.client.kind = ClientKind::Outside;
        let sockets = || Kernel { sockets: Some(endpoints(&[])), ..Kernel::default() };
        let unread = Kernel { errors: vec!["nftables: no permission".into()], ..sockets() };
        let dropped = || Kernel { has_tables: true, packets: Some(Packets::Dropped), ..Kernel::default() };
        for (kernel, explanation, expected) in [
            (sockets(), udp(Dropped), Refused),
            (Kernel { has_tables: true, ..sockets() }, udp(Dropped), Dropped),
            (unread, udp(Dropped), Dropped),
            (sockets(), outside, Dropped),
            (sockets(), tcp(Refused), Refused),
            (dropped(), tcp(Refused), Dropped),
            (Kernel { sockets: Some(endpoints(&[])), ..dropped() }, tcp(Refused), Refused),
        ] {
            assert_eq!(kernel.correct(explanation).verdict, expected);
        }
    }

    #[test]
    fn the_datapath_knows_where_node_ports_are_served() {
        let at = |says: &str| Explanation {
            rules: vec![AppliedRule { rule: "frontend".into(), says: says.into() }],
            ..explanation(Some("ns/web"))
        };
        let node_port = at("node port, on loopback");
        let kernel = |has_node_port, sockets: Option<&[u8]>| Kernel {
            has_node_port,
            is_own_address: true,
            sockets: sockets.map(endpoints),
            ..Kernel::default()
        };
        let corrected = kernel(true, None).correct(node_port.clone());
        assert_eq!((corrected.verdict, corrected.endpoints.len()), (Verdict::Untranslated, 0));
        assert!(corrected.reason.contains("not served at 10.96.0.1 here"), "{}", corrected.reason);
        let elsewhere = Kernel { is_own_address: false, ..kernel(true, None) }.correct(node_port.clone());
        assert!(elsewhere.reason.contains("no address of this node"), "{}", elsewhere.reason);
        // What the kernel lacks altogether is a difference.
        for (kernel, it) in [
            (kernel(true, Some(&[1])), node_port.clone()),
            (kernel(false, None), node_port),
            (kernel(true, None), at("cluster IP")),
        ] {
            assert_eq!(kernel.correct(it.clone()), it);
        }
    }

    #[test]
    fn time_outs_and_refusals_are_told_apart() {
        for (timeouts, refusals, ejections, expect) in [
            (5, 0, 1, "5 timeouts"),
            (0, 1, 1, "1 refusal"),
            (1, 2, 3, "1 timeout and 2 refusals, ejected 3 times in a row"),
        ] {
            let endpoint = "10.1.0.1:80".parse().unwrap();
            let it = Ejected { endpoint, clients: None, seconds: 1, timeouts, refusals, ejections };
            assert_eq!(it.cause(), expect);
        }
    }
}
