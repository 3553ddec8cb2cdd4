//! Where packets of a client outside enter and go on to, whole: the row of the flow in the tables of this node's kernel.

use std::{
    cmp::Reverse,
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
    path::Path,
};

use brain::{ExplainedEndpoint, Explanation, Query, Verdict};
use datapath::FrontendAddress;
use datapath_ebpf::{self as ebpf, FlowRow, ForwardLookup, RowNode};
use model::Protocol;
use serde::{Deserialize, Serialize};

/// What becomes of packets to a frontend that is forwarded.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Forwarding {
    rows: u32,
    /// Whether the client's address alone selects the row (session affinity).
    by_client: bool,
    /// Whether forwarding has ended, and only connections that exist are forwarded.
    has_ended: bool,
    shares: Vec<Share>,
    /// The row of the client; none if it depends on a port that the question does not name.
    row: Option<ClientRow>,
    /// The interfaces at which the programs are attached.
    uplinks: Vec<String>,
}

/// The rows of a node.
#[derive(Clone, Debug, Serialize)]
struct Share {
    #[serde(flatten)]
    node: Node,
    rows: u32,
}

#[derive(Clone, Debug, Serialize)]
struct ClientRow {
    number: u32,
    owner: Node,
    second: Option<Node>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Node {
    /// What happens here to its packets.
    action: Action,
    /// Its name, if the process knows one with this address.
    node: Option<String>,
    /// Where it receives packets.
    address: Option<IpAddr>,
}

/// What happens on this node to packets of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
enum Action {
    /// An endpoint of this node serves them.
    Served,
    /// They are wrapped for another node.
    Wrapped,
    Translated,
}

pub(super) type NodeNames = BTreeMap<IpAddr, String>;

/// Reads the names of nodes of the page `/state`; none if it cannot be read.
pub(super) fn node_names(socket: &Path) -> NodeNames {
    #[derive(Deserialize)]
    struct State {
        #[serde(default)]
        nodes: Vec<Named>,
    }
    #[derive(Deserialize)]
    struct Named {
        name: String,
        #[serde(default)]
        addresses: Vec<IpAddr>,
    }
    let page = admin::get(socket, "/state").ok();
    let state: Option<State> = page.and_then(|it| serde_json::from_reader(it).ok());
    let nodes = state.into_iter().flat_map(|it| it.nodes);
    let names =
        nodes.flat_map(|Named { name, addresses }| addresses.into_iter().map(move |it| (it, name.clone())));
    names.collect()
}

impl Forwarding {
    /// Reads what becomes of packets from outside; `None` if they are not forwarded.
    pub(super) fn read(
        pin_dir: &Path,
        (address, protocol): (SocketAddr, Protocol),
        query: &Query,
        names: &NodeNames,
    ) -> Result<Option<Self>, ebpf::Error> {
        let client = query.client().1.first().map(|ip| (*ip, query.client_port().map(NonZeroU16::get)));
        let found = match ebpf::forward_lookup(pin_dir, &FrontendAddress { address, protocol }, client) {
            // nftables may be the only datapath.
            Err(ebpf::Error::NotInitialized(_)) => None,
            found => found?,
        };
        Ok(found.map(|it| Self::new(it, names)))
    }

    fn new(found: ForwardLookup, names: &NodeNames) -> Self {
        let ForwardLookup { rows, by_client, has_ended, shares, row, uplinks } = found;
        let node = |it| Node::new(it, names);
        Self {
            rows,
            by_client,
            has_ended,
            shares: shares.into_iter().map(|(it, rows)| Share { node: node(it), rows }).collect(),
            row: row.map(|FlowRow { number, owner, second }| ClientRow {
                number,
                owner: node(owner),
                second: second.map(node),
            }),
            uplinks: uplinks.into_iter().collect(),
        }
    }

    /// Where this node does not do what its tables say.
    pub(super) fn difference(&self) -> Option<String> {
        let says = "eBPF forwards nothing: no interface has the programs, so packets are translated here";
        // What no node owns is translated anyhow.
        let is_owned = self.shares.iter().any(|it| it.node.action != Action::Translated);
        (is_owned && self.uplinks.is_empty()).then(|| says.to_owned())
    }

    /// The explanation for the row of the client: only endpoints of its owner serve it.
    pub(super) fn narrow(&self, explanation: Explanation) -> Explanation {
        let row = self.row.as_ref().filter(|_| !self.uplinks.is_empty() && !self.has_ended);
        let owner = row.and_then(|it| it.owner.node.as_ref());
        let Some(owner) = owner.filter(|_| explanation.verdict == Verdict::Redirected) else {
            return explanation;
        };
        let is_there = |it: &ExplainedEndpoint| it.used && it.node.as_ref() == Some(owner);
        let mut endpoints = explanation.endpoints.clone();
        let reason = match &endpoints.iter().filter(|it| is_there(it)).collect::<Vec<_>>()[..] {
            // Brief after a change.
            [] => return explanation,
            [only] => format!("to {}, the only endpoint on node {owner}", only.endpoint),
            all => format!("to one of {} endpoints on node {owner}", all.len()),
        };
        for it in endpoints.iter_mut().filter(|it| it.used && !is_there(it)) {
            it.used = false;
            it.reason += &format!("; the client's row is that of node {owner}");
        }
        endpoints.sort_by_key(|it| (Reverse(it.used), it.endpoint));
        Explanation { reason, endpoints, ..explanation }
    }

    /// What is said of it, in lines.
    pub(super) fn describe(&self) -> Vec<String> {
        let Self { rows, by_client, has_ended, shares, row, .. } = self;
        let ended = "forwarding has ended here (it was turned off, or an uplink is too narrow): new connections are translated; \
             those that exist, and this node does not know, go by";
        let ended = has_ended.then(|| ended.to_owned());
        let by =
            if *by_client { "by the client's address (session affinity)" } else { "by addresses and ports" };
        let Some(ClientRow { number, owner, second }) = row else {
            let each = if *by_client { "client" } else { "address and port of a client" };
            let first = format!("each {each} has one of {rows} rows, of which");
            let share = |it: &Share| {
                let percent = f64::from(it.rows) * 100.0 / f64::from(*rows);
                format!("{percent:>5.1} % are {}", it.node.action(true))
            };
            return ended.into_iter().chain([first]).chain(shares.iter().map(share)).collect();
        };
        let first = format!("row {number} of {rows}, {by}: {}", owner.action(false));
        let second = second.as_ref().map(|it| {
            format!("the second is {}, for TCP connections that the owner does not know", it.describe())
        });
        ended.into_iter().chain([first]).chain(second).collect()
    }
}

/// Why packets are not forwarded though the rules say that they are.
pub(super) fn unforwarded(explanation: &Explanation) -> Option<&'static str> {
    let mut rules = explanation.rules.iter();
    let is_requested = rules.any(|it| it.rule == "forwarding" && it.says.starts_with("whole"));
    is_requested.then_some(
        "eBPF has no rows for it, so this node translates its packets: it does not know the address of every node with \
         endpoints (--watch-all-nodes), serves without the packet path, or by nftables alone (--backend nft)",
    )
}

impl Node {
    fn new(node: RowNode, names: &NodeNames) -> Self {
        let (action, address) = match node {
            RowNode::This(address) => (Action::Served, Some(address)),
            RowNode::Other(address) => (Action::Wrapped, Some(address)),
            RowNode::None => (Action::Translated, None),
        };
        let address = address.filter(|it| !it.is_unspecified());
        Self { action, node: address.and_then(|it| names.get(&it).cloned()), address }
    }

    /// What happens here to packets of its rows.
    fn action(&self, is_plural: bool) -> String {
        let without_owner = "translated here by NAT: a node with endpoints cannot receive them (it has no address, or does not \
             answer), or an uplink here is too narrow";
        match self.action {
            Action::Served if is_plural => format!("served here ({})", self.describe()),
            Action::Served => "served here".into(),
            Action::Wrapped if self.address.is_none() => "dropped: their node has left the cluster".into(),
            Action::Wrapped => format!("wrapped for {}", self.describe()),
            Action::Translated => without_owner.into(),
        }
    }

    fn describe(&self) -> String {
        match (&self.node, self.address) {
            (Some(name), Some(address)) => format!("node {name} at {address}"),
            (None, Some(address)) => format!("the node at {address}"),
            (_, None) if self.action == Action::Served => "this node".into(),
            (_, None) => "a node that has left the cluster".into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use brain::AppliedRule;
    use serde_json::json;

    use super::*;

    fn ip(last: u8) -> IpAddr {
        [192, 0, 2, last].into()
    }

    fn names() -> NodeNames {
        [(ip(1), "n1".into()), (ip(2), "n2".into())].into()
    }

    const THIS: fn() -> RowNode = || RowNode::This(ip(1));
    const OTHER: fn() -> RowNode = || RowNode::Other(ip(2));

    fn forwarding(row: Option<(RowNode, Option<RowNode>)>, by_client: bool) -> Forwarding {
        let row = row.map(|(owner, second)| FlowRow { number: 7, owner, second });
        let gone = RowNode::Other([0, 0, 0, 0].into());
        let shares =
            [(THIS(), 512), (OTHER(), 256), (RowNode::Other(ip(3)), 128), (gone, 127), (RowNode::None, 1)];
        let uplinks = ["eth0".to_owned()].into();
        let found =
            ForwardLookup { rows: 1024, by_client, has_ended: false, shares: shares.into(), row, uplinks };
        Forwarding::new(found, &names())
    }

    /// Endpoint 1 is on n1, the endpoints 2 and 3 are on n2, and 4, which is not ready, is, too.
    fn explanation() -> Explanation {
        let explanation = json!({
            "node": "n1", "client": { "kind": "outside", "addresses": [] }, "destination": "203.0.113.1:80",
            "protocol": "TCP", "verdict": "redirected", "reason": "to one of 3 endpoints", "service": "ns/web",
            "rules": [],
            "endpoints": [
                { "endpoint": "10.1.0.1:80", "used": true, "reason": "ready", "node": "n1" },
                { "endpoint": "10.1.0.2:80", "used": true, "reason": "ready", "node": "n2" },
                { "endpoint": "10.1.0.3:80", "used": true, "reason": "ready", "node": "n2" },
                { "endpoint": "10.1.0.4:80", "used": false, "reason": "not ready", "node": "n2" },
            ],
        });
        serde_json::from_value(explanation).unwrap()
    }

    #[test]
    fn the_row_of_a_client_says_what_happens_here() {
        let first = |owner, by_client| forwarding(Some((owner, None)), by_client).describe();
        for (owner, by_client, expect) in [
            (THIS(), false, "by addresses and ports: served here"),
            (OTHER(), true, "by the client's address (session affinity): wrapped for node n2 at 192.0.2.2"),
            (RowNode::Other(ip(3)), false, "by addresses and ports: wrapped for the node at 192.0.2.3"),
        ] {
            assert_eq!(first(owner, by_client), [format!("row 7 of 1024, {expect}")]);
        }
        let translated = &first(RowNode::None, false)[0];
        assert!(translated.contains("translated here by NAT: a node with endpoints cannot"), "{translated}");
        assert_eq!(
            forwarding(Some((THIS(), Some(OTHER()))), false).describe()[1],
            "the second is node n2 at 192.0.2.2, for TCP connections that the owner does not know"
        );
    }

    #[test]
    fn without_a_port_the_shares_of_nodes_are_said() {
        assert_eq!(
            forwarding(None, false).describe(),
            [
                "each address and port of a client has one of 1024 rows, of which",
                " 50.0 % are served here (node n1 at 192.0.2.1)",
                " 12.4 % are dropped: their node has left the cluster",
                " 25.0 % are wrapped for node n2 at 192.0.2.2",
                " 12.5 % are wrapped for the node at 192.0.2.3",
                "  0.1 % are translated here by NAT: a node with endpoints cannot receive them (it has no address, or does \
                 not answer), or an uplink here is too narrow",
            ]
        );
        assert!(forwarding(None, true).describe()[0].starts_with("each client has one of 1024 rows"));
    }

    #[test]
    fn only_endpoints_of_the_rows_owner_serve_its_clients() {
        let used = |it: &Explanation| {
            let used = it.endpoints.iter().filter(|it| it.used).map(|it| it.endpoint.to_string());
            used.collect::<Vec<_>>()
        };
        let narrowed = forwarding(Some((OTHER(), None)), false).narrow(explanation());
        assert_eq!(narrowed.reason, "to one of 2 endpoints on node n2");
        assert_eq!(used(&narrowed), ["10.1.0.2:80", "10.1.0.3:80"]);
        let reasons: Vec<_> = narrowed.endpoints.iter().map(|it| &*it.reason).collect();
        assert_eq!(reasons, ["ready", "ready", "ready; the client's row is that of node n2", "not ready"]);
        let narrowed = forwarding(Some((THIS(), None)), false).narrow(explanation());
        assert_eq!(narrowed.reason, "to 10.1.0.1:80, the only endpoint on node n1");
        // Without a row, without a name, and where nothing is forwarded, any endpoint may serve.
        let detached = Forwarding { uplinks: Vec::new(), ..forwarding(Some((THIS(), None)), false) };
        assert!(detached.difference().is_some());
        for it in [forwarding(None, false), forwarding(Some((RowNode::Other(ip(3)), None)), false), detached]
        {
            assert_eq!(it.narrow(explanation()), explanation(), "{it:?}");
        }
    }

    #[test]
    fn what_is_to_be_forwarded_and_is_not_has_a_reason() {
        let with = |says: &str| Explanation {
            rules: vec![AppliedRule { rule: "forwarding".into(), says: says.into() }],
            ..explanation()
        };
        assert!(unforwarded(&with("whole, to 2 nodes")).unwrap().contains("--watch-all-nodes"));
        assert_eq!(unforwarded(&with("translated by this node")), None);
        assert_eq!(unforwarded(&explanation()), None);
    }
}
