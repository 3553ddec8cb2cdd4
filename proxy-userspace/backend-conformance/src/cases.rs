//! The cases: every scenario, and what happens to streams, over time and at scale.

use std::{
    collections::BTreeSet,
    thread::sleep,
    time::{Duration, Instant},
};

use fastrand::Rng;
use model::state::NodeState;
use scenarios::Scenario;

use crate::{
    RunError, RunOptions, generate,
    harness::Harness,
    oracle,
    report::{CaseResult, Outcome, Report},
};

type Check = fn(&mut Harness<'_>) -> Result<(), String>;

/// The cases besides scenarios.
const CASES: [(&str, Check); 8] = [
    ("streams/an-empty-state-removes-everything", an_empty_state),
    ("streams/the-last-state-stays-while-the-brain-is-away", the_brain_is_away),
    ("streams/the-same-state-from-another-brain-changes-nothing", the_same_state),
    ("streams/what-is-not-sent-after-a-reset-is-removed", not_sent_again),
    ("streams/an-endpoint-moves-to-another-service", a_moving_endpoint),
    ("streams/a-brain-killed-in-a-change-set-leaves-one-state", killed_in_a_change_set),
    ("scale/churn", churn),
    ("scale/ten-thousand-services", ten_thousand),
];

/// The names of all cases, in the order in which they are run.
#[must_use]
pub fn names() -> Vec<String> {
    let scenarios = scenarios::all().into_iter().map(|it| it.name);
    scenarios.chain(CASES.iter().map(|(name, _)| (*name).to_owned())).collect()
}

/// Runs the cases; `progress` gets each result at once, and reports of long waits.
///
/// # Errors
///
/// The brain or the backend cannot be started, or no case matches the filter.
pub fn run(options: &RunOptions, progress: &dyn Fn(&str)) -> Result<Report, RunError> {
    let scenarios = scenarios::all();
    let of_scenarios = scenarios.iter().map(|it| (it.name.as_str(), Case::Scenario(it)));
    let cases = of_scenarios.chain(CASES.iter().map(|(name, it)| (*name, Case::Other(*it))));
    let is_selected = |name: &str| options.filter.as_ref().is_none_or(|it| name.contains(it.as_str()));
    let cases: Vec<_> = cases.filter(|(name, _)| is_selected(name)).collect();
    if cases.is_empty() {
        return Err(RunError::NoCase(options.filter.clone().unwrap_or_default()));
    }
    let mut harness = Harness::start(options, progress)?;
    let mut report = Report::default();
    for (name, case) in cases {
        let begin = Instant::now();
        harness.begin_case(name);
        let outcome = match options.skips.reason(name) {
            _ if !options.keep_going && report.has_only_failed_lately() => Outcome::NotRun,
            Some(reason) => Outcome::Skipped(reason.to_owned()),
            None => match case.run(&mut harness) {
                Ok(()) => Outcome::Passed { questions: harness.questions },
                Err(reason) => Outcome::Failed(reason),
            },
        };
        let result = CaseResult { name: name.to_owned(), outcome, time: begin.elapsed() };
        if result.outcome != Outcome::NotRun {
            progress(&result.to_string());
        }
        if result.is_failure() {
            harness.kill_brain();
            harness.start_brain()?;
            harness.restart_backend()?;
        }
        report.0.push(result);
    }
    Ok(report)
}

#[derive(Clone, Copy)]
enum Case<'a> {
    Scenario(&'a Scenario),
    Other(Check),
}

impl Case<'_> {
    fn run(self, harness: &mut Harness<'_>) -> Result<(), String> {
        match self {
            Self::Other(check) => check(harness),
            Self::Scenario(it) => {
                for step in &it.steps {
                    let result = harness.check(it.node_state(step));
                    result.map_err(|error| format!("{}\n{error}", step.about))?;
                }
                Ok(())
            }
        }
    }
}

fn restart(harness: &mut Harness<'_>) -> Result<(), String> {
    harness.kill_brain();
    harness.start_brain().map_err(|it| it.to_string())
}

fn an_empty_state(harness: &mut Harness<'_>) -> Result<(), String> {
    harness.check(generate::state(20, 1, 3))?;
    harness.check(NodeState::default())
}

fn the_brain_is_away(harness: &mut Harness<'_>) -> Result<(), String> {
    harness.check(generate::state(20, 1, 3))?;
    harness.kill_brain();
    for _ in 0..5 {
        sleep(Duration::from_millis(100));
        harness.check_answers(&BTreeSet::new())?;
    }
    harness.start_brain().map_err(|it| it.to_string())?;
    // Connected, but without a state.
    sleep(Duration::from_millis(500));
    harness.check_answers(&BTreeSet::new())?;
    harness.check(generate::state(20, 2, 3))
}

fn the_same_state(harness: &mut Harness<'_>) -> Result<(), String> {
    let state = generate::state(200, 1, 3);
    harness.check(state.clone())?;
    restart(harness)?;
    harness.publish(state);
    harness.check_answers(&BTreeSet::new())?;
    harness.applied()?;
    harness.check_answers(&BTreeSet::new())
}

fn not_sent_again(harness: &mut Harness<'_>) -> Result<(), String> {
    harness.check(generate::state(100, 1, 3))?;
    restart(harness)?;
    // Fewer Services, and fewer and other endpoints.
    harness.check(generate::state(50, 1, 2))?;
    restart(harness)?;
    harness.check(generate::state(60, 2, 1))
}

/// The same address is an endpoint of one Service, and then of another.
fn a_moving_endpoint(harness: &mut Harness<'_>) -> Result<(), String> {
    // Endpoints of the Services 0 and 256 have the same addresses.
    let with = |first, second| {
        let services = [generate::service(0, 1, first), generate::service(256, 1, second)];
        NodeState { services: services.into_iter().collect(), ..NodeState::default() }
    };
    for (first, second) in [(1, 0), (0, 1), (1, 1), (2, 0), (0, 0), (0, 2)] {
        harness.check(with(first, second))?;
    }
    Ok(())
}

fn killed_in_a_change_set(harness: &mut Harness<'_>) -> Result<(), String> {
    let mut random = Rng::with_seed(7);
    let mut current = generate::state(500, 1, 2);
    harness.check(current.clone())?;
    for round in 2..8 {
        let next = generate::state(2_000, round, 5);
        harness.publish(next.clone());
        sleep(Duration::from_millis(random.u64(0..60)));
        harness.kill_brain();
        let sample = oracle::all_lookups(&current).into_iter().step_by(25).collect();
        // What was received may still be applied.
        let begin = Instant::now();
        loop {
            sleep(Duration::from_millis(300));
            let Some(not_before) = harness.first_wrong(&current, &sample)? else { break };
            let Some(not_after) = harness.first_wrong(&next, &sample)? else { break };
            if harness.wait.is_over(begin) {
                return Err(format!(
                    "round {round}: the answers are those of neither state\nbefore: {not_before}\nafter: {not_after}"
                ));
            }
        }
        harness.start_brain().map_err(|it| it.to_string())?;
        harness.publish(next.clone());
        harness.applied()?;
        if let Some(wrong) = harness.first_wrong(&next, &sample)? {
            return Err(format!("round {round}: after the restart\n{wrong}"));
        }
        current = next;
    }
    harness.check(NodeState::default())
}

fn churn(harness: &mut Harness<'_>) -> Result<(), String> {
    let mut random = Rng::with_seed(42);
    let mut state = generate::state(50, 0, 3);
    for step in 0..200 {
        for _ in 0..random.u8(1..8) {
            let it = generate::service(random.u16(0..60), random.u8(0..200), random.u8(0..6));
            if random.u8(0..5) == 0 {
                state.services.remove(&it.service.name);
            } else {
                state.services.insert(it);
            }
        }
        // Sometimes several states are published before the backend has asked for the next one.
        harness.publish(state.clone());
        if step % 3 == 0 {
            harness.check(state.clone()).map_err(|error| format!("step {step}\n{error}"))?;
        }
    }
    harness.check(state)
}

fn ten_thousand(harness: &mut Harness<'_>) -> Result<(), String> {
    let mut state = generate::state(10_000, 1, 3);
    harness.publish(state.clone());
    harness.applied()?;
    let sample: BTreeSet<_> = oracle::all_lookups(&state).into_iter().step_by(101).collect();
    harness.check_answers(&sample)?;
    state.services.insert(generate::service(5_000, 9, 4));
    harness.publish(state.clone());
    harness.applied()?;
    harness.check_answers(&oracle::lookups(&generate::service(5_000, 9, 4)))?;
    harness.check(NodeState::default())
}
