//! The report: a table of kernels and tests, and the output of what failed.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    time::Duration,
};

use build_tools::test_suite::Outcome;
use comfy_table::{CellAlignment, Table, presets};

#[derive(Default)]
pub(crate) struct KernelRun {
    pub(crate) series: String,
    /// Why the tests could not run on it.
    pub(crate) unavailable: Option<String>,
    pub(crate) release: String,
    /// The features of [`KernelTable`](crate::kernel_table::KernelTable) that the kernel has.
    pub(crate) features: BTreeSet<String>,
    pub(crate) outcomes: BTreeMap<String, (Outcome, f64)>,
    /// Errors that are not a test's.
    pub(crate) faults: Vec<String>,
    pub(crate) console: Option<PathBuf>,
    pub(crate) took: Duration,
}

/// Prints the report and returns the number of failures.
pub(crate) fn print(tests: &[String], runs: &[KernelRun], took: Duration) -> usize {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header(["TEST"].into_iter().chain(runs.iter().map(|it| it.series.as_str())));
    let mut notes: Vec<String> = Vec::new();
    for test in tests {
        let mut row = vec![test.clone()];
        row.extend(runs.iter().map(|run| cell(test, run, &mut notes)));
        table.add_row(row);
    }
    let seconds = runs.iter().map(|it| format!("{:.0} s", it.took.as_secs_f64()));
    table.add_row([String::new()].into_iter().chain(seconds));
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    println!("\n{}", table.trim_fmt());
    for (number, note) in (1..).zip(&notes) {
        println!("({number}) not on this kernel: {note}");
    }

    let (mut passed, mut skipped, mut failures) = (0, 0, 0);
    for run in runs.iter().filter(|it| it.unavailable.is_none()) {
        let name = if run.release.is_empty() { &run.series } else { &run.release };
        let before = failures;
        for (test, (outcome, _)) in &run.outcomes {
            match outcome {
                Outcome::Passed => passed += 1,
                Outcome::Skipped(_) => skipped += 1,
                Outcome::Failed(output) => {
                    failures += 1;
                    println!("\n---- {test} on {name} ----\n{}", output.trim());
                }
            }
        }
        for fault in &run.faults {
            failures += 1;
            println!("\n{name}: {fault}");
        }
        let missing = tests.len() - run.outcomes.len();
        if missing > 0 {
            failures += 1;
            println!("\n{name}: {missing} tests did not end");
        }
        if let Some(console) = run.console.as_ref().filter(|_| failures > before) {
            println!("{name}: the kernel's log is in {}", console.display());
        }
    }
    println!("\n{passed} passed, {skipped} skipped, {failures} failures, in {:.0} s", took.as_secs_f64());
    failures
}

fn cell(test: &str, run: &KernelRun, notes: &mut Vec<String>) -> String {
    let mut note = |text: &str| {
        let known = notes.iter().position(|it| it == text);
        let number = known.unwrap_or_else(|| {
            notes.push(text.to_owned());
            notes.len() - 1
        });
        format!("({})", number + 1)
    };
    if let Some(reason) = &run.unavailable {
        return note(reason);
    }
    match run.outcomes.get(test) {
        Some((Outcome::Passed, seconds)) => format!("ok {seconds:.1}"),
        Some((Outcome::Skipped(reason), _)) => note(reason),
        Some((Outcome::Failed(_), _)) => "FAILED".to_owned(),
        None => "missing".to_owned(),
    }
}
