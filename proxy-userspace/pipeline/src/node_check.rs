//! Checks whether the cluster has a Node object for the node that is served.
//!
//! The result is only reported: a node without a Node object is served all the same, perhaps not as intended.

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
    let existing =
        if names.is_empty() { "there are none".into() } else { format!("found {}", names.join(", ")) };
    let reason = format!(
        "no Node object has this name ({existing}): the node has no zone and no pod CIDRs, and only endpoints with this \
         nodeName are local; set --node-name to the name of the Node object"
    );
    Some(Rejected { item: format!("node {node}"), reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_node_object_is_reported_with_the_first_existing_ones() {
        let cases: [(&[&str], _, _); 6] = [
            (&["n1", "nope"], true, None),
            (&["n1"], false, Some("node nope: no Node object has this name (found n1)")),
            (&["n1", "n2", "n3"], false, Some("(found n1, n2, n3)")),
            (&["a", "b", "c", "d", "e"], true, Some("(found a, b, c, …)")),
            // Manifests may lack nodes, an API server may not.
            (&[], false, None),
            (&[], true, Some("(there are none)")),
        ];
        for (existing, is_required, expect) in cases {
            let nodes: NodeInfos = existing.iter().map(|it| ((*it).into(), Default::default())).collect();
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
