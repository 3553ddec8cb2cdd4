//! Arbitrary bytes as the history of a cluster, for both datapaths.

use std::sync::Arc;

use arbitrary::{Result, Unstructured};
use brain::{Options, node_state};
use datapath_ebpf::fuzzing as ebpf;
use datapath_nft::fuzzing as nft;
use model::{cluster::ClusterState, state::NodeState};

use crate::random_cluster::{change, service_with_slices, with_other_endpoints};

/// The most states of a history.
const MAX_STATES: usize = 12;

/// What a datapath makes of a history is what it makes of its last state.
pub fn target(bytes: &[u8]) {
    // A truncated history is checked as far as it goes.
    let mut states = Vec::new();
    let mut u = Unstructured::new(bytes);
    let (seed, fails_one_in) = (u.arbitrary().unwrap_or_default(), u.int_in_range(0..=9).unwrap_or_default());
    let _ = history(&mut u, &mut states);
    nft::history(&states);
    ebpf::history(&states, seed, fails_one_in);
}

fn history(u: &mut Unstructured<'_>, states: &mut Vec<NodeState>) -> Result<()> {
    if u.arbitrary()? {
        return endpoint_history(u, states);
    }
    let mut cluster = ClusterState::default();
    while !u.is_empty() && states.len() < MAX_STATES {
        for _ in 0..u.int_in_range(1..=4)? {
            cluster.apply([change(u)?].into());
        }
        states.push(state(&cluster));
    }
    Ok(())
}

/// Of one Service nothing but endpoints changes: then a datapath replaces the endpoints that differ, and nothing else.
fn endpoint_history(u: &mut Unstructured<'_>, states: &mut Vec<NodeState>) -> Result<()> {
    let mut cluster = ClusterState::default();
    let (service, slices) = service_with_slices(u)?;
    cluster.services.insert(service);
    slices.into_iter().for_each(|it| cluster.set_slice(it));
    states.push(state(&cluster));
    while !u.is_empty() && states.len() < MAX_STATES {
        let slices: Vec<_> = cluster.slices().cloned().collect();
        cluster.set_slice(with_other_endpoints(u.choose(&slices)?, u)?);
        states.push(state(&cluster));
    }
    Ok(())
}

/// The state of a node; what is equal is the same object, as the brain keeps it.
pub(crate) fn state(cluster: &ClusterState) -> NodeState {
    node_state(&Arc::new(cluster.clone()), "n1", &Options::default())
}
