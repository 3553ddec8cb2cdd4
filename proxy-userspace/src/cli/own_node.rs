//! Whether the cluster knows the node that is served.
//!
//! The one rule: nothing is decided by it. A node without its object is served all the same, perhaps not as meant.

use model::{Rejected, state::NodeInfos};

/// How many of the nodes that there are a message names.
const MOST_NAMED: usize = 3;

/// What to say if there are Node objects, and none is called `node`; where they `must_be` there, also if there are none.
pub(super) fn stranger(node: &str, nodes: &NodeInfos, must_be: bool) -> Option<Rejected> {
    if nodes.contains_key(node) || (nodes.is_empty() && !must_be) {
        return None;
    }
    let mut there: Vec<_> = nodes.keys().take(MOST_NAMED).map(ToString::to_string).collect();
    if nodes.len() > MOST_NAMED {
        // How many more is not said: it would be news whenever one comes or goes.
        there.push("…".into());
    }
    let there =
        if there.is_empty() { "there is none".into() } else { format!("there are {}", there.join(", ")) };
    let reason = format!(
        "no NodeInfo object is called so ({there}): it has no zone and no pod CIDRs here, and only endpoints that name it \
         are local; give the name that the cluster knows it by with --node-name"
    );
    Some(Rejected { item: format!("node {node}"), reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(names: &[&str]) -> NodeInfos {
        names.iter().map(|it| ((*it).into(), Default::default())).collect()
    }

    #[track_caller]
    fn check(there: &[&str], must_be: bool, says: Option<&str>) {
        let said = stranger("nope", &nodes(there), must_be).map(|it| it.to_string());
        match says {
            Some(says) => assert!(said.as_ref().is_some_and(|it| it.contains(says)), "{said:?}"),
            None => assert_eq!(said, None),
        }
    }

    #[test]
    fn a_node_that_is_there_is_no_stranger() {
        check(&["n1", "nope"], true, None);
    }

    #[test]
    fn a_node_that_is_none_of_those_that_are_there_is_told() {
        check(&["n1"], false, Some("node nope: no NodeInfo object is called so (there are n1)"));
        check(&["n1", "n2", "n3"], false, Some("(there are n1, n2, n3)"));
    }

    #[test]
    fn of_many_nodes_a_few_are_named() {
        check(&["a", "b", "c", "d", "e"], true, Some("(there are a, b, c, …)"));
    }

    #[test]
    fn manifests_may_do_without_nodes_and_an_api_server_may_not() {
        check(&[], false, None);
        check(&[], true, Some("(there is none)"));
    }
}
