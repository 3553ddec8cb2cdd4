//! The report: lines and a summary for people, JUnit for machines.

use std::{
    fmt::{self, Write as _},
    time::Duration,
};

/// After so many failures in a row, the run ends.
const MAX_FAILURES_IN_A_ROW: usize = 10;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All answers were right.
    Passed { questions: usize },
    /// Some answers were wrong; with a description.
    Failed(String),
    /// The case is in the list of skips; with the reason.
    Skipped(String),
    /// The run had ended before the case.
    NotRun,
}

#[derive(Clone, Debug)]
pub struct CaseResult {
    pub name: String,
    pub outcome: Outcome,
    pub time: Duration,
}

impl CaseResult {
    #[must_use]
    pub fn is_failure(&self) -> bool {
        matches!(self.outcome, Outcome::Failed(_))
    }
}

/// A line with the outcome and the name, and lines with the wrong answers.
impl fmt::Display for CaseResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, outcome, time } = self;
        let seconds = time.as_secs_f64();
        match outcome {
            Outcome::Passed { questions } => {
                write!(f, "pass  {name}: {}, {seconds:.2} s", model::counted(*questions, "question"))
            }
            Outcome::Failed(reason) => {
                write!(f, "FAIL  {name}: {seconds:.2} s\n      {}", reason.replace('\n', "\n      "))
            }
            Outcome::Skipped(reason) => write!(f, "skip  {name}: {reason}"),
            Outcome::NotRun => write!(f, "      {name}: not run"),
        }
    }
}

#[derive(Clone, Debug, Default)]
pub struct Report(pub Vec<CaseResult>);

impl Report {
    /// Whether no case failed or was left out by the end of the run.
    #[must_use]
    pub fn is_success(&self) -> bool {
        !self.0.iter().any(|it| it.is_failure() || it.outcome == Outcome::NotRun)
    }

    /// Whether the last cases that were run have failed, so many in a row that the next would as well.
    pub(crate) fn has_only_failed_lately(&self) -> bool {
        let was_run = |it: &&CaseResult| !matches!(it.outcome, Outcome::Skipped(_) | Outcome::NotRun);
        let last = self.0.iter().rev().filter(was_run).take(MAX_FAILURES_IN_A_ROW);
        last.filter(|it| it.is_failure()).count() == MAX_FAILURES_IN_A_ROW
    }

    fn count(&self, is: fn(&Outcome) -> bool) -> usize {
        self.0.iter().filter(|it| is(&it.outcome)).count()
    }

    /// The names of failed cases, why the run has ended early, and the totals.
    #[must_use]
    pub fn summary(&self) -> String {
        let failures = self.0.iter().filter(|it| it.is_failure());
        let text: String = failures.map(|it| format!("FAIL  {}\n", it.name)).collect();
        let passed = self.count(|it| matches!(it, Outcome::Passed { .. }));
        let failed = self.count(|it| matches!(it, Outcome::Failed(_)));
        let skipped = self.count(|it| matches!(it, Outcome::Skipped(_)));
        let totals = format!("{passed} passed, {failed} failed, {skipped} skipped");
        match self.count(|it| *it == Outcome::NotRun) {
            0 => text + &totals + "\n",
            not_run => format!(
                "{text}{MAX_FAILURES_IN_A_ROW} cases in a row failed, so the run ended; --keep-going runs all\n\
                 {totals}, {not_run} not run\n"
            ),
        }
    }

    /// The results as a JUnit file.
    #[must_use]
    pub fn junit(&self) -> String {
        let mut text = format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuite name=\"backend-conformance\" tests=\"{}\" \
             failures=\"{}\" skipped=\"{}\">\n",
            self.0.len(),
            self.count(|it| matches!(it, Outcome::Failed(_))),
            self.count(|it| matches!(it, Outcome::Skipped(_) | Outcome::NotRun)),
        );
        for CaseResult { name, outcome, time } in &self.0 {
            let (class, case) = name.split_once('/').unwrap_or(("", name));
            let inner = match outcome {
                Outcome::Passed { .. } => String::new(),
                Outcome::Failed(reason) => format!("<failure message=\"{}\"/>", escaped(reason)),
                Outcome::Skipped(reason) => format!("<skipped message=\"{}\"/>", escaped(reason)),
                Outcome::NotRun => {
                    format!("<skipped message=\"not run: {MAX_FAILURES_IN_A_ROW} cases in a row failed\"/>")
                }
            };
            let _ = writeln!(
                text,
                "  <testcase classname=\"{}\" name=\"{}\" time=\"{:.3}\">{inner}</testcase>",
                escaped(class),
                escaped(case),
                time.as_secs_f64()
            );
        }
        text + "</testsuite>\n"
    }
}

/// For an attribute of XML, which has no other control characters.
fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for it in text.chars() {
        match it {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\n' => escaped.push_str("&#10;"),
            it if it.is_control() => escaped.push('\u{fffd}'),
            it => escaped.push(it),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(outcomes: impl IntoIterator<Item = Outcome>) -> Report {
        let result =
            |outcome| CaseResult { name: "x/y".to_owned(), outcome, time: Duration::from_millis(1500) };
        Report(outcomes.into_iter().map(result).collect())
    }

    fn failed() -> Outcome {
        Outcome::Failed("<a> & \"b\"\n\u{1}".to_owned())
    }

    #[test]
    fn what_a_backend_answers_does_not_break_the_file() {
        let report = report([failed()]);
        let text = report.junit();
        assert!(text.contains("failures=\"1\"") && text.contains("name=\"y\" time=\"1.500\""), "{text}");
        assert!(text.contains("message=\"&lt;a&gt; &amp; &quot;b&quot;&#10;\u{fffd}\""), "{text}");
        assert!(!report.is_success());
        assert_eq!(report.summary(), "FAIL  x/y\n0 passed, 1 failed, 0 skipped\n");
    }

    #[test]
    fn only_a_passed_case_interrupts_failures_in_a_row() {
        let failures = |count| std::iter::repeat_with(failed).take(count);
        let other = |it: Outcome| report(failures(5).chain([it]).chain(failures(5))).has_only_failed_lately();
        assert!(other(Outcome::Skipped("not here".to_owned())));
        assert!(other(Outcome::NotRun));
        assert!(!other(Outcome::Passed { questions: 1 }));
        assert!(!report(failures(9)).has_only_failed_lately());
    }

    #[test]
    fn cases_that_were_not_run_are_counted() {
        let report = report([Outcome::Passed { questions: 1 }, Outcome::NotRun]);
        assert!(!report.is_success());
        assert_eq!(
            report.summary(),
            "10 cases in a row failed, so the run ended; --keep-going runs all\n\
             1 passed, 0 failed, 0 skipped, 1 not run\n"
        );
        let text = report.junit();
        assert!(text.contains("tests=\"2\" failures=\"0\" skipped=\"1\""), "{text}");
        assert!(text.contains("<skipped message=\"not run: 10 cases in a row failed\"/>"), "{text}");
    }
}
