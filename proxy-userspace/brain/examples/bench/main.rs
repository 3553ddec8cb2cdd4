//! Measures the brain with synthetic clusters; `cargo xtask bench brain` runs each case in a process of its own.
//!
//! `bench SERVICES ENDPOINTS NODES WATCHED CHANGES` prints one JSON object: the cost of the first full state, of
//! each further node, and of the change of one endpoint for all nodes.
//! CPU time is that of the process, with everything that it does for a change: the cluster, the states and their diffs.
//! Every change finds cold caches, as in a real cluster.

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "the result is printed")]

mod cluster;

use std::{sync::Arc, time::Duration};

use brain::{Brain, Options};
use model::{cluster::EndpointSlice, state::NodeState};

use cluster::{SyntheticCluster, cpu, node_name, resident};

/// More than the caches of a core hold.
const CACHE_SIZE: usize = 64 << 20;
const USAGE: &str = "usage: bench SERVICES ENDPOINTS NODES WATCHED CHANGES";

/// Applies one change, and counts the differences in the states of all nodes.
fn apply(brain: &mut Brain, published: &mut [(String, NodeState)], slice: EndpointSlice) -> usize {
    brain.set_slice(slice);
    let changed = brain.recompute();
    let mut differences = 0;
    for (name, state) in published.iter_mut().filter(|(name, _)| changed.contains(name.as_str())) {
        if let Some(new) = brain.state(name) {
            differences += new.diff(state).count();
            *state = new.clone();
        }
    }
    differences
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<u32> =
        std::env::args().skip(1).map(|it| it.parse()).collect::<Result<_, _>>().map_err(|_| USAGE)?;
    let [services, endpoints, nodes, watched, changes] = arguments[..] else { return Err(USAGE.into()) };
    if services == 0 || endpoints == 0 || changes == 0 || watched == 0 || watched > nodes {
        return Err(format!("{USAGE}; all must be positive, and WATCHED at most NODES").into());
    }
    let cluster = SyntheticCluster { services, endpoints, nodes };
    let mut brain = Brain::new(Options::default());
    brain.replace_cluster(Arc::new(cluster.initial()));

    let start = cpu()?;
    brain.start_serving(&node_name(0));
    brain.recompute();
    let first_state = cpu()? - start;

    let before = resident()?;
    let start = cpu()?;
    for index in 1..watched {
        brain.start_serving(&node_name(index));
        brain.recompute();
    }
    let others = watched - 1;
    let further_state = (cpu()? - start).checked_div(others).unwrap_or_default();

    // What a publisher keeps: the last state of each node.
    let mut published: Vec<(String, NodeState)> = (0..watched)
        .map(node_name)
        .filter_map(|name| brain.state(&name).cloned().map(|state| (name, state)))
        .collect();
    // Memory is measured after some changes, to include what they leave behind.
    for change in 1..=changes {
        apply(&mut brain, &mut published, cluster.change(change)?);
    }
    let after = resident()?;

    let mut others_memory = vec![0_u8; CACHE_SIZE];
    let mut times = Vec::new();
    let mut differences = 0;
    for change in changes + 1..=2 * changes {
        let slice = cluster.change(change)?;
        // In a real cluster other programs run between two changes and evict the caches.
        others_memory.chunks_mut(64).for_each(|it| it[0] = it[0].wrapping_add(1));
        let start = cpu()?;
        differences += apply(&mut brain, &mut published, std::hint::black_box(slice));
        times.push(cpu()? - start);
    }
    std::hint::black_box(&others_memory);
    times.sort();
    let mean = times.iter().sum::<Duration>() / changes;
    println!(
        "{{\"firstStateMs\":{:.1},\"furtherStateMs\":{:.2},\"changeMeanUs\":{:.1},\"changeMedianUs\":{:.1},\
         \"residentMb\":{:.1},\"furtherNodeKb\":{:.1},\"differences\":{differences}}}",
        micros(first_state) / 1e3,
        micros(further_state) / 1e3,
        micros(mean),
        micros(times[times.len() / 2]),
        after as f64 / 1024.0,
        after.saturating_sub(before) as f64 / f64::from(others.max(1)),
    );
    Ok(())
}
