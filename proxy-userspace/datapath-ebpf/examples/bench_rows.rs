//! Measures the rows of packets from outside: how long they take to compute, how even they are, and how many of them a change
//! moves. Prints the figures as JSON.
//!
//! `bench_rows NODES`, with one endpoint each; `cargo xtask bench outside` runs it and sets the figures beside the goals.

#![expect(clippy::unwrap_used, reason = "a measurement that cannot go on fails")]

use std::{hint::black_box, time::Instant};

use datapath_ebpf::row_owners;
use model::state::NodeShare;

/// How often the rows are computed.
const ROUNDS: usize = 21;

fn nodes(count: usize) -> Vec<NodeShare> {
    let share = |n| NodeShare { node: format!("node-{n:04}.example").into(), endpoints: 1 };
    (0..count).map(share).collect()
}

fn main() {
    let count: usize = std::env::args().nth(1).unwrap().parse().unwrap();
    let nodes = nodes(count);
    let mut times: Vec<_> = (0..ROUNDS)
        .map(|_| {
            let began = Instant::now();
            black_box(row_owners(black_box(&nodes)));
            began.elapsed().as_secs_f64() * 1e3
        })
        .collect();
    times.sort_unstable_by(f64::total_cmp);

    let owners = row_owners(&nodes);
    let share = owners.len() as f64 / count as f64;
    let mut rows = vec![0_u32; count];
    owners.iter().for_each(|it| rows[usize::from(*it)] += 1);
    let uneven = rows.iter().map(|it| (f64::from(*it) / share - 1.0).abs()).fold(0.0, f64::max);

    // Nodes that go, one at a time, without those at which the number of rows would change.
    let moved = (0..count).step_by(count.div_ceil(ROUNDS)).filter_map(|gone| {
        let left = [&nodes[..gone], &nodes[gone + 1..]].concat();
        let now = row_owners(&left);
        let name = |it: u16| usize::from(it) + usize::from(usize::from(it) >= gone);
        let moved = owners.iter().zip(&now).filter(|(before, now)| usize::from(**before) != name(**now));
        (now.len() == owners.len()).then(|| moved.count() as f64 / share)
    });
    let moved: Vec<_> = moved.collect();
    let mean = moved.iter().sum::<f64>() / moved.len() as f64;
    println!(
        "{{\"rows\":{},\"buildMs\":{:.4},\"uneven\":{uneven:.5},\"movedMost\":{:.4},\"movedMean\":{mean:.4}}}",
        owners.len(),
        times[ROUNDS / 2],
        moved.iter().copied().fold(0.0, f64::max),
    );
}
