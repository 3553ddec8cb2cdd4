//! What is printed of tests: a line for each, the output of those that failed, and a summary.

use std::{fs, time::Duration};

use build_tools::{
    command::workspace,
    test_suite::{Outcome, Test},
};

use super::schedule::Ended;

/// How many of the slowest tests are named.
const SLOWEST: usize = 20;
/// How many lines of a source file are shown at most of the expression that failed.
const MAX_LINES: usize = 8;

/// Prints a test that has ended, with its number among all.
pub(crate) fn print_one(number: usize, all: usize, Ended { test, outcome, took }: &Ended) {
    let word = match outcome {
        Outcome::Passed => "ok",
        Outcome::Skipped(_) => "skipped",
        Outcome::Failed(_) => "FAILED",
    };
    println!("{word:>12} {:7.2} s  {number:>4}/{all}  {}", took.as_secs_f64(), test.title());
    if let Outcome::Failed(output) = outcome {
        println!("{}", failure(test, output));
    }
}

/// The output of a test that failed, with the source lines at which it panicked: they say what it expected or waited for.
fn failure(test: &Test, output: &str) -> String {
    let mut text = format!("\n---- {} ----\n{}\n", test.title(), output.trim());
    for (file, line) in output.lines().filter_map(panic_location) {
        let source = fs::read_to_string(workspace().join(file)).unwrap_or_default();
        let statement = statement(&source, line);
        if !statement.is_empty() {
            text += &format!("---- {file}:{line}\n{statement}");
        }
    }
    text + "----\n"
}

/// File and line, from the first line of a panic's message.
fn panic_location(line: &str) -> Option<(&str, usize)> {
    let (_, location) = line.split_once(" panicked at ")?;
    let mut parts = location.split(':');
    Some((parts.next()?, parts.next()?.parse().ok()?))
}

/// The lines of a statement that begins at a line.
fn statement(source: &str, line: usize) -> String {
    let mut text = String::new();
    for line in source.lines().skip(line.saturating_sub(1)).take(MAX_LINES) {
        text += &format!("{line}\n");
        if line.ends_with(';') {
            break;
        }
    }
    text
}

/// Prints the slowest tests, those that were skipped, those that failed, and last the numbers.
pub(crate) fn print(all: &mut [Ended], took: Duration) {
    all.sort_by_key(|it| std::cmp::Reverse(it.took));
    println!("\nThe slowest tests:");
    for it in all.iter().take(SLOWEST) {
        println!("{:12.1} s  {}", it.took.as_secs_f64(), it.test.title());
    }
    let (mut passed, mut failed, mut skipped) = (0, Vec::new(), Vec::new());
    for it in all {
        match &it.outcome {
            Outcome::Passed => passed += 1,
            Outcome::Failed(_) => failed.push(it.test.title()),
            Outcome::Skipped(reason) => skipped.push(format!("{}: {reason}", it.test.title())),
        }
    }
    for (what, tests) in [("Skipped", &mut skipped), ("FAILED, with the output above", &mut failed)] {
        tests.sort();
        if !tests.is_empty() {
            println!("\n{what}:\n    {}", tests.join("\n    "));
        }
    }
    println!("\nin {:.0} s:", took.as_secs_f64());
    println!("{passed} passed, {} failed, {} skipped", failed.len(), skipped.len());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_shows_what_was_expected() {
        let line = "thread 'x' (12) panicked at tests/src/lib.rs:3:9:";
        assert_eq!(panic_location(line), Some(("tests/src/lib.rs", 3)));
        assert_eq!(panic_location("it was panicked"), None);
        let source = "fn x() {\n    wait(|| {\n        a == b\n    });\n    other();\n}\n";
        assert_eq!(statement(source, 2), "    wait(|| {\n        a == b\n    });\n");
        assert_eq!(statement(source, 9), "");
    }
}
