//! Every scenario against the maps in memory, one after the other, so that each is also a change from the last one.

use scenarios::{Scenario, Step};

use super::*;
use crate::observe::dump::lines;

/// How often all changes are tried with maps that fail.
const ATTEMPTS: u32 = 20;

/// The steps of all scenarios with an expected dump.
fn steps(scenarios: &[Scenario]) -> impl Iterator<Item = (&Scenario, &Step, Vec<String>)> {
    let steps = scenarios.iter().flat_map(|it| it.steps.iter().map(move |step| (it, step)));
    steps.filter_map(|(scenario, step)| Some((scenario, step, step.dump()?)))
}

fn dump(buffer: &DoubleBuffer<FakeMaps>) -> Vec<String> {
    lines(|table| buffer.store.entries(table))
}

#[test]
fn each_leads_to_its_dump_and_the_last_one_stays_while_maps_fail() {
    let scenarios = scenarios::all();
    for seed in 0..=ATTEMPTS {
        let mut buffer = DoubleBuffer::new(FakeMaps::new(seed)).unwrap();
        // As in every scenario with an expected dump.
        buffer.layout.forwarding.nodes.own = "n1".into();
        buffer.store.fails_one_in = if seed == 0 { 0 } else { 4 };
        let mut last = Vec::new();
        for (scenario, step, expected) in steps(&scenarios) {
            let state = scenario.node_state(step);
            while let Err(error) = buffer.apply(&state, &NodeAddresses::default()) {
                assert_ne!(seed, 0, "{error}");
                assert_eq!(dump(&buffer), last, "{}: {}", scenario.name, step.about);
            }
            assert_eq!(dump(&buffer), expected, "{}: {}", scenario.name, step.about);
            let _ = buffer.finish_generation();
            last = expected;
        }
    }
}
