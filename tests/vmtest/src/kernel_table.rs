//! tests/KERNELS.md: the features that older kernels lack, and the tests that some kernels cannot run.
//! Invariant: the file is compared with the observations in both directions.

use std::{collections::BTreeSet, ops::Range};

use ::tests::requirements::version;
use anyhow::{Context as _, Result, bail};
use build_tools::test_suite::Outcome;

use crate::{
    plan::{HOST, short_name},
    report::KernelRun,
};

pub(crate) const FILE: &str = "tests/KERNELS.md";

/// A version of the kernel, major and minor.
type Version = (u32, u32);

#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct KernelTable {
    pub(crate) features: Vec<KernelFeature>,
    pub(crate) exceptions: Vec<Exception>,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct KernelFeature {
    pub(crate) name: String,
    /// The first version that has it.
    pub(crate) since: Version,
    /// The name that a kernel with the feature has in its BTF, if there is one.
    pub(crate) btf_name: Option<String>,
    /// The tests of the behavior with and without it.
    pub(crate) tests: Vec<String>,
}

/// A test that some kernels cannot run.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Exception {
    pub(crate) test: String,
    pub(crate) kernels: Range<Version>,
    /// The reason that the test must report.
    pub(crate) reason: String,
}

impl KernelTable {
    /// Reads the text of the file; the error names the line that cannot be parsed.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let mut table = Self::default();
        let mut section = "";
        for line in text.lines() {
            if let Some(title) = line.strip_prefix("## ") {
                section = title;
            }
            let Some(row) = line.strip_prefix("| ") else { continue };
            let cells: Vec<_> = row.trim_end_matches('|').split('|').map(str::trim).collect();
            if cells[0].is_empty() || ["feature", "test"].contains(&cells[0]) {
                continue;
            }
            let row = || format!("{FILE}: cannot parse {line:?}");
            match (section, &cells[..]) {
                ("Features", [name, since, btf_name, _, tests]) => table.features.push(KernelFeature {
                    name: name.replace('`', ""),
                    since: version(since).with_context(row)?,
                    btf_name: if btf_name.is_empty() {
                        None
                    } else {
                        Some(quoted(btf_name).pop().with_context(row)?)
                    },
                    tests: quoted(tests),
                }),
                ("Tests that some kernels cannot run", [test, kernels, reason]) => {
                    table.exceptions.push(Exception {
                        test: quoted(test).pop().with_context(row)?,
                        kernels: parse_kernels(kernels).with_context(row)?,
                        reason: (*reason).to_owned(),
                    });
                }
                _ => bail!(row()),
            }
        }
        Ok(table)
    }

    /// Errors for the tests that it names and that do not exist.
    pub(crate) fn unknown_tests(&self, names: &BTreeSet<&str>) -> Vec<String> {
        let named =
            self.features.iter().flat_map(|it| &it.tests).chain(self.exceptions.iter().map(|it| &it.test));
        named
            .filter(|it| !names.contains(it.as_str()))
            .map(|it| format!("{FILE} names the test {it}, which does not exist"))
            .collect()
    }

    /// The differences between the file and a run. A host may skip any test: it may lack what does not depend on the kernel.
    pub(crate) fn differences(&self, run: &KernelRun) -> Vec<String> {
        let mut differences = Vec::new();
        let Some(kernel) = version(&run.release) else {
            return vec![format!("cannot parse the kernel release {:?}", run.release)];
        };
        for KernelFeature { name, since, btf_name, .. } in &self.features {
            let Some(btf_name) = btf_name else { continue };
            let (has, should) = (run.features.contains(btf_name), kernel >= *since);
            if has != should {
                let has = if has { "has" } else { "lacks" };
                let (major, minor) = since;
                differences
                    .push(format!("{FILE} has {name} since {major}.{minor}, but this kernel {has} it"));
            }
        }
        for (test, (outcome, _)) in &run.outcomes {
            let test = short_name(test);
            let row = self.exceptions.iter().find(|it| it.test == test && it.kernels.contains(&kernel));
            match (outcome, row) {
                (Outcome::Passed, Some(_)) => differences
                    .push(format!("{FILE} lists {test} as impossible on this kernel, but it passed")),
                (Outcome::Skipped(_), _) if run.series == HOST => {}
                (Outcome::Skipped(reason), Some(row)) if row.reason != *reason => differences.push(format!(
                    "{test} was skipped because of {reason:?}; the reason in {FILE} is {:?}",
                    row.reason
                )),
                (Outcome::Skipped(reason), None) => {
                    differences.push(format!("{test} was skipped ({reason}), and {FILE} does not list it"));
                }
                _ => {}
            }
        }
        differences
    }
}

/// `before 6.6` or `since 7.1`.
fn parse_kernels(cell: &str) -> Option<Range<Version>> {
    match cell.split_once(' ')? {
        ("before", it) => Some((0, 0)..version(it)?),
        ("since", it) => Some(version(it)?..(u32::MAX, 0)),
        _ => None,
    }
}

/// The names in backquotes.
fn quoted(cell: &str) -> Vec<String> {
    cell.split('`').skip(1).step_by(2).map(ToOwned::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# Kernels\n\n## Features\n\n\
        | feature | since | seen as | without it | shown by |\n|---|---|---|---|---|\n\
        | helper `bpf_set_retval` | 5.18 | `BPF_FUNC_set_retval` | refuses later | `refuses`, `stays` |\n\
        | a number | 5.14 | | guesses | `refuses` |\n\n\
        ## Tests that some kernels cannot run\n\n| test | kernels | reason |\n|---|---|---|\n\
        | `needs_much` | before 6.6 | no TCX |\n";

    fn run(release: &str, features: &[&str], skipped: &[(&str, &str)], passed: &[&str]) -> KernelRun {
        let skipped = skipped.iter().map(|(test, why)| (*test, Outcome::Skipped((*why).to_owned())));
        let outcomes = skipped.chain(passed.iter().map(|test| (*test, Outcome::Passed)));
        KernelRun {
            release: release.to_owned(),
            features: features.iter().map(|&it| it.to_owned()).collect(),
            outcomes: outcomes.map(|(test, outcome)| (format!("suite::{test}"), (outcome, 1.0))).collect(),
            ..KernelRun::default()
        }
    }

    #[test]
    fn the_table_of_the_workspace_can_be_parsed() {
        let text = std::fs::read_to_string(build_tools::command::workspace().join(FILE)).unwrap();
        let table = KernelTable::parse(&text).unwrap();
        assert!(!table.features.is_empty());
    }

    #[test]
    fn every_cell_of_a_row_is_parsed() {
        let table = KernelTable::parse(TEXT).unwrap();
        assert_eq!(table.features[0].name, "helper bpf_set_retval");
        assert_eq!(table.features[0].since, (5, 18));
        assert_eq!(table.features[0].tests, ["refuses", "stays"]);
        assert_eq!(table.features[1].btf_name, None);
        assert_eq!(table.exceptions[0].kernels, (0, 0)..(6, 6));
        let since = KernelTable::parse(&TEXT.replace("before 6.6", "since 7.1")).unwrap();
        assert_eq!(since.exceptions[0].kernels.start, (7, 1));
        assert_eq!(table.unknown_tests(&BTreeSet::from(["refuses", "needs_much"])).len(), 1);
        let error = KernelTable::parse(&TEXT.replace("5.18", "always")).unwrap_err();
        assert!(error.to_string().contains("always"), "{error}");
    }

    #[test]
    fn every_difference_from_the_table_is_reported() {
        let table = KernelTable::parse(TEXT).unwrap();
        let retval = "BPF_FUNC_set_retval";
        let check = |run: KernelRun| table.differences(&run);
        assert!(check(run("5.10.0-46", &[], &[("needs_much", "no TCX")], &["refuses"])).is_empty());
        assert!(check(run("6.6.1", &[retval], &[], &["needs_much"])).is_empty());
        let on_host =
            KernelRun { series: HOST.to_owned(), ..run("5.10.0", &[], &[("refuses", "tired")], &[]) };
        assert!(check(on_host).is_empty());
        for (wrong, says) in [
            (run("5.10.0", &[retval], &[], &[]), "has it"),
            (run("6.1.0", &[], &[], &[]), "lacks it"),
            (run("5.10.0", &[], &[("refuses", "tired")], &[]), "does not list"),
            (run("6.12.0", &[retval], &[("needs_much", "no TCX")], &[]), "does not list"),
            (run("5.10.0", &[], &[("needs_much", "tired")], &[]), "tired"),
            (run("5.10.0", &[], &[], &["needs_much"]), "but it passed"),
        ] {
            let differences = check(wrong);
            assert!(differences.len() == 1 && differences[0].contains(says), "{says}: {differences:?}");
        }
    }
}
