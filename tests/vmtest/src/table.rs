//! tests/KERNELS.md: what older kernels lack, and which tests some kernels cannot run.
//! The one rule: what it says is compared with what was seen, in both directions.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result, bail};

/// Where it lies in the workspace.
pub(crate) const FILE: &str = "tests/KERNELS.md";

/// A version of the kernel, as far as features go by it.
pub(crate) type Version = (u32, u32);

/// What the file says.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Table {
    pub(crate) features: Vec<Feature>,
    pub(crate) exceptions: Vec<Exception>,
}

/// Something that a kernel has or lacks.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Feature {
    pub(crate) name: String,
    /// The first version that has it.
    pub(crate) since: Version,
    /// The name in the kernel's BTF that is there if the feature is; none if nothing there tells.
    pub(crate) seen_as: Option<String>,
    /// The tests that hold what is done with it and without it.
    pub(crate) shown_by: Vec<String>,
}

/// A test that some kernels cannot run.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Exception {
    pub(crate) test: String,
    pub(crate) kernels: Kernels,
    /// What the test must say.
    pub(crate) reason: String,
}

/// Some kernels.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Kernels {
    Before(Version),
    Since(Version),
}

impl Kernels {
    fn parse(cell: &str) -> Option<Self> {
        let before = cell.strip_prefix("before ").map(|it| version(it).map(Self::Before));
        before.or_else(|| cell.strip_prefix("since ").map(|it| version(it).map(Self::Since)))?
    }

    fn include(&self, kernel: Version) -> bool {
        match self {
            Self::Before(version) => kernel < *version,
            Self::Since(version) => kernel >= *version,
        }
    }
}

/// What was seen on one kernel.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) release: String,
    pub(crate) features: BTreeSet<String>,
    pub(crate) skipped: BTreeMap<String, String>,
    pub(crate) passed: BTreeSet<String>,
}

impl Table {
    /// Reads the text of the file.
    ///
    /// # Errors
    ///
    /// The line that is not understood.
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
            let row = || format!("{FILE} is not understood: {line:?}");
            match (section, &cells[..]) {
                ("Features", [name, since, seen_as, _, shown_by]) => table.features.push(Feature {
                    name: name.replace('`', ""),
                    since: version(since).with_context(row)?,
                    seen_as: if seen_as.is_empty() {
                        None
                    } else {
                        Some(quoted(seen_as).pop().with_context(row)?)
                    },
                    shown_by: quoted(shown_by),
                }),
                ("Tests that some kernels cannot run", [test, kernels, reason]) => {
                    table.exceptions.push(Exception {
                        test: quoted(test).pop().with_context(row)?,
                        kernels: Kernels::parse(kernels).with_context(row)?,
                        reason: (*reason).to_owned(),
                    });
                }
                _ => bail!(row()),
            }
        }
        Ok(table)
    }

    /// The tests that it names and that there are none of.
    pub(crate) fn unknown_tests(&self, names: &BTreeSet<&str>) -> Vec<String> {
        let named =
            self.features.iter().flat_map(|it| &it.shown_by).chain(self.exceptions.iter().map(|it| &it.test));
        named
            .filter(|it| !names.contains(it.as_str()))
            .map(|it| format!("{FILE} names a test that there is not: {it}"))
            .collect()
    }

    /// Where it and what was seen on a kernel differ.
    pub(crate) fn differences(&self, seen: &Seen) -> Vec<String> {
        let mut differences = Vec::new();
        let Some(kernel) = version(&seen.release) else {
            return vec![format!("{:?} is no release of a kernel", seen.release)];
        };
        for Feature { name, since, seen_as, .. } in &self.features {
            let Some(seen_as) = seen_as else { continue };
            let (has, should) = (seen.features.contains(seen_as), kernel >= *since);
            if has != should {
                let has = if has { "has" } else { "has not" };
                let (major, minor) = since;
                differences.push(format!(
                    "{FILE} says {name} is there since {major}.{minor}, but this kernel {has} it"
                ));
            }
        }
        for (test, reason) in &seen.skipped {
            let row = self.exceptions.iter().find(|it| it.test == *test && it.kernels.include(kernel));
            match row {
                Some(row) if row.reason == *reason => {}
                Some(row) => differences
                    .push(format!("{test} is skipped for {reason:?}, {FILE} says {:?}", row.reason)),
                None => {
                    differences.push(format!("{test} is skipped ({reason}), and {FILE} knows nothing of it"));
                }
            }
        }
        let cannot = |it: &&Exception| it.kernels.include(kernel) && seen.passed.contains(&it.test);
        for row in self.exceptions.iter().filter(cannot) {
            differences.push(format!("{FILE} says {} cannot run here, but it passed", row.test));
        }
        differences
    }
}

/// The names in backquotes.
fn quoted(cell: &str) -> Vec<String> {
    cell.split('`').skip(1).step_by(2).map(ToOwned::to_owned).collect()
}

/// The first two numbers of a release.
pub(crate) fn version(text: &str) -> Option<Version> {
    let mut numbers = text.split(|it: char| !it.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
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

    fn seen(release: &str, features: &[&str], skipped: &[(&str, &str)], passed: &[&str]) -> Seen {
        Seen {
            release: release.to_owned(),
            features: features.iter().map(|&it| it.to_owned()).collect(),
            skipped: skipped.iter().map(|&(test, why)| (test.to_owned(), why.to_owned())).collect(),
            passed: passed.iter().map(|&it| it.to_owned()).collect(),
        }
    }

    #[test]
    fn the_table_in_the_workspace_is_understood() {
        let text = std::fs::read_to_string(build_tools::command::workspace().join(FILE)).unwrap();
        let table = Table::parse(&text).unwrap();
        assert!(!table.features.is_empty());
    }

    #[test]
    fn a_row_is_read_as_it_is_written() {
        let table = Table::parse(TEXT).unwrap();
        assert_eq!(table.features[0].name, "helper bpf_set_retval");
        assert_eq!(table.features[0].since, (5, 18));
        assert_eq!(table.features[0].shown_by, ["refuses", "stays"]);
        assert_eq!(table.features[1].seen_as, None);
        assert_eq!(table.exceptions[0].kernels, Kernels::Before((6, 6)));
        let since = Table::parse(&TEXT.replace("before 6.6", "since 7.1")).unwrap();
        assert!(!since.exceptions[0].kernels.include((7, 0)) && since.exceptions[0].kernels.include((7, 1)));
        assert_eq!(table.unknown_tests(&BTreeSet::from(["refuses", "needs_much"])).len(), 1);
        let error = Table::parse(&TEXT.replace("5.18", "always")).unwrap_err();
        assert!(error.to_string().contains("always"), "{error}");
    }

    #[test]
    fn whatever_differs_from_the_table_is_said() {
        let table = Table::parse(TEXT).unwrap();
        let retval = "BPF_FUNC_set_retval";
        let check = |seen: Seen| table.differences(&seen);
        assert!(check(seen("5.10.0-46", &[], &[("needs_much", "no TCX")], &["refuses"])).is_empty());
        assert!(check(seen("6.6.1", &[retval], &[], &["needs_much"])).is_empty());
        for (wrong, says) in [
            (seen("5.10.0", &[retval], &[], &[]), "has it"),
            (seen("6.1.0", &[], &[], &[]), "has not it"),
            (seen("5.10.0", &[], &[("refuses", "tired")], &[]), "knows nothing"),
            (seen("6.12.0", &[retval], &[("needs_much", "no TCX")], &[]), "knows nothing"),
            (seen("5.10.0", &[], &[("needs_much", "tired")], &[]), "tired"),
            (seen("5.10.0", &[], &[], &["needs_much"]), "but it passed"),
        ] {
            let differences = check(wrong);
            assert!(differences.len() == 1 && differences[0].contains(says), "{says}: {differences:?}");
        }
    }
}
