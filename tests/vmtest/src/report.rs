//! What came out: kernel × test, and whatever went wrong.
//! The one rule: what failed is shown with what it said and where its kernel's log lies.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use comfy_table::{CellAlignment, Table, presets};

use crate::guest::Outcome;

/// One kernel of the matrix.
pub(crate) enum Column {
    /// There is no package of it.
    NotOnOffer { series: String, reason: String },
    /// It was tested.
    Ran(Ran),
}

/// What became of the tests on a kernel.
#[derive(Default)]
pub(crate) struct Ran {
    pub(crate) series: String,
    pub(crate) release: String,
    pub(crate) outcomes: BTreeMap<String, (Outcome, f64)>,
    /// What went wrong besides the tests.
    pub(crate) faults: Vec<String>,
    pub(crate) console: Option<PathBuf>,
    pub(crate) took: Duration,
}

/// Prints everything, and gives back how many things went wrong.
pub(crate) fn print(tests: &[String], columns: &[Column], took: Duration) -> usize {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    let title = |it: &Column| match it {
        Column::NotOnOffer { series, .. } => series.clone(),
        Column::Ran(ran) => ran.series.clone(),
    };
    table.set_header(std::iter::once("TEST".to_owned()).chain(columns.iter().map(title)));
    let mut notes: Vec<String> = Vec::new();
    for test in tests {
        let mut row = vec![test.clone()];
        for column in columns {
            row.push(cell(test, column, &mut notes));
        }
        table.add_row(row);
    }
    let time = |it: &Column| match it {
        Column::NotOnOffer { .. } => String::new(),
        Column::Ran(ran) => format!("{:.0} s", ran.took.as_secs_f64()),
    };
    table.add_row(std::iter::once(String::new()).chain(columns.iter().map(time)));
    for index in 1..=columns.len() {
        if let Some(column) = table.column_mut(index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    println!();
    for line in table.lines() {
        println!("{}", line.trim_end());
    }
    for (number, note) in (1..).zip(&notes) {
        println!("({number}) not on this kernel: {note}");
    }

    let mut faults = 0;
    let (mut passed, mut skipped) = (0, 0);
    for column in columns {
        let Column::Ran(ran) = column else { continue };
        let name = if ran.release.is_empty() { &ran.series } else { &ran.release };
        for (test, (outcome, _)) in &ran.outcomes {
            match outcome {
                Outcome::Passed => passed += 1,
                Outcome::Skipped(_) => skipped += 1,
                Outcome::Failed(said) => {
                    faults += 1;
                    println!("\n---- {test} on {name} ----\n{}", said.trim());
                }
            }
        }
        let lost = tests.len() - ran.outcomes.len();
        for fault in &ran.faults {
            println!("\n{name}: {fault}");
        }
        faults += ran.faults.len();
        if lost > 0 {
            faults += 1;
            println!("\n{name}: {lost} tests did not come to an end");
        }
        let is_wrong =
            lost > 0 || !ran.faults.is_empty() || ran.outcomes.values().any(|it| is_failure(&it.0));
        if let (true, Some(console)) = (is_wrong, &ran.console) {
            println!("{name}: the kernel's log is in {}", console.display());
        }
    }
    println!("\n{passed} passed, {skipped} skipped, {faults} wrong, in {:.0} s", took.as_secs_f64());
    faults
}

fn is_failure(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Failed(_))
}

fn cell(test: &str, column: &Column, notes: &mut Vec<String>) -> String {
    let mut note = |text: &str| {
        let known = notes.iter().position(|it| it == text);
        let number = known.unwrap_or_else(|| {
            notes.push(text.to_owned());
            notes.len() - 1
        });
        format!("({})", number + 1)
    };
    match column {
        Column::NotOnOffer { reason, .. } => note(&format!("not on offer: {reason}")),
        Column::Ran(ran) => match ran.outcomes.get(test) {
            Some((Outcome::Passed, seconds)) => format!("ok {seconds:.1}"),
            Some((Outcome::Skipped(reason), _)) => note(reason),
            Some((Outcome::Failed(_), _)) => "FAILED".to_owned(),
            None => "lost".to_owned(),
        },
    }
}
