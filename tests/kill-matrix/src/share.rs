//! A share of the steps, which one node goes through.

use anyhow::{Context as _, Result, ensure};
use build_tools::command::status;
use clap::{Args, ValueEnum as _};
use nix::errno::Errno;
use serde::{Deserialize, Serialize};
use tests::{Sandbox, TestNode};

use crate::{
    matrix::{Matrix, Outcome, Scenario},
    trace::{Interruption, Intervention},
};

/// The errors that system calls are made to fail with, in turn.
const ERRORS: [Errno; 6] =
    [Errno::ENOMEM, Errno::ENOSPC, Errno::EPERM, Errno::EINTR, Errno::E2BIG, Errno::EBUSY];

/// The outcome of an interruption at a step that the proxy did not come to.
pub(crate) const NOT_REACHED: &str = "-";

/// Which steps are interrupted, and how.
#[derive(Args)]
pub(crate) struct Selection {
    /// Only this scenario; can be given several times
    #[arg(long = "scenario", value_enum)]
    scenarios: Vec<Scenario>,
    /// Only every N-th step of a scenario
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    every: u16,
    /// Only this step
    #[arg(long, value_name = "N")]
    step: Option<usize>,
}

/// One of so many shares of the steps; the first is 0.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Share {
    pub(crate) index: usize,
    pub(crate) of: usize,
}

#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Found {
    /// The interrupted steps, in the order of scenarios and steps.
    pub(crate) rows: Vec<Row>,
    pub(crate) problems: Vec<String>,
    pub(crate) connects: usize,
}

/// A step that was interrupted.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Row {
    pub(crate) scenario: Scenario,
    pub(crate) step: usize,
    pub(crate) call: String,
    pub(crate) outcomes: Vec<String>,
}

impl Selection {
    fn scenarios(&self) -> &[Scenario] {
        if self.scenarios.is_empty() { Scenario::value_variants() } else { &self.scenarios }
    }

    fn contains(&self, scenario: Scenario, step: usize) -> bool {
        match self.step {
            Some(only) => step == only,
            // Not the same ones of each scenario.
            None => (step + 61 * (scenario as usize + 1)).is_multiple_of(self.every.into()),
        }
    }
}

impl Share {
    /// Goes through the steps of this share on a node of its own; fails if a scenario does that is not interrupted.
    pub(crate) fn go_through(self, selection: &Selection) -> Result<Found> {
        let mut matrix = Matrix::new(TestNode::enter(Sandbox::new("kill-matrix")?)?);
        let mut found = Found::default();
        // An upgrade ends where a downgrade begins: in turn, neither needs a start to come there.
        let in_turn = |a: &Scenario, b: &Scenario| (*a, *b) == (Scenario::Upgrade, Scenario::Downgrade);
        for scenarios in selection.scenarios().chunk_by(in_turn) {
            let mut all = Vec::new();
            for scenario in scenarios {
                let (steps, _) = matrix.go_through(*scenario, None).context("uninterrupted")?;
                ensure!(!steps.is_empty(), "{scenario} has no steps");
                if self.index == 0 {
                    status("Scenario", &format!("{scenario}: {} steps", steps.len()));
                }
                all.push((*scenario, steps));
            }
            let longest = all.iter().map(|(_, steps)| steps.len()).max().unwrap_or_default();
            // By the step alone: the shares need not count the same number of steps.
            let selected = (1..=longest).filter(|it| selection.contains(scenarios[0], *it));
            for (_, step) in selected.enumerate().filter(|(index, _)| index % self.of == self.index) {
                let chosen: Vec<_> = all.iter().filter(|(_, steps)| step <= steps.len()).collect();
                found.interrupt(&mut matrix, step, &chosen);
            }
        }
        found.connects = matrix.connects;
        Ok(found)
    }
}

impl Found {
    pub(crate) fn join(all: Vec<Self>) -> Self {
        let mut joined = Self::default();
        for mut it in all {
            joined.rows.append(&mut it.rows);
            joined.problems.append(&mut it.problems);
            joined.connects += it.connects;
        }
        joined.rows.sort();
        joined
    }

    /// Interrupts a step of scenarios that are gone through in turn, in every way.
    fn interrupt(&mut self, matrix: &mut Matrix, step: usize, scenarios: &[&(Scenario, Vec<String>)]) {
        let mut rows: Vec<_> = scenarios
            .iter()
            .map(|(scenario, steps)| {
                let call = steps.get(step - 1).cloned().unwrap_or_default();
                Row { scenario: *scenario, step, call, outcomes: Vec::new() }
            })
            .collect();
        let failure = Intervention::Fail(ERRORS[step % ERRORS.len()] as i32);
        for intervention in [Intervention::Kill, failure] {
            let interruption = Interruption { step, intervention };
            for row in &mut rows {
                let mut went = matrix.go_through(row.scenario, Some(interruption));
                if matches!(went, Ok((_, Outcome::NotReached))) {
                    // Threads take turns, and a proxy that has run for longer may make fewer steps.
                    went = matrix.go_through(row.scenario, Some(interruption));
                }
                row.outcomes.push(match went {
                    Ok((found, outcome)) => {
                        // Threads take turns: the step may be another one.
                        if let Some(call) = found.get(step - 1) {
                            row.call.clone_from(call);
                        }
                        text(intervention, outcome)
                    }
                    Err(error) => {
                        let what =
                            format!("{}, step {step}, {}: {error:#}", row.scenario, describe(intervention));
                        status("Failed", &what);
                        self.problems.push(what);
                        "FAILED".to_owned()
                    }
                });
            }
        }
        self.rows.append(&mut rows);
    }
}

fn describe(intervention: Intervention) -> String {
    match intervention {
        Intervention::Kill => "killed before".to_owned(),
        Intervention::Fail(errno) => format!("failed with {:?}", Errno::from_raw(errno)),
    }
}

fn text(intervention: Intervention, outcome: Outcome) -> String {
    let outcome = match outcome {
        Outcome::Killed => "completed",
        Outcome::Ended => "ended, completed",
        Outcome::Reported => "reported",
        Outcome::WentOn => "went on",
        Outcome::NotReached => return NOT_REACHED.to_owned(),
    };
    match intervention {
        Intervention::Fail(errno) => format!("{:?}: {outcome}", Errno::from_raw(errno)),
        Intervention::Kill => outcome.to_owned(),
    }
}
