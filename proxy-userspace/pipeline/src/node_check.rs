//! Checks whether the cluster has a Node object for the node that is served.
//!
//! The result is only reported: a node without a Node object is served all the same, perhaps not as intended.

use std::sync::Arc;

use model::{Rejected, state::NodeInfos};

/// How many existing nodes a message names.
const MAX_NAMED: usize = 3;

/// A report if no Node object has the name `node`, although there are others or `is_required` is set.
pub fn unknown_node(node: &str, nodes: &NodeInfos, is_required: bool) -> Option<Rejected> {
    if nodes.contains_key(node) || (nodes.is_empty() && !is_required) {
        return None;
    }
    let mut names: Vec<_> = nodes.keys().take(MAX_NAMED).map(ToString::to_string).collect();
    if nodes.len() > MAX_NAMED {
        // The number of the others is left out: the report would change whenever a node joins or leaves.
        names.push("…".into());
    }
    // Perhaps only this Node is watched.
    let existing = if names.is_empty() { String::new() } else { format!(" (found {})", names.join(", ")) };
    let reason = format!(
        "no Node object has this name{existing}: the node has no zone and no pod CIDRs, and only endpoints with this \
         nodeName are local; set --node-name to the name of the Node object"
    );
    Some(Rejected::served(format!("node {node}"), reason))
}

#[derive(Default)]
pub(crate) struct NodeChecks {
    /// The Nodes that were checked for shared addresses, and the result.
    nodes: Option<NodeInfos>,
    shared: Option<Rejected>,
}

impl NodeChecks {
    /// What is wrong with the Node object of `node`, of which `is_required` says whether it must exist.
    pub(crate) fn rejected(&mut self, node: &str, nodes: &NodeInfos, is_required: bool) -> Vec<Rejected> {
        if self.nodes.as_ref().is_none_or(|it| !Arc::ptr_eq(it, nodes)) {
            self.nodes = Some(Arc::clone(nodes));
            self.shared = shared_address(node, nodes);
        }
        let unknown = unknown_node(node, nodes, is_required);
        let unnumbered = no_address(node, nodes).filter(|_| is_required);
        unknown.into_iter().chain(unnumbered).chain(self.shared.clone()).collect()
    }
}

/// A report if the Node object of `node` has no address.
fn no_address(node: &str, nodes: &NodeInfos) -> Option<Rejected> {
    nodes.get(node).filter(|it| it.addresses.is_empty())?;
    let reason = "its Node object has no IP address in status.addresses: with --nodeport-addresses=primary no node port is \
                  served, and sources of load balancers do not include this node; the kubelet or the cloud's controller \
                  has to set them";
    Some(Rejected::served(format!("node {node}"), reason))
}

/// A report if another Node object has an address of that of `node`, too. An address of this node is served as its own.
fn shared_address(node: &str, nodes: &NodeInfos) -> Option<Rejected> {
    let own = nodes.get(node)?;
    let mut others = nodes.iter().filter(|(name, _)| &***name != node);
    let (other, ip) = others.find_map(|(name, it)| {
        let shared = own.addresses.iter().find(|ip| it.addresses.contains(ip))?;
        Some((name, shared))
    })?;
    let reason = format!(
        "its address {ip} is also that of node {other}: node ports at it are served here; correct status.addresses of the \
         Node object that does not have it"
    );
    Some(Rejected::served(format!("node {node}"), reason))
}

#[cfg(test)]
mod tests {
    use model::state::NodeInfo;

    use super::*;

    #[test]
    fn an_address_that_two_nodes_have_is_reported() {
        let node = |name: &str, addresses: &[&str]| {
            let addresses = addresses.iter().map(|it| it.parse().unwrap()).collect();
            (name.into(), NodeInfo { addresses, ..NodeInfo::default() })
        };
        let own = || node("n1", &["192.0.2.1", "2001:db8::1"]);
        let report = |others: [_; 2]| {
            let nodes = Arc::new(others.into_iter().chain([own()]).collect());
            shared_address("n1", &nodes).map(|it| it.to_string())
        };
        assert_eq!(report([node("n2", &["192.0.2.2"]), node("n3", &["192.0.2.2"])]), None);
        let text = report([node("n2", &["192.0.2.2"]), node("n3", &["192.0.2.3", "2001:db8::1"])]).unwrap();
        assert!(text.starts_with("node n1: its address 2001:db8::1 is also that of node n3"), "{text}");
        assert_eq!(shared_address("n4", &Arc::new([own()].into())), None);
    }

    #[test]
    fn a_node_object_without_addresses_is_reported() {
        let with = NodeInfo { addresses: vec!["192.0.2.1".parse().unwrap()], ..NodeInfo::default() };
        let nodes = Arc::new([("n1".into(), with), ("n2".into(), NodeInfo::default())].into());
        let report = |node| no_address(node, &nodes).map(|it| it.to_string());
        assert_eq!((report("n1"), report("n3")), (None, None));
        let text = report("n2").unwrap();
        assert!(text.starts_with("node n2: its Node object has no IP address in status.addresses"), "{text}");
    }

    #[test]
    fn a_missing_node_object_is_reported_with_the_first_existing_ones() {
        let cases: [(&[&str], _, _); 6] = [
            (&["n1", "nope"], true, None),
            (&["n1"], false, Some("node nope: no Node object has this name (found n1)")),
            (&["n1", "n2", "n3"], false, Some("(found n1, n2, n3)")),
            (&["a", "b", "c", "d", "e"], true, Some("(found a, b, c, …)")),
            // Manifests may lack nodes, an API server may not.
            (&[], false, None),
            (&[], true, Some("no Node object has this name: the node has no zone")),
        ];
        for (existing, is_required, expect) in cases {
            let nodes = Arc::new(existing.iter().map(|it| ((*it).into(), Default::default())).collect());
            let report = unknown_node("nope", &nodes, is_required).map(|it| it.to_string());
            match expect {
                Some(text) => {
                    assert!(report.as_ref().is_some_and(|it| it.contains(text)), "{existing:?}: {report:?}");
                }
                None => assert_eq!(report, None, "{existing:?}"),
            }
        }
    }
}
