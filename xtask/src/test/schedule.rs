//! Runs tests beside each other, in a random order.
//! Invariant: a test that needs the machine for itself runs when no other does.

use std::{collections::BTreeMap, time::Duration};

use anyhow::Result;
use build_tools::{
    parallel::in_parallel,
    test_suite::{Outcome, Test, run_test},
};
use parking_lot::Mutex;

/// The module of tests that run alone: they count objects of the whole machine, or take all of its processors.
const ALONE: &str = "alone";

pub(crate) struct Ended {
    pub(crate) test: Test,
    pub(crate) outcome: Outcome,
    pub(crate) took: Duration,
}

pub(crate) struct Schedule {
    /// Decides the order.
    pub(crate) seed: u64,
    pub(crate) jobs: usize,
    /// The variables of every test.
    pub(crate) environment: BTreeMap<String, String>,
    /// After this time a test is killed.
    pub(crate) limit: Duration,
}

impl Schedule {
    /// Runs all tests; `on_end` is called after each.
    pub(crate) fn run(&self, mut tests: Vec<Test>, on_end: impl FnMut(&Ended) + Send) -> Result<Vec<Ended>> {
        // The same seed gives the same order, in whatever order the binaries were built.
        tests.sort_by_key(Test::title);
        fastrand::Rng::with_seed(self.seed).shuffle(&mut tests);
        let (alone, others): (Vec<_>, Vec<_>) = tests.into_iter().partition(|it| is_alone(&it.name));
        let on_end = Mutex::new(on_end);
        let run = |test: Test| -> Result<Ended> {
            let (outcome, took) = run_test(&test, &self.environment, self.limit)?;
            let ended = Ended { test, outcome, took };
            (*on_end.lock())(&ended);
            Ok(ended)
        };
        let mut ended = in_parallel(self.jobs, others, run)?;
        ended.extend(in_parallel(1, alone, run)?);
        Ok(ended)
    }
}

fn is_alone(name: &str) -> bool {
    name.split("::").any(|it| it == ALONE)
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt as _, path::Path};

    use super::*;

    /// A test binary that notes when a test begins and ends.
    fn tests(folder: &Path, names: &[&str]) -> Vec<Test> {
        let binary = folder.join("binary");
        let journal = folder.join("journal");
        let text = format!(
            "#!/bin/sh\necho \"begin $2\" >> {0}\nsleep 0.2\necho \"end $2\" >> {0}\n\
             echo 'test result: ok. 1 passed; 0 failed'\n",
            journal.display()
        );
        fs::write(&binary, text).unwrap();
        fs::set_permissions(&binary, fs::Permissions::from_mode(0o755)).unwrap();
        let test = |name: &&str| Test {
            binary: binary.clone(),
            folder: folder.to_owned(),
            suite: "suite".to_owned(),
            name: (*name).to_owned(),
        };
        names.iter().map(test).collect()
    }

    fn schedule(seed: u64) -> Schedule {
        Schedule { seed, jobs: 3, environment: BTreeMap::new(), limit: Duration::from_secs(60) }
    }

    #[test]
    fn a_test_that_needs_the_machine_runs_alone() {
        let folder = tempfile::tempdir().unwrap();
        let names = ["a", "alone::x", "b", "c", "m::alone::y", "stands_alone", "d"];
        let ended = schedule(7).run(tests(folder.path(), &names), |_| {}).unwrap();
        assert_eq!(ended.len(), names.len());
        assert!(ended.iter().all(|it| it.outcome == Outcome::Passed));
        let journal = fs::read_to_string(folder.path().join("journal")).unwrap();
        let lines: Vec<_> = journal.lines().collect();
        assert!(
            lines.windows(2).any(|it| it[0].starts_with("begin") && it[1].starts_with("begin")),
            "{journal}"
        );
        for name in ["alone::x", "m::alone::y"] {
            let begin = lines.iter().position(|it| *it == format!("begin {name}")).unwrap();
            assert_eq!(lines[begin + 1], format!("end {name}"), "{journal}");
        }
    }

    #[test]
    fn the_seed_decides_the_order() {
        let folder = tempfile::tempdir().unwrap();
        let order = |seed, reversed| {
            let mut tests = tests(folder.path(), &["alone::a", "alone::b", "alone::c", "alone::d"]);
            if reversed {
                tests.reverse();
            }
            let ended = schedule(seed).run(tests, |_| {}).unwrap();
            ended.into_iter().map(|it| it.test.name).collect::<Vec<_>>()
        };
        assert_eq!(order(3, false), order(3, true));
        assert_ne!(order(3, false), order(4, false));
    }
}
