//! The report: a table for people, JUnit for machines.

use std::{fmt::Write as _, time::Duration};

/// The outcome of a case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All answers were right.
    Passed {
        /// The number of questions.
        questions: usize,
    },
    /// Some answers were wrong; with a description.
    Failed(String),
    /// The case was not run; with the reason.
    Skipped(String),
}

#[derive(Clone, Debug)]
pub struct CaseResult {
    pub name: String,
    pub outcome: Outcome,
    pub time: Duration,
}

impl CaseResult {
    /// Whether the case failed.
    #[must_use]
    pub fn is_failure(&self) -> bool {
        matches!(self.outcome, Outcome::Failed(_))
    }
}

/// The results of all cases.
#[derive(Clone, Debug, Default)]
pub struct Report(pub Vec<CaseResult>);

impl Report {
    /// Whether no case failed.
    #[must_use]
    pub fn is_success(&self) -> bool {
        !self.0.iter().any(CaseResult::is_failure)
    }

    /// A line per case, with what was wrong below it, and the totals.
    #[must_use]
    pub fn table(&self) -> String {
        let mut text = String::new();
        let width = self.0.iter().map(|it| it.name.len()).max().unwrap_or_default();
        let [mut passed, mut failed, mut skipped] = [0_usize; 3];
        for CaseResult { name, outcome, time } in &self.0 {
            let seconds = time.as_secs_f64();
            // Writing to a text does not fail.
            let _ = match outcome {
                Outcome::Passed { questions } => {
                    passed += 1;
                    writeln!(
                        text,
                        "passed   {name:width$}  {seconds:6.2} s  {}",
                        model::counted(*questions, "question")
                    )
                }
                Outcome::Skipped(reason) => {
                    skipped += 1;
                    writeln!(text, "skipped  {name:width$}            {reason}")
                }
                Outcome::Failed(reason) => {
                    failed += 1;
                    let reason = reason.replace('\n', "\n         ");
                    writeln!(text, "FAILED   {name:width$}  {seconds:6.2} s\n         {reason}")
                }
            };
        }
        let _ = writeln!(text, "{passed} passed, {failed} failed, {skipped} skipped");
        text
    }

    /// The results as a JUnit file.
    #[must_use]
    pub fn junit(&self) -> String {
        let count = |is: fn(&Outcome) -> bool| self.0.iter().filter(|it| is(&it.outcome)).count();
        let mut text = format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuite name=\"backend-conformance\" tests=\"{}\" \
             failures=\"{}\" skipped=\"{}\">\n",
            self.0.len(),
            count(|it| matches!(it, Outcome::Failed(_))),
            count(|it| matches!(it, Outcome::Skipped(_))),
        );
        for CaseResult { name, outcome, time } in &self.0 {
            let (class, case) = name.split_once('/').unwrap_or(("", name));
            let inner = match outcome {
                Outcome::Passed { .. } => String::new(),
                Outcome::Failed(reason) => format!("<failure message=\"{}\"/>", escaped(reason)),
                Outcome::Skipped(reason) => format!("<skipped message=\"{}\"/>", escaped(reason)),
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

    #[test]
    fn what_a_backend_answers_does_not_break_the_file() {
        let outcome = Outcome::Failed("<a> & \"b\"\n\u{1}".to_owned());
        let case = CaseResult { name: "x/y".to_owned(), outcome, time: Duration::from_millis(1500) };
        let report = Report(vec![case]);
        let text = report.junit();
        assert!(text.contains("failures=\"1\"") && text.contains("name=\"y\" time=\"1.500\""), "{text}");
        assert!(text.contains("message=\"&lt;a&gt; &amp; &quot;b&quot;&#10;\u{fffd}\""), "{text}");
        assert!(!report.is_success() && report.table().ends_with("0 passed, 1 failed, 0 skipped\n"));
    }
}
