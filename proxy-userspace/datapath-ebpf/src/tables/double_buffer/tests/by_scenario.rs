//! Every scenario against the maps in memory, one after the other, so that each is also a change from the last one.

use scenarios::{Scenario, Step};

use super::*;
use crate::observe::dump::lines;

/// How often a change is tried with maps that fail.
const ATTEMPTS: u32 = 20;

/// The steps of all scenarios with an expected dump.
fn steps(scenarios: &[Scenario]) -> impl Iterator<Item = (&Scenario, &Step, Vec<String>)> {
    let steps = scenarios.iter().flat_map(|it| it.steps.iter().map(move |step| (it, step)));
    steps.filter_map(|(scenario, step)| Some((scenario, step, step.dump()?)))
}

/// Empty maps of the node `n1`, as in every scenario with an expected dump.
fn buffer(seed: u32) -> DoubleBuffer<FakeMaps> {
    let mut buffer = DoubleBuffer::new(FakeMaps::new(seed)).unwrap();
    buffer.layout.forwarding.nodes.own = "n1".into();
    buffer
}

fn dump(buffer: &DoubleBuffer<FakeMaps>) -> Vec<String> {
    lines(|table| buffer.store.entries(table))
}

#[test]
fn each_leads_to_its_dump() {
    let scenarios = scenarios::all();
    let mut buffer = buffer(1);
    for (scenario, step, expected) in steps(&scenarios) {
        buffer.apply(&scenario.node_state(step), &NodeAddresses::default()).unwrap();
        assert_eq!(dump(&buffer), expected, "{}: {}", scenario.name, step.about);
    }
}

#[test]
fn while_maps_fail_the_last_dump_stays() {
    let scenarios = scenarios::all();
    for seed in 1..=ATTEMPTS {
        let mut buffer = buffer(seed);
        buffer.store.fails_one_in = 4;
        let mut last = Vec::new();
        for (scenario, step, expected) in steps(&scenarios) {
            let state = scenario.node_state(step);
            while buffer.apply(&state, &NodeAddresses::default()).is_err() {
                assert_eq!(dump(&buffer), last, "{}: {}", scenario.name, step.about);
            }
            assert_eq!(dump(&buffer), expected, "{}: {}", scenario.name, step.about);
            let _ = buffer.finish_generation();
            last = expected;
        }
    }
}
