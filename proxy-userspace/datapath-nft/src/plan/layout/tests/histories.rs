//! Random histories of states.

use proptest::prelude::*;

use super::*;
use crate::fuzzing;

fn made() -> impl Strategy<Value = Made> {
    let pods = prop::collection::btree_set(1_u32..6, 0..5);
    let flags = (any::<bool>(), any::<bool>(), any::<bool>(), 0_usize..4);
    let ranges = prop::sample::subsequence(vec!["10.0.0.0/8", "10.1.0.0/16", "11.0.0.0/8"], 0..3);
    let forwarded = prop::option::of(prop::sample::subsequence(vec![1_u32, 2, 3], 0..4));
    (pods, flags, prop::option::of(30_000_u16..30_003), prop::option::of(1_u8..4), ranges, forwarded)
        .prop_map(
            |(pods, (external_local, affinity, usable, local), node_port, balancer, ranges, forwarded)| {
                Made {
                    ranges,
                    forwarded,
                    local,
                    external_local,
                    affinity,
                    node_port,
                    balancer,
                    usable,
                    ..Made::new(0, &pods.into_iter().collect::<Vec<_>>())
                }
            },
        )
}

/// Some Services; of those with the same node port or load balancer IP only the first has it, since states have no conflicts.
fn some_services() -> impl Strategy<Value = Vec<Made>> {
    prop::collection::btree_map(1_u8..6, made(), 0..6).prop_map(|services| {
        let (mut node_ports, mut balancers) = (HashSet::new(), HashSet::new());
        let without_conflicts = |(n, it): (u8, Made)| Made {
            n,
            node_port: it.node_port.filter(|port| node_ports.insert(*port)),
            balancer: it.balancer.filter(|ip| balancers.insert(*ip)),
            ..it
        };
        services.into_iter().map(without_conflicts).collect()
    })
}

proptest! {
    /// The elements depend on the last state only, and the differences add up to them.
    #[test]
    fn any_history_results_in_its_last_state(history in prop::collection::vec(some_services(), 1..8)) {
        fuzzing::history(&history.iter().map(|it| state(it)).collect::<Vec<_>>());
    }
}
