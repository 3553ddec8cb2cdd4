//! A selection in words: the rules, the verdict, and a reason for each endpoint.

use std::{cmp::Reverse, net::IpAddr};

use ipnet::IpNet;
use model::{
    Family, FrontendKind, Protocol,
    cluster::{Endpoint, EndpointSlice},
    conflicts::FrontendKey,
    state::{Algorithm, LoadBalancing, Pod, Scope, ServicePort, SocketLb, TargetPort, TrafficPolicy},
};

use super::{
    destination::{Frontend, NodeAddress, Search},
    explanation::{AppliedRule, ClientKind, ExplainedEndpoint, Explanation, Verdict},
};
use crate::{
    NodeView,
    candidates::Candidate,
    forwarding::{self, NotForwarded, forwarded_port},
    select::{Membership, Selection, Topology},
};

/// A frontend, and the endpoints that are selected for it.
#[derive(Debug)]
pub(super) struct Found<'a> {
    pub(super) search: Search<'a>,
    pub(super) frontend: Frontend<'a>,
    /// The slices that the candidates come from.
    pub(super) slices: Vec<&'a EndpointSlice>,
    pub(super) candidates: Vec<Candidate<'a>>,
    pub(super) selection: Selection,
    pub(super) scope: Scope,
    /// What is known of the connection.
    pub(super) explanation: &'a Explanation,
}

impl Found<'_> {
    /// The rules in the order in which they are applied.
    pub(super) fn rules(&self) -> Vec<AppliedRule> {
        let rules = [
            ("service", Some(self.service())),
            ("frontend", Some(self.kind())),
            ("sockets", self.sockets().map(Into::into)),
            ("conflict", self.conflict()),
            ("sources", self.sources().map(|(says, _)| says)),
            ("policy", Some(self.policy())),
            ("hints", self.hints()),
            ("forwarding", self.forwarding()),
            ("selection", Some(self.selection())),
        ];
        rules
            .into_iter()
            .filter_map(|(rule, says)| Some(AppliedRule { rule: rule.into(), says: says? }))
            .collect()
    }

    pub(super) fn verdict(&self) -> (Verdict, String) {
        if let Some((says, false)) = self.sources() {
            return (Verdict::Dropped, says);
        }
        let set = self.selection.set(self.scope);
        let used: Vec<_> = self.candidates.iter().zip(set).filter(|(_, it)| it.is_member()).collect();
        match &used[..] {
            [] => {}
            [(only, _)] => return (Verdict::Redirected, format!("to {}, the only endpoint", only.target())),
            _ => return (Verdict::Redirected, format!("to one of {} endpoints", used.len())),
        }
        if !self.selection.has_any_endpoint {
            return (Verdict::Refused, self.no_endpoint());
        }
        let policy = match self.scope {
            Scope::Internal => "internalTrafficPolicy",
            Scope::External | Scope::Cluster => "externalTrafficPolicy",
        };
        // TCP sockets are refused at once; packets are dropped, as kube-proxy does, also those of sockets that leave them.
        let is_refused = self.explanation.client.kind != ClientKind::Outside
            && self.explanation.protocol == "TCP"
            && self.pod().is_none_or(|it| it.socket_lb != SocketLb::Off);
        let verdict = if is_refused { Verdict::Refused } else { Verdict::Dropped };
        (verdict, format!("{policy} is Local, and no endpoint on this node serves"))
    }

    /// Every candidate, those that are used first.
    pub(super) fn endpoints(&self) -> Vec<ExplainedEndpoint> {
        let set = self.selection.set(self.scope);
        let mut endpoints: Vec<_> = self
            .candidates
            .iter()
            .zip(set)
            .map(|(candidate, membership)| ExplainedEndpoint {
                endpoint: candidate.target(),
                used: membership.is_member(),
                reason: self.reason(candidate.endpoint, *membership),
                pod: candidate.endpoint.pod.as_deref().map(ToOwned::to_owned),
                node: candidate.endpoint.node.as_deref().map(ToOwned::to_owned),
            })
            .collect();
        endpoints.sort_by_key(|it| (Reverse(it.used), it.endpoint));
        endpoints
    }

    fn reason(&self, endpoint: &Endpoint, membership: Membership) -> String {
        let zone = self.node().zone.unwrap_or_default();
        let is_local = self.selection.policy(self.scope) == TrafficPolicy::Local;
        match (membership, self.selection.topology) {
            (Membership::Ready, _) if is_local => "ready, on this node".into(),
            (Membership::Ready, Topology::Node) => "ready, hint for this node".into(),
            (Membership::Ready, Topology::Zone) => format!("ready, hint for zone {zone}"),
            (Membership::Ready, Topology::Unrestricted) => "ready".into(),
            (Membership::Fallback, _) if is_local => {
                "terminating, still serves: none on this node is ready".into()
            }
            (Membership::Fallback, _) => "terminating, still serves: none is ready".into(),
            (Membership::Elsewhere, Topology::Zone) if !is_local => {
                format!("hint for zone {}, this is zone {zone}", endpoint.zone_hints().join(", "))
            }
            (Membership::Elsewhere, Topology::Node) if !is_local => {
                format!("hint for node {}", endpoint.node_hints().join(", "))
            }
            (Membership::Elsewhere, _) => "not on this node".into(),
            (Membership::Terminating, _) => "terminating, others are ready".into(),
            (Membership::NotReady, _) if endpoint.conditions.terminating => {
                "terminating, does not serve".into()
            }
            (Membership::NotReady, _) => "not ready".into(),
        }
    }

    fn node(&self) -> NodeView<'_> {
        NodeView::new(self.search.cluster, self.search.node)
    }

    fn ip(&self) -> IpAddr {
        self.explanation.destination.ip()
    }

    fn port(&self) -> &ServicePort {
        &self.frontend.state.ports[self.frontend.port]
    }

    fn service(&self) -> String {
        let port = self.port();
        let name = if port.name.is_empty() { String::new() } else { format!(" {}", port.name) };
        let target = match &port.target_port {
            TargetPort::Number(number) => number.to_string(),
            TargetPort::Name(name) => name.clone(),
        };
        let service = &self.frontend.state.name;
        format!("{service}, port{name} {}/{} to targetPort {target}", port.port, port.protocol)
    }

    fn kind(&self) -> String {
        let (kind, ip) = (self.frontend.kind, self.ip());
        match self.frontend.node {
            None => kind.to_string(),
            Some(NodeAddress::Own) => format!("{kind}: {ip} is an address of this node"),
            Some(NodeAddress::Loopback) => format!("{kind}, on loopback"),
            Some(NodeAddress::Other(node)) => format!("{kind}: {ip} is an address of node {node}"),
            Some(NodeAddress::Unknown) => {
                format!("{kind}, if {ip} is an address of this node: no Node object has it")
            }
        }
    }

    /// The other Services that claim the frontend.
    fn conflict(&self) -> Option<String> {
        let port = self.port();
        let (address, number) = match self.frontend.kind {
            FrontendKind::NodePort => (None, port.node_port?),
            _ => (Some(self.ip()), port.port),
        };
        let key = FrontendKey { address, port: number, protocol: port.protocol };
        let losers: Vec<_> =
            self.search.admission.owners.claimants(key).skip(1).map(ToString::to_string).collect();
        let owner = &self.frontend.service.name;
        let rule = "by cluster IP, then age, then name";
        (!losers.is_empty())
            .then(|| format!("{} claims it, too; it belongs to {owner} ({rule})", losers.join(", ")))
    }

    /// The source ranges, and whether they allow the client as far as that is known.
    fn sources(&self) -> Option<(String, bool)> {
        if self.frontend.kind != FrontendKind::LoadBalancerIp {
            return None;
        }
        let family = Family::of(self.ip());
        let ranges = self.frontend.state.source_ranges.iter().filter(|it| Family::of(it.addr()) == family);
        let ranges: Vec<&IpNet> = ranges.collect();
        if ranges.is_empty() || ranges.iter().any(|it| it.prefix_len() == 0) {
            return None;
        }
        let list: Vec<_> = ranges.iter().map(ToString::to_string).collect();
        let list = format!("loadBalancerSourceRanges {}", list.join(", "));
        let own = self.explanation.client.addresses.iter().filter(|it| Family::of(**it) == family);
        let (inside, outside): (Vec<&IpAddr>, Vec<_>) =
            own.partition(|ip| ranges.iter().any(|it| it.contains(*ip)));
        Some(match (&inside[..], &outside[..]) {
            ([], []) => (format!("{list}: the client's address decides"), true),
            ([], [ip, ..]) => (format!("{list}: {ip} is not in it"), false),
            ([ip, ..], _) => (format!("{list}: {ip} is in it"), true),
        })
    }

    fn policy(&self) -> String {
        const EVERYWHERE: &str = "endpoints on every node";
        const HERE: &str = "endpoints on this node only";
        let service = self.frontend.service;
        match (self.scope, service.internal_policy, service.external_policy) {
            (Scope::Internal, TrafficPolicy::Cluster, _) => {
                format!("internalTrafficPolicy Cluster: {EVERYWHERE}")
            }
            (Scope::Internal, TrafficPolicy::Local, _) => format!("internalTrafficPolicy Local: {HERE}"),
            (Scope::External, _, TrafficPolicy::Local) => format!("externalTrafficPolicy Local: {HERE}"),
            (_, _, TrafficPolicy::Cluster) => format!("externalTrafficPolicy Cluster: {EVERYWHERE}"),
            (Scope::Cluster, _, TrafficPolicy::Local) => {
                format!("{EVERYWHERE}: externalTrafficPolicy Local is for clients outside the cluster")
            }
        }
    }

    /// How topology hints are used, if there are any.
    fn hints(&self) -> Option<String> {
        let ready = || self.candidates.iter().map(|it| it.endpoint).filter(|it| it.conditions.ready);
        let (of_node, of_zone) = (
            ready().filter(|it| !it.node_hints().is_empty()).count(),
            ready().filter(|it| !it.zone_hints().is_empty()).count(),
        );
        if self.selection.policy(self.scope) == TrafficPolicy::Local || of_node.max(of_zone) == 0 {
            return None;
        }
        let all = ready().count();
        let missing = all - of_node.max(of_zone);
        Some(match (self.selection.topology, self.node().zone) {
            (Topology::Node, _) => "endpoints whose hint names this node".into(),
            (Topology::Zone, zone) => format!("endpoints whose hint names zone {}", zone.unwrap_or_default()),
            (Topology::Unrestricted, _) if missing > 0 => {
                format!("ignored: {missing} of {all} ready endpoints have none")
            }
            (Topology::Unrestricted, None) if of_zone == all => {
                "ignored: the Node object has no label topology.kubernetes.io/zone".into()
            }
            (Topology::Unrestricted, Some(zone)) if of_zone == all => {
                format!("ignored: none is for zone {zone}")
            }
            (Topology::Unrestricted, _) => "ignored: none is for this node".into(),
        })
    }

    /// The client, if it is a pod with an annotation.
    fn pod(&self) -> Option<&Pod> {
        self.search.cluster.pods.get(self.explanation.client.pod.as_deref()?).map(AsRef::as_ref)
    }

    /// Which sockets of the pod are left to packets.
    fn sockets(&self) -> Option<&'static str> {
        let pod = self.pod()?;
        Some(match pod.socket_lb {
            SocketLb::Off => {
                "all are left to packets, by the annotation kube-proxy-ebpf.io/socket-lb of the pod (--pod-annotations)"
            }
            SocketLb::TcpOnly => {
                "those of UDP are left to packets, by the annotation kube-proxy-ebpf.io/socket-lb of the pod (--pod-annotations)"
            }
        })
    }

    /// Whether packets from outside are forwarded whole, if that is requested.
    fn forwarding(&self) -> Option<String> {
        let (service, options) = (self.frontend.service, self.search.options);
        if self.scope != Scope::External || !forwarding::is_requested(service, options) {
            return None;
        }
        if self.frontend.kind == FrontendKind::NodePort {
            return Some("translated by this node: node ports are not forwarded".into());
        }
        if service.external_policy == TrafficPolicy::Local {
            return Some(
                "translated by this node: under the policy Local, packets enter by a node with endpoints"
                    .into(),
            );
        }
        if self.search.admission.admitted(&service.name).is_translated {
            return Some(
                "translated by this node: the rows do not fit into the namespace (--max-namespace-entries)"
                    .into(),
            );
        }
        let index = u16::try_from(self.frontend.port).ok()?;
        let family = Family::of(self.ip());
        let (state, node) = (&self.frontend.state, self.node());
        match forwarded_port(state, index, (family, node), &self.candidates, &self.selection) {
            Ok(port) => {
                let by = match service.load_balancing.external_forwarding {
                    Some(_) => "the annotation kube-proxy-ebpf.io/external-forwarding",
                    None => "--external-forwarding",
                };
                Some(format!(
                    "whole, to {} with endpoints, by {by}",
                    model::counted(port.nodes.len(), "node")
                ))
            }
            Err(NotForwarded::Sctp) => Some("translated by this node: SCTP is not forwarded".into()),
            Err(NotForwarded::NoNode(endpoint)) => {
                Some(format!("translated by this node: the endpoint {endpoint} is on no node"))
            }
            Err(NotForwarded::NoAddress | NotForwarded::NoEndpoint) => None,
        }
    }

    /// How one of the endpoints is selected for a connection.
    fn selection(&self) -> String {
        let service = self.frontend.service;
        let LoadBalancing { algorithm, slow_start, udp_to_packets, .. } = service.load_balancing;
        let mut says = match algorithm {
            Algorithm::Random => "at random".to_owned(),
            Algorithm::LeastConnections => {
                "of two random endpoints the one with fewer connections of this node (packets: at random)"
                    .into()
            }
        };
        if let Some(seconds) = slow_start {
            says += &format!("; a new endpoint has its full share after {seconds} s");
        }
        if let Some(it) = service.affinity {
            says += &format!("; a client keeps it for {} s (sessionAffinity ClientIP)", it.timeout_seconds);
        }
        if udp_to_packets && self.port().protocol == Protocol::Udp {
            says +=
                "; by the packet path, also for sockets, if there is one (annotation kube-proxy-ebpf.io/udp)";
        }
        says
    }

    /// Why no endpoint in the cluster could serve.
    fn no_endpoint(&self) -> String {
        let family = Family::of(self.ip());
        let has_addresses = self.slices.iter().any(|it| it.family == family && !it.endpoints.is_empty());
        let (port, name) = (self.port(), &self.frontend.service.name);
        match () {
            () if !self.candidates.is_empty() => "no endpoint is ready".into(),
            () if has_addresses => {
                format!("no EndpointSlice of {name} has the port {:?}/{}", port.name, port.protocol)
            }
            () if self.slices.iter().any(|it| !it.endpoints.is_empty()) => {
                format!("{name} has endpoints, but none with an {family} address")
            }
            () => format!("{name} has no endpoints"),
        }
    }
}
