//! Arbitrary bytes as a manifest.

use brain::{Brain, Options, node_state};
use model::cluster::ClusterState;
use source::file::parse;

use crate::invariants;

/// A file is accepted as a whole or not at all, and its objects lead to one state, computed incrementally or at once.
pub fn target(bytes: &[u8]) {
    let parsed = match parse("file", bytes) {
        Ok(parsed) => parsed,
        Err(error) => return invariants::line(&error.to_string()),
    };
    assert_eq!(parse("file", bytes).as_ref(), Ok(&parsed), "parsing is deterministic");
    invariants::rejected(&parsed.rejected);
    let (mut brain, mut cluster) = (Brain::new(Options::default()), ClusterState::default());
    brain.start_serving("n1");
    for (_, object) in parsed.objects {
        brain.set(object.clone());
        cluster.set(object);
    }
    brain.recompute();
    let state = node_state(&cluster, "n1", &Options::default());
    assert_eq!(brain.state("n1"), Some(&state), "incremental and pure results are equal");
    invariants::state(&state);
}
