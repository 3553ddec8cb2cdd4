//! Arbitrary bytes as the elements of nftables, found by a process that starts.

use std::sync::LazyLock;

use arbitrary::Unstructured;
use model::{cluster::ClusterState, state::NodeState};

use crate::{compile, random_cluster::change};

/// A state with some Services, with and without session affinity.
static STATE: LazyLock<NodeState> = LazyLock::new(|| {
    let mut rng = fastrand::Rng::with_seed(7);
    let bytes: Vec<u8> = (0..16_000).map(|_| rng.u8(..)).collect();
    let (mut u, mut cluster) = (Unstructured::new(&bytes), ClusterState::default());
    (0..60).map_while(|_| change(&mut u).ok()).for_each(|it| cluster.apply([it].into()));
    compile::state(&cluster)
});

/// Whatever the tables contained, they mean after a start what the state means.
pub fn target(bytes: &[u8]) {
    datapath_nft::fuzzing::tables(bytes, &STATE);
}
